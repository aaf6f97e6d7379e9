"""Requests of the server itself are counted apart: counts of requests, tokens and hits are of clients alone."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from engine_world import World, words

from holdfast.replicas.kv.tags import labels_of
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Abort, PartialPrefill, Submit
from holdfast.replicas.types import Origin

PROMPT = words(1, 40)
OWN = [origin for origin in Origin if origin is not Origin.CLIENT]


def asked(name: str, origin: Origin, **more: object) -> Submit:
    labels = labels_of(("system", "user"), (0, 20), len(PROMPT))
    submit = Submit(
        name, tokens=np.array(PROMPT, np.int32), sampling=Sampling(5, temperature=1.0), program_id="p", labels=labels
    )
    return replace(submit, origin=origin, **more)  # type: ignore[arg-type]


def of_clients(world: World) -> dict[str, object]:
    stats = world.engine.stats
    names = ("prompt_computed", "prompt_cached", "prompt_grouped", "completion", "prompt_seeds", "hits_by_tag", "ended")
    return {name: deepcopy(getattr(stats, name)) for name in names}


@pytest.mark.parametrize("origin", OWN)
def test_requests_of_the_server_itself_are_counted_apart(origin: Origin) -> None:
    world = World()
    before = of_clients(world)
    world.give(asked("a", origin))
    world.give(asked("b", origin))  # waits for what the first one computes, and finds it cached
    world.run()
    world.give(asked("aborted", origin))
    world.give(Abort("aborted"))
    world.give(asked("refused", origin, tokens=np.array([10**6], np.int32)))
    world.run()
    assert of_clients(world) == before
    drawn = sum(len(world.out[name]) for name in "ab")
    assert world.engine.stats.own_requests == {**dict.fromkeys(OWN, 0), origin: 4}
    assert world.engine.stats.own_tokens[origin] >= len(PROMPT) + drawn


def test_a_client_request_is_counted_as_one() -> None:
    world = World()
    world.give(asked("own", Origin.WARM_UP))
    world.run()
    world.give(asked("client", Origin.CLIENT))
    world.run()
    stats = world.engine.stats
    assert stats.ended == {"finished": 1, "aborted": 0, "rejected": 0, "failed": 0}
    assert stats.prompt_cached + stats.prompt_computed == len(PROMPT)
    assert stats.prompt_cached > 0
    assert stats.completion == len(world.out["client"])


def test_a_background_prefill_counts_as_a_client_request() -> None:
    world = World()
    background = PartialPrefill("h", 60.0)
    world.give(asked("client", Origin.CLIENT, background=background, sampling=Sampling(max_tokens=0), program_id="p"))
    world.run()
    stats = world.engine.stats
    assert stats.ended["finished"] == 1
    assert not any(stats.own_requests.values())
    assert stats.prompt_computed == 0
