"""The router class on a made-up deployment. What it uses of Serve: `test_serve_private`."""

import asyncio
import time
from dataclasses import fields, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from holdfast.replicas.errors import DeadlineError, OverloadedError, SessionLostError, UnavailableError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.scheduling.queue import ProgramOrder
from holdfast.replicas.stats import LoadReport
from holdfast.router.backend import RoutingHint
from holdfast.router.dispatch.affinity import HINT, AffinityRouter, Pending
from holdfast.router.dispatch.replica_health import ReplicaHealth
from holdfast.router.placement import Reason, Weights

pytestmark = pytest.mark.anyio

numbers = count()
DEPLOYMENT = DeploymentID(name="replicas", app_name="holdfast")


def replica(name: str) -> Any:
    """What the router looks at of a running replica."""
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=4)


def pending(program: str, waited_s: float = 0.0, **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id=program)
    request = PendingRequest(args=[], kwargs=kwargs, metadata=metadata)
    request._waited = waited_s
    return arrived(request)


def arrived(request: PendingRequest) -> PendingRequest:
    """A request that has waited for so long; to be called again once its arguments have changed."""
    request._holdfast = None
    Pending.of(request).arrived = time.monotonic() - request._waited
    return request


def turn(program: str, arrival: float, waited_s: float = 0.0) -> PendingRequest:
    """A call for a program's turn, with a request id of its own."""
    request = pending(program, waited_s)
    request.metadata.internal_request_id = f"{program} {next(numbers)}"
    command = GenerateRequest("r", RawPrompt("x"), Sampling(), scope="t", program_id=program, program_arrival=arrival)
    request.args.append(command)
    return arrived(request)


def waiting_for(*names: str, health: ReplicaHealth | None = None, **config: Any) -> tuple[AffinityRouter, list[Any]]:
    """A router over replicas that take one request each. What Serve would look up about them is left out."""
    made = affinity(health, **config)
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
        made.update_replicas(replicas)


