"""What a reply depends on besides its request, as docs/concepts.md says it for each precision on a CPU.

A request alone, one token at a time after a prompt computed in one piece, against the same request among seven others:
beside parts of prompts, with its own prompt cut otherwise, with drafts. By our own decoder and by that of transformers.
Not yet measured on a GPU.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from tiny_decoder import CONTEXT, VOCABULARY, decoder, transformers_decoder

from holdfast.kernels import attention, layer, linear, native
from holdfast.kernels.sampling import gumbel_noise, row_keys
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.runner import ModelRunner
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.requests import Submit, Tokens

NEW = 12
MOVES = defaultdict(lambda: 0.5, float32=1e-4)  # how far a token's log probability may move
WAYS = {"among others": {}, "cut, with drafts": {"step_tokens": 40, "speculation": DraftConfig()}}
OWN = [(model, dtype) for model in ("tiny", "pocket") for dtype in ("float32", "bfloat16", "int8")]
OWN += [("pocket", "float32/int8"), ("tiny", "bfloat16/int8")]  # with KV in int8
OUR_KERNELS = native.level() != "torch" and not any(each.LIBRARY.missing for each in (attention, layer, linear))
ALL = [*OWN, ("transformers", "float32"), ("transformers", "bfloat16")]  # the tiny one again, by the other decoder


@dataclass(frozen=True)
class Served:
    """A model, and eight requests: half repeat themselves, so that drafts come true."""

    config: EngineConfig
    runner: ModelRunner
    vocabulary: int
    prompts: tuple[tuple[int, ...], ...]

    def replies(self, numbers: list[int], temperature: float, **settings) -> dict[int, list[TokenLogprobs]]:
        """What the requests of these numbers are answered at once, with the log probabilities of all tokens."""
        config = replace(
            self.config, without=("prefix_cache",), **({"speculation": DraftConfig(enabled=False)} | settings)
        )
        engine = Engine(config, self.runner, frozenset(), self.vocabulary)
        out: dict[int, list[TokenLogprobs]] = {number: [] for number in numbers}
        for number in numbers:
            sampling = Sampling(NEW, temperature, seed=number, logprobs=self.vocabulary)
            engine.handle(Submit(f"{number}", tokens=np.array(self.prompts[number], np.int32), sampling=sampling), 0.0)
        while engine.busy:
            for event in engine.step(0.0):
                if isinstance(event, Tokens):
                    out[int(event.request_id)] += event.logprobs
        assert all(len(reply) == NEW for reply in out.values())
        assert not config.speculation.enabled or engine.stats.drafted > 0
        return out


def prompts_of(vocabulary: int, most: int) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(4)
    lengths = [most, 1, most // 2, 17, most - 3, 2, most // 3, 30]
    return tuple(
        tuple(np.resize(rng.integers(0, vocabulary, length if i % 2 else 9), length).tolist())
        for i, length in enumerate(lengths)
    )


@cache
def served(model: str, dtype: str) -> Served:
    torch.set_num_threads(1)
    dtype, _, kv_dtype = dtype.partition("/")
    if model == "pocket":
        ready = load_runner(EngineConfig(cells=4096, threads=1, dtype=dtype, kv_dtype=kv_dtype or "auto"))
        return Served(ready.config, ready.runner, ready.vocabulary, prompts_of(ready.vocabulary, 200))
    config = EngineConfig(cells=2048, page_size=16, max_sequences=8, session_rows=0, context_length=CONTEXT)
    kept = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    weights, kv = (
        transformers_decoder(128, 16, kept)
        if model == "transformers"
        else decoder(Decoder, 128, 16, dtype=kept, int8=dtype == "int8", kv_dtype=kv_dtype or "auto")
    )
    runner = ModelRunner(weights, kv, 8, CONTEXT)
    return Served(replace(config, admission_ceiling=1.0), runner, VOCABULARY, prompts_of(VOCABULARY, 100))


@cache
def alone(model: str, dtype: str, temperature: float) -> list[list[TokenLogprobs]]:
    one = served(model, dtype)
    return [one.replies([number], temperature)[number] for number in range(8)]


def scores(entry: TokenLogprobs, temperature: float, seed: int, position: int) -> dict[int, float]:
    """What the token is the largest of, but for a number that is the same for all."""
    if not temperature:
        return dict(entry.top)
    noise = gumbel_noise(torch.from_numpy(row_keys([seed], [position])), len(entry.top))[0].tolist()
    return {token: value / temperature + noise[token] for token, value in entry.top}


@pytest.mark.parametrize(("way", "temperature"), [("among others", 0.0), ("cut, with drafts", 0.9)])
@pytest.mark.parametrize(("model", "dtype"), ALL)
def test_a_reply_is_the_same_in_any_company_but_for_what_rounding_decides(model, dtype, temperature, way):
    """By our own kernels to the bit. By others every token is the same in float32; else one may differ where the best
    scores lie as close as rounding moves them, and from there on the reply is another one."""
    one = served(model, dtype)
    apart, together = alone(model, dtype, temperature), one.replies(list(range(8)), temperature, **WAYS[way])
    if OUR_KERNELS and (model, dtype) in OWN:
        assert apart == list(together.values())
    for number, reply in enumerate(apart):
        for i, (mine, other) in enumerate(zip(reply, together[number], strict=True)):
            theirs = dict(other.top)
            assert max(abs(value - theirs[token]) for token, value in mine.top[:20]) <= MOVES[dtype]
            if mine.token != other.token:
                assert dtype != "float32"
                found = scores(mine, temperature, number, len(one.prompts[number]) + i)
                assert found[mine.token] == max(found.values())
                assert found[mine.token] - found[other.token] <= 2 * MOVES[dtype] / (temperature or 1.0)
                break


@pytest.mark.parametrize(("model", "dtype"), [("pocket", "int8"), *ALL[-2:]])
def test_the_same_steps_give_the_same_bits(model, dtype):
    settings = WAYS["cut, with drafts"]
    first, second = (served(model, dtype).replies(list(range(8)), 0.9, **settings) for _ in range(2))
    assert first == second
