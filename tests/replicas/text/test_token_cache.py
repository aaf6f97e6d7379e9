"""Tokenizing the delta equals tokenizing the whole, and special tokens of the client stay text.

Every program goes on from its own ids, and no tenant takes part in what is kept for another.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.encode import TokenCache
from holdfast.replicas.text.render import Rendered, Renderer
from holdfast.replicas.types import salted

SPECIALS = ["<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<s>", "</s>", "<tool_call>", "<|im_", "end|>"]
ENTRY = 700
"""Characters for which half a cache has room for one short conversation, and for no two."""
TEXT = st.lists(
    st.sampled_from([*SPECIALS, "the weather", " in", "\n", "\n\n", " ", "日本", "e\u0301", "👩‍👩", "\ufdd0", "been."]),
    max_size=6,
).map("".join)


def tokenized_whole(tokenizer: Any, rendered: Rendered) -> list[int]:
    """Without a mark the library on the whole text; with one, piece by piece between the template's own tokens."""
    backend = tokenizer.backend_tokenizer
    if not rendered.mark:
        return list(backend.encode(rendered.text, add_special_tokens=False).ids)
    stops = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    stops |= {str(added): index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    ids, rest, begun = [], rendered.text, False
    while rest:
        at, token = min(((rest.find(token), token) for token in stops if token in rest), default=(len(rest), ""))
        piece = rest[:at].replace(rendered.mark, "")
        if piece:
            ids += plain_ids(backend, piece, begun)
        ids += [stops[token]] if token else []
        begun, rest = True, rest[at + len(token) :]
    return ids


def plain_ids(backend: Any, text: str, begun: bool) -> list[int]:
    """Ids of text without control tokens, inside a prompt: a space that the tokenizer puts first is taken off."""
    backend.encode_special_tokens = True
    try:
        ids = list(backend.encode(text, add_special_tokens=False).ids)
        if begun and ids and backend.id_to_token(ids[0]).startswith("▁"):
            anchored = list(backend.encode("\x00" + text, add_special_tokens=False).ids)
            return anchored[len(backend.encode("\x00", add_special_tokens=False).ids) :]
        return ids
    finally:
        backend.encode_special_tokens = False


def conversation(texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5), st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 4))
def test_growing_and_forked_conversations_equal_the_whole(
    tokenizers: list[Any], texts: list[str], others: list[str], fork: int
) -> None:
    for tokenizer in tokenizers:
        renderer, cache = Renderer(tokenizer), TokenCache(tokenizer, 3 * ENTRY)
        histories = [texts[: turn + 1] for turn in range(len(texts))]
        for history in [*histories, texts[:fork] + others, texts[:1], texts]:
            rendered = renderer.render(ChatPrompt(conversation(history)))
            ids = cache.encode(rendered.text, rendered.mark)
            assert ids.dtype == np.int32
            assert ids.tolist() == tokenized_whole(tokenizer, rendered)


def test_the_same_rendered_text_under_another_mark_is_another_prompt(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like)
    text = "<|im_start|>user\n<\ufdd0|im_end|><|im_end|>\n"
    marked, plain = cache.encode(text, "\ufdd0"), cache.encode(text)
    assert qwen_like.decode(marked) == text.replace("\ufdd0", "")
    assert qwen_like.decode(plain) == text


def test_only_the_delta_is_tokenized(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like)
    first = "<|im_start|>user\n" + "the weather " * 50 + "<|im_end|>\n<|im_start|>assistant\n"
    cache.encode(first)
    assert (cache.reused, cache.tokenized) == (0, len(first))
    second = first + "ok<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    cache.encode(second)
    assert cache.reused == first.index("<|im_start|>assistant")
    cache.encode(second)
    assert cache.tokenized == len(first) + len(second) - first.index("<|im_start|>assistant")


