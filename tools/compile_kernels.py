"""Compile the Triton kernels without a GPU: `python tools/compile_kernels.py 90`, or `--all` for every shape.

The kernels' own launchers start the compilation. The output is JSON with the resources that each program takes. This
runs in a process of its own: Triton decides at its first import whether it compiles or interprets.
"""

import json
import sys
from itertools import product

import torch
from dry_device import DryDevice

from holdfast.kernels.attention_gpu import attend_gpu, launch_items
from holdfast.kernels.attention_plan import make_plan
from holdfast.kernels.experts import Routing
from holdfast.kernels.experts_gpu import GpuExperts, route_gpu
from holdfast.kernels.kv import FP8 as FP8_STORE
from holdfast.kernels.layer_gpu import add_norm, gated_norm, rotate_and_store, sigmoid_gate, silu_and_mul
from holdfast.kernels.quantized import E8M0, FP8, QuantizedWeight, quantized
from holdfast.kernels.quantized_gpu import MOST_STREAMED, QuantizedMatrix
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify
from holdfast.kernels.stream_gpu import streamed, streamed_tall
from holdfast.loadgen.bench.kernels import linear_state
from holdfast.loadgen.bench.kernels.paged import paged

CHUNK, DECODE = [(0, 100)], [(300, 1)]
LLAMA = (8, 4, 128)  # KV heads, query heads to each of them, their size
SINKS = torch.ones(32, dtype=torch.bfloat16)


def world(spans, shape=LLAMA, page=16, dtype=torch.bfloat16, stored=None):
    return paged(spans, *shape, dtype, "cpu", page, stored=stored)


def attend(inputs, window=0, softcap=0.0, sinks=None):
    attend_gpu(inputs.q, inputs.kv, 0, inputs.batch, 0.1, window, softcap, sinks)


def in_a_graph(inputs):
    plan = make_plan(inputs.q, inputs.batch, inputs.kv.shape[4], 0)
    count = torch.ones(1, dtype=torch.int32)
    plan.counts, plan.programs = (count, count), (50, 17)
    launch_items(inputs.q, inputs.kv, 0, inputs.batch, plan, torch.empty_like(inputs.q), 0.1, 0, 0.0)


def rotate(dtype=torch.bfloat16, stored=None):
    inputs = world([(0, 3)], dtype=dtype, stored=stored)
    table = (torch.zeros(64, 64), torch.zeros(64, 64), torch.arange(3))
    norms = (torch.ones(128, dtype=dtype), torch.ones(128, dtype=dtype))
    rotate_and_store(torch.zeros(3, 48, 128, dtype=dtype), 32, *table, inputs.kv, 0, inputs.batch.cells, norms, 1e-6)


def rotate_a_part():
    """Qwen3.5: 64 of 256 values are rotated; the gates precede the queries."""
    inputs = world([(0, 3)], (4, 6, 256))
    table = (torch.zeros(64, 32), torch.zeros(64, 32), torch.arange(3))
    qkv = torch.zeros(3, 24 + 32, 256, dtype=torch.bfloat16)[:, 24:]
    rotate_and_store(qkv, 24, *table, inputs.kv, 0, inputs.batch.cells, (torch.ones(256), torch.ones(256)), 1e-6)


