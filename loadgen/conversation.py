"""A program's side of a conversation: its next request, given the answer to the last one. No I/O.

    request = first(program, manner)
    while request is not None:
        ... wait until request.due_ms(ended_ms), send request.body, read the answer ...
        request = following(request, answer)

Histories hold the server's own answers, as far as they fit, or the program's. A scripted program, which a workload has
drawn, follows the server: a call gets its tool's result, and after a text the user speaks. A model that keeps calling
is let call once more than it was asked to. A recorded program has the same turns whatever the server answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson

from holdfast.loadgen.program import Json, Messages, Program, Sized, Turn, prompts
from holdfast.loadgen.traces.recording import LIMITS
from holdfast.loadgen.workloads import tools
from holdfast.replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as a server sent it; ``arguments`` is JSON text, or should be."""

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
    """The text and calls of an answer."""

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


class Forcing(StrEnum):
    """The fields by which a server is made to answer with a number of tokens."""

    HOLDFAST = "holdfast"  # and llama.cpp
    VLLM = "vllm"
    LIMIT = "limit"  # any other: an answer may still end sooner


@dataclass(frozen=True, slots=True)
class Manner:
    """How a program is sent. ``max_tokens``: the limit of turns whose length and limit are unknown.

    ``recorded``: the history has the program's answers, so every server gets the recorded prompts; else the model's own
    answers. ``forced``: answers get their recorded lengths. ``speed`` divides recorded pauses.
    """

    recorded: bool = False
    forced: bool = False
    forcing: Forcing = Forcing.HOLDFAST
    max_tokens: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ConfigError("speed must be above 0", "speed")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a program: turn number `index` of it, with the whole conversation."""

    program: Program
    manner: Manner
    index: int
    messages: Messages

    @property
    def turn(self) -> Turn:
        return self.program.turns[self.index]

    @property
    def body(self) -> Json:
        """The request's body, except for model, stream and the program's id, which are the client's."""
        turn, forced = self.turn, self.manner.forced
        fixed = {"ignore_eos", "min_tokens", *LIMITS} if forced else set()
        body: Json = {"messages": list(self.messages)}
        body |= {"tools": list(turn.tools)} if turn.tools else {}
        body |= {name: value for name, value in turn.sampling.items() if name not in fixed}
        if not forced:
            limit = turn.max_tokens or self.manner.max_tokens
            return body if limit is None or any(name in body for name in LIMITS) else body | {"max_tokens": limit}
        tokens = turn.output.tokens or self.manner.max_tokens
        body |= {"max_tokens": tokens}
        body |= {} if self.manner.forcing is Forcing.LIMIT else {"ignore_eos": True}
        return body | ({"min_tokens": tokens} if self.manner.forcing is Forcing.VLLM else {})

    def due_ms(self, ended_ms: float = 0.0) -> float:
        """When it is to be sent, from the start of the replay; ``ended_ms`` is when the last answer was complete.

        A program's first request keeps to the recorded moment, so that a slow server does not slow the load down.
        Later ones wait as long as the tools took, or where that is not known until the recorded moment.
        """
        turn, speed = self.turn, self.manner.speed
        at_ms = (turn.at_ms or 0.0) / speed
        if self.index == 0:
            return at_ms
        return max(ended_ms, at_ms) if turn.delay_ms is None else ended_ms + turn.delay_ms / speed

    def is_answered_by(self, reply: Said | None) -> bool:
        """Whether the calls equal those of the program's own answer; texts are not compared."""
        answer = self.turn.output.answer
        if reply is None or answer is None:
            return False
        return bool(_parse_answer(answer).plain["calls"] == reply.plain["calls"])


def first(program: Program, manner: Manner) -> Request:
    """The first request. Raises ConfigError for a program that cannot be sent in this manner to its end."""
    for index, turn in enumerate(program.turns):
        if isinstance(turn.prompt, Sized):
            raise ConfigError(f"program {program.id!r}, turn {index}: the prompt is a length, not yet a text", "prompt")
        if manner.forced and not (turn.output.tokens or manner.max_tokens):
            why = "the trace has no length of the answer; max-tokens is for such turns"
            raise ConfigError(f"program {program.id!r}, turn {index}: {why}", "tokens")
    if manner.recorded:
        for _ in prompts(program):  # raises where an answer is missing
            pass
    return Request(program, manner, 0, _messages(program.turns[0]))


def following(request: Request, answer: Json | None) -> Request | None:
    """The request after this one, None after the last. ``answer`` is the assistant's message, None where it failed.

    The recorded results of tools get the ids of the model's calls, in order. The recorded answer replaces one that
    failed or whose calls do not match the results. Without a recorded answer the text stays, and the results become a
    message of the user. A scripted program follows the model's answer instead.
    """
    program, index, recorded = request.program, request.index + 1, request.turn.output.history
    usable = answer is not None and _parse_answer(answer).usable  # else no server takes it back
    if program.scripted and not request.manner.recorded and answer is not None and usable:
        index, added = _next_scripted(request, answer)
    elif index == len(program.turns):
        return None
    elif (turn := program.turns[index]).whole:
        return replace(request, index=index, messages=_messages(turn))
    else:
        added = _added(request, answer, usable, _messages(turn), recorded)
    if index == len(program.turns):
        return None
    messages = (*request.messages, *added)
    if system := program.turns[index].system:
        messages = ({**messages[0], "content": system}, *messages[1:])
    return replace(request, index=index, messages=messages)


