"""Tiny configurations of the families that our decoder runs, and random checkpoints of them."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import PageTable, build_batch
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
# In older versions of transformers these two are fixed in the model.
CLAMPED = {"swiglu_alpha": 1.4, "swiglu_limit": 0.05} if hasattr(tf.GptOssConfig(), "swiglu_alpha") else {}
WINDOWED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
HEADS_AND_WINDOWS = COMMON | WINDOWED | {"head_dim": 16}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
GLM = COMMON | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0}
GLM_EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4}
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
CONFIGS = {
    "llama": tf.LlamaConfig(**COMMON),
    "llama tied": tf.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama3 rope": tf.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "linear rope": tf.LlamaConfig(**COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "yarn rope": tf.LlamaConfig(**COMMON, rope_parameters=YARN),
    "wide heads": tf.LlamaConfig(**COMMON, head_dim=16),
    "mistral": tf.MistralConfig(**COMMON, sliding_window=24),
    "qwen2": tf.Qwen2Config(**COMMON),
    "qwen2 windows": tf.Qwen2Config(**COMMON, **WINDOWED, use_sliding_window=True),
    "qwen3": tf.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "bias": tf.LlamaConfig(**COMMON, attention_bias=True),
    "qwen3 moe": tf.Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0]),
    "qwen3 moe, not normalised": tf.Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, norm_topk_prob=False),
    "gpt-oss": tf.GptOssConfig(
        **COMMON | {"intermediate_size": 24, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
        **CLAMPED,
        sliding_window=20,
        rope_parameters=YARN | {"truncate": False},
    ),
    "gemma 3": tf.Gemma3TextConfig(**HEADS_AND_WINDOWS, query_pre_attn_scalar=12, tie_word_embeddings=True),
    "gemma 4": tf.Gemma4TextConfig(
        **HEADS_AND_WINDOWS
        | {"global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        **GEMMA_EXPERTS,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
    ),
    "glm 4": tf.Glm4MoeConfig(**GLM, **GLM_EXPERTS, topk_group=2, routed_scaling_factor=1.7),
    "laguna": tf.LagunaConfig(
        **HEADS_AND_WINDOWS
        | EXPERTS
        | {"shared_expert_intermediate_size": 40, "num_attention_heads_per_layer": [4, 6]},
        moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=3.0,
    ),
    "muse glimmer": tf.MuseGlimmerConfig(
        text_config=HEADS_AND_WINDOWS | {"layer_rope_theta": [10000.0, 0]},
        vision_config=VISION,
        out_hidden_size=128,
        projector_hidden_size=16,
    ),
    "gemma 4 with vision": tf.Gemma4Config(
        text_config=HEADS_AND_WINDOWS | {"global_head_dim": 16, "hidden_size_per_layer_input": 0},
        vision_config=VISION | {"head_dim": 16},
    ),
    "minimax m2": tf.MiniMaxM2Config(**COMMON, num_local_experts=8, num_experts_per_tok=3, head_dim=16, rotary_dim=8),
    "packed": tf.LlamaConfig(**COMMON | {"hidden_size": 512, "intermediate_size": 640}),
}


def save(config: tf.PreTrainedConfig, folder: Path, shards: bool = False) -> torch.nn.Module:
    """A random model, saved. Weights are spread, so that each of them matters."""
    torch.manual_seed(3)
    config._attn_implementation = "eager"
    nested = config.get_text_config() is not config
    kind = tf.AutoModelForImageTextToText if nested else tf.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    spread(model)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return model


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Give a model random weights each of which matters."""
    for name, weight in model.named_parameters():
        if name.endswith("conv1d.weight"):
            weight.normal_(std=0.5)
        elif name.endswith("mixer.dt_bias"):
            weight.zero_()  # time steps that transformers does not clamp
        elif weight.dim() >= 2 or name.endswith("bias"):
            weight.normal_(std=0.25)
        else:
            weight.add_(torch.randn_like(weight) * 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "layer_scalar")):
            buffer.add_(torch.randn_like(buffer) * 0.3)


def paged_logits(
    decoder: Any, kv: KVTensors, tokens: np.ndarray, cuts: Sequence[int] = (), state: StateUse | None = None
) -> torch.Tensor:
    """Logits of every position by our pages, in any order; the prompt is cut into chunks at `cuts`."""
    table = PageTable.of(kv, 1, kv.cells)
    for kind in table.kinds:
        table.write(RowWrite(0, 0, np.random.default_rng(kind).permutation(kv.pages).astype(np.int32), kind))
    parts = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        chunk = Chunk(0, start, tokens[start:end], Draw(Sampling(), 0, drafts=end - start - 1), state=state)
        parts.append(decoder.forward(build_batch((chunk,), table)))
    return torch.cat(parts).float().cpu()


@torch.inference_mode()
def plain_logits(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """The same by transformers."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens).long()[None]).logits[0]
    return logits.float()
