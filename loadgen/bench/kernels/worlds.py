"""Sequences in a paged store, made for verifying and timing the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.paging import PagedBatch, page_runs


@dataclass(slots=True)
class Paged:
    """Sequences in a store: queries of the tokens of a step, and where everything lies."""

    q: Tensor
    kv: Tensor
    batch: PagedBatch


def paged(
    spans: Sequence[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    page_size: int = 16,
    common: int = 0,
) -> Paged:
    """Sequences of (cached, new) tokens over pages in random order; cells nobody wrote hold NaN.

    The first `common` cells are the same pages for all.
    """
    rng = np.random.default_rng(0)
    used = [-(-(start + length) // page_size) for start, length in spans]
    order = rng.permutation(sum(used) + 3).astype(np.int32)
    table = np.full((len(spans), max(used)), order[-1], np.int32)
    at = 0
    for row, (count, (start, _)) in enumerate(zip(used, spans, strict=True)):
        table[row, :count] = order[at : at + count]
        shared = min(common, start) // page_size
        table[row, :shared] = order[:shared]
        at += count
    torch.manual_seed(0)
    kv = torch.full((1, 2, len(order), page_size, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    for row, (start, length) in enumerate(spans):
        cells = _cells(table[row], np.arange(start + length), page_size, device)
        kv[0].flatten(1, 2)[:, cells] = torch.randn(2, start + length, kv_heads, dim, device=device).to(dtype)
    new = [
        _cells(table[row], np.arange(start, start + length), page_size, device)
        for row, (start, length) in enumerate(spans)
    ]
    tokens = sum(length for _, length in spans)
    batch = PagedBatch(
        page_size=page_size,
        page_table=torch.from_numpy(table).to(device),
        rows=range(len(spans)),
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        cells=torch.cat(new),
        runs=[page_runs(table[row, :count]) for row, count in enumerate(used)],
    )
    return Paged(torch.randn(tokens, kv_heads * group, dim, device=device).to(dtype), kv, batch)


def _cells(row: "np.ndarray[tuple[int], np.dtype[np.int32]]", positions: object, size: int, device: str) -> Tensor:
    where = np.asarray(positions)
    return torch.from_numpy(row[where // size].astype(np.int64) * size + where % size).to(device)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Of the whole tensor, by norm."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())
