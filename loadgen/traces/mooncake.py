"""aiperf's `mooncake_trace`: JSONL with one request a line, lines of one `session_id` being one program's turns.

A line holds `messages`, a `text_input`, a whole `payload`, or only an `input_length` with `hash_ids`. Messages come in
two ways, which aiperf tells apart by `assistant_responses`: `recorded`, every line has its whole prompt, or `live`,
every line has what is new (aiperf 0.13 knows only the first and takes every line for a whole prompt; before it was
released under this name the field was `message_mode`, with `history` and `delta`).
After aiperf's `dataset/loader/models.py` and `mooncake_trace.py`.

Data without a field of aiperf's goes into one object beside them, `holdfast`, that other readers ignore: of a program
its tenant and closing messages, of a turn its output, limit and whether its prompt is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from holdfast.loadgen.program import Json, Messages, Output, Program, Sized, Turn, continued, prompts
from holdfast.loadgen.traces.entries import Entry, Reading, answer_in, lines, write_lines
from holdfast.replicas.errors import ConfigError

NAME = "mooncake_trace"
KEY = "holdfast"
TRANSPORT = frozenset({"model", "stream", "stream_options"})
"""Fields of a payload about transport, not about the question."""

_INPUTS = ("messages", "text_input", "payload", "input_length")
_MODES = {"live": True, "delta": True, "recorded": False, "history": False}


@dataclass(frozen=True, slots=True)
class _Line:
    """A turn as its line has it: ``whole`` if nothing before it counts; None: unknown yet."""

    turn: Turn
    kind: str  # lengths and texts, live, recorded: lines of one program are of one kind
    whole: bool | None
    tools: bool  # whether the line has tools of its own
    entry: Entry
    extension: Entry | None


def read(path: Path) -> Reading:
    """The programs of a file, in the order of their first lines. Raises ConfigError that names line and field."""
    sessions: dict[str, list[_Line]] = {}
    left_out: Counter[str] = Counter()
    n_lines = 0
    for n_lines, entry in enumerate(lines(path), 1):
        line = _line(entry, left_out)
        name = entry.text("session_id") or f"{path.stem}-{n_lines}"
        sessions.setdefault(name, []).append(line)
    if not n_lines:
        raise ConfigError(f"{path} has no request", "trace")
    programs = tuple(_program(name, session) for name, session in sessions.items())
    for line in chain.from_iterable(sessions.values()):
        left_out += line.entry.unread()
    return Reading(programs, n_lines, left_out)


def write(programs: Iterable[Program], path: Path) -> None:
    """One line a turn, with its whole prompt.

    Raises ConfigError for an answer that the trace does not have, and for two programs of one id.
    """
    programs = tuple(programs)
    name, count = max(Counter(program.id for program in programs).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"there are two programs {name!r}", "id")
    write_lines(path, (row for program in programs for row in _rows(program)))


def _line(entry: Entry, left_out: Counter[str]) -> _Line:
    if entry.text("type") not in (None, NAME):
        raise entry.error("type", f"must be {NAME!r}")
    if sum(entry.data.get(name) is not None for name in _INPUTS) != 1:
        raise entry.error("", f"must have exactly one of {', '.join(_INPUTS)}")
    payload = entry.inner("payload")
    source = entry if payload is None else payload
    prompt, kind = _prompt(entry, source)
    tools = source.objects("tools")
    if payload is None and (tools == () or (tools and kind == "input")):
        raise source.error("tools", "must not be empty, and needs messages")
    sampling: Json = {}
    if (extra := entry.inner("extra")) is not None:  # aiperf merges it into the request
        if "messages" in extra.data:
            raise extra.error("messages", "would replace the conversation")
        tools = extra.objects("tools") or tools
        sampling = {name: extra.raw(name) for name in extra.data if name != "tools"}
    if payload is not None:
        sampling = _fields(payload, left_out) | sampling
    extension = entry.inner(KEY)
    turn = Turn(
        prompt=prompt,
        tools=tools or (),
        sampling=sampling,
        max_tokens=None if extension is None else extension.count("max_tokens"),
        at_ms=entry.number("timestamp"),
        delay_ms=entry.number("delay"),
        output=_output(entry, extension),
    )
    whole = extension.flag("whole") if extension is not None and extension.data.get("output") is not None else None
    return _Line(turn, kind, whole, tools is not None, entry, extension)


def _prompt(entry: Entry, source: Entry) -> tuple[Messages | Sized, str]:
    mode = entry.text("assistant_responses") or entry.text("message_mode") or "recorded"
    if mode.lower() not in _MODES:
        raise entry.error("assistant_responses", f"must be one of {', '.join(_MODES)}")
    live = _MODES[mode.lower()]
    blocks, length, text = entry.counts("hash_ids"), entry.count("input_length"), entry.text("text_input")
    if blocks is not None and length is None:
        raise entry.error("hash_ids", "needs input_length")
    if live and entry.data.get("messages") is None:
        raise entry.error("assistant_responses", "'live' needs messages")
    if length is not None:
        return Sized(length, blocks), "input"
    if text is not None:
        return ({"role": "user", "content": text},), "input"
    messages = source.messages("messages")
    if not messages:
        raise source.error("messages", "must be a list that is not empty")
    return messages, "live" if live else "recorded"


def _output(entry: Entry, extension: Entry | None) -> Output:
    length = entry.count("output_length")
    output = None if extension is None else extension.inner("output")
    if output is None:
        return Output(tokens=length)
    values: Json = {name: answer_in(output, name) for name in ("answer", "kept")}
    values |= {name: output.text(name) for name in ("reason", "failure")}
    values |= {name: output.count(name) for name in ("prompt_tokens", "cached_tokens", "tokens")}
    return Output(
        **values | {each.name: output.number(each.name) for each in fields(Output) if each.name.endswith("_ms")}
    )


def _fields(payload: Entry, left_out: Counter[str]) -> Json:
    """The payload's fields beside messages and tools; those about transport are left out and counted."""
    left_out += Counter(f"payload.{name}" for name in payload.data if name in TRANSPORT)
    names = [name for name in payload.data if name not in {"messages", "tools"}]
    return {name: payload.raw(name) for name in names if payload.raw(name) is not None and name not in TRANSPORT}


