"""A tiny random Llama by our own decoders and by that of transformers.

And an engine over our own: plain, as on a GPU, with graphs, which are calls where there is no GPU.
"""

from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers as tf
from kv_audit import check_cache
from on_device import capture, device_of

from holdfast.replicas.config import DraftConfig, EngineConfig, least_window_cells
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tensors import CellShape, HostPages, HostWindow, KVTensors
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.graphs import GraphRoom
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.smoothing import smooth
from holdfast.replicas.requests import Finished, Submit, Tokens

VOCABULARY = 61
CONTEXT = 128
POISON = {"auto": torch.nan, "int8": -1, "fp8": 0x7F}  # bytes of NaN, or of a scale that is
ROOM = GraphRoom(tokens=8, items=64, wide_items=16, partials=256, extra=4096, programs=2)
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 640,
    "tie_word_embeddings": False,
}


def config_of(window: int | None) -> tf.PreTrainedConfig:
    if window is None:
        return tf.LlamaConfig(**_SIZES)
    kinds = ["sliding_attention", "full_attention"]
    return tf.Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=window, layer_types=kinds)


@cache
def _checkpoint(window: int | None) -> TemporaryDirectory:
    torch.manual_seed(5)
    folder = TemporaryDirectory()
    model = tf.AutoModelForCausalLM.from_config(config_of(window), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    model.save_pretrained(folder.name)
    return folder


def decoder(
    kind: type[Decoder],
    pages: int,
    page_size: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
    kv_dtype: str = "auto",
) -> tuple[Decoder, KVTensors]:
    """A decoder over a store of its own, in which cells that nobody wrote hold NaN; its products, or that, in int8."""
    config = config_of(window)
    kv = KVTensors(describe(config).cell, pages, page_size, dtype, device_of(kind), scratch=True, kv_dtype=kv_dtype)
    kv.data.fill_(POISON[kv_dtype])
    smoothed = None
    if int8 or kv_dtype == "int8":
        keys = kv_dtype == "int8"
        smoothed = partial(smooth, sample=torch.arange(VOCABULARY), dtype=dtype, products=int8, keys=keys)
    return kind.load(_checkpoint(window).name, config, kv, 640, smoothed, int8), kv


def load(
    kind: type[Decoder], window: int, pages: int, page_size: int, window_pages: int = 0, kv_dtype: str = "auto"
) -> tuple[Decoder, KVTensors]:
    """The same with a store of their own for layers with the window."""
    config, of_kinds = config_of(window), (pages, window_pages or pages)
    kinds = describe(config).kinds(640)
    kv = KVTensors.of(kinds, of_kinds, page_size, torch.float32, device_of(kind), scratch=True, kv_dtype=kv_dtype)
    for each in kv.kinds:
        each.data.fill_(POISON[kv_dtype])
    decoder = kind.load(_checkpoint(window).name, config, kv, 640)
    assert decoder is not None
    return decoder, kv


def transformers_decoder(pages: int, page_size: int, dtype: torch.dtype) -> tuple[AnyModel, KVTensors]:
    """The same weights by the decoder of transformers."""
    config = config_of(None)
    kv = KVTensors(CellShape(config.num_hidden_layers, 1, config.head_dim), pages, page_size, dtype)
    kv.data.fill_(torch.nan)
    module = tf.AutoModelForCausalLM.from_pretrained(_checkpoint(None).name, dtype=dtype, attn_implementation=ATTENTION)
    return AnyModel(module.eval(), kv), kv


class TinyEngine:
    """`way`: "plain", "device" for steps as on a GPU, "graphs" for those with graphs as well.

    The last two have pages of their own for layers with a window; plain steps keep every page.
    """

    def __init__(self, way: str, overlap: str = "off", window: int | None = None, **settings) -> None:
        defaults = {"cells": 1024, "page_size": 4, "max_sequences": 6, "session_rows": 2, "context_length": CONTEXT}
        speculation = DraftConfig(enabled=settings.pop("drafts", False))
        self.config = EngineConfig(**(defaults | settings), overlap_steps=overlap, speculation=speculation)
        size, kv_dtype = self.config.page_size, self.config.kv_dtype
        kept, pages = 0, self.config.cells // size
        if window is None or way == "plain":
            model, kv = decoder(Decoder if way == "plain" else GpuDecoder, pages, size, window, kv_dtype=kv_dtype)
        else:
            kept = window + 1
            self.config = replace(self.config, window_cells=3 * least_window_cells(kept, size))
            model, kv = load(GpuDecoder, window, pages, size, self.config.window_cells // size, kv_dtype)
        rows = self.config.max_sequences
        host = None
        if self.config.host_cells:
            checkpoints = HostWindow(kv.window, self.config.host_window_cells // size) if kept else None
            host = HostPages(kv, self.config.host_cells // size, checkpoints=checkpoints)
        if way == "plain":
            self.runner = ModelRunner(model, kv, rows, CONTEXT, host, overlap=overlap == "on")
        else:
            self.runner = GpuRunner(model, kv, rows, CONTEXT, host)
        if way == "graphs":
            self.runner.capture(capture(), ROOM, lambda line: None)
        self.engine = Engine(self.config, self.runner, vocabulary=VOCABULARY, window=kept)

    def answers(self, requests: list[Submit], together: int = 3) -> dict[str, tuple[int, ...]]:
        """All requests, `together` at once and then one more after every third step; what each was answered."""
        out: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
        waiting, steps, ended = list(requests), 0, set()
        while waiting or self.engine.busy:
            if waiting and (together > 0 or steps % 3 == 2):
                assert not self.engine.handle(waiting.pop(0), float(steps))
                together -= 1
                continue
            for event in self.engine.step(float(steps)):
                if isinstance(event, Tokens):
                    out[event.request_id] += event.tokens
                else:
                    assert isinstance(event, Finished), event
                    ended.add(event.request_id)
            steps += 1
        assert ended == set(out)
        check_cache(self.engine.cache)
        return out


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
