"""A conversation as text in spans, so that training knows which tokens the assistant wrote.

``chat_template.jinja`` says the same to every other program; a test holds the two equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from holdfast.loadgen.pocket.conversations import Conversation
from holdfast.loadgen.pocket.schemas import Json

END = "<|im_end|>"
TEMPLATE = Path(__file__).parents[2] / "replicas" / "pocket" / "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the rendered conversation; ``learned`` pieces are what the assistant has to produce.

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
    """What the assistant generates for ``message``: its text, then one block per call."""
    parts = [message["content"]] if message["content"] else []
    parts += [
        f"<tool_call>\n{json.dumps(call_object(call), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join(parts)


def call_object(call: Json) -> Json:
    """The JSON object between the tool-call marks."""
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
