"""Whose turn a request without a name is: continuations, second runs, branches, retries; against a real Redis."""

import asyncio
from itertools import count

from holdfast.replicas.requests import Answer, ChatPrompt, RawPrompt, Timing, ToolCall, Usage
from holdfast.router.conversations import (
    HISTORIES,
    MOST,
    PLAIN,
    REPLIES,
    Conversations,
    Preamble,
    conversation,
    histories,
    mark_of,
    preamble,
)
from holdfast.router.programs import ProgramTable
from holdfast.router.records import Records, RedisAddress

PATIENT = 60.0
TASK = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "fix the bug"})
TOOLS = ({"type": "function", "function": {"name": "ls"}},)
numbers = count()


class Routers:
    """So many routers at one Redis; without a server one router alone. Requests go to them in turn."""

    def __init__(self, server, n=2, most=1000):
        self.n = n
        self.trips = 0  # to Redis and back
        self.stores = []
        if server is not None:
            address = RedisAddress(server.url)
            self.stores = [Records(address, PATIENT, 0.01, self.count) for _ in range(n)]
        self.tables = [ProgramTable(store, 1000, 1e5, 1e4, most=most) for store in self.stores or [None]]
        scripts = self.stores or [None]
        pairs = zip(self.tables, scripts, strict=True)
        self.all = [Conversations(table, store, 1000, 1e5, places=most) for table, store in pairs]

    def count(self, seconds, done):
        assert done
        self.trips += 1

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for each in (*self.tables, *self.stores):
            await each.close()

    async def ask(self, *messages, reply=True, prompt=None, tenant="acme"):
        """The key of the program, how many turns it had, and the assistant's message."""
        at = next(numbers) % len(self.all)
        sent = conversation("pocket", prompt or ChatPrompt(messages, TOOLS))
        begun, standing = await self.all[at].begin(tenant, sent)
        said, answer = answered()
        if reply:
            stand = self.all[at].replied(standing, mark_of(answer))
            await self.tables[at].end(begun, "r1", "ls", stand=stand)
        return begun.key, begun.program.turns, said


def answered():
    """A reply that calls a tool, as the client sends it back and as it was."""
    call = ToolCall(f"call_{next(numbers)}", "ls", "{}")
    function = {"name": "ls", "arguments": "{}"}
    said = {
        "role": "assistant",
        "content": " Looking.\n",
        "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
    }
    return said, Answer("Looking.", (call,), (), "tool_calls", Usage(), Timing(0.0))


