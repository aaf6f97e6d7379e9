"""Choosing tokens: from logits of the drawn positions and the plan's draws to token ids on the host.

`sample` waits for the device. On a GPU `begin` does not. `settings`, what rows ask for, crosses with the step's other
inputs. Two launches draw and verify all rows, three more where something is filtered. `Draws.finish` reads the ids once
they have come. Logits stay on the device: ids cross back, and log probabilities where asked for.

A chunk of n tokens with d drafts has d + 1 rows. Row i draws the token after the chunk's token n - 1 - d + i, as if the
drafts before it were right. Drafts are accepted from the first on as long as they equal what was drawn in their place.

Before a token is chosen a row's logits are changed by its repetition penalty, then by its bias, by its other penalties
and by its mask. Penalties come from counts that the sequence keeps (`TokenCounts`); a draft counts as generated in the
rows after it. Masks of constrained sequences are packed 32 tokens to a word and cross in one copy for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.kernels.kv import Array, sent
from holdfast.kernels.sampling import Filters, greedy, gumbel_argmax, log_probabilities, row_keys
from holdfast.replicas.constraints.matcher import Bits, RowMasks
from holdfast.replicas.plan import Chunk, Draw, Drawn, Sampling, TokenLogprobs

_COLD = 1e-5  # a temperature below is greedy: dividing by it would leave the range of float32
_NOT_YET = -1e9  # bias of tokens that would end a reply too soon: one is drawn only where a mask leaves nothing else

LogRow: TypeAlias = tuple[float, list[float], list[int]]


class RowEdit(NamedTuple):
    """Changes to some logits of one row: `values` [n] float32 for `tokens` [n] int64, all different."""

    row: int
    tokens: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(slots=True)
class LogitRows:
    """Rows of the logits by what they need; lists of row indices and their settings."""

    sampled: list[int] = field(default_factory=list)
    settings: list[Sampling] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    scales: list[RowEdit] = field(default_factory=list)  # repetition penalties: positive logits are divided
    biases: list[RowEdit] = field(default_factory=list)  # added
    penalties: list[RowEdit] = field(default_factory=list)  # added
    logprobs: list[int] = field(default_factory=list)
    most_logprobs: int = 0
    masked: list[int] = field(default_factory=list)
    masks: list[RowMasks] = field(default_factory=list)

    @property
    def adjusted(self) -> bool:
        """Whether tokens are chosen from other logits than the model's."""
        return bool(self.scales or self.biases or self.penalties or self.masks)


def group_rows(chunks: Sequence[Chunk], vocabulary: int) -> LogitRows:
    """The settings of every row of a step."""
    rows = LogitRows()
    row = 0
    for chunk in chunks:
        if (draw := chunk.draw) is None:
            continue
        sampling, count = draw.sampling, draw.drafts + 1
        if draw.bare:
            row += count
            continue
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
        if draw.seen is not None or draw.counts is not None:
            _count(rows, draw, row, chunk.tokens[len(chunk.tokens) - draw.drafts :].tolist())
        if sampling.logprobs is not None:
            rows.logprobs += span
            rows.most_logprobs = max(rows.most_logprobs, sampling.logprobs)
        if draw.masks is not None:
            rows.masked += span
            rows.masks.append(draw.masks)
        row += count
    return rows


def _bias(rows: range, bias: Mapping[int, float], vocabulary: int) -> list[RowEdit]:
    """One bias for some rows."""
    inside = {token: each for token, each in bias.items() if 0 <= token < vocabulary}
    if not inside:
        return []
    tokens, values = np.array(list(inside), np.int64), np.array(list(inside.values()), np.float32)
    return [RowEdit(row, tokens, values) for row in rows]


def _count(rows: LogitRows, draw: Draw, first: int, drafts: list[int]) -> None:
    """The penalties of a chunk's rows, which begin with row `first`."""
    sampling = draw.sampling
    if draw.seen is not None:
        for i, (ids, _) in enumerate(draw.seen.after(drafts)):
            penalty = np.full(len(ids), sampling.repetition_penalty, np.float32)
            rows.scales.append(RowEdit(first + i, ids.copy(), penalty))
    if draw.counts is not None:
        for i, (ids, times) in enumerate(draw.counts.after(drafts)):
            if len(ids):
                values = -sampling.presence_penalty - sampling.frequency_penalty * times
                rows.penalties.append(RowEdit(first + i, ids, values.astype(np.float32)))


