"""Any transformers causal LM over the paged KV store, through transformers' attention registry.

The model computes projections, norms and positions. Its attention calls come here, where keys and values are stored and
attention runs over pages. A step is one row of T tokens with their own positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from holdfast.kernels.attention import paged_attention
from holdfast.kernels.kv import PagedBatch
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import AttentionShape, ForwardBatch

ATTENTION = "holdfast"  # the name in the registry
_WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache"}  # arguments to ignore


class PagedState(NamedTuple):
    """The state that the attention calls of one forward share.

    `shapes` collects what layers asked for: heads, KV heads, their size, window or 0.
    """

    kv: KVTensors
    batch: PagedBatch
    shapes: set[tuple[int, int, int, int]]


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged_state: PagedState | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered attention. query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim];
    `s_aux` [heads] are sinks.

    Returns [1, T, heads, head_dim]. Raises ValueError outside of our steps, and for an unknown argument that would
    change the attention.
    """
    if paged_state is None:
        raise ValueError(f"{type(module).__name__} did not pass the step's state on to its attention")
    options = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := options - _WITHOUT_EFFECT:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(sorted(unknown))}, which is not known here")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    paged_state.shapes.add((q.shape[1], k.shape[1], q.shape[2], sliding_window or 0))
    layer: int = module.layer_idx  # type: ignore[assignment]
    kv, batch, _ = paged_state
    kv.store(layer, k, v, batch.cells)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return paged_attention(q, kv.data, layer, batch, scale, sliding_window, softcap, s_aux).unsqueeze(0), None


# No mask function is registered beside it: for an attention without one, transformers makes no mask at all.
AttentionInterface.register(ATTENTION, paged_attention_forward)


class AnyModel:
    """A loaded transformers model as a `Model`."""

    def __init__(self, model: nn.Module, kv: KVTensors) -> None:
        self._model = model
        self._kv = kv
        self._asked: set[tuple[int, int, int, int]] = set()

    @property
    def windowed(self) -> bool:
        """Whether a layer has asked for a sliding window so far."""
        return any(window for *_, window in self._asked)

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Known once the layers have asked for it; () where their heads differ."""
        if len({each[:3] for each in self._asked}) != 1:
            return ()
        (heads, kv_heads, size, _), *_ = self._asked
        return (AttentionShape(heads, kv_heads, size, tuple(sorted({window for *_, window in self._asked}))),)

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        return int(head.weight.shape[0]) if head is not None else int(self._model.config.vocab_size)  # type: ignore[union-attr, arg-type]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] of the batch's drawn tokens, in the model's dtype; stores the KV of all its tokens."""
        with torch.inference_mode():
            output = self._model(
                input_ids=batch.token_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.drawn,
                paged_state=PagedState(self._kv, batch.pages[0], self._asked),
            )
        logits: Tensor = output.logits[0]
        return logits
