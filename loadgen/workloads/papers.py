"""Workloads after the papers' traces and after real coding sessions, and tenants beside a noisy one.

Programs arrive by a schedule. Their sizes follow the published figures; their texts are those of the other workloads.
Words of tools are common ones: about one token each for a large vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from holdfast.loadgen.workloads import tools
from holdfast.loadgen.workloads.drawing import BUGFIX_TURNS, Draw, agent_script, poisson
from holdfast.loadgen.workloads.script import Pause, Round, Script, Sizes, Step
from holdfast.loadgen.workloads.tools import Tool
from holdfast.loadgen.workloads.tooltime import Gaps, HeavyTailed, log_normal, two_kinds
from holdfast.loadgen.workloads.words import filler

_FIFTEEN = tools.TRAVEL + tools.REVIEW + tools.DATA
_TOOL_MEDIAN_S = 1.0  # of a sutradhara tool; the paper has only the percentiles' quotients
KNOWN = (0.5, 0.8)  # of the next prompt, before the tools return
FAN_OUT, ITERATIONS = (2, 21), (2, 7)  # median and 99th percentile; none is above that
LONGEST = 3  # times the usual prompt


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a trace: 1 + Binomial(`most` - 1, `share`) turns, and mean and variance of the tools' seconds."""

    most: int
    share: float
    tool_s: float
    tool_variance: float

    def turns(self, rng: random.Random) -> int:
        """Turns of one program."""
        return 1 + sum(rng.random() < self.share for _ in range(self.most - 1))


SWE = Figures(1 + 38, 0.5, 0.29, 1.14)
BFCL = Figures(1 + 8, 0.4, 1.09, 1.7)


@dataclass(frozen=True, slots=True)
class Session:
    """A coding session or a sub-agent of it, mean lengths in tokens before any scale.

    ``shared``: what all begin with; ``task``: what else is in the first prompt; a ``reply`` and a ``result`` a turn.
    """

    figures: Figures
    shared: int
    task: int
    reply: int
    result: int


_GAPS_S = 20.0  # mean of `tooltime.Gaps`
SESSION = Session(Figures(1 + 38, 0.5, _GAPS_S, 0.0), 25_000, 87_000, 436, 9_000)
SUB_AGENT = Session(Figures(1 + 4, 0.5, _GAPS_S, 0.0), 0, 3_000, 436, 9_000)
GROUP = (5, 9)  # sub-agents at once
"""Known of real sessions: 195,000 tokens in and 317 out (medians), the gaps (`tooltime.Gaps`), and that half of the
requests come from groups of about seven. Our assumption: 20 turns that begin with 112,000 tokens."""


def swe(draw: Draw, sizes: Sizes) -> Round:
    """Coding agents: about 20 turns with a command each (15 to 25, mostly), tools of 0.29 s, variance 1.14."""
    return _one_by_one(draw, sizes, "a coding agent", (tools.COMMAND,), SWE, _seconds(SWE))


def mixed(draw: Draw, sizes: Sizes) -> Round:
    """Coding agents of as many turns, with commands of two kinds: four of five take 0.25 s, the others 15 s."""
    return _one_by_one(draw, sizes, "a coding agent", (tools.COMMAND,), SWE, partial(two_kinds, quick_s=0.25))


def bfcl(draw: Draw, sizes: Sizes) -> Round:
    """Web searching agents: 4.2 turns with a search each, tools of 1.09 s, variance 1.7."""
    return _one_by_one(draw, sizes, "a research assistant", (tools.WEB_SEARCH,), BFCL, _seconds(BFCL))


def sutradhara(draw: Draw, sizes: Sizes) -> Round:
    """Agents that call many tools at once: 2 iterations and 2 calls in each (median), 7 and 21 at the tail."""
    rng = draw.rng("tools")
    times = {tool.name: HeavyTailed.drawn(rng, _TOOL_MEDIAN_S) for tool in _FIFTEEN}
    scripts = tuple(_fanning(draw, f"job{i}", sizes.prompt_tokens, times) for i in range(sizes.jobs))
    return _arriving(draw, scripts, poisson(draw.rng("arrivals"), sizes.jobs, sizes.rate))