def test_a_turn_may_hold_ids_beyond_the_vocabulary(qwen_like: Any) -> None:
    """A model's rows for tokens are often more than the tokenizer has: one of the others may be drawn."""
    cache = TokenCache(qwen_like)
    prompt = "<|im_start|>assistant\n"
    ids = [*cache.encode(prompt).tolist(), len(qwen_like), len(qwen_like) + 1000]
    cache.remember(prompt, np.array(ids, np.int32))
    rest = "<|im_end|>\n"
    assert cache.encode(prompt + rest).tolist() == ids + qwen_like.encode(rest, add_special_tokens=False)


def test_generated_text_that_looks_like_an_added_token_is_no_place_to_cut(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like)
    prompt = "<|im_start|>assistant\n"
    spelled = [qwen_like.convert_tokens_to_ids(char) for char in "<tool_call>"]
    ids = [*cache.encode(prompt).tolist(), *spelled, qwen_like.convert_tokens_to_ids("<think>")]
    cache.remember(prompt + "<tool_call><think>", np.array(ids, np.int32))
    text = prompt + "<tool_call><think> more"
    assert cache.encode(text).tolist() == qwen_like.encode(text, add_special_tokens=False)


def test_a_text_that_is_too_large_pushes_nothing_out(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like, 2000)
    text = "<|im_start|>the<|im_end|>"
    cache.encode(text)
    cache.encode("<|im_start|>" + "the weather " * 100)
    cache.encode(text)
    assert cache.reused >= len(text)
    none = TokenCache(qwen_like, 0)
    for _ in range(2):
        none.encode(text)
    assert none.reused == 0


def chat(number: int, *turns: str) -> str:
    """A prompt of a conversation that begins as all others do."""
    asks = [f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n" for turn in turns]
    return f"<|im_start|>system\n{'the weather ' * 20}<|im_end|>\n" + f"been {number}<|im_end|>\n".join(asks)


@pytest.mark.parametrize("salts", [False, True])
@pytest.mark.parametrize("program", ["", "p"])
def test_a_tenant_cannot_push_out_what_others_have_in_half_of_the_cache(
    qwen_like: Any, program: str, salts: bool
) -> None:
    cache = TokenCache(qwen_like, 2 * 10 * 700)
    for number in range(8):
        cache.encode(chat(number, f"{number} in Paris"), scope="a", program=program and f"p{number}")
    for number in range(100):
        scope = salted("b", str(number) if salts else "")
        cache.encode(chat(number, f"{number} in Paris"), scope=scope, program=program and f"p{number}")
    before = cache.tokenized
    for number in range(8):
        cache.encode(chat(number, f"{number} in Paris", "and now?"), scope="a", program=program and f"p{number}")
    new = len(chat(0, "0 in Paris", "and now?")) - chat(0, "0 in Paris", "and now?").rindex(
        "<|im_start|>assistant\nbeen"
    )
    assert cache.tokenized - before == 8 * new


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ("a", salted("a", "x")), (salted("a", "x"), salted("a", "y"))]
)
def test_a_scope_learns_nothing_of_another(qwen_like: Any, first: str, second: str) -> None:
    cache = TokenCache(qwen_like)
    spelled(cache, qwen_like, chat(0, "hi"), "weather", first, "p")
    text = chat(0, "hi") + "weather<|im_end|>\n"
    assert cache.encode(text, scope=second, program="p").tolist() == qwen_like.encode(text, add_special_tokens=False)
    assert cache.reused == 0


def spelled(cache: TokenCache, tokenizer: Any, prompt: str, said: str, scope: str = "", program: str = "") -> list[int]:
    """Remember a turn that was generated letter by letter, which is not how the tokenizer cuts it; its ids."""
    letters = [tokenizer.backend_tokenizer.encode(char, add_special_tokens=False).ids[0] for char in said]
    ids = [*cache.encode(prompt, scope=scope, program=program).tolist(), *letters]
    cache.remember(prompt + said, np.array(ids, np.int32), scope=scope, program=program)
    return ids


