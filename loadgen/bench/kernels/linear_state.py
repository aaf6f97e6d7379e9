"""Gated DeltaNet and Mamba-2 over states in slots: sequences at random, and how fast the kernels are.

Timed beside torch's plain form, and Gated DeltaNet beside fla-core where that package is installed. fla-core's kernels
take q, k, v and gates that were convolved before, and states that were gathered before, so theirs do less than ours:
ours includes the convolution, states in their slots, and inputs for the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from holdfast.kernels.linear_state import (
    NO_STATE,
    LinearShape,
    LinearStates,
    LinearWeights,
    StateBatch,
    recur_reference,
    recur_torch,
)
from holdfast.loadgen.bench.parts import Figures

SHAPES: Final = {
    "qwen3.5-0.8b": LinearShape(16, 16, 128, 128, 4),
    "qwen3.5-27b": LinearShape(16, 48, 128, 128, 4),
    "nemotron-3-nano": LinearShape(8, 64, 128, 64, 4, rule="mamba2"),
}
Seconds: TypeAlias = Callable[[Callable[[], object]], float]
"""Times a call on the device."""


# ---- sequences over states


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence of a step: applied drafts, tokens, how many of these are held, and after how many it is marked."""

    applied: int
    tokens: int
    held: int = 0
    marks: tuple[int, ...] = ()
    begins: bool = False  # without a state
    moves: bool = False  # writes to another slot than it reads


