"""Costs of the pieces around the model, against their bars: `bench micro`, and `bench sessions` for questions.

Figures of `micro` need no model. Each is processor time of this thread, the best of a few rounds or the median of many
steps, so other work on the machine hardly counts.
"""

from __future__ import annotations

import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from holdfast.kernels import attention as kernels
from holdfast.kernels.kv import Sender, packed
from holdfast.loadgen.bench.drafts import decoding, draft
from holdfast.loadgen.bench.harness import Row, figure, save_random_llama, seconds
from holdfast.loadgen.bench.workload import Scenario, rounds
from holdfast.loadgen.simulator.policies import RETENTION
from holdfast.replicas.config import POCKET, DraftConfig, EngineConfig, RetentionConfig
from holdfast.replicas.constraints.guidance import AVAILABLE
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.model import decoder
from holdfast.replicas.model.decoder import AttentionShape, PageTable
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.runner_gpu import lay_out_step
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.model.weights import load_tokenizer
from holdfast.replicas.plan import Chunk, Drawn, Flight, Landed, Runner, Sampling, StepOutput, StepPlan, step_cost
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
from holdfast.replicas.speculation.ngrams import common_prefix
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.types import TokenIds

PAGE = 16
NODES = 100_000
_ROUNDS = 5
_RUNNING = 64  # sequences
_CROWDS = ((10_000, 0), (1_000, 0), (1_000, 500))  # requests that wait, programs that are pinned
_PROMPT = 200  # tokens
_CALLS, _TOOLS = 5_000, 20  # of which statistics are kept
_STEPS, _WARM_UP = 200, 40
_VOCABULARY = 50_000
_REPLY = 128  # tokens of a turn that are replayed
_COST = step_cost((1, 8, 64, 256), (0.01, 0.012, 0.03, 0.1))  # of a model that gains by drafts
_GPU_COST = step_cost((1, 64, 256), (0.006, 0.007, 0.010))  # of a GPU, where drafts cost little
_HOST_MS = {32: 0.8, 64: 1.4}  # the host's part of a step, at most, by the sequences that draft
_CONTEXT, _PHRASES, _PHRASE = 3_000, 40, 12  # tokens of each prompt; of what a text is made, and tokens of each
_LLAMA = AttentionShape(heads=32, kv_heads=8, head_dim=128, windows=(0,))


def micro(options: Namespace) -> Iterator[Row]:
    """All figures without a model."""
    for part in (restoring, tree, drafting, scheduling, host_steps, retention, masks):
        yield from part()


def restoring() -> Iterator[Row]:
    """Aliasing a cached prefix, short and long, and finding it."""
    cache = KVCache(3 * 65536 // PAGE, PAGE)
    rng = np.random.default_rng(0)
    short, long = (rng.integers(0, 30000, n + 1).astype(np.int32) for n in (1024, 65536))
    for tokens in (short, long):
        _save(cache, tokens, 0.0)
    walk = [_best(partial(cache.peek, "", tokens), 20) for tokens in (short, long)]
    whole = [_best(partial(_restore, cache, tokens), 20) for tokens in (short, long)]
    alias = [max(a - w, 1e-9) for a, w in zip(whole, walk, strict=True)]
    yield figure("restore 1k cached tokens, match included", whole[0] * 1e6, "us")
    yield figure("restore 64k cached tokens, match included", whole[1] * 1e6, "us")
    yield figure("  64k over 1k, without the match", alias[1] / alias[0], "times", 1.3)
    yield figure("match, of 64k tokens", walk[1] * 1e6 / 65536, "us/token", 1.0)


def tree() -> Iterator[Row]:
    """A tree of many nodes: matching, saving a new branch (which evicts one) and continuing one."""
    cache = KVCache(NODES, PAGE)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30000, (NODES + 4000, PAGE + 1)).astype(np.int32)
    for now, tokens in enumerate(prompts[:NODES]):
        _save(cache, tokens, float(now))
    fresh = iter(prompts[NODES:])
    late = iter(prompts[NODES - 3000 : NODES])
    yield figure(f"match among {NODES:,} nodes", _best(lambda: cache.peek("", next(late)), 200) * 1e6, "us", 100)
    yield figure("  save a branch, evicting one", _best(lambda: _save(cache, next(fresh), 1e9), 200) * 1e6, "us", 100)
    yield figure("  restore and drop", _best(lambda: _restore(cache, next(late)), 200) * 1e6, "us", 100)


