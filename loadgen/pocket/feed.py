"""Pools of training batches in order, made ahead by worker processes; what is made does not depend on how many."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer

from holdfast.loadgen.pocket.batches import Batch, Mix, batches
from holdfast.loadgen.pocket.tokenizer import load


@dataclass(frozen=True, slots=True)
class Order:
    """A pool to be made: everything that determines its batches beside the tokenizer."""

    seed: int
    pool: int
    tokens: int
    mix: Mix


def feed(orders: Iterable[Order], folder: Path, workers: int) -> Iterator[list[Batch]]:
    """The batches of every order, in order; the tokenizer lies in ``folder``.

    Without workers a pool is made when it is asked for; with them each worker has one pool in the making and one
    more is waiting.
    """
    if not workers:
        tokenizer = load(folder)
        for order in orders:
            yield made(order, tokenizer)
        return
    # Not forked: the parent may have started CUDA.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (folder,)) as executor:
        waiting: deque[Future[list[Batch]]] = deque()
        try:
            for order in orders:
                waiting.append(executor.submit(_make, order))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def made(order: Order, tokenizer: Tokenizer) -> list[Batch]:
    """The batches of one pool."""
    return list(batches(tokenizer, order.seed, order.pool, order.tokens, order.mix))


_tokenizers: list[Tokenizer] = []
"""Of a worker process: the tokenizer it was started with."""


def _start(folder: Path) -> None:
    torch.set_num_threads(1)
    _tokenizers.append(load(folder))


def _make(order: Order) -> list[Batch]:
    return made(order, _tokenizers[0])
