"""Train, package and load Pocket's tokenizer.

The byte-level BPE cuts text into words by character class alone: letters, single digits, whitespace with JSON
punctuation, and every other sign by itself. No merge crosses a class. So a word has the same tokens after a space, a
quote or a slash. The model can copy a value token by token from the user's text or a tool result.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from holdfast.loadgen.bench.conversations import END, MARKS, spans, train_bpe
from holdfast.loadgen.inflate import CUT, WEIGHTS
from pocket.conversations import training_conversation

VOCABULARY = 1536
CONTEXT = 8192
SPECIAL = ("<|endoftext|>", "<|im_start|>", END)


def train_tokenizer(conversations: int, seed: int) -> Tokenizer:
    """Train Pocket's tokenizer on conversations of the generator."""
    texts = ("".join(span.text for span in spans(training_conversation(seed + i))) for i in range(conversations))
    return train_bpe(texts, CUT, VOCABULARY, SPECIAL, MARKS)


def packaged(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer in the form of transformers, with the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=(WEIGHTS / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def load(folder: Path) -> Tokenizer:
    """The bare tokenizer of a saved folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
