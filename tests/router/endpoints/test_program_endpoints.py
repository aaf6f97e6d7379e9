"""Programs over HTTP: their pauses are measured, shown to whom they belong, and a program can be ended."""

import asyncio
from typing import Any

import pytest
from fake_backend import DONE, HELLO, FakeBackend, World, bearer, chat_body
from waiting import VIRTUAL, go_by

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import Completed, ToolCallDelta
from holdfast.replicas.retention.latency import Called
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints.program_endpoints import Heartbeats, RunId
from holdfast.router.records.conversations import hint
from holdfast.router.records.store import Record
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

TOOLS = ("get_weather", "search")


def calling(*tools: str, last: bool = False):
    return (
        (ToolCallDelta(0, "call_1", tools[0] if tools else "x", "{}"),),
        (Completed("tool_calls", DONE.usage, DONE.timing, Called(tools, last)),),
    )


def make(script=None, **settings) -> World:
    return World(FakeBackend(script or calling(*TOOLS)), config=RouterConfig(response_cache=False), **settings)


def chat(world: World, **body):
    return world.chat(program_id="p", **body)


def shown(world: World, **arguments):
    return world.call("GET", "/v1/tools/latency", **arguments).json()


def test_the_interval_from_a_turns_end_to_the_next_counts_once_for_its_set_of_tools():
    world = make()
    chat(world)
    world.now += 1.5
    chat(world, stream=True)
    world.now += 2.5
    chat(world)
    found = shown(world)
    (tool,) = found["data"]
    assert tool["tools"] == ["get_weather", "search"]
    assert (tool["count"], tool["mean_s"], tool["p50_s"], tool["p99_s"]) == (2, 2.0, 1.5, 2.5)
    assert found["overall"]["count"] == 2


def test_a_turn_that_calls_nothing_has_no_interval():
    for script in (HELLO, calling(*TOOLS, last=True)):
        world = make(script)
        chat(world)
        world.now += 9.0
        chat(world)
        assert shown(world) == {
            "object": "list",
            "data": [],
            "overall": {"count": 0, "mean_s": 0.0, "std_s": 0.0, "p50_s": None, "p90_s": None, "p99_s": None},
        }


def test_replicas_are_told_when_a_run_began_and_how_many_turns_led_to_answers():
    """Seniority is a run's: a name that is used for ever does not outrank the others for ever."""
    world = make()
    for last in (False, False, True, False, True, True):
        world.backend.script = calling("ls", last=last)
        world.now += 10.0
        chat(world)
    requests = world.backend.requests
    told = [(each.program_turns, each.answered_turns, each.program_arrival - 1_000_000.0) for each in requests]
    assert told == [(0, 0, 10.0), (1, 0, 10.0), (2, 0, 10.0), (3, 3, 40.0), (4, 3, 40.0), (5, 5, 60.0)]


def test_replicas_are_told_of_a_last_turn_that_the_cache_answered():
    world = World(FakeBackend(calling("ls")))
    chat(world)
    assert world.backend.ended_programs == []
    last = ("POST", "/v1/chat/completions", {"json": chat_body(program_id="p", program_end=True)})
    hit, _ = world.calls([last, ("GET", "/health", {})])
    assert hit.headers["x-holdfast-cache"] == "hit"
    assert world.backend.ended_programs == [("default", "default/p")]
    assert dict(world.programs.latest())["default/p"].run_turns == 0, "its run is over"


def test_a_response_from_the_cache_ends_a_pause_too():
    world = World(FakeBackend(calling("ls")))
    chat(world)
    world.now += 3.0
    assert chat(world).headers["x-holdfast-cache"] == "hit"
    assert shown(world)["data"][0]["mean_s"] == 3.0


def test_tenants_see_their_own_tools_and_operators_what_all_have_together():
    names = ("one", "two", "ops")
    tenants = [Tenant(name, (hash_key(name),), operator=name == "ops") for name in names]
    world = make(tenants=TenantDirectory(tenants, exposed=True))
    one, two, ops = map(bearer, names)
    for headers in (one, one, two, one):
        world.call("POST", "/v1/chat/completions", json=chat_body(program_id="p"), headers=headers)
        world.now += 1.0
    mine, theirs = shown(world, headers=one), shown(world, headers=two)
    assert [tool["count"] for tool in mine["data"]] == [2]
    assert theirs["data"] == []
    assert (mine["overall"]["count"], theirs["overall"]["count"]) == (2, 0)
    assert shown(world, headers=ops)["overall"]["count"] == 2
    assert world.call("GET", "/v1/tools/latency").status_code == 401
    assert world.call("DELETE", "/v1/programs/p").status_code == 401
    assert world.call("DELETE", "/v1/programs/nope", headers=two).status_code == 404


