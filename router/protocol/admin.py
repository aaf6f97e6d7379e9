"""`/v1/admin` and `/v1/usage`: bodies, and what a query asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field

from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.types import CellLimits, Priority
from holdfast.router.protocol.body import Body, decode, validate
from holdfast.router.tenants import Tenant, TenantCache, TenantLimits

MOST_ROWS = 10000
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
ScopeName = Literal["infer", "usage", "operate"]
ClassName = Literal["interactive", "batch"]
SCOPES: Sequence[ScopeName] = ("infer", "usage")  # of a key that says nothing
Limit = Annotated[int, Field(ge=1)]


class LimitsBody(Body):
    """As `tenants[].limits` of the configuration; what is absent is no limit."""

    requests_per_minute: Limit | None = None
    input_tokens_per_minute: Limit | None = None
    uncached_tokens_per_minute: Limit | None = None
    output_tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    max_programs: Limit | None = None
    units_per_day: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    units_per_month: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None


class CacheBody(Body):
    """As `tenants[].cache` of the configuration; what is absent is as `router` has it for all."""

    enabled: bool = True
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    bytes: Limit | None = None


class CellsBody(Body):
    """As `tenants[].cells` of the configuration: shares of each engine's cells."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    ceiling: Annotated[float, Field(gt=0, le=1)] = 1.0
    pinned: Annotated[float, Field(ge=0, le=1)] = 1.0


class KeyBody(Body):
    """A key that is to be made. `retire_in_s`: the others that were made here expire so long from now."""

    id: Word | None = None
    scopes: Annotated[list[ScopeName], Field(min_length=1)] = Field(default_factory=lambda: list(SCOPES))
    expires_in_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    retire_in_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ChangeBody(Body):
    """What a tenant is from now on; what is absent stays as it is. `limits`, `cache` and `cells` are replaced whole."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    limits: LimitsBody | None = None
    cache: CacheBody | None = None
    cells: CellsBody | None = None
    operator: bool | None = None
    priority: ClassName | None = None
    priorities: list[ClassName] | None = None
    prompt_seed: bool | None = None


class TenantBody(ChangeBody):
    """A tenant that is to be made, with its first key."""

    name: Word
    key: KeyBody = Field(default_factory=KeyBody)


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Which rows of a stream, or of several tenants', are asked for. `begin` and `end` are places, `after` the row that
    was the last: its place, and its tenant where there are several.
    """

    begin: str
    end: str
    limit: int
    csv: bool
    after: tuple[str, str] | None = None

    def begin_of(self, tenant: str) -> str:
        """Where this tenant's rows begin: rows of one place are in the order of their tenants' names."""
        if self.after is None:
            return self.begin
        place, last = self.after
        return place if last and tenant > last else f"({place}"


def read_tenant(raw: bytes) -> TenantBody:
    return validate(TenantBody, decode(raw))


def read_change(raw: bytes) -> ChangeBody:
    return validate(ChangeBody, decode(raw))


def read_key(raw: bytes) -> KeyBody:
    return validate(KeyBody, decode(raw) if raw.strip() else {})


def changed(tenant: Tenant, body: ChangeBody) -> Tenant:
    """`tenant` with what `body` says. Raises InvalidRequestError for what cannot be."""
    given = {each.name: getattr(tenant, each.name) for each in fields(tenant)}
    for name in ("weight", "operator", "prompt_seed"):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    if body.priority is not None:
        given["priority"] = Priority(body.priority)
    if body.priorities is not None:
        given["priorities"] = tuple(map(Priority, body.priorities))
    if body.limits is not None:
        given["limits"] = TenantLimits(**body.limits.model_dump())
    if body.cache is not None:
        given["cache"] = TenantCache(**body.cache.model_dump())
    try:
        if body.cells is not None:
            given["cells"] = CellLimits(**body.cells.model_dump())
        return Tenant(**given)
    except ConfigError as error:
        raise InvalidRequestError(error.message, error.field) from error


def read_rows(query: Mapping[str, str], several: bool = False) -> RowQuery:
    """`from`, `to` (dates, or seconds since the epoch), `after` (a place, and a tenant where there are `several`),
    `limit`, `format`.

    Raises InvalidRequestError.
    """
    limit, form = query.get("limit", "1000"), query.get("format", "jsonl")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MOST_ROWS):
        raise InvalidRequestError(f"'limit' must be a number from 1 to {MOST_ROWS}", "limit")
    if form not in ("jsonl", "csv"):
        raise InvalidRequestError("'format' must be 'jsonl' or 'csv'", "format")
    after, _, tenant = query.get("after", "").partition("/")
    if after and not all(part.isascii() and part.isdigit() and len(part) < 20 for part in after.split("-", 1)):
        raise InvalidRequestError("'after' must be the place of a row", "after")
    if several and after and not tenant:
        raise InvalidRequestError("'after' must be PLACE/TENANT of a row, where rows are of several tenants", "after")
    begin = f"({after}" if after else _place(query.get("from", ""), "from") or "-"
    end = _place(query.get("to", ""), "to")
    return RowQuery(begin, f"({end}" if end else "+", int(limit), form == "csv", (after, tenant) if after else None)


def read_days(query: Mapping[str, str], now: float) -> list[str]:
    """The last `days` days and their months, the latest first. Raises InvalidRequestError."""
    days = query.get("days", "31")
    if not (days.isascii() and days.isdigit() and len(days) < 4 and 1 <= int(days) <= 400):
        raise InvalidRequestError("'days' must be a number from 1 to 400", "days")
    today = datetime.fromtimestamp(now, UTC)
    told = [(today - timedelta(days=i)).strftime("%Y-%m-%d") for i in range(int(days))]
    return [*told, *dict.fromkeys(day[:7] for day in told)]


def _place(text: str, name: str) -> str:
    """The first place of a moment; "" where none is given."""
    if not text:
        return ""
    try:
        if text.replace(".", "", 1).isdigit():
            return str(int(float(text) * 1000))
        moment = datetime.fromisoformat(text)
        return str(int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise InvalidRequestError(f"'{name}' must be a date (2026-11-23) or seconds since 1970", name) from None
