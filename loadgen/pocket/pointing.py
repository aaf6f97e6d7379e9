"""Pointing: while training, three attention heads are told where in the prompt to look.

Whether to call at all is one token of a reply, and a model that cannot yet tell the tools apart there learns nothing
from it; which words of a request fill which parameter is as hidden. So heads near the top learn to look at the next
tool, at the value that is copied next and at its parameter (``sources`` says where those stand), and what is above
them reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOWHERE = (0,)
"""Where a head looks when nothing is next: the first token, which says nothing."""
HEADS = {"tools": (-2, 0), "sources": (-2, -1), "keys": (-1, 0)}
"""Layer and query head of each. The parameter is known once the value is, so its head is a layer above."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Token ``at`` of a row is to look at ``tokens``, no matter at which of them."""

    at: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pointing:
    """The choices of a batch, at most ``most`` in a row.

    ``row``, ``slot`` and ``at`` are ``[choices]``: of its row the choice is number ``slot``, for token ``at``.
    ``choice`` and ``token`` are ``[pairs]``: choice ``choice[i]`` may look at ``token[i]`` of its row.
    """

    most: int
    row: Tensor
    slot: Tensor
    at: Tensor
    choice: Tensor
    token: Tensor

    def to(self, device: torch.device) -> Pointing:
        """The same on ``device``."""
        moved = (each.to(device) for each in (self.row, self.slot, self.at, self.choice, self.token))
        return Pointing(self.most, *moved)


def pointing_loss(q: Tensor, k: Tensor, pointing: Pointing) -> Tensor:
    """Mean of -log of the attention on the right tokens; zero for a batch without choices.

    ``q`` and ``k`` ``[rows, length, head_dim]`` are one head's, in position; ``q`` is not scaled yet.
    """
    if not pointing.most:
        return q.new_zeros((), dtype=torch.float32)
    row, slot, at = pointing.row, pointing.slot, pointing.at
    asked = q.new_zeros(len(q), pointing.most, q.shape[-1])
    asked[row, slot] = q[row, at] * q.shape[-1] ** -0.5
    scores = torch.bmm(asked, k.transpose(1, 2))[row, slot].float()  # [choices, length]
    seen = scores.masked_fill(torch.arange(k.shape[1], device=k.device) > at[:, None], float("-inf"))
    right = torch.zeros_like(seen, dtype=torch.bool)
    right[pointing.choice, pointing.token] = True
    return (seen.logsumexp(-1) - seen.masked_fill(~right, float("-inf")).logsumexp(-1)).mean()


def pointing_losses(seen: Sequence[tuple[Tensor, Tensor]], pointing: Mapping[str, Pointing]) -> list[Tensor]:
    """The loss of each of ``HEADS``; ``seen`` are each layer's queries and keys ``[rows, heads, length, head_dim]``."""
    losses = []
    for name, (layer, head) in HEADS.items():
        q, k = seen[max(layer, -len(seen))]
        losses.append(pointing_loss(q[:, head], k[:, head], pointing[name]))
    return losses


def collate_pointing(rows: Sequence[Sequence[Choice]]) -> Pointing:
    """The choices of one head in the rows of a batch."""
    found = [(number, slot, choice) for number, row in enumerate(rows) for slot, choice in enumerate(row)]
    columns = (
        [number for number, _, _ in found],
        [slot for _, slot, _ in found],
        [choice.at for _, _, choice in found],
        [index for index, (_, _, choice) in enumerate(found) for _ in choice.tokens],
        [token for _, _, choice in found for token in choice.tokens],
    )
    most = max((len(row) for row in rows), default=0)
    return Pointing(most, *(torch.tensor(column, dtype=torch.long) for column in columns))
