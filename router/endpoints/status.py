"""Current and recent turns of a router: for the page (`/v1/live`), and for `holdfast status` and `holdfast top`.

Only ids, names of tools, counts and times are in it. Turns, tenants and programs are those of the router that answers;
with several routers the page puts together what each says. The page's files are served here, too.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from holdfast.replicas.errors import HoldfastError, InvalidRequestError
from holdfast.replicas.stats import PIN, TURN
from holdfast.router.backend import Backend
from holdfast.router.entry import ENDED, VERSION, Entry, Totals, TurnFacts, caller, json_response
from holdfast.router.protocol.body import Query, read_query
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.records import Program, ProgramTable
from holdfast.router.tenants import Scope, TenantDirectory

LIVE = ("program", "request", "arrived")  # of a turn that is being served
MOST_TURNS = 4096  # that have ended, in one answer
LOOK_S = 0.8  # age up to which an answer of the replicas is used again: more pages ask them no more often
MOST_ASKED = 20  # answers to one tenant a second


class Live:
    """`GET /v1/live`, which the page asks for once a second.

    A key sees its own tenant's programs; an operator's key, and a local caller where there are no keys, sees all. A
    caller that asks again sends its last numbers, `?since=ROUTER:NUMBER,...`, and gets the turns that ended since.
    Replicas are asked only while somebody looks, at most once in `LOOK_S` for each tenant.
    """

    def __init__(self, backend: Backend, entry: Entry) -> None:
        self._backend = backend
        self._entry = entry
        self._turns = entry.turns
        self._router = entry.metrics.router
        self._started = entry.turns.clock()
        self._looks: dict[str | None, tuple[float, asyncio.Task[Sequence[bytes]]]] = {}
        self._looks_in_second: dict[str, tuple[int, int]] = {}  # by tenant: a second, and how often in it

    async def show(self, request: Request) -> Response:
        """The current activity of the caller's programs.

        Raises RefusedError for strangers, and for a tenant that asks more often than pages do.
        """
        principal = self._entry.authenticate(request)
        tenant, now = principal.tenant, self._turns.clock()
        self._pace(tenant.name, now)
        after = _since(read_query(LiveQuery, request.query_params).since, self._router)
        whole = principal.allows(Scope.OPERATE)
        scope = None if whole else tenant.name
        looked_at, replicas = await self._look(scope)
        ended = self._turns.ended(after, scope, MOST_TURNS)
        live = [each for each in self._turns.live if each.program and scope in (None, each.tenant)]
        totals = self._turns.totals
        names = sorted({*totals, *(each.tenant for each in live)}) if whole else [tenant.name]
        answer = {
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
            "looked_s": round(time.monotonic() - looked_at, 3),
            "replicas": [orjson.Fragment(each) for each in replicas],
        }
        return json_response(orjson.dumps(answer))

    async def _look(self, scope: str | None) -> tuple[float, Sequence[bytes]]:
        """The time of the last poll of the replicas, and their answers; none if the poll failed."""
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
        """Looks do not count against a tenant's limits, so they have a limit of their own."""
        second, before = self._looks_in_second.get(tenant, (0, 0))
        looks = before + 1 if second == int(now) else 1
        self._looks_in_second[tenant] = int(now), looks
        if looks > MOST_ASKED:
            message = f"Tenant '{tenant}' has asked {MOST_ASKED} times in this second"
            raise RefusedError(Refusal.RATE_LIMITED, message, retry_after_s=1.0)


class ClusterStatus:
    """`GET /v1/cluster/status`, for callers who may read the metrics."""

    def __init__(
        self,
        backend: Backend,
        tenants: TenantDirectory,
        programs: ProgramTable,
        entry: Entry,
        degraded: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._tenants = tenants
        self._programs = programs
        self._turns = entry.turns
        self._router = entry.metrics.router
        self._degraded = degraded
        self._started = time.time()

    async def show(self, request: Request) -> Response:
        """The cluster at this moment. Raises RefusedError for strangers."""
        self._tenants.authorize_metrics(caller(request))
        limit = read_query(StatusQuery, request.query_params).programs
        replicas = await self._backend.status()
        live, now = self._turns.live, time.time()
        running = {facts.program: facts for facts in reversed(live) if facts.program}
        programs = self._programs.latest()
        answer = {
            "version": VERSION,
            "router": self._router,
            "time": now,
            "up_s": now - self._started,
            "store": "degraded" if self._degraded() else "ok",
            "replicas": sorted(replicas, key=itemgetter("replica_id")),
            "tenants": list(self._tenant_rows(live)),
            "at_tools": sum(program.paused is not None and key not in running for key, program in programs),
            "programs": list(_program_rows(running, dict(programs[:limit]), limit, now)),
        }
        return json_response(orjson.dumps(answer))

    def _tenant_rows(self, live: Sequence[TurnFacts]) -> Iterator[dict[str, Any]]:
        totals = self._turns.totals
        for name in sorted(totals.keys() | {facts.tenant for facts in live if facts.tenant}):
            running = sum(facts.tenant == name for facts in live)
            yield {"name": name, "running": running, **(asdict(totals[name]) if name in totals else {})}


def _program_rows(
    running: Mapping[str, TurnFacts], latest: Mapping[str, Program], limit: int, now: float
) -> Iterator[dict[str, Any]]:
    """At most `limit` programs: the running ones first, then those with the latest turns."""
    for key in [*running, *(key for key in latest if key not in running)][:limit]:
        tenant, _, name = key.partition("/")
        facts, program = running.get(key), latest.get(key)
        waits = facts is None and program is not None and program.paused is not None
        since = facts.arrived if facts else program.paused if program else None
        yield {
            "program": name,
            "tenant": tenant,
            "state": "running" if facts else "tools" if waits else "idle",
            "since_s": None if since is None else max(0.0, now - since),
            "turns": program.turns if program else 0,
            "replica": (program.last_replica if program else None) or "",
            "tools": program.tools if program and waits else "",
            "age_s": max(0.0, now - program.arrival) if program else 0.0,
        }


class StatusQuery(Query):
    programs: Annotated[int, Field(ge=0, le=1000)] = 50


class LiveQuery(Query):
    """`since`: ROUTER:NUMBER, several of them with commas."""

    since: Annotated[str, Field(max_length=1024)] = ""


def _since(text: str, router: str) -> int:
    """The number in `text` for this router; 0 if it has none. Raises InvalidRequestError."""
    numbers = dict(each.rpartition(":")[::2] for each in text.split(",") if each)
    number = numbers.get(router, "0")
    if not (number.isascii() and number.isdecimal() and len(number) < 20):
        raise InvalidRequestError("'since' must be ROUTER:NUMBER, several of them with commas", "since")
    return int(number)


# ---- the page's files ----

FOLDER = Path(__file__).parents[1] / "page"
# A browser loads this server's own files, sends requests to this server, and nothing else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and revalidated
}


class PageFiles:
    """The files in the folder `page`. Open to everybody: there is no data in them."""

    def __init__(self) -> None:
        self._files = StaticFiles(directory=FOLDER)

    async def index(self, request: Request) -> Response:
        return await self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        return await self._answer(request, request.path_params["name"])

    async def _answer(self, request: Request, name: str) -> Response:
        """Raises RefusedError if there is no file of that name."""
        try:
            response = await self._files.get_response(name, request.scope)
        except HTTPException:
            message = f"Unknown path: {request.method} {request.url.path}"
            raise RefusedError(Refusal.NO_PATH, message) from None
        response.headers.update(HEADERS)
        return response
