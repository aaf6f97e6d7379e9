"""Long prompts: the same tokens, and nobody waits for them."""

import asyncio
import threading
from typing import Any

import pytest

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ContextLengthError
from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.replicas.text import conversation
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.text.encoder import Encoder


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
            goes_on.wait(30)
        return encode(self, text, *options, **named)

    monkeypatch.setattr(Encoder, "encode", slow)
    return begun, goes_on, texts


@pytest.mark.parametrize("text", ["the weather in Paris " * 20, "<|im_end|> is text here, " * 9, "short"])
def test_a_long_prompt_has_the_tokens_of_any_other(qwen_like: Any, side: TextSide, text: str) -> None:
    async def main() -> None:
        plain = TextSide(qwen_like, EngineConfig())
        for prompt in (chat(text), RawPrompt(text), chat(text + text)):
            found, wanted = await side.encoded(prompt), plain.encode(prompt)
            assert found.tokens.tolist() == wanted.tokens.tolist()
            assert (found.text, found.mark) == (wanted.text, wanted.mark)
        assert side.stats == plain.stats

    asyncio.run(main())


def test_others_do_not_wait_for_it(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        begun, goes_on, _ = held(monkeypatch)
        long = asyncio.create_task(side.encoded(chat("a long story " * 20)))
        await asyncio.to_thread(begun.wait, 30)
        assert len((await side.encoded(chat("hello"))).tokens)
        assert not long.done()
        goes_on.set()
        assert len((await long).tokens) > 60

    asyncio.run(main())


def test_they_come_one_at_a_time_though_somebody_leaves(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        begun, goes_on, texts = held(monkeypatch)
        first, second = (asyncio.create_task(side.encoded(chat(f"story {i} " * 30))) for i in range(2))
        await asyncio.to_thread(begun.wait, 30)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert len(texts) == 1
        goes_on.set()
        assert len((await second).tokens)

    asyncio.run(main())


def test_what_can_never_fit_is_refused_without_being_tokenized(side: TextSide, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(Encoder, "encode", None)
        longest = max(map(len, side.tokenizer.get_vocab()))
        for prompt in (chat("x" * longest * 5000), RawPrompt("x" * longest * 5000)):
            with pytest.raises(ContextLengthError, match=r"more than 12\d\d tokens; the context has room for 1000"):
                await side.encoded(prompt)

    asyncio.run(main())
