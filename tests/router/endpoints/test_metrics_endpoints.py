"""Metrics over HTTP: which process is found, what each says, and that series do not grow with what clients send."""

import asyncio
import re

import pytest
from fake_backend import World, bearer, chat_body, keyed

from holdfast.replicas.requests import Completed
from holdfast.replicas.retention.latency import Called
from holdfast.router.config import RouterConfig
from holdfast.router.tenants import ApiKey, Scope, Tenant, TenantDirectory, TenantLimits, hash_key

REPLICA = '# TYPE holdfast_cells gauge\nholdfast_cells{{replica="{0}"}} 5\n'


def served(**more):
    world = World(**more)
    world.backend.texts = [REPLICA.format(f"r-{i}") for i in range(2)]
    return world


def test_every_process_is_a_target_whose_path_answers():
    world = served()
    targets = world.call("GET", "/metrics/targets").json()
    found = {(each["labels"]["process"], each["labels"]["instance"]) for each in targets}
    assert found == {("router", "router"), ("replica", "r-0"), ("replica", "r-1")}
    for each in targets:
        assert each["targets"] == ["127.0.0.1"], "the address at which they were asked for"
        text = world.call("GET", each["labels"]["__metrics_path__"]).text
        assert f'{each["labels"]["process"]}="{each["labels"]["instance"]}"' in text
        assert len(set(re.findall(r'(?:router|replica)="([^"]+)"', text))) == 1, "and no other's"


def test_a_process_that_is_gone():
    assert served().call("GET", "/metrics/processes/r-7").status_code == 404


@pytest.mark.anyio
async def test_requests_go_on_between_two_of_many_replicas():
    """The event loop has a turn after each one's text is joined to the others, however many there are."""
    world, replicas, turns = World(), 500, []
    world.backend.texts = [REPLICA.format(f"r-{i}") for i in range(replicas)]

    async def count() -> None:
        while True:
            turns.append(True)
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with world.client() as client:
        text = (await client.get("/metrics")).text
    counting.cancel()
    assert text.count("holdfast_cells{") == replicas
    assert len(turns) > replicas


def test_a_key_that_is_for_operating_reads_them_and_does_nothing_else():
    keys = [ApiKey(scope.value, hash_key(scope.value), (scope,)) for scope in Scope]
    world = served(tenants=TenantDirectory([Tenant("acme", keys=tuple(keys))], exposed=True))
    paths = ("/metrics", "/metrics/targets", "/metrics/processes/r-0", "/v1/cluster/status")
    for scope in Scope:
        head = bearer(scope.value)
        found = {world.call("GET", path, headers=head).status_code for path in paths}
        assert found == ({200} if scope is Scope.OPERATE else {403})
        chat = world.call("POST", "/v1/chat/completions", json=chat_body(), headers=head)
        assert chat.status_code == (200 if scope is Scope.INFER else 403)


def test_a_tenants_limits_and_what_it_has_in_flight():
    limits = TenantLimits(requests_per_minute=7)
    tenants = [Tenant(name, (hash_key(name),), limits=limits) for name in "abc"]
    world = World(tenants=TenantDirectory(tenants), config=RouterConfig(metrics_tenants=2))
    text = world.call("GET", "/metrics").text
    found = re.findall(r'tenant_limit\{limit="(\w+)",router="router",tenant="(\w+)"\} (\S+)', text)
    assert found == [("requests_per_minute", name, "7.0") for name in "ab"]
    in_flight = re.findall(r'tenant_requests_in_flight\{router="router",tenant="(\w+)"\}', text)
    assert sorted(in_flight) == ["a", "b", "other"]


OPERATIONS = ("POST /v1/chat/completions", "POST /tokenize", "GET /v1/models", "DELETE /v1/programs/p")


@pytest.mark.parametrize("operation", [*OPERATIONS, "GET /v1/responses/resp_1"])
def test_a_key_that_is_none_counts_wherever_it_is_tried(operation):
    world = World(tenants=keyed("a"))
    for key in ("guessed", "another"):
        assert world.call(*operation.split(), headers=bearer(key)).status_code == 401
    labels = {"tenant": "", "reason": "invalid_api_key"}
    assert world.registry.get_sample_value("holdfast_request_errors_total", labels) == 2


def series(world):
    lines = world.call("GET", "/metrics").text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_series_do_not_grow_with_programs_keys_models_tools_or_paths():
    world = World()
    done = Completed("stop", world.backend.script[-1][0].usage, world.backend.script[-1][0].timing, Called(("t",)))
    world.backend.script = (*world.backend.script[:-1], (done,))

    def round_of(i):
        tool = {"type": "function", "function": {"name": f"tool-{i}", "parameters": {"type": "object"}}}
        own = {"program_id": f"p-{i}", "seed": i, "tools": [tool], "user": f"u-{i}"}
        chat = ("POST", "/v1/chat/completions")
        world.calls(
            [
                (*chat, {"json": chat_body(**own)}),
                (*chat, {"json": chat_body(**own, max_tokens=3)}),
                (*chat, {"json": chat_body(**own, stream=True, temperature=1.5)}),
                (*chat, {"json": chat_body(model=f"m-{i}")}),
                (*chat, {"json": chat_body(), "headers": {"authorization": f"Bearer {i}", "x-request-id": f"id-{i}"}}),
                ("GET", f"/nothing/{i}", {}),
            ]
        )

    for i in (0, 0):  # the second time some answers come from the cache
        round_of(i)
    first = series(world)
    for i in range(1, 30):
        round_of(i)
    assert series(world) == first
    assert any("bubble_seconds" in each for each in first), "follow-up turns were among them"


@pytest.mark.parametrize("stream", [False, True])
def test_a_programs_run_ends_with_the_reply_that_calls_nothing(stream):
    world = World()
    last, call = world.backend.script[-1][0], ("POST", "/v1/chat/completions")

    def turn(seed, tools, final):
        done = Completed("stop", last.usage, last.timing, Called(tools, final))
        world.backend.script = (*world.backend.script[:-1], (done,))
        return world.call(*call, json=chat_body(program_id="p", seed=seed, stream=stream))

    def value(name):
        return world.registry.get_sample_value(f"holdfast_{name}", {"tenant": "default", "model": "pocket"})

    def runs():
        return [value(f"program_{name}") for name in ("seconds_count", "seconds_sum", "turns_sum")]

    turn(1, ("search",), False)
    world.now += 1000.0
    assert runs() == [None, None, None]
    turn(2, (), True)
    assert runs() == [1.0, 1000.0, 2.0]
    assert value("first_token_rendered_seconds_count") == 1
    assert 940.0 < value("first_token_rendered_seconds_sum") <= 1000.0  # less the reply after its first token
    world.now += 100.0  # the user thinks
    turn(3, ("search",), False)
    world.now += 5.0
    turn(2, (), True)  # from the response cache, an answer like any other
    assert runs() == [2.0, 1005.0, 4.0]
    assert value("first_token_rendered_seconds_count") == 2
