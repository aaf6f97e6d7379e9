"""The whole engine over a model with recurrent states: greedy tokens are transformers' own, whatever was cached,
preempted, drafted, forked, computed ahead, or brought back from the host.
"""

from dataclasses import replace

import numpy as np
import pytest
from kv_audit import check_cache
from tiny_hybrid import VOCABULARY, Hybrid, answer, tiny_hybrid

from holdfast.replicas.config import DraftConfig, EngineConfig
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
    """An engine over a tiny hybrid, driven by hand."""

    def __init__(self, model: Hybrid = "qwen3_5", **settings: object) -> None:
        defaults = {"cells": 2048, "max_sequences": 8, "session_rows": 3, "state_slots": 24, "dtype": "float32"}
        loaded = load_runner(EngineConfig(model=str(tiny_hybrid(model)[0]), threads=1, **(defaults | settings)))
        self.engine = Engine(loaded.config, loaded.runner, frozenset(), loaded.vocabulary)
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


WAYS: dict[str, dict[str, object]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1},
    "no drafts": {"speculation": DraftConfig(enabled=False)},
    "no cache": {"without": ("prefix_cache",)},
    "steps overlap": {"overlap_steps": "on"},
    "few slots": {"state_slots": 5},
    "few cells": {"cells": 256, "session_rows": 0, "completion_reserve": 1, "admission_ceiling": 1.0},
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "state_slots": 6},
}


CASES: list[tuple[Hybrid, str]] = [("qwen3_5", way) for way in WAYS]
CASES += [("nemotron_h", way) for way in ("as served", "chunks of 7", "few slots", "few cells", "host tier")]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_agents_get_the_tokens_of_transformers(model: Hybrid, way: str) -> None:
    """Eight agents with one preamble, three turns each; every other one leaves its last reply out, as if it was
    thought.
    """
    served = Served(model, **WAYS[way])
    texts = {i: words(0, 40) + words(1 + i, 12 + i) for i in range(8)}
    for turn in range(3):
        for i, text in texts.items():
            served.submit(f"{i}.{turn}", text, program_id=f"p{i}")
        served.run()
        for i, text in texts.items():
            reply = served.out[f"{i}.{turn}"]
            assert reply == answer(text, NEW, model), f"agent {i}, turn {turn}"
            texts[i] = (text[:-2] if i % 2 else text + tuple(reply)) + words(100 * turn + i, 9)
    if way in ("as served", "host tier"):
        stats = served.engine.stats
        assert stats.prompt_cached > 0.5 * (stats.prompt_cached + stats.prompt_computed)
    if way == "host tier":
        assert served.engine.stats.tokens_reloaded > 0
    if way == "few cells":
        assert served.engine.stats.preemptions > 0


def test_a_conversation_that_is_cut_at_any_place_goes_on_right() -> None:
    served = Served(page_size=4, speculation=DraftConfig(enabled=False))
    text = words(5, 60)
    for cut in (60, 59, 55, 52, 51, 40, 33, 8, 3):
        prompt = text[:cut] + words(cut, 5)
        served.submit(f"c{cut}", prompt)
        served.run()
        assert served.out[f"c{cut}"] == answer(prompt, NEW), cut


def test_sessions_and_their_forks() -> None:
    served = Served()
    served.give(OpenSession("", "s", request_id="open"))
    first, second, third = words(1, 40), words(2, 9), words(3, 9)
    served.submit("a", first, session=SessionTurn("s"))
    served.run()
    history = first + tuple(served.out["a"])
    served.give(ForkSession("", "s", "t", request_id="fork"))
    served.submit("b", second, session=SessionTurn("s"))
    served.submit("c", third, session=SessionTurn("t"))
    served.run()
    assert served.out["a"] == answer(first, NEW)
    assert served.out["b"] == answer(history + second, NEW)
    assert served.out["c"] == answer(history + third, NEW)
    assert min(served.cached("b"), served.cached("c")) >= len(history) - 2 - NEW


def test_a_prompt_computed_ahead_is_found() -> None:
    served = Served()
    ahead = words(7, 45)
    served.submit("w", ahead, 0, program_id="p", background=PartialPrefill("h", 60.0))
    served.run()
    served.submit("a", ahead + words(8, 6), program_id="p")
    served.run()
    assert served.cached("a") == len(ahead)
    assert served.out["a"] == answer(ahead + words(8, 6), NEW)


def test_a_reply_goes_on_on_another_replica() -> None:
    """What a client has already is a part of the prompt there."""
    prompt = words(9, 50)
    first, second = Served(), Served()
    first.submit("a", prompt, 3)
    first.run()
    begun = tuple(first.out["a"])
    second.submit("a", prompt + begun, NEW - 3, n_generated=3)
    second.run()
    assert begun + tuple(second.out["a"]) == tuple(answer(prompt, NEW))
