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
    """The choices of a batch: how many ``per_row``; token ``at`` of each ``[choices]``; pairs of choice and token.

    ``choice`` and ``token`` are ``[pairs]``: choice ``choice[i]`` may look at ``token[i]``. Tokens count within a row.
    """

    per_row: tuple[int, ...]
    at: Tensor
    choice: Tensor
    token: Tensor

    def to(self, device: torch.device) -> Pointing:
        """The same on ``device``."""
        return Pointing(self.per_row, *(getattr(self, name).to(device) for name in ("at", "choice", "token")))


def pointing_loss(q: Tensor, k: Tensor, pointing: Pointing) -> Tensor:
    """Mean of -log of the attention on the right tokens; zero for a batch without choices.

    ``q`` and ``k`` ``[rows, length, head_dim]`` are one head's, in position; ``q`` is not scaled yet.
    """
    if not len(pointing.at):
        return q.new_zeros((), dtype=torch.float32)
    asked = torch.split(pointing.at, list(pointing.per_row))
    scores = torch.cat([(q[row, at] * q.shape[-1] ** -0.5) @ k[row].T for row, at in enumerate(asked)]).float()
    token = torch.arange(k.shape[1], device=k.device)
    seen = scores.masked_fill(token > pointing.at[:, None], float("-inf"))  # [choices, length]
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
    choices = [choice for row in rows for choice in row]
    pairs = [(index, token) for index, choice in enumerate(choices) for token in choice.tokens]
    return Pointing(
        tuple(len(row) for row in rows),
        torch.tensor([choice.at for choice in choices], dtype=torch.long),
        *(torch.tensor([pair[i] for pair in pairs], dtype=torch.long) for i in range(2)),
    )
