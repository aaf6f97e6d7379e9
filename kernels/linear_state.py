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

On a CPU the kernel in `linear_state_c.c` computes, in float32 and bfloat16. It is built with the package, for x86-64
on Linux. A token's result depends on its sequence's tokens up to itself and on nothing else, to the last bit: not on
where a prompt is cut, on drafts, on other sequences in the batch, or on threads. Without the kernel torch computes in
chunks, which round differently at each border.

Shapes: T tokens of a step, N sequences, C channels of the convolution (q, k and v), K its kernel, h key heads, H value
heads, k and v the sizes of keys and values, W drafts of a window at most.
"""

import ctypes
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.kernels import native

LIBRARY = native.Library("linear_state")
LANES: dict[native.Level, int] = {"avx512": 16, "avx2": 8}  # float32 values of a vector
MAX_KEY, MAX_TAPS = 256, 8  # of a key and of the convolution's kernel, mirrored by linear_state_c.c

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

    recurrent   [layers, slots, H, k, v]    float32; on a CPU a view: columns of S lie in one stretch of memory each
    conv        [layers, slots, K - 1, C]   the convolution's last inputs, oldest first
    window      [layers, slots, W, C]       inputs of drafts that were not verified
    gates       [layers, slots, W, 2, H]    float32: their a and b
    """

    def __init__(
        self, shape: LinearShape, layers: int, slots: int, window: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.shape = shape
        self.slots = slots
        in_columns = torch.device(device).type == "cpu"
        size = (shape.value_dim, shape.key_dim) if in_columns else (shape.key_dim, shape.value_dim)
        recurrent = torch.zeros(layers, slots, shape.value_heads, *size, dtype=torch.float32, device=device)
        self.recurrent = recurrent.mT if in_columns else recurrent
        self.conv = torch.zeros(layers, slots, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        self.window = torch.zeros(layers, slots, window, shape.channels, dtype=dtype, device=device)
        self.gates = torch.zeros(layers, slots, window, 2, shape.value_heads, dtype=torch.float32, device=device)

    def resize(self, slots: int) -> None:
        """Start again with `slots` slots: what they held is gone."""
        (layers, _, window, _), dtype, device = self.window.shape, self.window.dtype, self.window.device
        self.recurrent = self.conv = self.window = self.gates = torch.empty(0)  # given back before more is asked for
        LinearStates.__init__(self, self.shape, layers, slots, window, dtype, device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.recurrent, self.conv, self.window, self.gates

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(each[:, :1].nbytes for each in self.tensors) if self.slots else 0


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """Which tokens of a step belong to which states. All tensors are int32 on the device.

    starts [N + 1]: the first token of each sequence, and T. source, target [N]: the slots that its state is read from
    (`NO_STATE`: it is zero) and written to. applied [N]: tokens in the source's window that come before its own.
    held [N]: how many of its tokens, the last ones, do not change the state and go to the target's window. marks
    [M, 3]: (sequence, n, slot): its state after the applied tokens and its first n, 0 < n <= those that are not held,
    is written to this slot, too; sorted.
    `plans` is a cache of the kernels: what is worked out once for a step and used in every layer.
    No slot is written twice in a step, and none is read that another sequence writes.
    longest: no sequence has more tokens, as far as the host knows.
    """

    starts: Tensor
    source: Tensor
    target: Tensor
    applied: Tensor
    held: Tensor
    marks: Tensor
    longest: int | None = None
    plans: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """What the kernel needs of a layer's weights: conv [C, K] (and no bias), a_log and dt_bias [H].

    They are kept in float32, and `conv` lies in memory as [K, C].
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", self.conv.float().T.contiguous().T)
        object.__setattr__(self, "a_log", self.a_log.float().contiguous())
        object.__setattr__(self, "dt_bias", self.dt_bias.float().contiguous())

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.conv.data_ptr(), self.a_log.data_ptr(), self.dt_bias.data_ptr()


def gated_delta(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """One layer over the tokens of a step: the outputs [T, H, v] in the dtype of `mixed`; writes the states.

    mixed [T, C]: the projection of queries, keys and values. a, b [T, H]: those of the gates. The kernel raises
    ValueError for a batch that leads outside of the tokens or slots, and has then written nothing. On a GPU the decoder
    calls `linear_state_gpu` instead.
    """
    if mixed.device.type == "cpu":
        function = kernel(native.level(), mixed.dtype, states.shape)
        if function is not None and states.conv.dtype == mixed.dtype and states.recurrent.mT.is_contiguous():
            return _gated_delta_c(function, mixed, a, b, weights, states, layer, batch)
    return gated_delta_torch(mixed, a, b, weights, states, layer, batch)


# ---- the C kernel


class _Call(ctypes.Structure):
    """`Call` in linear_state_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("team", "recurrent", "gates", "conv", "window")),
        *((name, ctypes.c_int64) for name in ("recurrent_layer", "gates_layer", "conv_layer", "window_layer")),
        *((name, ctypes.c_int64) for name in ("recurrent_slot", "gates_slot", "conv_slot", "window_slot")),
        *((name, ctypes.c_int64) for name in ("slots", "drafts")),
        *((name, ctypes.c_int64) for name in ("key_heads", "heads", "key_dim", "value_dim", "kernel", "channels")),
        *((name, ctypes.c_void_p) for name in ("starts", "source", "target", "applied", "held", "marks")),
        *((name, ctypes.c_int64) for name in ("sequences", "n_marks")),
        *((name, ctypes.c_void_p) for name in ("left", "taps", "a_log", "dt_bias", "mixed", "a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("layer", "tokens", "threads", "mixed_row", "a_row", "b_row")),
        *((name, ctypes.c_int64) for name in ("wrong", "parts", "columns", "next")),
    ]


@functools.cache
def kernel(level: native.Level, dtype: torch.dtype, shape: LinearShape) -> Callable[..., None] | None:
    """The C function for this dtype and these heads at the highest usable level; None: torch computes."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    if dtype not in names or LIBRARY.missing or shape.key_dim > MAX_KEY or shape.kernel > MAX_TAPS:
        return None
    for each in native.levels_below(level):
        lanes = LANES.get(each, 0)
        if lanes and shape.key_dim % lanes == shape.value_dim % lanes == 0:
            return LIBRARY.function(f"{each}_{names[dtype]}", ctypes.c_void_p)
    return None


@dataclass(slots=True)
class _StepCall:
    """What every layer of a step shares. `held` keeps alive what the call points to."""

    states: LinearStates
    function: Callable[..., None]
    call: _Call
    address: int
    held: tuple[Tensor, ...]


def _gated_delta_c(
    function: Callable[..., None],
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    shape, tokens = states.shape, len(mixed)
    if not 0 <= layer < len(states.recurrent):
        raise IndexError(f"layer {layer} of {len(states.recurrent)}")
    if mixed.shape[1] != shape.channels or a.shape != b.shape or a.shape != (tokens, shape.value_heads):
        sizes = f"mixed {tuple(mixed.shape)}, a {tuple(a.shape)} and b {tuple(b.shape)}"
        raise ValueError(f"{sizes} do not fit {shape.channels} channels and {shape.value_heads} heads")
    plan: _StepCall | None = batch.plans.get(_StepCall)
    if plan is None or plan.states is not states or plan.function is not function:
        plan = batch.plans[_StepCall] = _step_call(function, states, batch)
    mixed, a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (mixed, a.float(), b.float()))
    out = torch.empty(tokens, shape.value_heads, shape.value_dim, dtype=mixed.dtype)
    call = plan.call
    call.layer, call.tokens, call.threads = layer, tokens, torch.get_num_threads()
    call.taps, call.a_log, call.dt_bias = weights.addresses
    call.mixed, call.a, call.b, call.out = mixed.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr()
    call.mixed_row, call.a_row, call.b_row = mixed.stride(0), a.stride(0), b.stride(0)
    function(plan.address)
    if call.wrong:
        raise ValueError(f"a batch over {tokens} tokens and {states.slots} slots that leads outside of them")
    return out


def _step_call(function: Callable[..., None], states: LinearStates, batch: StateBatch) -> _StepCall:
    shape, sequences = states.shape, len(batch.source)
    given = (batch.starts, batch.source, batch.target, batch.applied, batch.held, batch.marks)
    lengths = [len(each) for each in given[:5]]
    if any(each.dtype != torch.int32 for each in given) or lengths != [sequences + 1, *[sequences] * 4]:
        raise ValueError("a batch has int32 tensors of one length")
    uses = tuple(each.contiguous() for each in given)
    left = torch.empty(sequences, dtype=torch.int32)
    parts = (states.recurrent, states.gates, states.conv, states.window)
    call = _Call(
        native.team(),
        *(each.data_ptr() for each in parts),
        *(each.stride(0) for each in parts),
        *(each.stride(1) for each in parts),
        states.slots,
        states.window.shape[2],
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        shape.kernel,
        shape.channels,
        *(each.data_ptr() for each in uses),
        sequences,
        len(batch.marks),
        left.data_ptr(),
    )
    return _StepCall(states, function, call, ctypes.addressof(call), (left, *uses))


# ---- torch

_CHUNK = 64  # tokens
_Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""S and the outputs [n, H, v] after n tokens, of q and k [n, H, k], v [n, H, v], g and beta [n, H], and S before."""


def gated_delta_torch(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """`gated_delta` without a kernel of ours, on any device."""
    return _by_rule(_chunked, torch.float32, mixed, a, b, weights, states, layer, batch)


def gated_delta_reference(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`gated_delta` token by token, computed in `dtype`."""
    return _by_rule(_token_by_token, dtype, mixed, a, b, weights, states, layer, batch)


def _by_rule(
    rule: _Rule,
    dtype: torch.dtype,
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    """Sequence by sequence; a rule computes what lies between the tokens after which a state is written."""
    shape, before = states.shape, states.shape.kernel - 1
    recurrent, conv, window, gates = (each[layer] for each in states.tensors)
    out = mixed.new_empty(len(mixed), shape.value_heads, shape.value_dim)
    starts, marks = batch.starts.tolist(), batch.marks.tolist()
    writes: list[tuple[Tensor, Tensor]] = []
    sequences = zip(*(x.tolist() for x in (batch.source, batch.target, batch.applied, batch.held)), strict=True)
    for number, (source, target, applied, held) in enumerate(sequences):
        own = slice(*starts[number : number + 2])
        state, last = recurrent[source].to(dtype), conv[source]
        if source == NO_STATE:
            state, last = torch.zeros_like(state), torch.zeros_like(last)
        inputs = torch.cat((last, window[source, :applied], mixed[own].to(conv.dtype)))
        both = torch.cat((gates[source, :applied], torch.stack((a[own], b[own]), 1).to(gates.dtype)))
        tokens = _prepared(inputs, both, weights, shape, dtype)
        kept = len(both) - held
        ends = [(applied + n, slot) for of, n, slot in marks if of == number] + [(kept, target)]
        cuts = sorted({0, len(both), *(n for n, _ in ends)})
        found, after = [out.new_empty(0, *out.shape[1:])], {0: state}
        for begin, end in pairwise(cuts):
            q, k, v, g, beta = (each[begin:end] for each in tokens)
            state, o = rule(q, k, v, g, beta, state)
            after[end] = state
            found.append(o.to(out.dtype))
        out[own] = torch.cat(found)[applied:]
        for n, slot in ends:
            writes += ((recurrent[slot], after[n]), (conv[slot], inputs[n : n + before]))
        writes += ((window[target, :held], inputs[len(inputs) - held :]), (gates[target, :held], both[kept:]))
    for to, value in writes:  # all were read
        to.copy_(value)
    return out


def _prepared(
    inputs: Tensor, gates: Tensor, weights: LinearWeights, shape: LinearShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q and k [n, H, k], v [n, H, v], g and beta [n, H]. inputs [K - 1 + n, C]: the convolution's; gates [n, 2, H]."""
    n, heads, group = len(gates), shape.key_heads, shape.value_heads // shape.key_heads
    x = inputs.new_zeros(n, shape.channels, dtype=dtype)
    for tap, weight in enumerate(weights.conv.to(dtype).T):
        x += inputs[tap : tap + n] * weight
    keys = heads * shape.key_dim
    q, k, v = torch.split(F.silu(x), [keys, keys, shape.value_heads * shape.value_dim], 1)
    q, k = (each.reshape(n, heads, -1).repeat_interleave(group, 1) for each in (q, k))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    a, b = gates.to(dtype).unbind(1)
    g = -weights.a_log.to(dtype).exp() * F.softplus(a + weights.dt_bias.to(dtype))
    return q * shape.key_dim**-0.5, k, v.reshape(n, shape.value_heads, -1), g, torch.sigmoid(b)


def _token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - (state * k[t, :, :, None]).sum(1)) * beta[t, :, None]
        state = state + k[t, :, :, None] * delta[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1)
    return state, out


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for chunks of tokens at once (Yang et al., arXiv 2406.06484, section 3; with gates 2412.06464, 3.3).

    With c the sum of g from the chunk's beginning, and D_ij = e^(c_i - c_j) for j <= i, the values U that the chunk
    writes solve (I + tril(diag(beta) K K^T * D, -1)) U = diag(beta) (V - diag(e^c) K S).
    """
    out = torch.empty_like(v)
    for begin in range(0, len(q), _CHUNK):
        some = slice(begin, begin + _CHUNK)
        # [H, n, ...]
        qs, ks, vs = (each[some].transpose(0, 1) for each in (q, k, v))
        c = g[some].T.cumsum(1)
        grown = c.exp()[:, :, None]
        decay = (c[:, :, None] - c[:, None]).tril().exp().tril()
        betas = beta[some].T[:, :, None]
        system = (ks @ ks.mT * decay * betas).tril(-1)
        right = betas * (vs - grown * (ks @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out[some] = (grown * (qs @ state) + (qs @ ks.mT * decay) @ u).transpose(0, 1)
        state = grown[:, -1:] * state + (ks * (c[:, -1:] - c).exp()[:, :, None]).mT @ u
    return state, out
