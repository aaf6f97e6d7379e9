"""What the runner needs of a model, whichever computes it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from holdfast.replicas.model.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and their size, and the layers' windows, each once; 0: none."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Model(Protocol):
    """A batch in; logits [R, vocabulary] of its drawn tokens out, KV stored on the way.

    `attention` lets a step's attention be worked out beforehand; None: the model asks for it layer by layer.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def attention(self) -> AttentionShape | None: ...

    def forward(self, batch: StepBatch) -> Tensor: ...
