"""Requests of the server itself are counted apart: counts of requests, tokens and hits are of clients alone."""

from copy import deepcopy

import pytest
from engine_world import World, words

from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, PartialPrefill
from holdfast.replicas.types import Origin

PROMPT = words(1, 40)
OWN = [origin for origin in Origin if origin is not Origin.CLIENT]


def ask(world: World, name: str, origin: Origin, prompt: list[int] = PROMPT, **more: object) -> None:
    fields = {"sampling": Sampling(5, temperature=1.0), "origin": origin} | more
    world.submit(name, prompt, 5, program="p", **fields)


def of_clients(world: World) -> dict[str, object]:
    stats = world.engine.stats
    names = ("prompt_computed", "prompt_cached", "prompt_grouped", "completion", "prompt_seeds", "hits_by_tag", "ended")
    return {name: deepcopy(getattr(stats, name)) for name in names}


@pytest.mark.parametrize("origin", OWN)
def test_requests_of_the_server_itself_are_counted_apart(origin: Origin) -> None:
    world = World()
    before = of_clients(world)
    ask(world, "a", origin)
    ask(world, "b", origin)  # waits for what the first one computes, and finds it cached
    world.run()
    ask(world, "aborted", origin)
    world.give(Abort("aborted"))
    ask(world, "refused", origin, [10**6])
    world.run()
    assert of_clients(world) == before
    drawn = sum(len(world.out[name]) for name in "ab")
    assert world.engine.stats.own_requests == {**dict.fromkeys(OWN, 0), origin: 4}
    assert world.engine.stats.own_tokens[origin] >= len(PROMPT) + drawn


def test_a_client_request_is_counted_as_one() -> None:
    world = World()
    ask(world, "own", Origin.WARM_UP)
    world.run()
    ask(world, "client", Origin.CLIENT)
    world.run()
    stats = world.engine.stats
    assert stats.ended == {"finished": 1, "aborted": 0, "rejected": 0, "failed": 0}
    assert stats.prompt_cached + stats.prompt_computed == len(PROMPT)
    assert stats.prompt_cached > 0
    assert stats.completion == len(world.out["client"])


def test_a_background_prefill_counts_as_a_client_request() -> None:
    world = World()
    ask(world, "client", Origin.CLIENT, background=PartialPrefill("h", 60.0), sampling=Sampling(max_tokens=0))
    world.run()
    stats = world.engine.stats
    assert stats.ended["finished"] == 1
    assert not any(stats.own_requests.values())
    assert stats.prompt_computed == 0
