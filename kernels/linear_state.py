"""Gated DeltaNet and Mamba-2: layers with a recurrent state, convolution included, over states in slots.

Each head has a state S [k, v] that maps keys to values. A token decays S, writes its value v at its key k, and reads S
with its query q. Both rules begin with a convolution over `kernel` tokens:

    x = silu(causal convolution of `mixed`, plus a bias if there is one)

Gated DeltaNet (Yang et al., arXiv 2412.06464) replaces the value that S has at the key:

    q, k, v = x;   q = q / |q| / sqrt(k's size),   k = k / |k|
    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q
    g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

Mamba-2 (Dao and Gu, arXiv 2405.21060) adds to it. In that paper's words k is B, q is C, and v is x. A key head is a
group of heads, and the size of a key is the size of the state:

    v, k, q = x
    S <- exp(g) S + k (dt v)^T;   o = S^T q + D v
    g = -exp(A_log) dt;   dt = softplus(dt + dt_bias)

dt has no limits: the model is trained so, and transformers' step of one token computes it so. transformers' way for
more tokens clamps dt of Nemotron-H at `time_step_min`, which changes what trained checkpoints say.

What a sequence keeps between two steps is a slot: S of each head, and the convolution's last `kernel - 1` inputs. A
chunk reads its state from one slot and writes it to another or the same, so a state that others may still read costs
no copy. Drafts at a chunk's end do not touch the state: their inputs go to the slot's window, and the next chunk of
the sequence applies those that were accepted first.

On a CPU the kernel in `linear_state_c.c` computes, in float32 and bfloat16. It is built with the package, for x86-64
on Linux. A token's result depends on its sequence's tokens up to itself and on nothing else, to the last bit: not on
where a prompt is cut, on drafts, on other sequences in the batch, or on threads. Without the kernel torch computes in
chunks, which round differently at each border.

Shapes: T tokens of a step, N sequences, C channels of the convolution, K its kernel, h key heads, H value heads, k and
v the sizes of keys and values, G gates of a token and head (a and b, or dt), W drafts of a window at most.
"""

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias

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
    """The rule and the heads of a linear layer. Value head i reads key head i // (value_heads // key_heads)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rule: Literal["delta", "mamba2"] = field(default="delta", kw_only=True)

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def queries(self) -> int:
        """The first channel of the queries. Gated DeltaNet has queries, keys, values; Mamba-2 the reverse."""
        return 0 if self.rule == "delta" else self.channels - self.key_heads * self.key_dim

    @property
    def keys(self) -> int:
        """The first channel of the keys."""
        return self.key_heads * self.key_dim if self.rule == "delta" else self.value_heads * self.value_dim

    @property
    def values(self) -> int:
        """The first channel of the values."""
        return 2 * self.key_heads * self.key_dim if self.rule == "delta" else 0

    @property
    def gates(self) -> int:
        """Numbers that a token brings for each head beside its channels: a and b, or dt."""
        return 2 if self.rule == "delta" else 1


class LinearStates:
    """The states of all linear layers, in slots: one allocation for each part.

    recurrent   [layers, slots, H, k, v]    float32; on a CPU a view: columns of S lie in one stretch of memory each
    conv        [layers, slots, K - 1, C]   the convolution's last inputs, oldest first
    window      [layers, slots, W, C]       inputs of drafts that were not verified
    gates       [layers, slots, W, G, H]    float32: their gates
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
        gates = (layers, slots, window, shape.gates, shape.value_heads)
        self.gates = torch.zeros(gates, dtype=torch.float32, device=device)

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
    """What the kernel needs of a layer's weights: conv [C, K] and its bias [C], if any; a_log, dt_bias and d [H].

    `d` is D of Mamba-2, and None for Gated DeltaNet. They are kept in float32, and `conv` lies in memory as [K, C].
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    bias: Tensor | None = None
    d: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", self.conv.float().T.contiguous().T)
        for name in ("a_log", "dt_bias", "bias", "d"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else given.float().contiguous())

    @property
    def addresses(self) -> tuple[int | None, ...]:
        tensors = (self.conv, self.bias, self.a_log, self.dt_bias, self.d)
        return tuple(None if each is None else each.data_ptr() for each in tensors)


def gated_delta(
    mixed: Tensor, a: Tensor, b: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """One layer over the tokens of a step: the outputs [T, H, v] in the dtype of `mixed`; writes the states.

    mixed [T, C]: the projection of queries, keys and values. a, b [T, H]: those of the gates. The kernel raises
    ValueError for a batch that leads outside of the tokens or slots, and has then written nothing. On a GPU the decoder
    calls `linear_state_gpu` instead.
    """
    return _recur(mixed, (a, b), weights, states, layer, batch)


def mamba2(
    mixed: Tensor, dt: Tensor, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    """The same for Mamba-2. mixed [T, C]: the projection of x, B and C, in this order; dt [T, H]: that of dt."""
    return _recur(mixed, (dt,), weights, states, layer, batch)


_Gates: TypeAlias = tuple[Tensor, ...]


def _recur(
    mixed: Tensor, gates: _Gates, weights: LinearWeights, states: LinearStates, layer: int, batch: StateBatch
) -> Tensor:
    if mixed.device.type == "cpu":
        function = kernel(native.level(), mixed.dtype, states.shape)
        if function is not None and states.conv.dtype == mixed.dtype and states.recurrent.mT.is_contiguous():
            return _recur_c(function, mixed, gates, weights, states, layer, batch)
    return recur_torch(mixed, gates, weights, states, layer, batch)


# ---- the C kernel


class _Call(ctypes.Structure):
    """`Call` in linear_state_c.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("team", "recurrent", "gates", "conv", "window")),
        *((name, ctypes.c_int64) for name in ("recurrent_layer", "gates_layer", "conv_layer", "window_layer")),
        *((name, ctypes.c_int64) for name in ("recurrent_slot", "gates_slot", "conv_slot", "window_slot")),
        *((name, ctypes.c_int64) for name in ("slots", "drafts", "delta")),
        *((name, ctypes.c_int64) for name in ("key_heads", "heads", "key_dim", "value_dim", "kernel", "channels")),
        *((name, ctypes.c_int64) for name in ("queries", "keys", "values", "gates_token")),
        *((name, ctypes.c_void_p) for name in ("starts", "source", "target", "applied", "held", "marks")),
        *((name, ctypes.c_int64) for name in ("sequences", "n_marks")),
        *((name, ctypes.c_void_p) for name in ("left", "taps", "bias", "a_log", "dt_bias", "d")),
        *((name, ctypes.c_void_p) for name in ("mixed", "a", "b", "out")),
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


