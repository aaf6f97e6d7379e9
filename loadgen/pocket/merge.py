"""One run from several that went on from the same checkpoint with other seeds, as on machines that share no memory.

``python -m holdfast.loadgen.pocket.merge --base OLD --checkpoint A --checkpoint B --out NEW``. Weights, their averages
and the optimizers' moments are means, each run by the tokens it has seen since; steps and the place in the data are the
first one's. Runs that part for some thousand steps stay near enough for their mean to be better than either (Local SGD,
Stich 2019).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]
"""What ``Run.state`` says."""
MEANS = ("model", "optimizers", "average")


def merged(base: State, states: Sequence[State]) -> State:
    """The mean of ``states``, which went on from ``base``. Raises ValueError for another shape, or without a token."""
    for state in states:
        if state["shape"] != base["shape"]:
            raise ValueError(f"a run has another shape than the one it is to come from: {state['shape']}")
    seen = [state["tokens"] - base["tokens"] for state in states]
    if min(seen, default=0) <= 0:
        raise ValueError(f"every run must have gone on from the base; tokens since: {seen}")
    shares = [tokens / sum(seen) for tokens in seen]
    means = {name: mean([state[name] for state in states], shares) for name in MEANS}
    return {**states[0], **means, "tokens": base["tokens"] + sum(seen)}


def mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """The weighted mean of every tensor of floats within ``values``, which are built alike; the first of all else."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([value[key] for value in values], shares) for key in first}
    if isinstance(first, list):
        return [mean(each, shares) for each in zip(*values, strict=True)]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return sum((value * share for value, share in zip(values, shares, strict=True)), torch.zeros_like(first))
    return first


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pocket merge", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the run that the others come from")
    parser.add_argument("--checkpoint", type=Path, action="append", required=True, help="folder of a run; repeat")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new run, made here")
    options = parser.parse_args(argv)
    base, *states = (
        torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        for folder in (options.base, *options.checkpoint)
    )
    state = merged(base, states)
    options.out.mkdir(parents=True)
    shutil.copy(options.base / "tokenizer.json", options.out)
    torch.save(state, options.out / "checkpoint.pt")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
