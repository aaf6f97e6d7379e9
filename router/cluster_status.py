"""The cluster at one moment, in JSON: replicas, tenants and programs, for `holdfast status`, `holdfast top` and others.

Replicas are asked; tenants and programs are those of this router. Only ids, counts and times are in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.backend import Backend
from holdfast.router.http import VERSION, caller, json_response
from holdfast.router.programs import Program, ProgramTable
from holdfast.router.tenants import TenantDirectory
from holdfast.router.turn_log import TurnFacts, TurnLog

PROGRAMS = 50  # of the programs, unless `?programs=` asks for another number
MOST_PROGRAMS = 1000


class ClusterStatus:
    """Serves `GET /v1/cluster/status`, to whom the metrics are open, too."""

    def __init__(
        self,
        backend: Backend,
        tenants: TenantDirectory,
        programs: ProgramTable,
        reports: TurnLog,
        degraded: Callable[[], bool],
        router: str = "router",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._tenants = tenants
        self._programs = programs
        self._reports = reports
        self._degraded = degraded
        self._router = router
        self._clock = clock
        self._started = clock()

    async def show(self, request: Request) -> Response:
        """The status. Raises RefusedError for strangers."""
        self._tenants.authorize_metrics(caller(request))
        limit = _limit(request.query_params.get("programs"))
        replicas = await self._backend.status()
        live, now = self._reports.live, self._clock()
        running = {facts.program: facts for facts in reversed(live) if facts.program}
        programs = self._programs.latest()
        told = {
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
        return json_response(orjson.dumps(told))

    def _tenant_rows(self, live: Sequence[TurnFacts]) -> Iterator[dict[str, Any]]:
        totals = self._reports.totals
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


def _limit(text: str | None) -> int:
    if text is None:
        return PROGRAMS
    if not text.isdecimal() or len(text) > len(str(MOST_PROGRAMS)) or int(text) > MOST_PROGRAMS:
        raise InvalidRequestError(f"'programs' must be a number up to {MOST_PROGRAMS}", "programs")
    return int(text)
