"""The program table in a real Redis: one record whichever router a turn comes to, by name or by what it sent."""

import asyncio
from itertools import count

import pytest
from fake_backend import config_of
from redis_server import records_away, shared_records
from waiting import until_async

from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.requests import Answer, ChatPrompt, RawPrompt, Timing, ToolCall, Usage
from holdfast.router.config import RouterConfig
from holdfast.router.records.conversations import REPLIES, conversation, mark_of
from holdfast.router.records.programs import PROGRAMS_AT_PLACE, Begun, ProgramTable

pytestmark = pytest.mark.anyio

DAY = 86400.0
TASK = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "fix the bug"})
TOOLS = ({"type": "function", "function": {"name": "ls"}},)
numbers = count()


class Routers:
    """Several routers at one Redis. Requests go to them in turn."""

    def __init__(self, n=2, most=1000, clock=None):
        self.trips = 0  # to Redis and back
        self.requests = count()
        first = shared_records(observe=self.count)
        self.records = [first, *(shared_records(first, observe=self.count) for _ in range(n - 1))]
        config = config_of(program_entries=1000, program_tenant_entries=most)
        self.tables = [ProgramTable(each, config, clock) for each in self.records]

    def count(self, seconds, done):
        assert done
        self.trips += 1

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for each in self.records:
            await each.close()

    async def ask(self, *messages, reply=True, prompt=None, tenant="acme"):
        """The key of the program, how many turns it had, and the assistant's message."""
        table = self.tables[next(self.requests) % len(self.tables)]
        return await asked(table, prompt or ChatPrompt(messages, TOOLS), reply, tenant)

    async def keys(self, pattern):
        redis = self.records[0]._redis
        return await redis.keys(f"{self.records[0].namespace}/{pattern}")


@pytest.fixture
async def routers():
    async with Routers() as routers:
        yield routers


async def asked(table, prompt, reply=True, tenant="acme"):
    begun = await table.begin_conversation(tenant, conversation("pocket", prompt))
    said, answer = answered()
    if reply:
        await table.end(begun, "r1", "ls", mark=mark_of(answer))
    return begun.key, begun.program.turns, said


def answered():
    """A reply that calls a tool, as the client sends it back and as it was."""
    call = ToolCall(f"call_{next(numbers)}", "ls", "{}")
    function = {"name": "ls", "arguments": "{}"}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    said = {"role": "assistant", "content": " Looking.\n", "tool_calls": calls}
    return said, Answer("Looking.", (call,), (), "tool_calls", Usage(), Timing(0.0))


def result(said, text="files"):
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": text}


async def turn(table: ProgramTable, key: str, replica="r1", tools="", over=False) -> Begun:
    begun = await table.begin(key)
    await table.end(begun, replica, tools, over=over)
    return begun


# ---- programs with names ----


async def test_turns_that_alternate_between_routers_are_all_counted_and_each_finds_the_last_replica(routers):
    one, two = routers.tables
    seen = []
    for i in range(8):
        begun = await turn((one, two)[i % 2], "acme/p", f"r{i}", "ls")
        seen.append((begun.program.turns, begun.program.last_replica, begun.program.arrival))
    arrival = seen[0][2]
    assert seen == [(i, f"r{i - 1}" if i else None, arrival) for i in range(8)]


async def test_a_turn_that_ends_after_the_next_has_come_begins_no_pause_and_still_counts(routers):
    one, two = routers.tables
    first = await one.begin("acme/p")
    second = await two.begin("acme/p")
    await two.end(second, "r2", "ls")
    await one.end(first, "r1", "sed")
    third = await one.begin("acme/p")
    assert third.pause is not None
    assert third.pause.tools == "ls"
    assert (third.program.turns, third.program.last_replica) == (2, "r2")


