"""The whole engine over every kind of model: greedy tokens are transformers' own, whatever was cached, preempted,
drafted, cut, forked, computed ahead, or brought back from the host.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE
from tiny_models import HYBRIDS, VOCABULARY, WINDOW, Served, answer, config_of, gpu_runner, loaded, words

from holdfast.replicas.config import DraftConfig, least_window_cells
from holdfast.replicas.model import startup
from holdfast.replicas.requests import ForkSession, OpenSession, PartialPrefill, SessionTurn

NEW = 8
WINDOWS = "qwen3, windows"


def few(page_size: int) -> int:
    return least_window_cells(WINDOW + 1, page_size)


_SHORT: dict[str, Any] = {"cells": 256, "session_rows": 0, "completion_reserve": 1, "admission_ceiling": 1.0}
WITH_STATES: dict[str, dict[str, Any]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1},
    "steps overlap": {"overlap_steps": "on"},
    "few slots": {"state_slots": 5},
    "few cells": _SHORT | {"page_size": 16},
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "state_slots": 6},
}
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1, "window_cells": few(1)},
    "steps overlap": {"overlap_steps": "on", "window_cells": 3 * few(4)},
    "few window pages": {"window_cells": few(4)},
    "few cells": _SHORT,
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "window_cells": few(4)},
    "in int8": {"kv_dtype": "int8"},
}
CASES = [("qwen3_5", way) for way in WITH_STATES] + [("nemotron_h", way) for way in ("few cells", "host tier")]
CASES += [(WINDOWS, way) for way in WITH_WINDOWS]
MODELS = ("qwen3_5", WINDOWS)


def agents(served: Served, model: str, count: int, turns: int) -> int:
    """Agents with one preamble; every other one leaves its last reply out. The number of right replies."""
    right, texts = 0, {i: words(0, 40) + words(1 + i, 12 + i) for i in range(count)}
    for turn in range(turns):
        replies = served.answer({f"p{i}.{turn}": text for i, text in texts.items()}, NEW)
        for (i, text), reply in zip(texts.items(), replies.values(), strict=True):
            right += reply == answer(text, NEW, model)
            texts[i] = (text[:-2] if i % 2 else text + tuple(reply)) + words(100 * turn + i, 9)
    return right


@pytest.mark.parametrize(("model", "way"), CASES)
def test_agents_get_the_tokens_of_transformers(model: str, way: str) -> None:
    served = Served(config_of(model, **(WITH_WINDOWS if model == WINDOWS else WITH_STATES)[way]))
    assert (served.engine.cache.windows is not None) == (model == WINDOWS)
    right = agents(served, model, 8, 3)
    assert right == 24 or (way == "in int8" and right > 12)
    stats = served.engine.stats
    if way == "as served":
        assert stats.prompt_cached > 0.5 * (stats.prompt_cached + stats.prompt_computed)
    if way == "host tier":
        assert stats.tokens_reloaded > 0
    if way == "few cells" and model != WINDOWS:
        assert stats.preemptions > 0


OWN = ("qwen3 moe", "gpt-oss", "gemma 3", "gemma 4", "glm 4", "laguna", "muse glimmer", "minimax m2", *HYBRIDS)
BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma 3", "gpt-oss", "gpt_neox", "gpt2", WINDOWS)
FAMILIES = [(name, "own") for name in OWN] + [(name, "transformers") for name in BY_TRANSFORMERS]


@pytest.mark.parametrize(("model", "decoder"), FAMILIES)
def test_every_family_answers_as_transformers_does(model: str, decoder: str) -> None:
    served = Served(config_of(model, decoder=decoder, step_tokens=13))
    assert served.engine.cache.windows is None or decoder == "own"
    assert agents(served, model, 4, 2) == 8
    assert served.engine.stats.prompt_cached > 60


def proposing(served: Served, prompts: dict[str, tuple[int, ...]], model: str, new: int, pairs: Any) -> None:
    """Propose so many right tokens and wrong ones behind them, by the next of `pairs`, up to four together."""

    def propose(sequence: Any) -> np.ndarray:
        right, wrong = next(pairs, (0, 0))
        if sequence.awaited is not None:
            right = wrong = 0
        prompt = prompts[sequence.request_id]
        at, following = sequence.length - len(prompt), answer(prompt, new, model)
        drafts = [
            (token + (number >= right)) % VOCABULARY
            for number, token in enumerate(following[at : min(at + right + wrong, new - 1)])
        ]
        return np.array(drafts[:4], np.int32)

    served.engine.scheduler.drafts.propose = propose


@settings(max_examples=16)
@given(
    model=st.sampled_from([*HYBRIDS, WINDOWS]),
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40),
    length=st.integers(1, 12),
    step_tokens=st.sampled_from([12, 64]),
)
def test_drafts_change_no_token(model: str, pairs: list[tuple[int, int]], length: int, step_tokens: int) -> None:
    """Whatever of them is right, in two sequences of one batch."""
    ready, prompts = loaded(model), {"a": words(1, length), "b": words(2, 9)}
    served = Served(replace(ready.config, step_tokens=step_tokens), ready.runner, ready.window)
    proposing(served, prompts, model, 20, iter(pairs))
    assert served.answer(prompts, 20) == {name: answer(prompt, 20, model) for name, prompt in prompts.items()}


@pytest.mark.parametrize("model", ["qwen3_5, nested", "nemotron_h"])
def test_gpu_kernels_answer_alike_in_graphs(model: str) -> None:
    """A first step without a graph, then steps that decode and verify drafts."""
    prompts = {"a": words(40, 9), "b": words(5, 3)}
    config = config_of(model, cells=256, context_length=128, max_sequences=2, session_rows=0, state_slots=8)
    served = Served(config, gpu_runner(config, graphs=True, tokens=4))
    proposing(served, prompts, model, 5, iter([(1, 0), (0, 1), (1, 1)]))  # with at most 4 tokens in a step
    assert served.answer(prompts, 5) == {name: answer(prompt, 5, model) for name, prompt in prompts.items()}
    assert served.runner.replayed > 1
    assert served.engine.stats.accepted > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="without a GPU an engine is loaded onto the CPU")
@pytest.mark.parametrize("model", ["llama", WINDOWS, *OWN])
def test_an_engine_on_a_gpu_answers_as_transformers_does(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as for serving, with real graphs, of sizes that few kernels are compiled for. Which products are fastest
    is measured for one model alone.
    """
    if model != "qwen3_5":
        monkeypatch.setattr(startup, "_choose_products", lambda *_: None)
    room = {"cells": 512, "host_cells": 512, "context_length": 128, "max_sequences": 2, "session_rows": 0}
    drafts = DraftConfig(enabled=False, max_draft=3)
    served = Served(config_of(model, device=DEVICE, step_tokens=6, speculation=drafts, **room))
    assert served.engine.cache.windows is None or model not in HYBRIDS
    assert agents(served, model, 3, 2) == 6
    assert served.engine.stats.prompt_cached > 40
    assert served.runner.graphs is not None
    assert served.runner.replayed > 10


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_that_is_cut_at_any_place_goes_on_right(model: str) -> None:
    served = Served(config_of(model, speculation=DraftConfig(enabled=False)))
    text = words(5, 60)
    for cut in (60, 59, 55, 52, 51, 40, 33, 8, 3):
        prompt = text[:cut] + words(cut, 5)
        assert served.answer({f"c{cut}": prompt}, NEW) == {f"c{cut}": answer(prompt, NEW, model)}, cut


