"""Every format under its name: read, write, and convert from one to another."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from holdfast.loadgen.program import Json, Program
from holdfast.loadgen.traces import logs, mooncake, multi_turn
from holdfast.loadgen.traces.entries import Reading
from holdfast.replicas.errors import ConfigError


class Format(StrEnum):
    """How a trace is stored."""

    MOONCAKE = "mooncake_trace"  # aiperf's, and Mooncake's own traces
    MULTI_TURN = "multi_turn"  # aiperf's
    OPENAI = "openai"  # read only: logs of OpenAI messages
    VLLM = "vllm"  # read only: vLLM's multi-turn benchmark
    MINI_SWE = "mini-swe-agent"  # read only


def named(name: str) -> Format:
    """The format of that name. Raises ConfigError."""
    try:
        return Format(name)
    except ValueError as error:
        raise ConfigError(f"a format is one of {', '.join(Format)}, not {name!r}", "format") from error


def read(path: Path, form: Format, tools: tuple[Json, ...] = ()) -> Reading:
    """Everything in a file; ``tools`` are for OpenAI logs that do not declare their own. Raises ConfigError."""
    if tools and form is not Format.OPENAI:
        raise ConfigError(f"tools go with {Format.OPENAI}, not with {form}", "tools")
    match form:
        case Format.MOONCAKE:
            return mooncake.read(path)
        case Format.MULTI_TURN:
            return multi_turn.read(path)
        case Format.OPENAI:
            return logs.read_openai(path, tools)
        case Format.VLLM:
            return logs.read_vllm(path)
        case Format.MINI_SWE:
            return logs.read_mini_swe(path)


def write(programs: Iterable[Program], path: Path, form: Format, live: bool = False) -> None:
    """Write a file; ``live`` is for `mooncake_trace`: turns hold what is new, answers are the replaying model's.

    Raises ConfigError for a format that is only read, and for what the format cannot carry.
    """
    if live and form is not Format.MOONCAKE:
        raise ConfigError(f"live goes with {Format.MOONCAKE}, not with {form}", "live")
    match form:
        case Format.MOONCAKE:
            mooncake.write(programs, path, live)
        case Format.MULTI_TURN:
            multi_turn.write(programs, path)
        case _:
            raise ConfigError(f"{form} is only read; written are {Format.MOONCAKE} and {Format.MULTI_TURN}", "to")


def convert(
    source: Path, read_as: Format, target: Path, write_as: Format, tools: Path | None = None, live: bool = False
) -> Reading:
    """Read one file and write the other; what was read is returned, with its counts for the caller to print.

    ``tools`` is a file with the tools of OpenAI logs that do not declare their own. Raises ConfigError.
    """
    reading = read(source, read_as, logs.read_tools(tools) if tools is not None else ())
    write(reading.programs, target, write_as, live)
    return reading
