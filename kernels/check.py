"""``python -m holdfast.kernels.check [--json FILE]``: verifies the GPU kernels, times them against measured ceilings.

Errors are relative to float64, of whole tensors. On a machine without a GPU the same cases run small, in Triton's
interpreter, and nothing is timed: it says so and claims no speed. With one it takes a few minutes, compiling included.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from holdfast.kernels.attention import paged_attention_reference
from holdfast.kernels.check_worlds import Paged, paged, relative_error

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Verified:
    """A case's relative error, and whether the same call twice gave the same bits."""

    name: str
    dtype: str
    error: float
    tolerance: float
    same_bits: bool

    @property
    def good(self) -> bool:
        return self.error <= self.tolerance and self.same_bits  # a NaN is not good


# ---- verifying ----


def verify(device: str, large: bool) -> Iterator[Verified]:
    """Every kernel at odd sizes, in float32 and bfloat16."""
    for dtype, tolerance in TOLERANCES.items():
        for name, call, exact in (*_attention_cases(dtype, device, large), *_layer_cases(dtype, device)):
            first, second = call(), call()
            error = relative_error(first, exact())
            yield Verified(name, str(dtype).removeprefix("torch."), error, tolerance, torch.equal(first, second))
    for name, call, exact in _draw_cases(device):
        first, second = call(), call()
        yield Verified(name, "float32", relative_error(first, exact()), 0.0, torch.equal(first, second))


Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]


def _attention_cases(dtype: torch.dtype, device: str, large: bool) -> Iterator[Case]:
    from holdfast.kernels.attention_gpu import attend_gpu

    scale = 8 if large else 1
    mixed = [(37 * scale, 1), (300 * scale, 1), (0, 41 * scale), (90 * scale, 7), (5, 1)]
    shapes = {
        "attention, mixed": (mixed, {"page_size": 16}, 0, 0.0),
        "attention, pages of 1": (mixed, {"page_size": 1}, 0, 0.0),
        "attention, window": (mixed, {}, 33, 0.0),
        "attention, softcap": (mixed, {}, 0, 5.0),
        "attention, prefix in common": ([(620, 1), (700, 1), (530, 3)], {"common": 512}, 0, 0.0),
    }
    for name, (spans, how, window, softcap) in shapes.items():
        for kv_heads, group, dim in ((2, 4, 128), (3, 1, 64)) if large else ((1, 3, 16),):
            world = paged(spans, kv_heads, group, dim, dtype, device, **how)

            def call(w: Paged = world, n: int = window, s: float = softcap) -> Tensor:
                return attend_gpu(w.q, w.kv, 0, w.batch, 0.2, n, s)

            def exact(w: Paged = world, n: int = window, s: float = softcap) -> Tensor:
                return paged_attention_reference(w.q, w.kv, 0, w.batch, 0.2, n or None, s or None, torch.float64)

            yield f"{name}, {kv_heads} x {group} x {dim}", call, exact
            if not window and not softcap and (large or name.endswith("mixed")):
                yield f"{name}, {kv_heads} x {group} x {dim}, as in a graph", partial(_as_in_a_graph, world), exact


def _as_in_a_graph(world: Paged) -> Tensor:
    """Attention with room for more items and merges than there are, and few programs that share them."""
    from holdfast.kernels.attention_gpu import launch_items, make_plan

    plan = make_plan(world.q, world.batch, world.kv.shape[4], 0)
    counts = [
        torch.tensor([len(items)], dtype=torch.int32, device=world.q.device) for items in (plan.narrow, plan.wide)
    ]
    more = torch.full((5, 6), 1 << 20, dtype=torch.int32, device=world.q.device)  # would lead far outside
    plan.narrow, plan.wide = torch.cat((plan.narrow, more)), torch.cat((plan.wide, more))
    plan.merges = torch.cat((plan.merges, torch.zeros_like(plan.merges[:1]).expand(3, -1)))
    plan.counts, plan.programs = (counts[0], counts[1]), 3
    out = torch.full_like(world.q, torch.nan)
    launch_items(world.q, world.kv, 0, world.batch, plan, out, 0.2, 0, 0.0)
    return out


