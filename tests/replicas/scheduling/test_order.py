"""The policies of order, one by one, and in an engine that serves one request at a time."""

from engine_world import World, words

from holdfast.loadgen.simulator.policies import ORDERS as COMPARED


def _served(order: str) -> list[str]:
    """The order in which one row serves: a long turn of `old`, then its next one beside a newer program's first."""
    world = World(order=order, max_sequences=1)
    world.step_s = 1.0
    world.submit("old 1", words(1, 10), 8, program="old", began=1.0)
    world.steps(2)
    world.submit("new 1", words(2, 10), 8, program="new", began=5.0)
    world.submit("old 2", words(3, 10), 8, program="old", began=1.0)
    world.run()
    return sorted(world.ends, key=lambda name: world.end(name).timing.finished)


def test_the_engine_serves_in_the_order_it_was_given():
    assert _served("program") == ["old 1", "old 2", "new 1"]
    assert _served(COMPARED["infercept"]) == ["old 1", "old 2", "new 1"]
    assert _served("request") == ["old 1", "new 1", "old 2"]
    assert _served(COMPARED["plas"]) == ["old 1", "new 1", "old 2"]