async def test_what_one_router_forgets_no_other_remembers_and_no_late_end_brings_back(routers):
    one, two = routers.tables
    await turn(one, "acme/p", "r1", "ls")
    running = await one.begin("acme/p")
    assert await two.forget("acme/p")
    await one.end(running, "r1", "ls")
    assert not await one.forget("acme/p")
    assert not await two.forget("acme/never seen")
    again = await one.begin("acme/p")
    assert (again.program.turns, again.program.last_replica, again.pause) == (0, None, None)
    assert again.program.arrival > running.program.arrival
    await one.end(running, "r1", "ls")  # of its earlier life
    assert (await two.begin("acme/p")).program.turns == 0


async def test_work_ahead_says_where_the_next_turn_is_best_served_and_counts_as_none(routers):
    one, two = routers.tables
    assert await two.look("acme/p") is None
    await one.placed("acme/p", "r1")  # before its first turn
    begun = await two.begin("acme/p")
    assert (begun.program.last_replica, begun.program.turns, begun.program.run_turns) == ("r1", 0, 1)
    await two.end(begun, "r2", "ls")
    await one.placed("acme/p", "r3")
    seen = await two.look("acme/p")
    assert (seen.last_replica, seen.turns, seen.tools) == ("r3", 1, "ls")
    again = await one.begin("acme/p")
    assert (again.pause.tools, again.program.last_replica) == ("ls", "r3")
    assert await two.forget("acme/p")
    assert await one.look("acme/p") is None
    await one.placed("acme/p", "r4")
    assert (await two.look("acme/p")).last_replica == "r4"


async def test_a_pause_is_measured_once_and_by_redis_clock():
    now = [100.0]
    async with Routers(clock=lambda: now[0]) as routers:
        one, two = routers.tables
        begun = await one.begin("acme/p")
        now[0] += 1.0
        await one.end(begun, "r1", "grep,sed")
        now[0] += 2.0
        both = await asyncio.gather(two.begin("acme/p"), one.begin("acme/p"))
        (pause,) = [each.pause for each in both if each.pause is not None]
        assert (pause.tools, pause.seconds) == ("grep,sed", 2.0)
        assert both[0].program.arrival == 100.0


async def test_a_program_is_forgotten_a_while_after_its_last_turn(routers):
    await turn(routers.tables[0], "acme/p")
    (key,) = await routers.keys("program/*/*")
    assert DAY - 60 < await routers.records[0]._redis.ttl(key) <= DAY


@pytest.mark.parametrize("records", [shared_records, records_away])
async def test_a_sub_agent_counts_for_the_program_at_the_top(records):
    table = ProgramTable(records(), RouterConfig())
    await table.begin("acme/top")
    child = await table.begin("acme/child", parent="acme/top")
    grandchild = await table.begin("acme/grandchild", parent="acme/child")
    orphan = await table.begin("acme/orphan", parent="acme/never seen")
    own = await table.begin("acme/own", parent="acme/own")
    late = await table.begin("acme/top", parent="acme/orphan")
    roots = [each.root for each in (child, grandchild, orphan, own, late)]
    assert roots == ["acme/top", "acme/top", "acme/never seen", "acme/own", "acme/top"]
    assert (await table.begin("acme/child")).root == "acme/top", "its later turns need not say so"


# ---- programs that are found by what they sent ----


async def test_a_conversation_that_goes_on_stays_one_program(routers):
    messages, seen = list(TASK), []
    for _ in range(6):
        key, turns, said = await routers.ask(*messages)
        seen.append((key, turns))
        messages += [{**said, "reasoning_content": "thoughts"}, result(said)]
        if len(seen) > 2:
            messages += [{"role": "user", "content": "go on"}]
            messages[2] = {name: value for name, value in messages[2].items() if name != "reasoning_content"}
    assert seen == [(seen[0][0], i) for i in range(6)]


async def test_two_runs_of_one_task_are_two_programs_and_each_goes_on_as_itself(routers):
    runs = [await routers.ask(*TASK) for _ in range(5)]
    assert len({key for key, _, _ in runs}) == 5
    for key, _, said in (runs[3], runs[0], runs[4], runs[2], runs[1]):
        then, turns, _ = await routers.ask(*TASK, said, result(said))
        assert (then, turns) == (key, 1)


