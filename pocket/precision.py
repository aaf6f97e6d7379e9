"""The accuracy of dtypes: ``python -m pocket.precision [--model DIR] [--dtypes A,B,...]``.

The engine and our decoder run the same held-out tasks in each dtype. The results are compared with those of the first
dtype. `A/int8` is A with KV in int8, on a CPU. `A/fp8` is A with KV in FP8, on a GPU. A format of `pocket.quantize` is
the model with its layers rounded to that format and computed in float32.

- Greedy turns: the number of equal texts, of turns with equal calls (among turns with calls), and of right turns.
- The right turn, teacher-forced: its perplexity, the relative error of its logits, and the share of tokens with the
  same likeliest token. The error is a root mean square over that of the first dtype's logits. Each token's mean is
  subtracted before; it changes nothing.

The model must be one that our own decoder knows, with a vocabulary that can encode Pocket's texts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.kernels.linear_state import NO_STATE
from holdfast.loadgen.bench.forwards import PRECISIONS, in_precision
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.replicas.config import DEVICES, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.kv.pages import StateUse
from holdfast.replicas.model.decoder import PageTable, build_batch
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling
from holdfast.replicas.requests import Finished, Submit, Tokens
from holdfast.replicas.types import TokenIds
from pocket.agreement import mixed_tasks
from pocket.evaluate import MOST_NEW_TOKENS, Task, judge, parse_calls
from pocket.quantize import RECIPES, save_quantized

CELLS = 16384


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one dtype. `logits`: those of each right turn's tokens, [n, vocabulary], float32."""

    dtype: str
    turns: tuple[str, ...]
    right: int
    logits: tuple[Tensor, ...]
    perplexity: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One dtype compared with the first: counts of `tasks` turns. `calling` of them have calls in the first dtype."""

    dtype: str
    tasks: int
    same_turns: int
    calling: int
    same_calls: int
    right: int
    perplexity: float
    logit_error: float
    same_likeliest: float


class Prompts:
    """Tasks as ids of a model's tokenizer."""

    def __init__(self, tasks: Sequence[Task], tokenizer: Any) -> None:
        self.tasks = tasks
        self.prompts = [self._ids(tokenizer, task, []) for task in tasks]
        self.whole = [self._ids(tokenizer, task, [task.expected]) for task in tasks]

    def _ids(self, tokenizer: Any, task: Task, turn: list[Any]) -> TokenIds:
        text = tokenizer.apply_chat_template(
            [*task.messages, *turn], tools=list(task.tools), add_generation_prompt=not turn, tokenize=False
        )
        return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def measure(loaded: LoadedRunner, prompts: Prompts, dtype: str) -> Outcome:
    """Write the turn of every task, and compute the logits of the right turn."""
    turns = _greedy_turns(loaded, prompts.prompts)
    logits, losses = [], []
    for prompt, whole in zip(prompts.prompts, prompts.whole, strict=True):
        predictions = _logits(loaded, whole)[len(prompt) - 1 : -1]
        targets = torch.from_numpy(whole[len(prompt) :]).long()
        losses.append(torch.nn.functional.cross_entropy(predictions, targets, reduction="none"))
        logits.append(predictions)
    right = sum(judge(task, turn).exact for task, turn in zip(prompts.tasks, turns, strict=True))
    return Outcome(dtype, tuple(turns), right, tuple(logits), torch.cat(losses).mean().exp().item())


def compare(outcome: Outcome, first: Outcome) -> Comparison:
    """Compare `outcome` with that of the first dtype."""
    pairs = list(zip(outcome.turns, first.turns, strict=True))
    calls = [(parse_calls(one), expected) for one, other in pairs if (expected := parse_calls(other))]
    logits_pair = torch.cat(outcome.logits), torch.cat(first.logits)
    own, reference = (logits - logits.mean(1, keepdim=True) for logits in logits_pair)
    return Comparison(
        dtype=outcome.dtype,
        tasks=len(pairs),
        same_turns=sum(one == other for one, other in pairs),
        calling=len(calls),
        same_calls=sum(one == other for one, other in calls),
        right=outcome.right,
        perplexity=outcome.perplexity,
        logit_error=((own - reference).norm() / reference.norm()).item(),
        same_likeliest=(own.argmax(1) == reference.argmax(1)).double().mean().item(),
    )


