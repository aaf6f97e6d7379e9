"""Prefills over HTTP: a client has the beginning of its program's next prompt computed while its tools run.

What a handle stands for is kept in the store, as long as the replica keeps its cells: any router may go on with it, and
where its replica has died the next request computes what is missing.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, OverloadedError, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Errored, GenerateRequest, PartialPrefill, Usage
from holdfast.replicas.types import salted
from holdfast.router.backend import Backend, Routed, RoutingHint
from holdfast.router.call import Call, estimate
from holdfast.router.config import RouterConfig
from holdfast.router.conversations import Conversations, conversation, placed_by, preamble, prompt_tokens
from holdfast.router.entry import Entry
from holdfast.router.event_stream import until_disconnect
from holdfast.router.http import json_response, retry_of
from holdfast.router.identity import program_named, shown_program, unnamed_program
from holdfast.router.metrics import Outcome
from holdfast.router.programs import ProgramTable
from holdfast.router.protocol.body import deleted_reply
from holdfast.router.protocol.errors import Refusal, RefusedError, ReplyError
from holdfast.router.protocol.prefills import (
    Prefill,
    check_extension,
    prefill_reply,
    read_extension,
    read_prefill,
)
from holdfast.router.quotas import Cost
from holdfast.router.seal import Seal
from holdfast.router.store import Put, Store, not_found, version_of
from holdfast.router.tenants import Tenant


class StoredPrefills:
    """Handles by tenant and id, each with its own time to live; a tenant may put so many bytes in `prefill_most_s`."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        self._store = store
        self._config = config
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None

    async def keep(self, tenant: str, prefill: Prefill) -> bool:
        """Put it in the place of the version that it was made of. False, and nothing is put: another stands there by
        now, or none. Raises OverloadedError where the tenant has put as much as it may.
        """
        key, value = _key(tenant, prefill.id), orjson.dumps(asdict(replace(prefill, version="")))
        value = self._seal.close(key, value) if self._seal else value
        owner, most = f"prefills/{tenant}", self._config.prefill_tenant_bytes
        put = await self._store.set_shared(key, value, prefill.keep_s, owner, most, prefill.version)
        if put is Put.FULL:
            raise OverloadedError("so much is computed ahead for you that no more can be kept")
        return put is Put.DONE

    async def find(self, tenant: str, prefill_id: str, field: str | None = None, live_s: float = 0.0) -> Prefill:
        """With `live_s` it lives so long from now on, whatever it was made with. Raises RefusedError (404), which names
        `field`, where it is not there or another tenant's, and UnavailableError while Redis is away.
        """
        key = _key(tenant, prefill_id)
        value = (await self._store.renew([key], live_s))[0] if live_s else await self._store.get(key)
        try:
            if value is None:
                raise ValueError("not there")
            prefill = Prefill(**orjson.loads(self._seal.open(key, value) if self._seal else value))
            return replace(prefill, version=version_of(value))
        except (ValueError, TypeError):  # another version's, or with another key: as good as absent
            message = f"Prefill with id '{prefill_id}' not found: released, expired, or never made"
            raise not_found(self._store, RefusedError(Refusal.NO_PREFILL, message, field)) from None

    async def delete(self, tenant: str, prefill_id: str) -> None:
        """Raises UnavailableError while Redis, which may still have it, is away."""
        await self._store.delete(_key(tenant, prefill_id))
        if self._store.degraded:
            raise UnavailableError("Redis does not answer, and may still have the prefill; retry")


