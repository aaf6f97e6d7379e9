"""aiperf's `multi_turn`, which is only read: JSONL with one conversation a line, of texts that the server answers.

It carries no tool calls and no results of tools. What a turn's request has beside its text (sampling, tools) is in the
turn's `extra`, which aiperf merges into the request. After aiperf's `dataset/loader/models.py` and `multi_turn.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.loadgen.program import Json, Program, Sized, Turn
from holdfast.loadgen.traces.entries import KEY, Entry, Reading, extra_in, lines, program_in, turn_in
from holdfast.replicas.errors import ConfigError

NAME = "multi_turn"

_MEDIA = ("image", "images", "image_uuids", "audio", "audios", "video", "videos")
_SCHEDULED = ("timestamp", "delay", "output_length", "extra", KEY)


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
            session.extension = entry.inner(KEY)
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


def _turn(entry: Entry) -> Turn:
    entry.text("type")
    for name in _MEDIA:
        if entry.data.get(name):
            raise entry.error(name, "only text can be replayed")
    sampling, tools = extra_in(entry)
    role = entry.text("role") or "user"
    if role == "tool":
        raise entry.error("role", f"{NAME} carries no results of tools")
    fields = turn_in(entry, entry.inner(KEY))
    if fields["at_ms"] and fields["delay_ms"]:
        raise entry.error("delay", "cannot be given with a timestamp")
    return Turn(({"role": role, "content": _content(entry)},), tools=tools, sampling=sampling, **fields)


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
    tenant, closing = program_in(session.extension)
    return Program(name, tuple(turns), tenant, closing)


def _is_system(turn: Turn) -> bool:
    return not isinstance(turn.prompt, Sized) and turn.prompt[0]["role"] == "system"


def _only_text(entry: Entry) -> bool:
    """Whether aiperf makes it the system prompt of the conversation and no request of its own."""
    return all(entry.data.get(name) is None for name in _SCHEDULED)