async def test_a_branch_is_its_own(routers):
    key, _, said = await routers.ask(*TASK)
    then, _, more = await routers.ask(*TASK, said, result(said))
    assert then == key
    branch, turns, _ = await routers.ask(*TASK, said, result(said, "others"))
    assert branch != key
    assert turns == 0
    other, _, _ = await routers.ask(*TASK, answered()[0], result(answered()[0]))
    assert other not in (key, branch)
    assert (await routers.ask(*TASK, said, result(said), more, result(more)))[0] == key


async def test_a_branch_does_not_take_over_another_run_that_stands_at_the_same_place(routers):
    key, _, said = await routers.ask(*TASK)
    await routers.ask(*TASK, said, result(said))
    other, _, waits = await routers.ask(*TASK)
    branch, _, _ = await routers.ask(*TASK, said, result(said, "others"))
    assert len({key, other, branch}) == 3
    assert (await routers.ask(*TASK, waits, result(waits)))[0] == other


async def test_a_turn_that_had_no_reply_may_be_sent_again_and_a_first_one_is_another_run(routers):
    key, _, said = await routers.ask(*TASK)
    follow_up = (*TASK, said, result(said))
    assert (await routers.ask(*follow_up, reply=False))[0] == key
    assert (await routers.ask(*follow_up))[0] == key
    assert (await routers.ask(*follow_up))[0] != key, "it had its reply"
    assert (await routers.ask(*TASK, reply=False))[0] != (await routers.ask(*TASK))[0]


async def test_tenants_models_and_tools_do_not_meet(routers):
    _, _, said = await routers.ask(*TASK)
    more = (*TASK, said, result(said))
    _, turns, _ = await routers.ask(*more, tenant="other")
    assert turns == 0
    _, turns, _ = await routers.ask(prompt=ChatPrompt(more))
    assert turns == 0
    assert conversation("one", ChatPrompt(more)).head != conversation("two", ChatPrompt(more)).head


async def test_of_two_requests_that_find_one_program_one_goes_on_with_it():
    async with Routers(8) as routers:
        key, _, said = await routers.ask(*TASK)
        asked = (routers.ask(*TASK, said, result(said, f"result {i}")) for i in range(8))
        keys = [found for found, _, _ in await asyncio.gather(*asked)]
        assert keys.count(key) == 1
        assert len(set(keys)) == 8


async def test_a_plain_prompt_that_grows_stays_one_program(routers):
    for text in ("x" * 300, "short: ", tuple(range(300)), (1, 2)):
        more = (*text, 5, 6) if isinstance(text, tuple) else text + " and more"
        key, _, _ = await routers.ask(prompt=RawPrompt(text))
        again, _, _ = await routers.ask(prompt=RawPrompt(text))
        assert again != key
        then, turns, _ = await routers.ask(prompt=RawPrompt(more))
        assert then in (key, again)
        assert turns == 1
        last = 4 if isinstance(text, tuple) else "y"
        other = (*text[:-1], last, *more[-2:]) if isinstance(text, tuple) else text[:-1] + last + more[-9:]
        if len(text) > 256:  # else it begins otherwise
            assert (await routers.ask(prompt=RawPrompt(other)))[1] == 0


async def test_what_is_kept_and_looked_at_is_bounded(routers):
    for _ in range(PROGRAMS_AT_PLACE + 9):
        last, _, said = await routers.ask(*TASK)
    (key,) = await routers.keys("places/*/*")
    redis = routers.records[0]._redis
    assert await redis.hlen(key) == PROGRAMS_AT_PLACE
    assert 0 < await redis.pttl(key) <= DAY * 1000
    assert (await routers.ask(*TASK, said, result(said)))[0] == last, "the latest are kept"
    long = [*TASK, *(each for _ in range(99) for each in ({"role": "assistant", "content": "a"}, TASK[1]))]
    assert len(conversation("pocket", ChatPrompt(long)).places) == REPLIES + 1


