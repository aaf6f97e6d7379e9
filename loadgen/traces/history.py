"""Prompts of a conversation and what each adds to the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.loadgen.traces.model import Json, Messages, Program, Sized, Turn
from holdfast.replicas.errors import ConfigError


def continuation(before: Sequence[Json], now: Sequence[Json]) -> tuple[Json, Messages] | None:
    """The assistant's message that follows ``before`` in ``now``, and what comes after it; None if none does."""
    length = len(before)
    if len(now) <= length or list(now[:length]) != list(before) or now[length].get("role") != "assistant":
        return None
    return now[length], tuple(now[length + 1 :])


def continued(earlier: Turn, before: Sequence[Json], later: Turn) -> tuple[Turn, Turn]:
    """Both turns, where ``later`` has a whole prompt: it keeps what is new, ``earlier`` what went into the history."""
    assert not isinstance(later.prompt, Sized)
    following = continuation(before, later.prompt)
    if following is None:
        return earlier, replace(later, whole=True)
    said, new = following
    output = earlier.output
    if said != output.history:
        unknown = output.history is None and output.failure is None
        output = replace(output, answer=said) if unknown else replace(output, kept=said)
    return replace(earlier, output=output), replace(later, prompt=new, whole=False)


def prompts(program: Program) -> Iterator[Messages]:
    """The whole prompt of every turn, as recorded. Raises ConfigError where the trace does not have it."""
    whole: Messages = ()
    before: Turn | None = None
    for index, turn in enumerate(program.turns):
        if isinstance(turn.prompt, Sized):
            raise ConfigError(f"program {program.id!r}, turn {index}: the trace has the prompt's length only", "prompt")
        if before is None or turn.whole:
            whole = turn.prompt
        elif before.output.history is None:
            raise ConfigError(f"program {program.id!r}, turn {index - 1}: the trace has no answer", "answer")
        else:
            whole = (*whole, before.output.history, *turn.prompt)
        yield whole
        before = turn
