"""`kv_hints` of a request: which parts of its prompt the cache should keep.

The envelope and the action `kv.retain` are vLLM's, so that an orchestrator can send both servers the same. vLLM's
directives name ranges of tokens; here they may also name messages and their kind. Other actions are ignored. Hints
only change the order in which unused cells are evicted.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.kv.tags import PRIORITIES, RELEASED, Hint, Label, Tag
from holdfast.router.protocol.body import NULL_IS_ABSENT, Body, validate

FIELD = "kv_hints"
RETAIN = "kv.retain"
MAX_ACTIONS = 16
MAX_DIRECTIVES = 128
MAX_DURATION_S = 30 * 24 * 3600.0
MAX_PRIORITY = 100

Position = Annotated[int, Field(ge=0)]


class KvAction(Body):
    """`payload` depends on the type."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = Field(default_factory=dict)


class KvHints(Body):
    """vLLM's envelope."""

    protocol_version: str
    message_id: str
    actions: Annotated[list[KvAction], Field(max_length=MAX_ACTIONS)] = Field(default_factory=list)


class Directive(Body):
    """At most one of: `messages` [from, to), tokens `start` to `end`, the output. Default: prompt and output."""

    messages: Annotated[list[Position], Field(min_length=2, max_length=2)] | None = None
    start: Position | None = None
    end: Position | None = None
    covers_output: bool = False
    tag: Tag | None = None
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = None
    duration: Annotated[float, Field(ge=0, le=MAX_DURATION_S)] | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> "Directive":
        tokens = self.start is not None or self.end is not None
        if (self.messages is not None) + tokens + self.covers_output > 1:
            raise ValueError("it names more than one of messages, tokens and output")
        if self.messages is not None and self.messages[0] >= self.messages[1]:
            raise ValueError("messages must be [from, to) with from < to")
        if self.end is not None and self.end <= (self.start or 0):
            raise ValueError("end must be greater than start")
        if self.tag is None and self.priority is None:
            raise ValueError("it needs a tag or a priority")
        return self


class RetainPayload(Body):
    scope: Literal["tenant"] | None = None  # there is no other
    directives: list[Annotated[Directive, NULL_IS_ABSENT]]


def read_hints(envelope: KvHints | None) -> tuple[Hint, ...]:
    """Raises InvalidRequestError, naming the field."""
    hints: list[Hint] = []
    for index, action in enumerate(envelope.actions if envelope is not None else ()):
        if action.action_type != RETAIN:
            continue
        path = f"{FIELD}.actions.{index}"
        if action.action_version.partition(".")[0] != "1":
            raise InvalidRequestError(f"'{path}.action_version' must be 1.x", f"{path}.action_version")
        hints += map(_hint, _payload(action, path).directives)
        if len(hints) > MAX_DIRECTIVES:
            field = f"{path}.payload.directives"
            raise InvalidRequestError(f"'{field}': at most {MAX_DIRECTIVES} directives a request", field)
    return tuple(hints)


def check_ranges(hints: Sequence[Hint], n_messages: int) -> None:
    """Raises InvalidRequestError if a hint names messages that do not exist."""
    for hint in hints:
        if hint.where == "messages" and hint.end is not None and hint.end > n_messages:
            message = f"'{FIELD}' names message {hint.end - 1} of {n_messages}: they count from 0"
            raise InvalidRequestError(message, FIELD)


def _payload(action: KvAction, path: str) -> RetainPayload:
    try:
        return validate(RetainPayload, action.payload)
    except InvalidRequestError as error:
        inner_field = error.info.field or ""
        field = f"{path}.payload.{inner_field}"
        raise InvalidRequestError(error.info.message.replace(f"'{inner_field}'", f"'{field}'"), field) from None


def _hint(directive: Directive) -> Hint:
    priority = directive.priority
    if priority is None and directive.tag is not None:
        priority = PRIORITIES[directive.tag]
    duration_s = math.inf if directive.duration is None else directive.duration
    label = Label(directive.tag or "", priority if priority and priority > 0 else RELEASED, duration_s)
    if directive.covers_output:
        return Hint("reply", label)
    if directive.messages is not None:
        return Hint("messages", label, *directive.messages)
    return Hint("tokens", label, directive.start or 0, directive.end)