def _program(name: str, lines: list[_Line]) -> Program:
    turns: list[Turn] = []
    whole: Messages = ()
    for line in lines:
        if line.kind != lines[0].kind:
            raise line.entry.error("", f"program {name!r} began with lines of another kind ({lines[0].kind})")
        turn = line.turn
        if line.kind == "live" and turns and not line.tools:
            turn = replace(turn, tools=turns[-1].tools)
        if line.kind == "recorded":
            assert not isinstance(turn.prompt, Sized)
            now = turn.prompt
            if turns and line.whole:
                turn = replace(turn, whole=True)
            elif turns:
                turns[-1], turn = continued(turns[-1], whole, turn)
                if turn.whole and line.whole is False:
                    raise line.entry.error("messages", "do not continue the turn before")
            whole = now
        turns.append(turn)
    if (extension := lines[0].extension) is None:
        return Program(name, tuple(turns))
    return Program(name, tuple(turns), extension.text("tenant") or "", extension.messages("closing") or ())


def _rows(program: Program) -> Iterator[Json]:
    sized = [isinstance(turn.prompt, Sized) for turn in program.turns]
    if any(sized) and not all(sized):
        raise ConfigError(f"program {program.id!r}: {NAME} cannot mix lengths and messages", "prompt")
    whole = iter(()) if any(sized) else prompts(program)
    for index, turn in enumerate(program.turns):
        row: Json = {"session_id": program.id}
        row |= {} if turn.at_ms is None else {"timestamp": turn.at_ms}
        row |= {} if turn.delay_ms is None else {"delay": turn.delay_ms}
        if why := _unfit(turn, first=not index):
            raise ConfigError(f"program {program.id!r}, turn {index}: {NAME} cannot carry {why}", "turns")
        if isinstance(turn.prompt, Sized):
            row |= {"input_length": turn.prompt.tokens}
            row |= {} if turn.prompt.blocks is None else {"hash_ids": list(turn.prompt.blocks)}
        else:
            row |= {"assistant_responses": "recorded", "messages": list(next(whole))}
        row |= {"tools": list(turn.tools)} if turn.tools else {}
        # The recorded length, or else the limit; none for 0, which aiperf refuses.
        length = (turn.output.tokens if turn.output.tokens is not None else turn.max_tokens) or None
        row |= {} if length is None else {"output_length": length}
        row |= {"extra": turn.sampling} if turn.sampling else {}
        extension = _extension(turn, length)
        if index == 0:
            extension |= {"tenant": program.tenant} if program.tenant else {}
            extension |= {"closing": list(program.closing)} if program.closing else {}
        yield row | ({KEY: extension} if extension else {})


def _extension(turn: Turn, output_length: int | None) -> Json:
    """The data of a turn beyond aiperf's ``output_length``."""
    output = {field.name: getattr(turn.output, field.name) for field in fields(Output)}
    output = {name: value for name, value in output.items() if value is not None}
    data: Json = {"whole": True} if turn.whole else {}
    if turn.max_tokens is not None:
        data["max_tokens"] = turn.max_tokens
    if data or output != ({} if output_length is None else {"tokens": output_length}):
        data["output"] = output
    return data


def _unfit(turn: Turn, *, first: bool) -> str:
    """The part of a turn that this format cannot carry; "": it carries all."""
    if isinstance(turn.prompt, Sized):
        return "tools without messages" if turn.tools else "a whole prompt of which it has the length" * turn.whole
    return "a prompt without messages" if (first or turn.whole) and not turn.prompt else ""