def _draw_cases(device: str) -> Iterator[Case]:
    """Drawn tokens and accepted drafts, against the same maths in float64; what filters keep, against a sort."""
    from holdfast.kernels.sampling import Filters, filter_logits, gumbel_argmax_reference, row_keys
    from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify, draw_and_verify_reference

    logits = 3 * torch.randn(7, 5000, generator=torch.Generator().manual_seed(1))
    hot, seeds = torch.tensor([0.7, 0.9, 1.3, 0.7, 1.0, 0.5, 2.0]), list(range(7))
    keys = torch.from_numpy(row_keys(seeds, seeds))
    first = torch.tensor([0, 1, 4, 7], dtype=torch.int32)
    drawn = gumbel_argmax_reference(logits, hot[:, None], keys).int()
    drafts = drawn.clone()
    drafts[2] += 1
    top_k, top_p = torch.tensor([0, 3, 50, 0, 1, 0, 9]), torch.tensor([1.0, 1.0, 0.8, 0.5, 0.9, 0.2, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.3])

    def draw() -> Tensor:
        settings = (hot.to(device), keys.to(device))
        return torch.cat(draw_and_verify(logits.to(device), first.to(device), drafts.to(device), *settings)).double()

    def exact() -> Tensor:
        scores = torch.nn.functional.one_hot(drawn.long(), 5000).float()
        return torch.cat(draw_and_verify_reference(logits, first, drafts, scores)).to(device).double()

    def kept() -> Tensor:
        found = cutoffs(logits.to(device), *(each.to(device) for each in (top_k.int(), top_p, min_p)))
        return (logits.to(device) >= found[:, None]).sum(1).double()

    def sorted_kept() -> Tensor:
        filters = Filters(top_k[:, None], top_p[:, None], min_p[:, None])
        return filter_logits(logits, filters).isfinite().sum(1).to(device).double()

    yield "draw and verify", draw, exact
    yield "cutoffs of top_k, top_p and min_p", kept, sorted_kept


def _layer_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    from holdfast.kernels.mlp import silu_and_mul, silu_and_mul_reference
    from holdfast.kernels.norm import add_norm, add_norm_reference
    from holdfast.kernels.rope_gpu import rotate_and_store, rotate_and_store_reference

    x, change = torch.randn(2, 13, 1000, device=device).to(dtype).unbind(0)
    weight = torch.randn(1000, device=device).to(dtype)
    yield (
        "norm of a sum",
        lambda: add_norm(x, change.clone(), weight, 1e-6),
        lambda: add_norm_reference(x, change.clone(), weight, 1e-6),
    )
    yield "silu and multiply", lambda: silu_and_mul(x), lambda: silu_and_mul_reference(x)
    world = paged([(40, 9), (3, 4)], 2, 3, 64, dtype, device)
    qkv = torch.randn(13, 10, 64, device=device).to(dtype)
    cos, sin = torch.randn(2, 64, 32, device=device).unbind(0)
    positions = torch.tensor([*range(40, 49), *range(3, 7)], device=device)
    norms = (torch.randn(64, device=device).to(dtype), torch.randn(64, device=device).to(dtype))
    for name, weights in (("rotate and store", None), ("rotate and store, normed", norms)):

        def stored(how: Callable[..., Tensor], w: tuple[Tensor, Tensor] | None = weights) -> Tensor:
            q = how(qkv.clone(), 6, cos, sin, positions, world.kv, 0, world.batch.cells, w, 1e-6)
            return torch.cat([q.flatten(), world.kv[0].flatten(1, 2)[:, world.batch.cells].flatten()])

        yield name, partial(stored, rotate_and_store), partial(stored, rotate_and_store_reference)


# ---- the whole ----


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a kernel is wrong."""
    parser = argparse.ArgumentParser(prog="kernels check", description=__doc__)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--no-timing", action="store_true", help="verify only")
    options = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    began = time.perf_counter()
    found: dict[str, object] = {"torch": torch.__version__, "device": _device_name(gpu)}
    print(f"{found['device']}, torch {torch.__version__}")
    checks = []
    for verified in verify("cuda" if gpu else "cpu", large=gpu):
        checks.append(verified)
        mark = "ok" if verified.good else "WRONG"
        print(f"{mark:<6}{verified.name:<44}{verified.dtype:<10}error {verified.error:.1e}", flush=True)
    found["verified"] = [asdict(check) for check in checks]
    if not gpu:
        print("no GPU: the kernels ran in Triton's interpreter and nothing was timed")
    elif not options.no_timing:
        from holdfast.kernels.check_speed import timed

        found |= timed(print)
    found["seconds"] = time.perf_counter() - began
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(check.good for check in checks) else 1


def _device_name(gpu: bool) -> str:
    return torch.cuda.get_device_name() if gpu else "CPU, interpreter"


if __name__ == "__main__":
    sys.exit(main())
