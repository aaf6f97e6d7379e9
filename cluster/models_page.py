"""The page of models, `holdfast models`, made from the families that our decoder knows; and what one model runs on."""

from collections.abc import Iterable, Sequence

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from holdfast.replicas.model.description import (
    FAMILIES,
    DenseAndExperts,
    Family,
    MixtureOfExperts,
    has_experts,
    inspect_model,
)

HEAD = """# Models

<!-- Made by `make models`: change cluster/models_page.py, and the families in replicas/model/description.py. -->

Holdfast serves text models: causal language models whose files are in the Hugging Face format, with `config.json`,
`tokenizer.json` and safetensors. `model` names a folder or a model in the local hub cache; nothing is downloaded. A
GGUF file is converted first, with `holdfast convert`. `holdfast models FOLDER` says how one model would run.

A model runs in one of two ways, which share the KV cache, the scheduler and the API:

- **Our decoder** has its own kernels on a CPU and a GPU. It is the faster way, and the only one for int8 products, FP8
  weights, `batch_invariant` on a GPU and models with recurrent states.
- **transformers** computes every other model, with our attention and our KV cache in place of its own. When such a
  model is loaded, a short prompt is computed both ways. If the results differ, the model is refused.

The option `decoder` forces one of them. Answers of both are tested to be those of transformers' own `generate`, token
for token, in float32 on a CPU.
"""
OWN = """## On our decoder

`model_type` in `config.json` decides. A configuration with an option that our decoder does not compute runs through
transformers, or is refused where transformers cannot run it over our KV. `holdfast models FOLDER` names the option.
Tool calls and thinking follow the checkpoint's chat template, not its `model_type`: the columns name what the models of
the family bring. An empty cell means that nothing of that kind is tested. Every model drafts with n-grams; where
`drafts` names MTP, `speculation.mtp` adds the checkpoint's layer for multi-token prediction.
"""
_HERMES, _XML = "JSON in `<tool_call>`", "tags in `<tool_call>`"
_THINK = "`<think>`, can be switched off"
_EXAMPLES = {
    "llama": ("Llama 2 and 3, SmolLM2, many others", "Llama 3's JSON", ""),
    "mistral": ("Mistral 7B, Mistral Nemo, Ministral, Devstral", "`[TOOL_CALLS]`", ""),
    "qwen2": ("Qwen2, Qwen2.5, Qwen2.5-Coder", _HERMES, ""),
    "qwen3": ("Qwen3, dense", _HERMES, _THINK),
    "qwen3_moe": ("Qwen3-30B-A3B; Qwen3-Coder-30B-A3B calls in tags and does not think", _HERMES, _THINK),
    "qwen3_5": ("Qwen3.5, Qwen3.6 and Qwen3.8, dense", _XML, f"{_THINK}; efforts in 3.8"),
    "qwen3_5_text": ("the same as text models", _XML, f"{_THINK}; efforts in 3.8"),
    "qwen3_5_moe": ("Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, others with experts", _XML, _THINK),
    "qwen3_5_moe_text": ("the same as text models", _XML, _THINK),
    "qwen3_next": ("Qwen3-Next, Qwen3-Coder-Next", "", ""),
    "gpt_oss": ("gpt-oss-20b, gpt-oss-120b", "Harmony", "a channel of its own; efforts; always on"),
    "gemma3": ("Gemma 3", "", ""),
    "gemma3_text": ("Gemma 3 1B and 270M, others as text models", "", ""),
    "gemma4": ("Gemma 4 but E2B and E4B", "Gemma 4's own", "a block of its own; off unless asked for"),
    "gemma4_text": ("the same as text models", "Gemma 4's own", "a block of its own; off unless asked for"),
    "glm4_moe": ("GLM-4.5, GLM-4.5-Air, GLM-4.7", "GLM's tags", _THINK),
    "laguna": ("Laguna XS and others", "GLM's tags", "`<think>`; off unless asked for"),
    "muse_glimmer": ("Muse-Glimmer-30B", "Muse's messages", "messages to itself; efforts; always on"),
    "minimax_m2": ("MiniMax-M2, M2.1 and M2.5", "MiniMax's tags", "`<think>`; always on"),
    "nemotron_h": ("Nemotron 3 Nano and Super, Nemotron 3.5 Lightning, Nemotron-H", _XML, f"{_THINK}; two efforts"),
}
"""Of each family: its models, how they call tools, how they think."""
_MIXERS = {
    "full": "attention",
    "window": "attention, over a sliding window if there is one",
    "windows by type": "attention, over a sliding window where `layer_types` says so",
    "linear by type": "Gated DeltaNet and attention",
    "alone by type": "Mamba-2, attention without positions, dense feed-forwards",
}
STATES = """\
Linear layers (Gated DeltaNet, Mamba-2) keep a recurrent state for each sequence in place of KV. `state_slots` is the
number of states. Of a model with a vision tower the text part is served, and a request with an image is refused.

A layer for multi-token prediction (MTP) predicts the token after the next one. `speculation.mtp: true` loads it where
the checkpoint has it. One token a step is drafted with it and competes with the drafts of n-grams. The layer takes
memory for its weights and the KV of one more layer, and time in every step. No answer changes. Acceptance on real
weights was not measured, so it is off unless asked for. Layers of families that do not name MTP above are not used.
"""
OTHERS = """## Through transformers

Any causal language model of transformers whose layers call its attention interface and keep nothing but keys and
values. These are tested:
"""
TESTED = (
    ("gemma2", "Gemma 2", "soft cap of scores, other norms"),
    ("gpt_neox", "GPT-NeoX, Pythia", "other norms, biases, parallel layers"),
    ("gpt2", "GPT-2", "learnt positions, biases"),
)
"""Families that are tested through transformers: their `model_type`, models, and why not on our decoder."""
WEIGHTS = (
    ("float32, bfloat16, float16", "in float32 or bfloat16, whichever is faster (`dtype`)", "as in the checkpoint"),
    (
        "FP8 in blocks, by channel or by tensor: `fp8`, `compressed-tensors`, ModelOpt",
        "turned into the model's dtype when loaded",
        "kept, products in 16 bits",
    ),
    ("MXFP4 (gpt-oss), NVFP4: `mxfp4`, `compressed-tensors`, ModelOpt", "the same", "the same"),
    ("integers of 4 and 8 bits: AWQ, GPTQ, `compressed-tensors`", "the same", "kept; of experts turned into bfloat16"),
    ("int8: `dtype: int8`", "made of any of these when loaded", "not served"),
    ("others, such as bitsandbytes", "if transformers can load them; not tested", "the same"),
)
LOSSES = """\
All but the last row are read by our decoder only. What each format costs in precision:
[performance](results.md#weights-of-4-and-8-bits).
"""
REFUSED = (
    ("an encoder-decoder", "only causal language models are served"),
    ("layers that keep something else, such as Mamba 1 or RWKV", "no kernel for them"),
    ("a model that computes something else on paged KV", "found when it is loaded; its answers would be wrong"),
    ("a model that needs code of its own (`trust_remote_code`)", "code from a checkpoint is never run"),
    ("weights in `.bin` or `.pt` files", "reading pickled files may run code"),
    ("a GGUF file", "convert it first: `holdfast convert FILE FOLDER`"),
)


