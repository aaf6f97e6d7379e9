"""`GET /v1/live`: what the caller's programs do now and did lately, for the page, which asks once a second.

A key sees its own tenant's; an operator's, and a caller of this machine where there are no keys, all of it. Only ids,
names of tools, counts and times are in it. Who asks again says what it has, `?since=ROUTER:NUMBER,...`, and gets the
turns that ended since. Turns are those of the router that answers; with several, a page puts together what each says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import HoldfastError, InvalidRequestError
from holdfast.replicas.stats import PIN, TURN
from holdfast.router.backend import Backend
from holdfast.router.entry import Entry
from holdfast.router.http import VERSION, json_response
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.tenants import Scope
from holdfast.router.turn_log import ENDED, Totals

LIVE = ("program", "request", "arrived")  # of a turn that is being served
MOST_TURNS = 4096  # that have ended, in one answer
LOOK_S = 0.8  # so old may be what replicas said last: more pages ask them no more often
MOST_ASKED = 20  # answers to one tenant a second
MOST_SINCE = 1024  # characters


class Live:
    """Serves it. Replicas are asked only while somebody looks, at most once in `LOOK_S` for each tenant."""

    def __init__(self, backend: Backend, entry: Entry) -> None:
        self._backend = backend
        self._entry = entry
        self._turns = entry.turns
        self._router = entry.metrics.router
        self._started = entry.turns.clock()
        self._looks: dict[str | None, tuple[float, asyncio.Task[Sequence[bytes]]]] = {}
        self._asked: dict[str, tuple[int, int]] = {}  # by tenant: a second, and how often in it

    async def show(self, request: Request) -> Response:
        """The answer. Raises RefusedError: for strangers, and for a tenant that asks more often than pages do."""
        principal = self._entry.authenticate(request)
        tenant = principal.tenant
        now = self._turns.clock()
        self._pace(tenant.name, now)
        after = _since(request.query_params.get("since", ""), self._router)
        whole = principal.allows(Scope.OPERATE)
        scope = None if whole else tenant.name
        looked, replicas = await self._look(scope)
        ended = self._turns.ended(after, scope, MOST_TURNS)
        live = [each for each in self._turns.live if each.program and scope in (None, each.tenant)]
        totals = self._turns.totals
        names = sorted({*totals, *(each.tenant for each in live)}) if whole else [tenant.name]
        told = {
            "router": self._router,
            "version": VERSION,
            "time": now,
            "started": self._started,
            "tenant": tenant.name,
            "operator": whole,
            "number": self._turns.number,
            "left_out": len(ended) == MOST_TURNS,
            "fields": {"live": LIVE, "ended": ENDED, "turns": TURN, "pins": PIN},
            "live": [(each.program, each.request_id, each.arrived) for each in live],
            "ended": [each.row for each in reversed(ended)],
            "tenants": [{"name": name, **asdict(totals.get(name) or Totals())} for name in names],
            "looked_s": round(time.monotonic() - looked, 3),
            "replicas": [orjson.Fragment(each) for each in replicas],
        }
        return json_response(orjson.dumps(told))

    async def _look(self, scope: str | None) -> tuple[float, Sequence[bytes]]:
        """What replicas say, or said a moment ago, and when they were asked; nothing where they cannot be."""
        now, loop = time.monotonic(), asyncio.get_running_loop()
        at, task = self._looks.get(scope, (0.0, None))
        if task is None or now - at > LOOK_S:
            at, task = now, loop.create_task(self._ask(scope))
            self._looks[scope] = at, task
        return at, await asyncio.shield(task)

    async def _ask(self, scope: str | None) -> Sequence[bytes]:
        try:
            return await self._backend.activity(scope)
        except HoldfastError:
            return []

    def _pace(self, tenant: str, now: float) -> None:
        """Looks do not count against a tenant's limits, so they have one of their own."""
        second, before = self._asked.get(tenant, (0, 0))
        asked = before + 1 if second == int(now) else 1
        self._asked[tenant] = int(now), asked
        if asked > MOST_ASKED:
            message = f"Tenant '{tenant}' has asked {MOST_ASKED} times in this second"
            raise RefusedError(Refusal.RATE_LIMITED, message, retry_after_s=1.0)


def _since(text: str, router: str) -> int:
    """The number that `text` has for this router; 0 where it has none. Raises InvalidRequestError."""
    if len(text) > MOST_SINCE:
        raise InvalidRequestError(f"'since' has more than {MOST_SINCE} characters", "since")
    known = dict(each.rpartition(":")[::2] for each in text.split(",") if each)
    number = known.get(router, "0")
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise InvalidRequestError("'since' must be ROUTER:NUMBER, several of them with commas", "since")
    return int(number)
