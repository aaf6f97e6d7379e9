"""`holdfast bench overload` against a router that answers at once, or refuses."""

import asyncio
from itertools import cycle

from fake_backend import HELLO, FakeBackend, World
from waiting import work

from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.options import Overload
from holdfast.loadgen.overload import Crowd, measure, show
from holdfast.replicas.errors import DeadlineError, OverloadedError

QUICK = Overload(loads=(1.0, 2.0), seconds=0.6, warm_s=0.2, sequences=2, words=3)


class Refusing(FakeBackend):
    """Has no time, or no room, for those who say how much time they have."""

    errors = cycle((DeadlineError("too late", retry_after_s=1.0), OverloadedError("the queue is full")))

    async def stream(self, request, place=None):
        await work(0.05)  # its capacity is what so few clients leave it
        self.script = HELLO if request.within_s == float("inf") else [next(self.errors)]
        async for batch in super().stream(request, place):
            yield batch


def test_what_becomes_of_every_request_is_told(capsys):
    with World(Refusing()).served() as url:
        rows = asyncio.run(measure(QUICK, url))
    assert [(each.load, each.send_deadline) for each in rows] == [(1.0, True), (1.0, False), (2.0, True), (2.0, False)]
    for found in rows:
        assert set(found.ends) == ({"refused"} if found.send_deadline else {"in time"})
        assert len(found.refused_s) == (found.ends.total() if found.send_deadline else 0)
    show(QUICK, rows)
    printed = capsys.readouterr().out
    assert "capacity:" in printed
    assert "100.0%" in printed
    assert all(found.lag.ticks for found in rows), "beside what the server took stands how late the clients were"


def test_clients_leave_when_their_time_is_over():
    backend = FakeBackend()
    quick = Overload(loads=(1.0,), seconds=0.2, warm_s=0.1, sequences=1, words=3, deadline_s=0.1)
    with World(backend).served() as url:

        async def scenario():
            async with ChatClient(url, 60.0) as client:
                backend.stall = 0
                return await Crowd(quick, client, "pocket").ask(0.1, send_deadline=True)

        how, took = asyncio.run(scenario())
    assert how == "left"
    assert took >= 0.1