async def test_a_tenant_that_begins_without_end_pushes_out_its_own():
    async with Routers(2, most=20) as routers:
        key, _, said = await routers.ask(*TASK, tenant="quiet")
        own, _, kept = await routers.ask(*TASK, {"role": "user", "content": "first"}, tenant="noisy")
        for i in range(60):
            await routers.ask(*TASK, {"role": "user", "content": f"task {i}"}, tenant="noisy")
            if i % 10 == 0:
                messages = (*TASK, {"role": "user", "content": "first"}, kept, result(kept))
                then, turns, _ = await routers.ask(*messages, reply=False, tenant="noisy")
                assert (then, turns) == (own, 1), "who is used stays"
        names = await routers.keys("*/{noisy}/*")
        assert len(names) <= 2 * 20
        assert (await routers.ask(*TASK, said, result(said), tenant="quiet"))[:2] == (key, 1)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_turn_takes_two_trips_to_redis_and_one_more_where_another_router_had_the_last(n):
    async with Routers(n) as routers:

        async def trips(work):
            before = routers.trips
            result = await work
            return routers.trips - before, result

        taken, (_, _, said) = await trips(routers.ask(*TASK))
        assert taken == 2
        taken, (_, turns, _) = await trips(routers.ask(*TASK, said, result(said)))
        assert (taken, turns) == (1 + n, 1)
        taken, _ = await trips(turn(routers.tables[0], "acme/named"))
        assert taken == 2


# ---- while Redis is away ----


async def test_a_router_goes_by_what_it_remembers():
    table = ProgramTable(records_away(), RouterConfig())
    begun = await turn(table, "acme/p", "r1", "ls")
    assert not begun.shared
    again = await table.begin("acme/p")
    assert (again.program.last_replica, again.pause) == ("r1", None)
    await table.placed("acme/p", "r2")
    assert (await table.look("acme/p")).last_replica == "r2"
    assert await table.look("acme/q") is None
    key, _, said = await asked(table, ChatPrompt(TASK, TOOLS))
    more = [*TASK, said, result(said)]
    assert await table.look_conversation("acme", conversation("pocket", ChatPrompt(more, TOOLS))) == key
    assert (await asked(table, ChatPrompt(more, TOOLS)))[0] == key
    assert (await asked(table, ChatPrompt(TASK, TOOLS)))[0] != key
    with pytest.raises(UnavailableError):
        await table.forget("acme/p")


async def test_a_turn_that_redis_has_lost_or_never_had_goes_where_this_router_remembers(server, store):
    table = ProgramTable(store, RouterConfig())
    await turn(table, "acme/p", "r1")
    server.kill()
    away = await table.begin("acme/p")
    assert (away.program.last_replica, away.shared) == ("r1", False)
    server.start()
    await until_async(lambda: not store.degraded)
    await table.end(away, "r2", "ls")  # Redis has come back empty, and there is nothing to count
    begun = await table.begin("acme/p")
    assert (begun.program.turns, begun.program.last_replica, begun.shared) == (0, "r2", True)


async def test_a_turn_that_began_without_redis_and_ends_with_it_is_counted(server, store):
    table = ProgramTable(store, RouterConfig())
    await turn(table, "acme/p", "r1", "ls")
    with server.client() as client:
        kept = {key: client.dump(key) for key in client.scan_iter()}
    server.kill()
    away = await table.begin("acme/p")
    server.start()
    with server.client() as client:
        for key, value in kept.items():
            client.restore(key, 0, value)
    await until_async(lambda: not store.degraded)
    await table.end(away, "r2", "sed")
    begun = await table.begin("acme/p")
    assert (begun.program.turns, begun.program.last_replica, begun.pause.tools) == (2, "r2", "sed")
