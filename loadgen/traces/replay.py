"""The next request of a recorded program, given the answer to the last. Pure: the client sends, waits and measures.

ask = first(program, manner)
while ask is not None:
    ... wait until ask.due_ms(ended_ms), send ask.request, take the assistant's message from the answer ...
    ask = following(ask, answer)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from holdfast.loadgen.traces.history import prompts
from holdfast.loadgen.traces.model import Json, Messages, Program, Sized, Turn
from holdfast.loadgen.traces.recording import LIMITS
from holdfast.replicas.errors import ConfigError


class Answers(StrEnum):
    """Which answers go into the history of the requests that follow."""

    LIVE = "live"  # the model's, as they come
    RECORDED = "recorded"  # the trace's, so that every server gets the recorded prompts


class Lengths(StrEnum):
    """How long answers get."""

    FREE = "free"  # as long as the model likes, within the limits of the trace
    FORCED = "forced"  # as long as they were


class Forcing(StrEnum):
    """The fields by which a server is made to answer with a number of tokens."""

    HOLDFAST = "holdfast"  # and llama.cpp
    VLLM = "vllm"
    LIMIT = "limit"  # any other: an answer may still end sooner


@dataclass(frozen=True, slots=True)
class Manner:
    """How a trace is replayed. ``max_tokens`` is for turns of which the trace has no length and no limit."""

    answers: Answers = Answers.LIVE
    lengths: Lengths = Lengths.FREE
    forcing: Forcing = Forcing.HOLDFAST
    max_tokens: int | None = None
    speed: float = 1.0  # recorded pauses are divided by it

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ConfigError("speed must be above 0", "speed")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a replay. ``strayed``: some answer before it could not go into the history as it came."""

    program: Program
    manner: Manner
    index: int
    messages: Messages
    strayed: bool = False

    @property
    def turn(self) -> Turn:
        return self.program.turns[self.index]

    @property
    def request(self) -> Json:
        """The request's body but for model, stream and the program's id, which are the client's."""
        turn = self.turn
        fixed = {"ignore_eos", "min_tokens", *LIMITS} if self.manner.lengths is Lengths.FORCED else set()
        body: Json = {"messages": list(self.messages)}
        body |= {"tools": list(turn.tools)} if turn.tools else {}
        body |= {name: value for name, value in turn.sampling.items() if name not in fixed}
        return body | _limits(turn, self.manner, body)

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


def first(program: Program, manner: Manner) -> Ask:
    """The first request. Raises ConfigError for a program that cannot be replayed in this manner to its end."""
    for index, turn in enumerate(program.turns):
        if isinstance(turn.prompt, Sized):
            raise ConfigError(f"program {program.id!r}, turn {index}: the prompt is a length, not yet a text", "prompt")
        if manner.lengths is Lengths.FORCED and not (turn.output.tokens or manner.max_tokens):
            why = "the trace has no length of the answer; max-tokens is for such turns"
            raise ConfigError(f"program {program.id!r}, turn {index}: {why}", "tokens")
    if manner.answers is Answers.RECORDED:
        for _ in prompts(program):  # raises where an answer is missing
            pass
    return Ask(program, manner, 0, _messages(program.turns[0]))


def following(ask: Ask, answer: Json | None) -> Ask | None:
    """The request after ``ask``, None after the last. ``answer`` is the assistant's message, None where there is none.

    With live answers the recorded results of tools are put under the ids of the model's calls, in order. An answer
    that failed, or whose calls the recorded results do not fit, gives way to the recorded one; where there is none it
    keeps as many calls as there are results, and further results go in as the user's words.
    """
    index = ask.index + 1
    if index == len(ask.program.turns):
        return None
    turn, recorded = ask.program.turns[index], ask.turn.output.history
    new = _messages(turn)
    if turn.whole:
        return Ask(ask.program, ask.manner, index, new, ask.strayed)
    if ask.manner.answers is Answers.RECORDED and recorded is not None:
        return Ask(ask.program, ask.manner, index, (*ask.messages, recorded, *new), ask.strayed)
    results = sum(message["role"] == "tool" for message in new)
    usable = answer is not None and _usable(answer)
    if answer is not None and usable and len(_calls(answer)) == results:
        added, strayed = (answer, *_under(new, recorded, answer)), False
    elif recorded is not None:
        added, strayed = (recorded, *new), True
    else:
        added, strayed = _cut(answer if usable else None, new), True
    return Ask(ask.program, ask.manner, index, (*ask.messages, *added), ask.strayed or strayed)


def _limits(turn: Turn, manner: Manner, body: Json) -> Json:
    if manner.lengths is Lengths.FORCED:
        tokens = turn.output.tokens or manner.max_tokens
        fields: Json = {"max_tokens": tokens}
        fields |= {} if manner.forcing is Forcing.LIMIT else {"ignore_eos": True}
        return fields | ({"min_tokens": tokens} if manner.forcing is Forcing.VLLM else {})
    limit = turn.max_tokens or manner.max_tokens
    return {} if limit is None or any(name in body for name in LIMITS) else {"max_tokens": limit}


def _messages(turn: Turn) -> Messages:
    assert not isinstance(turn.prompt, Sized)  # `first` looked
    return turn.prompt


def _calls(message: Json) -> list[Json]:
    return message.get("tool_calls") or []


def _usable(answer: Json) -> bool:
    """Whether a server takes it back: it says something, and the arguments of its calls are JSON objects."""
    return bool(answer.get("content") or _calls(answer)) and all(
        _is_object(call["function"]["arguments"]) for call in _calls(answer)
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply to be read
        return False


def _under(new: Messages, recorded: Json | None, answer: Json) -> Messages:
    """``new`` with its results of tools under the ids of the calls in ``answer``."""
    given = [message["tool_call_id"] for message in new if message["role"] == "tool"]
    known = [call["id"] for call in _calls(recorded)] if recorded is not None else given
    ids = dict(
        zip(known if sorted(known) == sorted(given) else given, (call["id"] for call in _calls(answer)), strict=True)
    )
    return tuple(
        {**message, "tool_call_id": ids[message["tool_call_id"]]} if message["role"] == "tool" else message
        for message in new
    )


def _cut(answer: Json | None, new: Messages) -> Messages:
    """An answer with as many calls as ``new`` has results, and the results that have a call."""
    results = [message for message in new if message["role"] == "tool"]
    calls = _calls(answer or {})[: len(results)]
    said: Json = {"role": "assistant", "content": (answer or {}).get("content") or (None if calls else "")}
    said |= {"tool_calls": calls} if calls else {}
    placed: list[Json] = []
    under = iter(calls)
    for message in new:
        call = next(under, None) if message["role"] == "tool" else None
        if call is not None:
            message = {**message, "tool_call_id": call["id"]}
        elif message["role"] == "tool":
            message = {"role": "user", "content": message["content"]}
        placed.append(message)
    return (said, *placed)
