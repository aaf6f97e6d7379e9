"""`holdfast models`: the families that our decoder supports, and the decoder of one model. See docs/models.md."""

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

_MIXERS = {
    "full": "attention",
    "window": "attention, over a sliding window if there is one",
    "windows by type": "attention, over a sliding window where `layer_types` says so",
    "linear by type": "Gated DeltaNet and attention",
    "alone by type": "Mamba-2, attention without positions, dense feed-forwards",
}


def families() -> str:
    """A line for each family of our decoder, and one about other models."""
    lines = [f"{name:<18}{', '.join(each for each in described(name)[1:] if each)}" for name in FAMILIES]
    return "\n".join(
        [
            "Models of these types (model_type in config.json) run on our decoder:",
            *lines,
            "Other causal language models run through transformers, if their layers keep only keys and values.",
            "`holdfast models FOLDER` says how one model would run.",
        ]
    )


def described(name: str) -> tuple[str, str, str]:
    """A family's class in transformers, the options of its layers, and "MTP" if its checkpoints have such a layer."""
    family = FAMILIES[name]
    kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return str(kind), _layers(name, family), "MTP" if family.next_token else ""


def runs_on(name: str) -> str:
    """One line about the decoder that a configured model uses. Raises ConfigError for an unsupported model."""
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


def _layers(name: str, family: Family) -> str:
    """The options of a family's layers."""
    options = {
        _MIXERS[family.mixers]: True,
        "experts": has_experts(name),
        "output gates": family.gate,
        "normed queries and keys": family.qk_norm,
        "biases of queries, keys and values": family.bias == "always qkv",
        "attention sinks": family.sinks,
        "norms before and behind": family.around,
        "rotary positions over a part of the head": family.partial_rotary,
    }
    return ", ".join(text for text, true in options.items() if true)
