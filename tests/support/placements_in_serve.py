"""A request router that places a turn as the program's id says, so that one server compares ways to place.

A program called `round-robin.NAME` is placed by round robin, and so on: the ways of `simulator.routing`, each with its
own memory. Programs with other ids go where they always do. The others than ours count turns as the router itself does.
`serve_placements` starts a server with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil
from typing import Any

from holdfast.router.dispatch.affinity import AffinityRouter, Pending
from holdfast.router.placement import Decision, PlacementRequest, Reason, rendezvous

BOUND = 1.25  # times the mean


class Ways:
    """Where a turn of `program` goes, of `turns` in hand by replica."""

    def __init__(self) -> None:
        self._next = 0
        self._rng = random.Random(0)
        self._sent: dict[str, str] = {}
        self.by_name: dict[str, Callable[[str, PlacementRequest, dict[str, int]], str]] = {
            "round-robin": self.round_robin,
            "two-choices": self.two_choices,
            "consistent-hash": self.consistent_hash,
            "bounded-hash": self.bounded_hash,
            "prefix": self.prefix,
        }

    def round_robin(self, program: str, ask: PlacementRequest, turns: dict[str, int]) -> str:
        self._next += 1
        return sorted(turns)[self._next % len(turns)]

    def two_choices(self, program: str, ask: PlacementRequest, turns: dict[str, int]) -> str:
        return min(self._rng.sample(sorted(turns), min(2, len(turns))), key=turns.__getitem__)

    def consistent_hash(self, program: str, ask: PlacementRequest, turns: dict[str, int]) -> str:
        return rendezvous(program, turns)

    def bounded_hash(self, program: str, ask: PlacementRequest, turns: dict[str, int]) -> str:
        room = ceil(BOUND * (sum(turns.values()) + 1) / len(turns))
        tries = (rendezvous(f"{program}/{i}" if i else program, turns) for i in range(1 << 20))
        return next(each for each in tries if turns[each] < room)

    def prefix(self, program: str, ask: PlacementRequest, turns: dict[str, int]) -> str:
        known = [prefix.digest for prefix in ask.prefixes]
        there = (self._sent[each] for each in known if self._sent.get(each) in turns)
        chosen = next(there, None) or min(turns, key=turns.__getitem__)
        self._sent |= dict.fromkeys(known, chosen)
        return chosen


class Switched(AffinityRouter):
    """Our request router, but for programs that ask for another way."""

    def initialize_state(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_state(*args, **kwargs)
        self._ways = Ways().by_name

    async def choose(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        program = str(pending_request.metadata.session_id)
        way = self._ways.get(program.rpartition("/")[2].partition(".")[0])
        pending = Pending.of(pending_request)
        if way is None or pending.turn is None or not self._available:
            return await super().choose(pending_request, is_retry=is_retry)
        turns = {each: self._placement.turns(each) for each in self._available}
        decision = Decision(way(program, self._request(pending_request), turns), Reason.LOAD)
        request_id = pending_request.metadata.internal_request_id
        assert self._queue.take(decision.replica_id, request_id, pending.share_key), "replicas take all that comes"
        return self._guarded(self._available[decision.replica_id])