# ---- waiting for the device ----


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
        logprobs = _logprobs_by_row(rows, _row_logprobs(logits, tokens, rows)) if rows.logprobs else {}
    return _by_chunk(chunks, values, _accepted(chunks, values), logprobs)


def with_predictions(
    logits: Tensor, chunks: Sequence[Chunk], drawn: tuple[Drawn | None, ...]
) -> tuple[Drawn | None, ...]:
    """`drawn` with the token that is predicted to come after it, from `logits` [S, vocabulary] of the chunks that draw.

    It is drawn with the noise of its position, as the token itself will be, so that the two are often equal. Penalties
    and masks are left to verification.
    """
    if not logits.shape[0]:
        return drawn
    after = []
    for chunk, result in zip(chunks, drawn, strict=True):
        if result is not None and (draw := chunk.draw) is not None:
            last = chunk.start + len(chunk.tokens) - draw.drafts + len(result.tokens) - 1
            token = np.array(result.tokens[-1:], np.int32)
            after.append(Chunk(chunk.row, last, token, Draw(draw.sampling, draw.seed, least=draw.least)))
    with torch.inference_mode():
        return _predicting(drawn, _draw(logits, group_rows(after, logits.shape[1])).tolist())


def _predicting(drawn: tuple[Drawn | None, ...], tokens: Sequence[int]) -> tuple[Drawn | None, ...]:
    """`drawn` with `tokens`, one for each chunk that draws."""
    rest = iter(tokens)
    return tuple(None if result is None else replace(result, predicted=next(rest)) for result in drawn)


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


def _filters(settings: list[Sampling], device: torch.device) -> Filters | None:
    if not _filtered(settings):
        return None
    return Filters(
        top_k=torch.tensor([[max(0, s.top_k)] for s in settings], device=device),
        top_p=torch.tensor([[s.top_p] for s in settings], device=device, dtype=torch.float32),
        min_p=torch.tensor([[s.min_p] for s in settings], device=device, dtype=torch.float32),
    )


def _filtered(settings: list[Sampling]) -> bool:
    return any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in settings)


def _accepted(chunks: Sequence[Chunk], values: list[int]) -> list[int]:
    """How many drafts of each drawing chunk equal what was drawn in their place, from the first on."""
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


# ---- changes to logits ----


def adjusted(logits: Tensor, rows: LogitRows) -> Tensor:
    """The logits in float32 after penalties, bias and masks; a new tensor where there are any.

    Raises IndexError for a penalised token beyond the vocabulary.
    """
    scores = logits.float()
    if rows.scales or rows.biases or rows.penalties:
        scores = scores.clone() if scores is logits else scores
        flat = scores.view(-1)
        if rows.scales:
            places, penalty = _flat(scores, rows.scales)
            before = flat[places]
            flat[places] = torch.where(before > 0, before / penalty, before * penalty)
        for edits in (rows.biases, rows.penalties):
            if edits:  # no place comes twice, so the order of the sums does not matter
                flat.scatter_add_(0, *_flat(scores, edits))
    return _masked(scores, rows) if rows.masks else scores


def _flat(scores: Tensor, edits: Sequence[RowEdit]) -> tuple[Tensor, Tensor]:
    """Where in the flat `scores` the tokens of edits of different rows are, and their values; on the device."""
    vocabulary = scores.shape[1]
    tokens = np.concatenate([edit.tokens for edit in edits])
    if len(tokens) and tokens.max() >= vocabulary:
        raise IndexError(f"token {tokens.max()} is penalised, but the vocabulary has {vocabulary}")
    firsts = np.array([edit.row * vocabulary for edit in edits], np.int64)
    places = tokens + np.repeat(firsts, [len(edit.tokens) for edit in edits])
    return sent(places, scores.device), sent(np.concatenate([edit.values for edit in edits]), scores.device)


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
    """The tokens that packed masks forbid, bool [rows, 32 * words]; they cross to a GPU packed."""
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


