"""The layer for multi-token prediction as a source of drafts: it predicts what transformers' own layer predicts,
however a step is made up, and answers are the same with its drafts and without.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kv_audit import check_cache
from tiny_decoder import replayed
from tiny_models import tiny
from tiny_mtp import PROMPTS, VOCABULARY, Family, TinyMtp, tiny_mtp, words

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import inspect_model, with_next_token
from holdfast.replicas.model.files import stored_tensors
from holdfast.replicas.model.graphs import GraphRoom
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import load_runner, make_states
from holdfast.replicas.plan import Runner, Sampling
from holdfast.replicas.requests import Finished, Submit, Tokens

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_next", "glm4_moe")
ROOM = GraphRoom(tokens=8, items=64, wide_items=16, partials=256, extra=4096, programs=2)


def config_of(model: TinyMtp, *, mtp: bool = True, **settings: Any) -> EngineConfig:
    defaults = {"cells": 2048, "max_sequences": 8, "session_rows": 3, "dtype": "float32", "page_size": 4}
    if hasattr(model.model.config, "linear_num_key_heads"):
        defaults["state_slots"] = 24
    folder = str(model.folder)
    return EngineConfig(model=folder, threads=1, speculation=DraftConfig(mtp=mtp), **(defaults | settings))


class Served:
    """An engine over one of these models. `predictions`: each text so far, and the token predicted to follow it."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        if runner is None:
            loaded = load_runner(config)
            config, runner = loaded.config, loaded.runner
        self.runner = runner
        self.engine = Engine(config, runner, frozenset(), VOCABULARY)
        self.predictions: list[tuple[tuple[int, ...], int]] = []
        self.out: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        drafter = self.engine.scheduler.drafts
        learn = drafter.learn

        def noted(sequence, drawn, predicted=None):
            if predicted is not None:
                self.predictions.append((tuple(sequence.tokens.tolist()), predicted))
            learn(sequence, drawn, predicted)

        drafter.learn = noted

    def answer(self, prompts: dict[str, tuple[int, ...]], sampling: Sampling = Sampling(10)) -> None:  # noqa: B008
        for name, prompt in prompts.items():
            self.out[name] = []
            submit = Submit(name, tokens=np.asarray(prompt, np.int32), sampling=sampling, program_id=name.split(".")[0])
            self.engine.handle(submit, 0.0)
        while self.engine.busy:
            for event in self.engine.step(0.0):
                if isinstance(event, Tokens):
                    self.out[event.request_id] += event.tokens
                else:
                    assert isinstance(event, Finished), event
                    self.cached[event.request_id] = event.usage.cached
            check_cache(self.engine.cache)

    def assert_predicts_like(self, model: TinyMtp, least: int) -> None:
        assert len(self.predictions) >= least
        for text, token in self.predictions:
            assert token == model.predicted(text), len(text)


WAYS: dict[str, dict[str, Any]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1},
    "steps overlap": {"overlap_steps": "on"},
    "few cells": {"cells": 160, "session_rows": 0, "completion_reserve": 1, "admission_ceiling": 1.0},
    "host tier": {"cells": 192, "session_rows": 0, "host_cells": 2048},
}
CASES = [("qwen3_5", way) for way in WAYS] + [("qwen3_next", "chunks of 7")]
CASES += [("glm4_moe", way) for way in ("as served", "chunks of 7", "few cells", "host tier")]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_it_predicts_what_transformers_predicts(family: Family, way: str) -> None:
    """One request alone, then five programs of three turns, each of which continues the one before."""
    model = tiny_mtp(family)
    served = Served(config_of(model, **WAYS[way]))
    served.answer({"alone": words(7, 33)})
    texts = {f"p{i}": words(20 + i, 9 + 5 * i) for i in range(5)}
    for turn in range(3):
        served.answer({f"{name}.{turn}": text for name, text in texts.items()})
        for i, (name, text) in enumerate(texts.items()):
            texts[name] = (*text, *served.out[f"{name}.{turn}"], *words(90 + 5 * turn + i, 6))
    served.assert_predicts_like(model, least=60)
    assert served.cached["p4.2"] > 0 or way == "few cells"
    stats = served.engine.stats
    assert stats.preemptions > 0 or way != "few cells"
    assert stats.pages_in > 0 or way != "host tier"


SAMPLINGS = (
    Sampling(24),
    Sampling(24, temperature=0.7),
    Sampling(24, temperature=1.0, top_p=0.9, top_k=20, seed=5),
    Sampling(24, temperature=0.5, presence_penalty=0.5, repetition_penalty=1.1),
)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_answers_are_the_same_with_its_drafts_and_without(family: Family, sampling: Sampling) -> None:
    """A prompt of each begins like an earlier one and goes on otherwise: a cell of the layer is off then."""
    model = tiny_mtp(family, learned=True)
    prompts = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}
    others = {f"q{i}": (*prompt[:9], *words(3 + i, 5)) for i, prompt in enumerate(PROMPTS)}
    ways = [Served(config_of(model, mtp=mtp)) for mtp in (True, False)]
    for each in ways:
        each.answer(prompts, sampling)
        each.answer(others, sampling)
    drafting, plain = ways
    assert drafting.out == plain.out
    assert not plain.predictions
    if sampling.temperature == 0:
        assert drafting.engine.stats.accepted > plain.engine.stats.accepted
        assert drafting.engine.stats.steps < plain.engine.stats.steps


