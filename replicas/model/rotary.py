"""Rotary embedding: the angles of a configuration's positions."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def rotary_table(config: Any, positions: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, float32 [positions, d / 2], scaling of the context included."""
    kind = rope_type(config)
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
        inverse, factor = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device(device))
    angles = torch.outer(torch.arange(positions, device=device).float(), inverse)
    return angles.cos() * factor, angles.sin() * factor
