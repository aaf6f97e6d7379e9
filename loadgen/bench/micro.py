"""What the pieces around the model cost, against their bars: ``python -m holdfast.loadgen.bench.micro [--json FILE]``.

No model runs. Each figure is processor time of this thread, the best of a few rounds or the median of many steps, so
other work on the machine hardly counts.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count, cycle
from statistics import median

import numpy as np

from holdfast.loadgen.bench.drafts import decoding, draft
from holdfast.loadgen.bench.harness import Figure, parser, report_figures, seconds
from holdfast.loadgen.bench.workload import Scenario, rounds
from holdfast.loadgen.simulator.policies import RETENTION
from holdfast.replicas.config import POCKET, DraftConfig, EngineConfig, RetentionConfig
from holdfast.replicas.constraints.guidance import AVAILABLE
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.weights import load_tokenizer
from holdfast.replicas.plan import Drawn, Landed, Sampling, StepOutput, StepPlan, step_cost
from holdfast.replicas.programs import Sequence
from holdfast.replicas.requests import ChatPrompt, Finished, OpenSession, SessionTurn, Submit, TurnEnded
from holdfast.replicas.retention.latency import LatencyBook, LatencySnapshot, Pauses
from holdfast.replicas.retention.policy import (
    POLICIES,
    Conditions,
    Pause,
    RestoreCost,
    RetentionPolicy,
    retention_policy,
)
from holdfast.replicas.speculation.drafter import Drafter
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.types import TokenIds

PAGE = 16
NODES = 100_000
_ROUNDS = 5
_RUNNING, _WAITING, _QUEUED = 64, 10_000, 1_000  # sequences
_PROMPT, _PREAMBLE = 200, 2_000  # tokens
_PINNED, _SESSIONS = 500, 16
_SHORT = _PINNED * (_PROMPT + 8) + _RUNNING * (_PROMPT + 1024 + 2 * PAGE)  # cells; a reply is taken for 1,024 tokens
_LEARNED_FROM = 400  # prompts
_CALLS, _TOOLS = 5_000, 20  # of which statistics are kept
_STEPS, _WARM_UP = 200, 40
_VOCABULARY = 50_000
_REPLY = 128  # tokens of a turn that are replayed
_COST = step_cost((1, 8, 64, 256), (0.01, 0.012, 0.03, 0.1))  # of a model that gains by drafts


def main(argv: SequenceOf[str] | None = None) -> int:
    """Measure and print all; exit status 1 if a bar is missed."""
    options = parser("micro", "Costs of the pieces around the model.").parse_args(argv)
    parts = restoring(), tree(), drafting(), scheduling(), retention(), text(), masks()
    return report_figures(chain(*parts), options.json)


def restoring() -> Iterator[Figure]:
    """Aliasing a cached prefix, short and long, and finding it."""
    cache = KVCache(3 * 65536 // PAGE, PAGE)
    rng = np.random.default_rng(0)
    short, long = (rng.integers(0, 30000, n + 1).astype(np.int32) for n in (1024, 65536))
    for tokens in (short, long):
        _save(cache, tokens, 0.0)
    walk = [_best(partial(cache.peek, "", tokens), 20) for tokens in (short, long)]
    whole = [_best(partial(_restore, cache, tokens), 20) for tokens in (short, long)]
    alias = [max(a - w, 1e-9) for a, w in zip(whole, walk, strict=True)]
    yield Figure("restore 1k cached tokens, match included", whole[0] * 1e6, "us")
    yield Figure("restore 64k cached tokens, match included", whole[1] * 1e6, "us")
    yield Figure("  64k over 1k, without the match", alias[1] / alias[0], "times", 1.3)
    yield Figure("match, of 64k tokens", walk[1] * 1e6 / 65536, "us/token", 1.0)


def tree() -> Iterator[Figure]:
    """A tree of many nodes: matching, saving a new branch (which evicts one) and continuing one."""
    cache = KVCache(NODES, PAGE)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30000, (NODES + 4000, PAGE + 1)).astype(np.int32)
    for now, tokens in enumerate(prompts[:NODES]):
        _save(cache, tokens, float(now))
    fresh = iter(prompts[NODES:])
    late = iter(prompts[NODES - 3000 : NODES])
    yield Figure(f"match among {NODES:,} nodes", _best(lambda: cache.peek("", next(late)), 200) * 1e6, "us", 100)
    yield Figure("  save a branch, evicting one", _best(lambda: _save(cache, next(fresh), 1e9), 200) * 1e6, "us", 100)
    yield Figure("  restore and drop", _best(lambda: _restore(cache, next(late)), 200) * 1e6, "us", 100)


def drafting() -> Iterator[Figure]:
    """Proposing, gating and learning, over conversations replayed with the answers they have."""
    side = _text_side(EngineConfig())
    turns = [
        (side.encode(lane[i]).tokens, side.encode(lane[i + 1]).tokens)
        for each in rounds(Scenario("drafting", lanes=32, turns=8, rounds=1))
        for lane in each.lanes
        for i in range(len(lane) - 1)
    ]
    for together in (1, 8, 64):
        yield Figure(f"drafting, {together} sequences, a sequence and step", _drafting(turns, together), "us", 30)


def scheduling() -> Iterator[Figure]:
    """Planning and committing a step, without a model; drafts are counted above. The median of the steps."""
    yield Figure("plan and commit, 64 decoding", _step_ms(), "ms", 0.5)
    yield Figure("plan and commit, 64 decoding, drafter on", _step_ms(drafts=True), "ms")
    for what, crowd in {
        "10,000 waiting": _Crowd(_WAITING),
        "10,000 waiting over one preamble": _Crowd(_WAITING, preamble=_PREAMBLE),
        "10,000 waiting, 16 open sessions": _Crowd(_WAITING, sessions=_SESSIONS),
        "1,000 waiting": _Crowd(_QUEUED),
        "1,000 waiting, 500 programs pinned": _Crowd(_QUEUED, pinned=_PINNED),
        "the same, short of cells": _Crowd(_QUEUED, pinned=_PINNED, short=True),
        "the same under expected_waste": _Crowd(_QUEUED, pinned=_PINNED, short=True, policy="expected_waste"),
    }.items():
        yield Figure(f"plan and commit, 64 decoding, {what}", _step_ms(crowd), "ms", 2.0)


def retention() -> Iterator[Figure]:
    """What each policy takes for a turn that ends, where it has just been told of the tools."""
    rng, book = random.Random(0), LatencyBook()
    pauses = Pauses()
    for call in range(_CALLS):
        tool, seconds = f"tool{call % _TOOLS}", rng.lognormvariate(0.0, 1.5)
        book.record("", tool, seconds)
        pause = pauses.began("", tool, float(call))
        if call % 4:
            pause.end(call + seconds, returned=True)
    known = book.snapshot()
    ended = Pause("", "tool0", 20_000)
    cost = RestoreCost(1e-9, 1e-4, 0.02)
    conditions = Conditions(1.0, mean_turns=5.0, others=30_000, paused=100_000, returning=5000.0, restore=cost)
    for name in (*POLICIES, *RETENTION):
        policy = retention_policy(RETENTION.get(name, name))
        asked = range(_ROUNDS * 200)
        local = partial(pauses.known, now=_CALLS)
        news = iter([(replace(known), replace(conditions, local=cache(local))) for _ in asked])
        took = _best(partial(_ask, policy, ended, news), 200)
        yield Figure(f"how long a turn's cells are kept, {name}", took * 1e6, "us", 200)


def text() -> Iterator[Figure]:
    """Rendering and tokenizing the prompts of a long conversation, turn by turn."""
    (each,) = rounds(Scenario("text", lanes=1, turns=30, rounds=1))
    prompts = each.lanes[0]
    on = EngineConfig()
    for name, config in ("with the token cache", on), ("without", replace(on, without=("tokenize_cache",))):
        sides = [_text_side(config) for _ in range(3)]
        took = min(seconds(partial(_tokenize_all, side, prompts), time.thread_time) for side in sides)
        yield Figure(f"render and tokenize, {name}, a turn", took / len(prompts) * 1e6, "us")


def masks() -> Iterator[Figure]:
    """Which tokens a constrained reply may have next: one row, and a row for each of eight drafts."""
    if not AVAILABLE:
        return
    (each,) = rounds(Scenario("masks", lanes=1, turns=1, rounds=1, burst=True))
    prompt = each.lanes[0][0]
    required = ChatPrompt(prompt.messages, prompt.tools, tool_choice="required")
    side = _text_side(EngineConfig())
    begin = time.thread_time()
    matcher = side.constraints(required).matcher
    yield Figure(f"compile a grammar of {len(prompt.tools)} tools, once", (time.thread_time() - begin) * 1e6, "us")
    assert matcher is not None
    rows = np.zeros((1, matcher.words), np.int32)
    yield Figure("mask of one row", _best(lambda: matcher.fill([], rows), 100) * 1e6, "us")


def _ask(policy: RetentionPolicy, pause: Pause, news: Iterator[tuple[LatencySnapshot, Conditions]]) -> None:
    known = next(news)
    policy.ttl(pause, *known)
    policy.away(pause, *known)


def _text_side(config: EngineConfig) -> TextSide:
    return TextSide(load_tokenizer(inspect_model(POCKET)), config)


def _tokenize_all(side: TextSide, prompts: Iterable[ChatPrompt]) -> None:
    for prompt in prompts:
        side.encode(prompt)


def _save(cache: KVCache, tokens: TokenIds, now: float) -> None:
    holding = cache.acquire("", tokens, now).holding
    cache.grow(holding, len(tokens) - 1)
    cache.finish(holding, tokens[:-1], len(tokens) - 1, now)


def _restore(cache: KVCache, tokens: TokenIds) -> None:
    cache.drop(cache.acquire("", tokens, 1e9).holding)


def _drafting(turns: Iterable[tuple[TokenIds, TokenIds]], together: int) -> float:
    """Microseconds a sequence and step, up to `together` of them in each step; indexing prompts is left out."""
    drafter = Drafter(DraftConfig(), EngineStats(), _COST)
    order = [decoding(f"{i}", "", text[: len(prompt) + _REPLY], len(prompt)) for i, (prompt, text) in enumerate(turns)]
    random.Random(0).shuffle(order)
    half = len(order) // 2
    drafter.catch_up(order)
    for sequence in order[:half]:  # these are in the memory
        drafter.learn(sequence, sequence.buffer[sequence.n_prompt :].tolist())
        drafter.close(sequence)
    drafter.catch_up(())
    groups = [order[i : i + together] for i in range(half, len(order), together)]
    begin = time.thread_time()  # read once: where that takes a call into the kernel, it costs as much as some drafts
    count = sum(_replay(drafter, group) for group in groups)
    return (time.thread_time() - begin) / count * 1e6


def _replay(drafter: Drafter, live: list[Sequence]) -> int:
    """Draft through the rest of each sequence, all in one step as long as they last; how many proposals it took."""
    count = 0
    while live:
        draft(drafter, live)
        count += len(live)
        live = [each for each in live if each.length < len(each.buffer)]
    return count


class _Dice:
    """A runner without a model: every draft is wrong, and the text repeats itself now and then."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        phrases = [rng.integers(1, _VOCABULARY, 12).tolist() for _ in range(40)]
        self._text = cycle([token for i in rng.integers(0, 40, 4000) for token in phrases[i]])

    def begin(self, plan: StepPlan) -> Landed:
        return Landed(StepOutput(tuple(Drawn((next(self._text),)) if chunk.draw else None for chunk in plan.chunks)))


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Who is in the engine besides the sequences that decode; `preamble` tokens begin all prompts. `short`: cells
    are what the next one waits for, and those that pins keep are not to be had.
    """

    waiting: int = 0
    preamble: int = 0
    sessions: int = 0
    pinned: int = 0
    short: bool = False
    policy: str = RETENTION["fixed"]


_NOBODY = _Crowd()


def _step_ms(crowd: _Crowd = _NOBODY, *, drafts: bool = False) -> float:
    """Milliseconds of planning and commit a step."""
    config = EngineConfig(
        cells=_SHORT if crowd.short else 1_000_000,
        context_length=8192,
        max_sequences=_RUNNING + crowd.sessions,
        session_rows=crowd.sessions,
        max_waiting=2 * _WAITING,
        admission_ceiling=1.0,
        speculation=DraftConfig(enabled=drafts),
        retention=RetentionConfig(policy=crowd.policy, most_s=1e9),
    )
    engine = Engine(config, _Dice(), frozenset(), _VOCABULARY, stopwatch=time.thread_time)
    rng = np.random.default_rng(0)
    shared = rng.integers(1, _VOCABULARY, crowd.preamble).astype(np.int32)
    for i in range(_LEARNED_FROM):  # prompts take seconds: what is pinned is worth its cells under any policy
        engine.handle(Submit(f"cost{i}", tokens=_prompt(rng, shared), sampling=Sampling(1)), 0.0)
    for step in count(1):
        if not engine.busy:
            break
        engine.step(step - 1.0, partial(float, step))
    now = float(step)
    for i in range(crowd.sessions):
        engine.handle(OpenSession("", f"s{i}", request_id=f"open{i}"), now)
        engine.handle(
            Submit(f"append{i}", tokens=_prompt(rng, shared), sampling=Sampling(0), session=SessionTurn(f"s{i}")), now
        )
    for i in range(crowd.pinned):
        engine.handle(Submit(f"turn{i}", tokens=_prompt(rng, shared), sampling=Sampling(1), program_id=f"p{i}"), now)
    while engine.busy:
        for event in engine.step(now):
            if isinstance(event, Finished) and event.request_id.startswith("turn"):
                engine.handle(TurnEnded(event.request_id, "", f"p{event.request_id[4:]}"), now)
    assert engine.occupancy().pins == crowd.pinned
    for i in range(_RUNNING + crowd.waiting):
        engine.handle(
            Submit(f"r{i}", tokens=_prompt(rng, shared), sampling=Sampling(4000), program_arrival=1.0 + i), now
        )
    costs = []
    for step in range(_WARM_UP + _STEPS):
        before = engine.stats.schedule_s + engine.stats.commit_s
        engine.step(now)
        if step >= _WARM_UP:
            costs.append(engine.stats.schedule_s + engine.stats.commit_s - before)
    assert engine.occupancy().running == _RUNNING
    assert engine.occupancy().pins == crowd.pinned
    return 1e3 * median(costs)


def _prompt(rng: np.random.Generator, shared: TokenIds) -> TokenIds:
    return np.concatenate((shared, rng.integers(1, _VOCABULARY, _PROMPT))).astype(np.int32)


def _best(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, as the best of some rounds of `times` calls has them."""
    return min(seconds(lambda: [work() for _ in range(times)], time.thread_time) for _ in range(_ROUNDS)) / times


if __name__ == "__main__":
    sys.exit(main())
