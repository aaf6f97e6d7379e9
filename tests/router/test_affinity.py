"""The names of Ray Serve that are used although they are private, and the router class on a made-up deployment."""

import asyncio
import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private import constants, router
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.context import _get_serve_request_context
from ray.serve.request_router import PendingRequest, RequestRouter

from holdfast.replicas.errors import (
    DeadlineError,
    ErrorInfo,
    ErrorKind,
    OverloadedError,
    SessionLostError,
    UnavailableError,
)
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.scheduling.queue import ProgramOrder
from holdfast.replicas.stats import LoadReport
from holdfast.replicas.types import Priority
from holdfast.router.affinity import ENTERED, HINT, AffinityRouter, Pins, own_request
from holdfast.router.backend import Place
from holdfast.router.elsewhere import Lines
from holdfast.router.fleet import Fleet
from holdfast.router.line_stats import line_stats
from holdfast.router.placement import Reason

numbers = count()
DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


def replica(name: str) -> Any:
    """What the router looks at of a running replica."""
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=4)


def pending(program: str, waited_s: float = 0.0, **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id=program)
    request = PendingRequest(args=[], kwargs=kwargs, metadata=metadata)
    setattr(request, ENTERED, time.monotonic() - waited_s)
    return request


def fleet_of(now: list[float]) -> Fleet:
    return Fleet(lambda: now[0])


@contextmanager
def using(fleet: Fleet) -> Iterator[None]:
    """Routers made meanwhile hear of this fleet."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("holdfast.router.fleet.FLEET", fleet)
        yield


def turn(program: str, arrival: float, waited_s: float = 0.0) -> PendingRequest:
    """A call for a program's turn, with a request id of its own."""
    request = pending(program, waited_s)
    request.metadata.internal_request_id = f"{program} {next(numbers)}"
    command = GenerateRequest("r", RawPrompt("x"), Sampling(), scope="t", program_id=program, program_arrival=arrival)
    request.args.append(command)
    return request


def waiting_for(*names: str, **config: Any) -> tuple[AffinityRouter, list[Any]]:
    """A router over replicas that take one request each. What Serve would look up about them is left out."""
    made = affinity(**config)
    replicas = [replica(name) for name in names]
    for each in replicas:
        each.max_ongoing_requests = 1
    lists(made, replicas)
    return made, replicas


def lists(made: AffinityRouter, replicas: list[Any]) -> None:
    """Serve tells the router which replicas there are."""

    def take(self: Any, replicas: list[Any]) -> None:
        self._replicas = {each.replica_id: each for each in replicas}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RequestRouter, "update_replicas", take)
        patched.setattr("holdfast.router.affinity.address", lambda replica: None)
        made.update_replicas(replicas)


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def affinity(**config: Any) -> AffinityRouter:
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(**config)
    return made


async def first_choice(made: AffinityRouter, replicas: list[Any], request: PendingRequest) -> str:
    made._replicas = {each.replica_id: each for each in replicas}
    made.replicas_changed()
    ranking = await made.choose_replicas(replicas, request)
    return str(ranking[0][0].replica_id.unique_id)


