"""Answers of every replica, through a broadcast made up for it; and the private names of Ray Serve behind it."""

import asyncio
import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from holdfast.router.affinity import from_each

DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


class Told:
    """A broadcast whose replicas answer so; an exception is raised, None never comes."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = outcomes
        self.left: list[int] = []

    async def _fetch_replica_results_async(self) -> list[Any]:
        if not self.outcomes:
            raise DeploymentUnavailableError(DEPLOYMENT)
        return [SimpleNamespace(get_async=partial(self.answer, i)) for i in range(len(self.outcomes))]

    async def answer(self, i: int) -> Any:
        if (outcome := self.outcomes[i]) is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.append(i)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_replicas_that_answer_late_do_not_keep_back_what_others_say() -> None:
    died = ValueError("died")
    broadcast = Told("a", None, died, "d")
    first, late, gone, last = asyncio.run(from_each(broadcast, 0.01))  # type: ignore[arg-type]
    assert (first, last, gone) == ("a", "d", died)
    assert isinstance(late, TimeoutError)
    assert broadcast.left == [1], "nobody waits for it any more"
    assert asyncio.run(from_each(Told(), 0.01)) == []  # type: ignore[arg-type]


def test_time_that_runs_out_before_the_calls_are_sent_is_no_answer_of_nobody() -> None:
    class Unsent(Told):
        async def _fetch_replica_results_async(self) -> list[Any]:
            return [await asyncio.Event().wait()]

    with pytest.raises(TimeoutError):
        asyncio.run(from_each(Unsent("a"), 0.01))  # type: ignore[arg-type]


def test_serve_itself_gets_them_by_these_names() -> None:
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
    source = inspect.getsource(DeploymentBroadcastResponse.results_async)
    assert "rr.get_async() for rr in replica_results" in source
