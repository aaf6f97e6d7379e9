"""Recorded conversations with tools, as what an engine is asked: prompts in token ids, and the replies on record.

They come from the generator of Pocket's held-out conversations and follow from the seed alone, so every engine is
asked the same. The history of a turn has the replies on record, whatever was said (teacher forcing), and tool results.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.loadgen.pocket.conversations import Conversation, lexicon, write
from holdfast.loadgen.pocket.render import spans
from holdfast.loadgen.pocket.words import Split
from holdfast.replicas.speculation.skeletons import SkeletonSet
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.conversation import CallSkeletons
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn: all that is known before it, and what is said in it, the end of the turn included."""

    prompt: TokenIds
    reply: TokenIds


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The turns of one program, and the fixed texts of the calls it may make."""

    exchanges: tuple[Exchange, ...]
    skeletons: SkeletonSet | None


def dialogues(tokenizer: Any, programs: int, turns: int, most_tokens: int, seed: int = 0) -> list[Dialogue]:
    """`programs` conversations of exactly `turns` turns, none longer than `most_tokens` with its last reply."""
    found, skeletons = [], CallSkeletons(tokenizer, ToolFormat.HERMES)
    for program in range(programs):
        rng = random.Random(f"{seed}/{turns}/{program}")
        exchanges: tuple[Exchange, ...] = ()
        while not exchanges:
            conversation = write(rng, lexicon(Split.HELD_OUT), tools=rng.randint(2, 6), turns=turns)
            exchanges = _exchanges(tokenizer, conversation, turns, most_tokens)
        found.append(Dialogue(exchanges, skeletons.of(conversation.tools)))
    return found


def _exchanges(tokenizer: Any, conversation: Conversation, turns: int, most_tokens: int) -> tuple[Exchange, ...]:
    """The first `turns` turns; nothing where they are too long."""

    def ids(text: str) -> TokenIds:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    texts: list[tuple[str, str]] = []
    told = ""
    for span in spans(conversation):
        if span.learned:
            texts.append((told, span.text))
        told += span.text
    prompt, reply = texts[turns - 1]
    if len(ids(prompt)) + len(ids(reply)) > most_tokens:
        return ()
    return tuple(Exchange(ids(prompt), ids(reply)) for prompt, reply in texts[:turns])
