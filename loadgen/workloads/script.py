"""Scripts, of which programs are made, and rounds: programs with the order in which their turns are sent.

The user of a script asks for one or more calls; each of the model's calls is answered with the tool's result, and the
user speaks again when the model has answered in text. A script also says what a good model would answer: that goes into
the history where answers are forced, and in place of an answer that failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from holdfast.loadgen.flags import above_zero, at_least, option
from holdfast.loadgen.program import Json, Output, Program, Turn
from holdfast.loadgen.workloads.words import filler


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: the tool's name and its arguments as an object."""

    tool: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Step:
    """One message of the user, the calls that it asks for, and the model's text after them."""

    user: str
    calls: tuple[Call, ...]
    text: str
    together: tuple[int, ...] = ()  # number of calls in each answer; empty: one

    @property
    def answers(self) -> list[tuple[Call, ...]]:
        """The calls of each answer; the last one, in text, has none."""
        ends = accumulate(self.together or (1,) * len(self.calls), initial=0)
        return [*(self.calls[start:end] for start, end in pairwise(ends)), ()]


@dataclass(frozen=True, slots=True)
class Pause:
    """The pause between two turns, whatever the answer: the time of the tools, and words of their results.

    ``words`` come on top of what the results say themselves; after a text they open the user's next message.
    """

    seconds: float = 0.0
    words: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """The parts of one program: system prompt, tools as an OpenAI client declares them, the user's steps."""

    name: str
    system: str
    tools: tuple[Json, ...]
    steps: tuple[Step, ...]
    pauses: tuple[Pause, ...] = ()  # between turns, from the first again after the last; empty: none
    tenant: str = ""  # whose key it is sent with; up to a dash, under what name it is reported
    systems: tuple[str, ...] = ()  # of each request, where it changes; empty: `system`

    def program(self, session: str, result: Callable[[str, Json], str]) -> Program:
        """Every turn of a model that follows the script. `result` is what a tool returns.

        A result, or the user's next message, holds its pause's words.
        """
        turns: list[Turn] = []
        prompt: list[Json] = [{"role": "system", "content": self.system}]
        for step in self.steps:
            words = self._pause(len(turns) - 1).words if turns else 0
            opening = filler(f"{session}-{self.name}/user/{len(turns)}", words) + "\n\n" if words else ""
            prompt.append({"role": "user", "content": opening + step.user})
            for calls in step.answers:
                at, pause = len(turns), self._pause(len(turns) - 1)
                calls_json = [
                    {"id": f"call_{at}" + (f"_{n}" if n else ""), "type": "function",
                     "function": {"name": call.tool, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                    for n, call in enumerate(calls)
                ]  # fmt: skip
                answer: Json = {"role": "assistant", "content": None if calls else step.text}
                answer |= {"tool_calls": calls_json} if calls else {}
                delay = pause.seconds * 1e3 or None if turns else None
                system = self.systems[at] if at < len(self.systems) else ""
                turn = Turn(tuple(prompt), tools=self.tools, delay_ms=delay, output=Output(answer), system=system)
                turns.append(turn)
                prompt = self._results(session, at, calls, result)
        return Program(self.name, tuple(turns), self.tenant, scripted=True)

    def _pause(self, turn: int) -> Pause:
        return self.pauses[turn % len(self.pauses)] if self.pauses else Pause()

    def _results(
        self, session: str, at: int, calls: tuple[Call, ...], result: Callable[[str, Json], str]
    ) -> list[Json]:
        words, results = self._pause(at).words, []
        for number, call in enumerate(calls):
            # The last result gets the remainder of the words.
            share = words * (number + 1) // len(calls) - words * number // len(calls)
            more = filler(f"{session}-{self.name}/{call.tool}/{call.arguments}", share) if share else ""
            content = result(call.tool, call.arguments) + (f"\n{more}" if more else "")
            call_id = f"call_{at}" + (f"_{number}" if number else "")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        return results


Lane = tuple[int, ...]
"""The places of the programs whose next turns are sent, each as soon as the one before is answered."""

Wave = tuple[Lane, ...]
"""Lanes that run at once. The next wave starts when all of them are through."""


@dataclass(frozen=True, slots=True)
class Round:
    """One repetition of a workload. ``fill`` waves come first and are not measured: they fill a cache.

    ``session`` differs from that of any other repetition or workload.
    """

    programs: tuple[Program, ...]
    waves: tuple[Wave, ...]
    fill: tuple[Wave, ...] = ()
    due: tuple[float, ...] = ()  # when each lane of a wave begins, in seconds; empty: at once
    session: str = ""
    forced: bool = False  # the program's own answers go into the history, whatever the model says


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workloads. Raises ConfigError for sizes below 1 (words: 0), and for factors that are not above 0."""

    webapp_turns: int = option("requests of webapp", 35)
    webapp_words: int = option("words that webapp's tools add to their results, in all", 0)
    programs: int = option("programs at once in concurrency", 8)
    burst: int = option("requests at once in burst", 8)
    bursts: int = option("bursts one after another", 5)
    chain: int = option("calls that a user message asks for", 3)
    jobs: int = option("programs that arrive by a schedule; in tenants, of each quiet tenant", 20)
    rate: float = option("programs a second that arrive by a schedule", 0.2)
    turns_times: int = option("multiply the turns of swe, mixed and bfcl", 1)
    tool_times: float = option("multiply the seconds of their tools", 1.0)
    prompt_tokens: int = option(
        "words of sutradhara's prompts, and words that the tools of swe, mixed and bfcl return", 1000
    )
    scale: float = option("multiply the lengths of coding, whose prompts have 195,000 tokens", 0.01)
    quiet: int = option("tenants beside the noisy one", 3)
    noise: int = option("load of the noisy tenant, in quiet ones", 8)

    def __post_init__(self) -> None:
        at_least(1, "webapp_turns programs burst bursts chain jobs turns_times prompt_tokens quiet noise", self)
        at_least(0, "webapp_words", self)
        above_zero("rate scale tool_times", self)


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a sweep: so many programs or requests."""

    value: float
    unit: str  # "a second" or "at once"

    @property
    def name(self) -> str:
        return f"{self.value:g} {self.unit}"


def one_by_one(order: Lane) -> tuple[Wave, ...]:
    """Waves that send one turn at a time, of the programs in this order."""
    return tuple(((program,),) for program in order)


def at_once(programs: int, turns: int) -> tuple[Wave, ...]:
    """One wave in which every program runs through its turns at its own pace."""
    return (tuple((program,) * turns for program in range(programs)),)
