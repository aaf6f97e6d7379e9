"""Each switch turns off its mechanism, shows in its metric, and changes no output."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import get_args

import numpy as np
import pytest
import torch
from kv_audit import check_cache
from trace_samples import says, user

from holdfast.loadgen.bench.ablation import VARIANTS, Variant, chosen
from holdfast.replicas.config import DraftConfig, EngineConfig, Mechanism
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tags import SYSTEM, labels_of
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, Submit, Tokens
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.text.conversation import TextSide

CONFIG = EngineConfig(cells=1024, threads=1, max_sequences=6, session_rows=2)
NEW = 12
TEXT_SIDE = {"tokenize_cache", "early_stop"}
ON_A_GPU = set() if torch.cuda.is_available() else {"overlap_steps", "cuda_graphs"}
HERE = [v for v in VARIANTS if v.name not in TEXT_SIDE | ON_A_GPU]
SAVED: dict[str, Callable[[EngineStats], float]] = {
    "sessions": lambda stats: stats.turns_continued,
    "kept_cells": lambda stats: stats.prompt_cached,
    "grouped_prefill": lambda stats: stats.prompt_grouped,
    "prompt_seed": lambda stats: stats.prompt_seeds,
    "kv_tags": lambda stats: stats.hits_by_tag[SYSTEM],
    "speculation": lambda stats: stats.accepted,
}

LOADED = ("device_sampling", "cuda_graphs")  # what concerns the model, and not the engine over it
SHOWS_AT = {"prompt_seed": 0.8}
"""The temperature at which a mechanism has something to do in this workload, where it is not both."""


@cache
def loaded(decoder: str = "auto", without: tuple[Mechanism, ...] = ()) -> LoadedRunner:
    return load_runner(replace(CONFIG, decoder=decoder, without=without))


def run(engine: Engine, prompts: list[list[int]], turn: int, temperature: float) -> list[list[int]]:
    """All prompts at once, each the next turn of a program of its own; their completions."""
    out: dict[str, list[int]] = {f"{turn}/{i}": [] for i in range(len(prompts))}
    for (name, _), prompt in zip(out.items(), prompts, strict=True):
        submit = Submit(name, tokens=np.asarray(prompt, np.int32), sampling=Sampling(NEW, temperature, ignore_eos=True))
        labels = labels_of(("system", "user"), (0, 120), len(prompt))
        assert not engine.handle(replace(submit, program_id=name.split("/")[1], labels=labels), float(turn))
    while engine.busy:
        for event in engine.step(float(turn)):
            if isinstance(event, Tokens):
                out[event.request_id] += event.tokens
    check_cache(engine.cache)
    return list(out.values())


@cache
def workload(name: str, temperature: float) -> tuple[list[list[int]], EngineStats]:
    """Two turns of six programs that begin alike, on Pocket, in a cache that is too small for all of them.

    `name`: what is turned off.
    """
    variant = chosen(name, VARIANTS, "off")[0] if name else Variant("none")
    config = variant.of(CONFIG)
    ready = loaded(config.decoder, tuple(each for each in config.without if each in LOADED))
    engine = Engine(variant.of(ready.config), ready.runner, ready.eos, ready.vocabulary)
    rng = np.random.default_rng(1)
    preamble = rng.integers(5, 200, 60).tolist() * 2
    prompts = [preamble + rng.integers(5, 200, 9 + i).tolist() for i in range(6)]
    first = run(engine, prompts, 0, temperature)
    longer = [p + f + rng.integers(5, 200, 9).tolist() for p, f in zip(prompts, first, strict=True)]
    # One program asks what another has asked, so that a memory of the answer is of use.
    return first + run(engine, [*longer, prompts[0]], 1, temperature), engine.stats


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
def test_a_switch_changes_no_output_and_stops_its_metric(variant: Variant, temperature: float) -> None:
    expected, on = workload("", temperature)
    found, off = workload(variant.name, temperature)
    if variant.same_output or temperature == 0:
        assert found == expected
    if variant.name in SAVED:
        assert SAVED[variant.name](off) == 0
    # Greedy prompts have no seeds, and what was sampled hardly comes again for a memory to know.
    if variant.name in SAVED and temperature == SHOWS_AT.get(variant.name, temperature):
        assert SAVED[variant.name](on) > 0


def test_a_programs_own_cells_are_told_from_those_that_others_computed() -> None:
    """With the shared tree alone a program finds what it had as well; without it, that and nothing else."""
    names = ("", "prefix_cache", "sessions", "kept_cells")
    on, alone, tree, none = (workload(name, 0.0)[1] for name in names)
    assert none.prompt_cached == 0 < alone.prompt_cached < tree.prompt_cached == on.prompt_cached
    assert tree.turns_continued == none.turns_continued == 0 < alone.turns_continued


def test_the_token_cache_changes_no_token() -> None:
    tokenizer = loaded().tokenizer
    on, off = (
        TextSide(tokenizer, config) for config in (CONFIG, chosen("tokenize_cache", VARIANTS, "off")[0].of(CONFIG))
    )
    messages = [user("What is the weather in <|im_end|> Paris?")]
    for turn in range(4):
        for _ in range(2):
            prompt = ChatPrompt(list(messages))
            assert on.encode(prompt).tokens.tolist() == off.encode(prompt).tokens.tolist()
        messages += [says(f"It is {turn} degrees."), user("And now?")]
    assert off.stats.characters_reused == 0 < on.stats.characters_reused


def fields_of(variant: Variant) -> tuple[str, ...]:
    """The settings a variant touches, by their names in the configuration."""
    return (*variant.engine, *(f"speculation.{name}" for name in variant.speculation))


def test_what_changes_nothing_on_this_device_is_idle_there() -> None:
    resolved = replace(loaded().config, speculation=DraftConfig())
    alike = {variant.name for variant in VARIANTS if variant.of(resolved) == resolved}
    idle = {variant.name for variant in VARIANTS if variant.idle(resolved)}
    assert alike <= idle
    assert "prompt_seed" in idle
    anywhere = {variant.name for variant in VARIANTS if variant.idle(replace(resolved, device="cuda"))}
    assert anywhere == {"prompt_seed"}


def test_every_switch_there_is_belongs_to_a_mechanism() -> None:
    named = {name for variant in VARIANTS for name in fields_of(variant)}
    switches = {f.name for f in fields(EngineConfig) if f.type in (bool, "bool")}
    assert set(get_args(Mechanism)) <= {name for variant in VARIANTS for name in variant.engine.get("without", ())}
    switches |= {f"speculation.{f.name}" for f in fields(DraftConfig) if f.type in (bool, "bool")}
    assert switches - named == {"speculation.mtp"}  # off by default; it acts on models with such a layer alone


def test_an_unknown_mechanism_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="magic"):
        chosen("memory,magic", VARIANTS, "off")
