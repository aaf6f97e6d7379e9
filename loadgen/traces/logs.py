"""Conversations as lists of OpenAI messages: logs of agents, and the input of vLLM's multi-turn benchmark.

They say what was said and not when. A program has a turn for every message of the assistant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from holdfast.loadgen.traces.entries import Entry, document, lines
from holdfast.loadgen.traces.messages import clean, turns_of
from holdfast.loadgen.traces.model import Json, Program, Reading
from holdfast.replicas.errors import ConfigError


def read_openai(path: Path, tools: tuple[Json, ...] = ()) -> Reading:
    """A log: JSONL of objects with `messages`, and if they like `tools` and `id`; ``tools`` are for those without.

    Messages after the last of the assistant close the program. Raises ConfigError that names line and field.
    """
    return _reading(lines(path), path, tools, ask_last=False)


def read_vllm(path: Path) -> Reading:
    """The conversations of vLLM's `benchmark_serving_multi_turn`: one JSON list of objects with `id` and `messages`.

    A message of the user that nobody answered is asked too, as that benchmark does. Raises ConfigError.
    """
    entries = document(path)
    if isinstance(entries, dict) and "filetype" in entries:
        raise ConfigError(f"{path} says how conversations are generated; wanted are the conversations", "trace")
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is not a list of conversations", "trace")
    found = (Entry(entry, f"{path}, conversation {number}") for number, entry in enumerate(entries, 1))
    return _reading(found, path, (), ask_last=True)


def read_tools(path: Path) -> tuple[Json, ...]:
    """A JSON list of tools as an OpenAI client declares them. Raises ConfigError."""
    return Entry({"tools": document(path)}, str(path)).objects("tools") or ()


def _reading(entries: Iterable[Entry], path: Path, tools: tuple[Json, ...], ask_last: bool) -> Reading:
    programs: dict[str, Program] = {}
    left_out: Counter[str] = Counter()
    for number, entry in enumerate(entries, 1):
        name = entry.text("id") or f"{path.stem}-{number}"
        if name in programs:
            raise entry.error("id", f"there are two conversations {name!r}")
        programs[name] = _program(entry, name, tools, ask_last)
        left_out += entry.unread()
    if not programs:
        raise ConfigError(f"{path} has no conversation", "trace")
    return Reading(tuple(programs.values()), len(programs), left_out)


def _program(entry: Entry, name: str, tools: tuple[Json, ...], ask_last: bool) -> Program:
    found = entry.inners("messages")
    if not found:
        raise entry.error("messages", "must be a list that is not empty")
    own = entry.objects("tools")
    turns, closing = turns_of([clean(message) for message in found], tools if own is None else own, ask_last)
    if not turns:
        raise entry.error("messages", "the assistant says nothing")
    return Program(name, tuple(turns), closing=closing)
