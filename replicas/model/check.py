"""Does a loaded model compute the same over paged KV as by itself? Asked once, when it is loaded.

A short prompt runs twice, once in transformers' own way and once through pages in two steps. A model that keeps state
outside its attention, or whose attention is not the usual one, is refused here and does not answer wrongly later. The
prompt is shorter than sliding windows are: a window that the model applies in its mask alone, which paged attention
does not see, shows in that no layer asks for it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.events import Sampling, TokenIds
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.batch import build_batch
from holdfast.replicas.model.page_table import PageTable
from holdfast.replicas.model.weights import LoadedModel
from holdfast.replicas.scheduling.plan import Chunk, Draw, RowWrite

_PROBE = 8  # tokens of the prompt
_LIKENESS = {"float32": 0.9999, "bfloat16": 0.98, "float16": 0.99}  # least cosine between the two ways' logits


def check_model(loaded: LoadedModel, kv: KVTensors, context_length: int) -> None:
    """Switch the model to paged attention and compare it with what it computed before. Writes the store's first cells.

    Raises ConfigError for a model that cannot be switched or computes something else then, in contexts of up to
    `context_length` tokens.
    """
    module, name = loaded.module, loaded.info.path
    tokens = np.arange(1, 1 + min(_PROBE, kv.cells), dtype=np.int32) % loaded.info.vocabulary
    device = kv.data.device
    with torch.inference_mode():
        plain = module(input_ids=torch.from_numpy(tokens).long().to(device)[None], use_cache=False).logits[0, -1]
    module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if module.config._attn_implementation != ATTENTION:  # type: ignore[union-attr]
        raise ConfigError(f"cannot serve model {name!r}: its attention cannot be replaced", "model")
    model = AnyModel(module, kv)
    try:
        paged = _paged_logits(model, kv, tokens)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot serve model {name!r}: it does not run on paged KV ({error})", "model") from error
    likeness = torch.cosine_similarity(plain.double(), paged.double(), dim=0).item()
    if not likeness >= _LIKENESS[str(kv.data.dtype).removeprefix("torch.")]:
        raise ConfigError(f"cannot serve model {name!r}: on paged KV it computes something else", "model")
    window = _window(loaded.info.config)
    if window and window < context_length and not model.windowed:
        why = f"its sliding window of {window} does not reach its attention"
        raise ConfigError(f"{why}: set context_length to {window} or less", "context_length")


def _window(config: Any) -> int:
    """Tokens of the sliding window that a transformers configuration asks for; 0: none."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if not getattr(text, "use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return 0
    return getattr(text, "sliding_window", None) or 0


def _paged_logits(model: AnyModel, kv: KVTensors, tokens: TokenIds) -> Tensor:
    """Logits after the last token, all but that one in a first chunk."""
    used = -(-len(tokens) // kv.page_size)
    table = PageTable(1, used, kv.page_size, kv.pages, kv.data.device)
    table.write(RowWrite(0, 0, np.arange(used, dtype=np.int32)))
    cut = len(tokens) - 1
    if cut:
        model.forward(build_batch((Chunk(0, 0, tokens[:cut]),), table))
    return model.forward(build_batch((Chunk(0, cut, tokens[cut:], Draw(Sampling(), 0)),), table))[0]
