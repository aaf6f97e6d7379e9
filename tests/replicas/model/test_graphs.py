"""Which graph a step runs in, and that it computes there what it computes without one.

Without a GPU the graphs are plain calls.
"""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_device import capture
from tiny_decoder import ROOM, decoder, prompt

from holdfast.kernels import attention_plan
from holdfast.replicas.model.decoder import AttentionShape, PageTable, build_batch, lay_out, plan_attention
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.graphs import Bucket, CudaGraphs, GraphRoom, Sender, room_for
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling

PAGES, PAGE, GROUP = 80, 16, 2


class World:
    """A decoder, a table whose rows begin with `common` pages, and its graphs."""

    def __init__(self, room: GraphRoom = ROOM, common: int = 34) -> None:
        model, self.kv = decoder(GpuDecoder, PAGES, PAGE)
        self.model = model
        self.table = PageTable(3, PAGES, PAGE, PAGES, self.kv.data.device)
        order = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
        for row in range(3):
            own = order[common + row * 3 :][:3]
            self.table.write(RowWrite(row, 0, np.concatenate((order[:common], own))))
        self.kv.data[:, :, :PAGES] = torch.randn(self.kv.data[:, :, :PAGES].shape, generator=torch.manual_seed(1))
        self.graphs = CudaGraphs(model, model.attention, self.table, [self.kv.scratch_cell], torch.float32, room)
        self.said: list[str] = []

    def chunks(self, spans: list[tuple[int, int]]) -> tuple[Chunk, ...]:
        """(start, tokens) of each row; all tokens are drawn from."""
        draws = [Draw(Sampling(), 0, drafts=n - 1) for _, n in spans]
        return tuple(Chunk(row, start, prompt(n, row), draws[row]) for row, (start, n) in enumerate(spans))

    def load(self, chunks: tuple[Chunk, ...], extra=(), draws=()):
        layout = lay_out(chunks, self.table)
        works = plan_attention(self.model.attention, layout.paged(self.table))
        return self.graphs.load(layout, works, draws, list(extra), Sender(self.table.device))


SPANS = {
    Bucket(1, 16, False): [(9, 1)],
    Bucket(4, 16, False): [(20, 1), (3, 2)],
    Bucket(8, 16, False): [(60, 6)],
    Bucket(4, 16, True): [(64, 1), (76, 3)],
    Bucket(12, 32, True): [(65, 9), (96, 1), (76, 2)],
}


def test_every_step_computes_the_same_in_its_graph_and_nothing_of_others_is_touched(monkeypatch):
    """With parts and prefixes so short that small sequences have several."""
    for name, cells in {"SPLIT": 32, "WIDE_SPLIT": 64, "SHARED": 32}.items():
        monkeypatch.setattr(attention_plan, name, cells)
    world = World(replace(ROOM, tokens=12), common=5)
    world.graphs.capture(capture(), world.said.append)
    assert world.said[-1].startswith(f"CUDA graphs: {len(world.graphs.room.buckets(GROUP))} of")
    for bucket, spans in SPANS.items():
        chunks = world.chunks(spans)
        before = world.kv.data.clone()
        eager = world.model.forward(build_batch(chunks, world.table))
        written = world.kv.data.clone()
        world.kv.data.copy_(before)
        extra = (np.arange(7, dtype=np.int64), np.float32([0.5]), np.int32([[1, 2]]))
        loaded = world.load(chunks, extra)
        assert loaded is not None
        assert loaded.bucket == bucket
        for sent, there in zip(extra, loaded.extra, strict=True):
            assert np.array_equal(sent, there.cpu().numpy())
        logits = world.graphs.replay(loaded.bucket, sum(n for _, n in spans)).logits
        assert torch.allclose(logits, eager, atol=1e-4)
        assert torch.allclose(world.kv.data[:, :, :PAGES], written[:, :, :PAGES], atol=1e-5)


def test_capturing_writes_to_the_scratch_cell_alone():
    world = World()
    before = world.kv.data[:, :, :PAGES].clone()
    real = capture()
    world.graphs.capture(lambda call: (call(), real(call))[1], world.said.append, most=4)
    assert torch.equal(world.kv.data[:, :, :PAGES], before)


def test_chunks_run_in_graphs_as_well_whatever_of_them_is_drawn_from():
    world = World(replace(ROOM, tokens=48))
    world.graphs.capture(capture(), world.said.append)
    # The rows have these pages in common, so each chunk writes cells of its own.
    long, silent = Chunk(0, 20, prompt(40, 1), Draw(Sampling(), 0)), Chunk(1, 70, prompt(4, 2))
    verified = Chunk(2, 80, prompt(3, 3), Draw(Sampling(), 0, drafts=2))
    for chunks, bucket in (
        ((long, silent, verified), Bucket(48, 16, True)),
        ((silent, verified), Bucket(8, 16, False)),
        ((silent,), Bucket(4, 16, False)),
    ):
        eager = world.model.forward(build_batch(chunks, world.table))
        loaded = world.load(chunks)
        assert loaded is not None
        assert loaded.bucket == bucket
        logits = world.graphs.replay(loaded.bucket, len(eager)).logits
        assert logits.shape == eager.shape
        assert torch.allclose(logits, eager, atol=1e-4)


def test_steps_that_fit_no_graph_run_without():
    world = World()
    assert world.load(world.chunks([(9, 1)])) is None  # nothing is captured
    world.graphs.capture(capture(), world.said.append)
    assert world.load(world.chunks([(9, 1)])) is not None
    long = world.chunks([(0, 33)])
    many = world.chunks([(3, 4), (9, 5)])
    for chunks in (long, many):
        assert world.load(chunks) is None
    assert world.load(world.chunks([(9, 1)]), (np.zeros(ROOM.extra + 1, np.uint8),)) is None
    tight = World(replace(ROOM, items=2, partials=4))
    tight.graphs.capture(capture(), tight.said.append)
    assert tight.load(tight.chunks([(200, 1)])) is not None
    assert tight.load(tight.chunks([(200, 3)])) is None  # six partial results
    assert tight.load(tight.chunks([(300, 1)])) is None  # three items


@given(st.integers(1, 1024), st.integers(1, 9), st.integers(1, 70))
def test_there_is_a_bucket_for_every_window_that_is_narrow(tokens, group, window):
    buckets = GraphRoom().buckets(group)
    assert buckets == sorted(set(buckets), reverse=True)
    if window <= tokens and window * group <= 64:
        tile = max(16, 1 << (window * group - 1).bit_length())
        size = min(bucket.tokens for bucket in buckets if bucket.tokens >= tokens)
        assert size > 256 or Bucket(size, tile, False) in buckets
        assert size == 1 or Bucket(size, tile, True) in buckets
    assert size_is_close(tokens, buckets)


def size_is_close(tokens: int, buckets: list[Bucket]) -> bool:
    """No more than half of a step fills its bucket up."""
    return min(bucket.tokens for bucket in buckets if bucket.tokens >= tokens) < 2 * tokens + (tokens == 1)


def test_room_follows_from_the_device():
    shape = AttentionShape(32, 8, 128, (0,))
    room = room_for(100, [shape], 132)
    assert room.tokens == 96
    assert room.partials * 32 * 128 * 4 == 256 << 20
    assert room.programs == 17
