"""Tiny models are computed by one thread: two would mostly wait for each other."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
