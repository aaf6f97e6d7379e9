"""Writing into the paged KV store: new tokens' keys and values, and copies of the first cells of a page.

The store is `[layers, 2, pages, page_size, kv_heads, head_dim]`; index 1 is key (0) or value (1). Any order in memory
will do in which the cells of neighbouring pages are evenly spaced: stores and copies go through strided views.
Aliasing a page costs nothing here: it is a number in a page table.

A store in int8 has head_dim + 4 bytes where another one has head_dim numbers: of a head's key x, or its value,

    s = max_d |x_d| / 127,    q_d = round(x_d / s)              q as bytes, behind them s as a float32;  x is about q s

So each has the step that it needs, whatever heads and tokens are beside it, and a cell is written once and never again.
"""

import torch
from torch import Tensor

from holdfast.kernels.int8 import quantise

SCALE = 4  # bytes of a scale


def head_dim(kv: Tensor) -> int:
    """Numbers of a head's key or value in a store."""
    return kv.shape[5] - SCALE if kv.dtype == torch.int8 else kv.shape[5]


def in_bytes(x: Tensor) -> Tensor:
    """Keys or values [..., head_dim] as a store in int8 has them: [..., head_dim + 4]."""
    numbers, scales = quantise(x.reshape(-1, x.shape[-1]))
    return torch.cat((numbers, scales.view(torch.int8)), 1).view(*x.shape[:-1], -1)


def in_numbers(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What a store has [..., head_dim, or in int8 head_dim + 4], in `dtype` [..., head_dim]."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    numbers, scales = torch.split(stored, [stored.shape[-1] - SCALE, SCALE], dim=-1)
    return (numbers.float() * scales.contiguous().view(torch.float32)).to(dtype)


def store_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
    """Write `k`, `v` [T, kv_heads, head_dim] of one layer into `cells` [T] int64 of the store, in place, in its dtype.

    Cells must differ from each other. Raises IndexError for a cell outside the store, ValueError for other shapes.
    """
    heads = kv.shape[4], head_dim(kv)
    if k.shape != v.shape or k.shape[1:] != heads or k.shape[0] != cells.shape[0]:
        raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit cells of {heads}")
    if kv.dtype == torch.int8:
        k, v = in_bytes(k), in_bytes(v)
    keys, values = kv[layer].flatten(1, 2).unbind(0)
    keys.index_copy_(0, cells, k)
    values.index_copy_(0, cells, v)


def store_kv_reference(kv: Tensor, layer: int, k: Tensor, v: Tensor, cells: Tensor) -> None:
    """`store_kv`, token by token."""
    page_size = kv.shape[3]
    for token, cell in enumerate(cells.tolist()):
        kv[layer, 0, cell // page_size, cell % page_size] = k[token]
        kv[layer, 1, cell // page_size, cell % page_size] = v[token]


def copy_cells(kv: Tensor, source: int, target: int, cells: int) -> None:
    """Copy the first `cells` cells of page `source` to page `target` in every layer, in place.

    Raises ValueError for a page outside the store, for more cells than a page has, or for a page onto itself.
    """
    pages, page_size = kv.shape[2], kv.shape[3]
    if not (0 <= source < pages and 0 <= target < pages) or source == target:
        raise ValueError(f"cannot copy page {source} to page {target} of {pages}")
    if not 0 < cells <= page_size:
        raise ValueError(f"cannot copy {cells} cells of a page of {page_size}")
    with torch.no_grad():
        kv[:, :, target, :cells].copy_(kv[:, :, source, :cells])
