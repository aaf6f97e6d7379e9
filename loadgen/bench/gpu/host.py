"""The host's share of a decode step of many sequences."""

import time

from holdfast.loadgen.bench.gpu.turns import Totals, drain
from holdfast.loadgen.bench.gpu.world import World
from holdfast.loadgen.bench.report import Lines
from holdfast.replicas.events import Sampling, Submit


def host_time(world: World) -> Lines:
    """What a decode step of many sequences takes beyond the device. Raises RuntimeError where steps fail.

    A step that begins while nothing runs has the host's preparation in the device's time: that is `prepare_s`.
    """
    rows, sizes = world.sizes.rows, world.sizes
    engine, watched = world.engine()
    sampling = Sampling(4 + 2 * sizes.repeat, ignore_eos=True)
    for row in range(rows):
        engine.handle(Submit(f"{row}", world.tokens(16, row), sampling), time.perf_counter())
    while engine.stats.completion < 2 * rows:
        if not engine.busy:
            raise RuntimeError("the steps fail: the log says why")
        engine.step(time.perf_counter())
    before, steps, replayed = Totals.of(engine, watched), engine.stats.steps, world.runner.replayed
    began = world.now()
    for _ in range(sizes.repeat):
        engine.step(time.perf_counter())
    wall = world.now() - began
    total, steps = Totals.of(engine, watched).since(before), max(engine.stats.steps - steps, 1)
    replayed = world.runner.replayed - replayed
    drain(engine)
    device = total.forward_s + total.sample_s
    seconds = {
        "wall_s": wall,
        "device_s": device,
        "prepare_s": total.prepare_s,
        "plan_s": total.plan_s,
        "commit_s": total.commit_s,
        "not_hidden_s": wall - device + total.prepare_s,
    }
    figures = {name: value / steps for name, value in seconds.items()}
    yield f"a step of {rows} sequences", figures | {"replayed": replayed / steps}
