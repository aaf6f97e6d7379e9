"""Classes: batch takes what interactive requests leave, gives way within one step, loses no work, and never starves."""

from engine_world import World, words
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loadgen.simulator.policies import ORDERS as COMPARED
from holdfast.replicas.types import Priority

ORDERS = ("program", "fair", "request", COMPARED["plas"])


def ask(
    world: World, name: str, text: list[int], tokens: int, *, batch: bool = False, scope: str = "a", **more
) -> None:
    priority = Priority.BATCH if batch else Priority.INTERACTIVE
    world.submit(name, text, tokens, scope=scope, program=name, priority=priority, **more)


def running(world: World) -> set[str]:
    return {sequence.request_id for sequence in world.engine.scheduler._running}


def test_batch_gives_its_cells_up_within_one_step():
    world = World(cells=256, context_length=256, completion_reserve=64, max_sequences=4)
    ask(world, "batch", words(0, 100), 60, batch=True)
    world.steps(4)
    ask(world, "now", words(9, 120), 8)
    world.step()
    assert running(world) == {"now"}
    world.run()


def test_batch_gives_nothing_up_where_that_would_not_be_enough():
    world = World(cells=256, context_length=256, completion_reserve=64, max_sequences=4)
    ask(world, "first", words(0, 100), 60)
    ask(world, "batch", words(1, 12), 8, batch=True)
    world.step()
    assert running(world) == {"first", "batch"}
    ask(world, "now", words(9, 150), 8)
    world.step()
    assert running(world) == {"first", "batch"}
    world.run()


def test_a_prompt_of_batch_has_what_the_others_leave_of_a_step():
    world = World(cells=1024, context_length=1024, step_tokens=32, max_sequences=4, without=("grouped_prefill",))
    ask(world, "batch", words(0, 200), 4, batch=True)
    world.step()
    ask(world, "now", words(9, 90), 4)
    for _ in range(2):
        world.step()
        (chunk,) = world.runner.plans[-1].chunks
        assert len(chunk.tokens) == 32
    world.step()  # 26 of 90 are left
    assert sorted(len(chunk.tokens) for chunk in world.runner.plans[-1].chunks) == [6, 26]
    world.run()


def test_what_batch_had_computed_is_not_computed_again():
    world = World(cells=1024, context_length=256, max_sequences=1)
    ask(world, "batch", words(0, 60), 20, batch=True)
    world.steps(3)
    ask(world, "now", words(9, 20), 4)
    world.run()
    assert world.engine.stats.preemptions == 1
    assert world.engine.stats.tokens_recomputed <= world.config.page_size


def test_batch_waits_behind_every_interactive_request_and_has_its_part_of_the_time():
    world = World(order="fair", max_sequences=1, queue_timeout_s=1e9)
    world.check = lambda: None  # of many steps the books are no matter here
    world.step_s = 0.1
    for i in range(20):
        ask(world, f"batch{i}", words(100 + i, 4), 5, batch=True, scope="b")
    for i in range(4):
        ask(world, f"now{i}", words(i, 4), 5, scope="a")
    count = 4
    while len([name for name in world.ends if name.startswith("now") and world.ends[name]]) < 120:
        if sum(not ends for name, ends in world.ends.items() if name.startswith("now")) < 3:
            ask(world, f"now{count}", words(200 + count, 4), 5, scope="a")
            count += 1
        world.step()
    done = sum(bool(ends) for name, ends in world.ends.items() if name.startswith("batch"))
    assert 3 <= done <= 12, "a twentieth of the time, and never none"


@settings(max_examples=30)
@given(
    st.sampled_from(ORDERS),
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)),
        min_size=1,
        max_size=14,
    ),
)
def test_answers_are_the_same_and_no_interactive_request_waits_while_batch_runs(order, requests):
    """Where rows are what is short: one waits for its rival's row at most until the next step."""
    world = World(order=order, max_sequences=2, cells=2048, admission_ceiling=1.0, without=("grouped_prefill",))
    for number, (batch, tenant, length, tokens, steps) in enumerate(requests):
        ask(world, f"r{number}", words(number, length), tokens, batch=batch, scope=f"t{tenant}")
        for _ in range(steps):
            world.step()
            waits = any(not s.batch for s in world.engine.scheduler.admission)
            works = [s for s in world.engine.scheduler._running if s.batch]
            assert not (waits and works) or world.engine.scheduler._classes.due
    world.run()  # which checks every answer
