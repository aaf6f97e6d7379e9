"""`kv_hints` of a request: what parts of its prompt are worth in the cache.

The envelope, and of its actions `kv.retain`, are those of vLLM, so that an orchestrator may send both the same. There
a directive names a range of tokens; here it may name messages instead, and what they are. Other actions are for others
and are passed over. Whatever is said is a matter of order among cells that nobody uses, and of no more.
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
    """One thing that is asked for; `payload` is its type's own."""

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
    """A part of the prompt, at most one of: `messages` [from, to), tokens `start` to `end`, the reply alone. Without
    any it is all of the prompt and the reply.
    """

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
            raise ValueError("it names more than one of messages, tokens and the output")
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


def read_hints(given: KvHints | None) -> tuple[Hint, ...]:
    """What is said of which part. Raises InvalidRequestError, naming the field."""
    hints: list[Hint] = []
    for place, action in enumerate(given.actions if given is not None else ()):
        if action.action_type != RETAIN:
            continue
        path = f"kv_hints.actions.{place}"
        if action.action_version.partition(".")[0] != "1":
            raise InvalidRequestError(f"'{path}.action_version' must be 1.x", f"{path}.action_version")
        for directive in _payload(action, path).directives:
            if len(hints) == MAX_DIRECTIVES:
                where = f"{path}.payload.directives"
                raise InvalidRequestError(f"'{where}': at most {MAX_DIRECTIVES} directives a request", where)
            hints.append(_hint(directive))
    return tuple(hints)


def check_ranges(hints: Sequence[Hint], n_messages: int) -> None:
    """Raises InvalidRequestError where a hint names messages that are not there."""
    for hint in hints:
        if hint.where == "messages" and hint.end is not None and hint.end > n_messages:
            raise InvalidRequestError(
                f"'{FIELD}' names message {hint.end - 1} of {n_messages}: they count from 0", FIELD
            )


def _payload(action: KvAction, path: str) -> RetainPayload:
    try:
        return validate(RetainPayload, action.payload)
    except InvalidRequestError as error:
        inside = error.info.field or ""
        where = f"{path}.payload.{inside}"
        raise InvalidRequestError(error.info.message.replace(f"'{inside}'", f"'{where}'"), where) from None


def _hint(directive: Directive) -> Hint:
    priority = directive.priority
    if priority is None and directive.tag is not None:
        priority = PRIORITIES[directive.tag]
    lasts = math.inf if directive.duration is None else directive.duration
    label = Label(directive.tag or "", priority if priority and priority > 0 else RELEASED, lasts)
    if directive.covers_output:
        return Hint("reply", label)
    if directive.messages is not None:
        return Hint("messages", label, *directive.messages)
    return Hint("tokens", label, directive.start or 0, directive.end)