class StateWorld:
    """Sequences in layer 1 of 2, all random. Slots that nobody reads hold NaN. Calls work on copies of the states."""

    def __init__(
        self,
        spans: Sequence[Span],
        shape: LinearShape,
        window: int,
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
        spare: int = 3,
    ) -> None:
        """`spare`: values behind a row of inputs, as a fused projection leaves some."""
        torch.manual_seed(seed)
        slots = sum(2 + len(span.marks) for span in spans) + 1
        free = torch.randperm(slots).tolist()
        self.states = LinearStates(shape, 2, slots, window, dtype, device)
        for tensor in self.states.tensors:
            tensor.fill_(torch.nan)
        starts, rows, marks = [0], [], []
        for number, span in enumerate(spans):
            source = NO_STATE if span.begins else free.pop()
            rows.append((source, free.pop() if span.begins or span.moves else source, span.applied, span.held))
            marks += [(number, mark, free.pop()) for mark in span.marks]
            starts.append(starts[-1] + span.tokens)
            for tensor in self.states.tensors if source != NO_STATE else ():
                tensor[1, source] = torch.randn(tensor.shape[2:], device=device).to(tensor.dtype)
        begin, marked = (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, marks))
        source, target, applied, held = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous().unbind(0)
        self.batch = StateBatch(begin, source, target, applied, held, marked.view(-1, 3), max(s.tokens for s in spans))
        heads, channels = shape.value_heads, shape.channels
        widths = [channels, *[heads] * shape.gates, spare]
        fused = torch.randn(starts[-1], sum(widths), device=device).to(dtype)
        self.mixed, *gates, _ = torch.split(fused, widths, 1)
        self.gates = tuple(gates)
        conv = (torch.randn(channels, shape.kernel, device=device) * 0.7).to(dtype)
        sizes = [heads] * 2 if shape.rule == "delta" else [heads, heads, channels, heads]
        a_log, *others = (torch.randn(size, device=device) for size in sizes)
        self.weights = LinearWeights(conv, a_log - 1, *others)

    def run(self, call: Callable[..., Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, LinearStates]:
        """The outputs, and the states of both layers after it; `dtype`: that of everything."""
        before, kept = self.states, self.states.conv.dtype
        (layers, slots, window, _), device = before.window.shape, before.window.device
        states = LinearStates(before.shape, layers, slots, window, kept, device)
        states.recurrent, states.conv, states.window, states.gates = (
            each.to(dtype or each.dtype).clone() for each in before.tensors
        )
        inputs = (each.to(dtype or each.dtype) for each in (self.mixed, *self.gates))
        return call(*inputs, self.weights, states, 1, self.batch), states

    def exact(self) -> tuple[Tensor, LinearStates]:
        """In float64, token by token."""

        def reference(mixed: Tensor, *rest: Any) -> Tensor:
            *gates, weights, states, layer, batch = rest
            return recur_reference(mixed, gates, weights, states, layer, batch, torch.float64)

        return self.run(reference, torch.float64)

    def kernel(self) -> Callable[..., Tensor]:
        """The kernel on a GPU for the rule of these states."""
        from holdfast.kernels.linear_state_gpu import gated_delta_gpu, mamba2_gpu

        return gated_delta_gpu if self.states.shape.rule == "delta" else mamba2_gpu


def written(states: LinearStates) -> Tensor:
    """The recurrent states, one after the other, with zeros for those that nobody wrote."""
    return states.recurrent.double().flatten().nan_to_num()


# ---- beside other implementations


@dataclass(frozen=True, slots=True)
class Work:
    """So many sequences of so many tokens each, as they are served: the last token before changes the state now, the
    last one of these later.
    """

    sequences: int
    tokens: int

    @property
    def spans(self) -> list[Span]:
        return [Span(1, self.tokens, 1)] * self.sequences


WORKS: Final[Mapping[str, Work]] = {
    "decode, 1": Work(1, 1),
    "decode, 64": Work(64, 1),
    "verify 8, 16": Work(16, 8),
    "prompt of 512": Work(1, 512),
    "prompt of 2048": Work(1, 2048),
    "prompts of 512, 4": Work(4, 512),
}


def beside(shape: LinearShape, work: Work, device: str, dtype: torch.dtype, seconds: Seconds) -> Figures:
    """Seconds of ours, of fla-core's two kernels where it is there, and of torch's plain form; ours over each.

    `state_bytes_a_second`: the states are read and written once; decode can take no less.
    """
    world = StateWorld(work.spans, shape, 4, dtype, device, spare=0)
    kernel, rest = world.kernel(), (world.weights, world.states, 1, world.batch)
    ours = seconds(lambda: kernel(world.mixed, *world.gates, *rest))
    moved = 2 * work.sequences * world.states.recurrent[0, 0].nbytes
    found: Figures = {"seconds": ours, "state_bytes": moved, "state_bytes_a_second": moved / ours}
    others: dict[str, Callable[[], object]] = {"torch": lambda: recur_torch(world.mixed, world.gates, *rest)}
    if shape.rule == "delta":
        others |= _of_fla(world, work)
    for name, call in others.items():
        try:
            theirs = seconds(call)
        except Exception as error:  # another project's kernel on this device
            found[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
            continue
        found |= {f"{name}_seconds": theirs, f"over_{name}": ours / theirs}
    return found


def _of_fla(world: StateWorld, work: Work) -> dict[str, Callable[[], object]]:
    """Calls of fla-core's kernels with the same sizes; none where the package is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return {}
    shape, tokens, device = world.states.shape, len(world.mixed), world.mixed.device
    sizes = [(shape.key_heads, shape.key_dim)] * 2 + [(shape.value_heads, shape.value_dim)]
    q, k, v = (torch.randn(1, tokens, *size, device=device).to(world.mixed.dtype) for size in sizes)
    g = -torch.rand(1, tokens, shape.value_heads, device=device)
    beta = torch.rand(1, tokens, shape.value_heads, device=device).to(world.mixed.dtype)
    arguments = {
        "initial_state": torch.randn(work.sequences, *world.states.recurrent.shape[2:], device=device),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": world.batch.starts.long(),
    }
    calls = {"fla_chunk": chunk_gated_delta_rule, "fla_recurrent": fused_recurrent_gated_delta_rule}
    return {name: partial(call, q, k, v, g=g, beta=beta, **arguments) for name, call in calls.items()}
