"""Recorded conversations through the whole engine, as it is served: each turn's ideal time over its measured time.

    ideal = (forwards x weights + KV read) / bandwidth + operations of the new tokens / matrix rate

A device may read and multiply at once: `ideal_overlapped` has the longer of both for the forwards with new tokens. No
engine that does these forwards goes below it.

Turns run in waves: all programs begin a turn together, and the wave is over with the last of them. A turn draws as many
tokens as the reply on record has, so that every engine does the same work. `Turn.spent` lays all of the measured time
to something: its parts add up to it.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count

import numpy as np

from holdfast.loadgen.bench.gpu.bounds import Bounds
from holdfast.loadgen.bench.gpu.dialogues import Dialogue, Exchange
from holdfast.loadgen.bench.gpu.watch import Watched
from holdfast.loadgen.bench.report import Deadline, Figures
from holdfast.replicas.engine import Engine
from holdfast.replicas.events import Finished, Sampling, Submit, Tokens
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Totals:
    """What an engine and its runner have counted, or the difference between two moments. Seconds and numbers."""

    forwards: float
    positions: float
    drafted: float
    accepted: float
    forward_s: float
    sample_s: float
    prepare_s: float
    plan_s: float
    commit_s: float
    filling: float = 0.0
    filling_positions: float = 0.0

    @staticmethod
    def of(engine: Engine, watched: Watched) -> "Totals":
        stats, seen = engine.stats, watched.counts
        return Totals(
            seen.forwards,
            seen.positions,
            stats.drafted,
            stats.accepted,
            stats.forward_s,
            stats.sample_s,
            seen.prepare_s,
            stats.schedule_s,
            stats.commit_s,
            seen.filling,
            seen.filling_positions,
        )

    def since(self, before: "Totals") -> "Totals":
        earlier = asdict(before)
        return Totals(**{name: value - earlier[name] for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class Turn:
    """One wave. `prompt`, `new` and `completion`: tokens of all programs; `new` ones had never been seen."""

    turn: int
    prompt: int
    new: int
    completion: int
    as_recorded: int  # programs that said what is on record
    wall_s: float
    ideal_s: float
    ideal_overlapped_s: float
    total: Totals

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.wall_s

    @property
    def spent(self) -> dict[str, float]:
        """Seconds, which add up to the measured time.

        Where the host's own times could be hidden behind the device they are told as far as there is time to explain:
        `prepare_s` within what forwards took beyond their ideal, `plan_s` and `commit_s` within what no step took.
        """
        total = self.total
        beyond = total.forward_s - self.ideal_s
        prepare = min(total.prepare_s, max(beyond, 0.0))
        between = self.wall_s - total.forward_s - total.sample_s
        plan = min(total.plan_s, max(between, 0.0))
        commit = min(total.commit_s, max(between - plan, 0.0))
        return {
            "ideal_s": self.ideal_s,
            "prepare_s": prepare,
            "kernels_s": beyond - prepare,
            "sample_s": total.sample_s,
            "plan_s": plan,
            "commit_s": commit,
            "idle_s": between - plan - commit,
        }

    @property
    def figures(self) -> Figures:
        """As they are written down."""
        total = self.total
        return {
            "efficiency": self.efficiency,
            **_overlapped(self.ideal_overlapped_s, self.wall_s),
            "wall_s": self.wall_s,
            **self.spent,
            "prompt": self.prompt,
            "new": self.new,
            "completion": self.completion,
            "forwards": total.forwards,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "as_recorded": self.as_recorded,
        }


class Player:
    """Plays the turns of programs to an engine, one wave after the other."""

    def __init__(self, engine: Engine, watched: Watched, bounds: Bounds, programs: Sequence[Dialogue]) -> None:
        self._engine, self._watched, self._bounds = engine, watched, bounds
        self._programs = programs
        self._seen: list[TokenIds] = [np.empty(0, np.int32) for _ in programs]  # by the program's last turn

    def wave(self, turn: int) -> Turn:
        """All programs do a turn. Raises RuntimeError where one of them fails."""
        exchanges = [program.exchanges[turn] for program in self._programs]
        known = [_common(seen, each.prompt) for seen, each in zip(self._seen, exchanges, strict=True)]
        before = Totals.of(self._engine, self._watched)
        began = time.perf_counter()
        for row, exchange in enumerate(exchanges):
            self._engine.handle(self._submit(row, turn, exchange), began)
        answers = drain(self._engine)
        wall = time.perf_counter() - began
        total = Totals.of(self._engine, self._watched).since(before)
        said = [answers[f"{row} {turn}"] for row in range(len(exchanges))]
        self._seen = [np.concatenate((each.prompt, answer)) for each, answer in zip(exchanges, said, strict=True)]
        new = [len(each.prompt) - cached for each, cached in zip(exchanges, known, strict=True)]
        read, compute = self._bounds.read_s, sum(self._bounds.compute_s(*each) for each in zip(new, known, strict=True))
        filling = read(int(total.filling_positions), int(total.filling))
        ideal = read(int(total.positions), int(total.forwards)) + compute
        return Turn(
            turn,
            prompt=sum(len(each.prompt) for each in exchanges),
            new=sum(new),
            completion=sum(len(answer) for answer in said),
            as_recorded=sum(np.array_equal(e.reply, answer) for e, answer in zip(exchanges, said, strict=True)),
            wall_s=wall,
            ideal_s=ideal,
            ideal_overlapped_s=ideal - min(filling, compute),
            total=total,
        )

    def _submit(self, row: int, turn: int, exchange: Exchange) -> Submit:
        return Submit(
            f"{row} {turn}",
            exchange.prompt,
            Sampling(len(exchange.reply), ignore_eos=True),
            program_id=f"{row}",
            skeletons=self._programs[row].skeletons,
            program_turns=turn,
        )


def _common(a: TokenIds, b: TokenIds) -> int:
    """Tokens at the beginning of both; the last of `b` is computed anyway."""
    length = min(len(a), len(b) - 1)
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def drain(engine: Engine) -> dict[str, TokenIds]:
    """Run until nothing is left to do; what each request was answered. Raises RuntimeError where one failed."""
    answers: dict[str, list[int]] = {}
    while engine.busy:
        for event in engine.step(time.perf_counter(), time.perf_counter):
            if isinstance(event, Tokens):
                answers.setdefault(event.request_id, []).extend(event.tokens)
            elif not isinstance(event, Finished):
                raise RuntimeError(f"a turn did not finish: {event}")
    return {name: np.array(tokens, np.int32) for name, tokens in answers.items()}


def play(player: Player, turns: int, deadline: Deadline) -> Iterator[Turn]:
    """Every turn, or as many as there is time for."""
    for turn in count():
        if turn == turns or (turn and deadline.over):
            return
        yield player.wave(turn)


def _overlapped(ideal_s: float, wall_s: float) -> Figures:
    return {"ideal_overlapped_s": ideal_s, "efficiency_overlapped": ideal_s / wall_s}


def summary(turns: Sequence[Turn]) -> Figures:
    """All turns together: their efficiency, what each second went to, and what drafts were worth."""
    wall = sum(turn.wall_s for turn in turns)
    spent = {name: sum(turn.spent[name] for turn in turns) for name in turns[0].spent}
    drafted, forwards = (sum(getattr(turn.total, name) for turn in turns) for name in ("drafted", "forwards"))
    completion = sum(turn.completion for turn in turns)
    return {
        "efficiency": spent["ideal_s"] / wall,
        **_overlapped(sum(turn.ideal_overlapped_s for turn in turns), wall),
        "median_of_turns": statistics.median(turn.efficiency for turn in turns),
        "turns": len(turns),
        "wall_s": wall,
        **spent,
        "completion": completion,
        "tokens_per_forward": completion / forwards,
        "accepted_share": sum(turn.total.accepted for turn in turns) / drafted if drafted else 0.0,
        "as_recorded": sum(turn.as_recorded for turn in turns),
    }