def _greedy_turns(loaded: LoadedRunner, prompts: Sequence[TokenIds]) -> list[str]:
    engine = Engine(loaded.config, loaded.runner, loaded.eos, loaded.vocabulary, loaded.cost, window=loaded.window)
    for index, prompt in enumerate(prompts):
        engine.handle(Submit(str(index), tokens=prompt, sampling=Sampling(MOST_NEW_TOKENS)), 0.0)
    ids_by_prompt: list[list[int]] = [[] for _ in prompts]
    finished = 0
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Tokens):
                ids_by_prompt[int(event.request_id)] += event.tokens
            finished += isinstance(event, Finished)
    if finished != len(prompts):
        raise RuntimeError(f"{len(prompts) - finished} of {len(prompts)} turns did not finish")
    tokenizer: Any = loaded.tokenizer
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in ids_by_prompt]


def _logits(loaded: LoadedRunner, tokens: TokenIds) -> Tensor:
    """Logits after each token [len(tokens), vocabulary], computed in one step on the store's first pages."""
    kv = loaded.runner.kv
    pages = np.arange(-(-len(tokens) // kv.page_size), dtype=np.int32)
    table = PageTable(1, len(pages), kv.page_size, kv.pages, kv.data.device)
    table.write(RowWrite(0, 0, pages))
    state = StateUse(NO_STATE, 0) if loaded.config.state_slots else None
    chunk = Chunk(0, 0, tokens, Draw(Sampling(), 0, drafts=len(tokens) - 1), state=state)
    return loaded.runner.model.forward(build_batch((chunk,), table)).float().cpu()


def _line(one: Comparison) -> str:
    turns, calls = f"{one.same_turns} of {one.tasks}", f"{one.same_calls} of {one.calling}"
    figures = f"{one.right:6} {one.perplexity:11.4f} {one.logit_error:12.2%} {one.same_likeliest:16.2%}"
    return f"{one.dtype:14} {turns:>12} {calls:>12} {figures}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Raises ConfigError like `load_runner`."""
    parser = argparse.ArgumentParser(prog="bench precision", description="Measure the accuracy of dtypes and formats.")
    parser.add_argument("--model", default="pocket", help="'pocket' or a model folder with Pocket's tokenizer")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8", help="comma-separated; the first is the reference")
    parser.add_argument("--device", default="cpu", choices=DEVICES[1:])
    parser.add_argument("--count", type=int, default=100, help="number of tasks")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0: all cores")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(argv)
    dtypes = options.dtypes.split(",")
    known = (*PRECISIONS, *RECIPES)
    if unknown := set(dtypes) - set(known):
        parser.error(f"--dtypes: {', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    tasks, first, comparisons = mixed_tasks(options.count), None, []
    print(f"{'':14} {'same turns':>12} {'same calls':>12} {'right':>6} {'perplexity':>11} {'logits off':>12} ", end="")
    print(f"{'same likeliest':>16}")
    for dtype in dtypes:
        with TemporaryDirectory() as folder:
            model = options.model
            if dtype in RECIPES:
                save_quantized(WEIGHTS if model == "pocket" else Path(model), Path(folder), RECIPES[dtype])
                model = folder
            config = EngineConfig(model=model, device=options.device, threads=options.threads, cells=CELLS)
            loaded = load_runner(in_precision(config, "float32" if dtype in RECIPES else dtype))
        outcome = measure(loaded, Prompts(tasks, loaded.tokenizer), dtype)
        first = first or outcome
        comparisons.append(compare(outcome, first))
        print(_line(comparisons[-1]), flush=True)
        del loaded
    if options.json:
        results = {"model": options.model, "dtypes": [asdict(one) for one in comparisons]}
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
