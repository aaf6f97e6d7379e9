"""Makes a trace of the requests and answers of a measured run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.loadgen.program import Json, Messages, Output, Program, Turn, continued
from holdfast.replicas.errors import ConfigError

LIMITS = ("max_completion_tokens", "max_tokens")
_TRANSPORT = frozenset({"model", "stream", "stream_options", "program_id", "previous_response_id", "prompt_cache_key"})
_FORCED = frozenset({"ignore_eos", "min_tokens"})  # a replay forces lengths again, or does not


@dataclass(frozen=True, slots=True)
class Observed:
    """One request of a run. ``body`` is what was sent; its messages must not change afterwards.

    ``sent_ms`` is counted from the start of the run. Which server and model it was is not part of a trace.
    """

    program: str
    index: int  # of the turn
    sent_ms: float
    body: Json
    output: Output
    tenant: str = ""


def recorded(observed: Iterable[Observed]) -> tuple[Program, ...]:
    """The programs of a run, by their first request. Each must come from one repetition on one server.

    Raises ConfigError where a program has two requests for one turn.
    """
    programs: dict[str, list[Observed]] = {}
    for one in observed:
        programs.setdefault(one.program, []).append(one)
    for members in programs.values():
        members.sort(key=lambda one: one.index)
    return tuple(_program(members) for members in sorted(programs.values(), key=lambda members: members[0].sent_ms))


def _program(observed: Sequence[Observed]) -> Program:
    turns: list[Turn] = []
    whole: Messages = ()
    for previous, one in zip((None, *observed[:-1]), observed, strict=True):
        if previous is not None and previous.index == one.index:
            raise ConfigError(f"program {one.program!r} has two requests for turn {one.index}", "turn")
        turn = _turn(one, previous)
        now: Messages = tuple(one.body["messages"])
        if turns:
            turns[-1], turn = continued(turns[-1], whole, turn)
        turns.append(turn)
        whole = now
    return Program(observed[0].program, tuple(turns), observed[0].tenant)


def _turn(one: Observed, previous: Observed | None) -> Turn:
    unread = {"messages", "tools", *LIMITS} | _TRANSPORT | _FORCED
    limits = [one.body[name] for name in LIMITS if one.body.get(name) is not None]
    turn = Turn(
        prompt=tuple(one.body["messages"]),
        tools=tuple(one.body.get("tools") or ()),
        sampling={name: value for name, value in one.body.items() if name not in unread},
        max_tokens=limits[0] if limits else None,
        at_ms=one.sent_ms,
        output=one.output,
    )
    if previous is None or previous.output.latency_ms is None:
        return turn
    return replace(turn, delay_ms=max(0.0, one.sent_ms - previous.sent_ms - previous.output.latency_ms))
