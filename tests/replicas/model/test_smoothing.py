"""Columns and keys are evened out without a change to the float model, and what int8 loses to outliers comes back."""

from tempfile import TemporaryDirectory

import pytest
import torch
import transformers as tf
from families import paged_logits

from holdfast.kernels.linear import even_out
from holdfast.kernels.linear_state import LinearStates
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import Decoder, rotary_tables
from holdfast.replicas.model.description import describe, inspect_model
from holdfast.replicas.model.smoothing import sample_tokens, smooth
from holdfast.replicas.model.weights import (
    AttentionWeights,
    DecoderWeights,
    FeedForwardWeights,
    load_tokenizer,
    read_weights,
)

VOCABULARY = 61
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_SIZES),
    "qwen2": lambda: tf.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=12, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3": lambda: tf.Qwen3Config(**_SIZES, head_dim=16),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(
        **_SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **_SIZES,
        head_dim=16,
        layers_block_type=["linear_attention", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
    ),
}
TOKENS = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1)).int().numpy()


def model(family: str, outliers: float) -> tuple[tf.PreTrainedConfig, DecoderWeights]:
    """Random weights. In front of a product, and of keys, some channels are `outliers` times the others, and their
    weights, or queries, less by as much: by floats the same model as without.
    """
    torch.manual_seed(2)
    config = CONFIGS[family]()
    module = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
            elif "norm" in name:
                weight.normal_(0.0 if family == "qwen3_5_text" and "linear_attn" not in name else 1.0, 0.1)
    with TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        weights = read_weights(folder, describe(config), torch.float32, "cpu")
        weights.blocks = list(weights.blocks)
    for block in weights.blocks:
        mixer = block.op
        block.norm[[3, 17, 30]] *= outliers
        for name in ("qkv", "qkvz", "gates", "first"):
            if hasattr(mixer, name):
                getattr(mixer, name)[:, [3, 17, 30]] /= outliers
        if isinstance(mixer, FeedForwardWeights):
            mixer.first[96 + 5] *= outliers  # of the second half, up
            mixer.down[:, 5] /= outliers
            continue
        if not isinstance(mixer, AttentionWeights):
            mixer.norm[3] *= outliers
            mixer.out.view(len(mixer.out), -1, len(mixer.norm))[:, :, 3] /= outliers
            continue
        # Of 16: a pair that is turned together; where 8 of them turn, such a pair, and one that does not turn.
        channels = torch.tensor([2, 6, 14] if family == "qwen3_5_text" else [6, 14])
        if mixer.k_norm is not None:
            mixer.k_norm[channels] *= outliers
            mixer.q_norm[channels] /= outliers
        else:
            heads = mixer.qkv.view(8, 16, -1)
            heads[4:6, channels] *= outliers
            heads[:4, channels] /= outliers
    return config, weights


def logits(
    config: tf.PreTrainedConfig, weights: DecoderWeights, int8: bool = False, int8_kv: bool = False
) -> torch.Tensor:
    shape = describe(config)
    kv = KVTensors(shape.cell, 8, 16, torch.float32, kv_dtype="int8" if int8_kv else "auto")
    states = LinearStates(shape.state, shape.linear_layers, 1, 100, torch.float32, "cpu") if shape.state else None
    decoder = Decoder(shape, weights, rotary_tables(config, shape, 256, "cpu"), kv, int8, states)
    return paged_logits(decoder, kv, TOKENS, state=StateUse(-1, 0) if states else None)


def smoothed(family: str, outliers: float) -> tuple[tf.PreTrainedConfig, DecoderWeights]:
    config, weights = model(family, outliers)
    shape = describe(config)
    rotary = rotary_tables(config, shape, 256, "cpu")
    return config, smooth(weights, shape, rotary, torch.from_numpy(TOKENS[:40]).long(), torch.float32, keys=True)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_float_model_stays_as_it_was_to_the_last_bit(family):
    before, after = model(family, 40.0), smoothed(family, 40.0)
    for a, b in zip(before[1].blocks, after[1].blocks, strict=True):
        assert not torch.equal(a.norm, b.norm)
        for name in ("first", "down", "qkv", "out", "qkvz", "gates"):
            if hasattr(a.op, name):
                assert not torch.equal(getattr(a.op, name), getattr(b.op, name))
    assert torch.equal(logits(*before), logits(*after))


@pytest.mark.parametrize("what", ["int8", "int8_kv"])
@pytest.mark.parametrize("family", CONFIGS)
def test_int8_is_as_near_as_without_outliers(family, what):
    exact = logits(*model(family, 1.0))

    def off(config: tf.PreTrainedConfig, weights: DecoderWeights) -> float:
        return ((logits(config, weights, **{what: True}) - exact).norm() / exact.norm()).item()

    without, planted, mended = off(*model(family, 1.0)), off(*model(family, 64.0)), off(*smoothed(family, 64.0))
    assert without < 0.07
    assert planted > 3 * without
    assert mended < 1.5 * without


def test_a_sample_is_text_in_the_model_s_own_tokens():
    info = inspect_model("pocket")
    tokens = sample_tokens(load_tokenizer(info), info.vocabulary)
    assert 100 < len(tokens) <= 256
    assert tokens.min() >= 0
    assert tokens.max() < info.vocabulary
    assert len(sample_tokens(load_tokenizer(info), 0)) == 1


def test_factors_belong_to_columns_that_stand_out():
    columns = torch.ones(32)
    columns[4] = 64.0
    factors = even_out(columns, torch.ones(8, 32))
    assert factors[4] == 8.0
    assert factors.sum() == 31 + 8