class TestPrivateNames:
    """A release of Ray that changes one of these breaks the router silently; these tests do not."""

    def test_hooks_of_the_request_router(self) -> None:
        choose = inspect.signature(RequestRouter._choose_replica_for_request).parameters
        assert list(choose) == ["self", "pending_request", "is_retry"]
        for name, parameters in {
            "on_request_routed": ["self", "pending_request", "replica_id", "result"],
            "on_new_queue_len_info": ["self", "replica_id", "num_ongoing_requests"],
            "decrement_queue_len_cache": ["self", "replica_id"],
            "update_replicas": ["self", "replicas"],
            "choose_replicas": ["self", "candidate_replicas", "pending_request"],
            "on_request_completed": ["self", "replica_id", "internal_request_id"],
            "on_replica_actor_died": ["self", "replica_id"],
        }.items():
            assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters

    def test_hooks_are_called(self) -> None:
        source = inspect.getsource(router)
        for name in (
            "_choose_replica_for_request",
            "on_request_routed",
            "on_new_queue_len_info",
            "on_request_completed",
            "on_replica_actor_died",
        ):
            assert f"router.{name}(" in source

    def test_a_replica_is_chosen_once_and_has_the_request_at_once(self) -> None:
        """Between the choice and the sending nothing else runs, and whoever was chosen is told of the end once."""
        source = inspect.getsource(router.AsyncioRouter._route_and_send_request_once)
        chosen = source.index("._choose_replica_for_request(")
        sent = source.index(".try_send_request(")
        assert "await" not in source[chosen:sent]
        assert source.count("._choose_replica_for_request(") == 1
        assert source.count("self._register_completion_callback(result, replica, pr)") == 1
        assert "if replica is not None and not callback_registered:" in source
        assert "is_retry = True" in inspect.getsource(router.AsyncioRouter.route_and_send_request)

    def test_whom_a_replica_accepted_is_told_with_what_it_said(self) -> None:
        """At once after the number, and of a rejected request never."""
        source = inspect.getsource(router.AsyncioRouter._route_and_send_request_once)
        said = source.index(".on_new_queue_len_info(")
        routed = source.index(".on_request_routed(")
        assert "await" not in source[said:routed]
        assert "if queue_info.accepted:" in source[said:routed]

    def test_state_of_the_request_router(self) -> None:
        async def look() -> None:
            made = affinity()
            assert made._replicas == {}
            assert isinstance(made._replicas_updated_event, asyncio.Event)

        asyncio.run(look())

    def test_controller(self) -> None:
        from ray.serve._private.controller import ServeController

        assert constants.SERVE_CONTROLLER_NAME
        assert constants.SERVE_NAMESPACE
        assert callable(ServeController.get_http_config)

    def test_calls_get_a_request_of_their_own(self) -> None:
        outer = _get_serve_request_context()
        with own_request():
            first = _get_serve_request_context()._internal_request_id
        with own_request():
            second = _get_serve_request_context()._internal_request_id
        assert first
        assert second
        assert first != second
        assert _get_serve_request_context() is outer


def test_a_routed_program_stays_when_others_come_and_moves_once_when_its_replica_goes() -> None:
    async def live() -> None:
        made = affinity()
        a, b, c = replica("a"), replica("b"), replica("c")
        home = await first_choice(made, [a, b], pending("t/p"))
        made.on_request_routed(pending("t/p"), ReplicaID(home, DEPLOYMENT), None)
        for _ in range(3):
            assert await first_choice(made, [a, b, c], pending("t/p")) == home
        left = [each for each in (a, b, c) if each.replica_id.unique_id != home]
        moved = await first_choice(made, left, pending("t/p"))
        made.on_request_routed(pending("t/p"), ReplicaID(moved, DEPLOYMENT), None)
        assert await first_choice(made, [a, b, c], pending("t/p")) == moved

    asyncio.run(live())


def test_the_clusters_record_is_taken_out_of_the_call_and_counts_more_than_what_one_router_remembers() -> None:
    async def live() -> None:
        made = affinity()
        replicas = [replica(name) for name in "abcdef"]
        made.on_request_routed(pending("t/p"), ReplicaID("a", DEPLOYMENT), None)
        request = pending("t/p", **{HINT: Place("b")})  # it was moved by another router
        assert await first_choice(made, replicas, request) == "b"
        assert request.kwargs == {}
        assert await first_choice(made, replicas, request) == "b", "ranked again, while it waits"
        assert await first_choice(made, replicas, pending("t/p", **{HINT: Place("gone")})) == "b"

    asyncio.run(live())


def bound(program: str, home: str) -> PendingRequest:
    """A turn that only its home can serve."""
    request = turn(program, 1.0)
    request.kwargs[HINT] = Place(home, bound=True)
    return request


def test_a_bound_turn_waits_for_its_home_however_much_room_there_is_elsewhere() -> None:
    async def live() -> None:
        made, _ = waiting_for("a", "b", patience_s=0.0)
        one = bound("t/one", "a")
        first = await made._choose_replica_for_request(one)
        second = asyncio.create_task(made._choose_replica_for_request(bound("t/two", "a")))
        await turns()
        assert not second.done()
        made.on_request_completed(first.replica_id, one.metadata.internal_request_id)
        assert (await second).replica_id.unique_id == "a"

    asyncio.run(live())


def test_a_bound_turn_whose_home_is_gone_is_told_so_and_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.router.affinity.KNOWN_S", 0.01)

    async def live() -> None:
        now = [0.0]
        fleet = fleet_of(now)
        with using(fleet):
            made, (_, b) = waiting_for("a", "b")
            with pytest.raises(SessionLostError, match="gone"):
                await made._choose_replica_for_request(bound("t/p", "gone"))
            # In its line when the home goes: another's room is none for it.
            await made._choose_replica_for_request(bound("t/one", "a"))
            waits = asyncio.create_task(made._choose_replica_for_request(bound("t/two", "a")))
            await turns()
            made._replicas = {b.replica_id: b}
            made.replicas_changed()
            with pytest.raises(SessionLostError):
                await waits
            assert made._gate.take("b", "another")  # nothing of it was left there

    asyncio.run(live())