# ---- results ----


def _row_logprobs(logits: Tensor, tokens: Tensor, rows: LogitRows) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows that ask for it, the drawn token's log probability and the most likely ones with their ids, before
    any setting touched the logits. [rows.logprobs], then twice [rows.logprobs, rows.most_logprobs]."""
    index = _indices(rows.logprobs, logits.device)
    return log_probabilities(logits[index], tokens[index].long(), rows.most_logprobs)


def _logprobs_by_row(rows: LogitRows, logprobs: tuple[Tensor, Tensor, Tensor]) -> dict[int, LogRow]:
    """The result of `_row_logprobs` by row, on the host."""
    return dict(zip(rows.logprobs, zip(*(each.tolist() for each in logprobs), strict=True), strict=True))


def _by_chunk(
    chunks: Sequence[Chunk], values: list[int], accepted: list[int], logprobs: dict[int, LogRow]
) -> tuple[Drawn | None, ...]:
    """Per chunk the accepted drafts and the token after them; `accepted[s]` belongs to the s-th chunk that draws."""
    result: list[Drawn | None] = []
    row, rights = 0, iter(accepted)
    for chunk in chunks:
        if (draw := chunk.draw) is None:
            result.append(None)
            continue
        kept = tuple(values[row : row + next(rights) + 1])
        logs: tuple[TokenLogprobs, ...] = ()
        if (n_logprobs := draw.sampling.logprobs) is not None:
            logs = tuple(_token_logprobs(token, logprobs[row + i], n_logprobs) for i, token in enumerate(kept))
        result.append(Drawn(kept, logs))
        row += draw.drafts + 1
    return tuple(result)


def _token_logprobs(token: int, row: LogRow, n_logprobs: int) -> TokenLogprobs:
    chosen, values, ids = row
    return TokenLogprobs(token, chosen, tuple(zip(ids[:n_logprobs], values[:n_logprobs], strict=True)))


# ---- on a GPU, without waiting ----


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling settings of a step's rows. `arrays` go to the device, in the order that `begin` takes them:

    first rows [S + 1] int32, drafts [R] int32; where a row is sampled temperatures [R] float32 (0: greedy) and noise
    keys [R, 2] int32; where one is filtered top_k [R] int32, top_p and min_p [R] float32.
    """

    rows: LogitRows
    arrays: tuple[Array, ...]

    def keys_after(self) -> tuple[Array, ...]:
        """Noise keys [R, 2] int32 of the position after each row's, where a row is sampled."""
        rows = self.rows
        if not rows.sampled:
            return ()
        keys = np.zeros((len(self.arrays[1]), 2), np.int32)
        keys[rows.sampled] = row_keys(rows.seeds, [position + 1 for position in rows.positions])
        return (keys,)


def settings(chunks: Sequence[Chunk], vocabulary: int, tokens: npt.NDArray[np.integer[Any]]) -> Settings:
    """The settings of the chunks of a step, at least one of which draws. `tokens` [R]: the one before each row."""
    rows = group_rows(chunks, vocabulary)
    first = np.array([0, *accumulate([draw.drafts + 1 for chunk in chunks if (draw := chunk.draw)])], np.int32)
    size = len(tokens)
    drafts = np.empty(size, np.int32)
    drafts[:-1] = tokens[1:]  # in the row of the token before it
    drafts[first[1:] - 1] = 0  # no draft follows the last one
    arrays: list[Array] = [first, drafts]

    def per_row(values: Sequence[float], dtype: type, default: float = 0) -> None:
        arrays.append(np.full(size, default, dtype))
        arrays[-1][rows.sampled] = values

    if rows.sampled:
        per_row([s.temperature for s in rows.settings], np.float32)
        keys = np.zeros((size, 2), np.int32)
        keys[rows.sampled] = row_keys(rows.seeds, rows.positions)
        arrays.append(keys)
    if _filtered(rows.settings):
        per_row([max(0, s.top_k) for s in rows.settings], np.int32)
        per_row([s.top_p for s in rows.settings], np.float32, 1)
        per_row([s.min_p for s in rows.settings], np.float32)
    return Settings(rows, tuple(arrays))


