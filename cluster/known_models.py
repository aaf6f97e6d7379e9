"""The configurations of models that agents run, as far as their sizes depend on them, and what each one ships as.

A number that is not here is the default of the class in transformers: `tests/cluster/test_shapes.py` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.cluster.shapes import Shape, shape_of


@dataclass(frozen=True, slots=True)
class Known:
    """A published model. `ships`: formats of its checkpoints, by `shapes.FORMATS`."""

    config: Mapping[str, Any]
    ships: tuple[str, ...] = ("bf16",)

    @property
    def shape(self) -> Shape:
        return shape_of(self.config)


def _dense(
    kind: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        **more,
    }


def _experts(count: int, chosen: int, inner: int, **more: Any) -> dict[str, Any]:
    return {"num_local_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, **more}


def _kinds(layers: int, every: int, other: str) -> list[str]:
    """Every so many layers one that sees everything, as the last of them."""
    return ["full_attention" if (i + 1) % every == 0 else other for i in range(layers)]


def _delta(layers: int, value_heads: int) -> dict[str, Any]:
    """Three of four layers with Gated DeltaNet."""
    return {
        "layer_types": _kinds(layers, 4, "linear_attention"),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _windows(layers: int, window: int, every: int = 6) -> dict[str, Any]:
    return {"sliding_window": window, "layer_types": _kinds(layers, every, "sliding_attention")}


def _gemma4(layers: int, window: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_windows(layers, window),
        "global_head_dim": 512,
        "num_global_key_value_heads": kv_heads,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }


def _nemotron(pattern: str, hidden: int, mamba_heads: int, **more: Any) -> dict[str, Any]:
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [letters[each] for each in pattern],
        "hidden_size": hidden,
        "vocab_size": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
        **more,
    }


def _latent(q_rank: int, kv_rank: int, plain: int, value: int, **more: Any) -> dict[str, Any]:
    """MLA. `more`: of a sparse one its index."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    return {**dict(zip(names, (q_rank, kv_rank, plain, value), strict=True)), "qk_rope_head_dim": 64, **more}


_SUPER = "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
_NANO = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
_FP8, _NVFP4 = ("bf16", "fp8"), ("bf16", "fp8", "nvfp4")

