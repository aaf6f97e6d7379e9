"""The layer for multi-token prediction as a source of drafts: it predicts what transformers' own layer predicts,
however a step is made up, and answers are the same with its drafts and without.
"""

from dataclasses import replace
from typing import Any

import pytest
from tiny_models import Served, gpu_runner, settings_for, tiny, words
from tiny_mtp import PROMPTS, Family, TinyMtp, tiny_mtp

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.model.description import inspect_model, with_next_token
from holdfast.replicas.model.files import stored_tensors
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Runner, Sampling

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_next", "glm4_moe")


def config_of(model: TinyMtp, *, mtp: bool = True, **settings: Any) -> EngineConfig:
    return settings_for(model.folder, model.model, speculation=DraftConfig(mtp=mtp), **settings)


class Predicting(Served):
    """An engine over one of these models. `predictions`: each text so far, and the token predicted to follow it."""

    def __init__(self, config: EngineConfig, runner: Runner | None = None) -> None:
        super().__init__(config, runner)
        self.predictions: list[tuple[tuple[int, ...], int]] = []
        drafter = self.engine.scheduler.drafts
        learn = drafter.learn

        def noted(sequence, drawn, predicted=None):
            if predicted is not None:
                self.predictions.append((tuple(sequence.tokens.tolist()), predicted))
            learn(sequence, drawn, predicted)

        drafter.learn = noted

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
CASES = [("qwen3_5", way) for way in WAYS] + [("qwen3_next", "chunks of 7"), ("glm4_moe", "host tier")]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_it_predicts_what_transformers_predicts(family: Family, way: str) -> None:
    """One request alone, then programs of three turns, each of which continues the one before."""
    model, count = tiny_mtp(family), 5 if way in ("few cells", "host tier") else 3
    served = Predicting(config_of(model, **WAYS[way]))
    served.answer({"alone": words(7, 33)})
    texts = {f"p{i}": words(20 + i, 9 + 5 * i) for i in range(count)}
    for turn in range(3):
        served.answer({f"{name}.{turn}": text for name, text in texts.items()})
        for i, (name, text) in enumerate(texts.items()):
            texts[name] = (*text, *served.out[f"{name}.{turn}"], *words(90 + 5 * turn + i, 6))
    served.assert_predicts_like(model, least=12 * count)
    assert served.cached(f"p{count - 1}.2") > 0 or way == "few cells"
    stats = served.engine.stats
    assert stats.preemptions > 0 or way != "few cells"
    assert stats.pages_in > 0 or way != "host tier"


SAMPLINGS = (
    Sampling(24),
    Sampling(24, temperature=0.7),
    Sampling(24, temperature=1.0, top_p=0.9, top_k=20, seed=5),
    Sampling(24, temperature=0.5, presence_penalty=0.5, repetition_penalty=1.1),
)


ANSWERS: list[tuple[Family, Sampling, dict[str, Any]]] = [("qwen3_5", each, {}) for each in SAMPLINGS]
ANSWERS += [("glm4_moe", SAMPLINGS[0], {}), ("qwen3_5", SAMPLINGS[0], {"dtype": "int8"})]
ANSWERS += [("qwen3_5", SAMPLINGS[0], {"kv_dtype": "int8"})]


@pytest.mark.parametrize(("family", "sampling", "settings"), ANSWERS)
def test_answers_are_the_same_with_its_drafts_and_without(
    family: Family, sampling: Sampling, settings: dict[str, Any]
) -> None:
    """A prompt of each begins like an earlier one and goes on otherwise: a cell of the layer is off then."""
    model = tiny_mtp(family, learned=True)
    prompts = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}
    others = {f"q{i}": (*prompt[:9], *words(3 + i, 5)) for i, prompt in enumerate(PROMPTS)}
    ways = [Predicting(config_of(model, mtp=mtp, **settings)) for mtp in (True, False)]
    for each in ways:
        each.answer(prompts, sampling)
        each.answer(others, sampling)
    drafting, plain = ways
    assert drafting.out == plain.out
    assert drafting.predictions
    assert not plain.predictions
    if sampling.temperature == 0 and not settings:
        assert drafting.engine.stats.accepted > plain.engine.stats.accepted
        assert drafting.engine.stats.steps < plain.engine.stats.steps


def test_with_the_noise_of_the_position_a_prediction_is_right_more_often() -> None:
    """The most likely token would be right less often where tokens are sampled."""
    model = tiny_mtp("glm4_moe", learned=True)
    served = Predicting(config_of(model))
    prompts = {f"p{i}": words(200 + i, 8) for i in range(8)}
    served.answer(prompts, Sampling(40, temperature=4.0))
    texts = [(*prompt, *served.out[name]) for name, prompt in prompts.items()]
    drawn = most_likely = 0
    for text, token in served.predictions:
        following = {whole[len(text)] for whole in texts if len(whole) > len(text) and whole[: len(text)] == text}
        drawn += token in following
        most_likely += model.predicted(text) in following
    assert drawn > 2 * most_likely


def test_a_gpu_predicts_the_same() -> None:
    """In graphs, with steps that overlap: greedy, then with noise and a filter, as on a CPU; prompts in two chunks."""
    model = tiny_mtp("qwen3_5", learned=True)
    config = config_of(model, context_length=128, cells=256, step_tokens=6, overlap_steps="on")
    on_gpu, on_cpu = Predicting(config, gpu_runner(config, graphs=True)), Predicting(config_of(model))
    prompts = {"p": PROMPTS[0][:7], "q": PROMPTS[1][:3]}
    for sampling in (Sampling(4), Sampling(2, temperature=0.8, top_p=0.9)):
        for each in (on_gpu, on_cpu):
            each.predictions.clear()
            each.answer({f"{name}.{sampling.max_tokens}": prompt for name, prompt in prompts.items()}, sampling)
        assert on_gpu.out == on_cpu.out
        predicted = dict(on_cpu.predictions)  # other drafts may have been verified
        assert len(on_gpu.predictions) >= 2
        assert all(predicted.get(text, token) == token for text, token in on_gpu.predictions)
        if sampling.temperature == 0:
            on_gpu.assert_predicts_like(model, least=4)
    assert on_gpu.runner.replayed > 0


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
    config = EngineConfig(model=str(tiny("qwen3_5")[0]), threads=1, cells=256, dtype="float32", state_slots=8)
    loaded = load_runner(replace(config, speculation=DraftConfig(mtp=True)))
    assert "speculation.mtp changes nothing" in caplog.text
    assert loaded.runner.kv.kinds[0].data.shape[0] == 1
