"""Pointing: while training, two attention heads are told where in the prompt to look.

Whether to call at all is one token of a reply, and a model that cannot yet tell the tools apart there learns nothing
from it; which words of a request fill which parameter is as hidden. So in the second layer from the top the first head
learns, before a reply and behind each call, to look at the name of the next tool, or at the very first token when there
is none; and the last head learns, all through the arguments, to look at the token that is copied next (``sources``).
The layer above reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Encoding
from torch import Tensor

from holdfast.replicas.pocket.conversations import Conversation
from holdfast.replicas.pocket.render import Span, tool_lines
from holdfast.replicas.pocket.schemas import Json

NOWHERE = (0,)
"""Where a head looks when nothing is next: the first token, which says nothing."""
TOOL_HEAD, SOURCE_HEAD = 0, -1
"""Which query head looks at tools, and which at what is copied."""


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


def tool_choices(
    conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding], call_end: int
) -> list[Choice]:
    """Where the next tool's name stands, before each reply and behind each of its calls.

    ``pieces`` are the conversation's spans, ``encoded`` their tokens; ``call_end`` is the token that closes a call.
    """
    if not conversation.tools:
        return []
    names = _names(conversation.tools, pieces[0], encoded[0])
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    choices: list[Choice] = []
    at = 0
    for piece, tokens in zip(pieces, encoded, strict=True):
        if piece.learned:
            message = replies.pop(0)
            ends = [at + index for index, token in enumerate(tokens.ids) if token == call_end]
            following = [names[name] for name in called(message)]
            following += [] if message.get("unfinished") and following else [NOWHERE]
            choices += [Choice(token, span) for token, span in zip((at - 1, *ends), following, strict=False)]
        at += len(tokens.ids)
    return choices


def called(message: Json) -> list[str]:
    """The tools that an assistant message calls, begins to call or asks the arguments of, in order."""
    if message.get("tool_calls"):
        return [call["function"]["name"] for call in message["tool_calls"]]
    if message.get("asks_for"):
        return [message["asks_for"]]
    if message.get("unfinished") and message["content"].startswith("<tool_call>"):
        return [message["content"].split('"')[3]]
    return []


def _names(tools: Sequence[Json], piece: Span, tokens: Encoding) -> dict[str, tuple[int, ...]]:
    """The tokens of each tool's name in the system prompt ``piece``."""
    found = {}
    line_start = 0
    for tool, line in zip(tools, tool_lines(tools), strict=True):
        line_start = piece.text.index(line, line_start)
        name = tool["function"]["name"]
        first = line_start + line.index(f'"name": "{name}"') + len('"name": "')
        found[name] = tuple(tokens_of(tokens, first, first + len(name)))
    return found


def tokens_of(encoded: Encoding, start: int, end: int) -> range:
    """The tokens that characters ``start`` to ``end`` stand in."""
    inside = [i for i, (a, b) in enumerate(encoded.offsets) if a < end and b > start]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def collate_pointing(rows: Sequence[Sequence[Choice]]) -> Pointing:
    """The choices of the rows of a batch."""
    choices = [choice for row in rows for choice in row]
    pairs = [(index, token) for index, choice in enumerate(choices) for token in choice.tokens]
    return Pointing(
        tuple(len(row) for row in rows),
        torch.tensor([choice.at for choice in choices], dtype=torch.long),
        *(torch.tensor([pair[i] for pair in pairs], dtype=torch.long) for i in range(2)),
    )