def drafting() -> Iterator[Row]:
    """Proposing, gating and learning, over conversations replayed with the answers they have."""
    side = _text_side()
    turns = [
        (side.encode(lane[i]).tokens, side.encode(lane[i + 1]).tokens)
        for script in rounds(Scenario("drafting", lanes=32, turns=8, rounds=1))
        for lane in script.lanes
        for i in range(len(lane) - 1)
    ]
    for together in (1, 8, 64):
        yield figure(f"drafting, {together} sequences, a sequence and step", _drafting_us(turns, together), "us", 30)


def scheduling() -> Iterator[Row]:
    """Planning and committing a step, without a model; the time of drafts is a figure of `drafting`."""
    yield figure("plan and commit, 64 decoding", _step_ms(), "ms", 0.5)
    yield figure("plan and commit, 64 decoding, drafter on", _step_ms(drafts=True), "ms")
    for waiting, pinned in _CROWDS:
        crowd = f"{waiting:,} waiting" + (f", {pinned} programs pinned" if pinned else "")
        yield figure(f"plan and commit, 64 decoding, {crowd}", _step_ms(waiting, pinned), "ms", 2.0)


def host_steps() -> Iterator[Row]:
    """The host's work for a step with drafts on a GPU, up to the copy of its inputs and after its results."""
    for rows, bar in _HOST_MS.items():
        yield figure(f"plan, draft, lay out and commit, {rows} drafting at 3,000 tokens", host_ms(rows), "ms", bar)


def retention() -> Iterator[Row]:
    """The time of each policy's decision for a turn that ends, with fresh statistics of the tools."""
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
    local = partial(pauses.known, now=_CALLS)
    for name in (*POLICIES, *RETENTION):
        policy = retention_policy(RETENTION.get(name, name))
        news = iter([(replace(known), replace(conditions, local=cache(local))) for _ in range(_ROUNDS * 200)])
        decision = _best(partial(_decide, policy, ended, news), 200)
        yield figure(f"how long a turn's cells are kept, {name}", decision * 1e6, "us", 200)


def masks() -> Iterator[Row]:
    """Which tokens a constrained reply may have next."""
    if not AVAILABLE:
        return
    (script,) = rounds(Scenario("masks", lanes=1, turns=1, rounds=1, shared=True))
    prompt = script.lanes[0][0]
    side, required = _text_side(), ChatPrompt(prompt.messages, prompt.tools, tool_choice="required")
    begin = time.thread_time()
    matcher = side.constraints(required).matcher
    yield figure(f"compile a grammar of {len(prompt.tools)} tools, once", (time.thread_time() - begin) * 1e6, "us")
    assert matcher is not None
    rows = np.zeros((1, matcher.words), np.int32)
    yield figure("mask of one row", _best(lambda: matcher.fill([], rows), 100) * 1e6, "us")


def _decide(policy: RetentionPolicy, pause: Pause, news: Iterator[tuple[LatencySnapshot, Conditions]]) -> None:
    known = next(news)
    policy.ttl(pause, *known)
    policy.away(pause, *known)


def _text_side() -> TextSide:
    return TextSide(load_tokenizer(inspect_model(POCKET)), EngineConfig())


def _save(cache: KVCache, tokens: TokenIds, now: float) -> None:
    holding = cache.acquire("", tokens, now).holding
    cache.grow(holding, len(tokens) - 1)
    cache.finish(holding, tokens[:-1], len(tokens) - 1, now)


def _restore(cache: KVCache, tokens: TokenIds) -> None:
    cache.drop(cache.acquire("", tokens, 1e9).holding)


def _drafting_us(turns: Iterable[tuple[TokenIds, TokenIds]], together: int) -> float:
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
    """Draft through the rest of each sequence, all in one step as long as they last; the number of proposals."""
    count = 0
    while live:
        draft(drafter, live)
        count += len(live)
        live = [sequence for sequence in live if sequence.length < len(sequence.buffer)]
    return count


