"""Trajectories of mini-swe-agent: a JSON file for each run (`*.traj.json`), messages with times and usage beside them.

Version 2 keeps calls of one tool, `bash`, version 1 a block of bash in the text; before it had `info`, a file was the
list of messages alone. A reply that broke the format is not among the messages: it is counted and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.loadgen.traces.entries import Entry, document
from holdfast.loadgen.traces.messages import clean, turns_of
from holdfast.loadgen.traces.model import Json, Output, Program, Reading, Turn
from holdfast.replicas.errors import ConfigError

SUFFIX = ".traj.json"
BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool that version 2 declares; the files do not have it. After its `models/utils/actions_toolcall.py`."""

BROKEN = "replies that broke the format"
_NOTES = frozenset({"info", "trajectory_format", "instance_id"})  # about the run and the agent, not the conversation


def read(path: Path) -> Reading:
    """One trajectory, or all under a folder in the order of their names. Raises ConfigError, with file and field."""
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no *{SUFFIX}", "trace")
    programs: dict[str, Program] = {}
    left_out: Counter[str] = Counter()
    for file in files:
        data = document(file)
        entry = Entry({"messages": data} if isinstance(data, list) else data, str(file))
        program = _program(entry, entry.text("instance_id") or file.name.removesuffix(SUFFIX), left_out)
        if program.id in programs:
            raise entry.error("instance_id", f"there are two trajectories {program.id!r}")
        programs[program.id] = program
    return Reading(tuple(programs.values()), len(files), left_out)


def _program(entry: Entry, name: str, left_out: Counter[str]) -> Program:
    for about in _NOTES:
        entry.given(about)
    found = entry.inners("messages")
    if not found:
        raise entry.error("messages", "must be a list that is not empty")
    said = [message for message in found if message.text("role") != "exit"]
    notes = [message.object("extra") or {} for message in said]
    messages = [clean(message) for message in said]
    tools = (BASH,) if any("tool_calls" in message for message in messages) else ()
    turns, closing = turns_of(messages, tools)
    if not turns:
        raise entry.error("messages", "the assistant says nothing")
    unread = entry.unread()
    for end in (message for message in found if message not in said):
        # The agent's own mark at the end is no message that a model was sent.
        unread = unread - end.unread() + Counter({"messages.exit": 1})
    left_out += unread + Counter({BROKEN: sum(_broken(note) for note in notes)})
    return Program(name, _timed(turns, messages, notes), closing=closing)


def _broken(note: Json) -> bool:
    return note.get("interrupt_type") == "FormatError" and "response" in note


def _timed(turns: Sequence[Turn], messages: Sequence[Json], notes: Sequence[Json]) -> tuple[Turn, ...]:
    """The turns with times and usage. Replies and results of commands carry the moment they came at, in seconds."""
    timed: list[Turn] = []
    replied = ready = None  # when the last reply came, and the last result since
    broken = False  # whether the time since then holds another request
    left = iter(turns)
    for message, note in zip(messages, notes, strict=True):
        moment = _number(note.get("timestamp"))
        if message["role"] != "assistant":
            ready, broken = ready if moment is None else moment, broken or _broken(note)
            continue
        turn = next(left)
        output = replace(_usage(turn, note), latency_ms=None if broken else _between(ready, moment))
        timed.append(replace(turn, delay_ms=_between(replied, ready), output=output))
        replied, ready, broken = moment, None, False
    return tuple(timed)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    """Milliseconds, None where a clock is missing or was set back."""
    return None if start_s is None or end_s is None or end_s < start_s else (end_s - start_s) * 1e3


def _usage(turn: Turn, extra: Json) -> Output:
    """What the provider's own response says; all of it is optional there."""
    response = _object(extra.get("response"))
    usage, choices = _object(response.get("usage")), response.get("choices")
    choice = _object(choices[0]) if isinstance(choices, list) and choices else {}
    reason = choice.get("finish_reason")
    return replace(
        turn.output,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        tokens=_count(usage.get("completion_tokens")),
        reason=reason if isinstance(reason, str) else None,
    )


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
