"""Streamed decoding equals decoding the whole, and never splits a character."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from holdfast.replicas.text.decode import Pieces, StreamDecoder
from holdfast.replicas.text.encode import read_added_tokens

SAMPLES = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("e\u0301👩‍👩‍👧日本 \n")), max_size=30)


def streamed(pieces: Pieces, ids: list[int], sizes: list[int], **options: Any) -> list[str]:
    decoder = StreamDecoder(pieces, **options)
    texts, position = [], 0
    for size in [*sizes, len(ids)]:
        texts.append(decoder.feed(ids[position : position + size]))
        position += size
    return [*texts, decoder.flush()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_byte_level_equals_the_whole_for_any_ids(qwen_like: Any, data: st.DataObject) -> None:
    backend = qwen_like.backend_tokenizer
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=12))
    hidden = read_added_tokens(backend).special_ids
    texts = streamed(Pieces(backend), ids, sizes, hidden=hidden)
    assert "".join(texts) == backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_valid_text_never_shows_a_broken_character(tokenizers: list[Any], data: st.DataObject) -> None:
    text = data.draw(SAMPLES.filter(lambda text: "\ufffd" not in text))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=12))
    for tokenizer in tokenizers:
        backend = tokenizer.backend_tokenizer
        ids = backend.encode(text, add_special_tokens=False).ids
        texts = streamed(Pieces(backend), ids, sizes)
        assert "\ufffd" not in "".join(texts)
        assert "".join(texts) == backend.decode(ids, skip_special_tokens=False)


def test_a_stream_that_continues_a_prompt_keeps_its_first_space(llama2_like: Any) -> None:
    pieces = Pieces(llama2_like.backend_tokenizer)
    ids = llama2_like.encode("the weather", add_special_tokens=False)
    assert StreamDecoder(pieces).feed(ids) == "the weather"
    assert StreamDecoder(pieces, continues=True).feed(ids) == " the weather"


@pytest.mark.parametrize("sizes", [[], [1] * 20, [3, 2, 4]])
def test_a_decoder_without_bytes_goes_through_the_library(sizes: list[int]) -> None:
    words = {"he": 0, "##llo": 1, "world": 2, "!": 3}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    ids = [0, 1, 2, 0, 1, 3]
    assert "".join(streamed(Pieces(tokenizer), ids, sizes)) == tokenizer.decode(ids) == "hello world hello !"


@pytest.mark.parametrize("text", ["two words", "line\nbreak", "日本", "caf\u00e9 \u0120"])
def test_an_added_token_is_the_text_it_was_given(qwen_like: Any, text: str) -> None:
    """Not every sign of it stands for a byte, as those of other tokens do."""
    backend = type(qwen_like.backend_tokenizer).from_str(qwen_like.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken(text)])
    assert Pieces(backend).of(backend.token_to_id(text)) == text.encode()
