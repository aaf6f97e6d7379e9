"""Mixtures of experts: each token goes through a few of many small feed-forwards, chosen by a router.

Maths, for a row x [D] of a token and the router's logits [E]: `route` chooses k experts e_j and their weights w_j, and

    y = sum_j w_j (act(x G_e^T + b_e) H_e^T + c_e)        e = e_j, in the order in which they were chosen

with G [E, 2I or I, D] (the gates above their partners), H [E, D, I], and `act` of `linear.activate`. A token's result
depends on that token alone, to the last bit, where the C kernel multiplies: not on other tokens, nor on threads.

The logits are the caller's: a `Matrix` of the router's weights in float32, called with x in float32. On a CPU its bits
do not depend on the number of rows, and logits that are rounded to bfloat16 tie.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.kernels.linear import Activation, Matrix, activate


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
    else:  # torch.sigmoid rounds otherwise at the end of a tensor than in it
        scores = torch.softmax(torch.stack((logits, torch.zeros_like(logits)), dim=-1), dim=-1)[..., 0]
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
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        """Raises ValueError for `int8` of weights that are not on a CPU."""
        self._activation, self._alpha, self._limit = activation, alpha, limit
        self._gate_up = [
            Matrix(weight, None if gate_up_bias is None else gate_up_bias[e], int8) for e, weight in enumerate(gate_up)
        ]
        self._down = [
            Matrix(weight, None if down_bias is None else down_bias[e], int8) for e, weight in enumerate(down)
        ]

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, plus: Tensor | None = None) -> Tensor:
        """x [T, D], chosen [T, k] below E, weights [T, k] -> [T, D] in x's dtype; `plus` [T, D] is added."""
        count, width = chosen.shape[1], x.shape[1]
        flat = chosen.flatten()
        terms = x.new_empty((len(flat), width), dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in sorted(set(flat.tolist())):
            places = (flat == expert).nonzero()[:, 0]
            both = self._gate_up[expert](x[places // count])
            inner = activate(both, self._activation, self._alpha, self._limit)
            terms[places] = self._down[expert](inner).to(terms.dtype)
        y = (terms * weights.reshape(-1, 1)).view(-1, count, width).sum(1)
        return (y if plus is None else y + plus).to(x.dtype)


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
