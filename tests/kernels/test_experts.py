"""Routing and experts against transformers' own modules, and what a token's bits may depend on."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.kernels.experts import Experts, Routing, experts_reference, route
from holdfast.kernels.linear import Activation, Matrix

# Each family's router, its experts' activation there, and ours. GLM and Nemotron-H keep 2 of 4 groups.
GROUPED = Routing(16, 3, "sigmoid", True, groups=4, kept_groups=2, scale=2.5)
ROUTERS: dict[str, Routing] = {
    "qwen3_moe.Qwen3MoeTopKRouter": Routing(16, 3, "softmax", False),
    "qwen3_next.Qwen3NextTopKRouter": Routing(16, 3, "softmax", True),
    "qwen3_5_moe.Qwen3_5MoeTopKRouter": Routing(16, 3, "softmax", True),
    "gpt_oss.GptOssTopKRouter": Routing(16, 3, "softmax", True),
    "glm4_moe.Glm4MoeTopkRouter": GROUPED,
    "nemotron_h.NemotronHTopkRouter": GROUPED,
    "minimax_m2.MiniMaxM2TopKRouter": Routing(16, 3, "sigmoid", True),
    "laguna.LagunaTopKRouter": Routing(16, 3, "sigmoid", True, softcap=2.0),
    "gemma4.Gemma4TextRouter": Routing(16, 3, "softmax", True),
}
EXPERTS: dict[str, tuple[str, Activation]] = {
    "qwen3_moe.Qwen3MoeExperts": ("silu", "silu"),
    "gemma4.Gemma4TextExperts": ("gelu_pytorch_tanh", "gelu_tanh"),
    "gpt_oss.GptOssExperts": ("silu", "clamped"),
    "nemotron_h.NemotronHExperts": ("relu2", "relu2"),
}


def theirs(name: str, routing: Routing, activation: str = "silu", width: int = 32, inner: int = 24) -> Any:
    """A module of transformers with random weights, from what such modules read of a configuration."""
    family, _, module = name.partition(".")
    experts = routing.experts
    config = SimpleNamespace(
        hidden_size=width,
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
        **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), routing.chosen),
        norm_topk_prob=routing.normalised,
        n_group=routing.groups,
        topk_group=routing.kept_groups,
        routed_scaling_factor=routing.scale,
        moe_router_logit_softcapping=routing.softcap,
        rms_norm_eps=1e-6,
        **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), inner),
        moe_latent_size=None,
        **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), activation),
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )
    made = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), module)(config)
    for tensor in (*made.parameters(), *made.buffers()):
        torch.nn.init.normal_(tensor)
    return made.requires_grad_(False)


# ---- routing


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_that_of_transformers(name):
    torch.manual_seed(0)
    routing, x = ROUTERS[name], torch.randn(200, 32) / 4
    router = theirs(name, routing)
    correction, scale = getattr(router, "e_score_correction_bias", None), torch.ones(routing.experts)
    if "minimax" in name:
        correction = torch.randn(routing.experts)
        logits, weights, experts = router(x, correction)
    elif "gemma4" in name:
        scale = router.per_expert_scale
        logits = router.proj(router.norm(x) * router.scale * router.scalar_root_size)
        _, weights, experts = router(x)
    else:
        _, weights, experts = router(x)
        logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
    chosen, found = route(logits, routing, correction)
    assert (chosen.dtype, found.dtype) == (torch.int32, torch.float32)
    found = found * scale[chosen]
    ours, of_theirs = (
        torch.zeros(200, routing.experts).scatter_(1, each.long(), values)
        for each, values in ((chosen, found), (experts, weights))
    )
    assert torch.equal(chosen.sort(1).values, experts.int().sort(1).values)
    assert (ours - of_theirs).abs().max() <= 1e-6


@pytest.mark.parametrize("routing", [ROUTERS["laguna.LagunaTopKRouter"], GROUPED, Routing(16, 6, "softmax", True)])
def test_a_token_is_routed_the_same_in_any_batch(routing):
    """From its logits on: a float32 `Matrix` gives them on a CPU."""
    torch.manual_seed(1)
    router, x, correction = Matrix(torch.randn(16, 64)), torch.randn(77, 64), torch.randn(16)
    chosen, weights = route(router(x), routing, correction)
    for start in (0, 1, 30, 76):
        for end in (start + 1, 77):
            alone = route(router(x[start:end]), routing, correction)
            assert torch.equal(alone[0], chosen[start:end])
            assert torch.equal(alone[1], weights[start:end])


# ---- experts


def of_transformers(name: str) -> tuple[Any, list[torch.Tensor | None]]:
    """Experts of transformers and their weights in our order: gate_up, down, their biases."""
    module = theirs(name, GROUPED, EXPERTS[name][0])
    if "gpt_oss" in name:  # [E, in, out], gates and their partners take turns

        def apart(x: torch.Tensor) -> torch.Tensor:
            return torch.cat((x[:, ::2], x[:, 1::2]), dim=1)

        module.gate_up_proj *= 3  # some are clamped
        both, down = apart(module.gate_up_proj.mT), module.down_proj.mT.contiguous()
        return module, [both, down, apart(module.gate_up_proj_bias), module.down_proj_bias]
    up = module.up_proj if "nemotron" in name else module.gate_up_proj
    return module, [up, module.down_proj, None, None]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_transformers(name):
    torch.manual_seed(2)
    module, (gate_up, down, *biases) = of_transformers(name)
    x, plus = torch.randn(50, 32), torch.randn(50, 32)
    chosen, weights = route(torch.randn(50, 16), GROUPED)
    expected = module(x, chosen.long(), weights)
    exact = experts_reference(x, chosen, weights, gate_up, down, EXPERTS[name][1], *biases)
    found = Experts(gate_up, down, EXPERTS[name][1], *biases)(x, chosen, weights, plus)
    assert (expected - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (found - plus - exact).abs().max() <= 1e-5 * exact.abs().max()