def test_with_the_noise_of_the_position_a_prediction_is_right_more_often() -> None:
    """The most likely token would be right less often where tokens are sampled."""
    model = tiny_mtp("glm4_moe", learned=True)
    served = Served(config_of(model))
    prompts = {f"p{i}": words(200 + i, 8) for i in range(8)}
    served.answer(prompts, Sampling(40, temperature=4.0))
    texts = [(*prompt, *served.out[name]) for name, prompt in prompts.items()]
    drawn = most_likely = 0
    for text, token in served.predictions:
        following = {whole[len(text)] for whole in texts if len(whole) > len(text) and whole[: len(text)] == text}
        drawn += token in following
        most_likely += model.predicted(text) in following
    assert drawn > 2 * most_likely


def device_runner(model: TinyMtp, config: EngineConfig, *, graphs: bool) -> GpuRunner:
    """Steps as on a GPU, in Triton's interpreter."""
    info = with_next_token(inspect_model(config.model), stored_tensors(config.model, model.folder))
    described = info.description
    assert described is not None
    pages = config.cells // config.page_size
    kv = KVTensors.of(described.kinds(128), [pages], config.page_size, torch.float32, scratch=True)
    kv.data.fill_(torch.nan)
    states = make_states(described, config, config.state_slots, torch.float32, "cpu")
    decoder = GpuDecoder.load(config.model, info.config, kv, 128, states=states, description=described)
    assert decoder is not None
    runner = GpuRunner(decoder, kv, config.max_sequences, 128)
    if graphs:
        assert runner.capture(replayed, ROOM, lambda line: None)
    return runner


@pytest.mark.parametrize(("family", "way"), [("glm4_moe", "overlapped graphs"), ("qwen3_5", "launched")])
def test_a_gpu_predicts_the_same(family: Family, way: str) -> None:
    """Greedy, then with noise and a filter, as on a CPU; prompts come in two chunks."""
    model = tiny_mtp(family, learned=True)
    overlap = "on" if way.startswith("overlapped") else "off"
    config = config_of(model, context_length=128, cells=256, step_tokens=6, overlap_steps=overlap)
    on_gpu = Served(config, device_runner(model, config, graphs=way != "launched"))
    on_cpu = Served(config_of(model))
    prompts = {"p": PROMPTS[0][:9], "q": PROMPTS[1][:7]}
    noisy = Sampling(3, temperature=0.8, top_p=0.9)
    for sampling in (Sampling(4), *([noisy] if family == "glm4_moe" else [])):
        for each in (on_gpu, on_cpu):
            each.predictions.clear()
            each.answer({f"{name}.{sampling.max_tokens}": prompt for name, prompt in prompts.items()}, sampling)
        assert on_gpu.out == on_cpu.out
        predicted = dict(on_cpu.predictions)  # other drafts may have been verified
        assert len(on_gpu.predictions) >= 3
        assert all(predicted.get(text, token) == token for text, token in on_gpu.predictions)
        if sampling.temperature == 0:
            on_gpu.assert_predicts_like(model, least=4)
    assert (on_gpu.runner.replayed > 0) == (way != "launched")


@pytest.mark.parametrize("family", FAMILIES)
def test_its_kv_is_one_more_layer_and_only_where_it_is_asked_for(family: Family) -> None:
    model = tiny_mtp(family)
    info = inspect_model(str(model.folder))
    more = with_next_token(info, stored_tensors(str(model.folder), model.folder))
    assert more.cell.layers == info.cell.layers + 1
    assert more.shape.cell_values == more.cell.values
    assert with_next_token(info, ["model.embed_tokens.weight"]) is info
    for drafts in (DraftConfig(), DraftConfig(enabled=False, mtp=True)):
        loaded = load_runner(replace(config_of(model), speculation=drafts))
        assert loaded.runner.kv.kinds[0].data.shape[0] == info.cell.layers
    loaded = load_runner(config_of(model))
    assert loaded.runner.kv.kinds[0].data.shape[0] == more.cell.layers


def test_asked_for_in_vain_it_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model=str(tiny()[0]), threads=1, cells=256, dtype="float32", state_slots=8)
    loaded = load_runner(replace(config, speculation=DraftConfig(mtp=True)))
    assert "speculation.mtp changes nothing" in caplog.text
    assert loaded.runner.kv.kinds[0].data.shape[0] == 1


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"kv_dtype": "int8"}])
def test_in_int8_answers_are_the_same_as_well(settings: dict[str, Any]) -> None:
    model = tiny_mtp("qwen3_5", learned=True)
    ways = [Served(config_of(model, mtp=mtp, **settings)) for mtp in (True, False)]
    for each in ways:
        each.answer({f"p{i}": prompt for i, prompt in enumerate(PROMPTS)})
    assert ways[0].out == ways[1].out
    assert ways[0].predictions
