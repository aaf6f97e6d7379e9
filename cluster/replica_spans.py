"""A replica's part of a trace: one span for each request, with the engine's phases as children.

    router: POST /v1/chat/completions
      router: replica                  from the call to the answer: waiting for a replica with room, and Ray
        replica: generate
          render     prompt to text to tokens, grammars included
          queue      submitted to the engine until its first step
          prefill    to the first token
          decode     to the last token
          validate   beside decode and until the answer is whole: text, stops and tool calls read from the tokens

The engine's monotonic times are converted to the wall clock when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.replicas.requests import Answer, Completed, Errored, GenerateRequest, Piece, Timing, ToolCallDelta, Usage

if TYPE_CHECKING:
    from holdfast.router.tracing import Span, Spans


def begin(spans: Spans | None, request: GenerateRequest) -> GenerationSpan | None:
    """The span of `request`; None if it is not recorded."""
    if spans is None or not request.trace:
        return None
    span = spans.serve("generate", request.trace)
    return GenerationSpan(span, request) if span.recording else None


class GenerationSpan:
    """Records a reply to the router. `end` is called exactly once; without a whole reply the request was aborted."""

    def __init__(self, span: Span, request: GenerateRequest) -> None:
        self._span = span
        self._began = time.monotonic()
        self._whole = False
        span.tell(request_id=request.request_id, program_id=request.program_id, tenant=request.scope)
        span.tell(program_turns=request.program_turns)

    def pieces(self, pieces: Iterable[Piece]) -> None:
        """A part of a streamed reply."""
        for piece in pieces:
            if isinstance(piece, ToolCallDelta) and piece.name is not None:
                self._span.event("tool call", index=piece.index, tool=piece.name)
            elif isinstance(piece, Completed | Errored):
                self.reply(piece)

    def reply(self, reply: Answer | Completed | Errored) -> None:
        """The end of a reply, streamed or whole."""
        self._whole = True
        if isinstance(reply, Errored):
            self._span.fail(reply.error.kind.value)
            return
        self._usage(reply.usage)
        self._span.tell(finish_reason=reply.reason, tools=",".join(reply.called.tools))
        self._parts(reply.timing)

    def end(self) -> None:
        if not self._whole:
            self._span.fail("aborted")
        self._span.end()

    def _usage(self, usage: Usage) -> None:
        self._span.tell(prompt_tokens=usage.prompt, cached_tokens=usage.cached, completion_tokens=usage.completion)

    def _parts(self, timing: Timing) -> None:
        now = time.monotonic()
        epoch = time.time() - now  # of the engine's clock
        part = self._span.part
        part("render", self._began + epoch, timing.arrived + epoch, busy_s=timing.render_s)
        begin = timing.arrived
        for name, end in (("queue", timing.scheduled), ("prefill", timing.first_token), ("decode", timing.finished)):
            if end is None:
                return
            part(name, begin + epoch, end + epoch)
            begin = end
        part("validate", (timing.first_token or begin) + epoch, now + epoch, busy_s=timing.validate_s)