def test_a_program_that_is_ended_is_forgotten_everywhere():
    world = make()
    chat(world)
    world.now += 1.0
    answer = world.call("DELETE", "/v1/programs/p")
    assert answer.json() == {"id": "p", "object": "program.deleted", "deleted": True}
    assert world.backend.ended_programs == [("default", "default/p")]
    again = world.call("DELETE", "/v1/programs/p")
    assert again.status_code == 404
    assert again.json()["error"]["code"] == "program_not_found"
    chat(world)
    assert world.backend.requests[-1].program_turns == 0
    assert world.backend.requests[-1].program_arrival == world.now
    assert shown(world)["data"] == [], "a new program of that name waited for nothing"


def test_a_program_that_a_replica_could_not_end_can_be_ended_again(monkeypatch):
    world = make()
    chat(world)

    async def silent(scope: str, program_id: str) -> None:
        raise UnavailableError("a replica did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "end_program", silent)
        answer = world.call("DELETE", "/v1/programs/p")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert world.call("DELETE", "/v1/programs/p").json()["deleted"]


def test_a_programs_name_may_hold_anything_that_a_url_can_say():
    world = make()
    world.chat(program_id="a/b c~")
    assert world.call("DELETE", "/v1/programs/a%2Fb%20c~").status_code == 200
    assert world.call("DELETE", "/v1/programs/" + "x" * 999).status_code == 400


def test_a_program_that_has_rested_begins_anew():
    world = make()
    chat(world)
    world.now += 3601.0
    chat(world)
    request = world.backend.requests[-1]
    assert (request.program_arrival, request.program_turns, request.answered_turns) == (world.now, 1, 1)
    assert shown(world)["data"] == [], "nobody waited for a tool so long"


def test_what_has_no_name_goes_on_with_its_conversation():
    world = make()
    first = [{"role": "user", "content": "list the files"}]
    reply = world.chat(messages=first).json()["choices"][0]["message"]
    calls = [{"id": call["id"], "type": "function", "function": call["function"]} for call in reply["tool_calls"]]
    said = {"role": "assistant", "content": reply["content"], "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "a b"}
    world.chat(messages=first)  # another run of the task
    world.chat(messages=[*first, said, result])
    world.chat(messages=[*first, said, {**result, "content": "c"}])  # a branch
    told = [(request.program_id, request.program_turns) for request in world.backend.requests]
    one, two, then, branch = (program for program, _ in told)
    assert one != two
    assert then in (one, two)
    assert [turns for _, turns in told] == [0, 0, 1, 1], "both runs stood there, and the calls of both have the same id"
    assert branch == ({one, two} - {then}).pop()
    world.chat(messages=[*first, said, {**result, "content": "d"}])
    assert world.backend.requests[-1].program_turns == 0, "nobody stands there any more"


def test_a_key_of_a_cache_and_a_parent_are_places_and_no_programs():
    world = make()
    world.chat(prompt_cache_key="all")
    world.chat(prompt_cache_key="all")
    headers = {"x-session-id": "child", "x-parent-session-id": "parent", "x-correlation-id": "fresh"}
    world.call("POST", "/v1/chat/completions", json=chat_body(), headers=headers)
    assert len({request.program_id for request in world.backend.requests}) == 3
    hints = [hint(name) for name in ("default/all", "default/all", "default/parent")]
    assert [place.prefixes[0] for place in world.backend.places] == hints
    assert [request.prefixes[0] for request in world.backend.requests] == hints
    assert world.backend.requests[-1].program_id == "default/child"
    world.chat(program_id="parent")
    world.call("POST", "/v1/chat/completions", json=chat_body(program_id="another"), headers=headers)
    assert world.backend.places[-1].parent == "r1"


HEARD = ("POST", "/v1/programs/p/heartbeat", {"json": {"within_s": 30}})


def test_a_heartbeat_says_until_when_and_refuses_what_makes_no_sense():
    world = make()
    told, *refused = world.calls(
        [HEARD, *((*HEARD[:2], {"json": body}) for body in ({}, {"within_s": 0}, {"within_s": 1e9}))]
    )
    assert told.json() == {"id": "p", "object": "program.heartbeat", "within_s": 30.0}
    assert [each.json()["error"]["param"] for each in refused] == ["within_s"] * 3


class Words:
    """The words of clients, without Redis and its clock: these tests run in virtual time."""

    def __init__(self) -> None:
        self.words: dict[str, Record] = {}

    async def put(self, key: str, value: bytes, ttl_s: float, limit: int) -> None:
        self.words[key] = Record(value, "")

    async def get(self, key: str) -> Record | None:
        return self.words.get(key)

    async def delete(self, key: str) -> None:
        self.words.pop(key, None)


@pytest.fixture
def heartbeats(monkeypatch: pytest.MonkeyPatch):
    """Makes the heartbeats of a router, whose ended programs are in `ended`."""
    monkeypatch.setattr("holdfast.router.endpoints.program_endpoints.SPARE_S", 0.05)
    ended: list[tuple[str, str]] = []

    async def over(tenant: str, key: str) -> None:
        ended.append((tenant, key))
        one_ended.set()

    async def run(key: str) -> RunId | None:
        return runs.get(key)

    def made(words: Words) -> Heartbeats:
        return Heartbeats(words, over, run)

    runs: dict[str, RunId] = {}
    one_ended = asyncio.Event()
    made.ended, made.one_ended, made.runs = ended, one_ended, runs
    return made


@pytest.fixture
def anyio_backend():
    return VIRTUAL


async def until_one_ended(heartbeats) -> None:
    """And longer, for what should not end."""
    await heartbeats.one_ended.wait()
    await go_by(10.0)


@pytest.mark.anyio
async def test_a_program_is_over_once_its_client_is_silent(heartbeats):
    router = heartbeats(Words())
    await router.heard("t", "t/gone", 0.1)
    await router.heard("t", "t/there", 0.1)
    await router.heard("t", "t/there", 60.0)
    await router.heard("t", "t/ended", 0.1)
    await router.over("t/ended")
    await until_one_ended(heartbeats)
    assert heartbeats.ended == [("t", "t/gone")]


def played(monkeypatch: pytest.MonkeyPatch, *calls: tuple[str, str, dict[str, Any]]) -> World:
    """A router that got these calls, a second after each other; then the times of all heartbeats were over."""
    world = make()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        later, over = loop.call_later, []

        def call_later(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
            handle = later(delay, callback, *arguments)
            if getattr(callback, "__name__", "") == "_missed":
                over.append((handle, callback, arguments))
            return handle

        monkeypatch.setattr(loop, "call_later", call_later)
        async with world.client() as client:
            for method, path, body in calls:
                assert (await client.request(method, path, json=body or None)).status_code == 200
                world.now += 1.0
        for handle, callback, arguments in over:
            if not handle.cancelled():
                callback(*arguments)
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    asyncio.run(main())
    return world


TURN = ("POST", "/v1/chat/completions", chat_body(program_id="p"))
LAST = ("POST", "/v1/chat/completions", chat_body(program_id="p", program_end=True))
WORD = ("POST", "/v1/programs/p/heartbeat", {"within_s": 60})
OVER = ("DELETE", "/v1/programs/p", {})
AHEAD = ("POST", "/v1/prefills", {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "program_id": "p"})


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        ((TURN, WORD), 1),
        ((TURN, WORD, TURN), 1),
        ((TURN, LAST, TURN, WORD, TURN), 1),
        ((TURN, WORD, LAST, TURN), 0),
        ((TURN, WORD, OVER, TURN), 0),
        ((WORD, TURN), 1),
        ((WORD, TURN, TURN), 1),
        ((AHEAD, WORD, TURN), 1),
        ((WORD, AHEAD), 1),
        ((WORD, TURN, LAST, TURN), 0),
        ((WORD, TURN, OVER, TURN), 0),
        ((TURN, LAST, WORD, TURN), 0),
    ],
)
def test_a_client_that_is_heard_of_no_more_ends_the_run_that_it_spoke_of(monkeypatch, calls, ends):
    """Before the first turn that is the first run, and after an answer the one that the answer ended."""
    world = played(monkeypatch, *calls)
    assert world.backend.ended_programs == [("default", "default/p")] * (ends + calls.count(OVER))


@pytest.mark.anyio
async def test_what_another_router_heard_counts(heartbeats):
    store = Words()
    one, two = heartbeats(store), heartbeats(store)
    await one.heard("t", "t/p", 0.1)
    await two.heard("t", "t/p", 0.6)
    await go_by(0.3)  # past the time of the first word
    assert heartbeats.ended == []
    await until_one_ended(heartbeats)
    assert heartbeats.ended == [("t", "t/p")]


@pytest.mark.anyio
async def test_while_the_store_is_away_no_program_is_ended(heartbeats):
    class Away(Words):
        async def get(self, key: str) -> Record | None:
            raise UnavailableError("Redis does not answer")

    await heartbeats(Away()).heard("t", "t/p", 0.05)
    await go_by(10.0)
    assert heartbeats.ended == []