def counts_begin(rows: int) -> int:
    """Where the accepted counts begin behind so many drawn tokens: aligned as kernels like their pointers."""
    return -(-rows // 16) * 16


@dataclass(slots=True)
class Draws:
    """Tokens that are being drawn. `drawn` [R] int32 is on the device, for the step after this one, and so is `counts`
    [S] int32 of accepted drafts.

    `results` is on the host: drawn tokens, and from `accepted` on a count of accepted drafts for each of `sequences`.
    `predicted` [S] int32 is there as well: the tokens after them, where the model predicts these. Valid once the device
    has got so far.
    """

    drawn: Tensor
    counts: Tensor
    results: Tensor
    accepted: int
    sequences: int
    rows: LogitRows
    logprobs: tuple[Tensor, Tensor, Tensor] | None
    predicted: Tensor | None = None

    def finish(self, chunks: Sequence[Chunk]) -> tuple[Drawn | None, ...]:
        """The tokens drawn for each chunk."""
        values = self.results.tolist()
        tokens, accepted = values[: len(self.drawn)], values[self.accepted : self.accepted + self.sequences]
        logprobs = _logprobs_by_row(self.rows, self.logprobs) if self.logprobs is not None else {}
        drawn = _by_chunk(chunks, tokens, accepted, logprobs)
        return drawn if self.predicted is None else _predicting(drawn, self.predicted.tolist())


@torch.inference_mode()
def begin(
    logits: Tensor, settings: Settings, views: Sequence[Tensor], replayed: tuple[Tensor, int] | None = None
) -> Draws:
    """Draw from `logits` [R, vocabulary]. `views` are `asked.arrays` on the device.

    `replayed`: greedy draws of a graph as int32, and where accepted counts begin behind them. They are taken where
    nothing else is asked for.
    """
    from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify  # needs Triton

    rows, (first, drafts, *noise) = settings.rows, views
    sequences = len(first) - 1
    if replayed is not None and not noise and not rows.adjusted:
        results, ahead = replayed
        tokens = results[: len(drafts)]
    else:
        scores = adjusted(logits, rows) if rows.adjusted else logits
        temperatures, keys, *limits = noise or (None, None)
        cutoff = None
        if limits and temperatures is not None:
            hot = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
            cutoff = cutoffs(scores.float() / hot, *limits)
        ahead = counts_begin(len(drafts))  # one tensor, so one copy brings both back
        results = torch.empty(ahead + sequences, dtype=torch.int32, device=logits.device)
        out = (results[: len(drafts)], results[ahead:])
        tokens, _ = draw_and_verify(scores, first, drafts, temperatures, keys, cutoff, out)
    logprobs = _row_logprobs(logits, tokens, rows) if rows.logprobs else None
    counts = results[ahead : ahead + sequences]
    return Draws(tokens, counts, _to_host(results), ahead, sequences, rows, logprobs)


def _to_host(results: Tensor) -> Tensor:
    """A copy on the host, valid once the device has got so far."""
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=results.device.type == "cuda")
    return host.copy_(results, non_blocking=True)


@torch.inference_mode()
def predict(logits: Tensor, rows: Tensor, views: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
    """Draw the tokens that are predicted, [S] int32 on the host, valid once the device has got so far.

    `logits` [S, vocabulary]; `rows` [S] int64: the draws after which they come; `views`: those of `begin`; `keys`:
    `Settings.keys_after` on the device. As `with_predictions` does on a CPU.
    """
    from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify  # needs Triton

    _, drafts, *noise = views
    alone = torch.arange(len(rows) + 1, dtype=torch.int32, device=logits.device)
    if not noise:
        tokens, _ = draw_and_verify(logits, alone, drafts[: len(rows)])
        return _to_host(tokens)
    temperatures, _, *limits = (each[rows] for each in noise)
    cutoff = None
    if limits:
        hot = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        cutoff = cutoffs(logits.float() / hot, *limits)
    tokens, _ = draw_and_verify(logits, alone, drafts[: len(rows)], temperatures, keys[0][rows], cutoff)
    return _to_host(tokens)
