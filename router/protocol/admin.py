"""`/v1/admin` and `/v1/usage`: request bodies and queries."""

from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import Field

from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.types import CellLimits, Priority
from holdfast.router.protocol.body import Body, Query, read
from holdfast.router.tenants import Tenant, TenantCache, TenantLimits

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


class DaysQuery(Query):
    days: Annotated[int, Field(ge=1, le=400)] = 31

    def periods(self, now: float) -> list[str]:
        """The last days and their months, the latest first."""
        today = datetime.fromtimestamp(now, UTC)
        names = [(today - timedelta(days=i)).strftime("%Y-%m-%d") for i in range(self.days)]
        return [*names, *dict.fromkeys(day[:7] for day in names)]


class RowsQuery(Query):
    """Rows of one stream, or of several tenants' streams, between two dates or seconds since 1970.

    `after` is the id of the last row of the page before, and `ID/TENANT` if there are several tenants.
    """

    from_: datetime | None = Field(None, alias="from")
    to: datetime | None = None
    after: Annotated[str, Field(pattern="^[0-9]{1,19}(-[0-9]{1,19})?(/.+)?$")] | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000
    format: Literal["jsonl", "csv"] = "jsonl"

    @property
    def csv(self) -> bool:
        return self.format == "csv"

    @property
    def end(self) -> str:
        """The stream id at which the rows end."""
        return "+" if self.to is None else f"({_stream_id(self.to)}"

    def begin_of(self, tenant: str = "") -> str:
        """The stream id at which this tenant's rows begin. Rows with the same id are ordered by tenant."""
        if self.after is None:
            return "-" if self.from_ is None else _stream_id(self.from_)
        row_id, _, last = self.after.partition("/")
        return row_id if last and tenant > last else f"({row_id}"


class TenantDaysQuery(DaysQuery):
    tenant: str | None = None


class TenantRowsQuery(RowsQuery):
    tenant: str | None = None


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


def _stream_id(moment: datetime) -> str:
    """The first stream id of a moment."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return str(max(0, int(aware.timestamp() * 1000)))
