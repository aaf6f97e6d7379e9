"""Data without a field in the standard formats, in one object beside their fields that other readers ignore.

`holdfast` holds it: of a program its tenant and closing messages, of a turn its output, limit and whether its prompt
is whole.
"""

from __future__ import annotations

from dataclasses import fields

from holdfast.loadgen.program import Json, Output, Program, Turn
from holdfast.loadgen.traces.entries import Entry, answer_in

KEY = "holdfast"


def of_program(program: Program) -> Json:
    """Tenant and closing messages, where there are any."""
    data: Json = {"tenant": program.tenant} if program.tenant else {}
    return data | ({"closing": list(program.closing)} if program.closing else {})


def of_turn(turn: Turn, output_length: int | None) -> Json:
    """The data of a turn beyond the format's own ``output_length``."""
    output = {field.name: getattr(turn.output, field.name) for field in fields(Output)}
    output = {name: value for name, value in output.items() if value is not None}
    data: Json = {"whole": True} if turn.whole else {}
    if turn.max_tokens is not None:
        data["max_tokens"] = turn.max_tokens
    if data or output != ({} if output_length is None else {"tokens": output_length}):
        data["output"] = output
    return data


def program_in(entry: Entry | None) -> tuple[str, tuple[Json, ...]]:
    """Tenant and closing messages."""
    return ("", ()) if entry is None else (entry.text("tenant") or "", entry.messages("closing") or ())


def output_in(entry: Entry | None, output_length: int | None) -> Output:
    """The output; where nothing is carried, of the recorded length."""
    inner = None if entry is None else entry.inner("output")
    if inner is None:
        return Output(tokens=output_length)
    return Output(
        answer=answer_in(inner, "answer"),
        kept=answer_in(inner, "kept"),
        prompt_tokens=inner.count("prompt_tokens"),
        cached_tokens=inner.count("cached_tokens"),
        tokens=inner.count("tokens"),
        reason=inner.text("reason"),
        failure=inner.text("failure"),
        first_token_ms=inner.number("first_token_ms"),
        latency_ms=inner.number("latency_ms"),
        queue_ms=inner.number("queue_ms"),
        prefill_ms=inner.number("prefill_ms"),
        decode_ms=inner.number("decode_ms"),
    )


def extra_in(entry: Entry) -> tuple[Json, tuple[Json, ...]]:
    """aiperf's `extra`, which it merges into the request: sampling fields, and tools that stand among them."""
    extra = entry.inner("extra")
    if extra is None:
        return {}, ()
    if "messages" in extra.data:
        raise extra.error("messages", "would replace the conversation")
    tools = extra.objects("tools") or ()
    return {name: extra.raw(name) for name in extra.data if name != "tools"}, tools


def output_length(turn: Turn) -> int | None:
    """aiperf's `output_length`: the recorded length, or else the limit; None for 0, which aiperf refuses."""
    return (turn.output.tokens if turn.output.tokens is not None else turn.max_tokens) or None
