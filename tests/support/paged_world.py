"""A paged store with some sequences in it, and the queries of their last tokens: what attention is tested on."""

import numpy as np
import torch

from holdfast.kernels.attention import paged_attention, paged_attention_reference
from holdfast.kernels.kv import FP8, PagedBatch, in_bytes, in_store, page_runs, store_kv

LAYERS = 2
POISON = torch.nan  # in every cell that no sequence has written; in scores or outputs it would show


class PagedWorld:
    """Sequences as `(start, length)`: what is cached, and the tokens of the step. Works on layer 1.

    `scattered`: 0 keeps a sequence's pages together, 1 puts every page elsewhere. `common`: so many leading cells are
    the same pages in every sequence that has them. `int8`: the store is, heads first; `fp8`: the store is.
    """

    def __init__(
        self,
        spans,
        page_size,
        kv_heads,
        group,
        dim,
        dtype,
        seed,
        scattered=0.0,
        heads_first=True,
        common=0,
        int8=False,
        fp8=False,
        device="cpu",
    ):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        used = [-(-(start + length) // page_size) for start, length in spans]
        pages = sum(used) + 3
        order = np.arange(pages)
        if scattered:
            blocks = np.array_split(order, max(1, int(pages * scattered)))
            order = np.concatenate([blocks[i] for i in rng.permutation(len(blocks))])
        table = np.full((len(spans), max(used)), pages - 1, dtype=np.int32)
        written, cells = np.zeros((pages, page_size), dtype=bool), []
        for row, (count, (start, length)) in enumerate(zip(used, spans, strict=True)):
            table[row, :count] = order[sum(used[:row]) :][:count]
            shared = min(common, start) // page_size
            table[row, :shared] = order[:shared]
            positions = np.arange(start + length)
            written[table[row, positions // page_size], positions % page_size] = True
            new = positions[start:]
            cells.append(table[row, new // page_size].astype(np.int64) * page_size + new % page_size)
        if heads_first:
            self.kv = torch.randn(LAYERS, 2, kv_heads, pages, page_size, dim).permute(0, 1, 3, 4, 2, 5).to(dtype)
        else:
            self.kv = torch.randn(LAYERS, 2, pages, page_size, kv_heads, dim).to(dtype)
        self.kv[:, :, torch.from_numpy(~written)] = POISON
        if int8:  # as it lies in memory
            self.kv = in_bytes(self.kv.permute(0, 1, 4, 2, 3, 5)).permute(0, 1, 3, 4, 2, 5)
        if fp8:
            self.kv = in_store(self.kv, FP8)
        self.kv = self.kv.to(device)
        total = sum(length for _, length in spans)
        # As a projection may leave them: heads before tokens, and tokens before heads.
        self.q = torch.randn(kv_heads * group, total, dim).to(device, dtype).transpose(0, 1)
        self.k = torch.randn(kv_heads, total, dim).to(device, dtype).transpose(0, 1)
        self.v = torch.randn(total, kv_heads, dim).to(device, dtype)
        self.batch = PagedBatch(
            page_size=page_size,
            page_table=torch.from_numpy(table).to(device),
            rows=range(len(spans)),
            starts=[start for start, _ in spans],
            lengths=[length for _, length in spans],
            cells=torch.from_numpy(np.concatenate(cells)).to(device),
            runs=[page_runs(table[row, :count]) for row, count in enumerate(used)],
        )
        store_kv(self.kv, 1, self.k, self.v, self.batch.cells)

    def sinks(self, size):
        """A sink for each head, about as great as `size`; None: none."""
        return None if size is None else size * torch.randn(self.q.shape[1]).to(self.q.device)

    def attend(self, window=None, softcap=None, sinks=None):
        return paged_attention(self.q, self.kv, 1, self.batch, 0.3, window, softcap, sinks)

    def reference(self, window=None, softcap=None, dtype=torch.float64, sinks=None):
        return paged_attention_reference(self.q, self.kv, 1, self.batch, 0.3, window, softcap, dtype, sinks)


def relative_error(got, exact):
    """Of the whole tensor, by norm."""
    exact = exact.double().cpu()
    return float((got.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-30))


def largest_error(found, exact):
    """Relative to the largest value."""
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max().clamp_min(1e-30))
