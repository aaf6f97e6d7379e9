"""`/v1/admin` and `/v1/usage`: request bodies and queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.types import CellLimits, Priority
from holdfast.router.protocol.body import Body, read
from holdfast.router.tenants import Tenant, TenantCache, TenantLimits

MOST_ROWS = 10000
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
ScopeName = Literal["infer", "usage", "operate"]
ClassName = Literal["interactive", "batch"]
SCOPES: Sequence[ScopeName] = ("infer", "usage")  # the default of a key
Limit = Annotated[int, Field(ge=1)] | None
Units = Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class LimitsBody(Body):
    """As `tenants[].limits` of the configuration. A missing field means no limit."""

    requests_per_minute: Limit = None
    input_tokens_per_minute: Limit = None
    uncached_tokens_per_minute: Limit = None
    output_tokens_per_minute: Limit = None
    max_concurrent: Limit = None
    max_programs: Limit = None
    units_per_day: Units = None
    units_per_month: Units = None


class CacheBody(Body):
    """As `tenants[].cache` of the configuration. A missing field means the value in `router`."""

    enabled: bool = True
    ttl_s: Positive | None = None
    bytes: Limit = None


class CellsBody(Body):
    """As `tenants[].cells` of the configuration: shares of each engine's cells."""

    floor: Share = 0.0
    ceiling: Annotated[float, Field(gt=0, le=1)] = 1.0
    pinned: Share = 1.0


class KeyBody(Body):
    """A new key. `retire_in_s`: the keys that were made here before expire after so many seconds."""

    id: Word | None = None
    scopes: Annotated[list[ScopeName], Field(min_length=1)] = Field(default_factory=lambda: list(SCOPES))
    expires_in_s: Positive | None = None
    retire_in_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class ChangeBody(Body):
    """Changes of a tenant. Missing fields stay as they are. `limits`, `cache` and `cells` are replaced as a whole."""

    weight: Positive | None = None
    limits: LimitsBody | None = None
    cache: CacheBody | None = None
    cells: CellsBody | None = None
    operator: bool | None = None
    priority: ClassName | None = None
    priorities: list[ClassName] | None = None
    prompt_seed: bool | None = None


class TenantBody(ChangeBody):
    """A new tenant with its first key."""

    name: Word
    key: KeyBody = Field(default_factory=KeyBody)


@dataclass(frozen=True, slots=True)
class RowQuery:
    """The rows of one stream, or of several tenants' streams, that a query wants.

    `begin` and `end` are stream ids. `after` is the last row of the page before: its id, and its tenant if there are
    several.
    """

    begin: str
    end: str
    limit: int
    csv: bool
    after: tuple[str, str] | None = None

    def begin_of(self, tenant: str) -> str:
        """Where this tenant's rows begin. Rows with the same id are ordered by tenant."""
        if self.after is None:
            return self.begin
        row_id, last = self.after
        return row_id if last and tenant > last else f"({row_id}"


def read_tenant(raw: bytes) -> TenantBody:
    return read(TenantBody, raw)


def read_change(raw: bytes) -> ChangeBody:
    return read(ChangeBody, raw)


def read_key(raw: bytes) -> KeyBody:
    """The body may be empty."""
    return read(KeyBody, raw if raw.strip() else b"{}")


def changed(tenant: Tenant, body: ChangeBody) -> Tenant:
    """`tenant` with the changes of `body`. Raises InvalidRequestError for an impossible combination."""
    changes: dict[str, Any] = {each.name: getattr(tenant, each.name) for each in fields(tenant)}
    plain = ("weight", "operator", "prompt_seed")
    changes |= {name: getattr(body, name) for name in plain if getattr(body, name) is not None}
    if body.priority is not None:
        changes["priority"] = Priority(body.priority)
    if body.priorities is not None:
        changes["priorities"] = tuple(map(Priority, body.priorities))
    try:
        for name, kind in (("limits", TenantLimits), ("cache", TenantCache), ("cells", CellLimits)):
            if (value := getattr(body, name)) is not None:
                changes[name] = kind(**value.model_dump())
        return Tenant(**changes)
    except ConfigError as error:
        raise InvalidRequestError(error.message, error.field) from error


def read_rows(query: Mapping[str, str], several: bool = False) -> RowQuery:
    """The query parameters `from` and `to` (dates, or seconds since the epoch), `after`, `limit` and `format`.

    `after` is the id of a row, and `ID/TENANT` if there are `several` tenants. Raises InvalidRequestError.
    """
    limit, form = query.get("limit", "1000"), query.get("format", "jsonl")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MOST_ROWS):
        raise InvalidRequestError(f"'limit' must be a number from 1 to {MOST_ROWS}", "limit")
    if form not in ("jsonl", "csv"):
        raise InvalidRequestError("'format' must be 'jsonl' or 'csv'", "format")
    after, _, tenant = query.get("after", "").partition("/")
    if after and not all(part.isascii() and part.isdigit() and len(part) < 20 for part in after.split("-", 1)):
        raise InvalidRequestError("'after' must be the id of a row", "after")
    if several and after and not tenant:
        raise InvalidRequestError("'after' must be ID/TENANT of a row when rows are of several tenants", "after")
    begin = f"({after}" if after else _stream_id(query.get("from", ""), "from") or "-"
    end = _stream_id(query.get("to", ""), "to")
    return RowQuery(begin, f"({end}" if end else "+", int(limit), form == "csv", (after, tenant) if after else None)


def read_days(query: Mapping[str, str], now: float) -> list[str]:
    """The last `days` days and their months, the latest first. Raises InvalidRequestError."""
    days = query.get("days", "31")
    if not (days.isascii() and days.isdigit() and len(days) < 4 and 1 <= int(days) <= 400):
        raise InvalidRequestError("'days' must be a number from 1 to 400", "days")
    today = datetime.fromtimestamp(now, UTC)
    names = [(today - timedelta(days=i)).strftime("%Y-%m-%d") for i in range(int(days))]
    return [*names, *dict.fromkeys(day[:7] for day in names)]


def _stream_id(text: str, name: str) -> str:
    """The first stream id of a moment; "" for no text."""
    if not text:
        return ""
    try:
        if text.replace(".", "", 1).isdigit():
            return str(int(float(text) * 1000))
        moment = datetime.fromisoformat(text)
        return str(int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError):
        raise InvalidRequestError(f"'{name}' must be a date (2026-11-23) or seconds since 1970", name) from None
