"""aiperf's `multi_turn`: JSONL with one conversation a line, each of its turns one text that the server answers.

It carries no tool calls and no results of tools: those go into `mooncake`. What a turn's request has beside its text
(sampling, tools) goes into the turn's `extra`, which aiperf merges into the request.
After aiperf's `dataset/loader/models.py` and `multi_turn.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.loadgen.program import Json, Program, Sized, Turn
from holdfast.loadgen.traces import carried
from holdfast.loadgen.traces.entries import Entry, Reading, distinct, lines, write_lines
from holdfast.replicas.errors import ConfigError

NAME = "multi_turn"

_MEDIA = ("image", "images", "image_uuids", "audio", "audios", "video", "videos")
_SCHEDULED = ("timestamp", "delay", "output_length", "extra", carried.KEY)


@dataclass(slots=True)
class _Session:
    """The lines of one conversation so far."""

    turns: list[Turn] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    extension: Entry | None = None


def read(path: Path) -> Reading:
    """The conversations of a file, in the order of their first lines. Raises ConfigError that names line and field."""
    sessions: dict[str, _Session] = {}
    rows: list[Entry] = []
    for number, entry in enumerate(lines(path), 1):
        if entry.text("type") not in (None, NAME):
            raise entry.error("type", f"must be {NAME!r}")
        session = sessions.setdefault(entry.text("session_id") or f"{path.stem}-{number}", _Session())
        if session.extension is None:
            session.extension = entry.inner(carried.KEY)
        turns = entry.inners("turns")
        if not turns:
            raise entry.error("turns", "must be a list that is not empty")
        session.entries += turns
        session.turns += [_turn(turn) for turn in turns]
        rows.append(entry)
    if not rows:
        raise ConfigError(f"{path} has no conversation", "trace")
    programs = tuple(_program(name, session) for name, session in sessions.items())
    return Reading(programs, len(rows), sum((row.unread() for row in rows), Counter[str]()))


def write(programs: Iterable[Program], path: Path) -> None:
    """One line a program. Raises ConfigError for a turn that is more than one text, an opening system prompt aside."""
    write_lines(path, (_row(program) for program in distinct(programs)))


def _turn(entry: Entry) -> Turn:
    entry.text("type")
    for name in _MEDIA:
        if entry.data.get(name):
            raise entry.error(name, "only text can be replayed")
    at_ms, delay_ms = entry.number("timestamp"), entry.number("delay")
    if at_ms and delay_ms:
        raise entry.error("delay", "cannot be given with a timestamp")
    sampling, tools = carried.extra_in(entry)
    extension = entry.inner(carried.KEY)
    role = entry.text("role") or "user"
    if role == "tool":
        raise entry.error("role", f"{NAME} carries no results of tools")
    return Turn(
        prompt=({"role": role, "content": _content(entry)},),
        tools=tools,
        sampling=sampling,
        max_tokens=None if extension is None else extension.count("max_tokens"),
        at_ms=at_ms,
        delay_ms=delay_ms,
        output=carried.output_in(extension, entry.count("output_length")),
    )


def _content(entry: Entry) -> str | list[Json]:
    """One text as a string, several as parts, as aiperf sends them."""
    text, several = entry.text("text"), entry.raw("texts")
    if bool(text) == bool(several):
        raise entry.error("text", "there must be either a text or texts")
    if text:
        return text
    texts = several if isinstance(several, list) else [several]
    if all(isinstance(item, dict) and isinstance(item.get("contents"), list) for item in texts):
        texts = [content for item in texts for content in item["contents"]]
    if not texts or not all(isinstance(item, str) for item in texts):
        raise entry.error("texts", "must be a list of strings, or of objects with contents")
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": item} for item in texts]


def _program(name: str, session: _Session) -> Program:
    turns = session.turns
    if len(turns) > 1 and _is_system(turns[0]) and not _is_system(turns[1]) and _only_text(session.entries[0]):
        system, first = turns[0].prompt, turns[1].prompt
        assert not isinstance(system, Sized)
        assert not isinstance(first, Sized)
        turns = [replace(turns[1], prompt=system + first), *turns[2:]]
    tenant, closing = carried.program_in(session.extension)
    return Program(name, tuple(turns), tenant, closing)


def _is_system(turn: Turn) -> bool:
    return not isinstance(turn.prompt, Sized) and turn.prompt[0]["role"] == "system"


def _only_text(entry: Entry) -> bool:
    """Whether aiperf makes it the system prompt of the conversation and no request of its own."""
    return all(entry.data.get(name) is None for name in _SCHEDULED)


def _row(program: Program) -> Json:
    told = carried.of_program(program)
    turns = [row for index, turn in enumerate(program.turns) for row in _turns(program, index, turn)]
    return {"session_id": program.id, "turns": turns, **({carried.KEY: told} if told else {})}


def _turns(program: Program, index: int, turn: Turn) -> Iterator[Json]:
    if isinstance(turn.prompt, Sized) or turn.whole:
        raise _unfit(program, index, "a prompt that is whole, or of which it has the length only")
    if turn.at_ms and turn.delay_ms:
        raise _unfit(program, index, "a moment and a delay at once")
    messages = turn.prompt
    roles = [message["role"] for message in messages]
    if index == 0 and len(messages) == 2 and roles[0] == "system" != roles[1]:
        yield _text(program, index, messages[0])
        messages = messages[1:]
    elif index == 0 and roles == ["system"]:
        raise _unfit(program, index, "a request of a system prompt alone")
    if len(messages) != 1:
        raise _unfit(program, index, f"a turn of {len(messages)} messages")
    row = _text(program, index, messages[0])
    row |= {} if turn.at_ms is None else {"timestamp": turn.at_ms}
    row |= {} if turn.delay_ms is None else {"delay": turn.delay_ms}
    length = carried.output_length(turn)
    row |= {} if length is None else {"output_length": length}
    extra = turn.sampling | ({"tools": list(turn.tools)} if turn.tools else {})
    row |= {"extra": extra} if extra else {}
    told = carried.of_turn(turn, length)
    yield row | ({carried.KEY: told} if told else {})


def _text(program: Program, index: int, message: Json) -> Json:
    content: Any = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if set(part) == {"type", "text"} and part["type"] == "text"]
    role = {} if message["role"] == "user" else {"role": message["role"]}
    if set(message) == {"role", "content"} and content and isinstance(content, str):
        return {**role, "text": content}
    if set(message) == {"role", "content"} and len(texts) == len(parts) > 1:
        return {**role, "texts": texts}
    raise _unfit(program, index, f"a message that is more than text (role {message['role']!r})")


def _unfit(program: Program, index: int, what: str) -> ConfigError:
    return ConfigError(f"program {program.id!r}, turn {index}: {NAME} cannot carry {what}", "turns")
