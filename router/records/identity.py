"""Reads the headers and ids of a request: its program, parent, placement, priority and deadline.

A request that names no program may continue a known conversation: see `conversations`.
"""

from collections.abc import Mapping, Sequence
from math import inf

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.types import Priority
from holdfast.router.protocol.turn import ClaimedIds

MAX_LENGTH = 256
GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
PRIORITY = "x-priority"  # the header that names a request's class, where its body does not
FRESH_DRAW = "x-holdfast-fresh-draw"  # the header with the effect of the body's `fresh_draw`


def program_named(tenant: str, ids: ClaimedIds, headers: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The key of the program that a request names, `<tenant>/<id>`: by its body or by the first of the headers `names`.

    `headers` looks names up without regard to case. Raises InvalidRequestError for an id that is too long or has
    control characters.
    """
    if ids.program_id:
        return named_program(tenant, ids.program_id)
    for name in names:
        if value := headers.get(name):
            return _scoped(tenant, value, name)
    if ids.previous_response_id:
        return _scoped(tenant, ids.previous_response_id, "previous_response_id")
    return None


def neighbour(tenant: str, ids: ClaimedIds, headers: Mapping[str, str], names: Sequence[str]) -> str:
    """The program near which a new one is to be placed, by the first of the headers `names` or `prompt_cache_key`.

    It has the form of a program's key: a sub-agent names its parent. "": none, or what cannot be a program's name.
    """
    return _first(tenant, (*(headers.get(name) for name in names), ids.prompt_cache_key))


def parent_named(tenant: str, headers: Mapping[str, str], names: Sequence[str]) -> str:
    """The key of the program that a new one is a sub-agent of, by the first of the headers `names`; "": of none."""
    return _first(tenant, [headers.get(name) for name in names])


def priority_named(headers: Mapping[str, str]) -> Priority | None:
    """The class that the headers ask for; None: none. Raises InvalidRequestError for an unknown class."""
    value = headers.get(PRIORITY, "").strip().lower()
    if value and value not in tuple(Priority):
        raise InvalidRequestError(f"'{PRIORITY}' must be one of {', '.join(Priority)}", PRIORITY)
    return Priority(value) if value else None


def fresh_draw_named(headers: Mapping[str, str]) -> bool:
    """Whether the headers ask for an answer of the request's own. Raises InvalidRequestError for another word."""
    value = headers.get(FRESH_DRAW, "false").strip().lower()
    if value not in ("true", "false"):
        raise InvalidRequestError(f"'{FRESH_DRAW}' must be 'true' or 'false'", FRESH_DRAW)
    return value == "true"


def within_named(headers: Mapping[str, str], names: Sequence[str]) -> float:
    """The client's timeout in seconds: the shortest one in its headers; infinity if there is none.

    An unreadable value is ignored: clients and proxies send these headers for others.
    """
    return min((_seconds(name, headers[name].strip()) for name in names if name in headers), default=inf)


def _seconds(name: str, value: str) -> float:
    unit = 1.0
    if name == "grpc-timeout":
        unit, value = GRPC_UNITS.get(value[-1:], 0.0), value[:-1]
    elif name.endswith("-ms"):
        unit = 1e-3
    try:
        seconds = float(value) * unit
    except ValueError:
        return inf
    return seconds if seconds > 0 else inf


def named_program(tenant: str, program_id: str) -> str:
    """The key of the program that a tenant calls by this name. Raises InvalidRequestError, as `program_named` does."""
    return _scoped(tenant, program_id, "program_id")


def unnamed_program(tenant: str, token: str) -> str:
    """The key of a program that nobody has named."""
    return f"{tenant}/~{token}"


def shown_program(key: str) -> str:
    """The id by which a tenant calls the program with this key; "" for a program that nobody has named."""
    name = key.partition("/")[2]
    return name.removeprefix("~") if not name.startswith("~") or name.startswith("~~") else ""


def session_program(tenant: str, session_id: str) -> str:
    """The key of the program that a session is. No named or unnamed program has it."""
    return f"{tenant}/~session/{session_id}"


def _scoped(tenant: str, value: str, field: str) -> str:
    if not _fits(value):
        raise InvalidRequestError(f"'{field}' must be at most {MAX_LENGTH} printable characters", field)
    return f"{tenant}/{_escaped(value)}"


def _first(tenant: str, values: Sequence[str | None]) -> str:
    return next((f"{tenant}/{_escaped(value)}" for value in values if value and _fits(value)), "")


def _fits(value: str) -> bool:
    return len(value) <= MAX_LENGTH and value.isprintable()


def _escaped(value: str) -> str:
    """A name that looks like an unnamed program's must not be taken for one."""
    return f"~{value}" if value.startswith("~") else value