def page() -> str:
    """All of it, in Markdown."""
    own = _table(
        ("model_type", "models", "class in transformers", "layers", "drafts", "tool calls", "thinking"),
        map(_own, FAMILIES.items()),
    )
    named = ((f"`{name}`", *rest) for name, *rest in TESTED)
    tested = _table(("model_type", "models", "why not on our decoder"), named)
    weights = _table(("weights", "on a CPU", "on a GPU"), WEIGHTS)
    refused = _table(("refused", "why"), REFUSED)
    parts = (HEAD, OWN, own, STATES, OTHERS, tested, "## Weights\n", weights, LOSSES, "## What is refused\n", refused)
    return "\n".join(parts).rstrip()


def runs_on(name: str) -> str:
    """What a configured model runs on, in a line. Raises ConfigError for one that is refused."""
    info = inspect_model(name)
    described = info.description
    if described is None:
        return f"{name}: {info.config.model_type}, through transformers"
    kinds = f"{len(described.attentions)} layers with attention"
    if described.linear_layers:
        kinds += f", {described.linear_layers} linear ones"
    if experts := sum(isinstance(block.op, MixtureOfExperts | DenseAndExperts) for block in described.blocks):
        kinds += f", experts in {experts}"
    return f"{name}: {info.config.model_type}, on our decoder; {kinds}, context of {info.shape.context_length} tokens"


def _own(item: tuple[str, Family]) -> Sequence[str]:
    name, family = item
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    models, calls, thinking = _EXAMPLES[name]
    drafts = "MTP" if family.next_token else ""
    return f"`{name}`", models, f"`{kind}`", _layers(name, family), drafts, calls, thinking


def _layers(name: str, family: Family) -> str:
    """The options of a family's layers."""
    told = {
        _MIXERS[family.mixers]: True,
        "experts": has_experts(name),
        "output gates": family.gate,
        "normed queries and keys": family.qk_norm,
        "biases of queries, keys and values": family.bias == "always qkv",
        "attention sinks": family.sinks,
        "norms before and behind": family.around,
        "rotary positions over a part of the head": family.partial_rotary,
    }
    return ", ".join(text for text, true in told.items() if true)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *rows]
    first, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join((first, "|---" * len(heads) + "|", *rest)) + "\n"
