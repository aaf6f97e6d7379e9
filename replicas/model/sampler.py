"""Choosing tokens: from logits of the drawn positions and the plan's draws to token ids on the host.

The maths is in `kernels.sampling`; here rows are grouped by what they need, so that a step of greedy rows is one
argmax, and drafts are verified. Logits stay on the device: ids, and log probabilities where asked for, cross over.

A chunk of n tokens with d drafts has d + 1 rows. Row i draws the token after the chunk's token n - 1 - d + i, as if the
drafts up to there were right; drafts that equal what was drawn at their place, from the first on, are accepted.

Before a token is chosen a row's logits are changed by its repetition penalty, then by its bias, by its other penalties
and by its mask. Penalties come from counts that the sequence keeps (`TokenCounts`); a draft counts as generated in the
rows after it. Masks of
constrained sequences are packed 32 tokens to a word, one copy to the device for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.kv import sent
from holdfast.kernels.sampling import Filters, greedy, gumbel_argmax, log_probabilities, row_keys
from holdfast.replicas.constraints.matcher import Bits, RowMasks
from holdfast.replicas.plan import Chunk, Draw, Drawn, Sampling, TokenLogprobs

_COLD = 1e-5  # a temperature below is greedy: dividing by it would leave the range of float32
_NOT_YET = (
    -1e9
)  # bias of the tokens that would end a reply too soon: one is drawn only where a mask leaves nothing else

LogRow: TypeAlias = tuple[float, list[float], list[int]]


class RowEdit(NamedTuple):
    """What is added to some logits of one row: `changes` [n] float32 to those of `tokens` [n] int64, all different."""

    row: int
    tokens: npt.NDArray[np.int64]
    changes: npt.NDArray[np.float32]


class RowScale(NamedTuple):
    """In one row logits of `tokens` [n] int64, all different, are divided by `penalty`, negative ones multiplied."""

    row: int
    tokens: npt.NDArray[np.int64]
    penalty: float


@dataclass(slots=True)
class LogitRows:
    """Rows of the logits by what they need; lists of row indices and their settings."""

    sampled: list[int] = field(default_factory=list)
    settings: list[Sampling] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    scales: list[RowScale] = field(default_factory=list)
    biases: list[RowEdit] = field(default_factory=list)
    penalties: list[RowEdit] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    most_logprobs: int = 0
    masked: list[int] = field(default_factory=list)
    masks: list[RowMasks] = field(default_factory=list)

    @property
    def adjusted(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return bool(self.scales or self.biases or self.penalties or self.masks)


def sample(logits: Tensor, chunks: Sequence[Chunk]) -> tuple[Drawn | None, ...]:
    """Draw for every chunk from `logits` [R, vocabulary], R the chunks' drawn positions in order.

    The result belongs to `chunks` one by one; None where a chunk draws nothing.
    """
    if not logits.shape[0]:
        return (None,) * len(chunks)
    rows = group_rows(chunks, logits.shape[1])
    with torch.inference_mode():
        tokens = _draw(logits, rows)
        values = tokens.tolist()
        logprobs = logprobs_by_row(rows, row_logprobs(logits, tokens, rows)) if rows.logprobs else {}
    return by_chunk(chunks, values, _accepted(chunks, values), logprobs)


def group_rows(chunks: Sequence[Chunk], vocabulary: int) -> LogitRows:
    """What every row of a step asks for."""
    rows = LogitRows()
    row = 0
    for chunk in chunks:
        if (draw := chunk.draw) is None:
            continue
        sampling, count = draw.sampling, draw.drafts + 1
        span = range(row, row + count)
        end = chunk.start + len(chunk.tokens)
        if sampling.temperature > _COLD:
            rows.sampled += span
            rows.settings += [sampling] * count
            rows.seeds += [draw.seed] * count
            rows.positions += range(end - draw.drafts, end + 1)
        early = max(0, min(count, draw.least - (end - draw.drafts)))  # rows of tokens that must not end the reply
        if sampling.logit_bias or early:
            late = _bias(span[early:], sampling.logit_bias, vocabulary)
            not_yet = {**sampling.logit_bias, **dict.fromkeys(sampling.ends, _NOT_YET)}
            rows.biases += [*_bias(span[:early], not_yet, vocabulary), *late]
        if draw.seen is not None:
            rows.scales += _scales(chunk, draw, row)
        if draw.counts is not None:
            rows.penalties += _penalties(chunk, draw, row)
        if sampling.logprobs is not None:
            rows.logprobs += span
            rows.most_logprobs = max(rows.most_logprobs, sampling.logprobs)
        if draw.masks is not None:
            rows.masked += span
            rows.masks.append(draw.masks)
        row += count
    return rows


def _bias(rows: range, bias: Mapping[int, float], vocabulary: int) -> list[RowEdit]:
    """The same bias for some rows."""
    inside = {token: each for token, each in bias.items() if 0 <= token < vocabulary}
    if not inside:
        return []
    tokens, changes = np.array(list(inside), np.int64), np.array(list(inside.values()), np.float32)
    return [RowEdit(row, tokens, changes) for row in rows]


def _scales(chunk: Chunk, draw: Draw, first: int) -> list[RowScale]:
    """The repetition penalty of a chunk's rows, which begin with row `first`."""
    assert draw.seen is not None
    drafts = chunk.tokens[len(chunk.tokens) - draw.drafts :].tolist()
    seen = enumerate(draw.seen.after(drafts))
    return [RowScale(first + i, ids.copy(), draw.sampling.repetition_penalty) for i, (ids, _) in seen]


