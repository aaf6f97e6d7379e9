"""The mechanisms' switches by name, as changes of an engine configuration. One list for benchmark and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration with one mechanism off: fields of `EngineConfig`, and of its `speculation`, as they are then.

    `same_output`: turning it off changes no token of any request. `sampled`, `gpu`: it acts on sampled turns alone, or
    on a GPU alone.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)
    same_output: bool = True
    sampled: bool = False
    gpu: bool = False

    def of(self, config: EngineConfig) -> EngineConfig:
        """`config` with this mechanism off."""
        drafts = replace(config.speculation, **self.speculation) if self.speculation else config.speculation
        return replace(config, **self.engine, speculation=drafts)

    def idle(self, resolved: EngineConfig) -> str:
        """Why it cannot act on greedy turns of this engine, whose two sides would be alike; empty: it can."""
        if self.sampled:
            return "it acts on sampled turns, and these are greedy"
        if self.gpu and resolved.device == "cpu":
            return "it acts on a GPU, and this is a CPU"
        return ""


VARIANTS = (
    Variant("sessions", {"sessions": False}),
    Variant("session_rows", {"session_rows": 0}),
    Variant("prefix_cache", {"prefix_cache": False}),
    Variant("grouped_prefill", {"grouped_prefill": False}),
    Variant("adaptive_chunks", {"adaptive_chunks": False}),
    Variant("chunk_deferral", {"high_water": 1.0}),
    Variant("admission", {"admission_ceiling": 1.0}),
    Variant("retention", {"retention": RetentionConfig(policy="none")}),
    Variant("render_cache", {"render_cache": 0}),
    Variant("tokenize_cache", {"tokenize_cache": 0}),
    Variant("prompt_seed", {"prompt_seed": False}, same_output=False, sampled=True),
    Variant("speculation", speculation={"enabled": False}),
    Variant("prompt_lookup", speculation={"prompt_lookup": False}),
    Variant("memory", speculation={"memory": False}),
    Variant("skeleton", speculation={"skeleton": False}),
    Variant("cost_gate", speculation={"cost_gate": False}),
    Variant("shared_budget", speculation={"shared_budget": False}),
    Variant("early_stop", {"early_stop": False}, same_output=False),
    Variant("own_decoder", {"decoder": "transformers"}),
    Variant("device_sampling", {"device_sampling": False}, gpu=True),
    Variant("overlap_steps", {"overlap_steps": "off"}, gpu=True),
    Variant("cuda_graphs", {"cuda_graphs": False}, gpu=True),
)
"""Every mechanism that can be turned off; `docs/mechanisms.md` says what each is."""


def chosen(names: str) -> tuple[Variant, ...]:
    """The variants of a comma-separated list, all of them for an empty one. Raises ConfigError for an unknown name."""
    if not names:
        return VARIANTS
    by_name = {variant.name: variant for variant in VARIANTS}
    for name in names.split(","):
        if name not in by_name:
            raise ConfigError(f"{name} is no mechanism; there are {', '.join(by_name)}", "off")
    return tuple(by_name[name] for name in names.split(","))
