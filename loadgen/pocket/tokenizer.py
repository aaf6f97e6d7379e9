"""Pocket's byte-level BPE tokenizer: its cut into words, its special tokens, and how it is trained and saved.

The cut is by class of character alone: letters, single digits, whitespace with JSON punctuation, and every other
sign by itself. So a word has the same tokens after a space, a quote or a slash, and a value is copied token by
token from where the user or a tool result mentions it. No merge crosses a class.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.loadgen.pocket.conversations import training_conversation
from holdfast.loadgen.pocket.render import END, TEMPLATE, spans

VOCABULARY = 1536
CONTEXT = 8192
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added but not special: they survive ``skip_special_tokens``, as in Qwen."""

CUT = r"""\p{L}+|\p{N}|[\s"{}\[\]:,]+|[^\p{L}\p{N}\s"{}\[\]:,]"""
"""How text is cut into words: by the class of each character alone, whatever stands around it."""


def train_tokenizer(conversations: int, seed: int) -> Tokenizer:
    """Train the BPE merges on rendered conversations of the generator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations, seed), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def _texts(conversations: int, seed: int) -> Iterator[str]:
    for index in range(conversations):
        text = "".join(span.text for span in spans(training_conversation(seed + index)))
        for mark in (*SPECIAL, *MARKS):
            text = text.replace(mark, "")
        yield text


def packaged(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows it, with the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )


def load(folder: Path) -> Tokenizer:
    """The bare tokenizer of a saved folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
