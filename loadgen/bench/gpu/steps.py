"""Single steps: decoding, verifying, prefilling and aliasing, as shares of what the device allows."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.loadgen.bench.gpu.world import World
from holdfast.replicas.events import Draw, Sampling
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.pages import PageIds, PageMoves
from holdfast.replicas.kv.tensors import HostPages
from holdfast.replicas.model.decoder_gpu import choose_ways
from holdfast.replicas.scheduling.plan import Chunk, RowWrite, StepPlan

_HELD_S = 0.04  # the host lays out and launches any step in less, also one of many launches


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians in seconds: a step on the device; with its preparation, when nothing else runs; at the pace of one after
    the other; and the host's time to begin it. `replayed`: the share of all these steps that ran in a graph."""

    device_s: float
    alone_s: float
    paced_s: float
    begin_s: float
    replayed: float


def decoding(world: World, rows: int, cached: int, window: int = 1) -> StepPlan:
    """`rows` sequences of `cached` tokens, each with a window of tokens to verify."""
    pages = -(-(cached + window) // 16)
    own = min(world.kv.pages // rows, pages)  # a store too small for all lets them share their last pages
    numbers = np.arange(world.kv.pages, dtype=np.int32)
    writes = tuple(
        RowWrite(row, 0, np.resize(numbers[row * own : (row + 1) * own], pages).astype(np.int32)) for row in range(rows)
    )
    draw = Draw(Sampling(), 0, drafts=window - 1)
    chunks = tuple(Chunk(row, cached, world.tokens(window, row), draw) for row in range(rows))
    return StepPlan(chunks, writes)


def timed(world: World, plan: StepPlan) -> StepTimes:
    """A step repeated: behind something else, by itself, and begun while the one before is still running."""
    runner, repeat = world.runner, world.sizes.repeat
    for _ in range(2):
        runner.run(plan)
    plan = StepPlan(plan.chunks)  # its rows are written
    replayed = runner.replayed
    device, alone = [], []
    for _ in range(repeat):
        world.hold(_HELD_S)
        output = runner.run(plan)
        device.append(output.forward_s + output.sample_s)
        output = runner.run(plan)
        alone.append(output.forward_s + output.sample_s)
    begins, began = [], world.now()
    before = runner.begin(plan)
    for _ in range(repeat):
        t0 = time.perf_counter()
        flight = runner.begin(plan)
        begins.append(time.perf_counter() - t0)
        before.land()
        before = flight
    before.land()
    paced = (world.now() - began) / (repeat + 1)
    in_graphs = (runner.replayed - replayed) / (3 * repeat + 1)
    return StepTimes(statistics.median(device), statistics.median(alone), paced, statistics.median(begins), in_graphs)


def products(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """Products of few rows by our kernel and by torch, and a layer's apart or fused; what follows takes the faster."""
    timed, layers = choose_ways(world.decoder, world.seconds)
    for each in timed:
        read_s = each.outputs * each.inputs * world.bounds.item_bytes / world.bounds.ceilings.bandwidth
        figures = {"ours_s": each.ours_s, "torchs_s": each.torchs_s, "torchs_over_ours": each.torchs_s / each.ours_s}
        figures |= {"ours_of_bandwidth": read_s / each.ours_s, "torchs_of_bandwidth": read_s / each.torchs_s}
        yield f"{each.rows} rows, {each.inputs} to {each.outputs}", figures
    read_s = world.bounds.layer_bytes / world.bounds.ceilings.bandwidth
    for one in layers:
        figures = {"fused_s": one.fused_s, "apart_s": one.apart_s, "apart_over_fused": one.apart_s / one.fused_s}
        figures |= {"fused_of_bandwidth": read_s / one.fused_s, "apart_of_bandwidth": read_s / one.apart_s}
        yield f"{one.rows} rows, a layer without attention", figures


def decode_shares(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """Bandwidth's share of a decode step: one sequence, and many."""
    sizes = world.sizes
    for rows, cached in ((1, sizes.short), (sizes.rows, sizes.context)):
        times = timed(world, decoding(world, rows, cached))
        ideal = world.bounds.read_s(rows * cached)
        yield f"decode, {rows} at {cached}", _figures(times, ideal)


def verify_cost(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """A window of 8 against one token, of one sequence."""
    one, eight = (timed(world, decoding(world, 1, world.sizes.short, window)) for window in (1, 8))
    figures = {"over_one_token": eight.device_s / one.device_s, "over_one_token_paced": eight.paced_s / one.paced_s}
    figures |= {"replayed": (one.replayed + eight.replayed) / 2}
    yield "verify 8 against 1", figures


def prefill_share(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """The matrix rate's share of a whole chunk."""
    size = world.sizes.chunk
    pages = np.arange(-(-size // 16), dtype=np.int32)
    plan = StepPlan((Chunk(0, 0, world.tokens(size, 1), Draw(Sampling(), 0)),), (RowWrite(0, 0, pages),))
    times = timed(world, plan)
    yield f"prefill {size}", _figures(times, world.bounds.compute_s(size))


def alias(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """Taking over a cached prefix, long and short: the match in the tree, and its pages into a row of the table."""
    found = {}
    for length in (world.sizes.long_alias // 128, world.sizes.long_alias):
        cache = KVCache(world.kv.pages, 16)
        length = max(length, 16)
        tokens = world.tokens(length + 1, 3)
        first = cache.acquire("", tokens, 0.0)
        cache.grow(first.holding, length)
        cache.finish(first.holding, tokens, length, 0.0)
        match_s, write_s, device_s = [], [], []
        for _ in range(world.sizes.repeat):
            t0 = world.now()
            acquired = cache.acquire("", tokens, 0.0)
            t1 = time.perf_counter()
            write = RowWrite(0, 0, acquired.holding.pages)
            world.hold(_HELD_S)
            t2 = time.perf_counter()
            flight = world.runner.begin(StepPlan((), (write,)))
            t3 = time.perf_counter()
            output = flight.land()
            match_s.append(t1 - t0)
            write_s.append(t3 - t2)
            device_s.append(output.forward_s + output.sample_s)
            cache.drop(acquired.holding)
        found[length] = {
            "match_s": statistics.median(match_s),
            "begin_s": statistics.median(write_s),
            "device_s": statistics.median(device_s),
        }
        yield f"alias of {length}", found[length]
    short, long = found.values()
    yield "alias, long over short", {name: long[name] / max(short[name], 1e-9) for name in short}


def host_tier(world: World) -> Iterator[tuple[str, dict[str, float]]]:
    """Pages out to host memory and back: bytes a second of each way, and whether the same bits came back."""
    pages = min(world.sizes.moved_pages, world.kv.pages)
    tier = HostPages(world.kv, pages)
    moves = PageMoves(np.random.default_rng(0).permutation(world.kv.pages)[:pages].astype(np.int32), _range(pages))
    index = torch.from_numpy(moves.device.astype(np.int64)).to(world.kv.data.device)
    world.kv.data[:, :, : world.kv.pages].normal_()
    before = world.kv.data.index_select(2, index)
    began = world.now()
    tier.save(moves)
    tier.wait()
    out_s = world.now() - began
    world.kv.data.zero_()
    began = world.now()
    tier.load(moves)
    told = tier.wait()
    in_s = world.now() - began
    same = told.ok and torch.equal(world.kv.data.index_select(2, index), before)
    speeds = {"out_bytes_per_s": before.nbytes / out_s, "in_bytes_per_s": before.nbytes / in_s}
    yield f"host tier, {before.nbytes / 2**20:.0f} MiB", speeds | {"same_bits": int(same)}


def _range(count: int) -> PageIds:
    return np.arange(count, dtype=np.int32)


def _figures(times: StepTimes, ideal: float) -> dict[str, float]:
    return {
        "device_s": times.device_s,
        "alone_s": times.alone_s,
        "paced_s": times.paced_s,
        "begin_s": times.begin_s,
        "replayed": times.replayed,
        "ideal_s": ideal,
        "share": ideal / times.device_s,
        "share_paced": ideal / times.paced_s,
    }
