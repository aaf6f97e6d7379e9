"""How near whole turns come to what this CPU allows: ``python -m holdfast.loadgen.bench.efficiency --model DIR``.

Recorded conversations through the engine as it is served, one program or several at once, and for each turn

    ideal = (forwards x weights + KV read) / bandwidth + operations of the new tokens / product rate
    efficiency = ideal / measured

The same run measures bandwidth and product rate, before and after. The forwards are those that the engine did, so the
tokens that drafts save are not in it. The rest of the time is printed by its parts. `busy` is the process's CPU time
over that of its threads: far below 1 other programs had the cores, and the turn says little. On a GPU: `bench.gpu`. A
model that `holdfast inflate` made of Pocket repeats the recorded replies; of other models only the time counts.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.attention_cpu import Machine
from holdfast.loadgen.bench.gpu.accounting import Bounds, CountingRunner
from holdfast.loadgen.bench.gpu.stage import Dialogue, dialogues
from holdfast.loadgen.bench.gpu.workflows import Player, play, summary
from holdfast.loadgen.bench.harness import parser, write
from holdfast.loadgen.bench.parts import Deadline, Figures
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.description import describe, inspect_model
from holdfast.replicas.model.startup import LoadedRunner, load_runner

_WARM_TURNS = 3
_PARTS = ("prepare_s", "kernels_s", "sample_s", "plan_s", "commit_s", "idle_s")


def measure(loaded: LoadedRunner, ceilings: Ceilings, programs: list[Dialogue], turns: int, seconds: float) -> Figures:
    """Play the turns once to warm up, a few of them, and once to measure; see `workflows.summary`.

    `of_turns`: the figures of each, and how `busy` the process was.
    """
    shape = describe(inspect_model(loaded.config.model).config)
    if shape is None:
        raise ConfigError("only models that our own decoder knows", "model")
    kv = loaded.runner.kv
    bounds = Bounds(shape, kv.dtype.itemsize, kv.cell_bytes, ceilings)
    for most in (min(_WARM_TURNS, turns), turns):
        counting = CountingRunner(loaded.runner)
        engine = Engine(loaded.config, counting, loaded.eos, loaded.vocabulary, loaded.cost, window=loaded.window)
        played, of_turns, began = [], [], time.process_time()
        for turn in play(Player(engine, counting, bounds, programs), most, Deadline(seconds)):
            ended = time.process_time()
            played.append(turn)
            of_turns.append({**turn.figures, "busy": (ended - began) / turn.wall_s / torch.get_num_threads()})
            began = time.process_time()
    return {**summary(played), "of_turns": of_turns}


def _line(figures: Figures, speeds: str) -> str:
    spent = ", ".join(f"{figures[part] / figures['wall_s']:.2f}" for part in ("ideal_s", *_PARTS))
    return f"{figures['efficiency']:10.2f} {speeds} {figures['wall_s']:7.2f}  {spent}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    command = parser("efficiency", "Turns against what this CPU allows.")
    command.add_argument("--model", required=True)
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    command.add_argument("--threads", type=int, default=0, help="of torch; 0: all cores")
    command.add_argument("--turns", type=int, nargs="+", default=[6, 25])
    command.add_argument("--programs", type=int, nargs="+", default=[1, 8], help="at once")
    command.add_argument("--tokens", type=int, default=7000, help="of a conversation at most")
    command.add_argument("--seconds", type=float, default=120.0, help="for each; turns that are left then are left out")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--each", action="store_true", help="a line for each turn as well")
    options = command.parse_args(argv)
    cells = int(max(options.programs) * (options.tokens + 16) / EngineConfig().admission_ceiling)
    loaded = load_runner(
        EngineConfig(
            model=options.model,
            device="cpu",
            dtype=options.dtype,
            threads=options.threads,
            cells=-(-cells // 16) * 16,
            session_rows=max(options.programs),
            max_sequences=2 * max(options.programs),
        )
    )
    found: dict[str, Any] = {}
    print(f"{'':24} {'efficiency':>10} {'GB/s':>6} {'GFLOP/s':>8} {'wall s':>7}  of it: ideal, {', '.join(_PARTS)}")
    for programs in options.programs:
        for turns in options.turns:
            machine = Machine()
            ceilings = Ceilings(machine.bandwidth, machine.rate)
            recorded = dialogues(loaded.tokenizer, programs, turns, options.tokens, options.seed)
            figures = measure(loaded, ceilings, recorded, turns, options.seconds)
            after = Machine()
            name = f"{turns} turns, {programs} at once"
            rates = {"bandwidth": machine.bandwidth, "rate": machine.rate}
            found[name] = {**figures, **rates, "bandwidth_after": after.bandwidth, "rate_after": after.rate}
            speeds = f"{machine.bandwidth / 1e9:6.1f} {machine.rate / 1e9:8.0f}"
            print(f"{name:24} {_line(figures, speeds)}  median of turns {figures['median_of_turns']:.2f}", flush=True)
            for number, turn in enumerate(figures["of_turns"] if options.each else ()):
                tokens = f"{turn['new']} new, {turn['completion']} drawn in {turn['forwards']:.0f} forwards"
                print(f"{f'  turn {number}':24} {_line(turn, ' ' * 15)}  busy {turn['busy']:.2f}, {tokens}")
    write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
