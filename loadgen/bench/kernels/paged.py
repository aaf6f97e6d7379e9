"""Sequences in a paged store, as attention's timings and `tools/compile_kernels.py` need them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.kv import PagedBatch, in_store, page_runs


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
    stored: torch.dtype | None = None,
) -> Paged:
    """Sequences of (cached, new) tokens over pages in random order.

    The first `common` cells are the same pages for all. `stored`: the dtype of the store; None: `dtype`.
    """
    used = [-(-(start + length) // page_size) for start, length in spans]
    order = np.random.default_rng(0).permutation(sum(used) + 1).astype(np.int32)
    table = np.full((len(spans), max(used)), order[-1], np.int32)
    cells, at = [], 0
    for row, (count, (start, length)) in enumerate(zip(used, spans, strict=True)):
        table[row, :count] = order[at : at + count]
        shared = min(common, start) // page_size
        table[row, :shared] = order[:shared]
        at += count
        new = np.arange(start, start + length)
        cells.append(table[row, new // page_size].astype(np.int64) * page_size + new % page_size)
    torch.manual_seed(0)
    kv = torch.randn(1, 2, len(order), page_size, kv_heads, dim, device=device).to(dtype)
    batch = PagedBatch(
        page_size=page_size,
        page_table=torch.from_numpy(table).to(device),
        rows=range(len(spans)),
        starts=[start for start, _ in spans],
        lengths=[length for _, length in spans],
        cells=torch.from_numpy(np.concatenate(cells)).to(device),
        runs=[page_runs(table[row, :count]) for row, count in enumerate(used)],
    )
    q = torch.randn(sum(batch.lengths), kv_heads * group, dim, device=device).to(dtype)
    return Paged(q, in_store(kv, stored or dtype), batch)