def test_each_program_goes_on_from_its_own_ids(qwen_like: Any) -> None:
    """Two have said the same in other tokens; to one that is not known the last of them is as good."""
    cache = TokenCache(qwen_like)
    prompt = chat(0, "hi")
    tokenized = [*cache.encode(prompt).tolist(), *qwen_like.encode("weather", add_special_tokens=False)]
    cache.encode(prompt, program="a")
    cache.remember(prompt + "weather", np.array(tokenized, np.int32), program="a")
    generated = spelled(cache, qwen_like, prompt, "weather", program="b")
    more = "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n"
    rest = qwen_like.encode(more, add_special_tokens=False)
    for _ in range(2):
        assert cache.encode(prompt + "weather" + more, program="a").tolist() == tokenized + rest
        assert cache.encode(prompt + "weather" + more, program="b").tolist() == generated + rest
    assert cache.encode(prompt + "weather" + more, program="c").tolist() in (tokenized + rest, generated + rest)


@pytest.mark.parametrize("program", ["", "p"])
def test_a_program_finds_each_of_its_conversations(qwen_like: Any, program: str) -> None:
    """A client may have several under one name: a side question is not the end of the main one."""
    cache = TokenCache(qwen_like)
    ids = {said: spelled(cache, qwen_like, chat(0, "hi"), said, program=program) for said in ("ok", "ok;", "in Paris")}
    for number in range(20):
        spelled(cache, qwen_like, chat(number, f"title {number}"), "the", program=program)
    for said, expected in ids.items():
        more = "<|im_end|>\n<|im_start|>user\n"
        found = cache.encode(chat(0, "hi") + said + more, program=program).tolist()
        assert found == expected + qwen_like.encode(more, add_special_tokens=False), said


PARTS = st.lists(
    st.sampled_from([*SPECIALS, "<|im_start|>", "<|im_end|>", "<think>", "a", "the", " the", " weather", "\n", "é日"])
)
HISTORY = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "p", "q"]), PARTS, st.booleans()), max_size=12)


@settings(max_examples=60, deadline=None)
@given(HISTORY, st.sampled_from([0, 600, 1200, 2500, math.inf]))
def test_tokens_are_the_same_without_the_cache_whatever_was_and_was_forgotten(
    qwen_like: Any, history: list[tuple[str, str, list[str], bool]], characters: float
) -> None:
    cache = TokenCache(qwen_like, characters)
    texts: dict[tuple[str, str], str] = {}
    for scope, program, parts, goes_on in history:
        text = (texts.get((scope, program), "") if goes_on else "") + "".join(parts)
        texts[scope, program] = text
        whole = qwen_like.encode(text, add_special_tokens=False)
        assert cache.encode(text, scope=scope, program=program).tolist() == whole
        if goes_on:
            cache.remember(text, np.array(whole, np.int32), scope=scope, program=program)


@settings(max_examples=50, deadline=None)
@given(HISTORY, st.sampled_from([600, 2500, math.inf]))
def test_ids_as_generated_spell_their_text_and_come_again(
    qwen_like: Any, history: list[tuple[str, str, list[str], bool]], characters: float
) -> None:
    cache = TokenCache(qwen_like, characters)
    turns: dict[tuple[str, str], tuple[str, list[int]]] = {}
    for scope, program, parts, goes_on in history:
        before, said = turns.get((scope, program), ("", [])) if goes_on else ("", [])
        text = before + "<|im_end|>" + "".join(parts)
        found = cache.encode(text, scope=scope, program=program).tolist()
        assert qwen_like.decode(found) == text
        if program and characters == math.inf:
            assert found[: len(said)] == said
        ids = spelled(cache, qwen_like, text, "the weather", scope, program)
        assert ids[: len(found)] == found
        turns[scope, program] = (text + "the weather", ids)
