"""Which of float32 and bfloat16 a CPU computes a model in faster: products of its sizes, timed when it is loaded.

Asked only where both are the model's own numbers as they are in the checkpoint, and only for models that wait for
memory; a small one stays in float32, the more exact.
"""

import time
from typing import Any

import torch

from holdfast.kernels.linear import PACKED_BYTES, Matrix, can_pack
from holdfast.replicas.config import DType

_ROWS = (1, 8)  # a decode step, and a verification window
_MATRICES_BYTES = 64 << 20  # so much of bfloat16 is streamed, beyond most caches
_GAIN = 1.2  # what bfloat16 must be faster by


def faster_dtype(config: Any, checkpoint: DType) -> DType:
    """float32 or bfloat16, for the transformers configuration and the dtype of a checkpoint.

    Takes about a second on one thread, because several wait for each other where others use the machine, and then all
    dtypes look alike. float32 for all but checkpoints in bfloat16.
    """
    if checkpoint != "bfloat16":
        return "float32"
    text = config.get_text_config(decoder=True)
    outputs, inputs = getattr(text, "intermediate_size", 0), getattr(text, "hidden_size", 0)
    if 2 * outputs * inputs < PACKED_BYTES or not can_pack(torch.empty(outputs, inputs, dtype=torch.bfloat16)):
        return "float32"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gain = _seconds(outputs, inputs, torch.float32) / _seconds(outputs, inputs, torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    return "bfloat16" if gain > _GAIN else "float32"


@torch.inference_mode()
def _seconds(outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Products of `_ROWS` rows each with enough matrices [outputs, inputs] to leave the caches; least of four."""
    count = max(2, _MATRICES_BYTES // (2 * outputs * inputs))
    matrices = [Matrix(torch.full((outputs, inputs), 0.01, dtype=dtype)) for _ in range(count)]
    batches = [torch.ones(rows, inputs, dtype=dtype) for rows in _ROWS]
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        for x in batches:
            for matrix in matrices:
                matrix(x)
        taken.append(time.perf_counter() - began)
    return min(taken)
