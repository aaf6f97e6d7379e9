"""Record the conversations that the benchmarks replay: ``python -m pocket.record``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from holdfast.loadgen.bench.conversations import FILE, Conversation, spans
from holdfast.loadgen.inflate import WEIGHTS
from pocket.conversations import lexicon, write
from pocket.tokenizer import load
from pocket.words import Split

COUNT, TURNS, MOST_TOKENS = 32, 35, 4800


def conversations(count: int = COUNT) -> Iterator[Conversation]:
    """The first ``count`` conversations, always the same, in words that Pocket was not trained on."""
    rng, tokenizer = random.Random(0), load(WEIGHTS)
    while count:
        conversation = write(rng, lexicon(Split.HELD_OUT), tools=rng.randint(3, 6), turns=TURNS)
        if len(tokenizer.encode("".join(span.text for span in spans(conversation))).ids) <= MOST_TOKENS:
            count -= 1
            yield conversation


def line(conversation: Conversation) -> str:
    """A conversation as a line of the file."""
    fields = {"messages": conversation.messages, "tools": conversation.tools}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    FILE.write_text("".join(f"{line(each)}\n" for each in conversations()), encoding="utf-8")
