"""Models whose layers are mostly linear: how they are loaded, and what they refuse. Answers: `test_model_engine`."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import answer, config_of, gpu_runner, tiny, words

from holdfast.kernels.linear_state import NO_STATE
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model import startup
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan

SMALL: dict[str, Any] = {"cells": 512, "page_size": 16, "max_sequences": 4, "session_rows": 1, "state_slots": 8}
SETTINGS: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"kv_dtype": "int8"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["qwen3_5, nested, experts", "nemotron_h"])
def test_a_checkpoint_is_loaded_with_its_states_and_its_steps_are_measured(name, settings):
    ready = load_runner(config_of(name, **SMALL | settings))
    assert ready.config.state_slots == 8
    assert ready.cost is not None
    assert ready.runner.kv.shape.layers == 1
    prompt = words(0, 40)
    use = StateUse(NO_STATE, 7, held=1)
    chunk = Chunk(1, 0, np.array(prompt, np.int32), Draw(Sampling(), 0), state=use)
    writes = (RowWrite(1, 0, np.arange(3, dtype=np.int32)),)
    (drawn,) = ready.runner.begin(StepPlan((chunk,), writes)).land().drawn
    if not settings:
        assert list(drawn.tokens) == answer(prompt, 1, name)


def test_weights_without_use_are_skipped_and_the_log_says_so(caplog):
    folder, model = tiny("qwen3_5, nested")
    kv = KVTensors(describe(model.config).cell, 4, 4, torch.float32)
    with caplog.at_level("INFO"):
        Decoder.load(str(folder), model.config, kv, 16)
    assert any("model.visual.*" in each.getMessage() for each in caplog.records)


def test_slots_take_their_share_of_the_memory():
    found = load_runner(replace(config_of("qwen3_5", **SMALL), cells=0, state_slots=0, kv_memory=0.01))
    states = found.runner.model.states
    assert states.slots == found.config.state_slots > 8
    used = states.slots * states.slot_bytes + found.runner.kv.data.nbytes
    assert 0.99 * 0.01 * 2**30 < used <= 0.01 * 2**30


def test_transformers_cannot_serve_one():
    with pytest.raises(ConfigError) as raised:
        load_runner(config_of("qwen3_5", decoder="transformers"))
    assert raised.value.field == "decoder"


def test_one_order_of_sums_cannot_be_had_on_a_gpu():
    model = gpu_runner(config_of("qwen3_5", **SMALL, context_length=128), graphs=False).model
    with pytest.raises(ConfigError, match="chunks") as raised:
        startup._choose_products(model, EngineConfig(batch_invariant=True))
    assert raised.value.field == "batch_invariant"
