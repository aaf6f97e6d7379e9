"""Pointing: while training, one attention head is told to look at the tool that will be called next, or at none.

Whether to call at all is one token of a reply, and a model that cannot yet tell the tools apart there learns nothing
from it. Before a reply and behind each call, the first head of the second layer from the top learns to look at the name
of the next tool in the prompt, or at the very first token when there is none; so the layers above read the decision.
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

NOWHERE = (0, 1)
"""Where the head looks when no tool is next: the first token, which says nothing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Behind token ``at`` of a row the next tool's name stands in tokens ``start`` to ``end``, one past the last."""

    at: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pointing:
    """All choices of a batch, each ``[choices]``: row, token, and the tokens to look at within the row."""

    rows: Tensor
    at: Tensor
    start: Tensor
    end: Tensor

    def to(self, device: torch.device) -> Pointing:
        """The same on ``device``."""
        return Pointing(*(getattr(self, name).to(device) for name in self.__slots__))


def pointing_loss(q: Tensor, k: Tensor, pointing: Pointing) -> Tensor:
    """Mean of -log of the attention on the right tokens; zero for a batch without choices.

    ``q`` and ``k`` ``[rows, length, head_dim]`` are one head's, in position; ``q`` is not scaled yet.
    """
    if not len(pointing.at):
        return q.new_zeros((), dtype=torch.float32)
    asked = q[pointing.rows, pointing.at].float() * q.shape[-1] ** -0.5  # [choices, head_dim]
    scores = torch.bmm(k.float()[pointing.rows], asked[:, :, None])[:, :, 0]  # [choices, length]
    token = torch.arange(k.shape[1], device=k.device)
    seen = scores.masked_fill(token > pointing.at[:, None], float("-inf"))
    right = (token >= pointing.start[:, None]) & (token < pointing.end[:, None])
    return (seen.logsumexp(-1) - seen.masked_fill(~right, float("-inf")).logsumexp(-1)).mean()


def row_pointing(
    conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding], call_end: int
) -> list[Choice]:
    """The choices of a tokenized conversation; ``call_end`` is the token that closes a call.

    There is one before each reply and one behind each of its calls: the tool of the call that comes next.
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
            choices += [Choice(token, *span) for token, span in zip((at - 1, *ends), following, strict=False)]
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


def _names(tools: Sequence[Json], piece: Span, tokens: Encoding) -> dict[str, tuple[int, int]]:
    """The tokens of each tool's name in the system prompt ``piece``."""
    found = {}
    line_start = 0
    for tool, line in zip(tools, tool_lines(tools), strict=True):
        line_start = piece.text.index(line, line_start)
        name = tool["function"]["name"]
        first = line_start + line.index(f'"name": "{name}"') + len('"name": "')
        inside = [i for i, (a, b) in enumerate(tokens.offsets) if a < first + len(name) and b > first]
        found[name] = (inside[0], inside[-1] + 1)
    return found


def collate_pointing(rows: Sequence[Sequence[Choice]]) -> Pointing:
    """The choices of the rows of a batch."""
    found = [(index, choice.at, choice.start, choice.end) for index, row in enumerate(rows) for choice in row]
    return Pointing(*(torch.tensor([choice[i] for choice in found], dtype=torch.long) for i in range(4)))
