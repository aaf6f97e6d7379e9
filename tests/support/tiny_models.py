"""Tiny random models whose cached prefixes are continued from checkpoints, and what transformers says.

Qwen3.5 has three linear layers and one of full attention, Nemotron-H has Mamba-2, attention and feed-forwards as layers
of their own, and Qwen3 has a window in two layers of three.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import tokenizers
import torch
import transformers as tf

VOCABULARY = 97
Tiny: TypeAlias = Literal["qwen3_5", "nemotron_h", "qwen3"]
WINDOW = 12
_FOLDERS = TemporaryDirectory(prefix="tiny-models")
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_MODELS = {
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **_COMMON,
        layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
    ),
    "qwen3": lambda: tf.Qwen3Config(
        **_COMMON,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@cache
def tiny(name: Tiny = "qwen3_5") -> tuple[Path, torch.nn.Module]:
    """Its folder, and the model. Weights are spread, so that attention, states and windows matter."""
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(_MODELS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("conv1d.weight"):
                weight.normal_(std=0.5)
            elif weight_name.endswith("mixer.dt_bias"):
                weight.zero_()  # time steps that transformers does not clamp
            elif weight.dim() >= 2:
                weight.normal_(std=0.25)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    folder = Path(_FOLDERS.name) / name
    model.save_pretrained(folder)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return folder, model


@cache
def answer(prompt: tuple[int, ...], new: int, name: Tiny = "qwen3_5") -> list[int]:
    """The greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = tiny(name)[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()
