"""Every format of traces under its name. All are read; `mooncake_trace`, which carries all of a program, is written."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from holdfast.loadgen.options import Conversion
from holdfast.loadgen.program import Json
from holdfast.loadgen.traces import logs, mooncake
from holdfast.loadgen.traces.entries import Reading
from holdfast.replicas.errors import ConfigError


class Format(StrEnum):
    """A file format of traces."""

    MOONCAKE = "mooncake_trace"  # aiperf's, and Mooncake's own traces
    OPENAI = "openai"  # logs of OpenAI messages
    MINI_SWE = "mini-swe-agent"


READERS: dict[Format, Callable[[Path], Reading]] = {
    Format.MOONCAKE: mooncake.read,
    Format.OPENAI: logs.read_openai,
    Format.MINI_SWE: logs.read_mini_swe,
}


def named(name: str) -> Format:
    """The format of that name. Raises ConfigError."""
    if name not in set(Format):
        raise ConfigError(f"a format is one of {', '.join(Format)}, not {name!r}", "format")
    return Format(name)


def read(path: Path, form: Format, tools: tuple[Json, ...] = ()) -> Reading:
    """Everything in a file; ``tools`` are for OpenAI logs that do not declare their own. Raises ConfigError."""
    if not tools:
        return READERS[form](path)
    if form is not Format.OPENAI:
        raise ConfigError(f"tools go with {Format.OPENAI}, not with {form}", "tools")
    return logs.read_openai(path, tools)


def main(options: Conversion) -> int:
    """`holdfast bench trace-convert`: write a file as a `mooncake_trace`, print what was read. Raises ConfigError."""
    tools = logs.read_tools(options.tools) if options.tools is not None else ()
    reading = read(options.source, named(options.read_as), tools)
    mooncake.write(reading.programs, options.target)
    print(reading.summary)
    return 0
