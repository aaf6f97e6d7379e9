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
from weakref import WeakValueDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError, OverloadedError, UnavailableError
from holdfast.replicas.kv.tags import Hint
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Errored, GenerateRequest, PartialPrefill, Usage
from holdfast.replicas.types import salted
from holdfast.router.backend import Backend, Routed, RoutingHint
from holdfast.router.config import RouterConfig
from holdfast.router.entry import Call, Cost, Entry, Outcome, estimate, json_response, retry_of
from holdfast.router.protocol.body import deleted_reply
from holdfast.router.protocol.errors import Refusal, RefusedError, ReplyError
from holdfast.router.protocol.prefills import (
    Prefill,
    check_extension,
    plain_hints,
    prefill_reply,
    read_extension,
    read_prefill,
)
from holdfast.router.protocol.turn import ClaimedIds
from holdfast.router.records import (
    ProgramTable,
    PutResult,
    Records,
    conversation,
    placed_by,
    program_named,
    prompt_tokens,
    shared_prefix,
    shown_program,
    unnamed_program,
)
from holdfast.router.streaming import until_disconnect
from holdfast.router.tenants import Tenant


class StoredPrefills:
    """Handles by tenant and id, each with a time to live of its own."""

    def __init__(self, records: Records, config: RouterConfig) -> None:
        self._records = records
        self._most = config.prefill_tenant_bytes

    async def keep(self, tenant: str, prefill: Prefill) -> bool:
        """Store it in place of the version that it was made from. False, and nothing is stored, if that version has
        changed or is gone. Raises OverloadedError where the tenant's prefills take their limit, and UnavailableError.
        """
        value = orjson.dumps(asdict(replace(prefill, version="")))
        key = _key(tenant, prefill.id)
        result = await self._records.put(key, value, prefill.keep_s, self._most, prefill.version)
        if result is PutResult.FULL:
            raise OverloadedError(
                "The prefills of this tenant take all the memory they may; release some, or retry later"
            )
        return result is PutResult.STORED

    async def find(self, tenant: str, prefill_id: str, field: str | None = None, ttl_s: float | None = None) -> Prefill:
        """With `ttl_s` it expires so long from now. Raises RefusedError (404), which names `field`, where it is absent
        or another tenant's, and UnavailableError.
        """
        record = await self._records.get(_key(tenant, prefill_id), ttl_s)
        try:
            if record is None:
                raise ValueError("absent")
            return replace(Prefill(**orjson.loads(record.value)), version=record.version)
        except (ValueError, TypeError):  # another version's: as good as absent
            message = f"Prefill with id '{prefill_id}' not found: released, expired, or never made"
            raise RefusedError(Refusal.NO_PREFILL, message, field) from None

    async def delete(self, tenant: str, prefill_id: str) -> None:
        """Raises UnavailableError."""
        await self._records.delete(_key(tenant, prefill_id))


