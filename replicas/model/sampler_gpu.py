"""Choosing tokens on a GPU without waiting for it: `sampler`'s maths, by the kernels of `kernels.sampling_gpu`.

What rows ask for goes over as arrays with the step's other inputs (`settings`); `begin` draws and verifies all rows of
all sequences in two launches, and three before them where something is filtered, or takes what a graph has drawn, which
is greedy; `Draws.finish` reads ids and accepted counts once they have come. Rows with bias, penalties or masks are no
exception: their logits are changed on the device before, for which masks cross over on their own, since they are worked
out while the forward runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.kv import Array
from holdfast.kernels.sampling import row_keys
from holdfast.kernels.sampling_gpu import cutoffs, draw_and_verify
from holdfast.replicas.model.graphs import Replayed
from holdfast.replicas.model.sampler import LogitRows, adjusted, by_chunk, group_rows, logprobs_by_row, row_logprobs
from holdfast.replicas.plan import Chunk, Drawn

_ALIGNED = 16  # elements


@dataclass(frozen=True, slots=True)
class Settings:
    """What the rows of a step ask for. `arrays`, to be sent to the device, in the order that `begin` takes them:

    first rows [S + 1] int32, drafts [R] int32; where a row is `sampled` temperatures [R] float32 (0: greedy) and noise
    keys [R, 2] int32; where one is `filtered` top_k [R] int32, top_p and min_p [R] float32.
    """

    rows: LogitRows
    arrays: tuple[Array, ...]
    sampled: bool
    filtered: bool


def settings(chunks: Sequence[Chunk], vocabulary: int) -> Settings:
    """What the chunks of a step draw, of which at least one does."""
    rows = group_rows(chunks, vocabulary)
    drawing = [chunk for chunk in chunks if chunk.draw is not None]
    counts = [chunk.draw.drafts + 1 for chunk in drawing if chunk.draw is not None]
    first = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=first[1:])
    drafts = np.zeros(int(first[-1]), np.int32)
    for chunk, at, count in zip(drawing, first.tolist(), counts, strict=False):
        if count > 1:
            drafts[at : at + count - 1] = chunk.tokens[len(chunk.tokens) - count + 1 :]
    arrays: tuple[Array, ...] = (first, drafts)
    filtered = False
    if rows.sampled:
        temperatures, keys = np.zeros(len(drafts), np.float32), np.zeros((len(drafts), 2), np.int32)
        temperatures[rows.sampled] = [s.temperature for s in rows.settings]
        keys[rows.sampled] = row_keys(rows.seeds, rows.positions)
        arrays += (temperatures, keys)
        filtered = any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in rows.settings)
    if filtered:
        top_k, top_p = np.zeros(len(drafts), np.int32), np.ones(len(drafts), np.float32)
        min_p = np.zeros(len(drafts), np.float32)
        top_k[rows.sampled] = [max(0, s.top_k) for s in rows.settings]
        top_p[rows.sampled] = [s.top_p for s in rows.settings]
        min_p[rows.sampled] = [s.min_p for s in rows.settings]
        arrays += (top_k, top_p, min_p)
    return Settings(rows, arrays, bool(rows.sampled), filtered)


@dataclass(slots=True)
class Draws:
    """Tokens that are being drawn. `drawn` [R] int32 is on the device, for the step after this one.

    `results` is on the host: drawn tokens, and from `accepted` on a count of accepted drafts for each of `sequences`.
    Valid once the device has got so far.
    """

    drawn: Tensor
    results: Tensor
    accepted: int
    sequences: int
    rows: LogitRows
    logprobs: tuple[Tensor, Tensor, Tensor] | None

    def finish(self, chunks: Sequence[Chunk]) -> tuple[Drawn | None, ...]:
        """What was drawn for each chunk."""
        values = self.results.tolist()
        tokens, accepted = values[: len(self.drawn)], values[self.accepted : self.accepted + self.sequences]
        found = logprobs_by_row(self.rows, self.logprobs) if self.logprobs is not None else {}
        return by_chunk(chunks, tokens, accepted, found)


@torch.inference_mode()
def begin(logits: Tensor, asked: Settings, views: Sequence[Tensor], drawn: Replayed | None = None) -> Draws:
    """Draw from `logits` [R, vocabulary]. `views` are `asked.arrays` on the device; `drawn`: what a graph has drawn."""
    rows, (first, drafts, *noise) = asked.rows, views
    if drawn is not None and not asked.sampled and not rows.adjusted:
        greedy = drawn.greedy
        found = row_logprobs(logits, greedy[: len(drafts)], rows) if rows.logprobs else None
        return Draws(greedy[: len(drafts)], to_host(greedy), drawn.accepted, len(first) - 1, rows, found)
    scores = adjusted(logits, rows) if rows.adjusted else logits
    temperatures, keys = (noise[0], noise[1]) if asked.sampled else (None, None)
    cutoff = None
    if asked.filtered and temperatures is not None:
        hot = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        cutoff = cutoffs(scores.float() / hot, *noise[2:])
    # One tensor, so one copy brings both back; the counts begin where a kernel's pointers like to.
    sequences, ahead = len(first) - 1, -(-len(drafts) // _ALIGNED) * _ALIGNED
    results = torch.empty(ahead + sequences, dtype=torch.int32, device=logits.device)
    out = (results[: len(drafts)], results[ahead:])
    tokens, _ = draw_and_verify(scores, first, drafts, temperatures, keys, cutoff, out)
    found = row_logprobs(logits, tokens, rows) if rows.logprobs else None
    return Draws(tokens, to_host(results), ahead, sequences, rows, found)


def to_host(results: Tensor) -> Tensor:
    """A copy on the host, which the device makes when it gets so far."""
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=results.device.type == "cuda")
    return host.copy_(results, non_blocking=True)
