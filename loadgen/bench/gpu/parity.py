"""Greedy replies of the whole engine, on the device, against those of transformers' `generate`, token for token.

Pocket answers recorded prompts in float32 and in bfloat16: first through transformers, one prompt at a time, then
through engines over one runner. Each setting switches one mechanism on, the last one all of them. Counters
(`Setting.counters`) show that the mechanism acted; otherwise the setting proves nothing.

In float32 a reply may differ only at a tie of two tokens (`NEAR`), and log probabilities only by what the order of
additions changes (`ROUNDED`). In bfloat16 the same figures are printed and not judged, since 16 bits round differently
in every order. Ends of turns are ignored on both sides.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.loadgen.bench.gpu.accounting import CountingRunner
from holdfast.loadgen.bench.gpu.peers import load_model
from holdfast.loadgen.bench.gpu.stage import capture_graphs, dialogues
from holdfast.loadgen.bench.parts import Deadline, Figures, Lines, Once, Report, free_device
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.replicas.config import POCKET, DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.tensors import HostPages, KVTensors
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import LoadedRunner, check_graphs, load_runner
from holdfast.replicas.model.weights import load_tokenizer
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Finished, Submit, Tokens
from holdfast.replicas.types import TokenIds, common_prefix

NEAR = 1e-4
"""Two tokens are a tie where their logits lie no further apart than this share of the spread from least to largest.

Float32 in another order moves log probabilities by 2e-6 of it at most (our kernels for a CPU against transformers), and
of the 2,048 tokens that transformers draws here none has a rival nearer than 9e-4: no tie is expected.
"""
ROUNDED = 2e-5
"""How far log probabilities of the same token may lie apart, as a share of that spread.