class _Dice:
    """A runner without a model: every draft is wrong, and the text repeats itself now and then."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        phrases = [rng.integers(1, _VOCABULARY, 12).tolist() for _ in range(40)]
        self._text = cycle([token for i in rng.integers(0, 40, 4000) for token in phrases[i]])

    def begin(self, plan: StepPlan) -> Landed:
        return Landed(StepOutput(tuple(Drawn((next(self._text),)) if chunk.draw else None for chunk in plan.chunks)))


def _step_ms(waiting: int = 0, pinned: int = 0, *, drafts: bool = False) -> float:
    """Milliseconds of planning and commit a step, beside requests that wait and programs that are pinned."""
    config = EngineConfig(
        cells=1_000_000,
        context_length=8192,
        max_sequences=_RUNNING,
        session_rows=0,
        max_waiting=20_000,
        admission_ceiling=1.0,
        speculation=DraftConfig(enabled=drafts),
        retention=RetentionConfig(policy=RETENTION["fixed"], most_s=1e9),
    )
    engine = Engine(config, _Dice(), frozenset(), _VOCABULARY, stopwatch=time.thread_time)
    rng = np.random.default_rng(0)

    def submit(name: str, tokens: int, **settings: Any) -> None:
        prompt = rng.integers(1, _VOCABULARY, _PROMPT).astype(np.int32)
        engine.handle(Submit(name, tokens=prompt, sampling=Sampling(tokens), **settings), 0.0)

    for i in range(pinned):
        submit(f"turn{i}", 1, program_id=f"p{i}")
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Finished):
                engine.handle(TurnEnded(event.request_id, "", f"p{event.request_id[4:]}"), 0.0)
    for i in range(_RUNNING + waiting):
        submit(f"r{i}", 4000, program_arrival=1.0 + i)
    costs = []
    for step in range(_WARM_UP + _STEPS):
        before = engine.stats.schedule_s + engine.stats.commit_s
        engine.step(0.0)
        if step >= _WARM_UP:
            costs.append(engine.stats.schedule_s + engine.stats.commit_s - before)
    occupancy = engine.occupancy()
    assert (occupancy.running, occupancy.pins) == (_RUNNING, pinned)
    return 1e3 * median(costs)


class _Replay:
    """A runner that lays steps out as a GPU's does, and draws the next tokens of the texts. It computes nothing.

    `apart_s`: seconds that are no part of a host's step, in which it looks up what to draw.
    """

    def __init__(self, texts: SequenceOf[TokenIds], cells: int) -> None:
        self._texts = {int(text[0]): text.tolist() for text in texts}  # by their first token
        self._row_texts: dict[int, list[int]] = {}
        self._table = PageTable(len(texts), 2 * _CONTEXT // PAGE, PAGE, cells // PAGE)
        self._sender, self._device = Sender(self._table.device), torch.empty(1 << 24, dtype=torch.uint8)
        self.apart_s = 0.0

    def begin(self, plan: StepPlan) -> Landed:
        step = lay_out_step(plan, self._table, (_LLAMA,), _VOCABULARY)
        arrays = [*step.arrays, *(step.settings.arrays if step.settings else ())]
        offsets, size = packed(arrays)
        self._sender.send_into(self._device, arrays, offsets, size)
        start = time.thread_time()
        for chunk in plan.chunks:
            if chunk.start == 0:
                self._row_texts[chunk.row] = self._texts[int(chunk.tokens[0])]
        landed = Landed(StepOutput(tuple([self._draw(chunk) for chunk in plan.chunks])))
        self.apart_s += time.thread_time() - start
        return landed

    def _draw(self, chunk: Chunk) -> Drawn | None:
        if chunk.draw is None:
            return None
        drafts = chunk.tokens[len(chunk.tokens) - chunk.draw.drafts :].tolist()
        at = chunk.start + len(chunk.tokens) - len(drafts)
        following = self._row_texts[chunk.row][at : at + len(drafts) + 1]
        return Drawn(tuple(following[: common_prefix(drafts, following) + 1]))


def host_ms(rows: int, steps: int = _STEPS) -> float:
    """Milliseconds of the host's part of a step, for sequences whose texts repeat phrases. The median of `steps`."""
    rng, texts = np.random.default_rng(1), []
    for first in range(1, rows + 1):
        phrases = rng.integers(rows + 1, _VOCABULARY, (_PHRASES, _PHRASE))
        body = phrases[rng.integers(0, _PHRASES, 2 * _CONTEXT // _PHRASE)].ravel()
        texts.append(np.append(first, body).astype(np.int32))
    cells = 3 * rows * _CONTEXT
    config = EngineConfig(
        cells=cells,
        context_length=2 * _CONTEXT,
        max_sequences=rows,
        session_rows=0,
        admission_ceiling=1.0,
        step_tokens=rows * _CONTEXT,
        overlap_steps="on",
    )
    runner = _Replay(texts, cells)
    engine = Engine(config, runner, frozenset(), _VOCABULARY, _GPU_COST)
    for i, text in enumerate(texts):
        engine.handle(Submit(f"r{i}", tokens=text[:_CONTEXT], sampling=Sampling(_CONTEXT), program_id=f"p{i}"), 0.0)
    costs, threads = list[float](), torch.get_num_threads()
    torch.set_num_threads(1)  # a copy to a GPU takes none of the host's; here torch would share it among threads
    while len(costs) < _WARM_UP + steps:
        before, start, apart = engine.stats.steps, time.thread_time(), runner.apart_s
        while engine.stats.steps == before:
            engine.step(0.0)
        costs.append(time.thread_time() - start - (runner.apart_s - apart))
    torch.set_num_threads(threads)
    assert engine.occupancy().running == rows
    assert engine.stats.accepted > 0
    return 1e3 * median(costs[_WARM_UP:])


def _best(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, as the best of some rounds of `times` calls has them."""
    return min(seconds(lambda: [work() for _ in range(times)], time.thread_time) for _ in range(_ROUNDS)) / times


# ---- questions to a session ----

CONTEXTS = (1024, 65536)
QUESTION, ANSWER = 32, 16  # tokens
_QUESTIONS, _FIRST = 12, 2  # the first ones warm up
_MARGIN = 4096  # cells beyond the contexts


class OneToken:
    """A runner that computes one token of each chunk that draws nothing: the other cells' values do not matter."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def begin(self, plan: StepPlan) -> Flight:
        chunks = tuple(chunk if chunk.draw else replace(chunk, tokens=chunk.tokens[:1]) for chunk in plan.chunks)
        return self._runner.begin(replace(plan, chunks=chunks))


def sessions(options: Namespace) -> Iterator[Row]:
    """The cost of a question, by the length of the session's context, and of aliasing that context.

    Reading the KV of a long context takes time with any engine, so it is measured apart. The rest has a bar.
    """
    samples = [list(restoring()) for _ in range(15)]
    for rows in zip(*samples, strict=True):
        yield rows[0] | {"value": median(row["value"] for row in rows)}
    yield from questions()


def questions(contexts: tuple[int, int] = CONTEXTS, repeat: int = _QUESTIONS) -> Iterator[Row]:
    """A question at a short and at a long context, by turns; medians, in processor time of one thread."""
    short, long = contexts
    with tempfile.TemporaryDirectory() as folder:
        costs = _question_costs(_random_model(Path(folder), 2 * long), contexts, repeat)
    whole = {n: median(all_s for all_s, _ in costs[n]) for n in contexts}
    rest = {n: median(all_s - reading_s for all_s, reading_s in costs[n]) for n in contexts}
    for n in contexts:
        yield figure(f"a question at {n:,} tokens, reading KV apart", rest[n] * 1e3, "ms")
        yield figure("  reading KV", median(reading_s for _, reading_s in costs[n]) * 1e3, "ms")
    yield figure(f"  {long:,} over {short:,}, reading KV apart", rest[long] / rest[short], "times", 1.5)
    yield figure(f"  {long:,} over {short:,}, all", whole[long] / whole[short], "times")


def _question_costs(model: str, contexts: SequenceOf[int], repeat: int) -> dict[int, list[tuple[float, float]]]:
    """Seconds of each question, and how many of them went into attention."""
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
    engine = Engine(loaded.config, OneToken(loaded.runner), loaded.eos, loaded.vocabulary, window=loaded.window)
    rng, reading = np.random.default_rng(0), [0.0]

    def attend(*args: Any, **settings: Any) -> Any:
        begin = time.thread_time()
        out = kernels.paged_attention(*args, **settings)
        reading[0] += time.thread_time() - begin
        return out

    def ask(context: int, name: str, tokens: int, answer: int) -> tuple[float, float]:
        prompt = rng.integers(3, loaded.vocabulary, tokens).astype(np.int32)
        turn = SessionTurn(f"{context}", keep=not answer)
        submit = Submit(name, tokens=prompt, sampling=Sampling(answer, ignore_eos=bool(answer)), session=turn)
        begin, reading[0] = time.thread_time(), 0.0
        events = engine.handle(submit, 0.0)
        while engine.busy:
            events += engine.step(0.0)
        seconds, last = time.thread_time() - begin, events[-1]
        assert isinstance(last, Finished), last
        assert last.usage.prompt - last.usage.cached <= tokens + PAGE, last.usage
        return seconds, reading[0]

    vars(decoder)["paged_attention"] = attend
    try:
        for n in contexts:
            engine.handle(OpenSession("", f"{n}", request_id=f"open {n}"), 0.0)
            ask(n, f"append {n}", n, 0)
        costs = [[ask(n, f"{n} {i}", QUESTION, ANSWER) for n in contexts] for i in range(_FIRST + repeat)]
    finally:
        vars(decoder)["paged_attention"] = kernels.paged_attention
    return {n: [row[at] for row in costs[_FIRST:]] for at, n in enumerate(contexts)}


def _random_model(folder: Path, context: int) -> str:
    """A model of 87 million random parameters with Pocket's tokenizer; its weights do not fit into caches."""
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