def test_a_replica_that_stops_is_still_asked_what_it_did_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.router.affinity.KNOWN_S", 0.01)

    def asks(method: str) -> PendingRequest:
        call = pending("", **{HINT: Place("a", bound=True)})
        call.metadata.call_method = method
        return call

    async def live() -> None:
        made, (a, b) = waiting_for("a", "b", no_replica_s=0.01)
        lists(made, [b])
        for _ in range(2):
            assert (await made._choose_replica_for_request(asks("drawn"))).replica_id is a.replica_id
            with pytest.raises(SessionLostError):
                await made._choose_replica_for_request(asks("session"))
            with pytest.raises(SessionLostError):  # it has stopped meanwhile, and refuses the call
                await made._choose_replica_for_request(asks("drawn"), is_retry=True)
        lists(made, [])
        assert (await made._choose_replica_for_request(asks("drawn"))).replica_id is a.replica_id
        with monkeypatch.context() as patched:
            patched.setattr(RequestRouter, "on_replica_actor_died", lambda *_: None)
            made.on_replica_actor_died(a.replica_id)
        with pytest.raises(UnavailableError):
            await made._choose_replica_for_request(asks("drawn"))

    asyncio.run(live())


def test_a_bound_turn_finds_a_home_that_this_router_learns_of_only_now() -> None:
    async def live() -> None:
        made, (a,) = waiting_for("a")
        waits = asyncio.create_task(made._choose_replica_for_request(bound("t/p", "new")))
        await turns()
        new = replica("new")
        made._replicas = {each.replica_id: each for each in (a, new)}
        made.replicas_changed()
        assert (await waits).replica_id.unique_id == "new"

    asyncio.run(live())


def test_a_child_goes_where_its_parent_is_and_a_program_of_its_own_stays() -> None:
    async def live() -> None:
        made = affinity()
        replicas = [replica(name) for name in "abcdef"]
        for home in "abcdef":
            known = Place(near_replica=home, prefixes=("d",), tokens=2000, prefix_tokens=2000)
            child = pending(f"t/child of {home}", **{HINT: known})
            assert await first_choice(made, replicas, child) == home
            assert await first_choice(made, replicas, child) == home, "asked again, while it waits"
            own = pending("t/a", **{HINT: Place("a", near_replica=home)})
            assert await first_choice(made, replicas, own) == "a"

    asyncio.run(live())


def test_programs_that_begin_alike_are_served_together_until_that_is_too_much_for_one() -> None:
    async def live() -> None:
        made = affinity(turn_tokens=1000, crowded_load=100.0)
        replicas = [replica(name) for name in "abcdefgh"]
        chosen = []
        for i in range(8):
            request = turn(f"t/{i}", 1.0)
            request.kwargs[HINT] = Place(prefixes=("shared",), tokens=3000, prefix_tokens=2500)
            chosen.append(await first_choice(made, replicas, request))
            assert made._gate.take(chosen[-1], request.metadata.internal_request_id)
            made.on_request_routed(request, ReplicaID(chosen[-1], DEPLOYMENT), None)
        assert chosen[1:3] == [chosen[0]] * 2, "two more turns in hand are less than the prefix"
        assert chosen[3] != chosen[0]
        assert set(chosen[:6]) == {chosen[0], chosen[3]}, "both hold it now"

    asyncio.run(live())


def test_a_branch_goes_where_the_conversation_that_it_leaves_was_sent() -> None:
    async def live() -> None:
        made = affinity()
        replicas = [replica(name) for name in "abcdefgh"]
        asked = turn("t/first", 1.0)
        asked.kwargs[HINT] = Place("f", tokens=3000, histories=(("one", 3000),))
        assert await first_choice(made, replicas, asked) == "f"
        made.on_request_routed(asked, ReplicaID("f", DEPLOYMENT), None)
        branch = Place(tokens=3500, histories=(("other", 3500), ("one", 3000)))
        assert await first_choice(made, replicas, pending("t/branch", **{HINT: branch})) == "f"

    asyncio.run(live())


def test_routers_without_redis_agree_on_the_place_of_a_program() -> None:
    async def live() -> None:
        replicas = [replica(name) for name in "abcdefgh"]
        for i in range(20):
            alone = {HINT: Place(tokens=100, shared=False)}
            first, second = [
                await first_choice(affinity(), replicas, pending(f"t/{i}", **dict(alone))) for _ in range(2)
            ]
            assert first == second

    asyncio.run(live())


