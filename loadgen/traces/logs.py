"""Conversations as lists of messages: agents' logs and mini-swe-agent's trajectories.

Messages are reduced to what an OpenAI client sends; frameworks keep notes of their own in them. A program has a turn
for every message of the assistant.

mini-swe-agent writes a JSON file for each run (`*.traj.json`), messages with times and usage beside them. Version 2
keeps calls of one tool, `bash`, version 1 a block of bash in the text; before it had `info`, a file was the list of
messages alone. A reply that broke the format is not among the messages: it is counted and left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.loadgen.program import Json, Output, Program, Turn
from holdfast.loadgen.traces.entries import Entry, Reading, document, function_of, lines, required
from holdfast.replicas.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")


def clean(entry: Entry) -> Json:
    """The message with only OpenAI's fields; its other fields count as unread. Raises ConfigError."""
    role = entry.text("role")
    if role not in ROLES:
        raise entry.error("role", f"must be one of {', '.join(ROLES)}")
    message: Json = {"role": role, "content": _content(entry)}
    calls = [_call(call) for call in entry.inners("tool_calls") or ()] if role == "assistant" else []
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = required(entry, "tool_call_id")
    if message["content"] is None and not calls:
        raise entry.error("content", "must be there where there is no tool call")
    for name in ("name", "reasoning_content"):
        value = entry.text(name)
        if value is not None:
            message[name] = value
    return message


def _content(entry: Entry) -> str | list[Json] | None:
    content: Any = entry.raw("content")
    if content is None or isinstance(content, str):
        return content
    parts = entry.inners("content") or []
    for part in parts:
        if part.text("type") != "text":
            raise part.error("type", "must be 'text': only text can be replayed")
    return [{"type": "text", "text": required(part, "text")} for part in parts]


def _call(entry: Entry) -> Json:
    function = function_of(entry)
    arguments = function.raw("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        raise function.error("arguments", "must be JSON in a string, or an object")
    name, call_id = required(function, "name"), required(entry, "id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- logs ----


def read_openai(path: Path, tools: tuple[Json, ...] = ()) -> Reading:
    """A log: JSONL of objects with `messages`, and if they like `tools` and `id`; ``tools`` are for those without.

    Messages after the last of the assistant close the program. Raises ConfigError that names line and field.
    """
    programs: dict[str, Program] = {}
    left_out: Counter[str] = Counter()
    for number, entry in enumerate(lines(path), 1):
        name = entry.text("id") or f"{path.stem}-{number}"
        if name in programs:
            raise entry.error("id", f"there are two conversations {name!r}")
        own = entry.objects("tools")
        programs[name] = _program(name, entry, _messages(entry), tools if own is None else own)
        left_out += entry.unread()
    if not programs:
        raise ConfigError(f"{path} has no conversation", "trace")
    return Reading(tuple(programs.values()), len(programs), left_out)


def read_tools(path: Path) -> tuple[Json, ...]:
    """A JSON list of tools as an OpenAI client declares them. Raises ConfigError."""
    return Entry({"tools": document(path)}, str(path)).objects("tools") or ()


def _messages(entry: Entry) -> list[Entry]:
    messages = entry.inners("messages")
    if not messages:
        raise entry.error("messages", "must be a list that is not empty")
    return messages


def _program(name: str, entry: Entry, messages: Sequence[Entry], tools: tuple[Json, ...]) -> Program:
    """A turn for each message of the assistant; what follows the last one closes the program. Raises ConfigError."""
    turns: list[Turn] = []
    prompt: list[Json] = []
    for message in map(clean, messages):
        if message["role"] == "assistant":
            turns.append(Turn(tuple(prompt), tools=tools, output=Output(answer=message)))
            prompt = []
        else:
            prompt.append(message)
    if not turns:
        raise entry.error("messages", "the assistant says nothing")
    return Program(name, tuple(turns), closing=tuple(prompt))


# ---- mini-swe-agent ----

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


def read_mini_swe(path: Path) -> Reading:
    """One trajectory, or all under a folder in the order of their names. Raises ConfigError, with file and field."""
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no *{SUFFIX}", "trace")
    programs: dict[str, Program] = {}
    left_out: Counter[str] = Counter()
    for file in files:
        data = document(file)
        entry = Entry({"messages": data} if isinstance(data, list) else data, str(file))
        program = _trajectory(entry, entry.text("instance_id") or file.name.removesuffix(SUFFIX), left_out)
        if program.id in programs:
            raise entry.error("instance_id", f"there are two trajectories {program.id!r}")
        programs[program.id] = program
    return Reading(tuple(programs.values()), len(files), left_out)


def _trajectory(entry: Entry, name: str, left_out: Counter[str]) -> Program:
    for note in _NOTES:
        entry.raw(note)
    entries = _messages(entry)
    spoken = [message for message in entries if message.text("role") != "exit"]
    notes = [message.object("extra") or {} for message in spoken]
    program = _program(name, entry, spoken, ())
    calls = any("tool_calls" in (turn.output.answer or {}) for turn in program.turns)
    unread = entry.unread()
    for end in (message for message in entries if message not in spoken):
        # The agent's own mark at the end was not sent to the model.
        unread = unread - end.unread() + Counter({"messages.exit": 1})
    left_out += unread + Counter({BROKEN: sum(_broken(note) for note in notes)})
    return replace(program, turns=_timed(program.turns, (BASH,) if calls else (), spoken, notes))


def _broken(note: Json) -> bool:
    return note.get("interrupt_type") == "FormatError" and "response" in note


def _timed(
    turns: Sequence[Turn], tools: tuple[Json, ...], messages: Sequence[Entry], notes: Sequence[Json]
) -> tuple[Turn, ...]:
    """The turns with tools, times and usage. Replies and results carry the moment at which they came, in seconds."""
    timed: list[Turn] = []
    replied = ready = None  # when the last reply came, and the last result since
    broken = False  # whether the time since then holds another request
    remaining = iter(turns)
    for message, note in zip(messages, notes, strict=True):
        moment = _number(note.get("timestamp"))
        if message.data["role"] != "assistant":
            ready, broken = ready if moment is None else moment, broken or _broken(note)
            continue
        turn = next(remaining)
        output = replace(_usage(turn, note), latency_ms=None if broken else _between(ready, moment))
        timed.append(replace(turn, tools=tools, delay_ms=_between(replied, ready), output=output))
        replied, ready, broken = moment, None, False
    return tuple(timed)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    """Milliseconds, None where a clock is missing or was set back."""
    return None if start_s is None or end_s is None or end_s < start_s else (end_s - start_s) * 1e3


def _usage(turn: Turn, extra: Json) -> Output:
    """Usage from the provider's own response, where all fields are optional."""
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
