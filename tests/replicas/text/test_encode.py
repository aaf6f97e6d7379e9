"""Added tokens are found wherever one begins; long prompts have the same tokens, and nobody waits for them."""

import asyncio
import re
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waiting import work

from holdfast.replicas.config import POCKET, EngineConfig
from holdfast.replicas.errors import ContextLengthError, InvalidRequestError, UnavailableError
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.weights import load_tokenizer
from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.replicas.text import conversation
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.text.encode import Encoder, read_added_tokens
from holdfast.replicas.types import salted

CONTENT = st.text("<|a>\n.", min_size=1, max_size=5)


@given(st.sets(CONTENT, max_size=12), st.text("<|a>\n. ", max_size=60), st.booleans())
def test_the_longest_token_is_found_wherever_one_begins(contents: set[str], text: str, space: bool) -> None:
    tokenizer = Tokenizer(models.BPE({}, []))
    tokenizer.add_special_tokens([AddedToken(content, rstrip=space) for content in sorted(contents)])
    added = read_added_tokens(tokenizer)
    long = {content for content in contents if len(content) > 1}
    assert spans(added.all, text) == spans(one_by_one(contents), text)
    assert spans(added.control_word, text) == spans(one_by_one(long), text)
    assert spans(added.control, text) == spans(one_by_one(long, r"\s*" if space else ""), text)


def one_by_one(contents: set[str], then: str = "") -> re.Pattern[str] | None:
    tried = [re.escape(content) + then for content in sorted(contents, key=lambda content: (-len(content), content))]
    return re.compile("|".join(tried)) if tried else None


def spans(pattern: re.Pattern[str] | None, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in pattern.finditer(text)] if pattern is not None else []


@pytest.fixture(autouse=True)
def from_sixty_characters_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "LONG", 60)


@pytest.fixture
def side(qwen_like: Any) -> TextSide:
    return TextSide(qwen_like, EngineConfig(context_length=1000))


def chat(text: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}])


