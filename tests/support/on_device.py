"""Where tests of a GPU's kernels compute: on a GPU if there is one, else on a CPU, where Triton interprets them.

The tensors that these functions make lie there.
"""

from collections.abc import Callable
from functools import partial

import torch

from holdfast.kernels.attention_gpu import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

arange, full, ones, rand, randint, randn, randperm, tensor, zeros = (
    partial(each, device=DEVICE)
    for each in (
        torch.arange,
        torch.full,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.tensor,
        torch.zeros,
    )
)


def device_of(decoder: type) -> str:
    """Where the weights and the store of such a decoder lie."""
    from holdfast.replicas.model.decoder_gpu import GpuDecoder

    return DEVICE if issubclass(decoder, GpuDecoder) else "cpu"


def capture() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What captures graphs. On a CPU the call itself stands for its graph, over the same buffers."""
    if DEVICE == "cpu":
        return lambda call: call
    from holdfast.replicas.model.graphs import gpu_capture

    return gpu_capture()