def draw():
    logits, rows = torch.zeros(1, 128256, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    cutoff = cutoffs(logits.float(), rows, torch.ones(1), torch.zeros(1))
    first, keys = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    draw_and_verify(logits, first, rows, torch.ones(1), keys, cutoff)
    draw_and_verify(logits, first, rows)


def layers():
    x, residual = torch.zeros(2, 3, 4096, dtype=torch.bfloat16).unbind(0)
    add_norm(x, residual, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    silu_and_mul(torch.zeros(3, 28672, dtype=torch.bfloat16))
    sigmoid_gate(x, residual)
    gated_norm(x.view(3, 32, 128), residual, torch.ones(128), 1e-6)


def products():
    x, wide = (torch.zeros(size, dtype=torch.bfloat16) for size in ((3, 4096), (28672, 4096)))
    streamed(x, wide)
    streamed(x, wide[:4096])
    streamed_tall(x, wide)
    for rows in (40, 100):
        streamed(torch.zeros(rows, 4096, dtype=torch.bfloat16), wide)


def experts(kind, width, inner, activation, *counts):
    """Run layers of gpt-oss, Qwen3.6 and Nemotron 3 with these numbers of tokens."""

    def weight(outputs, inputs):
        if kind == "plain":
            return torch.zeros(2, outputs, inputs, dtype=torch.bfloat16)
        if kind == "fp8":
            codes = torch.zeros(2, outputs, inputs, dtype=torch.uint8)
            return QuantizedWeight("e4m3", codes, torch.zeros(2, -(-outputs // 128), -(-inputs // 128)), (128, 128))
        group, scales_in = (32, E8M0) if kind == "mxfp4" else (16, FP8)
        codes, scales = (torch.zeros(2, outputs, inputs // part, dtype=torch.uint8) for part in (2, group))
        return QuantizedWeight("e2m1", codes, scales.view(scales_in), (1, group), None, torch.ones(2, outputs, 1))

    layer = GpuExperts(weight(inner * (1 if activation == "relu2" else 2), width), weight(width, inner), activation)
    routing = Routing(128, 8, "sigmoid", True)
    for count in counts:
        logits = torch.zeros(count, 128, dtype=torch.bfloat16)
        layer(torch.zeros(count, width, dtype=torch.bfloat16), *route_gpu(logits, routing))


def linear_layer(model):
    spans = [linear_state.Span(3, 1), linear_state.Span(0, 100, 0, (64,))]
    state = linear_state.StateWorld(spans, linear_state.SHAPES[model], 8, torch.bfloat16, spare=0)
    state.run(state.kernel())


def quantised_products():
    for arguments in (
        ("e4m3", (128, 128)),
        ("e2m1", (1, 32), E8M0),
        ("e2m1", (1, 16), FP8),
        ("uint4", (1, 128), torch.float16, True),
    ):
        matrix = QuantizedMatrix(quantized(torch.zeros(256, 5120), *arguments))
        for rows in (1, 64, MOST_STREAMED):
            matrix.streamed(torch.zeros(rows, 5120, dtype=torch.bfloat16))
        matrix.dequantised(torch.bfloat16)


LAUNCHES = {
    "attention, decode": lambda: attend(world(DECODE)),
    "attention, decode, pages of 1, sinks": lambda: attend(world(DECODE, page=1), sinks=SINKS),
    "attention, verification of 8": lambda: attend(world([(300, 8)])),
    "attention, verification of 16": lambda: attend(world([(300, 16)])),
    "attention, decode, heads of 256": lambda: attend(world(DECODE, (4, 6, 256))),
    "attention, verification of 8, heads of 256": lambda: attend(world([(300, 8)], (4, 6, 256))),
    "attention, chunk, heads of 256": lambda: attend(world(CHUNK, (4, 6, 256))),
    "attention, decode, heads of 512": lambda: attend(world(DECODE, (2, 8, 512))),
    "attention, verification of 8, heads of 512": lambda: attend(world([(300, 8)], (2, 8, 512))),
    "attention, chunk, heads of 512": lambda: attend(world(CHUNK, (2, 8, 512))),
    "attention, decode in a graph": lambda: in_a_graph(world(DECODE)),
    "attention, chunk in a graph": lambda: in_a_graph(world(CHUNK)),
    "attention, chunk": lambda: attend(world(CHUNK)),
    "attention, chunk, window, softcap and sinks": lambda: attend(world(CHUNK), 33, 5.0, SINKS),
    **{
        f"attention, {name}, FP8 pages": lambda case=case: attend(world(*case, stored=FP8_STORE))
        for name, case in {
            "decode": (DECODE,),
            "verification of 8": ([(300, 8)],),
            "verification of 16": ([(300, 16)],),
            "chunk": (CHUNK,),
            "decode, heads of 256": (DECODE, (4, 6, 256)),
            "chunk, heads of 256": (CHUNK, (4, 6, 256)),
            "decode, heads of 512": (DECODE, (2, 8, 512)),
            "chunk, heads of 512": (CHUNK, (2, 8, 512)),
        }.items()
    },
    "rotate and store": rotate,
    "rotate and store in FP8": lambda: rotate(stored=FP8_STORE),
    "rotate a part and store": rotate_a_part,
    "layers": layers,
    "draw": draw,
    "products": products,
    "experts in MXFP4": lambda: experts("mxfp4", 2880, 2880, "clamped", 1, 100),
    "experts in FP8": lambda: experts("fp8", 2048, 512, "silu", 2),
    "experts in bfloat16": lambda: experts("plain", 2688, 1856, "relu2", 12),
    "gated delta": lambda: linear_layer("qwen3.5-27b"),
    "mamba2": lambda: linear_layer("nemotron-3-nano"),
    "products with quantised weights": quantised_products,
}
SHAPES = (
    *((2, 4, dim) for dim in (16, 64, 80, 96, 112)),
    *((4, 7, 128), (2, 1, 256), (2, 16, 128), (2, 8, 512)),
)


def every_shape():
    """Attention with heads of every size, in every dtype."""
    for spans, shape, dtype in product(
        (CHUNK, DECODE, [(300, 8)]), SHAPES, (torch.bfloat16, torch.float16, torch.float32)
    ):
        name = f"attention, {spans[0][1]} tokens, {'x'.join(map(str, shape))}, {dtype}"
        yield name, lambda spans=spans, shape=shape, dtype=dtype: attend(world(spans, shape, dtype=dtype))


def every_expert():
    """Experts with few, some and many pairs for each."""
    layers = (("mxfp4", 2880, 2880, "clamped"), ("fp8", 2048, 512, "silu"), ("plain", 2688, 1856, "relu2"))
    layers += (("plain", 2048, 768, "silu"), ("fp8", 2816, 704, "gelu_tanh"), ("nvfp4", 2048, 512, "silu"))
    for layer in layers:
        yield f"experts, {' '.join(map(str, layer))}", lambda layer=layer: experts(*layer, 1, 12, 100)


def main(capability: int, launches) -> None:
    device = DryDevice(capability)
    for device.label, launch in launches.items():
        launch()
    rows = [
        {
            "launch": program.label,
            "kernel": program.name,
            "shared_bytes": program.shared,
            "warps": program.warps,
            "registers": program.registers,
            "stack_bytes": program.stack,
            "tensor_cores": "wgmma" in program.ptx or "mma.sync" in program.ptx,
            "copies_ahead": "cp.async" in program.ptx,
            "seconds": round(program.seconds, 2),
        }
        for program in device.programs
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]), LAUNCHES | dict((*every_shape(), *every_expert())) if "--all" in sys.argv else LAUNCHES)
