"""``python -m holdfast.loadgen.bench.ablation [--model DIR] [--off NAMES] [--scenarios NAMES] [--json FILE]``.

One service with everything on stays loaded; each variant is loaded beside it, measured turn about with it, and
dropped, so that no more than two models are in memory. A variant that cannot act here is named and left out. No Ray and
no HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from holdfast.loadgen.bench.ablation.compare import Comparison, alternate, compared
from holdfast.loadgen.bench.ablation.variants import Variant, chosen
from holdfast.loadgen.bench.ablation.workload import SCENARIOS, Scenario, rounds
from holdfast.replicas.config import POCKET, EngineConfig
from holdfast.replicas.errors import ConfigError, HoldfastError
from holdfast.replicas.service import Service

CELLS = 32768
_HEAD = "off             scenario turns     all on      p99        off      p99  ratio      95 %       p99  wall  equal"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; an error of ours is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="ablation", description="Turn latency with all on, and with each mechanism off."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except HoldfastError as error:
        print(f"ablation: {error.message}", file=sys.stderr)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options, also for `holdfast bench ablation`."""
    parser.add_argument("--model", default=POCKET, help="'pocket', a folder, or a hub name in the local cache")
    parser.add_argument("--off", default="", help="mechanisms to turn off, comma-separated (default: each in turn)")
    parser.add_argument("--scenarios", default="", help=f"of {', '.join(s.name for s in SCENARIOS)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as many rounds (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations")
    parser.add_argument("--threads", type=int, default=0, help="of torch (default: all cores)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


def run(options: argparse.Namespace) -> int:
    """Measure as the parsed options say."""
    config = EngineConfig(model=options.model, threads=options.threads, dtype=options.dtype, cells=CELLS)
    variants, scenarios = chosen(options.off), _scenarios(options.scenarios)
    if options.json:
        _check_writable(options.json)
    print(_HEAD)
    comparisons = asyncio.run(_measure(config, variants, scenarios, options.seed, options.scale))
    if options.json:
        options.json.write_text(json.dumps([asdict(comparison) for comparison in comparisons], indent=1) + "\n")
    return 0


async def _measure(
    config: EngineConfig, variants: Sequence[Variant], scenarios: Sequence[Scenario], seed: int, scale: float
) -> list[Comparison]:
    comparisons = []
    on = Service.load(config)
    try:
        await _warm(on, seed)
        for variant in variants:
            if why := variant.idle(on.engine.config):
                print(f"{variant.name:<15} left out: {why}", flush=True)
                continue
            off = Service.load(variant.of(config))
            try:
                await _warm(off, seed)
                for scenario in scenarios:
                    # A scope of its own: what the service that stays has cached for others is not found again.
                    scope = f"{variant.name}/{scenario.name}"
                    pair = await alternate(on, off, list(rounds(scenario, seed, scale)), scope)
                    comparisons.append(compared(variant.name, scenario.name, *pair))
                    print(_row(comparisons[-1]), flush=True)
            finally:
                await off.close()
    finally:
        await on.close()
    return comparisons


def _check_writable(path: Path) -> None:
    """Raise ConfigError for a path that figures could not be written to, before they are measured."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "json") from error


async def _warm(service: Service, seed: int) -> None:
    """A few turns that nobody counts."""
    warm = Scenario("warm", lanes=2, turns=2, tools=2, rounds=1)
    await alternate(service, service, list(rounds(warm, seed)), "warm")


def _scenarios(names: str) -> tuple[Scenario, ...]:
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    for name in names.split(",") if names else ():
        if name not in by_name:
            raise ConfigError(f"{name} is no scenario; there are {', '.join(by_name)}", "scenarios")
    return tuple(by_name[name] for name in names.split(",")) if names else SCENARIOS


def _row(c: Comparison) -> str:
    return (
        f"{c.off:<15} {c.scenario:<8} {c.turns:>5} {c.on_median_ms:>7.1f} ms {c.on_p99_ms:>8.1f}"
        f" {c.off_median_ms:>7.1f} ms {c.off_p99_ms:>8.1f}  {c.ratio:>5.2f} ({c.low:.2f}-{c.high:.2f})"
        f" {c.p99_ratio:>6.2f} {c.wall_ratio:>5.2f} {c.equal:>6.2f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
