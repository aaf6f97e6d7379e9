"""The type of token ids, below everything else."""

from dataclasses import dataclass
from typing import TypeAlias, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.int32]


# ---- Frozen dataclasses for what is made in every step, most of it for every sequence, where making it takes time.
#
# A type checker refuses to change one; the interpreter does not look, which makes them four times as fast to make as
# with
# `frozen=True`. For everything else that is plain frozen data: `dataclass(frozen=True, slots=True)`.


T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that nobody changes."""
    return dataclass(slots=True)(cls)