async def turns() -> None:
    """Let every task go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def full(**config: Any) -> tuple[AffinityRouter, Any, PendingRequest]:
    """A router, its only replica, and the turn that this serves."""
    made, (a,) = waiting_for("a", **config)
    first = turn("t/p", 1.0)
    assert (await made.choose(first)).replica_id is a.replica_id
    return made, a, first


async def waits(made: AffinityRouter, *requests: PendingRequest, **again: bool) -> list[asyncio.Task[Any]]:
    """These calls, none of which has a replica yet."""
    tasks = [asyncio.create_task(made.choose(each, **again)) for each in requests]
    await turns()
    assert not any(task.done() for task in tasks)
    return tasks


def ends(made: AffinityRouter, request: PendingRequest, at: ReplicaID) -> None:
    made.on_request_completed(at, request.metadata.internal_request_id)


WEIGHT_NAMES = {field.name for field in fields(Weights)}


def affinity(health: ReplicaHealth | None = None, **config: Any) -> AffinityRouter:
    """A router of its own process, as it were. `config` has weights and options."""
    weights = Weights(**{name: config.pop(name) for name in WEIGHT_NAMES & config.keys()})
    made = AffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(weights=weights, health=health or ReplicaHealth(), **config)
    return made


async def first_choice(made: AffinityRouter, names: str, request: PendingRequest) -> str:
    """The replica, one of these, that a turn is sent to if it is not full."""
    replicas = [replica(name) for name in names]
    lists(made, replicas)
    ranking = await made.choose_replicas(replicas, request)
    return str(ranking[0][0].replica_id.unique_id)


async def test_a_routed_program_stays_when_others_come_and_moves_once_when_its_replica_goes() -> None:
    made = affinity()
    home = await first_choice(made, "ab", pending("t/p"))
    made.on_request_routed(pending("t/p"), ReplicaID(home, DEPLOYMENT), None)
    for _ in range(3):
        assert await first_choice(made, "abc", pending("t/p")) == home
    moved = await first_choice(made, "abc".replace(home, ""), pending("t/p"))
    made.on_request_routed(pending("t/p"), ReplicaID(moved, DEPLOYMENT), None)
    assert await first_choice(made, "abc", pending("t/p")) == moved


async def test_the_clusters_record_is_taken_out_of_the_call_and_counts_more_than_what_one_router_remembers() -> None:
    made = affinity()
    made.on_request_routed(pending("t/p"), ReplicaID("a", DEPLOYMENT), None)
    request = pending("t/p", **{HINT: RoutingHint("b")})  # it was moved by another router
    assert await first_choice(made, "abcdef", request) == "b"
    assert request.kwargs == {}
    assert await first_choice(made, "abcdef", request) == "b", "ranked again, while it waits"
    assert await first_choice(made, "abcdef", pending("t/p", **{HINT: RoutingHint("gone")})) == "b"


def bound(program: str, home: str) -> PendingRequest:
    """A turn that only its home can serve."""
    request = turn(program, 1.0)
    request.kwargs[HINT] = RoutingHint(home, bound=True)
    return request


async def test_a_bound_turn_waits_for_its_home_however_much_room_there_is_elsewhere() -> None:
    made, (a, _) = waiting_for("a", "b", patience_s=0.0)
    one = bound("t/one", "a")
    await made.choose(one)
    [second] = await waits(made, bound("t/two", "a"))
    ends(made, one, a.replica_id)
    assert (await second).replica_id is a.replica_id


async def test_a_bound_turn_whose_home_is_gone_is_told_so_and_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.router.dispatch.affinity.KNOWN_S", 0.01)
    made, (_, b) = waiting_for("a", "b")
    with pytest.raises(SessionLostError, match="gone"):
        await made.choose(bound("t/p", "gone"))
    # It waits when its home goes: another replica's slot is no use.
    await made.choose(bound("t/one", "a"))
    [waiting] = await waits(made, bound("t/two", "a"))
    lists(made, [b])
    with pytest.raises(SessionLostError):
        await waiting
    assert made._queue.take("b", "another")  # it holds no slot there


async def test_a_replica_that_stops_is_still_asked_what_it_did_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.router.dispatch.affinity.KNOWN_S", 0.01)

    def asks(method: str) -> PendingRequest:
        call = pending("", **{HINT: RoutingHint("a", bound=True)})
        call.metadata.call_method = method
        return call

    made, (a, b) = waiting_for("a", "b", no_replica_s=0.01)
    lists(made, [b])
    for _ in range(2):
        assert (await made.choose(asks("drawn"))).replica_id is a.replica_id
        with pytest.raises(SessionLostError):
            await made.choose(asks("session"))
        with pytest.raises(SessionLostError):  # it has stopped meanwhile, and refuses the call
            await made.choose(asks("drawn"), is_retry=True)
    lists(made, [])
    assert (await made.choose(asks("drawn"))).replica_id is a.replica_id
    with monkeypatch.context() as patched:
        patched.setattr(RequestRouter, "on_replica_actor_died", lambda *_: None)
        made.on_replica_actor_died(a.replica_id)
    with pytest.raises(UnavailableError):
        await made.choose(asks("drawn"))


async def test_a_bound_turn_finds_a_home_that_this_router_learns_of_only_now() -> None:
    made, (a,) = waiting_for("a")
    [waiting] = await waits(made, bound("t/p", "new"))
    lists(made, [a, replica("new")])
    assert (await waiting).replica_id.unique_id == "new"


async def test_a_child_goes_where_its_parent_is_and_a_program_of_its_own_stays() -> None:
    made = affinity()
    for home in "abcdef":
        known = RoutingHint(parent=home, prefixes=("d",), tokens=2000, prefix_tokens=2000)
        child = pending(f"t/child of {home}", **{HINT: known})
        assert await first_choice(made, "abcdef", child) == home
        assert await first_choice(made, "abcdef", child) == home, "asked again, while it waits"
        own = pending("t/a", **{HINT: RoutingHint("a", parent=home)})
        assert await first_choice(made, "abcdef", own) == "a"


async def test_a_branch_goes_where_the_conversation_that_it_leaves_was_sent() -> None:
    made = affinity()
    asked = turn("t/first", 1.0)
    asked.kwargs[HINT] = RoutingHint("f", tokens=3000, histories=(("one", 3000),))
    assert await first_choice(made, "abcdefgh", asked) == "f"
    made.on_request_routed(asked, ReplicaID("f", DEPLOYMENT), None)
    branch = RoutingHint(tokens=3500, histories=(("other", 3500), ("one", 3000)))
    assert await first_choice(made, "abcdefgh", pending("t/branch", **{HINT: branch})) == "f"


async def test_routers_without_redis_agree_on_the_place_of_a_program() -> None:
    for i in range(20):
        alone = [pending(f"t/{i}", **{HINT: RoutingHint(tokens=100, shared=False)}) for _ in range(2)]
        first, second = [await first_choice(affinity(), "abcdefgh", each) for each in alone]
        assert first == second


async def test_a_silent_replica_gets_no_turns_until_it_reports_again() -> None:
    now = [0.0]
    health = ReplicaHealth(lambda: now[0])
    made = affinity(health)
    assert await first_choice(made, "ab", pending("t/p", **{HINT: RoutingHint("a")})) == "a"
    for each in "ab":
        health.report(each, LoadReport())
    now[0] = 10.0
    health.report("b", LoadReport())
    health.check(silent_s=6.0, open_s=3.0)
    assert set(made._available) == {"a", "b"}, "the channel was not open for long enough to know"
    health.check(silent_s=6.0, open_s=10.0)
    assert set(made._available) == {"b"}
    assert await first_choice(made, "ab", pending("t/p", **{HINT: RoutingHint("a")})) == "b"
    health.report("a", LoadReport())
    assert set(made._available) == {"a", "b"}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=6))
def test_the_line_in_front_of_a_replica_is_in_the_engines_order(programs: list[tuple[bool, int]]) -> None:
    """Whoever comes, with state there or without: what is let in next is what the engine would serve next."""

    async def live() -> list[int]:
        made, (a,) = waiting_for("a")
        holder = turn("t/first", 0.0)
        await made.choose(holder)
        asked = [turn(f"t/{i}", float(arrival)) for i, (_, arrival) in enumerate(programs)]
        for request, (kept, _) in zip(asked, programs, strict=True):
            if kept:
                made.on_request_routed(request, a.replica_id, None)
        served: list[int] = []

        async def wait(number: int) -> None:
            await made.choose(asked[number])
            served.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(len(asked))]
        for _ in asked:
            await turns()
            ends(made, holder, a.replica_id)
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
    return arrived(request)


async def test_in_line_a_program_with_many_forks_has_one_turn() -> None:
    """Though it began long before the others of its tenant."""
    made, (a,) = waiting_for("a", fair=True)
    holder = turn("t/first", 0.0)
    await made.choose(holder)
    forks = [changed(turn(f"t/fork{i}", 1.0), root="t/parent") for i in range(6)]
    others = [turn(f"t/other{i}", 9.0 + i) for i in range(3)]
    served: list[str] = []

    async def ask(request: PendingRequest) -> None:
        await made.choose(request)
        served.append(request.metadata.session_id)
        await asyncio.sleep(0)
        ends(made, request, a.replica_id)

    asked = [asyncio.create_task(ask(each)) for each in (*forks, *others)]
    await turns()
    ends(made, holder, a.replica_id)
    await asyncio.gather(*asked)
    assert served[:4] == ["t/fork0", "t/other0", "t/other1", "t/other2"]


def within(request: PendingRequest, seconds: float, turns_before: int = 0) -> PendingRequest:
    return changed(request, within_s=seconds, program_turns=turns_before)


async def test_a_request_waits_in_line_no_longer_than_its_client() -> None:
    made, _ = waiting_for("a")
    await made.choose(turn("first", 1.0))
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="deadline passed"):
        await made.choose(within(turn("second", 2.0), 0.05))
    assert 0.05 <= time.monotonic() - began < 5.0
    with pytest.raises(DeadlineError):
        await made.choose(within(turn("third", 2.0, waited_s=1.0), 0.5))


async def test_a_new_program_that_would_wait_too_long_is_refused_at_once() -> None:
    made, _, _ = await full()
    await waits(made, turn("second", 2.0))
    for _ in range(10):
        made._queue._gap.add(3.0)
    with pytest.raises(DeadlineError) as refused:
        await made.choose(within(turn("third", 3.0), 2.0))
    assert refused.value.retry_after_s == pytest.approx(4.0, abs=0.5)
    await waits(made, within(turn("old", 0.5), 2.0, turns_before=3))  # its place is before theirs


async def test_a_request_is_sent_with_its_replica_and_what_is_left_of_its_time() -> None:
    health = ReplicaHealth()
    made, replicas = waiting_for("a", health=health)
    sent: list[PendingRequest] = []

    def send(request: PendingRequest, with_rejection: bool) -> Any:
        sent.append(request)
        return SimpleNamespace()

    replicas[0].try_send_request, replicas[0].actor_id = send, None
    request = within(turn("p", 1.0, waited_s=2.0), 10.0)
    (await made.choose(request)).try_send_request(request, False)
    assert sent[0].args[0].within_s == pytest.approx(8.0, abs=0.5)
    assert sent[0].args[0].replica == "a"
    request_id = sent[0].args[0].request_id
    assert health.replica_of(request_id) == "a", "it is asked what it did for the request"
    health.on_end(request_id)
    assert health.replica_of(request_id) == "a"


async def test_why_turns_went_where_they_went_is_counted() -> None:
    made, (a, b) = waiting_for("a", "b", patience_s=2.0)
    made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
    assert (await made.choose(turn("t/p", 1.0))).replica_id is a.replica_id
    assert (await made.choose(turn("t/p", 1.0, waited_s=3.0))).replica_id is b.replica_id
    assert made.stats.placed == {Reason.HOME: 1, Reason.WAITED: 1}
    made.on_replica_actor_died(a.replica_id)


# ---- `choose`, where each replica takes one request ----


async def test_a_rejected_request_comes_before_younger_programs() -> None:
    made, a, old = await full()
    [younger] = await waits(made, turn("t/young", 2.0))
    made.on_new_queue_len_info(a.replica_id, 1)  # full with requests of another ingress
    [again] = await waits(made, old, is_retry=True)
    ends(made, old, a.replica_id)  # the rejected try
    assert (await again).replica_id is a.replica_id
    assert not younger.done()
    ends(made, old, a.replica_id)
    assert (await younger).replica_id is a.replica_id


async def test_programs_go_on_elsewhere_when_their_replica_dies() -> None:
    made, (a, b) = waiting_for("a", "b")
    made.on_request_routed(turn("t/p", 1.0), a.replica_id, None)
    assert (await made.choose(turn("t/p", 1.0))).replica_id is a.replica_id
    [waiting] = await waits(made, turn("t/p", 1.0))
    made.on_replica_actor_died(a.replica_id)
    assert (await waiting).replica_id is b.replica_id


async def test_too_many_and_too_long_are_refused() -> None:
    made, a, first = await full(max_waiting=1)
    with pytest.raises(OverloadedError):
        await made.choose(turn("t/late", 1.0, waited_s=1e6))
    [waiting] = await waits(made, turn("t/q", 1.0))
    with pytest.raises(OverloadedError):
        await made.choose(turn("t/r", 1.0))
    ends(made, first, a.replica_id)
    assert (await waiting).replica_id is a.replica_id


async def test_a_clock_that_is_set_refuses_nobody() -> None:
    made, a, first = await full()
    steps = [turn("t/q", 1.0), turn("t/r", 1.0)]
    for request, step in zip(steps, (-1e6, 1e6), strict=True):
        request.created_at += step
    one, two = await waits(made, *steps)
    ends(made, first, a.replica_id)
    assert (await one).replica_id is a.replica_id
    ends(made, steps[0], a.replica_id)
    assert (await two).replica_id is a.replica_id


async def test_a_refused_request_has_waited_since_it_first_came() -> None:
    made, a, request = await full(queue_timeout_s=30.0)
    made.on_new_queue_len_info(a.replica_id, 1)  # full with requests of another ingress
    Pending.of(request).arrived -= 40.0
    with pytest.raises(OverloadedError):
        await made.choose(request, is_retry=True)


async def test_who_waits_when_the_last_replica_dies_is_told_that_there_is_none() -> None:
    made, a, first = await full(no_replica_s=0.0, patience_s=2.0, queue_timeout_s=5.0)
    made.on_request_routed(first, a.replica_id, None)
    waiting = await waits(made, turn("t/p", 1.0), turn("t/q", 1.0))  # one for its own replica, one for any
    made.on_replica_actor_died(a.replica_id)
    for each in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(each, UnavailableError)


async def test_calls_that_are_no_turns_go_first_and_broadcasts_take_no_slot() -> None:
    made, a, first = await full()
    other, card = await waits(made, turn("t/q", 1.0), pending(""))
    made.on_request_completed(a.replica_id, "a broadcast")
    await turns()
    assert not card.done()
    ends(made, first, a.replica_id)
    assert (await card).replica_id is a.replica_id
    assert not other.done()


async def test_what_replicas_say_that_they_have_decides_for_new_programs() -> None:
    made = affinity()
    await first_choice(made, "ab", pending(""))
    accepted = []
    for name, says in (("a", 3), ("b", 2)):  # those of other routers among them
        at, request = ReplicaID(name, DEPLOYMENT), turn(f"t/{name}", 1.0)
        made.on_request_routed(turn(f"t/{name}", 1.0), at, None)
        assert (await made.choose(request)).replica_id == at
        made.on_new_queue_len_info(at, says)
        made.on_request_routed(request, at, None)
        accepted.append((request, at))
    assert await first_choice(made, "ab", pending("")) == "b"
    for request, at in accepted:
        ends(made, request, at)
    assert await first_choice(made, "ab", pending("")) == "b"


async def test_what_a_replica_said_when_a_request_came_that_is_over_says_nothing_of_now() -> None:
    """Serve hands it on with the answer, where that does not stream: a replica long idle looked as busy as it was."""
    made = affinity()
    await first_choice(made, "ab", pending(""))
    request = turn("t/p", 1.0)
    home = (await made.choose(request)).replica_id
    ends(made, request, home)
    made.on_new_queue_len_info(home, 4)
    made.on_request_routed(request, home, None)
    assert made._placement.balance == 1.0  # nothing is in hand anywhere


async def test_without_replicas_a_request_waits_no_longer_than_configured() -> None:
    made = affinity(no_replica_s=0.0)
    with pytest.raises(UnavailableError):
        await made.choose(pending("t/p"))


async def test_what_waits_and_which_replicas_came_and_went_is_told() -> None:
    made, (one, _) = waiting_for("one", "two", patience_s=0.0)
    assert (made.stats.replicas, made.stats.joined) == (2, 2)
    for _ in range(2):
        await made.choose(turn("a", 1.0))
    [task] = await waits(made, turn("b", 2.0))
    assert made.stats.waiting == 1
    lists(made, [one])
    assert (made.stats.replicas, made.stats.lost) == (1, 1)
    task.cancel()
    await turns()
    assert made.stats.waiting == 0
    assert made._health.queue_stats.replicas == 1


async def test_one_death_counts_once() -> None:
    """However often calls meet it, and though Serve lists the dead replica until it has noticed."""
    made, (one, two) = waiting_for("one", "two")
    made.on_replica_actor_died(two.replica_id)
    lists(made, [one, two])
    made.on_replica_actor_died(two.replica_id)
    lists(made, [one])
    lists(made, [one, replica("three")])
    assert (made.stats.joined, made.stats.lost) == (3, 1)


async def test_a_replica_that_is_silent_for_a_while_is_not_lost() -> None:
    health = ReplicaHealth(lambda: 0.0)
    made, _ = waiting_for("one", "two", health=health)
    health.eject("one", 60.0)
    assert made.stats.replicas == 1
    health.keep({"two"})
    made.on_replicas_changed()
    assert (made.stats.replicas, made.stats.joined, made.stats.lost) == (2, 2, 0)


# ---- calls that are no turns, at replicas that take four calls at once and keep some of those for them ----

A = ReplicaID("a", DEPLOYMENT)


def control_call() -> PendingRequest:
    call = pending("")
    call.metadata.internal_request_id = f"i{next(numbers)}"
    return call


def with_control_calls(control_calls: int) -> AffinityRouter:
    made = affinity(control_calls=control_calls)
    lists(made, [replica("a")])
    return made


def accept(made: AffinityRouter, request: PendingRequest, ongoing: int) -> None:
    """What Serve tells when the replica takes a request, which makes it so many calls there."""
    made.on_new_queue_len_info(A, ongoing)
    made.on_request_routed(request, A, None)


async def test_a_full_replica_has_room_for_calls_that_are_no_turns() -> None:
    made = with_control_calls(3)
    await made.choose(turn("t/p", 1.0))  # of the four one is for turns
    await waits(made, turn("t/p", 1.0))
    for _ in range(5):
        await made.choose(control_call())
    await waits(made, control_call(), is_retry=True)  # the replica has said that it takes no more


@pytest.mark.parametrize("ended", [True, False])
async def test_a_call_that_is_no_turn_closes_no_replica_with_room(ended: bool) -> None:
    """Of two turns one runs. What a replica says on a call that does not stream is told after that has ended."""
    made, card = with_control_calls(2), control_call()
    await made.choose(turn("t/p", 1.0))
    await made.choose(card)
    if ended:
        ends(made, card, A)
    accept(made, card, ongoing=2)
    second = asyncio.create_task(made.choose(turn("t/p", 1.0)))
    await turns()
    assert second.done()


async def test_a_turn_closes_a_replica_that_has_enough_of_others() -> None:
    made, first = with_control_calls(2), turn("t/p", 1.0)
    await made.choose(first)
    accept(made, first, ongoing=2)
    [second] = await waits(made, turn("t/p", 1.0))
    await second  # asked again after a while