def test_a_silent_replica_is_passed_by_until_it_is_heard_again() -> None:
    async def live() -> None:
        made, fleet = affinity(), fleet_of(now := [0.0])
        a, b = replica("a"), replica("b")
        with using(fleet):
            fleet.watch(made)
            assert await first_choice(made, [a, b], pending("t/p", **{HINT: Place("a")})) == "a"
            for each in "ab":
                fleet.tell(each, LoadReport())
            now[0] = 10.0
            fleet.tell("b", LoadReport())
            fleet.look(silent_s=6.0, heard_s=3.0)
            assert set(made._by_id) == {"a", "b"}, "the channel was not open for long enough to know"
            fleet.look(silent_s=6.0, heard_s=10.0)
            assert set(made._by_id) == {"b"}
            assert await first_choice(made, [a, b], pending("t/p", **{HINT: Place("a")})) == "b"
            fleet.tell("a", LoadReport())
            assert set(made._by_id) == {"a", "b"}

    asyncio.run(live())


def test_a_program_that_waits_for_its_home_says_so_to_it() -> None:
    async def live() -> None:
        fleet = fleet_of([0.0])
        told: list[tuple[str, str, str, float]] = []
        fleet.expect = lambda *what: told.append(what)
        with using(fleet):
            made, (a, _b) = waiting_for("a", "b", patience_s=7.0)
            made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
            assert (await made._choose_replica_for_request(turn("t/p", 1.0))).replica_id is a.replica_id
            waiting = asyncio.create_task(made._choose_replica_for_request(turn("t/p", 1.0)))
            await turns()
            waiting.cancel()
            (replica_id, scope, program, seconds) = told[0]
            assert (replica_id, scope, program) == ("a", "t", "t/p")
            assert 6.0 < seconds <= 7.0

    asyncio.run(live())


def test_in_line_programs_with_a_home_come_first_as_in_the_engine() -> None:
    async def live() -> None:
        made, (a,) = waiting_for("a")
        first = turn("t/p", 1.0)
        made.on_request_routed(turn("t/late", 9.0), a.replica_id, None)
        assert (await made._choose_replica_for_request(first)).replica_id is a.replica_id
        new = asyncio.create_task(made._choose_replica_for_request(turn("t/new", 2.0)))
        kept = asyncio.create_task(made._choose_replica_for_request(late := turn("t/late", 9.0)))
        await turns()
        made.on_request_completed(a.replica_id, first.metadata.internal_request_id)
        assert (await kept).replica_id is a.replica_id
        assert not new.done()
        made.on_request_completed(a.replica_id, late.metadata.internal_request_id)
        assert (await new).replica_id is a.replica_id

    asyncio.run(live())


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=6))
def test_the_line_in_front_of_a_replica_is_in_the_engines_order(programs: list[tuple[bool, int]]) -> None:
    """Whoever comes, with state there or without: what is let in next is what the engine would serve next."""

    async def live() -> list[int]:
        made, (a,) = waiting_for("a")
        holder = turn("t/first", 0.0)
        await made._choose_replica_for_request(holder)
        asked = [turn(f"t/{i}", float(arrival)) for i, (_, arrival) in enumerate(programs)]
        for request, (kept, _) in zip(asked, programs, strict=True):
            if kept:
                made.on_request_routed(request, a.replica_id, None)
        served: list[int] = []

        async def wait(number: int) -> None:
            await made._choose_replica_for_request(asked[number])
            served.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(len(asked))]
        for _ in asked:
            await turns()
            made.on_request_completed(a.replica_id, holder.metadata.internal_request_id)
            await turns()
            holder = asked[served[-1]]
        await asyncio.gather(*waiting)
        return served

    def waits(number: int) -> Any:
        kept, arrival = programs[number]
        submit = SimpleNamespace(program_arrival=float(arrival))
        return ProgramOrder().waiting(SimpleNamespace(pinned=kept, submit=submit, arrived=number, number=number))

    assert asyncio.run(live()) == sorted(range(len(programs)), key=waits)


def changed(request: PendingRequest, **changes: Any) -> PendingRequest:
    request.args[0] = replace(request.args[0], **changes)
    return request


