"""The activity of an engine: phases of turns, pins of programs, rows by tenant."""

import json

from engine_world import World
from pinning import KEEP

from holdfast.replicas.config import RetentionConfig
from holdfast.replicas.reports import activity
from holdfast.replicas.requests import TurnEnded
from holdfast.replicas.stats import PIN, TURN

PROMPT = list(range(5, 45))


def rows(world: World, scope: str | None = None) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Turns by request and pins by program, as mappings."""
    found = activity(world.engine, scope, world.now)
    json.dumps(found)  # plain data, however an engine counts
    turns = [dict(zip(TURN, row, strict=True)) for row in found[0]]
    pins = [dict(zip(PIN, row, strict=True)) for row in found[1]]
    return {str(each["request"]): each for each in turns}, {str(each["program"]): each for each in pins}


def test_phases_of_a_turn() -> None:
    world = World(step_tokens=16, max_sequences=1, retention=RetentionConfig(KEEP, most_s=20.0))
    world.submit("a", PROMPT, program="t/p", scope="t")
    world.submit("b", PROMPT, scope="t")
    turns, _ = rows(world)
    assert turns["a"]["phase"] == turns["b"]["phase"] == "queue"
    world.step()
    turns, _ = rows(world)
    assert turns["a"] == {**turns["a"], "phase": "prefill", "prompt": 40, "cached": 0, "drawn": 0}
    assert 0 < turns["a"]["computed"] < 40  # type: ignore[operator]
    assert turns["b"]["phase"] == "queue"
    while rows(world)[0]["a"]["phase"] != "decode":
        world.step()
    turns, _ = rows(world)
    assert turns["a"]["computed"] == 40
    assert turns["a"]["drawn"] == 1


def test_pins_and_their_deadlines() -> None:
    world = World(retention=RetentionConfig(KEEP, most_s=20.0))
    world.serve("a", PROMPT, program="t/p", scope="t")
    world.give(TurnEnded("a", "t", "t/p", ("get_weather",)))
    world.now += 5.0
    turns, pins = rows(world)
    assert turns == {}
    (pin,) = pins.values()
    assert pin["program"] == "t/p"
    assert pin["cells"] >= len(PROMPT)  # type: ignore[operator]
    assert (pin["since_s"], pin["until_s"]) == (5.0, 15.0)
    assert pin["worth_s"] == 15.0


def test_a_tenant_sees_only_its_own_rows() -> None:
    world = World()
    for tenant in ("one", "two"):
        world.submit(tenant, PROMPT, program=f"{tenant}/p", scope=tenant)
    assert set(rows(world, "one")[0]) == {"one"}
    assert set(rows(world)[0]) == {"one", "two"}
    world.run()
    for tenant in ("one", "two"):
        world.give(TurnEnded(tenant, tenant, f"{tenant}/p", ("f",)))
    assert set(rows(world, "two")[1]) == {"two/p"}
    assert set(rows(world)[1]) == {"one/p", "two/p"}
