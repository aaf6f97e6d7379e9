"""Make a training run from others: a deeper one, or the mean of several.

``python -m pocket.checkpoints grow --checkpoint OLD --out NEW`` adds layers on top. Their output projections start at
zero, so the deeper Pocket writes the same text as the old one until training changes them. The weights are the old
run's average. Optimizers, steps and the position in the data start from zero.

``python -m pocket.checkpoints merge --base OLD --checkpoint A --checkpoint B --out NEW`` joins runs that continued the
same checkpoint with different seeds, for example on machines that share no memory. Weights, averages and optimizer
moments become means, weighted by each run's tokens since the base. Steps and the position in the data are those of the
first run. After some thousand steps apart, the mean is still better than either run (Local SGD, Stich 2019).
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pocket.model import PocketShape
from pocket.train import Run, TrainConfig, new_run, save

State = dict[str, Any]
"""The result of ``Run.state``."""
MEANS = ("model", "optimizers", "average")
SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The weights of a new layer that start at zero."""


def grown(average: dict[str, torch.Tensor], shape: PocketShape, layers: int, config: TrainConfig) -> Run:
    """A run at step zero with the weights ``average`` and ``layers`` more layers than ``shape``."""
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + layers)
    run = new_run(config, deeper, torch.device("cpu"))
    weights = {
        name: torch.zeros_like(weight) if name.endswith(SILENT) else weight
        for name, weight in run.model.state_dict().items()
    }
    run.model.load_state_dict({**weights, **average})
    run.average = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    return run


def merged(base: State, states: Sequence[State]) -> State:
    """The mean of ``states``, which continued ``base``. Raises ValueError if shapes differ or tokens are missing."""
    for state in states:
        if state["shape"] != base["shape"]:
            raise ValueError(f"a run differs in shape from the base: {state['shape']}")
    new_tokens = [state["tokens"] - base["tokens"] for state in states]
    if min(new_tokens, default=0) <= 0:
        raise ValueError(f"every run must have tokens beyond the base; tokens since: {new_tokens}")
    shares = [tokens / sum(new_tokens) for tokens in new_tokens]
    means = {name: mean([state[name] for state in states], shares) for name in MEANS}
    return {**states[0], **means, "tokens": base["tokens"] + sum(new_tokens)}


def mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """The weighted mean of each float tensor in ``values``, all built alike. Other items come from the first."""
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
    parser = argparse.ArgumentParser(prog="pocket checkpoints", description=__doc__.partition("\n")[0])
    ways = parser.add_subparsers(required=True)
    grow = ways.add_parser("grow", help="a deeper run")
    grow.add_argument("--checkpoint", type=Path, required=True, help="folder of the run to grow")
    grow.add_argument("--layers", type=int, default=2, help="how many layers to add")
    grow.add_argument("--seed", type=int, default=1, help="of the new layers' weights")
    grow.set_defaults(run=_grow)
    merge = ways.add_parser("merge", help="the mean of several runs")
    merge.add_argument("--base", type=Path, required=True, help="folder of the run that the others come from")
    merge.add_argument("--checkpoint", type=Path, action="append", required=True, help="folder of a run; repeat")
    merge.set_defaults(run=_merge)
    for way in (grow, merge):
        way.add_argument("--out", type=Path, required=True, help="folder of the new run, which must not exist")
    options = parser.parse_args(argv)
    options.run(options)
    return 0


def _grow(options: argparse.Namespace) -> None:
    state = _state(options.checkpoint)
    _begin(options.out, options.checkpoint)
    config = TrainConfig(seed=options.seed)
    save(grown(state["average"], PocketShape(**state["shape"]), options.layers, config), options.out)


def _merge(options: argparse.Namespace) -> None:
    state = merged(_state(options.base), [_state(folder) for folder in options.checkpoint])
    _begin(options.out, options.base)
    torch.save(state, options.out / "checkpoint.pt")


def _state(folder: Path) -> State:
    state: State = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    return state


def _begin(out: Path, source: Path) -> None:
    """Make the new run's folder, with the tokenizer of the source run."""
    out.mkdir(parents=True)
    shutil.copy(source / "tokenizer.json", out)


if __name__ == "__main__":
    raise SystemExit(main())
