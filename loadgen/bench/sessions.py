"""What a question to a session costs, by how much the session has been told:
``python -m holdfast.loadgen.bench.sessions [--json FILE]``.

Two sessions over a model of random weights on the CPU get questions by turns. Reading the KV of a long context takes
time with any engine; it is measured in the attention and printed apart. The rest has a bar: planning, aliasing the
context's pages, the model's products, sampling. The context's cells are not computed: their values do not change the
time of reading them. Times are processor time of one thread.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from holdfast.kernels import attention as kernels
from holdfast.loadgen.bench.harness import Figure, parser, report_figures, save_random_llama
from holdfast.loadgen.bench.micro import restoring
from holdfast.replicas.config import POCKET, DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model import decoder
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Flight, Runner, Sampling, StepPlan
from holdfast.replicas.requests import Finished, OpenSession, SessionTurn, Submit

CONTEXTS = (1024, 65536)
QUESTION, ANSWER = 32, 16  # tokens
_ROUNDS, _WARM_UP = 12, 2
_MARGIN = 4096  # cells beyond the contexts


class Reading:
    """Attention with a watch: what a step spends in it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._attend: Any = kernels.paged_attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        out = self._attend(*args, **kwargs)
        self.seconds += time.thread_time() - begin
        return out


class Told:
    """A runner that computes of what is only appended one token a chunk, and takes the rest as done."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def begin(self, plan: StepPlan) -> Flight:
        chunks = tuple(each if each.draw else replace(each, tokens=each.tokens[:1]) for each in plan.chunks)
        return self._runner.begin(replace(plan, chunks=chunks))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one question, and how many of them went into attention."""

    whole: float
    reading: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 if a bar is missed."""
    options = parser("sessions", "A question's cost by a session's length.").parse_args(argv)
    return report_figures(chain(aliasing(), questions()), options.json)


def aliasing(rounds: int = 15) -> Iterator[Figure]:
    """Taking over a cached context's pages, as `micro` measures it; medians of some rounds, for it is microseconds."""
    measured = [list(restoring()) for _ in range(rounds)]
    for figure in zip(*measured, strict=True):
        yield replace(figure[0], value=median(each.value for each in figure))


def questions(contexts: tuple[int, int] = CONTEXTS, rounds: int = _ROUNDS) -> Iterator[Figure]:
    """A question at a short and at a long context, by turns; medians of the rounds."""
    short, long = contexts
    with tempfile.TemporaryDirectory() as folder:
        costs = _asked(_random_model(Path(folder), 2 * long), contexts, rounds)
    rest = {n: median(cost.whole - cost.reading for cost in costs[n]) for n in contexts}
    whole = {n: median(cost.whole for cost in costs[n]) for n in contexts}
    for n in contexts:
        yield Figure(f"a question at {n:,} tokens, reading KV apart", rest[n] * 1e3, "ms")
        yield Figure("  reading KV", median(cost.reading for cost in costs[n]) * 1e3, "ms")
    yield Figure(f"  {long:,} over {short:,}, reading KV apart", rest[long] / rest[short], "times", 1.5)
    yield Figure(f"  {long:,} over {short:,}, all", whole[long] / whole[short], "times")


def _asked(model: str, contexts: Sequence[int], rounds: int) -> dict[int, list[Cost]]:
    config = EngineConfig(
        model=model,
        device="cpu",
        threads=1,
        cells=(sum(contexts) + _MARGIN) // 16 * 16,
        admission_ceiling=1.0,
        max_sequences=8,
        session_rows=4,
        speculation=DraftConfig(enabled=False),
    )
    loaded = load_runner(config)
    engine = Engine(loaded.config, Told(loaded.runner), loaded.eos, loaded.vocabulary, window=loaded.window)
    rng = np.random.default_rng(0)
    for n in contexts:
        engine.handle(OpenSession("", str(n), request_id=f"open {n}"), 0.0)
        tokens = rng.integers(3, loaded.vocabulary, n).astype(np.int32)
        _run(engine, Submit(f"append {n}", tokens=tokens, sampling=Sampling(0), session=SessionTurn(str(n))))
    watch = Reading()
    vars(decoder)["paged_attention"] = watch
    costs: dict[int, list[Cost]] = {n: [] for n in contexts}
    try:
        for i in range(_WARM_UP + rounds):
            for n in contexts:
                tokens = rng.integers(3, loaded.vocabulary, QUESTION).astype(np.int32)
                sampling = Sampling(ANSWER, ignore_eos=True)
                query = Submit(
                    f"query {n} {i}", tokens=tokens, sampling=sampling, session=SessionTurn(str(n), keep=False)
                )
                begin, watch.seconds = time.thread_time(), 0.0
                _run(engine, query)
                if i >= _WARM_UP:
                    costs[n].append(Cost(time.thread_time() - begin, watch.seconds))
    finally:
        vars(decoder)["paged_attention"] = kernels.paged_attention
    return costs


def _run(engine: Engine, submit: Submit) -> None:
    """To its end; AssertionError where that is not as it should be."""
    events = engine.handle(submit, 0.0)
    while engine.busy:
        events += engine.step(0.0)
    last = events[-1]
    assert isinstance(last, Finished), last
    if submit.sampling.max_tokens:
        assert last.usage.prompt - last.usage.cached <= QUESTION + engine.config.page_size, last.usage


def _random_model(folder: Path, context: int) -> str:
    """A model of 87 million parameters that knows nothing, with Pocket's tokenizer.

    Its weights are read from memory in every step, as a larger model's are: those of Pocket would stay in the
    processor's caches as long as nothing else is read.
    """
    save_random_llama(
        folder,
        torch.bfloat16,
        vocab_size=1536,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(Path(model_folder(POCKET)) / name)
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