def _penalties(chunk: Chunk, draw: Draw, first: int) -> list[RowEdit]:
    """What the penalties of a chunk's rows, which begin with row `first`, take from their logits."""
    assert draw.counts is not None
    presence, frequency = draw.sampling.presence_penalty, draw.sampling.frequency_penalty
    drafts = chunk.tokens[len(chunk.tokens) - draw.drafts :].tolist()
    return [
        RowEdit(first + i, ids, (-presence - frequency * times).astype(np.float32))
        for i, (ids, times) in enumerate(draw.counts.after(drafts))
        if len(ids)
    ]


def _draw(logits: Tensor, rows: LogitRows) -> Tensor:
    """Token ids [R], on the device."""
    if not rows.sampled and not rows.adjusted:
        return greedy(logits)
    device = logits.device
    scores = adjusted(logits, rows)
    if not rows.sampled:
        return greedy(scores)
    some = len(rows.sampled) < logits.shape[0]
    index = _indices(rows.sampled, device)
    drawn = gumbel_argmax(
        scores[index] if some else scores,
        torch.tensor([[s.temperature] for s in rows.settings], device=device),
        torch.from_numpy(row_keys(rows.seeds, rows.positions)).to(device),
        _filters(rows.settings, device),
    )
    return greedy(scores).index_copy(0, index, drawn) if some else drawn


def adjusted(logits: Tensor, rows: LogitRows) -> Tensor:
    """The logits in float32 after bias, penalties and masks; a new tensor where there are any."""
    scores = logits.float()
    if rows.scales or rows.biases or rows.penalties:
        scores = scores.clone() if scores is logits else scores
        if rows.scales:
            _scale(scores, rows.scales)
        for edits in (rows.biases, rows.penalties):
            if edits:
                _add(scores, edits)
    return _masked(scores, rows) if rows.masks else scores


def _scale(scores: Tensor, scales: Sequence[RowScale]) -> None:
    """Apply the repetition penalties of different rows, in place. Raises as `_add`."""
    places = sent(_places(scores, scales), scores.device)
    penalties = np.repeat(np.array([each.penalty for each in scales], np.float32), [len(s.tokens) for s in scales])
    penalty, flat = sent(penalties, scores.device), scores.view(-1)
    before = flat[places]
    flat[places] = torch.where(before > 0, before / penalty, before * penalty)


def _places(scores: Tensor, edits: Sequence[RowEdit] | Sequence[RowScale]) -> npt.NDArray[np.int64]:
    """Where in the flat `scores` the tokens of edits of different rows are. Raises IndexError for a token beyond."""
    vocabulary = scores.shape[1]
    tokens = np.concatenate([edit.tokens for edit in edits])
    if len(tokens) and tokens.max() >= vocabulary:
        raise IndexError(f"token {tokens.max()} is penalised, but the vocabulary has {vocabulary}")
    places: npt.NDArray[np.int64] = tokens + np.repeat(
        np.array([edit.row * vocabulary for edit in edits], np.int64), [len(edit.tokens) for edit in edits]
    )
    return places


def _add(scores: Tensor, edits: Sequence[RowEdit]) -> None:
    """Apply edits of different rows, in place. Raises IndexError for a token beyond the vocabulary."""
    device = scores.device
    places = _places(scores, edits)
    changes = np.concatenate([edit.changes for edit in edits])
    # No place comes twice, so the order of the sums does not matter.
    scores.view(-1).scatter_add_(0, sent(places, device), sent(changes, device))


