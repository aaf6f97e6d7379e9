"""Pointing: while training, the model also says which tool it will call next, or none, before it writes anything.

Whether to call at all is one token of a reply, and a model that cannot yet tell the tools apart there learns nothing
from it. Pointing asks for the tool by attention over the names in the prompt, one layer or more below the top, so the
layers above find the answer ready. The pointer is not part of the exported model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Encoding
from torch import Tensor, nn

from holdfast.replicas.pocket.conversations import Conversation
from holdfast.replicas.pocket.render import Span, tool_lines
from holdfast.replicas.pocket.schemas import Json

WIDTH = 64
"""Dimension of the pointer's queries and keys."""

NO_CHOICE = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """At token ``at`` of a row the next tool is number ``tool`` of the conversation's tools, or ``NO_CHOICE``."""

    at: int
    tool: int


@dataclass(frozen=True, slots=True)
class RowPointing:
    """Where each tool's name stands in a row (first token, one past the last), and the choices made in it."""

    names: tuple[tuple[int, int], ...] = ()
    choices: tuple[Choice, ...] = ()

    def within(self, length: int) -> RowPointing:
        """What is left of it in the first ``length`` tokens."""
        if any(end > length for _, end in self.names):
            return RowPointing()
        return RowPointing(self.names, tuple(choice for choice in self.choices if choice.at < length))


NO_POINTING = RowPointing()


@dataclass(frozen=True, slots=True)
class Pointing:
    """All choices of a batch.

    ``name_tokens`` and ``name_tools`` ``[tokens of names]``: flat places and the tool each belongs to;
    ``tool_rows`` ``[tools]``; ``at`` (flat), ``rows`` and ``chosen`` ``[choices]``, where ``chosen`` is a tool's number
    in the batch or ``len(tool_rows)`` for none.
    """

    name_tokens: Tensor
    name_tools: Tensor
    tool_rows: Tensor
    at: Tensor
    rows: Tensor
    chosen: Tensor

    def to(self, device: torch.device) -> Pointing:
        """The same on ``device``."""
        return Pointing(*(getattr(self, name).to(device) for name in self.__slots__))


class Pointer(nn.Module):
    """Chooses among the names by the product of a query and the mean of their keys; none has a key of its own."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, WIDTH, bias=False)
        self.key = nn.Linear(hidden_size, WIDTH, bias=False)
        self.none = nn.Parameter(torch.zeros(WIDTH))
        generator = torch.Generator().manual_seed(seed)
        for weight in (self.query.weight, self.key.weight):
            nn.init.normal_(weight, std=hidden_size**-0.5, generator=generator)

    def forward(self, x: Tensor, pointing: Pointing) -> Tensor:
        """Scores ``[choices, tools + 1]`` from hidden states ``x`` ``[tokens, hidden]``; -inf for other rows' tools."""
        x = F.rms_norm(x, (x.shape[-1],))
        keys = self.key(x[pointing.name_tokens]).float()  # [tokens of names, width]
        tools = len(pointing.tool_rows)
        counts = torch.zeros(tools, device=x.device).index_add_(
            0, pointing.name_tools, torch.ones_like(pointing.name_tools, dtype=torch.float32)
        )
        means = keys.new_zeros(tools, WIDTH).index_add(0, pointing.name_tools, keys) / counts[:, None]
        queries = self.query(x[pointing.at]).float()
        scores: Tensor = queries @ torch.cat((means, self.none[None].float())).T * WIDTH**-0.5
        foreign = pointing.rows[:, None] != pointing.tool_rows[None]
        return scores.masked_fill(F.pad(foreign, (0, 1)), float("-inf"))

    def loss(self, x: Tensor, pointing: Pointing) -> Tensor:
        """Mean cross entropy of the choices; zero for a batch without any."""
        if not len(pointing.at):
            return x.new_zeros((), dtype=torch.float32)
        return F.cross_entropy(self(x, pointing), pointing.chosen)


def row_pointing(
    conversation: Conversation, pieces: Sequence[Span], encoded: Sequence[Encoding], call_end: int
) -> RowPointing:
    """The choices of a tokenized conversation; ``call_end`` is the token that closes a call.

    There is one before each reply and one behind each of its calls: the tool of the call that comes next.
    """
    if not conversation.tools:
        return NO_POINTING
    names = _names(conversation.tools, pieces[0], encoded[0])
    number = {tool["function"]["name"]: index for index, tool in enumerate(conversation.tools)}
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    choices: list[Choice] = []
    at = 0
    for piece, tokens in zip(pieces, encoded, strict=True):
        if piece.learned:
            message = replies.pop(0)
            ends = [at + index for index, token in enumerate(tokens.ids) if token == call_end]
            following = [number[name] for name in called(message)]
            following += [] if message.get("unfinished") and following else [NO_CHOICE]
            choices += [Choice(*pair) for pair in zip((at - 1, *ends), following, strict=False)]
        at += len(tokens.ids)
    return RowPointing(names, tuple(choices))


def called(message: Json) -> list[str]:
    """The tools that an assistant message calls, begins to call or asks the arguments of, in order."""
    if message.get("tool_calls"):
        return [call["function"]["name"] for call in message["tool_calls"]]
    if message.get("asks_for"):
        return [message["asks_for"]]
    if message.get("unfinished") and message["content"].startswith("<tool_call>"):
        return [message["content"].split('"')[3]]
    return []


def _names(tools: Sequence[Json], piece: Span, tokens: Encoding) -> tuple[tuple[int, int], ...]:
    found = []
    line_start = 0
    for tool, line in zip(tools, tool_lines(tools), strict=True):
        line_start = piece.text.index(line, line_start)
        name = tool["function"]["name"]
        first = line_start + line.index(f'"name": "{name}"') + len('"name": "')
        inside = [i for i, (a, b) in enumerate(tokens.offsets) if a < first + len(name) and b > first]
        found.append((inside[0], inside[-1] + 1))
    return tuple(found)


def collate_pointing(rows: Sequence[RowPointing], length: int) -> Pointing:
    """The choices of rows that are padded to ``length``."""
    name_tokens: list[int] = []
    name_tools: list[int] = []
    tool_rows: list[int] = []
    choices: list[tuple[int, int, int]] = []
    for index, row in enumerate(rows):
        first = len(tool_rows)
        for start, end in row.names:
            name_tokens += range(index * length + start, index * length + end)
            name_tools += [len(tool_rows)] * (end - start)
            tool_rows.append(index)
        choices += [(index * length + c.at, index, c.tool if c.tool < 0 else first + c.tool) for c in row.choices]
    at, in_row, chosen = (torch.tensor([c[i] for c in choices], dtype=torch.long) for i in range(3))
    return Pointing(
        torch.tensor(name_tokens, dtype=torch.long),
        torch.tensor(name_tools, dtype=torch.long),
        torch.tensor(tool_rows, dtype=torch.long),
        at,
        in_row,
        torch.where(chosen < 0, len(tool_rows), chosen),
    )