def tenants(draw: Draw, sizes: Sizes) -> Round:
    """Bug-fixing programs of one noisy tenant and several quiet ones, each with arrivals of its own."""
    scripts: list[Script] = []
    due: list[float] = []
    for tenant, times in (("noisy", sizes.noise), *((f"quiet-{i}", 1) for i in range(sizes.quiet))):
        own = replace(draw, apart=f"{draw.apart}/{tenant}")  # no tenant opens its prompts as another does
        jobs = [
            agent_script(own, f"{tenant}-job{i}", "a coding agent", tools.CODING, BUGFIX_TURNS, sizes.chain)
            for i in range(sizes.jobs * times)
        ]
        scripts += [replace(script, tenant=tenant) for script in jobs]
        due += poisson(draw.rng(f"{tenant}/arrivals"), len(jobs), sizes.rate * times)
    return _arriving(draw, scripts, due, BUGFIX_TURNS)


def coding(draw: Draw, sizes: Sizes) -> Round:
    """Coding sessions: 195,000 tokens in (median, times ``scale``), gaps of 2 s, 24 s and 11 min (p50, p90, p99).

    Half of the requests come from sub-agents, about seven at once. Those of a group share a beginning that is as long
    as what their session has by then; they are programs of their own, sent by the schedule, for nobody knows beforehand
    when a server has come so far.
    """
    scripts: list[Script] = []
    due: list[float] = []
    for i, moment in enumerate(poisson(draw.rng("arrivals"), sizes.jobs, sizes.rate)):
        rng, name = draw.rng(f"job{i}/group"), f"job{i}"
        session = _session(draw, name, SESSION, _text(draw, name, SESSION.task, sizes), sizes)
        scripts.append(session)
        due.append(moment)
        if not session.pauses:
            continue
        at = rng.randrange(len(session.pauses))
        begin = moment + sum(pause.seconds for pause in session.pauses[:at])
        shared_text = _text(draw, f"{name}/group", SESSION.task + at * (SESSION.result + SESSION.reply), sizes)
        for k in range(rng.randint(*GROUP)):
            agent = f"{name}-agent{k}"
            text = f"{shared_text}\n\n{_text(draw, agent, SUB_AGENT.task, sizes)}"
            scripts.append(_session(draw, agent, SUB_AGENT, text, sizes))
            due.append(begin)
    order = sorted(range(len(due)), key=due.__getitem__)
    return _arriving(draw, [scripts[i] for i in order], [due[i] for i in order])


def _session(draw: Draw, name: str, kind: Session, text: str, sizes: Sizes) -> Script:
    """A coding agent whose first message begins with ``text``."""
    rng, gaps, mean = draw.rng(f"{name}/gaps"), Gaps(), kind.result * sizes.scale
    turns = kind.figures.turns(rng)
    script = agent_script(draw, name, "a coding agent", (tools.COMMAND,), turns, 1)
    first, *others = script.steps
    return replace(
        script,
        system=f"{script.system} {_text(draw, 'preamble', SESSION.shared, sizes)}",
        steps=(replace(first, user=f"{text}\n\n{first.user}"), *others),
        pauses=tuple(
            Pause(gaps.draw(rng), round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))) for _ in range(turns - 1)
        ),
    )


def _text(draw: Draw, label: str, words: int, sizes: Sizes) -> str:
    return filler(f"{draw.session}/{label}", max(1, round(words * sizes.scale)))


def _seconds(figures: Figures) -> Callable[[random.Random], float]:
    return partial(log_normal, mean=figures.tool_s, variance=figures.tool_variance)


