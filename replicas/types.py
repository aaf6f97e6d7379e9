"""What every room of `replicas` may know: token ids, classes of requests, and frozen data that is cheap to make."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

TokenIds: TypeAlias = npt.NDArray[np.int32]

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


class Priority(StrEnum):
    """The class of a request: somebody waits for it, or it takes what those leave."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


RANKS = tuple(Priority)  # the last one's requests give way first


def salted(tenant: str, salt: str) -> str:
    """A tenant's cache scope, or with a salt a part of it. What stands behind a NUL names the part."""
    return f"{tenant}\0salt\0{salt}" if salt else tenant


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many leading ids `a` and `b` have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that nobody changes, for what is made in every step, most of it for every sequence.

    A type checker refuses to change one; the interpreter does not look, which makes it four times as fast to make as
    with `frozen=True`. All other plain frozen data is `dataclass(frozen=True, slots=True)`.
    """
    return dataclass(slots=True)(cls)