def _recur_c(
    function: Callable[..., None],
    mixed: Tensor,
    gates: _Gates,
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    shape, tokens = states.shape, len(mixed)
    if not 0 <= layer < len(states.recurrent):
        raise IndexError(f"layer {layer} of {len(states.recurrent)}")
    check_inputs(mixed, gates, weights, shape)
    plan: _StepCall | None = batch.plans.get(_StepCall)
    if plan is None or plan.states is not states or plan.function is not function:
        plan = batch.plans[_StepCall] = _step_call(function, states, batch)
    mixed, *rows = (each if each.stride(1) == 1 else each.contiguous() for each in (mixed, *(g.float() for g in gates)))
    out = torch.empty(tokens, shape.value_heads, shape.value_dim, dtype=mixed.dtype)
    call = plan.call
    call.layer, call.tokens, call.threads = layer, tokens, torch.get_num_threads()
    call.taps, call.bias, call.a_log, call.dt_bias, call.d = weights.addresses
    call.mixed, call.a, call.b, call.out = mixed.data_ptr(), rows[0].data_ptr(), rows[-1].data_ptr(), out.data_ptr()
    call.mixed_row, call.a_row, call.b_row = mixed.stride(0), rows[0].stride(0), rows[-1].stride(0)
    function(plan.address)
    if call.wrong:
        raise ValueError(f"a batch over {tokens} tokens and {states.slots} slots that leads outside of them")
    return out


def check_inputs(mixed: Tensor, gates: Sequence[Tensor], weights: LinearWeights, shape: LinearShape) -> None:
    """Raises ValueError for inputs or weights of another shape or rule."""
    each, expected = [tuple(gate.shape) for gate in gates], (len(mixed), shape.value_heads)
    if mixed.shape[1:] != (shape.channels,) or each != [expected] * shape.gates:
        found = f"mixed {tuple(mixed.shape)} and gates {each}"
        raise ValueError(f"{found} do not fit {shape.channels} channels and {shape.gates} gates of {expected}")
    if (weights.d is None) != (shape.rule == "delta"):
        raise ValueError(f"weights {'without' if weights.d is None else 'with'} D do not fit the rule {shape.rule}")


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
        shape.rule == "delta",
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        shape.kernel,
        shape.channels,
        shape.queries,
        shape.keys,
        shape.values,
        shape.gates * shape.value_heads,
        *(each.data_ptr() for each in uses),
        sequences,
        len(batch.marks),
        left.data_ptr(),
    )
    return _StepCall(states, function, call, ctypes.addressof(call), (left, *uses))


# ---- torch

_CHUNK = 64  # tokens
_Way: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""S and S^T q [n, H, v] after n tokens, of q and k [n, H, k], v [n, H, v], g and beta [n, H], and S before. Without a
beta values are added as they are.
"""


def recur_torch(
    mixed: Tensor,
    gates: Sequence[Tensor],
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    """`gated_delta` or `mamba2`, as the states' shape says, without a kernel of ours, on any device."""
    return _in_torch(_chunked, torch.float32, mixed, gates, weights, states, layer, batch)


