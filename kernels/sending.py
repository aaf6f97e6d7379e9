"""Arrays from the host to a device, without waiting for what that is still doing."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on a device, through pinned memory: from any other the copy would wait for all that a GPU has to do."""
    tensor = torch.from_numpy(array)
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
