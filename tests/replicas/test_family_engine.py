"""The whole engine over every family with experts or windows: greedy tokens are transformers' own, whatever was cached,
drafted or cut.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from families import CONFIGS, save
from kv_audit import check_cache

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Finished, Submit, Tokens

VOCABULARY, NEW = 97, 8
FAMILIES = ("qwen3 moe", "gpt-oss", "gemma 3", "gemma 4", "glm 4", "laguna", "muse glimmer", "minimax m2")


def words(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist()


def answer(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_agents_get_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Four agents with one preamble, two turns each, in chunks of 13; every other one leaves its last reply out."""
    model = save(CONFIGS[family], tmp_path)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    settings = {"cells": 2048, "page_size": 4, "max_sequences": 5, "session_rows": 1, "dtype": "float32"}
    loaded = load_runner(EngineConfig(model=str(tmp_path), threads=1, decoder="own", step_tokens=13, **settings))
    engine = Engine(loaded.config, loaded.runner, frozenset(), loaded.vocabulary, window=loaded.window)
    texts = {i: words(0, 30) + words(1 + i, 5 + i) for i in range(4)}
    cached = 0
    for turn in range(2):
        found: dict[str, list[int]] = {f"{i}": [] for i in texts}
        for i, text in texts.items():
            submit = Submit(f"{i}", tokens=np.array(text, np.int32), sampling=Sampling(NEW))
            engine.handle(replace(submit, program_id=f"p{i}"), 0.0)
        while engine.busy:
            for event in engine.step(0.0):
                if isinstance(event, Tokens):
                    found[event.request_id] += event.tokens
                else:
                    assert isinstance(event, Finished), event
                    cached += event.usage.cached
            check_cache(engine.cache)
        for i, text in texts.items():
            assert found[f"{i}"] == answer(model, text), f"agent {i}, turn {turn}"
            texts[i] = (text[:-2] if i % 2 else text + found[f"{i}"]) + words(100 * turn + i, 6)
    assert cached > 60
