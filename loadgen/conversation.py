"""One program's side of a conversation: what its next request holds, and what an answer adds to it. No I/O.

After a call comes the tool's result, after a text the user's next message. A model that keeps calling is let call
once more than it was asked to, then the user speaks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.script import Call, Json, Script, Step
from holdfast.loadgen.workloads.words import filler


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as a server sent it; ``arguments`` is JSON text, or what should have been."""

    call_id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Json | None:
        """The arguments, None where they are no JSON object, or one that cannot be sent on.

        That is one with an integer beyond 64 bits, half a surrogate pair, or hundreds of levels.
        """
        try:
            arguments = json.loads(self.arguments)
            orjson.dumps([[[[[arguments]]]]])  # as deep as `digest` has it
        except (ValueError, TypeError, RecursionError):  # TypeError: of `orjson.dumps`
            return None
        return arguments if isinstance(arguments, dict) else None


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant turn says: text, calls, or both."""

    text: str = ""
    calls: tuple[WrittenCall, ...] = ()

    @property
    def plain(self) -> Json:
        """Without ids and with arguments as objects: equal for two servers that mean the same."""
        calls = [[call.name, call.arguments if call.parsed is None else call.parsed] for call in self.calls]
        return {"text": self.text.strip(), "calls": calls}

    @property
    def usable(self) -> bool:
        """Whether it can go into a history: it says something, and its calls are JSON."""
        return bool(self.text or self.calls) and all(call.parsed is not None for call in self.calls)


@dataclass(slots=True)
class Conversation:
    """The messages of one program on one server. ``forced``: the script's answers go in, not the model's."""

    script: Script
    forced: bool = False
    messages: list[Json] = field(default_factory=list)
    steps_done: int = 0
    calls_done: int = 0  # in this step
    turns_done: int = 0

    def __post_init__(self) -> None:
        self.messages.append({"role": "system", "content": self.script.system_of(0)})
        self._user()

    @property
    def request(self) -> Json:
        """Messages and tools of the next request."""
        return {"messages": self.messages, "tools": list(self.script.tools)}

    @property
    def digest(self) -> str:
        """Of the next request without the ids of calls: equal where two servers are asked the same."""
        return digest(self.messages, self.script.tools)

    @property
    def scripted(self) -> Said:
        """What a good model would say now."""
        calls = self._step.due(self.calls_done)
        if not calls:
            return Said(self._step.text)
        return Said("", tuple(self._written(call, number) for number, call in enumerate(calls)))

    def take(self, said: Said | None) -> bool:
        """Append an answer, the model's or, where that failed or the history is forced, the script's; and what follows.

        Returns whether the model made the script's calls; of texts, any will do.
        """
        scripted = self.scripted
        expected = said is not None and said.plain["calls"] == scripted.plain["calls"]
        kept = scripted if self.forced or said is None or not said.usable else said
        self.messages.append(assistant(kept))
        words = self.script.pause(self.turns_done).words
        for number, call in enumerate(kept.calls):
            # What the words leave over when they are shared out goes to the last result.
            share = words * (number + 1) // len(kept.calls) - words * number // len(kept.calls)
            self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": self._result(call, share)})
        self.calls_done += len(kept.calls)
        self.turns_done += 1
        self.messages[0] = {"role": "system", "content": self.script.system_of(self.turns_done)}
        if not kept.calls or self.calls_done > len(self._step.calls):
            self.steps_done, self.calls_done = self.steps_done + 1, 0
            self._user(0 if kept.calls else words)
        return expected

    @property
    def _step(self) -> Step:
        return self.script.steps[self.steps_done % len(self.script.steps)]

    def _written(self, call: Call, number: int) -> WrittenCall:
        name = f"call_{self.turns_done}" + (f"_{number}" if number else "")
        return WrittenCall(name, call.tool, json.dumps(call.arguments, ensure_ascii=False))

    def _result(self, call: WrittenCall, words: int) -> str:
        told = tools.result(call.name, call.parsed or {})
        more = filler(f"{self.script.session}/{call.name}/{call.arguments}", words) if words else ""
        return f"{told}\n{more}" if more else told

    def _user(self, words: int = 0) -> None:
        said = self._step.user
        if words:
            said = filler(f"{self.script.session}/user/{self.turns_done}", words) + "\n\n" + said
        self.messages.append({"role": "user", "content": said})


def fits(said: Said, declared: tuple[Json, ...]) -> bool:
    """Whether every call names a declared tool and has a JSON object with the required arguments."""
    functions = [tool.get("function") or {} for tool in declared]  # a trace's tools may be of other kinds
    required = {of.get("name"): (of.get("parameters") or {}).get("required") or () for of in functions}
    return all(
        call.name in required and call.parsed is not None and set(required[call.name]) <= set(call.parsed)
        for call in said.calls
    )


def assistant(said: Said) -> Json:
    """The message that an answer is in a history."""
    message: Json = {"role": "assistant", "content": said.text or None}
    if said.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def digest(messages: Sequence[Json], tools: Sequence[Json]) -> str:
    """Of a request without the ids of calls: equal where two servers are asked the same."""
    plain = [_without_ids(message) for message in messages]
    told = orjson.dumps([plain, tools], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(told).hexdigest()[:16]


def _without_ids(message: Json) -> Any:
    if message["role"] != "assistant":
        return [message["role"], message["content"]]
    written = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [WrittenCall("", function["name"], function["arguments"]) for function in written]
    return [message["role"], message.get("content"), [[c.name, c.parsed or c.arguments] for c in calls]]