def _masked(scores: Tensor, rows: LogitRows) -> Tensor:
    """`scores` with the tokens that a constrained row may not draw at minus infinity; a new tensor."""
    vocabulary, device = scores.shape[1], scores.device
    packed = np.empty((len(rows.masked), rows.masks[0].matcher.words), np.int32)
    at = 0
    for masks in rows.masks:
        masks.fill(packed[at : at + len(masks.drafts) + 1])
        at += len(masks.drafts) + 1
    forbidden = _unpacked(packed, device)[:, :vocabulary]
    every = len(rows.masked) == len(scores)
    index = _indices(rows.masked, device)
    masked = scores.clone() if every else scores[index]
    masked[:, : forbidden.shape[1]].masked_fill_(forbidden, -torch.inf)
    masked[:, forbidden.shape[1] :] = -torch.inf  # rows of the output layer without a token
    return masked if every else scores.index_copy(0, index, masked)


def _unpacked(packed: Bits, device: torch.device) -> Tensor:
    """Which tokens packed masks forbid, bool [rows, 32 * words]; on a GPU what crosses over is packed."""
    if device.type == "cpu":
        bits = np.unpackbits(~packed.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return unpacked_on_device(sent(packed, device))


def unpacked_on_device(words: Tensor) -> Tensor:
    """Zero bits of int32 `words` [rows, W] as bool [rows, 32 * W], the lowest first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).eq(0).flatten(1)


def _indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    return sent(np.array(numbers, np.int64), device)


def _filters(settings: list[Sampling], device: torch.device) -> Filters | None:
    if all(s.top_k <= 0 and s.top_p >= 1.0 and s.min_p <= 0.0 for s in settings):
        return None
    return Filters(
        top_k=torch.tensor([[max(0, s.top_k)] for s in settings], device=device),
        top_p=torch.tensor([[s.top_p] for s in settings], device=device, dtype=torch.float32),
        min_p=torch.tensor([[s.min_p] for s in settings], device=device, dtype=torch.float32),
    )


def row_logprobs(logits: Tensor, tokens: Tensor, rows: LogitRows) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows that ask for it, the drawn token's log probability and the most likely ones with their ids; all
    before any setting touched the logits. [rows.logprobs], then twice [rows.logprobs, rows.most_logprobs]."""
    index = _indices(rows.logprobs, logits.device)
    return log_probabilities(logits[index], tokens[index].long(), rows.most_logprobs)


def logprobs_by_row(rows: LogitRows, found: tuple[Tensor, Tensor, Tensor]) -> dict[int, LogRow]:
    """What `row_logprobs` found, on the host."""
    return dict(zip(rows.logprobs, zip(*(each.tolist() for each in found), strict=True), strict=True))


def _accepted(chunks: Sequence[Chunk], values: list[int]) -> list[int]:
    """How many drafts of each drawing chunk equal what was drawn at their place, from the first on."""
    counts: list[int] = []
    row = 0
    for chunk in chunks:
        if (draw := chunk.draw) is None:
            continue
        right = 0
        if draw.drafts:
            for draft, value in zip(chunk.tokens[-draw.drafts :].tolist(), values[row:], strict=False):
                if draft != value:
                    break
                right += 1
        counts.append(right)
        row += draw.drafts + 1
    return counts


def by_chunk(
    chunks: Sequence[Chunk], values: list[int], accepted: list[int], logprobs: dict[int, LogRow]
) -> tuple[Drawn | None, ...]:
    """Per chunk the accepted drafts and the token after them; `accepted[s]` belongs to the s-th chunk that draws."""
    result: list[Drawn | None] = []
    row, rights = 0, iter(accepted)
    for chunk in chunks:
        if (draw := chunk.draw) is None:
            result.append(None)
            continue
        count = next(rights) + 1
        kept = tuple(values[row : row + count])
        wanted = draw.sampling.logprobs
        logs = (
            () if wanted is None else tuple(_token_logprobs(kept[i], logprobs[row + i], wanted) for i in range(count))
        )
        result.append(Drawn(kept, logs))
        row += draw.drafts + 1
    return tuple(result)


def _token_logprobs(token: int, row: LogRow, wanted: int) -> TokenLogprobs:
    chosen, values, ids = row
    return TokenLogprobs(token, chosen, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