class PrefillEndpoints:
    """What a tenant may do with the beginnings of its prompts."""

    def __init__(
        self,
        backend: Backend,
        entry: Entry,
        programs: ProgramTable,
        conversations: Conversations,
        stored: StoredPrefills,
        config: RouterConfig,
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._conversations = conversations
        self._stored = stored
        self._config = config
        self._extending: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by handle

    async def create(self, request: Request) -> Response:
        """Compute what the next prompt of a program is sure to begin with; it is kept under a handle.

        It belongs to the program that is named, or whose conversation it goes on with; else to a new one.
        """
        async with self._admitted(request) as call:
            tenant = call.tenant
            models = await self._backend.models()
            if not models:
                raise UnavailableError("No model is loaded yet")
            asked = await self._entry.read(request, read_prefill, models)
            name, unique = asked.model.name, secrets.token_hex(12)
            program = program_named(tenant.name, asked.ids, request.headers, self._config.program_headers)
            if program is None:
                sent = conversation(salted(name, asked.cache_salt), asked.prompt)
                program = await self._conversations.look(tenant.name, sent)
            prefill = Prefill(
                id=f"prefill_{unique}",
                model=name,
                messages=[dict(message) for message in asked.prompt.messages],
                tools=[dict(tool) for tool in asked.prompt.tools],
                template_kwargs=dict(asked.prompt.template_kwargs),
                program=program or unnamed_program(tenant.name, unique),
                keep_s=self._keep_s(asked.keep_s),
                created=int(time.time()),
                cache_salt=asked.cache_salt,
            )
            return await self._compute(call, prefill)

    async def extend(self, request: Request) -> Response:
        """More has become known: compute that as well, under the same handle."""
        async with self._admitted(request) as call:
            tenant = call.tenant
            known = await self._find(request, tenant)
            messages, asked_s = await self._entry.read(request, read_extension)
            keep_s = None if asked_s is None else self._keep_s(asked_s)

            async def longer() -> Prefill:
                before = await self._stored.find(tenant.name, known.id, live_s=keep_s or known.keep_s)
                check_extension(before, messages)
                return replace(
                    before, messages=[*before.messages, *messages], keep_s=before.keep_s if keep_s is None else keep_s
                )

            # Results of tools that ran at once come at once. In one router each waits for the one before it; what
            # another router adds meanwhile is found as this is stored, and then it is computed once more behind that.
            async with self._extending.setdefault(known.id, asyncio.Lock()):
                return await self._compute(call, await longer(), longer)

    async def show(self, request: Request) -> Response:
        async with self._entry.entered(request) as tenant:
            prefill = await self._find(request, tenant)
            return json_response(prefill_reply(prefill, shown_program(prefill.program)))

    async def delete(self, request: Request) -> Response:
        """Nobody comes back for it: a tool has failed, say."""
        async with self._entry.entered(request) as tenant:
            prefill = await self._find(request, tenant)
            await self._stored.delete(tenant.name, prefill.id)
            await self._backend.release(tenant.name, prefill.id)
            return json_response(deleted_reply("prefill", prefill.id))

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[Call]:
        """A call that may compute something. One that is wrong counts, too."""
        call = self._entry.begin(request, "prefill")
        try:
            with self._entry.admitted(call):
                try:
                    yield call
                except HoldfastError:
                    if not call.charged:
                        await call.charge(Cost(), lease=False)
                    raise
        except BaseException as error:
            call.failed(error)
            raise

    async def _compute(
        self, call: Call, prefill: Prefill, again: Callable[[], Awaitable[Prefill]] | None = None
    ) -> Response:
        """Compute a prefill and keep it; `again` makes it anew of the one that is kept by then."""
        tenant = call.tenant
        call.asks(prefill.model, program=prefill.program, retry=retry_of(call.request))
        await call.charge(estimate(self._config.prices, 1, prompt_tokens(prefill.prompt), 0))
        while True:
            request_id = f"{prefill.id}/{secrets.token_hex(4)}"
            call.sent(partial(self._drawn, request_id))
            routed = await self._generate(call.request, tenant, prefill, request_id)
            call.headers.replica = call.facts.replica = routed.replica_id or "none"
            if isinstance(routed.reply, Errored):
                raise ReplyError(routed.reply.error, routed.reply.usage)
            call.facts.usage = usage = routed.reply.usage
            call.count_tokens(usage)
            done = replace(
                prefill,
                replica=routed.replica_id,
                tokens=usage.prompt,
                cached=usage.cached,
                complete=routed.reply.reason == "length",
                expires=int(time.time() + prefill.keep_s),
            )
            try:
                if await self._stored.keep(tenant.name, done) or again is None:
                    break
                prefill = await again()
            except (OverloadedError, RefusedError):  # there is no room for it, or nobody comes back for it
                await self._backend.release(tenant.name, done.id)
                raise
        await self._programs.placed(prefill.program, routed.replica_id)
        call.end(Outcome.COMPLETED, usage)
        await call.booked()
        return json_response(prefill_reply(done, shown_program(done.program)))

    async def _drawn(self, request_id: str) -> tuple[Usage, bool]:
        usage = await self._backend.drawn(request_id)
        return usage or Usage(), usage is not None

    async def _generate(self, request: Request, tenant: Tenant, prefill: Prefill, request_id: str) -> Routed:
        """Have it computed, where its program is or its beginning stands. Raises ClientGoneError."""
        known = await self._programs.look(prefill.program)
        begins = preamble(placed_by(tenant.name, prefill.model, prefill.cache_salt), prefill.prompt)
        command = GenerateRequest(
            request_id=request_id,
            prompt=prefill.prompt,
            sampling=Sampling(max_tokens=0),
            scope=tenant.name,
            program_id=prefill.program,
            program_arrival=known.arrival if known is not None and known.run_turns else time.time(),
            weight=tenant.weight,
            cells=tenant.cells,
            cache_salt=prefill.cache_salt,
            prefixes=(begins.digest,) if begins.digest else (),
            background=PartialPrefill(prefill.id, prefill.keep_s),
        )
        last = prefill.replica or (known.last_replica if known is not None else None)
        prefixes = () if last else command.prefixes
        place = RoutingHint(last, None, prefixes, begins.prompt_tokens, 0 if last else begins.tokens)
        async with self._entry.drain.bounded():
            return await until_disconnect(request.receive, self._backend.generate(command, place))

    async def _find(self, request: Request, tenant: Tenant) -> Prefill:
        return await self._stored.find(tenant.name, request.path_params["prefill_id"])

    def _keep_s(self, asked: float | None) -> float:
        most = self._config.prefill_most_s
        if asked is not None and asked > most:
            raise InvalidRequestError(f"'keep_s' must be at most {most:g}", "keep_s")
        return self._config.prefill_s if asked is None else asked


def _key(tenant: str, prefill_id: str) -> str:
    return f"prefills/{tenant}/{prefill_id}"
