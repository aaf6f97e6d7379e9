"""Gated DeltaNet: linear attention with a recurrent state, convolution included, over states in slots.

Each head has a state S [k, v] that maps keys to values. A token decays it, writes its value over the one that its key
has there, and reads it with its query (Yang et al., Gated Delta Networks, arXiv 2412.06464):

    q, k, v = silu(causal convolution over `kernel` tokens);   q, k = q / |q|, k / |k|
    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q / sqrt(k's size)
    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

What a sequence keeps between two steps is a slot: S of each head, and the convolution's last `kernel - 1` inputs. A
chunk reads its state from one slot and writes it to another or the same, so a state that others may still read costs
no copy. Drafts at a chunk's end do not touch the state: their inputs go to the slot's window, and the next chunk of
the sequence applies those that were accepted first.

Shapes: T tokens of a step, N sequences, C channels of the convolution (q, k and v), K its kernel, h key heads, H value
heads, k and v the sizes of keys and values, W drafts of a window at most.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NO_STATE = -1  # a sequence begins: its state is zero


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The heads of a linear layer. Value head i reads key head i // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class LinearStates:
    """The states of all linear layers, in slots: one allocation for each part.

    recurrent   [layers, slots, H, k, v]    float32
    conv        [layers, slots, K - 1, C]   the convolution's last inputs, oldest first
    window      [layers, slots, W, C]       inputs of drafts that were not verified
    gates       [layers, slots, W, 2, H]    float32: their a and b
    """

    def __init__(
        self, shape: LinearShape, layers: int, slots: int, window: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.shape = shape
        self.slots = slots
        heads = (shape.value_heads, shape.key_dim, shape.value_dim)
        self.recurrent = torch.zeros(layers, slots, *heads, dtype=torch.float32, device=device)
        self.conv = torch.zeros(layers, slots, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        self.window = torch.zeros(layers, slots, window, shape.channels, dtype=dtype, device=device)
        self.gates = torch.zeros(layers, slots, window, 2, shape.value_heads, dtype=torch.float32, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.recurrent, self.conv, self.window, self.gates

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(each[:, :1].nbytes for each in self.tensors) if self.slots else 0


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """Which tokens of a step belong to which states. All int32 on the device.

    starts [N + 1]: the first token of each sequence, and T. source, target [N]: the slots that its state is read from
    (`NO_STATE`: it is zero) and written to. applied [N]: drafts in the source's window that come before its tokens.
    held [N]: of its tokens the last ones, which are drafts. marks [M, 3]: (sequence, n, slot): its state after the
    applied drafts and its first n tokens, 0 < n <= its tokens without drafts, is written to this slot, too; sorted.
    No slot is written twice in a step, and none is read that another sequence writes.
    """

    starts: Tensor
    source: Tensor
    target: Tensor
    applied: Tensor
    held: Tensor
    marks: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """What the kernel needs of a layer's weights: conv [C, K] (and no bias), a_log and dt_bias [H], float32."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


def gated_delta_reference(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """One layer over the tokens of a step, token by token: the outputs [T, H, v]; writes the states.

    mixed [T, C]: the projection of queries, keys and values. a, b [T, H]: those of the gates.
    """
    out = torch.empty(len(mixed), states.shape.value_heads, states.shape.value_dim, dtype=torch.float32)
    starts, marks = batch.starts.tolist(), batch.marks.tolist()
    writes: list[tuple[int, Tensor, Tensor]] = []
    windows: list[tuple[int, Tensor, Tensor]] = []
    sequences = zip(*(x.tolist() for x in (batch.source, batch.target, batch.applied, batch.held)), strict=True)
    for number, (source, target, applied, held) in enumerate(sequences):
        first, end = starts[number : number + 2]
        state = states.recurrent[layer, max(source, 0)].clone()
        last = states.conv[layer, max(source, 0)].clone()
        if source == NO_STATE:
            state.zero_()
            last.zero_()
        before = states.window[layer, max(source, 0), :applied]
        gates = states.gates[layer, max(source, 0), :applied]
        inputs = torch.cat((last, before, mixed[first:end].to(last.dtype)))
        a_all = torch.cat((gates[:, 0], a[first:end].float()))
        b_all = torch.cat((gates[:, 1], b[first:end].float()))
        kept = len(a_all) - held
        ends = {applied + n: slot for of, n, slot in marks if of == number} | {kept: target}
        for token in range(len(a_all)):
            if token in ends and token:
                writes.append((ends[token], state.clone(), inputs[token : token + len(last)].clone()))
            taps = inputs[token : token + len(last) + 1].float()
            state, o = _token(taps, a_all[token], b_all[token], weights, states.shape, state)
            if token >= applied:
                out[first + token - applied] = o
        if kept == len(a_all):
            writes.append((target, state.clone(), inputs[kept:].clone()))
        windows.append((target, mixed[end - held : end], torch.stack((a[end - held : end], b[end - held : end]), 1)))
    for slot, recurrent, last in writes:
        states.recurrent[layer, slot], states.conv[layer, slot] = recurrent, last
    for slot, drafts, gates in windows:
        states.window[layer, slot, : len(drafts)] = drafts.to(states.window.dtype)
        states.gates[layer, slot, : len(gates)] = gates.float()
    return out.to(mixed.dtype)


def _token(
    taps: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, shape: LinearShape, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after one token, and its output [H, v]. taps [K, C]: the convolution's inputs, its own last."""
    x = F.silu((taps * weights.conv.float().T).sum(0))
    keys = shape.key_heads * shape.key_dim
    group = shape.value_heads // shape.key_heads
    q, k = (each.view(shape.key_heads, -1).repeat_interleave(group, 0) for each in (x[:keys], x[keys : 2 * keys]))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    v = x[2 * keys :].view(shape.value_heads, -1)
    decay = torch.exp(-weights.a_log.float().exp() * F.softplus(a + weights.dt_bias.float()))
    state = state * decay[:, None, None]
    delta = (v - (state * k[:, :, None]).sum(1)) * torch.sigmoid(b)[:, None]
    state = state + k[:, :, None] * delta[:, None]
    return state, (state * q[:, :, None]).sum(1) * shape.key_dim**-0.5
