"""The headers of requests and answers, as `/openapi.json` shows them.

The configuration can name other headers for programs and deadlines; these are its defaults.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from holdfast.replicas.types import Priority
from holdfast.router.config import DEADLINE_HEADERS, PLACEMENT_HEADERS, PROGRAM_HEADERS
from holdfast.router.records import FRESH_DRAW, MAX_LENGTH, PRIORITY, CacheResult

Headers: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]  # the description and the schema of each

TEXT: Mapping[str, Any] = {"type": "string"}
NAME: Mapping[str, Any] = {"type": "string", "pattern": f"^[!-~]{{1,{MAX_LENGTH}}}$"}
COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 0}
SECONDS: Mapping[str, Any] = {"type": "number", "exclusiveMinimum": 0}
GRPC: Mapping[str, Any] = {"type": "string", "pattern": "^[1-9][0-9]{0,7}[HMSmun]$"}

# ---- of requests ----

ANY: Headers = {"x-request-id": ("The request's id, which comes back", {**TEXT, "pattern": "^[A-Za-z0-9._:-]{1,128}$"})}
PROGRAM: Headers = {
    **dict.fromkeys(PROGRAM_HEADERS, ("Names the program, if the body does not", NAME)),
    **dict.fromkeys(PLACEMENT_HEADERS, ("Names the program with which a new one is placed", NAME)),
}
TURN: Headers = {
    "idempotency-key": ("A retry with the same key gets the same answer, and changes a session once", NAME),
    "cache-control": ("For the response cache: no-store, no-cache, max-age=N", {**TEXT, "pattern": "^[!-~]*$"}),
    FRESH_DRAW: ("As `fresh_draw` of the body", {"enum": ["true", "false"]}),
    PRIORITY: ("The request's class, if the body does not name it", {"enum": [*Priority]}),
    **{name: ("How long the client waits", GRPC if name == "grpc-timeout" else SECONDS) for name in DEADLINE_HEADERS},
}
ANTHROPIC: Headers = {"anthropic-version": ("Sent by Anthropic's clients", TEXT)}

# ---- of answers ----

ALWAYS: Headers = {
    "x-request-id": ("The request's id", TEXT),
    "request-id": ("The same", TEXT),
    "x-holdfast-replica": ("The replica that answered, or none", TEXT),
    "x-holdfast-cache": ("The result of the look-up in the response cache", {"enum": [*CacheResult]}),
}
READ: Headers = {
    "age": ("Seconds since an answer from the response cache was computed", COUNT),
    "idempotent-replayed": ("The answer that the same request got with its `Idempotency-Key`", {"enum": ["true"]}),
    "x-holdfast-repeat": (
        "An answer from the response cache was drawn with the prompt's own seed; `fresh_draw` asks for another one",
        {"enum": ["prompt-seed"]},
    ),
    "x-holdfast-skipped": ("The parts of the request that the model does not see", TEXT),
    "x-holdfast-tools": (
        "system-prompt: the chat template takes no tools, so they stand in the system prompt",
        {"enum": ["system-prompt"]},
    ),
    "server-timing": ("Milliseconds of each stage, for a computed answer that is not streamed", TEXT),
}
LATER: Headers = {"retry-after": ("Seconds", {"type": "integer", "minimum": 1})}
STANDING: Headers = {
    f"x-ratelimit-{quantity}-{of}": (f"The tenant's limit of {of}", TEXT if quantity == "reset" else COUNT)
    for of in ("requests", "tokens")
    for quantity in ("limit", "remaining", "reset")
}
ANTHROPIC_STANDING: Headers = {
    f"anthropic-ratelimit-{of}-{quantity}": (
        f"The tenant's limit of {of}",
        {**TEXT, "format": "date-time"} if quantity == "reset" else COUNT,
    )
    for of in ("requests", "input-tokens", "output-tokens", "tokens")
    for quantity in ("limit", "remaining", "reset")
}


def header_parameters() -> dict[str, Any]:
    """All headers of requests, as components of the document."""
    return {
        name: {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in {**ANY, **PROGRAM, **TURN, **ANTHROPIC}.items()
    }


def header_components() -> dict[str, Any]:
    """All headers of answers, as components of the document."""
    return {
        name: {"description": text, "required": name in ALWAYS, "schema": schema}
        for name, (text, schema) in {**ALWAYS, **READ, **LATER, **STANDING, **ANTHROPIC_STANDING}.items()
    }


def request_headers(*, turn: bool, program: bool, anthropic: bool) -> dict[str, Any]:
    """References to the headers of a request: of a `turn`, of one that names a `program`, in Anthropic's form."""
    groups = ((PROGRAM, program), (TURN, turn), (ANTHROPIC, anthropic))
    return _refer("parameters", [*ANY, *(name for names, included in groups if included for name in names)])


def answer_headers(*, anthropic: bool, reads: bool = False, later: bool = False) -> dict[str, Any]:
    """References to the headers of an answer: to a request that `reads` a prompt, to one to retry `later`."""
    groups = ((READ, reads), (LATER, later), (ANTHROPIC_STANDING if anthropic else STANDING, True))
    return _refer("headers", [*ALWAYS, *(name for names, included in groups if included for name in names)])


def _refer(kind: str, names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/{kind}/{name}"} for name in names}
