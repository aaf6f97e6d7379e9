"""The timed half of `check`: each kernel at the sizes of an 8B model, as a share of what the machine allows.

Shapes: 32 query heads over 8 KV heads of 128, bfloat16. A share of bandwidth counts the bytes that must be read and
written, a share of the rate the multiplications that a causal mask leaves.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.ceilings import Ceilings, Clock, Timed, measure_ceilings
from holdfast.kernels.check_worlds import Paged, paged
from holdfast.kernels.mlp import silu_and_mul
from holdfast.kernels.norm import add_norm
from holdfast.kernels.rope_gpu import rotate_and_store
from holdfast.kernels.sampling import row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify

HEADS, KV_HEADS, DIM = 32, 8, 128
_SCALE = DIM**-0.5


def timed(say: Callable[[str], None]) -> dict[str, object]:
    """Measure the ceilings, then every kernel; what goes into the JSON."""
    clock = Clock()
    ceilings = measure_ceilings(clock)
    say(f"bandwidth {ceilings.bandwidth / 1e12:.2f} TB/s, matrix rate {ceilings.rate / 1e12:.0f} TFLOP/s")
    results = []
    for one in (*_decodes(clock, ceilings), *_chunks(clock, ceilings), *_layers(clock, ceilings), *_draws(clock)):
        results.append(one)
        say(f"{one.name:<52}{one.seconds * 1e6:10.1f} us  {one.share:6.2f} of {one.bound}")
    return {"ceilings": asdict(ceilings), "timed": [asdict(one) for one in results]}


def _world(spans: list[tuple[int, int]], page_size: int = 16, common: int = 0) -> Paged:
    return paged(spans, KV_HEADS, HEADS // KV_HEADS, DIM, torch.bfloat16, "cuda", page_size, common)


def _attend(world: Paged) -> Callable[[], Tensor]:
    return lambda: attend_gpu(world.q, world.kv, 0, world.batch, _SCALE, 0, 0.0)


def _decodes(clock: Clock, ceilings: Ceilings) -> Iterator[Timed]:
    """Decoding and verifying read every cached key and value once."""
    for name, spans, page_size, common in (
        ("decode, 1 at 4k", [(4095, 1)], 16, 0),
        ("decode, 64 at 4k", [(4095, 1)] * 64, 16, 0),
        ("decode, 16 at 32k", [(32767, 1)] * 16, 16, 0),
        ("decode, 16 at 32k, pages of 1", [(32767, 1)] * 16, 1, 0),
        ("verify 8, 1 at 4k", [(4088, 8)], 16, 0),
        ("verify 8, 16 at 32k", [(32760, 8)] * 16, 16, 0),
        ("decode, 32 at 8k, 7k in common", [(8191, 1)] * 32, 16, 7168),
    ):
        world = _world(spans, page_size, common)
        positions = sum(start + length - common for start, length in spans) + common
        seconds = clock.seconds(_attend(world))
        read = 2 * positions * KV_HEADS * DIM * 2
        yield Timed(f"attention, {name}", seconds, "bandwidth", read / seconds / ceilings.bandwidth)


def _chunks(clock: Clock, ceilings: Ceilings) -> Iterator[Timed]:
    """Chunks are bound by the matrix units; torch's own attention over the same tensors, not paged, is beside them."""
    for cached, new in ((0, 8192), (0, 2048), (28672, 4096), (3000, 64)):
        world = _world([(cached, new)])
        seconds = clock.seconds(_attend(world))
        pairs = new * cached + new * (new + 1) / 2
        yield Timed(
            f"attention, {new} over {cached}", seconds, "rate", 4 * pairs * HEADS * DIM / seconds / ceilings.rate
        )
        if not cached:
            q = torch.randn(1, HEADS, new, DIM, dtype=torch.bfloat16, device="cuda")
            k, v = torch.randn(2, 1, KV_HEADS, new, DIM, dtype=torch.bfloat16, device="cuda").unbind(0)
            torchs = clock.seconds(partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True))
            yield Timed(f"attention, {new} over 0 by torch", torchs, "our time", torchs / seconds)


def _layers(clock: Clock, ceilings: Ceilings) -> Iterator[Timed]:
    for tokens in (64, 4096):
        x, residual = torch.randn(2, tokens, 4096, dtype=torch.bfloat16, device="cuda").unbind(0)
        weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
        calls: list[tuple[str, Callable[[], object], int]] = [
            ("norm of a sum", partial(add_norm, x, residual, weight, 1e-6), 4 * x.nbytes)
        ]
        fused = torch.randn(tokens, 2 * 14336, dtype=torch.bfloat16, device="cuda")
        calls.append(("silu and multiply", partial(silu_and_mul, fused), fused.nbytes * 3 // 2))
        world = _world([(0, tokens)])
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        cos, sin = torch.randn(2, tokens, DIM // 2, device="cuda").unbind(0)
        table = (cos, sin, torch.arange(tokens, device="cuda"))
        stored = partial(rotate_and_store, qkv, HEADS, *table, world.kv, 0, world.batch.cells)
        calls.append(("rotate and store", stored, 2 * qkv.nbytes))
        for name, call, moved in calls:
            seconds = clock.seconds(call)
            yield Timed(f"{name}, {tokens} tokens", seconds, "bandwidth", moved / seconds / ceilings.bandwidth)


def _draws(clock: Clock) -> Iterator[Timed]:
    """Drawing, beside torch's argmax or sort over the same logits."""
    rows, vocabulary = 64, 128256
    logits = torch.randn(rows, vocabulary, device="cuda")
    first = torch.arange(0, rows + 1, 8, dtype=torch.int32, device="cuda")
    drafts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    keys = torch.from_numpy(row_keys(list(range(rows)), list(range(rows)))).cuda()
    hot = torch.full((rows,), 0.8, device="cuda")
    settings = (torch.full((rows,), 50, dtype=torch.int32, device="cuda"), hot, torch.zeros(rows, device="cuda"))
    argmax = clock.seconds(lambda: logits.argmax(-1))
    sort = clock.seconds(lambda: logits.sort(dim=-1, descending=True))
    calls: tuple[tuple[str, Callable[[], object], float, str], ...] = (
        ("draw 64 rows, greedy", partial(draw_and_verify, logits, first, drafts), argmax, "torch's argmax"),
        ("draw 64 rows, sampled", partial(draw_and_verify, logits, first, drafts, hot, keys), argmax, "torch's argmax"),
        ("cutoffs of 64 rows, top_k and top_p", partial(cutoffs, logits, *settings), sort, "torch's sort"),
    )
    for name, call, beside, held in calls:
        seconds = clock.seconds(call)
        yield Timed(name, seconds, held, beside / seconds)