With inputs of products rounded as TF32 does, transformers' own move by up to 1.7e-4, and yet in 1,558 places of
recorded replies the best token is the same: tokens alone would not show TF32.
"""

_PAGE = 16
_OFF: dict[str, Any] = {  # beside graphs, and what only a small cache brings about
    "overlap_steps": "off",
    "speculation": DraftConfig(enabled=False),
    "without": ("prefix_cache", "sessions"),
    "host_cells": 0,
}
_SOME = 4  # the first of every so many prompts is asked where they are asked one at a time and without drafts


class ParityError(Exception):
    """An engine's replies differ from transformers', or the mechanism of a setting did not act."""


@dataclass(frozen=True, slots=True)
class ParitySizes:
    """What is asked. Tokens, but for `prompts` and `turns`."""

    device: str
    prompts: int = 32
    turns: int = 12  # of each conversation; prompts are of their first, second, ... turn
    longest: int = 1500  # of a prompt, whose end is kept
    new: int = 64
    chunk: int = 96  # of a step in which prompts are computed in pieces
    abreast: int = 8  # prompts that a small cache holds, without their replies
    graph_tokens: int = 32  # of the largest graph
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    load_s: float = 60.0  # for transformers' replies, for loading, for capturing
    setting_s: float = 40.0  # the first one compiles
    settings: tuple[str, ...] = ()  # empty: all

    @property
    def cells(self) -> int:
        """For all of them at once, below what admission leaves free."""
        return 2 * self.host_cells

    @property
    def host_cells(self) -> int:
        """For all of them."""
        return self.prompts * (-(-(self.longest + self.new) // _PAGE) + 1) * _PAGE


def full_parity() -> ParitySizes:
    """On a GPU."""
    return ParitySizes("cuda")


def small_parity() -> ParitySizes:
    """So little that an interpreter gets through it."""
    return ParitySizes(
        "cpu",
        prompts=3,
        turns=2,
        longest=47,
        new=4,
        abreast=2,
        graph_tokens=8,
        dtypes=("float32",),
        load_s=200.0,
        setting_s=200.0,
        settings=("baseline", "all"),
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers says to a prompt: the tokens [n], and the logits [n, vocabulary] each was chosen by."""

    tokens: TokenIds
    logits: npt.NDArray[np.float32]

    def spread(self, at: int) -> float:
        """From the least to the largest logit."""
        return float(np.ptp(self.logits[at]))

    def logprob(self, at: int) -> float:
        """Of its own token."""
        logits = self.logits[at].astype(np.float64)
        return float(logits[self.tokens[at]] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine said to a prompt; `logprobs`: of each token, or nothing."""

    prompt: int
    tokens: TokenIds
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a reply leaves transformers'. `gap`: its best logit there less that of our token; `share` of the spread."""

    at: int
    ours: int
    theirs: int
    gap: float
    share: float


def difference(reply: Reply, expected: Expected) -> Difference | None:
    """None where every token is the same. Raises ParityError for a reply of another length."""
    ours, theirs = reply.tokens, expected.tokens
    if len(ours) != len(theirs):
        raise ParityError(f"prompt {reply.prompt}: {len(ours)} tokens, and {len(theirs)} were asked for")
    at = common_prefix(ours, theirs)
    if at == len(theirs):
        return None
    logits = expected.logits[at]
    gap = float(logits[theirs[at]] - logits[ours[at]])
    return Difference(at, int(ours[at]), int(theirs[at]), gap, gap / expected.spread(at))


def apart(reply: Reply, expected: Expected) -> float:
    """The most by which log probabilities of the same tokens differ, as a share of the logits' spread; 0 of none."""
    same = common_prefix(reply.tokens, expected.tokens)
    told = enumerate(reply.logprobs[:same])
    shares = [abs(logprob - expected.logprob(at)) / expected.spread(at) for at, logprob in told]
    return float(np.max(shares)) if shares else 0.0  # a NaN is the largest of all


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine's configuration, and how it is asked. `changes` are to a configuration with everything off.

    `counters`: those of `Counters` that have to have counted.
    """

    name: str
    counters: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    graphs: bool = False
    one_at_a_time: bool = False
    rounds: int = 1  # how often the same is asked
    logprobs: bool = False
    every: int = 1  # only the first of so many prompts is asked


def settings(sizes: ParitySizes, prompts: Sequence[TokenIds]) -> list[Setting]:
    """Each mechanism by itself, then all; those without graphs first, since graphs are captured once."""
    first = [len(prompt) for prompt in prompts[: sizes.abreast]]
    few_cells = sum(-(-length // _PAGE) * _PAGE for length in first)
    reuse = {"without": ()}
    tier = reuse | {"cells": few_cells, "host_cells": sizes.host_cells}
    # The first prompts are let in together, as if they were not to be answered, and computed but for one token: then
    # the replies find no cells.
    short: dict[str, Any] = {"cells": few_cells, "completion_reserve": 1, "admission_ceiling": 1.0}
    short["without"] = (*_OFF["without"], "chunk_deferral")
    short["step_tokens"] = sum(first) - 1
    overlap = {"overlap_steps": "on"}
    drafts = {"speculation": DraftConfig()}
    alone: dict[str, Any] = {"one_at_a_time": True, "logprobs": True}
    every = tuple(Counters.__dataclass_fields__)
    found = [
        Setting("baseline", logprobs=True),
        Setting("chunks", ("pieces",), {"step_tokens": sizes.chunk}),
        Setting("overlap", ("ahead",), overlap),
        Setting("speculation", ("accepted",), drafts),
        Setting("reuse", ("cached",), reuse, rounds=2),
        Setting("host tier", ("reloaded",), tier, rounds=2),
        Setting("preemption", ("preempted",), short),
        Setting("one at a time", **alone, every=_SOME),
        Setting("graphs", ("replayed",), graphs=True),
        Setting(
            "all", every, tier | short | overlap | drafts | {"without": ("chunk_deferral",)}, graphs=True, rounds=2
        ),
        Setting("graphs, one at a time", ("replayed",), graphs=True, **alone, every=_SOME),
        Setting("as served, one at a time", ("replayed", "accepted"), reuse | overlap | drafts, graphs=True, **alone),
    ]
    return [each for each in found if not sizes.settings or each.name in sizes.settings]


@dataclass(frozen=True, slots=True)
class Counters:
    """What shows a mechanism at work."""

    replayed: int  # steps that ran in a graph
    ahead: int  # steps begun while one ran
    pieces: int  # chunks of prompts that are not their last
    accepted: int  # drafts
    cached: int  # prompt tokens that were not computed
    reloaded: int  # tokens that came back from host memory
    preempted: int  # sequences


def make_prompts(sizes: ParitySizes) -> list[TokenIds]:
    """Of as many conversations, at different turns, so that they are of all lengths."""
    tokenizer = load_tokenizer(inspect_model(POCKET))
    found = dialogues(tokenizer, sizes.prompts, sizes.turns, 2 * sizes.longest + 1000)
    return [each.exchanges[i % sizes.turns].prompt[-sizes.longest :] for i, each in enumerate(found)]


class Parity:
    """One dtype: transformers' replies, the runner, and what engines over it reply."""

    def __init__(self, sizes: ParitySizes, prompts: Sequence[TokenIds], dtype: str) -> None:
        self._sizes, self.prompts, self._dtype = sizes, prompts, dtype
        self._expected: list[Expected] = []
        self._loaded: LoadedRunner | None = None

    def reference(self) -> Figures:
        """transformers' replies. Float32 without TF32, from here on for all, and with its plain attention, which has
        none either; in 16 bits with torch's, which like ours does not round scores.
        """
        began = time.perf_counter()
        model = load_model(str(WEIGHTS), self._sizes.device, getattr(torch, self._dtype))
        if self._dtype == "float32":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            model.set_attn_implementation("eager")
        expected = [self._generate(model, prompt) for prompt in self.prompts]
        del model
        free_device()
        self._expected = expected
        lengths = [len(prompt) for prompt in self.prompts]
        figures = {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)}
        return figures | {"new": self._sizes.new, "seconds": time.perf_counter() - began}

    def _generate(self, model: Any, prompt: TokenIds) -> Expected:
        ids = torch.from_numpy(prompt).long()[None].to(self._sizes.device)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._sizes.new,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = found.sequences[0, ids.shape[1] :].cpu().numpy().astype(np.int32)
        return Expected(tokens, torch.cat(found.logits).float().cpu().numpy())

    def load(self) -> Figures:
        """The runner of all settings: with room for all prompts, a host tier, and no graphs yet."""
        began, sizes = time.perf_counter(), self._sizes
        config = EngineConfig(
            dtype=self._dtype,  # type: ignore[arg-type]
            device=sizes.device,
            threads=0 if sizes.device != "cpu" else 1,
            page_size=_PAGE,
            cells=sizes.cells,
            host_cells=sizes.host_cells,
            max_sequences=2 * sizes.prompts,
            session_rows=sizes.prompts,
            without=("cuda_graphs",),
            speculation=DraftConfig(enabled=False),  # the cost of verifying is not needed
        )
        loaded = load_runner(config)
        self._loaded = loaded if sizes.device != "cpu" else interpreted(loaded)
        return {"cells": loaded.config.cells, "seconds": time.perf_counter() - began}

    @property
    def loaded(self) -> LoadedRunner:
        """Raises RuntimeError where it, or what transformers says, is not there."""
        if self._loaded is None or not self._expected:
            raise RuntimeError("there is no engine, or nothing to hold it against")
        return self._loaded

    def capture(self) -> Figures:
        """Capture graphs, so that later settings replay them. `same_draws`: whether they are used."""
        loaded, began = self.loaded, time.perf_counter()
        assert isinstance(loaded.runner, GpuRunner)
        capture_graphs(loaded.runner, self._sizes.device, self._sizes.graph_tokens)
        same = check_graphs(loaded.runner, loaded.config)
        return {"same_draws": int(same), "seconds": time.perf_counter() - began}

    def ask(self, setting: Setting, deadline: Deadline) -> Lines:
        """Ask everything in one setting. Raises ParityError after the line of a float32 setting that is wrong."""
        loaded, began = self.loaded, time.perf_counter()
        config = replace(loaded.config, **_OFF | dict(setting.changes))
        watched, replayed = CountingRunner(loaded.runner), loaded.runner.replayed
        engine = Engine(config, watched, loaded.eos, loaded.vocabulary, window=loaded.window)
        replies = list(self._replies(engine, setting, deadline))
        stats = engine.stats
        counters = Counters(
            replayed=loaded.runner.replayed - replayed,
            ahead=watched.counts.ahead,
            pieces=watched.counts.pieces,
            accepted=stats.accepted,
            cached=stats.prompt_cached,
            reloaded=stats.tokens_reloaded,
            preempted=stats.preemptions,
        )
        figures, faults = compared(setting, replies, self._expected, counters)
        if stats.failed_moves:
            faults.append(f"{stats.failed_moves} steps whose copies failed")
        exact, line = self._dtype == "float32", f"{self._dtype}, {setting.name}"
        verdict = {"verdict": "WRONG" if faults else "ok"} if exact else {}
        yield line, figures | {"steps": stats.steps, "seconds": time.perf_counter() - began} | verdict
        if exact and faults:
            raise ParityError(f"{line}: {', '.join(faults)}")

    def _replies(self, engine: Engine, setting: Setting, deadline: Deadline) -> Iterator[Reply]:
        """All at once, or one after the other as long as there is time."""
        asked = range(0, len(self.prompts), setting.every)
        groups = [(i,) for i in asked] if setting.one_at_a_time else [tuple(asked)]
        for number, group in itertools.product(range(setting.rounds), groups):
            if setting.one_at_a_time and deadline.over and number + group[0]:
                return
            yield from self._answers(engine, setting, number, group)

    def _answers(self, engine: Engine, setting: Setting, number: int, group: Sequence[int]) -> Iterator[Reply]:
        sampling = Sampling(self._sizes.new, ignore_eos=True, logprobs=0 if setting.logprobs else None)
        names = {f"{i} {number}": i for i in group}
        for name, i in names.items():
            submit = Submit(name, tokens=self.prompts[i], sampling=sampling, program_id=f"{i}")
            if refused := engine.handle(submit, time.perf_counter()):
                raise RuntimeError(f"a prompt was not taken: {refused[0]}")
        tokens: dict[str, list[int]] = {name: [] for name in names}
        logprobs: dict[str, list[float]] = {name: [] for name in names}
        while engine.busy:
            for event in engine.step(time.perf_counter(), time.perf_counter):
                if isinstance(event, Tokens):
                    tokens[event.request_id] += event.tokens
                    logprobs[event.request_id] += [each.logprob for each in event.logprobs]
                elif not isinstance(event, Finished):
                    raise RuntimeError(f"a reply did not finish: {event}")
        for name, i in names.items():
            yield Reply(i, np.array(tokens[name], np.int32), tuple(logprobs[name]))

    def release(self) -> None:
        """Give the device's memory back."""
        self._loaded = None
        free_device()