@pytest.mark.parametrize(("heard", "order"), [(0.0, "bibibibi"), (30.0, "biiiibbb")])
def test_what_a_tenant_had_at_other_routers_counts_in_this_ones_line(heard: float, order: str) -> None:
    """From its next turn on. Each turn takes a second here."""

    async def live() -> None:
        lines, now, served = Lines(), [0.0], list[str]()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
            patched.setattr("holdfast.router.elsewhere.LINES", lines)
            made, (a,) = waiting_for("a", fair=True)
            holder = changed(turn("first", 0.0), scope="other")
            await made._choose_replica_for_request(holder)

            async def ask(request: PendingRequest) -> None:
                await made._choose_replica_for_request(request)
                served.append(request.args[0].scope)
                now[0] += 1.0
                await asyncio.sleep(0)
                made.on_request_completed(a.replica_id, request.metadata.internal_request_id)

            asked = [changed(turn(f"{i}", i), scope="bi"[i % 2]) for i in range(8)]
            waiting = [asyncio.create_task(ask(each)) for each in asked]
            await turns()
            lines.learn({"interactive/b": heard})
            made.on_request_completed(a.replica_id, holder.metadata.internal_request_id)
            await asyncio.gather(*waiting)
        assert "".join(served) == order

    asyncio.run(live())


def test_in_line_a_program_with_many_forks_has_one_turn() -> None:
    """Though it began long before the others of its tenant."""

    async def live() -> None:
        made, (a,) = waiting_for("a", fair=True)
        holder = turn("t/first", 0.0)
        await made._choose_replica_for_request(holder)
        forks = [changed(turn(f"t/fork{i}", 1.0), root="t/parent") for i in range(6)]
        others = [turn(f"t/other{i}", 9.0 + i) for i in range(3)]
        served: list[str] = []

        async def ask(request: PendingRequest) -> None:
            await made._choose_replica_for_request(request)
            served.append(request.metadata.session_id)
            await asyncio.sleep(0)
            made.on_request_completed(a.replica_id, request.metadata.internal_request_id)

        asked = [asyncio.create_task(ask(each)) for each in (*forks, *others)]
        await turns()
        made.on_request_completed(a.replica_id, holder.metadata.internal_request_id)
        await asyncio.gather(*asked)
        assert served[:4] == ["t/fork0", "t/other0", "t/other1", "t/other2"]

    asyncio.run(live())


def within(request: PendingRequest, seconds: float, turns_before: int = 0) -> PendingRequest:
    request.args[0] = replace(request.args[0], within_s=seconds, program_turns=turns_before)
    return request


def test_a_request_waits_in_line_no_longer_than_its_client() -> None:
    async def live() -> None:
        made, _ = waiting_for("a")
        await made._choose_replica_for_request(turn("first", 1.0))
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="was over"):
            await made._choose_replica_for_request(within(turn("second", 2.0), 0.05))
        assert 0.05 <= time.monotonic() - began < 5.0
        with pytest.raises(DeadlineError):
            await made._choose_replica_for_request(within(turn("third", 2.0, waited_s=1.0), 0.5))

    asyncio.run(live())


def test_a_new_program_that_would_wait_too_long_is_refused_at_once() -> None:
    async def live() -> None:
        made, _ = waiting_for("a")
        first = turn("first", 1.0)
        await made._choose_replica_for_request(first)
        waits = asyncio.create_task(made._choose_replica_for_request(turn("second", 2.0)))
        await turns()
        for _ in range(10):
            made._gate._gap.add(3.0)
        with pytest.raises(DeadlineError) as refused:
            await made._choose_replica_for_request(within(turn("third", 3.0), 2.0))
        assert refused.value.retry_after_s == pytest.approx(4.0, abs=0.5)
        goes_on = asyncio.create_task(made._choose_replica_for_request(within(turn("old", 0.5), 2.0, turns_before=3)))
        await turns()
        assert not goes_on.done(), "its place is before theirs"
        for task in (waits, goes_on):
            task.cancel()

    asyncio.run(live())


