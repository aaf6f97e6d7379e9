"""A tenant's own usage over HTTP, and `/v1/admin`: tenants, keys, usage and the audit log, with keys of its own."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.router.config import RouterConfig
from holdfast.router.entry import (
    Audit,
    Entry,
    TenantStore,
    UsageBooks,
    as_csv,
    as_json_lines,
    caller,
    first_rows,
    json_response,
    route_of,
)
from holdfast.router.protocol.admin import (
    ChangeBody,
    DaysQuery,
    KeyBody,
    RowsQuery,
    TenantBody,
    TenantDaysQuery,
    TenantRowsQuery,
    changed,
    read_key,
)
from holdfast.router.protocol.body import read, read_query
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import ApiKey, Scope, Tenant, TenantDirectory, expect_floors, hash_key, key_of, make_key


class UsageEndpoints:
    """A tenant's own usage, for keys with the scope `usage`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._books = entry.books

    async def sums(self, request: Request) -> Response:
        """The caller's usage."""
        async with self._entry.entered(request, Scope.USAGE) as tenant:
            periods = read_query(DaysQuery, request.query_params).periods(self._books.quotas.clock())
            rows = await self._books.sums(tenant.name, periods)
            return json_response(
                orjson.dumps({"tenant": tenant.name, "limits": asdict(tenant.limits), "periods": rows})
            )

    async def records(self, request: Request) -> Response:
        """One record for each request of the caller."""
        async with self._entry.entered(request, Scope.USAGE) as tenant:
            return await export(read_query(RowsQuery, request.query_params), self._books, [tenant.name])