def compared(
    setting: Setting, replies: Sequence[Reply], expected: Sequence[Expected], counters: Counters
) -> tuple[Figures, list[str]]:
    """What a setting's replies come to, and what is wrong with them, were they in float32.

    Raises ParityError for a reply of another length than was asked for.
    """
    every = [(reply, difference(reply, expected[reply.prompt])) for reply in replies]
    differ = [(reply.prompt, each) for reply, each in every if each is not None]
    agreed = min(len(reply.tokens) if each is None else each.at for reply, each in every)
    figures: Figures = {"asked": len(replies), "same": len(replies) - len(differ), "agreed": agreed}
    faults: list[str] = []
    if differ:
        prompt, worst = max(differ, key=lambda each: np.inf if np.isnan(each[1].share) else each[1].share)
        where = f"prompt {prompt} after {worst.at} tokens: {worst.ours} for {worst.theirs}"
        figures |= {"gap": worst.gap, "gap_of_spread": worst.share, "worst": where}
        if not worst.share <= NEAR:  # nor a NaN
            faults.append("other tokens")
    if setting.logprobs:
        figures["apart"] = most = float(np.max([apart(reply, expected[reply.prompt]) for reply in replies]))
        if not most <= ROUNDED:
            faults.append("other log probabilities")
    counted = {name: getattr(counters, name) for name in setting.counters}
    idle = [name for name, count in counted.items() if not count]
    figures |= counted | ({"idle": ", ".join(idle)} if idle else {})
    return figures, faults + [f"nothing {name}" for name in idle]