def test_what_a_replica_has_just_refused_is_not_sent_to_it_again() -> None:
    """By what it said its answers were expected in 6 s at least; a second later that is no news."""
    now = [100.0]
    fleet = fleet_of(now)
    refused = ErrorInfo(ErrorKind.DEADLINE, "late", "timeout", 2.0)

    async def live() -> None:
        made, (a, _) = waiting_for("a", "b")
        fleet.refused("a", within(turn("x", 1.0), 4.0).args[0], refused)

        async def goes_to(request: PendingRequest, home: str = "a") -> str:
            request.kwargs[HINT] = Place(home)
            chosen = await made._choose_replica_for_request(request)
            made.on_request_completed(chosen.replica_id, request.metadata.internal_request_id)
            return str(chosen.replica_id.unique_id)

        with pytest.raises(DeadlineError) as told:
            await goes_to(within(turn("x", 1.0), 5.0))
        assert told.value.retry_after_s == pytest.approx(1.0, abs=0.5)
        assert made.line_stats.foretold == 1
        assert await goes_to(within(turn("x", 1.0), 7.0)) == "a", "and its slot was given back"
        assert await goes_to(within(turn("x", 1.0), 5.0, turns_before=1)) == "a", "it comes before those that wait"
        assert await goes_to(turn("y", 1.0)) == "a", "it has no deadline"
        assert await goes_to(within(turn("x2", 1.0), 5.0), "b") == "b", "another replica's"
        batch = within(turn("x", 1.0), 5.0)
        batch.args[0] = replace(batch.args[0], priority=Priority.BATCH)
        assert await goes_to(batch) == "a", "another class's"
        now[0] += 1.1
        assert await goes_to(within(turn("x", 1.0), 5.0)) == "a"
        fleet.refused("a", within(turn("x", 1.0), 4.0).args[0], refused)
        made.on_replica_actor_died(a.replica_id)
        assert not fleet._expected

    with using(fleet):
        asyncio.run(live())


def test_a_replica_is_told_what_is_left_of_a_requests_time() -> None:
    async def live() -> None:
        made, replicas = waiting_for("a")
        sent: list[PendingRequest] = []

        def send(request: PendingRequest, with_rejection: bool) -> Any:
            sent.append(request)
            return SimpleNamespace(get_rejection_response=None, __anext__=None)

        replicas[0].try_send_request, replicas[0].actor_id = send, None
        chosen = await made._choose_replica_for_request(within(turn("p", 1.0, waited_s=2.0), 10.0))
        chosen.try_send_request(within(turn("p", 1.0, waited_s=2.0), 10.0), False)
        assert sent[0].args[0].within_s == pytest.approx(8.0, abs=0.5)
        request_id = sent[0].args[0].request_id
        assert fleet.replica_of(request_id) == "a", "who asks what was done for it asks this replica"
        fleet.ended(request_id)
        assert fleet.replica_of(request_id) == "a"

    fleet = Fleet()
    with using(fleet):
        asyncio.run(live())


def test_why_turns_went_where_they_went_is_counted() -> None:
    async def live() -> None:
        made, (a, b) = waiting_for("a", "b", patience_s=2.0)
        made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
        assert (await made._choose_replica_for_request(turn("t/p", 1.0))).replica_id is a.replica_id
        assert (await made._choose_replica_for_request(turn("t/p", 1.0, waited_s=3.0))).replica_id is b.replica_id
        assert made.line_stats.placed == {Reason.HOME: 1, Reason.WAITED: 1}
        made.on_replica_actor_died(a.replica_id)

    asyncio.run(live())