class AdminEndpoints:
    """For keys of `router.admin_key_hashes`. Without such keys, administration is off."""

    def __init__(
        self,
        directory: TenantDirectory,
        tenants: TenantStore,
        audit: Audit,
        entry: Entry,
        config: RouterConfig,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._tenants = tenants
        self._books = entry.books
        self._audit = audit
        self._entry = entry
        self._clock = clock
        self._hashes = frozenset(config.admin_key_hashes)
        self._proxies = config.networks()

    # ---- tenants and keys ----

    async def tenants(self, request: Request) -> Response:
        """All tenants, with limits and keys; no hashes."""
        self._authorize(request)
        used = await self._tenants.last_used()
        configured = {tenant.name: tenant for tenant in self._directory.configured}
        rows = []
        for tenant in self._directory.tenants:
            record, _ = await self._tenants.find(tenant.name)
            own = configured.get(tenant.name)
            keys = [_key_row(tenant.name, key, "configuration", used) for key in (own.all_keys if own else ())]
            keys += [_key_row(tenant.name, key, "redis", used) for key in (record.all_keys if record else ())]
            rows.append({**_tenant_row(tenant, "configuration" if own or record is None else "redis"), "keys": keys})
        return json_response(orjson.dumps({"tenants": rows}))

    async def add(self, request: Request) -> Response:
        """Add a tenant with its first key. Only this answer shows the key."""
        caller_id = self._authorize(request)
        body = await self._entry.read(request, partial(read, TenantBody))
        _, before = await self._tenants.find(body.name)
        if before or self._directory.named(body.name) is not None:
            raise RefusedError(Refusal.TENANT_EXISTS, f"Tenant '{body.name}' already exists", "name")
        tenant = changed(Tenant(body.name), body)
        self._expect_floors(tenant)
        key, api_key = self._make(body.key)
        entry = self._audit.entry("tenant added", caller_id, body.name, key=api_key.id)
        await self._put(body.name, before, replace(tenant, keys=(api_key,)), entry)
        return _with_key(tenant, key, api_key)

    async def change(self, request: Request) -> Response:
        """Change a tenant. Tenants of the configuration can only be changed there."""
        caller_id = self._authorize(request)
        body = await self._entry.read(request, partial(read, ChangeBody))
        name = request.path_params["name"]
        if any(tenant.name == name for tenant in self._directory.configured):
            raise InvalidRequestError(f"Tenant '{name}' is in the configuration: change it there", "name")
        record, before = await self._known(name)
        after = changed(record, body)
        self._expect_floors(after)
        entry = self._audit.entry("tenant changed", caller_id, name, fields=sorted(body.model_fields_set))
        await self._put(name, before, after, entry)
        return json_response(orjson.dumps(_tenant_row(after, "redis")))

    async def remove(self, request: Request) -> Response:
        """Remove a tenant with its keys. Its usage stays booked."""
        caller_id = self._authorize(request)
        name = request.path_params["name"]
        _, before = await self._known(name)
        await self._put(name, before, None, self._audit.entry("tenant removed", caller_id, name))
        return json_response(orjson.dumps({"id": name, "object": "tenant.deleted", "deleted": True}))

    async def purge(self, request: Request) -> Response:
        """Delete a tenant's cached answers, wherever the tenant is defined."""
        caller_id = self._authorize(request)
        name = request.path_params["name"]
        if self._directory.named(name) is None and name not in {tenant.name for tenant in self._directory.tenants}:
            raise _unknown(name)
        await self._tenants.purge(name, self._audit.entry("cache purged", caller_id, name))
        return json_response(orjson.dumps({"id": name, "object": "tenant.cache.deleted", "deleted": True}))

    async def add_key(self, request: Request) -> Response:
        """Add a key. With `retire_in_s` the other keys that were made here expire then: a rotation."""
        caller_id = self._authorize(request)
        body = await self._entry.read(request, read_key)
        name = request.path_params["name"]
        record, before = await self._tenants.find(name)
        tenant = record or self._directory.named(name)
        if tenant is None:
            raise _unknown(name)
        key, api_key = self._make(body)
        older = record.all_keys if record else ()
        used_ids = {each.id for each in (*older, *tenant.all_keys)}
        if api_key.id in used_ids:
            raise InvalidRequestError(f"Tenant '{name}' has a key '{api_key.id}' already", "id")
        if body.retire_in_s is not None:
            ends = self._clock() + body.retire_in_s
            older = tuple(replace(each, expires=min(ends, each.expires or ends)) for each in older)
        after = replace(record or Tenant(name), key_hashes=(), keys=(*older, api_key))
        act = "key added" if body.retire_in_s is None else "key rotated"
        await self._put(name, before, after, self._audit.entry(act, caller_id, name, key=api_key.id))
        return _with_key(tenant, key, api_key)

    async def remove_key(self, request: Request) -> Response:
        """Delete a key that was made here."""
        caller_id = self._authorize(request)
        name, key_id = request.path_params["name"], request.path_params["key_id"]
        record, before = await self._known(name)
        remaining = tuple(key for key in record.all_keys if key.id != key_id)
        if len(remaining) == len(record.all_keys):
            raise RefusedError(Refusal.NO_TENANT, f"Tenant '{name}' has no key '{key_id}' that was made here", "key_id")
        entry = self._audit.entry("key removed", caller_id, name, key=key_id)
        await self._put(name, before, replace(record, key_hashes=(), keys=remaining), entry)
        return json_response(orjson.dumps({"id": key_id, "object": "key.deleted", "deleted": True}))

    # ---- usage and audit ----

    async def sums(self, request: Request) -> Response:
        """The sums of `tenant`, or of all tenants, removed ones included."""
        self._authorize(request)
        query = read_query(TenantDaysQuery, request.query_params)
        names, periods = await self._tenants_named(query.tenant), query.periods(self._clock())
        rows = [{"tenant": name, "periods": await self._books.sums(name, periods)} for name in names]
        return json_response(orjson.dumps({"tenants": rows}))

    async def records(self, request: Request) -> Response:
        """The records of `tenant`, or of all tenants, removed ones included, in their order."""
        self._authorize(request)
        query = read_query(TenantRowsQuery, request.query_params)
        if query.tenant is None and query.after is not None and "/" not in query.after:
            raise InvalidRequestError("'after' must be ID/TENANT of a row when rows are of several tenants", "after")
        return await export(query, self._books, await self._tenants_named(query.tenant))

    async def audit(self, request: Request) -> Response:
        """The audit log as JSON lines, the latest first: up to `limit` acts, and as many refusals."""
        self._authorize(request)
        query = read_query(RowsQuery, request.query_params)
        await self._audit.flush()
        entries = await self._audit.read(query.begin_of(), query.end, query.limit)
        return Response(as_json_lines({"place": place, **entry} for place, entry in entries), media_type=JSON_LINES)

    # ---- parts ----

    def _authorize(self, request: Request) -> str:
        """The id of the key. Raises RefusedError."""
        identity = caller(request)
        key = key_of(identity)
        hashed = hash_key(key) if key else ""
        if hashed in self._hashes:
            return hashed.removeprefix("sha256:")[:8]
        refusal = Refusal.UNAUTHENTICATED if self._hashes else Refusal.FORBIDDEN
        self._audit.refused(refusal.value, identity.address(self._proxies), route_of(request))
        if not self._hashes:
            raise RefusedError(refusal, "Administration is off: 'router.admin_key_hashes' names no key for it")
        raise RefusedError(refusal, "This needs one of the keys of 'router.admin_key_hashes'")

    async def _known(self, name: str) -> tuple[Tenant, bytes]:
        record, before = await self._tenants.find(name)
        if record is None:
            if self._directory.named(name) is not None:
                raise InvalidRequestError(f"Tenant '{name}' is in the configuration: change it there", "name")
            raise _unknown(name)
        return record, before

    async def _put(self, name: str, before: bytes, after: Tenant | None, entry: bytes) -> None:
        if not await self._tenants.change(name, before, after, entry):
            raise RefusedError(Refusal.CHANGED, f"Tenant '{name}' has changed; read it again and retry")

    def _expect_floors(self, changed: Tenant) -> None:
        """Raises InvalidRequestError if the floors of all tenants exceed an engine's cells."""
        others = (tenant for tenant in self._directory.tenants if tenant.name != changed.name)
        try:
            expect_floors((changed, *others))
        except ConfigError as error:
            raise InvalidRequestError(error.message, error.field) from error

    def _make(self, body: KeyBody) -> tuple[str, ApiKey]:
        key = make_key()
        expires = None if body.expires_in_s is None else self._clock() + body.expires_in_s
        try:
            return key, ApiKey(body.id or secrets.token_hex(4), hash_key(key), tuple(map(Scope, body.scopes)), expires)
        except ConfigError as error:
            raise InvalidRequestError(error.message, error.field) from error

    async def _tenants_named(self, name: str | None) -> Sequence[str]:
        """The tenants that a query names. A removed tenant still has its usage."""
        if name:
            return [name]
        return sorted({*(tenant.name for tenant in self._directory.tenants), *await self._books.tenants()})


JSON_LINES = "application/jsonl"


async def export(query: RowsQuery, books: UsageBooks, tenants: Iterable[str]) -> Response:
    """Records as JSON lines or CSV. Raises UnavailableError."""
    rows: list[dict[str, Any]] = []
    for tenant in tenants:
        rows += await books.records(tenant, query.begin_of(tenant), query.end, query.limit)
        rows = first_rows(rows, query.limit)
    if query.csv:
        return Response(as_csv(rows), media_type="text/csv")
    return Response(as_json_lines(rows), media_type=JSON_LINES)


def _tenant_row(tenant: Tenant, source: str) -> dict[str, Any]:
    row = {"name": tenant.name, "source": source, "weight": tenant.weight, "limits": asdict(tenant.limits)}
    row["cache"], row["cells"] = asdict(tenant.cache), asdict(tenant.cells)
    classes = {"priority": tenant.priority.value, "priorities": [each.value for each in tenant.priorities]}
    return {**row, "operator": tenant.operator, **classes, "prompt_seed": tenant.prompt_seed}


def _key_row(tenant: str, key: ApiKey, source: str, used: dict[tuple[str, str], float]) -> dict[str, Any]:
    row = {"id": key.id, "source": source, "scopes": list(key.scopes), "expires": key.expires}
    return {**row, "last_used": used.get((tenant, key.id))}


def _with_key(tenant: Tenant, key: str, api_key: ApiKey) -> Response:
    row = {"name": tenant.name, "key": key, "key_id": api_key.id, "scopes": list(api_key.scopes)}
    return json_response(orjson.dumps({**row, "expires": api_key.expires}))


def _unknown(name: str) -> RefusedError:
    return RefusedError(Refusal.NO_TENANT, f"There is no tenant '{name}'", "name")
