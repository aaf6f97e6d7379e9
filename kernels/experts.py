"""Mixtures of experts: each token goes through a few of many small feed-forwards, chosen by a router.

Maths, for a row x [D] of a token and the router's logits [E]: `route` chooses k experts e_j and their weights w_j, and

    y = sum_j w_j (act(x G_e^T + b_e) H_e^T + c_e)        e = e_j, in the order in which they were chosen

with G [E, 2I or I, D] (the gates above their partners), H [E, D, I], and `act` of `linear.activate`. A token's result
depends on that token alone, to the last bit, where the C kernel multiplies: not on other tokens, nor on threads.

The logits are the caller's: a `Matrix` of the router's weights in float32, called with x in float32. On a CPU its bits
do not depend on the number of rows, and logits that are rounded to bfloat16 tie.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Literal

import torch
from torch import Tensor

from holdfast.kernels import linear
from holdfast.kernels.linear import (
    ALPHA,
    LIMIT,
    Activation,
    Matrix,
    PackedMatrix,
    Variant,
    activate,
    variant_for,
)

_PAIRS: Final = 1 << 13  # pairs of a token and an expert in one call of the kernel, whose results between take memory
_OUTSIDE: Final = 1  # a failure of product_c.c


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses: `chosen` of `experts` by their score, in the `kept_groups` best of `groups`.

    `normalised`: a token's weights sum to one before they are multiplied by `scale`. `softcap`: logits are bounded to
    softcap tanh(logit / softcap); 0: they are not.
    """

    experts: int
    chosen: int
    score: Literal["softmax", "sigmoid"]
    normalised: bool
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    softcap: float = 0.0


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits [T, E] -> experts [T, k] in int32, best first, and their weights [T, k] in float32.

    `correction` [E] is added to the scores for the choice only. A group's score is the sum of its two best
    (DeepSeek-V3, section 2.1.2). A token's result does not depend on other tokens.
    """
    logits = logits.float()
    if routing.softcap:
        logits = torch.tanh(logits / routing.softcap) * routing.softcap
    if routing.score == "softmax":
        scores = torch.softmax(logits, dim=-1)
    else:  # torch.sigmoid rounds otherwise at the end of a tensor than in it, torch.exp does not
        scores = 1 / (1 + torch.exp(-logits))
    choice = scores if correction is None else scores + correction.float()
    if routing.groups > 1:
        grouped = choice.view(-1, routing.groups, routing.experts // routing.groups)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(routing.kept_groups, dim=-1).indices
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = choice.topk(routing.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen.int(), weights * routing.scale


class Experts:
    """The experts of one layer; calling it computes the sum over each token's experts.

    gate_up [E, 2I, D], or [E, I, D] for "relu2"; down [E, D, I]; biases [E, 2I or I] and [E, D]. `alpha` and `limit`:
    of "clamped". `int8`: as of a `Matrix`; the weights are copied, so drop the plain ones.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        activation: Activation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        int8: bool = False,
        alpha: float = ALPHA,
        limit: float = LIMIT,
    ) -> None:
        """Raises ValueError for `int8` of weights that are not on a CPU."""
        ups = zip(gate_up, repeat(None) if gate_up_bias is None else gate_up_bias, strict=False)
        downs = zip(down, repeat(None) if down_bias is None else down_bias, strict=False)
        columns = math.gcd(gate_up.shape[2], down.shape[2])  # a variant that takes this width takes both
        variant = variant_for(gate_up[0, :, :columns], int8)
        if variant is not None:
            self._sum: _ByKernel | _ByTorch = _ByKernel(
                variant,
                [PackedMatrix(variant, weight, bias, activation, alpha, limit) for weight, bias in ups],
                [PackedMatrix(variant, weight, bias) for weight, bias in downs],
            )
        else:
            self._sum = _ByTorch(
                [Matrix(weight, bias, int8) for weight, bias in ups],
                functools.partial(activate, activation=activation, alpha=alpha, limit=limit),
                [Matrix(weight, bias, int8) for weight, bias in downs],
            )

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [T, D], chosen [T, k] below E, weights [T, k] -> [T, D] in x's dtype; `plus` [T, D] is added.

        Raises ValueError for experts that are not there, and as `PackedMatrix` does.
        """
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        step = max(1, _PAIRS // chosen.shape[1])
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            self._sum(x[part], chosen[part], weights[part], None if plus is None else plus[part], y[part])
        return y


class _ByTorch:
    """Each active expert's two products, one after the other. Called with y [T, D], which is written."""

    def __init__(self, ups: list[Matrix], activation: Callable[[Tensor], Tensor], downs: list[Matrix]) -> None:
        self._ups, self._activation, self._downs = ups, activation, downs

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, plus: Tensor | None, y: Tensor) -> None:
        flat = chosen.flatten()
        terms = x.new_empty((len(flat), x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in sorted(set(flat.tolist())):
            if not 0 <= expert < len(self._ups):
                raise ValueError(f"expert {expert} of {len(self._ups)}")
            places = (flat == expert).nonzero()[:, 0]
            inner = self._activation(self._ups[expert](x[places // chosen.shape[1]]))
            terms[places] = self._downs[expert](inner).to(terms.dtype)
        found = (terms * weights.reshape(-1, 1)).view(*chosen.shape, -1).sum(1)
        y.copy_(found if plus is None else found + plus)


class _ByKernel:
    """One call for all experts. Called with y [T, D], which is written."""

    def __init__(self, variant: Variant, ups: list[PackedMatrix], downs: list[PackedMatrix]) -> None:
        self._variant, self._ups, self._downs = variant, ups, downs
        self._up, self._down = (
            (type(each[0].matrix) * len(each))(*(one.matrix for one in each)) for each in (ups, downs)
        )

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, plus: Tensor | None, y: Tensor) -> None:
        x, plus = self._ups[0].fitting(x, plus)
        chosen, weights = chosen.int().contiguous(), weights.float().contiguous()
        failed = ctypes.c_int32()
        _function(f"experts_{self._variant.symbol(x.dtype)}")(
            ctypes.addressof(self._up),
            ctypes.addressof(self._down),
            len(self._ups),
            x.data_ptr(),
            x.stride(0),
            chosen.data_ptr(),
            weights.data_ptr(),
            chosen.shape[1],
            None if plus is None else plus.data_ptr(),
            0 if plus is None else plus.stride(0),
            y.data_ptr(),
            len(x),
            torch.get_num_threads(),
            ctypes.addressof(failed),
        )
        if failed.value == _OUTSIDE:
            raise ValueError(f"experts {chosen.amin()} to {chosen.amax()} of {len(self._ups)}")
        if failed:
            raise MemoryError(f"what {len(x)} tokens need between their experts' products")


@functools.cache
def _function(name: str) -> Callable[..., None]:
    pointer, long, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    rows, choice = (pointer, long), (pointer, pointer, long)
    arguments = (pointer, pointer, long, *rows, *choice, *rows, pointer, long, count, pointer)
    return linear.LIBRARY.function(name, *arguments)


# ---- reference


def experts_reference(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """`Experts`, in float64."""
    first, second = (None if bias is None else bias.double() for bias in (gate_up_bias, down_bias))
    return Experts(gate_up.double(), down.double(), activation, first, second)(x.double(), chosen, weights.double())