def interpreted(loaded: LoadedRunner) -> LoadedRunner:
    """The same model over the kernels for a GPU, in Triton's interpreter, and steps begun and landed as there."""
    config, info = loaded.config, inspect_model(loaded.config.model)
    dtype = getattr(torch, config.dtype)
    kv = KVTensors(info.cell, config.cells // _PAGE, _PAGE, dtype, "cpu", scratch=True)
    model = GpuDecoder.load(info.path, info.config, kv, config.context_length)
    assert model is not None  # Pocket is a Llama
    host = HostPages(kv, config.host_cells // _PAGE)
    rows, context = config.max_sequences, config.context_length
    return replace(loaded, runner=GpuRunner(model, kv, rows, context, host))


def run(report: Report, sizes: ParitySizes) -> None:
    """A part for each dtype and setting. Each process asks transformers, loads and captures graphs itself."""
    prompts = make_prompts(sizes)
    for dtype in sizes.dtypes:
        _run(report, sizes, Parity(sizes, prompts, dtype), dtype)


def _run(report: Report, sizes: ParitySizes, parity: "Parity", dtype: str) -> None:
    def then(before: Once[Figures], step: Callable[[], Figures]) -> Once[Figures]:
        def both() -> Figures:
            before()
            return step()

        return Once(both)

    def part(name: str, step: Once[Figures]) -> None:
        report.run(f"{dtype}, {name}", lambda deadline: iter([(f"{dtype}, {name}", step())]), sizes.load_s)

    expected = Once(parity.reference)
    loaded = then(expected, parity.load)
    captured = then(loaded, parity.capture)
    part("transformers", expected)
    part("engine", loaded)
    every = settings(sizes, parity.prompts)
    for setting in every:
        if setting.graphs:
            part("capture", captured)
        report.run(
            f"{dtype}, {setting.name}",
            partial(parity.ask, setting),
            sizes.setting_s,
            captured if setting.graphs else loaded,
        )
    parity.release()
