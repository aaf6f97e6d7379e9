"""A deeper Pocket that says what the old one does.

``python -m holdfast.loadgen.pocket.grow --checkpoint OLD --out NEW``. The layers on top start with output projections
of zero, so they add nothing until training moves them. Weights are the old run's average; optimizers, steps and the
place in the data start anew.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from holdfast.loadgen.pocket.model import PocketShape
from holdfast.loadgen.pocket.train import Run, TrainConfig, new_run, save

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What of a new layer starts at zero."""


def grown(average: dict[str, torch.Tensor], shape: PocketShape, layers: int, config: TrainConfig) -> Run:
    """A run at step zero with ``layers`` layers more than ``shape``, from the weights ``average``."""
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + layers)
    run = new_run(config, deeper, torch.device("cpu"))
    weights = {
        name: torch.zeros_like(weight) if name.endswith(SILENT) else weight
        for name, weight in run.model.state_dict().items()
    }
    run.model.load_state_dict({**weights, **average})
    run.average = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="pocket grow", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the run to grow")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new run, made here")
    parser.add_argument("--layers", type=int, default=2, help="how many layers to add")
    parser.add_argument("--seed", type=int, default=1, help="of the new layers' weights")
    options = parser.parse_args(argv)
    state = torch.load(options.checkpoint / "checkpoint.pt", map_location="cpu", weights_only=True)
    options.out.mkdir(parents=True)
    shutil.copy(options.checkpoint / "tokenizer.json", options.out)
    config = TrainConfig(seed=options.seed)
    save(grown(state["average"], PocketShape(**state["shape"]), options.layers, config), options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
