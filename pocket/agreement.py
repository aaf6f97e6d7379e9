"""Compare the greedy turns of two model folders: an inflated model and Pocket.

``python -m pocket.agreement DIR [--source pocket] [--count 50] [--dtype float32]``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.loadgen.inflate import WEIGHTS
from pocket.evaluate import SUITES, Task, answers, tasks

SEED = 51


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of equal turns of ``count``, and both texts of the first turn that differs."""

    same: int
    count: int
    first_difference: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.same} of {self.count} turns are the same"


def mixed_tasks(count: int) -> list[Task]:
    """``count`` held-out tasks, taken in turn from all suites of short conversations."""
    suites = [suite for suite in SUITES if suite != "turn_30"]
    tasks_by_suite = [tasks(suite, -(-count // len(suites)), SEED) for suite in suites]
    return [task for round_ in zip(*tasks_by_suite, strict=True) for task in round_][:count]


def greedy_turns(folder: Path, chosen_tasks: Sequence[Task], dtype: torch.dtype, device: str) -> list[str]:
    """Greedy turns of the model in ``folder``, computed in ``dtype``."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return answers(model, tokenizer, chosen_tasks)


def agreement(
    folder: Path, source: Path, count: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Agreement:
    """Compare ``folder`` in ``dtype`` with ``source`` in float32 on ``count`` held-out tasks."""
    chosen_tasks = mixed_tasks(count)
    pairs = list(
        zip(
            greedy_turns(source, chosen_tasks, torch.float32, device),
            greedy_turns(folder, chosen_tasks, dtype, device),
            strict=True,
        )
    )
    different = [pair for pair in pairs if pair[0] != pair[1]]
    return Agreement(len(pairs) - len(different), len(pairs), different[0] if different else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when a turn differs in float32."""
    parser = argparse.ArgumentParser(prog="pocket agreement", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the inflated model")
    parser.add_argument("--source", default="pocket", help="'pocket' or the folder that was inflated")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    source = WEIGHTS if options.source == "pocket" else Path(options.source)
    result = agreement(options.model, source, options.count, getattr(torch, options.dtype), options.device)
    print(result)
    if result.first_difference:
        print("source   {!r}\ninflated {!r}".format(*result.first_difference))
    return 1 if options.dtype == "float32" and result.first_difference else 0


if __name__ == "__main__":
    raise SystemExit(main())
