"""The host's share of a decode step of many sequences."""

import time

from holdfast.kernels.report import Lines
from holdfast.replicas.events import Sampling, Submit
from holdfast.replicas.gpu_bench.turns import drain
from holdfast.replicas.gpu_bench.world import World


def host_time(world: World) -> Lines:
    """What a decode step of many sequences takes beyond the device. Raises RuntimeError where steps fail."""
    rows, sizes = world.sizes.rows, world.sizes
    engine = world.engine()
    sampling = Sampling(4 + 2 * sizes.repeat, ignore_eos=True)
    for row in range(rows):
        engine.handle(Submit(f"{row}", world.tokens(16, row), sampling), time.perf_counter())
    while engine.stats.completion < 2 * rows:
        if not engine.busy:
            raise RuntimeError("the steps fail: the log says why")
        engine.step(time.perf_counter())
    stats = engine.stats
    before = (stats.steps, stats.forward_s + stats.sample_s, stats.schedule_s, stats.commit_s)
    began = world.now()
    for _ in range(sizes.repeat):
        engine.step(time.perf_counter())
    wall = world.now() - began
    after = (stats.steps, stats.forward_s + stats.sample_s, stats.schedule_s, stats.commit_s)
    steps, device, plan, commit = (x - y for x, y in zip(after, before, strict=True))
    drain(engine)
    steps = max(steps, 1)
    figures = {"wall_s": wall / steps, "device_s": device / steps, "plan_s": plan / steps, "commit_s": commit / steps}
    yield f"a step of {rows} sequences", figures | {"not_hidden_s": (wall - device) / steps}