class PrefillEndpoints:
    """The endpoints by which a tenant computes and releases prefills."""

    def __init__(
        self,
        backend: Backend,
        entry: Entry,
        programs: ProgramTable,
        stored: StoredPrefills,
        config: RouterConfig,
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._programs = programs
        self._stored = stored
        self._config = config
        self._extending: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by handle

    async def create(self, request: Request) -> Response:
        """Compute the beginning of a program's next prompt, and keep it under a handle.

        The program is the one that is named, or the one whose conversation this continues; else a new one.
        """
        async with self._admitted(request) as call:
            tenant = call.tenant
            models = await self._backend.models()
            if not models:
                raise UnavailableError("No model is loaded yet")
            body, prompt = await self._entry.read(request, read_prefill, models)
            salt, unique = body.cache_salt or "", secrets.token_hex(12)
            ids = ClaimedIds(body.program_id)
            program = program_named(tenant.name, ids, request.headers, self._config.program_headers)
            if program is None:
                sent = conversation(salted(body.model, salt), prompt)
                program = await self._programs.look_conversation(tenant.name, sent)
            prefill = Prefill(
                id=f"prefill_{unique}",
                model=body.model,
                messages=[dict(message) for message in prompt.messages],
                tools=[dict(tool) for tool in prompt.tools],
                template_kwargs=dict(prompt.template_kwargs),
                program=program or unnamed_program(tenant.name, unique),
                keep_s=self._keep_s(body.keep_s),
                created=int(time.time()),
                cache_salt=salt,
                kv_hints=plain_hints(body.kv_hints),
            )
            return await self._compute(call, prefill)

    async def extend(self, request: Request) -> Response:
        """Compute more messages of a prefill."""
        async with self._admitted(request) as call:
            tenant = call.tenant
            prefill = await self._find(request, tenant)
            body, messages = await self._entry.read(request, read_extension)
            keep_s = None if body.keep_s is None else self._keep_s(body.keep_s)

            async def longer() -> Prefill:
                before = await self._stored.find(tenant.name, prefill.id, ttl_s=keep_s or prefill.keep_s)
                check_extension(before, messages)
                return replace(
                    before,
                    messages=[*before.messages, *messages],
                    keep_s=before.keep_s if keep_s is None else keep_s,
                    kv_hints=before.kv_hints if body.kv_hints is None else plain_hints(body.kv_hints),
                )

            # Results of tools that ran at once come at once. In one router each waits for the one before it; what
            # another router adds meanwhile is found as this is stored, and then it is computed once more behind that.
            async with self._extending.setdefault(prefill.id, asyncio.Lock()):
                return await self._compute(call, await longer(), longer)

    async def show(self, request: Request) -> Response:
        """A prefill."""
        async with self._entry.entered(request) as tenant:
            prefill = await self._find(request, tenant)
            return json_response(prefill_reply(prefill, shown_program(prefill.program)))

    async def delete(self, request: Request) -> Response:
        """Release a prefill, for example because a tool failed."""
        async with self._entry.entered(request) as tenant:
            prefill = await self._find(request, tenant)
            await self._stored.delete(tenant.name, prefill.id)
            await self._backend.release(tenant.name, prefill.id)
            return json_response(deleted_reply("prefill", prefill.id))

    @asynccontextmanager
    async def _admitted(self, request: Request) -> AsyncIterator[Call]:
        """Admit a call that may compute something. Invalid requests count, too."""
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
        """Compute a prefill and keep it. On a conflict `again` makes it from the version stored by then."""
        tenant, hints = call.tenant, prefill.hints
        call.asks(prefill.model, program=prefill.program, retry=retry_of(call.request))
        await call.charge(estimate(self._config.prices, 1, prompt_tokens(prefill.prompt), 0))
        while True:
            request_id = f"{prefill.id}/{secrets.token_hex(4)}"
            call.sent(partial(self._usage_of, request_id))
            result = await self._generate(call.request, tenant, prefill, hints, request_id)
            call.headers.replica = call.facts.replica = result.replica_id or "none"
            if isinstance(result.reply, Errored):
                raise ReplyError(result.reply.error, result.reply.usage)
            call.facts.usage = usage = result.reply.usage
            call.count_tokens(usage)
            computed = replace(
                prefill,
                replica=result.replica_id,
                tokens=usage.prompt,
                cached=usage.cached,
                complete=result.reply.reason == "length",
                expires=int(time.time() + prefill.keep_s),
            )
            try:
                if await self._stored.keep(tenant.name, computed) or again is None:
                    break
                prefill = await again()
                hints = prefill.hints
            except (
                OverloadedError,
                RefusedError,
                UnavailableError,
            ):  # there is no room for it, or nobody comes back for it
                await self._backend.release(tenant.name, computed.id)
                raise
        await self._programs.placed(prefill.program, result.replica_id)
        call.end(Outcome.COMPLETED, usage)
        await call.booked()
        return json_response(prefill_reply(computed, shown_program(computed.program)))

    async def _usage_of(self, request_id: str) -> tuple[Usage, bool]:
        usage = await self._backend.drawn(request_id)
        return usage or Usage(), usage is not None

    async def _generate(
        self, request: Request, tenant: Tenant, prefill: Prefill, hints: tuple[Hint, ...], request_id: str
    ) -> Routed:
        """Compute it on the replica of its program or of its prefix. Raises ClientGoneError."""
        program = await self._programs.look(prefill.program)
        sent = conversation(salted(prefill.model, prefill.cache_salt), prefill.prompt)
        preamble = sent.preamble
        prefix = shared_prefix(placed_by(tenant.name, prefill.model, prefill.cache_salt), sent)
        command = GenerateRequest(
            request_id=request_id,
            prompt=prefill.prompt,
            sampling=Sampling(max_tokens=0),
            scope=tenant.name,
            program_id=prefill.program,
            program_arrival=program.arrival if program is not None and program.run_turns else time.time(),
            weight=tenant.weight,
            cells=tenant.cells,
            cache_salt=prefill.cache_salt,
            prefixes=(prefix,) if prefix else (),
            background=PartialPrefill(prefill.id, prefill.keep_s),
            hints=hints,
        )
        last = prefill.replica or (program.last_replica if program is not None else None)
        prefixes = () if last else command.prefixes
        place = RoutingHint(last, None, prefixes, preamble.prompt_tokens, 0 if last else preamble.tokens)
        async with self._entry.drain.bounded():
            return await until_disconnect(request.receive, self._backend.generate(command, place))

    async def _find(self, request: Request, tenant: Tenant) -> Prefill:
        return await self._stored.find(tenant.name, request.path_params["prefill_id"])

    def _keep_s(self, seconds: float | None) -> float:
        most = self._config.prefill_most_s
        if seconds is not None and seconds > most:
            raise InvalidRequestError(f"'keep_s' must be at most {most:g}", "keep_s")
        return self._config.prefill_s if seconds is None else seconds


def _key(tenant: str, prefill_id: str) -> str:
    return f"prefills/{tenant}/{prefill_id}"