def _added(request: Request, answer: Json | None, usable: bool, new: Messages, recorded: Json | None) -> Messages:
    """The messages that a recorded program adds to the history: an answer and the messages after it."""
    if request.manner.recorded and recorded is not None:
        return (recorded, *new)
    results = sum(message["role"] == "tool" for message in new)
    if answer is not None and usable and len(_calls(answer)) == results:
        return (answer, *_with_call_ids(new, recorded, answer))
    if recorded is not None:
        return (recorded, *new)
    return _results_as_text(answer if usable else None, new)


def _next_scripted(request: Request, answer: Json) -> tuple[int, Messages]:
    """The next turn of a scripted program after this answer, and the messages to add to the history.

    Any call counts as a requested one. After the last call the model answers in text, then the user speaks.
    """
    turns, index, n_left = request.program.turns, request.index, len(_calls(answer))
    while n_left > 0 and index < len(turns) and (n_calls := len(_calls(turns[index].output.answer or {}))):
        n_left, index = n_left - n_calls, index + 1
    history = (answer, *_results(request, answer))
    if index > request.index and n_left <= 0:
        return index, history
    index = request.index + 1
    while index < len(turns) and _messages(turns[index])[0]["role"] != "user":
        index += 1
    return index, (*history, *(_messages(turns[index]) if index < len(turns) else ()))


def _results(request: Request, answer: Json) -> Iterator[Json]:
    """The results of an answer's calls, with the words of the program's own results."""
    next_turns = request.program.turns[request.index + 1 : request.index + 2]
    own = [message for turn in next_turns for message in _messages(turn) if message["role"] == "tool"]
    for number, call in enumerate(_calls(answer)):
        function = call["function"]
        arguments = WrittenCall("", function["name"], function["arguments"]).parsed or {}
        words = own[number]["content"].partition("\n")[2] if number < len(own) else ""
        content = tools.result(function["name"], arguments) + (f"\n{words}" if words else "")
        yield {"role": "tool", "tool_call_id": call["id"], "content": content}


def _messages(turn: Turn) -> Messages:
    assert not isinstance(turn.prompt, Sized)  # `first` looked
    return turn.prompt


def _parse_answer(answer: Json) -> Said:
    functions = [call["function"] for call in _calls(answer)]
    return Said(answer.get("content") or "", tuple(WrittenCall("", of["name"], of["arguments"]) for of in functions))


def _calls(message: Json) -> list[Json]:
    return message.get("tool_calls") or []


def _with_call_ids(new: Messages, recorded: Json | None, answer: Json) -> Messages:
    """``new`` with its results of tools under the ids of the calls in ``answer``."""
    result_ids = [message["tool_call_id"] for message in new if message["role"] == "tool"]
    call_ids = [call["id"] for call in _calls(recorded)] if recorded is not None else result_ids
    old_ids = call_ids if sorted(call_ids) == sorted(result_ids) else result_ids
    ids = dict(zip(old_ids, (call["id"] for call in _calls(answer)), strict=True))
    return tuple(
        {**message, "tool_call_id": ids[message["tool_call_id"]]} if message["role"] == "tool" else message
        for message in new
    )


def _results_as_text(answer: Json | None, new: Messages) -> Messages:
    """The text of an answer, and ``new`` with tool results as user messages, since the answer has no calls."""
    text = (answer or {}).get("content") or ""
    words = ({"role": "user", "content": item["content"]} if item["role"] == "tool" else item for item in new)
    return ({"role": "assistant", "content": text}, *words)


def fits(said: Said, declared: tuple[Json, ...]) -> bool:
    """Whether every call names a declared tool and has a JSON object with the required arguments."""
    functions = [tool.get("function") or {} for tool in declared]  # a trace's tools may be of other kinds
    required = {of.get("name"): (of.get("parameters") or {}).get("required") or () for of in functions}
    return all(
        call.name in required and call.parsed is not None and set(required[call.name]) <= set(call.parsed)
        for call in said.calls
    )


def assistant(said: Said) -> Json:
    """An answer as a message of the history."""
    message: Json = {"role": "assistant", "content": said.text or None}
    if said.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return message


def digest(messages: Sequence[Json], tools: Sequence[Json]) -> str:
    """A digest of a request without the ids of calls: equal where two servers get the same request."""
    plain = [_without_ids(message) for message in messages]
    content = orjson.dumps([plain, tools], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(content).hexdigest()[:16]


def _without_ids(message: Json) -> Any:
    if message["role"] != "assistant":
        return [message["role"], message["content"]]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [WrittenCall("", function["name"], function["arguments"]) for function in functions]
    return [message["role"], message.get("content"), [[c.name, c.parsed or c.arguments] for c in calls]]
