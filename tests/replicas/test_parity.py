"""The whole engine over a real model: greedy output is transformers' `generate`, token for token, in float32.

On a GPU if there is one.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from kv_audit import check_cache
from transformers import AutoModelForCausalLM

from holdfast.kernels import native
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Finished, Submit, Tokens

NEW = 12


@cache
def reference() -> list[tuple[list[int], list[int]]]:
    """16 prompts of 1 to 700 tokens, and what transformers makes of them. Half are real text, half random ids."""
    torch.set_num_threads(1)
    ready = loaded("own", 16)
    model = AutoModelForCausalLM.from_pretrained(model_folder("pocket"), dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    pairs = []
    for i in range(16):
        if i % 2:
            words = ["What is", "the weather", "in Paris", "run", "the tests", "{", '"name"', "42", "\n"]
            prompt = ready.tokenizer.encode(" ".join(rng.choice(words, 4 + 18 * i)), add_special_tokens=False)
        else:
            prompt = rng.integers(0, ready.vocabulary, 1 + 22 * i).tolist()
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, do_sample=False
            )
        pairs.append((prompt, out[0, len(prompt) :].tolist()))
    return pairs


@cache
def loaded(decoder: str, page_size: int):
    config = EngineConfig(cells=16384, threads=1, dtype="float32", decoder=decoder, page_size=page_size)
    return load_runner(config)


def generate(
    engine: Engine, prompts: list[list[int]], temperature: float = 0.0
) -> tuple[list[list[int]], list[Finished]]:
    """All prompts at once; their completions and ends, in order."""
    out, ends, sampling = {str(i): [] for i in range(len(prompts))}, {}, Sampling(NEW, temperature)
    for i, prompt in enumerate(prompts):
        assert not engine.handle(Submit(str(i), tokens=np.asarray(prompt, np.int32), sampling=sampling), 0.0)
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Tokens):
                out[event.request_id] += event.tokens
            else:
                ends[event.request_id] = event
    check_cache(engine.cache)
    return list(out.values()), [ends[str(i)] for i in range(len(prompts))]


def engine_of(decoder: str, page_size: int = 16, **settings) -> Engine:
    ready = loaded(decoder, page_size)
    return Engine(replace(ready.config, **settings), ready.runner, ready.eos, ready.vocabulary)


WAYS = {
    "own decoder": ("own", 16, {}),
    "transformers": ("transformers", 16, {}),
    "chunks of 16": ("own", 16, {"step_tokens": 16}),
    "pages of 1": ("own", 1, {}),
}


@pytest.mark.parametrize(("way", "batch"), [("own decoder", 1), *((way, 8) for way in WAYS)])
def test_greedy_equals_transformers(way, batch):
    decoder, page_size, settings = WAYS[way]
    engine = engine_of(decoder, page_size, **settings)
    pairs = reference()[:: 3 if batch == 1 else 1]
    for i in range(0, len(pairs), batch):
        got, _ = generate(engine, [prompt for prompt, _ in pairs[i : i + batch]])
        assert got == [expected for _, expected in pairs[i : i + batch]]


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[native.Level]:
    """Each set of instructions that this processor has, as `cpu_kernels` or HOLDFAST_ENGINE__CPU_KERNELS force it."""
    if request.param not in native.LEVELS[native.LEVELS.index(native.limit("auto")) :]:
        pytest.skip("this processor has no such instructions")
    yield request.param
    native.limit("auto")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_set_of_instructions_answers_alike(level, dtype):
    """Products, norms and attention together: in float32 the very tokens, in the others log probabilities as near as
    rounding leaves them.
    """
    pairs, first = reference()[1::4], first_logprobs()  # before the instructions are others
    drafts = DraftConfig(enabled=dtype == "float32")  # the others draw one token
    ready = load_runner(EngineConfig(cells=8192, threads=1, dtype=dtype, cpu_kernels=level, speculation=drafts))
    engine = Engine(ready.config, ready.runner, ready.eos, ready.vocabulary)
    if dtype == "float32":
        assert generate(engine, [prompt for prompt, _ in pairs])[0] == [expected for _, expected in pairs]
        return
    for (prompt, _), exact in zip(pairs, first, strict=True):
        found = logprobs(engine, prompt)
        assert max(abs(found[token] - value) for token, value in exact.items()) < 0.5


def logprobs(engine: Engine, prompt: list[int]) -> dict[int, float]:
    """Of every token after a prompt."""
    engine.handle(Submit("one", tokens=np.asarray(prompt, np.int32), sampling=Sampling(1, logprobs=1536)), 0.0)
    found: dict[int, float] = {}
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Tokens):
                found = dict(event.logprobs[0].top)
    return found


@cache
def first_logprobs() -> list[dict[int, float]]:
    """In float32, of the ten likeliest first tokens."""
    all_of_them = [logprobs(engine_of("own"), prompt) for prompt, _ in reference()[1::4]]
    return [dict(sorted(each.items(), key=lambda item: -item[1])[:10]) for each in all_of_them]


def test_greedy_equals_transformers_after_a_cache_hit():
    pairs = reference()
    prompts = [prompt for prompt, _ in pairs]
    # Prompts that leave a cached one in the middle of a page.
    forks = [prompt[: len(prompt) // 2] for prompt in prompts if len(prompt) > 40]
    fresh, _ = generate(engine_of("own", without=("prefix_cache",)), forks)
    engine = engine_of("own")  # over the same pages, so after the one above is done
    first, _ = generate(engine, prompts)
    again, ends = generate(engine, prompts)
    assert first == again == [expected for _, expected in pairs]
    assert all(end.usage.cached == len(prompt) - 1 for end, prompt in zip(ends, prompts, strict=True))
    forked, ends = generate(engine, forks)
    assert forked == fresh
    assert all(end.usage.cached > 0 for end in ends)


def test_speculation_changes_no_output():
    temperature = 0.8
    prompts = [prompt for prompt, _ in reference()][1::2]
    engine = engine_of("own")
    drafted, _ = generate(engine, prompts, temperature)
    assert engine.stats.accepted > 0
    plain, _ = generate(engine_of("own", speculation=DraftConfig(enabled=False)), prompts, temperature)
    assert drafted == plain


def test_what_comes_back_from_the_host_changes_no_output():
    """A cache for two prompts at a time, and a second tier for all of them."""
    ready = load_runner(EngineConfig(cells=1024, host_cells=16384, threads=1, dtype="float32"))
    engine = Engine(ready.config, ready.runner, ready.eos, ready.vocabulary)
    prompts, expected = zip(*reference()[4:], strict=True)
    first, _ = generate(engine, list(prompts))
    again, ends = generate(engine, list(prompts))
    assert first == again == list(expected)
    stats = engine.stats
    assert stats.pages_out > 1024 // 16
    assert stats.tokens_reloaded > stats.prompt_computed // 4
    assert stats.failed_moves == 0
    assert engine.occupancy().reload_cells_per_s > 0
    long = [end.usage.cached / end.usage.prompt for end in ends if end.usage.prompt > 100]
    assert min(long) > 0.9
