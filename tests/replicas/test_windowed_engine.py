"""The whole engine over models whose windows have pages of their own: greedy tokens are transformers' own, whatever was
cached, preempted, drafted, forked, computed ahead, or brought back from the host.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from families import save
from kv_audit import check_cache

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

VOCABULARY, NEW, WINDOW = 97, 8, 12
_FOLDER = TemporaryDirectory(prefix="tiny-windowed")


@cache
def tiny() -> tuple[str, torch.nn.Module]:
    """A Qwen3 with a window in two layers of three: its folder, and transformers' model."""
    config = tf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    folder = Path(_FOLDER.name)
    model = save(config, folder)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    return str(folder), model


@cache
def answer(prompt: tuple[int, ...], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = tiny()[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def words(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, n).tolist())


class Served:
    """An engine over the tiny model, driven by hand."""

    def __init__(self, **settings: object) -> None:
        defaults = {"cells": 2048, "max_sequences": 8, "session_rows": 3, "page_size": 4, "dtype": "float32"}
        self.loaded = loaded = load_runner(EngineConfig(model=tiny()[0], threads=1, **(defaults | settings)))
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


WAYS: dict[str, dict[str, object]] = {
    "as served": {},
    "chunks of 7": {"step_tokens": 7},
    "pages of 1": {"page_size": 1, "window_cells": few(1)},
    "no drafts": {"speculation": DraftConfig(enabled=False)},
    "steps overlap": {"overlap_steps": "on", "window_cells": 3 * few(4)},
    "few window pages": {"window_cells": few(4)},
    "few cells": {"cells": 256, "session_rows": 0, "completion_reserve": 1, "admission_ceiling": 1.0},
    "host tier": {"cells": 320, "session_rows": 0, "host_cells": 2048, "window_cells": few(4)},
    "in int8": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("way", WAYS)
def test_agents_get_the_tokens_of_transformers(way: str) -> None:
    """Eight agents with one preamble, three turns each; every other one leaves its last reply out."""
    served = Served(**WAYS[way])
    cache = served.engine.cache
    assert cache.windows is not None
    right = 0
    texts = {i: words(0, 40) + words(1 + i, 12 + i) for i in range(8)}
    for turn in range(3):
        for i, text in texts.items():
            served.submit(f"{i}.{turn}", text, program_id=f"p{i}")
        served.run()
        for i, text in texts.items():
            reply = served.out[f"{i}.{turn}"]
            right += reply == answer(text)
            texts[i] = (text[:-2] if i % 2 else text + tuple(reply)) + words(100 * turn + i, 9)
    assert right == 24 or (way == "in int8" and right > 12)
    stats = served.engine.stats
    if way == "as served":
        assert stats.prompt_cached > 0.5 * (stats.prompt_cached + stats.prompt_computed)
    if way == "host tier":
        assert stats.tokens_reloaded > 0


def test_a_model_that_transformers_runs_keeps_every_page() -> None:
    served = Served(decoder="transformers")
    assert served.engine.cache.windows is None
    served.submit("a", words(1, 50))
    served.run()
    assert served.out["a"] == answer(words(1, 50))


def test_a_conversation_that_is_cut_at_any_place_goes_on_right() -> None:
    served = Served(speculation=DraftConfig(enabled=False))
    text = words(5, 60)
    for cut in (60, 59, 55, 52, 51, 40, 33, 8, 3):
        prompt = text[:cut] + words(cut, 5)
        served.submit(f"c{cut}", prompt)
        served.run()
        assert served.out[f"c{cut}"] == answer(prompt), cut


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
    assert served.out["a"] == answer(first)
    assert served.out["b"] == answer(history + second)
    assert served.out["c"] == answer(history + third)
    assert min(served.cached("b"), served.cached("c")) >= len(history) - 1


def test_a_prompt_computed_ahead_is_found() -> None:
    served = Served()
    ahead = words(7, 45)
    served.submit("w", ahead, 0, program_id="p", background=PartialPrefill("h", 60.0))
    served.run()
    served.submit("a", ahead + words(8, 6), program_id="p")
    served.run()
    assert served.cached("a") == len(ahead)
    assert served.out["a"] == answer(ahead + words(8, 6))


def test_a_reply_goes_on_on_another_replica() -> None:
    """What a client has already is a part of the prompt there."""
    prompt = words(9, 50)
    first, second = Served(), Served()
    first.submit("a", prompt, 3)
    first.run()
    begun = tuple(first.out["a"])
    second.submit("a", prompt + begun, NEW - 3, n_generated=3)
    second.run()
    assert begun + tuple(second.out["a"]) == tuple(answer(prompt))
