"""Tiny random models, what transformers answers with them, and an engine over one of them that is driven by hand."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import families
import numpy as np
import tokenizers
import torch
import transformers as tf
from kv_audit import check_cache
from on_device import DEVICE, capture

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe, inspect_model, with_next_token
from holdfast.replicas.model.files import stored_tensors
from holdfast.replicas.model.graphs import GraphRoom
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import LoadedRunner, load_runner, make_states
from holdfast.replicas.plan import Runner, Sampling
from holdfast.replicas.requests import Event, Finished, ForkSession, OpenSession, Submit, Tokens

VOCABULARY = 97
WINDOW = 12
_FOLDERS = TemporaryDirectory(prefix="tiny-models")
HEADS = families.COMMON | {"head_dim": 32, "max_position_embeddings": 512}
LINEAR = HEADS | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MAMBA = {name: value for name, value in HEADS.items() if name != "num_hidden_layers"} | {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}


def _nested() -> tf.PreTrainedConfig:
    text = LINEAR | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = tf.Qwen3_5Config(text_config=text, vision_config=_VISION, tie_word_embeddings=True)
    config.text_config.rope_parameters |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return config


Configs = dict[str, Callable[[], tf.PreTrainedConfig]]
HYBRIDS: Configs = {
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**LINEAR),
    "qwen3_5, nested": _nested,
    "qwen3_5, nested, experts": lambda: tf.Qwen3_5MoeConfig(text_config=LINEAR | EXPERTS, vision_config=_VISION),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**LINEAR, num_experts=0),
    "qwen3_next, experts": lambda: tf.Qwen3NextConfig(**LINEAR, **EXPERTS),
    "qwen3_next, layers named": lambda: tf.Qwen3NextConfig(**LINEAR, num_experts=4, mlp_only_layers=[0, 1, 2, 3]),
    "nemotron_h": lambda: tf.NemotronHConfig(**_MAMBA),
    "nemotron_h, latent": lambda: tf.NemotronHConfig(
        **_MAMBA, moe_latent_size=16, use_conv_bias=False, n_group=4, topk_group=2
    ),
}
"""Models most of whose layers are linear."""
MODELS: Configs = HYBRIDS | {
    "qwen3, windows": lambda: tf.Qwen3Config(
        **HEADS | {"num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": lambda: tf.Gemma2Config(
        **families.HEADS_AND_WINDOWS, attn_logit_softcapping=5.0, query_pre_attn_scalar=4
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(
        **{name: value for name, value in families.COMMON.items() if name != "num_key_value_heads"},
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=False
    ),
}


def words(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist())


def add_tokenizer(folder: Path) -> None:
    """Put a tokenizer beside a checkpoint: each id is a word of its own."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)


def greedy(model: torch.nn.Module, prompt: tuple[int, ...], new: int) -> list[int]:
    """The greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


@cache
def tiny(name: str) -> tuple[Path, torch.nn.Module]:
    """The folder of a model in `MODELS` or `families.CONFIGS`, and the model."""
    folder = Path(_FOLDERS.name) / name
    config = MODELS[name]() if name in MODELS else families.CONFIGS[name]
    model = families.save(config, folder)
    add_tokenizer(folder)
    return folder, model


@cache
def answer(prompt: tuple[int, ...], new: int, name: str) -> list[int]:
    """The greedy tokens of transformers with a tiny model."""
    return greedy(tiny(name)[1], prompt, new)


def settings_for(folder: Path, model: torch.nn.Module, **settings: Any) -> EngineConfig:
    """Settings for an engine over a tiny model in a folder."""
    defaults = {"cells": 2048, "max_sequences": 8, "session_rows": 3, "dtype": "float32", "page_size": 4}
    defaults["device"] = "cpu"
    described = describe(model.config)
    if described is not None and described.state is not None:
        defaults["state_slots"] = 24
    return EngineConfig(model=str(folder), threads=1, **(defaults | settings))


def config_of(name: str, **settings: Any) -> EngineConfig:
    return settings_for(*tiny(name), **settings)


@cache
def loaded(name: str) -> LoadedRunner:
    """A runner over a tiny model for engines that come one after the other."""
    return load_runner(config_of(name))


def gpu_runner(config: EngineConfig, *, graphs: bool, tokens: int = 8) -> GpuRunner:
    """Steps as on a GPU; without one in Triton's interpreter, where graphs are plain calls.

    `tokens`: of the longest step that has a graph.
    """
    info = inspect_model(config.model)
    if config.speculation.mtp:
        info = with_next_token(info, stored_tensors(config.model, Path(config.model)))
    described = info.description
    assert described is not None
    pages = config.cells // config.page_size
    kv = KVTensors.of(described.kinds(128), [pages], config.page_size, torch.float32, DEVICE, scratch=True)
    kv.data.fill_(torch.nan)  # whatever is read before it is written shows
    states = make_states(described, config, config.state_slots, torch.float32, DEVICE)
    decoder = GpuDecoder.load(config.model, info.config, kv, 128, states=states, description=described)
    assert decoder is not None
    runner = GpuRunner(decoder, kv, config.max_sequences, 128)
    if graphs:
        room = GraphRoom(tokens=tokens, items=64, wide_items=16, partials=256, extra=4096, programs=2)
        assert runner.capture(capture(), room, lambda line: None)
    return runner


class Served:
    """An engine over a model. The books of its cache are recounted after every step."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None, window: int = 0) -> None:
        if runner is None:
            made = load_runner(config)
            config, runner, window = made.config, made.runner, made.window
        self.runner = runner
        self.engine = Engine(config, runner, frozenset(), VOCABULARY, window=window)
        self.out: dict[str, list[int]] = {}
        self.ends: dict[str, Event] = {}

    def give(self, command: Submit | OpenSession | ForkSession) -> None:
        self.out[command.request_id] = []
        self.take(self.engine.handle(command, 0.0))

    def submit(self, name: str, prompt: tuple[int, ...], sampling: Sampling | int = 8, **more: object) -> None:
        sampling = Sampling(sampling) if isinstance(sampling, int) else sampling
        self.give(replace(Submit(name, tokens=np.asarray(prompt, np.int32), sampling=sampling), **more))

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.out[event.request_id] += event.tokens
            else:
                assert isinstance(event, Finished), event
                self.ends[event.request_id] = event

    def run(self) -> None:
        while self.engine.busy:
            self.take(self.engine.step(0.0))
            check_cache(self.engine.cache)

    def answer(self, prompts: dict[str, tuple[int, ...]], sampling: Sampling | int = 8) -> dict[str, list[int]]:
        """Answer all prompts at once. A name's part before the dot names its program."""
        for name, prompt in prompts.items():
            self.submit(name, prompt, sampling, program_id=name.partition(".")[0])
        self.run()
        return {name: self.out[name] for name in prompts}

    def cached(self, name: str) -> int:
        return self.ends[name].usage.cached
