"""Models that transformers runs over our pages. The whole engine over them is in `test_model_engine`."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from families import paged_logits, plain_logits
from on_device import DEVICE, capture
from tiny_decoder import ROOM
from tiny_models import VOCABULARY, Served, answer, tiny, words

from holdfast.kernels.attention_gpu import attend_gpu
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model import any_model
from holdfast.replicas.model.any_model import ATTENTION, AnyModel
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.plan import Chunk, RowWrite, StepPlan

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma 3", "gpt-oss", "gpt_neox", "gpt2")


def over_pages(family: str, scratch: bool = False, device: str = "cpu") -> tuple[AnyModel, KVTensors]:
    """A model over a store in which cells that nobody wrote hold NaN."""
    module = deepcopy(tiny(family)[1]).to(device)
    module.set_attn_implementation(ATTENTION)
    config, heads = module.config, module.config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shape = CellShape(config.num_hidden_layers, kv_heads, getattr(config, "head_dim", None) or 32 // heads)
    kv = KVTensors(shape, 32, 16, torch.float32, device, scratch=scratch)
    kv.data.fill_(torch.nan)
    return AnyModel(module, kv), kv


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_position_are_the_plain_models(family):
    tokens = np.array(words(0, 60), np.int32)
    model, kv = over_pages(family)
    ours, plain = paged_logits(model, kv, tokens, [21, 22, 25, 45]), plain_logits(tiny(family)[1], tokens)
    assert torch.allclose(ours, plain, atol=2e-4, rtol=0)
    assert model.vocabulary == VOCABULARY


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_steps_run_in_graphs_once_the_layers_have_said_what_they_ask_for(family, monkeypatch):
    if family == "gpt-oss" and DEVICE != "cpu":
        pytest.skip("its experts in transformers wait for the device, which no graph can")

    def by_the_kernel(q, kv, layer, batch, scale, window=None, softcap=None, sinks=None):
        return attend_gpu(q, kv, layer, batch, scale, window or 0, softcap or 0.0, sinks)

    monkeypatch.setattr(any_model, "paged_attention", by_the_kernel)
    model, kv = over_pages(family, True, DEVICE)
    runner = GpuRunner(model, kv, 4, 256)
    assert model.attention == ()
    assert not runner.capture(capture(), ROOM, print)
    chunk = Chunk(0, 0, np.array([1, 2], np.int32))
    runner.begin(StepPlan((chunk,), (RowWrite(0, 0, np.array([5], np.int32)),))).land()
    assert model.attention[0].windows == ((0, 20) if family == "gpt-oss" else (0,))
    assert runner.capture(capture(), ROOM, print)
    config = EngineConfig(cells=512, page_size=16, max_sequences=4, session_rows=0, context_length=256)
    assert Served(config, runner).answer({"a": words(1, 20)}, 5) == {"a": answer(words(1, 20), 5, family)}
    assert runner.replayed > 0


def test_an_unknown_argument_that_would_change_the_attention_is_refused():
    state = any_model.PagedState(over_pages("llama")[1], None, set())
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="Module asks for position_bias, which is not known here"):
        any_model.paged_attention_forward(
            torch.nn.Module(), x, x, x, None, dropout=0.0, position_bias=x, paged_state=state
        )