MODELS: Mapping[str, Known] = {
    "Qwen3-0.6B": Known(_dense("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, tie_word_embeddings=True), _FP8),
    "Qwen3-4B": Known(_dense("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, tie_word_embeddings=True), _FP8),
    "Qwen2.5-7B": Known(_dense("qwen2", 28, 3584, 18944, 28, 4, 128, 152064), ("bf16", "int4")),
    "Mistral-7B-v0.3": Known(_dense("mistral", 32, 4096, 14336, 32, 8, 128, 32768, sliding_window=None)),
    "Llama-3.1-8B": Known(_dense("llama", 32, 4096, 14336, 32, 8, 128, 128256), _FP8),
    "Qwen3-8B": Known(_dense("qwen3", 36, 4096, 12288, 32, 8, 128, 151936), ("bf16", "fp8", "int4")),
    "Qwen3-14B": Known(_dense("qwen3", 40, 5120, 17408, 40, 8, 128, 151936), ("bf16", "fp8", "int4")),
    "Qwen3-32B": Known(_dense("qwen3", 64, 5120, 25600, 64, 8, 128, 151936), ("bf16", "fp8", "int4")),
    "Llama-3.1-70B": Known(_dense("llama", 80, 8192, 28672, 64, 8, 128, 128256), _FP8),
    "Qwen3.5-9B": Known(_dense("qwen3_5_text", 32, 4096, 12288, 16, 4, 256, 248320, **_delta(32, 32)), _FP8),
    "Qwen3.5-27B": Known(_dense("qwen3_5_text", 64, 5120, 17408, 24, 4, 256, 248320, **_delta(64, 48)), _NVFP4),
    "Qwen3.6-35B-A3B": Known(
        _dense("qwen3_5_moe_text", 40, 2048, 0, 16, 2, 256, 248320, **_delta(40, 32))
        | _experts(256, 8, 512, shared_expert_intermediate_size=512),
        _NVFP4,
    ),
    "Qwen3-30B-A3B": Known(_dense("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936) | _experts(128, 8, 768), _FP8),
    "Qwen3-Coder-Next": Known(
        _dense("qwen3_next", 48, 2048, 5120, 16, 2, 256, 151936, **_delta(48, 32))
        | _experts(512, 10, 512, shared_expert_intermediate_size=512),
        _FP8,
    ),
    "gpt-oss-20b": Known(
        _dense("gpt_oss", 24, 2880, 2880, 64, 8, 64, 201088, num_local_experts=32, num_experts_per_tok=4)
        | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
        ("mxfp4",),
    ),
    "gpt-oss-120b": Known(
        _dense("gpt_oss", 36, 2880, 2880, 64, 8, 64, 201088, num_local_experts=128, num_experts_per_tok=4)
        | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18},
        ("mxfp4",),
    ),
    "Gemma-3-270M": Known(
        _dense("gemma3_text", 18, 640, 2048, 4, 1, 256, 262144, tie_word_embeddings=True, **_windows(18, 512))
    ),
    "Gemma-3-1B": Known(
        _dense("gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, tie_word_embeddings=True, **_windows(26, 512))
    ),
    "Gemma-4-12B": Known(
        _dense("gemma4_unified_text", 48, 3840, 15360, 16, 8, 256, 262144, **_gemma4(48, 1024, 1)),
        ("bf16", "fp8", "int4"),
    ),
    "Gemma-4-26B-A4B": Known(
        _dense("gemma4_text", 30, 2816, 2112, 16, 8, 256, 262144, **_gemma4(30, 1024, 2))
        | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
        ("bf16", "fp8", "int4"),
    ),
    "Gemma-4-31B": Known(
        _dense("gemma4_text", 60, 5376, 21504, 32, 16, 256, 262144, **_gemma4(60, 1024, 4)),
        ("bf16", "fp8", "int4"),
    ),
    "Muse-Glimmer-30B": Known(
        _dense("muse_glimmer_text", 52, 6656, 19968, 32, 2, 128, 202048, **_windows(52, 2048, 4)), ("bf16", "nvfp4")
    ),
    "Laguna-XS-2.1": Known(
        _dense("laguna", 40, 2048, 8192, 48, 8, 128, 100352, gating=True, **_windows(40, 512, 4))
        | _experts(256, 8, 512, shared_expert_intermediate_size=512)
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 39},
        ("bf16", "fp8", "int4"),
    ),
    "Nemotron-3-Nano-30B-A3B": Known(
        _nemotron(_NANO, 2688, 64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856)
        | {"moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856},
        _NVFP4,
    ),
    "Nemotron-3-Super-120B-A12B": Known(
        _nemotron(_SUPER, 4096, 128, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688)
        | {"moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024, "intermediate_size": 2688},
        _NVFP4,
    ),
    "GLM-4.5-Air": Known(
        _dense("glm4_moe", 46, 4096, 10944, 96, 8, 128, 151552, n_shared_experts=1, first_k_dense_replace=1)
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        _FP8,
    ),
    "GLM-4.7": Known(
        _dense("glm4_moe", 92, 5120, 12288, 96, 8, 128, 151552, n_shared_experts=1, first_k_dense_replace=3)
        | {"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        _FP8,
    ),
    "GLM-4.7-Flash": Known(
        _dense("glm4_moe_lite", 47, 2048, 10240, 20, 20, 64, 154880, **_latent(768, 512, 192, 256))
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1}
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 46},
        _FP8,
    ),
    "MiniMax-M2": Known(
        _dense("minimax_m2", 62, 3072, 1536, 48, 8, 128, 200064, num_local_experts=256, num_experts_per_tok=8),
        _FP8,
    ),
    "Mistral-Small-4-119B": Known(
        _dense("mistral4", 36, 4096, 12288, 32, 32, 128, 131072, **_latent(1024, 256, 64, 128))
        | {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1},
        _FP8,
    ),
    "DeepSeek-V3.2": Known(
        _dense("deepseek_v32", 61, 7168, 18432, 128, 128, 64, 129280, index_n_heads=64, index_head_dim=128)
        | _latent(1536, 512, 128, 128, n_shared_experts=1, first_k_dense_replace=3)
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        ("fp8",),
    ),
    "GLM-5": Known(
        _dense("glm_moe_dsa", 78, 6144, 12288, 64, 64, 64, 154880, index_n_heads=32, index_head_dim=128)
        | _latent(2048, 512, 192, 256, n_shared_experts=1, first_k_dense_replace=3)
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        _FP8,
    ),
    "Kimi-K2": Known(
        _dense("deepseek_v3", 61, 7168, 18432, 64, 64, 64, 163840, **_latent(1536, 512, 128, 128))
        | {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1},
        ("fp8", "int4"),
    ),
}