def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[str]]:
    """Whether a text has been begun on the thread, what lets it go on, and what was begun."""
    begun, goes_on, texts = threading.Event(), threading.Event(), []
    encode = Encoder.encode

    def slow(self: Encoder, text: str, *options: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            texts.append(text)
            begun.set()
            goes_on.wait(60)
        return encode(self, text, *options, **named)

    monkeypatch.setattr(Encoder, "encode", slow)
    return begun, goes_on, texts


@pytest.mark.parametrize("text", ["the weather in Paris " * 20, "<|im_end|> is text here, " * 9, "short"])
async def test_a_long_prompt_has_the_tokens_of_any_other(qwen_like: Any, side: TextSide, text: str) -> None:
    plain = TextSide(qwen_like, EngineConfig())
    for prompt in (chat(text), RawPrompt(text), chat(text + text)):
        found, wanted = await side.encoded(prompt), plain.encode(prompt)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert (found.text, found.mark) == (wanted.text, wanted.mark)
    assert side.stats == plain.stats


async def test_others_do_not_wait_for_it(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, _ = held(monkeypatch)
    long = asyncio.create_task(side.encoded(chat("a long story " * 20)))
    await asyncio.to_thread(begun.wait, 60)
    assert len((await side.encoded(chat("hello"))).tokens)
    assert not long.done()
    goes_on.set()
    assert len((await long).tokens) > 60


async def test_they_come_one_at_a_time_though_somebody_leaves(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, texts = held(monkeypatch)
    first, second = (asyncio.create_task(side.encoded(chat(f"story {i} " * 30))) for i in range(2))
    await asyncio.to_thread(begun.wait, 60)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    for _ in range(1000):  # turns in which the second might begin
        await asyncio.sleep(0)
    assert len(texts) == 1
    goes_on.set()
    assert len((await second).tokens)


async def test_a_tenants_text_waits_for_one_of_each_other_tenants_and_not_for_all(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, texts = held(monkeypatch)
    prompts = [RawPrompt(f"{tenant} {i} " * 60) for tenant, n in (("a", 6), ("b", 2), ("c", 1)) for i in range(n)]
    scopes = [prompt.content[0] for prompt in prompts]
    scopes[3] = salted("a", "x")  # no salt gives another turn
    whole = Encoder.whole
    monkeypatch.setattr(Encoder, "whole", lambda self, text: (self.encode(text), whole(self, text))[1])
    asked = [side.encoded(prompt, scope) for prompt, scope in zip(prompts, scopes, strict=True)]
    first = asyncio.create_task(asked[0])
    await asyncio.to_thread(begun.wait, 60)
    others = asyncio.gather(*asked[1:])
    asyncio.get_running_loop().call_soon(goes_on.set)  # once all of them have been asked for
    await asyncio.gather(first, others)
    assert [text[:3] for text in texts] == ["a 0", "a 1", "b 0", "c 0", "a 2", "b 1", "a 3", "a 4", "a 5"]


async def test_what_can_never_fit_is_refused_without_being_tokenized(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "encode", None)
    longest = max(map(len, side.tokenizer.get_vocab()))
    for prompt in (chat("x" * longest * 5000), RawPrompt("x" * longest * 5000)):
        with pytest.raises(ContextLengthError, match=r"length is 1000 tokens; .* more than 12\d\d tokens"):
            await side.encoded(prompt)


def test_the_event_loop_goes_on_beside_a_million_characters() -> None:
    side = TextSide(load_tokenizer(inspect_model(POCKET)), EngineConfig(context_length=1 << 20))

    async def longest_wait(number: int) -> float:
        """As a share of the time that the text took."""
        text = f"{number} {'the weather in Paris is mild, said 42 people; ' * 21_000}"
        turns = [time.perf_counter()]

        async def tick() -> None:
            while True:
                await work(0.001)
                turns.append(time.perf_counter())

        ticking = asyncio.create_task(tick())
        assert len((await side.encoded(chat(text))).tokens) > 500_000
        ticking.cancel()
        turns.append(time.perf_counter())
        return max(after - before for before, after in pairwise(turns)) / (turns[-1] - turns[0])

    # Other work on the machine makes a wait longer; holding the GIL makes all of them as long as the text takes.
    assert any(asyncio.run(longest_wait(number)) < 0.5 for number in range(4))


async def test_those_that_wait_when_it_closes_are_refused(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, texts = held(monkeypatch)
    asked = [asyncio.create_task(side.encoded(chat(f"story {i} " * 30))) for i in range(3)]
    await asyncio.to_thread(begun.wait, 60)
    side.close()
    asked[1].cancel()
    goes_on.set()
    first, left, waited = await asyncio.gather(*asked, return_exceptions=True)
    assert not isinstance(first, BaseException)
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(waited, UnavailableError)
    assert waited.message == "the engine is not running"
    for prompt in (chat("a later story " * 30), RawPrompt("another " * 30)):
        with pytest.raises(UnavailableError, match="the engine is not running"):
            await side.encoded(prompt)
    assert len(texts) == 1


UNKNOWN = "\U0010fffd\U0001f600"


def words(**changed: Any) -> Tokenizer:
    """A tokenizer of a word and what is no word, white space between them being nothing; or as `changed`."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value in changed.items():
        setattr(tokenizer, name, value)
    return tokenizer


def letters(unknown: str = "", normalizer: Any = None, added: AddedToken | None = None, **options: Any) -> Tokenizer:
    """A token for each character but those in `unknown`, which have none or one for a whole run, see `options`."""
    known = [char for char in "\x00helox7. \n\t\x01\u0301\u200b\U0010fffd\U0001f600" if char not in unknown]
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(known)}, [], **options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if added is not None:
        tokenizer.add_special_tokens([added])
    return tokenizer


def cut_off() -> Tokenizer:
    tokenizer = letters()
    tokenizer.enable_truncation(100)
    return tokenizer


@pytest.mark.parametrize(
    ("backend", "between"),
    [
        (words(), " "),
        (words(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "\n"),
        (words(pre_tokenizer=pre_tokenizers.BertPreTokenizer()), "z"),
        (letters(UNKNOWN, unk_token="\x00", fuse_unk=True), "\U0001f600"),
        (letters(UNKNOWN), "\U0001f600"),
        (letters(normalizer=normalizers.Replace(" ", "")), " "),
        (letters(normalizer=normalizers.StripAccents()), "\u0301"),
        (letters(normalizer=normalizers.Nmt()), "\x01"),
        (letters(added=AddedToken("<mask>", lstrip=True)), " "),
        (letters(added=AddedToken("<end>", rstrip=True)), " "),
        (cut_off(), "x"),
    ],
)
def test_what_is_dropped_or_squeezed_refuses_no_text(backend: Tokenizer, between: str) -> None:
    side = TextSide(PreTrainedTokenizerFast(tokenizer_object=backend), EngineConfig(context_length=100))
    text = f"hello{between * 100_000}hello"
    tokens = asyncio.run(side.encoded(RawPrompt(text))).tokens
    assert tokens.tolist() == backend.encode(text).ids


def test_where_nothing_is_dropped_or_squeezed_it_is_refused(tokenizers: list[Any]) -> None:
    for tokenizer in (*tokenizers, PreTrainedTokenizerFast(tokenizer_object=letters())):
        side = TextSide(tokenizer, EngineConfig(context_length=100))
        with pytest.raises(ContextLengthError):
            asyncio.run(side.encoded(RawPrompt(" " * 100_000)))


def test_what_is_dropped_altogether_is_an_empty_prompt() -> None:
    side = TextSide(PreTrainedTokenizerFast(tokenizer_object=words()), EngineConfig(context_length=100))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        asyncio.run(side.encoded(RawPrompt(" " * 100_000)))
