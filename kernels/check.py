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
