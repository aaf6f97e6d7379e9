"""No kernel reads or writes outside its tensors: each lies between stretches of poison, which would show or be gone."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import pytest
import torch
from on_device import DEVICE, full, ones, randn, tensor, zeros
from paged_world import PagedWorld

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.kernels.experts import Routing
from holdfast.kernels.experts_gpu import GpuExperts, route_gpu
from holdfast.kernels.layer_gpu import add_norm, gated_norm, rotate_and_store, sigmoid_gate, silu_and_mul
from holdfast.kernels.linear_state import LinearShape, StateBatch
from holdfast.kernels.quantized import FP8, quantized
from holdfast.kernels.quantized_gpu import QuantizedMatrix
from holdfast.kernels.sampling import row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify
from holdfast.kernels.stream_gpu import streamed, streamed_tall
from holdfast.loadgen.bench.kernels.linear_state import Span, StateWorld, written

GUARD = 96  # elements before and behind


class Guards:
    """Copies of tensors with poison around them: NaN, and for whole numbers one that leads far outside."""

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        poison = torch.nan if tensor.dtype.is_floating_point else -(1 << 30)
        flat = full((tensor.numel() + 2 * GUARD,), poison, dtype=tensor.dtype)
        self._all.append(flat)
        return flat[GUARD:-GUARD].view(tensor.shape).copy_(tensor)

    def whole(self) -> bool:
        """Whether all the poison is where it was."""
        ends = [end for flat in self._all for end in (flat[:GUARD], flat[-GUARD:])]
        return all(bool((end.isnan() if end.dtype.is_floating_point else end == -(1 << 30)).all()) for end in ends)


def attention(guard: Guards) -> torch.Tensor:
    world = PagedWorld([(37, 1), (0, 40), (20, 5)], 4, 2, 3, 24, torch.float32, 3, 1, heads_first=False, device=DEVICE)
    batch = replace(world.batch, page_table=guard(world.batch.page_table))
    return attend_gpu(guard(world.q.contiguous()), guard(world.kv), 1, batch, 0.3, 0, 0.0)


def rotary(guard: Guards) -> torch.Tensor:
    kv, table = guard(zeros(1, 2, 3, 4, 2, 24)), randn(2, 9, 12)
    cells, positions = guard(tensor([11, 0, 5])), guard(tensor([8, 0, 3]))
    norms = (guard(ones(24)), guard(ones(24)))
    qkv = guard(randn(3, 7, 24))
    q = rotate_and_store(qkv, 3, guard(table[0]), guard(table[1]), positions, kv, 0, cells, norms, 1e-6)
    part = guard(table[0, :, :5].contiguous()), guard(table[1, :, :5].contiguous())
    rotate_and_store(qkv, 3, *part, positions, kv, 0, cells, norms, 1e-6)
    return torch.cat((q.flatten(), kv.flatten()))


def layers(guard: Guards) -> torch.Tensor:
    x, residual, weight = guard(randn(3, 100)), guard(randn(3, 100)), guard(ones(100))
    normed = add_norm(x, residual, weight, 1e-6)
    gated = gated_norm(guard(randn(3, 5, 20)), normed, guard(ones(20)), 1e-6)
    sigmoid_gate(gated, residual)
    return torch.cat((normed.flatten(), gated.flatten(), silu_and_mul(guard(randn(2, 34))).flatten()))


def draws(guard: Guards) -> torch.Tensor:
    logits = guard(randn(3, 300))
    settings = (guard(tensor([0, 3, 5], dtype=torch.int32)), guard(full((3,), 0.9)), guard(zeros(3)))
    cutoff = guard(cutoffs(logits, *settings))
    first, drafts = (guard(tensor(ids, dtype=torch.int32)) for ids in ([0, 2, 3], [4, 0, 0]))
    hot, keys = guard(full((3,), 0.7)), guard(torch.from_numpy(row_keys([1, 2, 3], [4, 5, 6])))
    out = (guard(zeros(3, dtype=torch.int32)), guard(zeros(2, dtype=torch.int32)))
    drawn, accepted = draw_and_verify(logits, first, drafts, hot, keys, cutoff, out)
    return torch.cat((drawn, accepted, cutoff.nan_to_num(neginf=0.0)))


def products(guard: Guards) -> torch.Tensor:
    x, weight, bias = (guard(randn(size)) for size in ((3, 300), (34, 300), 34))
    found = [streamed(x, weight, bias), streamed_tall(x, weight, bias)]
    for how in (("e4m3", (128, 128)), ("e2m1", (1, 16), FP8), ("uint4", (1, 128), torch.float16, True)):
        made = quantized(weight.cpu(), *how).to(DEVICE)
        scales = made.scales if made.scales.itemsize == 1 else guard(made.scales)
        global_scale = None if made.global_scale is None else guard(made.global_scale)
        matrix = QuantizedMatrix(replace(made, scales=scales, global_scale=global_scale), bias)
        found += [matrix.streamed(x), matrix.dequantised(torch.float32)]
    return torch.cat([each.flatten() for each in found])


def experts(guard: Guards) -> torch.Tensor:
    gate_up, down, x = (guard(randn(size)) for size in ((3, 70, 50), (3, 50, 35), (5, 50)))
    logits = guard(randn(5, 3))
    chosen, weights = (guard(each) for each in route_gpu(logits, Routing(3, 2, "softmax", True), logits[0]))
    biases = (guard(randn(3, 70)), guard(randn(3, 50)))
    return GpuExperts(gate_up, down, "silu", *biases)(x, chosen, weights, guard(randn(5, 50)))


def linear_layer(guard: Guards, rule: str) -> torch.Tensor:
    shape = LinearShape(1, 2, 16, 16, 4, rule=rule)
    world = StateWorld([Span(2, 3, 1), Span(1, 50, 0, (7,), moves=True)], shape, 2, torch.float32, DEVICE)
    states, batch = copy(world.states), world.batch
    states.recurrent, states.conv, states.window, states.gates = (guard(each) for each in world.states.tensors)
    fields = (batch.starts, batch.source, batch.target, batch.applied, batch.held, batch.marks)
    inputs = [guard(each) for each in (world.mixed, *world.gates)]
    out = world.kernel()(*inputs, world.weights, states, 1, StateBatch(*(guard(each) for each in fields)))
    return torch.cat((out.flatten(), written(states).float()))


def delta(guard: Guards) -> torch.Tensor:
    return linear_layer(guard, "delta")


def mamba2(guard: Guards) -> torch.Tensor:
    return linear_layer(guard, "mamba2")


@pytest.mark.parametrize("kernel", [attention, rotary, layers, draws, products, experts, delta, mamba2])
def test_nothing_outside_is_read_or_written_and_the_same_step_has_the_same_bits(kernel: Callable):
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        guard = Guards()
        outputs.append(kernel(guard))
        assert guard.whole()
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)
