"""Routing and experts against transformers' own modules, and what a token's bits may depend on."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from c_kernels import ABLE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.kernels import experts, linear
from holdfast.kernels.experts import Experts, Routing, experts_reference, route
from holdfast.kernels.linear import INTEGERS, VARIANTS, Activation, GatedMatrix, Matrix, Variant

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


ROUTINGS = [
    Routing(19, 6, "softmax", True),
    Routing(19, 6, "sigmoid", True, softcap=3.0),
    Routing(21, 4, "sigmoid", False, groups=3, kept_groups=2),
]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_is_routed_the_same_in_any_batch(routing):
    """With logits by a float32 `Matrix`."""
    torch.manual_seed(1)
    router, x, correction = (
        Matrix(torch.randn(routing.experts, 64) / 4),
        torch.randn(300, 64),
        torch.randn(routing.experts),
    )
    chosen, weights = route(router(x), routing, correction)
    for start in range(0, 300, 3):
        for end in (start + 1, 300):
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


# ---- every variant of the kernel

DTYPES = {"pairs": torch.bfloat16, "reals": torch.float32, "bytes": torch.float32, "words": torch.float32}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative to the largest value, or to 0.1
FIXTURE = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=VARIANTS if ABLE else [], ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Variant]:
    """Each variant as the only one, native where this processor has it and the library is built."""
    each: Variant = request.param
    if each not in linear.available():
        monkeypatch.setattr(linear, "LIBRARY", request.getfixturevalue("emulated")("product"))
    monkeypatch.setattr(linear, "available", lambda: (each,))
    functions = (experts._function, linear._function)
    for cached in functions:
        cached.cache_clear()
    yield each
    for cached in functions:
        cached.cache_clear()


def a_layer(variant: Variant, activation: Activation, count: int, size: tuple[int, int], biases: bool) -> list[Any]:
    """Arguments of `Experts` in the variant's dtype; widths that it takes."""
    columns = 1 if variant.kind in INTEGERS else variant.columns
    width, inner = size[0] * columns, size[1] * columns
    outputs = inner if activation == "relu2" else 2 * inner
    shapes = ((count, outputs, width), (count, width, inner), (count, outputs), (count, width))
    tensors = [(torch.randn(shape) * 2 * shape[-1] ** -0.5).to(DTYPES[variant.kind]) for shape in shapes]
    return [*tensors[:2], activation, *(tensors[2:] if biases else (None, None))]


def chosen_by(tokens: int, count: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, most often the first, and their weights."""
    liked = torch.rand(tokens, count)
    liked[:, 0] += 0.7
    return liked.topk(each).indices.int(), torch.rand(tokens, each)


@FIXTURE
@given(
    tokens=st.integers(0, 60),
    count=st.integers(1, 9),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    activation=st.sampled_from(get_args(Activation)),
    biases=st.booleans(),
    plus=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_a_variant_is_the_reference(variant, tokens, count, size, activation, biases, plus, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    layer = a_layer(variant, activation, count, size, biases)
    width, dtype = layer[1].shape[1], layer[1].dtype
    x, added = torch.randn(2, tokens, 2 * width).to(dtype)[..., width:]
    choice = chosen_by(tokens, count, min(count, 4))
    found = Experts(*layer, int8=variant.kind in INTEGERS)(x, *choice, added if plus else None)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    exact = experts_reference(x, *choice, *layer) + (added.double() if plus else 0.0)
    tolerance = 0.2 if variant.kind in INTEGERS else TOLERANCE[dtype]
    assert not tokens or (found - exact).abs().max() <= tolerance * exact.abs().max().clamp_min(0.1)


@pytest.mark.parametrize("activation", ["clamped", "relu2"])
def test_a_token_has_the_same_bits_in_any_batch_or_order_and_by_any_threads(variant, activation):
    torch.manual_seed(3)
    layer = a_layer(variant, activation, 5, (9, 3), True)
    product, x = Experts(*layer, int8=variant.kind in INTEGERS), torch.randn(131, layer[1].shape[1]).to(layer[1])
    chosen, weights = chosen_by(131, 5, 3)
    together = product(x, chosen, weights, x)
    for part in (torch.randperm(131), *(torch.arange(*ends) for ends in ((0, 1), (50, 51), (7, 30), (100, 131)))):
        assert torch.equal(product(x[part], chosen[part], weights[part], x[part]), together[part])
    for threads in (1, 2, 33):
        torch.set_num_threads(threads)
        assert torch.equal(product(x, chosen, weights, x), together)


def test_an_expert_is_two_products(variant):
    """To the last bit, so int8 has the same integers."""
    torch.manual_seed(4)
    int8, (gate_up, down, activation, *_) = variant.kind in INTEGERS, a_layer(variant, "silu", 3, (7, 5), False)
    x = torch.randn(40, gate_up.shape[2]).to(gate_up)
    layer, weights = Experts(gate_up, down, activation, int8=int8), torch.ones(40, 1)
    for e in range(3):
        two = Matrix(down[e], int8=int8)(GatedMatrix(gate_up[e], int8)(x))
        assert torch.equal(layer(x, torch.full((40, 1), e, dtype=torch.int32), weights), two)


def test_a_clamp_may_have_other_constants():
    torch.manual_seed(6)
    layer = [torch.randn(2, 32, 16), torch.randn(2, 16, 16), "clamped"]
    x, choice = torch.randn(9, 16), chosen_by(9, 2, 2)
    exact = Experts(*(w.double() for w in layer[:2]), "clamped", alpha=1.0, limit=1.5)(x.double(), *choice)
    assert (Experts(*layer, alpha=1.0, limit=1.5)(x, *choice) - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (Experts(*layer)(x, *choice) - exact).abs().max() > 0.1


def test_many_tokens_are_computed_in_parts(monkeypatch):
    torch.manual_seed(5)
    layer = Experts(torch.randn(4, 32, 16), torch.randn(4, 16, 16), "silu")
    x, (chosen, weights) = torch.randn(23, 16), chosen_by(23, 4, 2)
    whole = layer(x, chosen, weights, x)
    monkeypatch.setattr(experts, "_PAIRS", 10)
    assert torch.equal(layer(x, chosen, weights, x), whole)


@pytest.mark.parametrize("int8", [False, True])
def test_what_does_not_fit_is_refused(int8):
    layer = Experts(torch.randn(4, 32, 16), torch.randn(4, 16, 16), "silu", int8=int8)
    x, (chosen, weights) = torch.randn(3, 16), chosen_by(3, 4, 2)
    for wrong in (4, -1):
        chosen[1, 1] = wrong
        with pytest.raises(ValueError, match="of 4"):
            layer(x, chosen, weights)
    with pytest.raises((ValueError, RuntimeError), match="8"):
        layer(torch.randn(3, 8), chosen.clamp(0, 3), weights)
    with pytest.raises(ValueError, match="on a CPU"):
        Experts(torch.zeros(2, 4, 4, device="meta"), torch.zeros(2, 4, 2, device="meta"), "silu", int8=True)