class TestWaiting:
    """`_choose_replica_for_request`, on a deployment whose replicas take one request each."""

    def test_programs_get_a_replica_in_the_order_they_began(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a")
            first = turn("t/first", 9.0)
            assert (await made._choose_replica_for_request(first)).replica_id is a.replica_id
            served: list[float] = []

            async def serve(arrival: float) -> None:
                request = turn(f"t/{arrival}", arrival)
                chosen = await made._choose_replica_for_request(request)
                served.append(arrival)
                made.on_request_completed(chosen.replica_id, request.metadata.internal_request_id)

            tasks = [asyncio.create_task(serve(arrival)) for arrival in (5.0, 3.0, 8.0, 1.0)]
            await turns()
            assert served == []
            made.on_request_completed(a.replica_id, first.metadata.internal_request_id)
            await asyncio.gather(*tasks)
            assert served == [1.0, 3.0, 5.0, 8.0]

        asyncio.run(live())

    def test_a_rejected_request_comes_before_younger_programs(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a")
            old, young = turn("t/old", 1.0), turn("t/young", 2.0)
            assert (await made._choose_replica_for_request(old)).replica_id is a.replica_id
            younger = asyncio.create_task(made._choose_replica_for_request(young))
            await turns()
            made.on_new_queue_len_info(a.replica_id, 1)  # full with requests of another ingress
            again = asyncio.create_task(made._choose_replica_for_request(old, is_retry=True))
            await turns()
            made.on_request_completed(a.replica_id, old.metadata.internal_request_id)  # of the rejected try
            assert (await again).replica_id is a.replica_id
            assert not younger.done()
            made.on_request_completed(a.replica_id, old.metadata.internal_request_id)
            assert (await younger).replica_id is a.replica_id

        asyncio.run(live())

    def test_a_program_leaves_its_full_replica_once_it_has_waited_long_enough(self) -> None:
        async def live() -> None:
            made, (a, b) = waiting_for("a", "b", patience_s=2.0)
            for name, home in (("t/p", a), ("t/q", a)):
                made.on_request_routed(turn(name, 1.0), home.replica_id, None)
            assert (await made._choose_replica_for_request(turn("t/p", 1.0))).replica_id is a.replica_id
            assert (await made._choose_replica_for_request(turn("t/q", 1.0, waited_s=3.0))).replica_id is b.replica_id

        asyncio.run(live())

    def test_programs_go_on_elsewhere_when_their_replica_dies(self) -> None:
        async def live() -> None:
            made, (a, b) = waiting_for("a", "b")
            made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
            assert (await made._choose_replica_for_request(turn("t/p", 1.0))).replica_id is a.replica_id
            waiting = asyncio.create_task(made._choose_replica_for_request(turn("t/p", 1.0)))
            await turns()
            assert not waiting.done()
            made.on_replica_actor_died(a.replica_id)
            assert (await waiting).replica_id is b.replica_id

        asyncio.run(live())

    def test_too_many_and_too_long_are_refused(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a", max_waiting=1)
            first = turn("t/p", 1.0)
            assert (await made._choose_replica_for_request(first)).replica_id is a.replica_id
            with pytest.raises(OverloadedError):
                await made._choose_replica_for_request(turn("t/late", 1.0, waited_s=1e6))
            waiting = asyncio.create_task(made._choose_replica_for_request(turn("t/q", 1.0)))
            await turns()
            with pytest.raises(OverloadedError):
                await made._choose_replica_for_request(turn("t/r", 1.0))
            made.on_request_completed(a.replica_id, first.metadata.internal_request_id)
            assert (await waiting).replica_id is a.replica_id

        asyncio.run(live())

    def test_a_clock_that_is_set_refuses_nobody(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a")
            first = turn("t/p", 1.0)
            assert (await made._choose_replica_for_request(first)).replica_id is a.replica_id
            steps = [turn("t/q", 1.0), turn("t/r", 1.0)]
            for request, step in zip(steps, (-1e6, 1e6), strict=True):
                delattr(request, ENTERED)
                request.created_at += step
            one, two = [asyncio.create_task(made._choose_replica_for_request(request)) for request in steps]
            await turns()
            assert len(made._gate) == 2
            made.on_request_completed(a.replica_id, first.metadata.internal_request_id)
            assert (await one).replica_id is a.replica_id
            made.on_request_completed(a.replica_id, steps[0].metadata.internal_request_id)
            assert (await two).replica_id is a.replica_id

        asyncio.run(live())

    def test_a_refused_request_has_waited_since_it_first_came(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a", queue_timeout_s=30.0)
            request = turn("t/p", 1.0)
            delattr(request, ENTERED)
            assert (await made._choose_replica_for_request(request)).replica_id is a.replica_id
            made.on_new_queue_len_info(a.replica_id, 1)  # full with requests of another ingress
            setattr(request, ENTERED, getattr(request, ENTERED) - 40.0)
            with pytest.raises(OverloadedError):
                await made._choose_replica_for_request(request, is_retry=True)

        asyncio.run(live())

    def test_who_waits_when_the_last_replica_dies_is_told_that_there_is_none(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a", no_replica_s=0.0, patience_s=2.0, queue_timeout_s=5.0)
            made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
            assert (await made._choose_replica_for_request(turn("t/p", 1.0))).replica_id is a.replica_id
            requests = [turn("t/p", 1.0), turn("t/q", 1.0)]  # one waits for its own replica, one for any
            waiting = [asyncio.create_task(made._choose_replica_for_request(request)) for request in requests]
            await turns()
            assert len(made._gate) == 2
            made.on_replica_actor_died(a.replica_id)
            for each in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(each, UnavailableError)

        asyncio.run(live())

    def test_calls_that_are_no_turns_go_first_and_broadcasts_take_no_slot(self) -> None:
        async def live() -> None:
            made, (a,) = waiting_for("a")
            first = turn("t/p", 1.0)
            assert (await made._choose_replica_for_request(first)).replica_id is a.replica_id
            other = asyncio.create_task(made._choose_replica_for_request(turn("t/q", 1.0)))
            card = asyncio.create_task(made._choose_replica_for_request(pending("")))
            await turns()
            made.on_request_completed(a.replica_id, "a broadcast")
            await turns()
            assert not card.done()
            made.on_request_completed(a.replica_id, first.metadata.internal_request_id)
            assert (await card).replica_id is a.replica_id
            assert not other.done()
            other.cancel()

        asyncio.run(live())


def test_what_replicas_say_that_they_have_decides_for_new_programs() -> None:
    async def live() -> None:
        made = affinity()
        a, b = replica("a"), replica("b")
        await first_choice(made, [a, b], pending(""))
        accepted = []
        for each, says in ((a, 3), (b, 2)):  # those of other routers among them
            made.on_request_routed(turn(f"t/{each.replica_id.unique_id}", 1.0), each.replica_id, None)
            request = turn(f"t/{each.replica_id.unique_id}", 1.0)
            assert (await made._choose_replica_for_request(request)).replica_id == each.replica_id
            made.on_new_queue_len_info(each.replica_id, says)
            made.on_request_routed(request, each.replica_id, None)
            accepted.append(request)
        assert await first_choice(made, [a, b], pending("")) == "b"
        made.on_request_completed(a.replica_id, accepted[0].metadata.internal_request_id)
        made.on_request_completed(b.replica_id, accepted[1].metadata.internal_request_id)
        assert await first_choice(made, [a, b], pending("")) == "b"

    asyncio.run(live())


def test_what_a_replica_said_when_a_request_came_that_is_over_says_nothing_of_now() -> None:
    """Serve hands it on with the answer, where that does not stream: a replica long idle looked as busy as it was."""

    async def live() -> None:
        made = affinity()
        a, b = replica("a"), replica("b")
        await first_choice(made, [a, b], pending(""))
        request = turn("t/p", 1.0)
        home = (await made._choose_replica_for_request(request)).replica_id
        made.on_request_completed(home, request.metadata.internal_request_id)
        made.on_new_queue_len_info(home, 4)
        made.on_request_routed(request, home, None)
        assert made._placement.balance == 1.0  # nothing is in hand anywhere

    asyncio.run(live())


def test_without_replicas_a_request_waits_no_longer_than_configured() -> None:
    async def live() -> None:
        made = affinity(no_replica_s=0.0)
        with pytest.raises(UnavailableError):
            await made._choose_replica_for_request(pending("t/p"))

    asyncio.run(live())


def test_pins_forget_the_program_routed_longest_ago() -> None:
    pins = Pins(2)
    pins.put("a", "1")
    pins.put("b", "1")
    pins.put("a", "2")
    pins.put("c", "1")
    assert [pins.get(program) for program in "abc"] == ["2", None, "1"]
    assert len(pins) == 2


def test_what_waits_and_which_replicas_came_and_went_is_told() -> None:
    async def main() -> None:
        made, (one, _two) = waiting_for("one", "two", patience_s=0.0)
        assert (made.line_stats.replicas, made.line_stats.joined) == (2, 2)
        taken = [await made._choose_replica_for_request(turn("a", 1.0)) for _ in range(2)]
        task = asyncio.create_task(made._choose_replica_for_request(turn("b", 2.0)))
        await turns()
        assert made.line_stats.waiting == 1
        lists(made, [one])
        assert (made.line_stats.replicas, made.line_stats.lost) == (1, 1)
        task.cancel()
        await turns()
        assert made.line_stats.waiting == 0
        assert line_stats().replicas >= 1
        assert len(taken) == 2

    asyncio.run(main())


def test_one_death_counts_once() -> None:
    """However often calls meet it, and though Serve lists the dead replica until it has noticed."""

    async def main() -> None:
        made, (one, two) = waiting_for("one", "two")
        made.on_replica_actor_died(two.replica_id)
        lists(made, [one, two])
        made.on_replica_actor_died(two.replica_id)
        lists(made, [one])
        lists(made, [one, replica("three")])
        assert (made.line_stats.joined, made.line_stats.lost) == (3, 1)

    asyncio.run(main())


def test_a_replica_that_is_silent_for_a_while_is_not_lost() -> None:
    async def main() -> None:
        fleet = fleet_of([0.0])
        with using(fleet):
            made, _ = waiting_for("one", "two")
            fleet.pass_by("one", 60.0)
            assert made.line_stats.replicas == 1
            fleet.keep({"two"})
            made.replicas_changed()
            assert (made.line_stats.replicas, made.line_stats.joined, made.line_stats.lost) == (2, 2, 0)

    asyncio.run(main())