def recur_reference(
    mixed: Tensor,
    gates: Sequence[Tensor],
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same token by token, computed in `dtype`."""
    return _in_torch(_token_by_token, dtype, mixed, gates, weights, states, layer, batch)


def _in_torch(
    way: _Way,
    dtype: torch.dtype,
    mixed: Tensor,
    gates: Sequence[Tensor],
    weights: LinearWeights,
    states: LinearStates,
    layer: int,
    batch: StateBatch,
) -> Tensor:
    """Sequence by sequence; the way computes what lies between the tokens after which a state is written."""
    shape, before = states.shape, states.shape.kernel - 1
    recurrent, conv, window, kept_gates = (each[layer] for each in states.tensors)
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
        new = torch.stack([each[own] for each in gates], 1).to(kept_gates.dtype)
        both = torch.cat((kept_gates[source, :applied], new))
        *tokens, beta, skip = _prepared(inputs, both, weights, shape, dtype)
        kept = len(both) - held
        ends = [(applied + n, slot) for of, n, slot in marks if of == number] + [(kept, target)]
        cuts = sorted({0, len(both), *(n for n, _ in ends)})
        found, after = [out.new_empty(0, *out.shape[1:])], {0: state}
        for begin, end in pairwise(cuts):
            q, k, v, g = (each[begin:end] for each in tokens)
            state, o = way(q, k, v, g, None if beta is None else beta[begin:end], state)
            after[end] = state
            found.append((o if skip is None else o + skip[begin:end]).to(out.dtype))
        out[own] = torch.cat(found)[applied:]
        for n, slot in ends:
            writes += ((recurrent[slot], after[n]), (conv[slot], inputs[n : n + before]))
        writes += ((window[target, :held], inputs[len(inputs) - held :]), (kept_gates[target, :held], both[kept:]))
    for to, value in writes:  # all were read
        to.copy_(value)
    return out


def _prepared(
    inputs: Tensor, gates: Tensor, weights: LinearWeights, shape: LinearShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q and k [n, H, k], v [n, H, v], g [n, H], then beta [n, H] or D v. inputs [K - 1 + n, C]; gates [n, G, H]."""
    n, group = len(gates), shape.value_heads // shape.key_heads
    x = inputs.new_zeros(n, shape.channels, dtype=dtype)
    for tap, weight in enumerate(weights.conv.to(dtype).T):
        x += inputs[tap : tap + n] * weight
    x = F.silu(x if weights.bias is None else x + weights.bias.to(dtype))
    q, k = (
        x[:, first : first + shape.key_heads * shape.key_dim].view(n, shape.key_heads, -1).repeat_interleave(group, 1)
        for first in (shape.queries, shape.keys)
    )
    v = x[:, shape.values : shape.values + shape.value_heads * shape.value_dim].view(n, shape.value_heads, -1)
    first, *others = gates.to(dtype).unbind(1)
    dt = F.softplus(first + weights.dt_bias.to(dtype))
    g = -weights.a_log.to(dtype).exp() * dt
    if weights.d is not None:
        return q, k, v * dt[:, :, None], g, None, v * weights.d.to(dtype)[:, None]
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    return q * shape.key_dim**-0.5, k, v, g, torch.sigmoid(others[0]), None


def _token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        written = v[t] if beta is None else (v[t] - (state * k[t, :, :, None]).sum(1)) * beta[t, :, None]
        state = state + k[t, :, :, None] * written[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1)
    return state, out


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks of tokens at once: arXiv 2405.21060, section 6, for Mamba-2; 2412.06464, section 3.3, for the delta rule.

    With c the sum of g from the chunk's beginning, and D_ij = e^(c_i - c_j) for j <= i, the values U that the chunk
    writes are V, or for the delta rule solve (I + tril(diag(beta) K K^T * D, -1)) U = diag(beta) (V - diag(e^c) K S).
    """
    out = torch.empty_like(v)
    for begin in range(0, len(q), _CHUNK):
        some = slice(begin, begin + _CHUNK)
        # [H, n, ...]
        qs, ks, u = (each[some].transpose(0, 1) for each in (q, k, v))
        c = g[some].T.cumsum(1, dtype=torch.float64)  # differences of sums that may be large
        grown, rest = (each.to(state.dtype).exp()[:, :, None] for each in (c, c[:, -1:] - c))
        decay = (c[:, :, None] - c[:, None]).to(state.dtype).tril().exp().tril()
        if beta is not None:
            betas = beta[some].T[:, :, None]
            system = (ks @ ks.mT * decay * betas).tril(-1)
            right = betas * (u - grown * (ks @ state))
            u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out[some] = (grown * (qs @ state) + (qs @ ks.mT * decay) @ u).transpose(0, 1)
        state = grown[:, -1:] * state + (ks * rest).mT @ u
    return state, out
