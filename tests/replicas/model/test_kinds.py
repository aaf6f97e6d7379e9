"""Layers with a window have a store and pages of their own, and read no page that their window has passed."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers as tf
from tiny_decoder import VOCABULARY, config_of, decoder, load

from holdfast.replicas.kv.tensors import CellShape, KVKind, KVTensors
from holdfast.replicas.model.decoder import Decoder, PageTable, build_batch
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling

WINDOW, PAGE, PAGES = 20, 4, 64


@pytest.mark.parametrize(("kind", "page_size"), [(Decoder, 1), (Decoder, PAGE), (GpuDecoder, PAGE)])
def test_pages_behind_the_window_are_never_read(kind, page_size):
    whole, kv = decoder(kind, PAGES * PAGE // page_size, page_size, window=WINDOW)
    parts, own = load(kind, WINDOW, PAGES * PAGE // page_size, page_size)
    assert [each.shape.layers for each in own.kinds] == [1, 1]
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 150).astype(np.int32)
    tables = PageTable.of(kv, 2, 160), PageTable.of(own, 2, 160)
    order = np.random.default_rng(0).permutation(kv.pages).astype(np.int32)
    end = -(-160 // page_size)
    for table in tables:
        for number in table.kinds:
            table.write(RowWrite(1, 0, (order if number == 0 else order[::-1])[:end].copy(), number))
    ends = [60, 61, 64, 130, 150] if kind is Decoder else [26, 27, 30, 42]
    for start, stop in pairwise([0, *ends]):
        chunk = Chunk(1, start, tokens[start:stop], Draw(Sampling(), 0, drafts=stop - start - 1))
        one, two = (
            model.forward(build_batch((chunk,), table)) for model, table in zip((whole, parts), tables, strict=True)
        )
        assert torch.equal(one, two)
        passed = np.full(max(0, stop - WINDOW) // page_size, order[end], np.int32)  # a page that nobody writes: NaN
        tables[1].write(RowWrite(1, 0, passed, 1))


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def kinds(context: int, **more) -> tuple[KVKind, ...]:
    sizes = {"num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 2, "use_sliding_window": True}
    return describe(tf.Qwen3Config(**sizes | more)).kinds(context)


def test_layers_are_of_two_kinds_where_freeing_pays():
    shapes = CellShape(1, 2, 8), CellShape(2, 2, 8)
    assert kinds(256, sliding_window=64, layer_types=LAYERS) == (KVKind(shapes[0]), KVKind(shapes[1], 64))
    assert kinds(64, sliding_window=64, layer_types=LAYERS) == (KVKind(CellShape(3, 2, 8)),)
    assert kinds(256, layer_types=["full_attention"] * 3) == (KVKind(CellShape(3, 2, 8)),)
    assert kinds(256, sliding_window=64, layer_types=["sliding_attention"] * 3) == (KVKind(CellShape(3, 2, 8)),)


def test_a_layer_finds_its_store():
    kv = KVTensors.of(describe(config_of(WINDOW)).kinds(160), (8, 4), PAGE, torch.float32)
    assert (kv.kind(None), kv.kind(WINDOW), kv.kinds) == (0, 1, (kv, kv.window))
    alone = KVTensors(CellShape(2, 1, 16), 8, PAGE, torch.float32)
    assert (alone.kind(None), alone.kind(WINDOW), alone.kinds) == (0, 0, (alone,))
