"""What this machine lacks is emulated; what a test does to torch's threads ends with it."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from c_kernels import Emulated


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Emulated]:
    return functools.cache(lambda name: Emulated(name, tmp_path_factory))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
