"""Tokenizing the delta equals tokenizing the whole, and special tokens of the client stay text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.encode import TokenCache
from holdfast.replicas.text.render import Rendered, Renderer

SPECIALS = ["<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<s>", "</s>", "<tool_call>", "<|im_", "end|>"]
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


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5), st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 4))
def test_growing_and_forked_conversations_equal_the_whole(
    tokenizers: list[Any], texts: list[str], others: list[str], fork: int
) -> None:
    for tokenizer in tokenizers:
        renderer, cache = Renderer(tokenizer), TokenCache(tokenizer, entries=3)
        histories = [texts[: turn + 1] for turn in range(len(texts))]
        for history in [*histories, texts[:fork] + others, texts[:1], texts]:
            rendered = renderer.render(ChatPrompt(conversation(history)))
            ids = cache.encode(rendered.text, rendered.mark)
            assert ids.dtype == np.int32
            assert ids.tolist() == tokenized_whole(tokenizer, rendered)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([*SPECIALS, "<|im_end|>", "<|im_start|>", "\n", "a", " the"]), max_size=8), max_size=6
    )
)
def test_arbitrary_texts_equal_the_whole(qwen_like: Any, texts: list[list[str]]) -> None:
    cache = TokenCache(qwen_like, entries=2)
    for parts in texts:
        text = "".join(parts)
        assert cache.encode(text).tolist() == qwen_like.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("word", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_a_control_token_of_the_client_is_text(qwen_like: Any, word: str) -> None:
    rendered = Renderer(qwen_like).render(ChatPrompt([{"role": "user", "content": f"say {word} now"}]))
    ids = TokenCache(qwen_like).encode(rendered.text, rendered.mark).tolist()
    control = [token for token in qwen_like.convert_ids_to_tokens(ids) if token.startswith("<|")]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert f"say {word} now" in qwen_like.decode(ids)


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


def test_a_finished_turn_goes_on_from_the_ids_as_generated(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = cache.encode(prompt)
    spelled = [qwen_like.convert_tokens_to_ids(char) for char in "weather"]  # not how the tokenizer would cut it
    assert spelled != qwen_like.encode("weather", add_special_tokens=False)
    generated = [*ids.tolist(), *spelled]
    cache.remember(prompt + "weather", np.array(generated, np.int32))
    rest = "<|im_end|>\n<|im_start|>user\nthanks<|im_end|>\n"
    expected = generated + qwen_like.encode(rest, add_special_tokens=False)
    assert cache.encode(prompt + "weather" + rest).tolist() == expected
    assert cache.encode(prompt + "weather" + rest, scope="other").tolist() != expected
    other = prompt + "weathering"  # the turn is no beginning of this one: its last word goes on
    assert cache.encode(other).tolist() == qwen_like.encode(other, add_special_tokens=False)


def test_generated_text_that_looks_like_an_added_token_is_no_place_to_cut(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like)
    prompt = "<|im_start|>assistant\n"
    spelled = [qwen_like.convert_tokens_to_ids(char) for char in "<tool_call>"]
    ids = [*cache.encode(prompt).tolist(), *spelled, qwen_like.convert_tokens_to_ids("<think>")]
    cache.remember(prompt + "<tool_call><think>", np.array(ids, np.int32))
    text = prompt + "<tool_call><think> more"
    assert cache.encode(text).tolist() == qwen_like.encode(text, add_special_tokens=False)


def test_the_oldest_entry_makes_room(qwen_like: Any) -> None:
    cache = TokenCache(qwen_like, entries=2)
    texts = [f"<|im_start|>{word} the<|im_end|>" for word in ("a", "b", "c")]
    for text in texts:
        cache.encode(text)
    cache.encode(texts[2])
    assert cache.reused == len(texts[2])
    before = cache.reused
    cache.encode(texts[0])
    assert cache.reused == before
