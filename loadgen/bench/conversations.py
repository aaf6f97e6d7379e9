"""Recorded conversations with tools, and how a conversation is written as text.

`conversations.jsonl` holds conversations of 35 turns and more, in words that Pocket was not trained on. They have at
most 4,800 of Pocket's tokens. `python -m pocket.record` wrote the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Json: TypeAlias = dict[str, Any]
FILE = Path(__file__).with_name("conversations.jsonl")
END = "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added but not special: they survive ``skip_special_tokens``, as in Qwen."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools as an OpenAI client sends them; arguments are objects, not JSON text."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...]

    @property
    def turns(self) -> int:
        """The number of assistant turns."""
        return sum(message["role"] == "assistant" for message in self.messages)


@cache
def recorded() -> tuple[Conversation, ...]:
    """The conversations of `FILE`."""
    lines = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return tuple(Conversation(tuple(line["messages"]), tuple(line["tools"])) for line in lines)


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the rendered conversation; ``learned`` pieces are the assistant's own output.

    The end of an ``unfinished`` message is not learned.
    """

    text: str
    learned: bool


def spans(conversation: Conversation) -> list[Span]:
    """The whole conversation; joined, the texts are what the chat template renders."""
    return list(_spans(conversation.messages, conversation.tools))


def _spans(messages: Sequence[Json], tools: Sequence[Json]) -> Iterator[Span]:
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools or system is not None:
        yield Span(f"<|im_start|>system\n{system_turn(system, tools)}{END}\n", False)
    for role, group in groupby(messages[system is not None :], key=lambda message: message["role"]):
        if role == "tool":
            blocks = "".join(f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            yield Span(f"<|im_start|>user{blocks}{END}\n", False)
            continue
        for message in group:
            if role != "assistant":
                yield Span(f"<|im_start|>{role}\n{message['content']}{END}\n", False)
                continue
            yield Span("<|im_start|>assistant\n", False)
            cut = message.get("unfinished", False)
            yield Span(assistant_text(message) + ("" if cut else END), True)
            yield Span(f"{END}\n" if cut else "\n", False)


def system_turn(system: str | None, tools: Sequence[Json]) -> str:
    """The system prompt followed by the tools, one JSON object a line."""
    listed = "".join("\n" + line for line in tool_lines(tools))
    block = f"# Tools\n<tools>{listed}\n</tools>" if tools else ""
    return "\n\n".join(part for part in (system, block) if part)


def tool_lines(tools: Sequence[Json]) -> list[str]:
    """Each tool as it stands in the system prompt."""
    return [json.dumps(tool, ensure_ascii=False) for tool in tools]


def assistant_text(message: Json) -> str:
    """The text that the assistant generates for ``message``: its content, then one block per call."""
    parts = [message["content"]] if message["content"] else []
    parts += [
        f"<tool_call>\n{json.dumps(call_object(call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join(parts)


def call_object(call: Json) -> Json:
    """The JSON object between the tool-call marks."""
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def train_bpe(
    texts: Iterable[str], cut: str, vocabulary: int, special: Sequence[str] = (), marks: Sequence[str] = ()
) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens over words as the pattern ``cut`` cuts them.

    ``marks`` are added to what is trained; neither they nor ``special`` tokens are in the ``texts`` it is trained on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(marks),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(texts, (*special, *marks)), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


def _without(texts: Iterable[str], marks: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for mark in marks:
            text = text.replace(mark, "")
        yield text