def _one_by_one(
    draw: Draw,
    sizes: Sizes,
    role: str,
    offered: tuple[Tool, ...],
    figures: Figures,
    seconds: Callable[[random.Random], float],
) -> Round:
    """Programs of 1 + Binomial turns, times ``turns_times``, with the same words of tools in all.

    Tools take ``tool_times`` as long as ``seconds`` draws.
    """
    scripts = []
    for i in range(sizes.jobs):
        name = f"job{i}"
        count = figures.turns(draw.rng(f"{name}/turns")) * sizes.turns_times
        between = count - 1
        ends = [sizes.prompt_tokens * n // max(between, 1) for n in range(between + 1)]
        each = [end - start for start, end in pairwise(ends)]
        tool_s = [seconds(draw.rng(f"{name}/tool/{turn}")) * sizes.tool_times for turn in range(between)]
        pauses = tuple(map(Pause, tool_s, each))
        script = agent_script(draw, name, role, offered, count, sizes.chain)
        scripts.append(replace(script, pauses=pauses))
    return _arriving(draw, scripts, poisson(draw.rng("arrivals"), sizes.jobs, sizes.rate))


def _fanning(draw: Draw, name: str, prompt: int, times: dict[str, HeavyTailed]) -> Script:
    """A query whose answer takes some iterations: calls at once in all but the last, which is text.

    The first prompt has three quarters of ``prompt`` words, half of them in a system prompt that all programs share. In
    later ones that is another, as the tool says that was called first: a quarter of it is in all of them. Results make
    up 20 to 50 % of the prompt after them, and no prompt of more than one iteration gets longer than three times
    ``prompt``.
    """
    rng = draw.rng(name)
    turns = long_tailed(rng, *ITERATIONS)
    fans = tuple(long_tailed(rng, *FAN_OUT) for _ in range(turns - 1))
    picks = [[rng.choice(_FIFTEEN) for _ in range(fan)] for fan in fans]
    first, length, pauses = prompt * 3 // 4, prompt * 3 / 4, []
    for turn, called in enumerate(picks):
        least = max(KNOWN[0], (first / (LONGEST * prompt)) ** (1 / len(fans)))
        longer = length / rng.uniform(least, KNOWN[1])
        seconds = [times[tool.name].draw(draw.rng(f"{name}/tool/{turn}/{n}")) for n, tool in enumerate(called)]
        pauses.append(Pause(max(seconds), round(longer - length)))
        length = longer
    script = agent_script(draw, name, "an assistant", _FIFTEEN, turns, 1)
    kinds = ["", *(called[0].name for called in picks)]
    systems = tuple(_system(draw, script.system, kind, first // 2) for kind in kinds)
    return replace(
        script,
        system=systems[0],
        systems=systems,
        steps=(_query(rng, f"{draw.session}-{name}", picks, fans, first - first // 2), *script.steps),
        pauses=tuple(pauses),
    )


def _system(draw: Draw, plain: str, kind: str, words: int) -> str:
    """A system prompt of so many words: the shared head, and instructions for results of this kind of tool."""
    head = words // 4
    text = f"{filler(f'{draw.session}/system', head)} {filler(f'{draw.session}/system/{kind}', words - head)}"
    return plain.replace("You are an assistant.", f"You are an assistant. {text}")


def _query(
    rng: random.Random, session: str, picks: Sequence[Sequence[Tool]], fans: tuple[int, ...], words: int
) -> Step:
    """The first message: the user's own text, and all requests."""
    called = [tool for together in picks for tool in together]
    step = tools.step(called, rng) if called else Step("Is that all right?", (), "Yes, it is.")
    brought = filler(f"{session}/query", words) if words else ""
    return replace(step, user=f"{brought}\n\n{step.user}", together=fans)


def long_tailed(rng: random.Random, median: int, most: int) -> int:
    """A count with this median whose 99th percentile is ``most``; nothing is above."""
    spread = math.log(most / median) / 2.326
    return min(most, max(1, round(rng.lognormvariate(math.log(median), spread))))


def _arriving(draw: Draw, scripts: Sequence[Script], due: Sequence[float], turns: int | None = None) -> Round:
    """Every program from its moment on, with one turn more than pauses, or `turns`."""
    lanes = tuple((place,) * (turns or len(script.pauses) + 1) for place, script in enumerate(scripts))
    return draw.round(scripts, (lanes,), tuple(due))