def result(said, text="files"):
    return {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": text}


def everywhere(scenario, server):
    """With two routers at one Redis, and with one that has none."""
    for each in (server, None):

        async def run(each=each):
            async with Routers(each) as routers:
                await scenario(routers)

        asyncio.run(run())


def test_a_conversation_that_goes_on_stays_one_program(server):
    async def scenario(routers):
        messages, seen = list(TASK), []
        for _ in range(6):
            key, turns, said = await routers.ask(*messages)
            seen.append((key, turns))
            messages += [{**said, "reasoning_content": "thoughts"}, result(said)]
            if len(seen) > 2:
                messages += [{"role": "user", "content": "go on"}]
                messages[2] = {name: value for name, value in messages[2].items() if name != "reasoning_content"}
        assert seen == [(seen[0][0], i) for i in range(6)]

    everywhere(scenario, server)


def test_two_runs_of_one_task_are_two_programs_and_each_goes_on_as_itself(server):
    async def scenario(routers):
        runs = [await routers.ask(*TASK) for _ in range(5)]
        assert len({key for key, _, _ in runs}) == 5
        for key, _, said in (runs[3], runs[0], runs[4], runs[2], runs[1]):
            then, turns, _ = await routers.ask(*TASK, said, result(said))
            assert (then, turns) == (key, 1)

    everywhere(scenario, server)


def test_a_branch_is_its_own(server):
    async def scenario(routers):
        key, _, said = await routers.ask(*TASK)
        then, _, more = await routers.ask(*TASK, said, result(said))
        assert then == key
        branch, turns, _ = await routers.ask(*TASK, said, result(said, "others"))
        assert branch != key
        assert turns == 0
        other, _, _ = await routers.ask(*TASK, answered()[0], result(answered()[0]))
        assert other not in (key, branch)
        assert (await routers.ask(*TASK, said, result(said), more, result(more)))[0] == key

    everywhere(scenario, server)


def test_a_branch_does_not_take_over_another_run_that_stands_at_the_same_place(server):
    async def scenario(routers):
        key, _, said = await routers.ask(*TASK)
        await routers.ask(*TASK, said, result(said))
        other, _, waits = await routers.ask(*TASK)
        branch, _, _ = await routers.ask(*TASK, said, result(said, "others"))
        assert len({key, other, branch}) == 3
        assert (await routers.ask(*TASK, waits, result(waits)))[0] == other

    everywhere(scenario, server)


def test_a_turn_that_had_no_reply_may_be_sent_again_and_a_first_one_is_another_run(server):
    async def scenario(routers):
        key, _, said = await routers.ask(*TASK)
        follow_up = (*TASK, said, result(said))
        assert (await routers.ask(*follow_up, reply=False))[0] == key
        assert (await routers.ask(*follow_up))[0] == key
        assert (await routers.ask(*follow_up))[0] != key, "it had its reply"
        assert (await routers.ask(*TASK, reply=False))[0] != (await routers.ask(*TASK))[0]

    everywhere(scenario, server)


def test_tenants_models_and_tools_do_not_meet(server):
    async def scenario(routers):
        _, _, said = await routers.ask(*TASK)
        more = (*TASK, said, result(said))
        _, turns, _ = await routers.ask(*more, tenant="other")
        assert turns == 0
        _, turns, _ = await routers.ask(prompt=ChatPrompt(more))
        assert turns == 0
        assert conversation("one", ChatPrompt(more)).head != conversation("two", ChatPrompt(more)).head

    everywhere(scenario, server)


def test_of_two_requests_that_find_one_program_one_goes_on_with_it(server):
    async def scenario():
        async with Routers(server, 8) as routers:
            key, _, said = await routers.ask(*TASK)
            asked = (routers.ask(*TASK, said, result(said, f"result {i}")) for i in range(8))
            keys = [found for found, _, _ in await asyncio.gather(*asked)]
            assert keys.count(key) == 1
            assert len(set(keys)) == 8

    asyncio.run(scenario())


def test_a_plain_prompt_that_grows_stays_one_program(server):
    async def scenario(routers):
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

    everywhere(scenario, server)


def test_what_is_kept_and_looked_at_is_bounded(server):
    async def scenario():
        async with Routers(server, 1) as routers:
            for _ in range(MOST + 9):
                last, _, said = await routers.ask(*TASK)
            (store,) = routers.stores
            (key,) = await store._redis.keys("*heads/*/*")
            assert await store._redis.hlen(key) == MOST
            assert 0 < await store._redis.pttl(key) <= 1e8
            assert (await routers.ask(*TASK, said, result(said)))[0] == last, "the latest are kept"
        long = [*TASK, *(each for _ in range(99) for each in ({"role": "assistant", "content": "a"}, TASK[1]))]
        assert len(conversation("pocket", ChatPrompt(long)).places) == REPLIES + 1

    asyncio.run(scenario())


def test_a_turn_takes_two_trips_to_redis_and_one_of_a_plain_prompt_three(server):
    async def scenario():
        async with Routers(server) as routers:
            messages, prompt = list(TASK), "once"
            for _ in range(4):
                before = routers.trips
                _, turns, said = await routers.ask(*messages)
                assert routers.trips - before == 2
                messages += [said, result(said)]
                before = routers.trips
                _, plain, _ = await routers.ask(prompt=RawPrompt(prompt))
                assert routers.trips - before == 3
                prompt += " upon a time"
            assert (turns, plain) == (3, 3)
            before = routers.trips
            await routers.tables[0].end(await routers.tables[0].begin("acme/named"), "r1")
            assert routers.trips - before == 2

    asyncio.run(scenario())


def test_a_tenant_that_begins_without_end_pushes_out_its_own(server):
    async def scenario():
        async with Routers(server, 2, most=20) as routers:
            key, _, said = await routers.ask(*TASK, tenant="quiet")
            own, _, kept = await routers.ask(*TASK, {"role": "user", "content": "first"}, tenant="noisy")
            for i in range(60):
                await routers.ask(*TASK, {"role": "user", "content": f"task {i}"}, tenant="noisy")
                if i % 10 == 0:
                    messages = (*TASK, {"role": "user", "content": "first"}, kept, result(kept))
                    then, turns, _ = await routers.ask(*messages, reply=False, tenant="noisy")
                    assert (then, turns) == (own, 1), "who is used stays"
            names = await routers.stores[0]._redis.keys("*/{noisy}/*")
            assert len(names) <= 2 * 20
            assert (await routers.ask(*TASK, said, result(said), tenant="quiet"))[:2] == (key, 1)

    asyncio.run(scenario())


# ---- placement ----


def known(*messages, scope="acme pocket"):
    sent = conversation("pocket", ChatPrompt(messages, TOOLS))
    return dict(histories(scope, sent, 1000))


def test_a_branch_knows_the_conversation_that_it_leaves():
    """What it has in common with each turn of the other one is the turn's own history."""
    said, later = answered()[0], answered()[0]
    first = known(*TASK)
    second = known(*TASK, said, result(said))
    branch = known(*TASK, said, result(said, "other files"))
    further = known(*TASK, said, result(said), later, result(later, "other"))
    assert list(branch)[1:] == list(first)
    assert list(further)[1:] == list(second)
    assert further[next(iter(second))] == 1000 * 4 // 6
    assert known(*TASK) == first
    assert not known(*TASK, scope="other pocket").keys() & first.keys()


def test_of_a_long_conversation_few_histories_are_looked_for():
    messages = list(TASK)
    for _ in range(20):
        said = answered()[0]
        messages += [said, result(said)]
    found = list(known(*messages).values())
    assert len(found) == HISTORIES
    assert found == sorted(found, reverse=True)
    assert found[0] == 1000


def test_plain_prompts_are_placed_by_what_they_begin_with():
    same = "x" * 4 * PLAIN
    one, other = (preamble("acme pocket", RawPrompt(same + end)) for end in ("a" * 400, "b"))
    assert one.digest == other.digest != ""
    assert (one.tokens, one.prompt_tokens, other.prompt_tokens) == (PLAIN, PLAIN + 100, PLAIN)
    assert preamble("other pocket", RawPrompt(same)).digest != one.digest
    assert preamble("acme pocket", RawPrompt(same[1:])) == Preamble("", 0, PLAIN - 1)
    ids = tuple(range(PLAIN + 5))
    assert (
        preamble("acme pocket", RawPrompt(ids)).digest == preamble("acme pocket", RawPrompt(ids[:PLAIN])).digest != ""
    )