@pytest.mark.parametrize("model", MODELS)
def test_sessions_and_their_forks(model: str) -> None:
    served = Served(config_of(model))
    served.give(OpenSession("", "s", request_id="open"))
    first, second, third = words(1, 40), words(2, 9), words(3, 9)
    served.submit("a", first, session=SessionTurn("s"))
    served.run()
    history = first + tuple(served.out["a"])
    served.give(ForkSession("", "s", "t", request_id="fork"))
    served.submit("b", second, session=SessionTurn("s"))
    served.submit("c", third, session=SessionTurn("t"))
    served.run()
    assert served.out["a"] == answer(first, NEW, model)
    assert served.out["b"] == answer(history + second, NEW, model)
    assert served.out["c"] == answer(history + third, NEW, model)
    assert min(served.cached("b"), served.cached("c")) >= len(history) - (1 if model == WINDOWS else 2 + NEW)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_computed_ahead_is_found(model: str) -> None:
    served = Served(config_of(model))
    ahead = words(7, 45)
    served.submit("w", ahead, 0, program_id="p", background=PartialPrefill("h", 60.0))
    served.run()
    served.submit("a", ahead + words(8, 6), program_id="p")
    served.run()
    assert served.cached("a") == len(ahead)
    assert served.out["a"] == answer(ahead + words(8, 6), NEW, model)
