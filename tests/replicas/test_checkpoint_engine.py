"""The whole engine over models that go on from checkpoints, with recurrent states or with windows that have pages of
their own: greedy tokens are transformers' own, whatever was cached, preempted, drafted, forked, computed ahead, or
brought back from the host.
"""

from dataclasses import replace

import numpy as np
import pytest
from kv_audit import check_cache
from tiny_models import VOCABULARY, WINDOW, Tiny, answer, tiny

from holdfast.replicas.config import DraftConfig, EngineConfig, least_window_cells
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Event,
    Finished,
    ForkSession,
    OpenSession,
    PartialPrefill,
    SessionTurn,
    Submit,
    Tokens,
)

NEW = 8


def words(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist())


class Served:
    """An engine over a tiny model, driven by hand."""

    def __init__(self, model: Tiny = "qwen3_5", **settings: object) -> None:
        defaults = {"cells": 2048, "max_sequences": 8, "session_rows": 3, "dtype": "float32"}
        defaults |= {"page_size": 4} if model == "qwen3" else {"state_slots": 24}
        loaded = load_runner(EngineConfig(model=str(tiny(model)[0]), threads=1, **(defaults | settings)))
        window = loaded.window
        self.engine = Engine(loaded.config, loaded.runner, frozenset(), loaded.vocabulary, window=window)
        self.out: dict[str, list[int]] = {}
        self.ends: dict[str, Event] = {}

    def give(self, command: Submit | OpenSession | ForkSession) -> None:
        self.out[command.request_id] = []
        self.take(self.engine.handle(command, 0.0))

    def submit(self, name: str, prompt: tuple[int, ...], new: int = NEW, **more: object) -> None:
        tokens = np.asarray(prompt, np.int32)
        self.give(replace(Submit(name, tokens=tokens, sampling=Sampling(new)), **more))

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.out[event.request_id] += event.tokens
            else:
                self.ends[event.request_id] = event

    def run(self) -> None:
        while self.engine.busy:
            self.take(self.engine.step(0.0))
            check_cache(self.engine.cache)

    def cached(self, name: str) -> int:
        end = self.ends[name]
        assert isinstance(end, Finished), end
        return end.usage.cached


def few(page_size: int) -> int:
    return least_window_cells(WINDOW + 1, page_size)


_SHORT: dict[str, object] = {"session_rows": 0, "completion_reserve": 1, "admission_ceiling": 1.0}
WITH_STATES: dict[str, dict[str, object]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1},
    "no drafts": {"speculation": DraftConfig(enabled=False)},
    "no cache": {"without": ("prefix_cache",)},
    "steps overlap": {"overlap_steps": "on"},
    "few slots": {"state_slots": 5},
    "few cells": {"cells": 256, **_SHORT},
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "state_slots": 6},
}
WITH_WINDOWS: dict[str, dict[str, object]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1, "window_cells": few(1)},
    "no drafts": {"speculation": DraftConfig(enabled=False)},
    "steps overlap": {"overlap_steps": "on", "window_cells": 3 * few(4)},
    "few window pages": {"window_cells": few(4)},
    "few cells": {"cells": 256, **_SHORT},
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "window_cells": few(4)},
    "in int8": {"kv_dtype": "int8"},
}
CASES: list[tuple[Tiny, str]] = [("qwen3_5", way) for way in WITH_STATES]
CASES += [("nemotron_h", way) for way in ("as served", "chunks of 7", "few slots", "few cells", "host tier")]
CASES += [("qwen3", way) for way in WITH_WINDOWS]
MODELS: tuple[Tiny, ...] = ("qwen3_5", "qwen3")


@pytest.mark.parametrize(("model", "way"), CASES)
def test_agents_get_the_tokens_of_transformers(model: Tiny, way: str) -> None:
    """Eight agents with one preamble, three turns each; every other one leaves its last reply out, as if it was
    thought.
    """
    served = Served(model, **(WITH_WINDOWS if model == "qwen3" else WITH_STATES)[way])
    assert (served.engine.cache.windows is not None) == (model == "qwen3")
    right = 0
    texts = {i: words(0, 40) + words(1 + i, 12 + i) for i in range(8)}
    for turn in range(3):
        for i, text in texts.items():
            served.submit(f"{i}.{turn}", text, program_id=f"p{i}")
        served.run()
        for i, text in texts.items():
            reply = served.out[f"{i}.{turn}"]
            right += reply == answer(text, NEW, model)
            texts[i] = (text[:-2] if i % 2 else text + tuple(reply)) + words(100 * turn + i, 9)
    assert right == 24 or (way == "in int8" and right > 12)
    stats = served.engine.stats
    if way == "as served" or (way == "host tier" and model != "qwen3"):
        assert stats.prompt_cached > 0.5 * (stats.prompt_cached + stats.prompt_computed)
    if way == "host tier":
        assert stats.tokens_reloaded > 0
    if way == "few cells" and model != "qwen3":
        assert stats.preemptions > 0


def test_a_model_that_transformers_runs_keeps_every_page() -> None:
    served = Served("qwen3", decoder="transformers")
    assert served.engine.cache.windows is None
    served.submit("a", words(1, 50))
    served.run()
    assert served.out["a"] == answer(words(1, 50), NEW, "qwen3")


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_that_is_cut_at_any_place_goes_on_right(model: Tiny) -> None:
    served = Served(model, page_size=4, speculation=DraftConfig(enabled=False))
    text = words(5, 60)
    for cut in (60, 59, 55, 52, 51, 40, 33, 8, 3):
        prompt = text[:cut] + words(cut, 5)
        served.submit(f"c{cut}", prompt)
        served.run()
        assert served.out[f"c{cut}"] == answer(prompt, NEW, model), cut


@pytest.mark.parametrize("model", MODELS)
def test_sessions_and_their_forks(model: Tiny) -> None:
    served = Served(model)
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
    assert min(served.cached("b"), served.cached("c")) >= len(history) - (1 if model == "qwen3" else 2 + NEW)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_computed_ahead_is_found(model: Tiny) -> None:
    served = Served(model)
    ahead = words(7, 45)
    served.submit("w", ahead, 0, program_id="p", background=PartialPrefill("h", 60.0))
    served.run()
    served.submit("a", ahead + words(8, 6), program_id="p")
    served.run()
    assert served.cached("a") == len(ahead)
    assert served.out["a"] == answer(ahead + words(8, 6), NEW, model)


@pytest.mark.parametrize("model", MODELS)
def test_a_reply_goes_on_on_another_replica(model: Tiny) -> None:
    """What a client has already is a part of the prompt there."""
    prompt = words(9, 50)
    first, second = Served(model), Served(model)
    first.submit("a", prompt, 3)
    first.run()
    begun = tuple(first.out["a"])
    second.submit("a", prompt + begun, NEW - 3, n_generated=3)
    second.run()
    assert begun + tuple(second.out["a"]) == tuple(answer(prompt, NEW, model))
