"""What a dtype costs in accuracy: ``python -m pocket.precision [--model DIR] [--dtypes A,B,...]``.

The same held-out tasks in each dtype, through our decoder and the engine, against the first dtype. `A/int8` is A with
KV in int8, on a CPU, and `A/fp8` with KV in FP8, on a GPU. A format of `pocket.quantize` is the model with its layers
rounded to that, and computed in float32.

- greedy turns: how many are the same text; of those with calls, in how many the calls are the same; how many are right.
- the right turn, teacher-forced: its perplexity; the root mean square of what the logits are off by, over that of the
  logits themselves (each token's less their mean, which changes nothing); how often the likeliest token is the same.

Only models that our own decoder knows, with a vocabulary that Pocket's texts can be written in.
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
    """What one dtype made of the tasks. `logits`: of each right turn's tokens [n, vocabulary], float32."""

    dtype: str
    turns: tuple[str, ...]
    right: int
    logits: tuple[Tensor, ...]
    perplexity: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One dtype against the first. Counts of `tasks` turns, `calling` of which call something in the first dtype."""

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
    """Tasks in the ids of a model's tokenizer."""

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
    """Write every task's turn, and look at the right one's logits."""
    turns = _written(loaded, prompts.prompts)
    logits, losses = [], []
    for prompt, whole in zip(prompts.prompts, prompts.whole, strict=True):
        found = _logits(loaded, whole)[len(prompt) - 1 : -1]
        wanted = torch.from_numpy(whole[len(prompt) :]).long()
        losses.append(torch.nn.functional.cross_entropy(found, wanted, reduction="none"))
        logits.append(found)
    right = sum(judge(task, turn).exact for task, turn in zip(prompts.tasks, turns, strict=True))
    return Outcome(dtype, tuple(turns), right, tuple(logits), torch.cat(losses).mean().exp().item())


def compare(outcome: Outcome, first: Outcome) -> Comparison:
    """`outcome` against the first dtype's."""
    pairs = list(zip(outcome.turns, first.turns, strict=True))
    calls = [(parse_calls(one), wanted) for one, other in pairs if (wanted := parse_calls(other))]
    off = torch.cat(outcome.logits), torch.cat(first.logits)
    mine, theirs = (logits - logits.mean(1, keepdim=True) for logits in off)
    return Comparison(
        dtype=outcome.dtype,
        tasks=len(pairs),
        same_turns=sum(one == other for one, other in pairs),
        calling=len(calls),
        same_calls=sum(one == other for one, other in calls),
        right=outcome.right,
        perplexity=outcome.perplexity,
        logit_error=((mine - theirs).norm() / theirs.norm()).item(),
        same_likeliest=(mine.argmax(1) == theirs.argmax(1)).double().mean().item(),
    )


def _written(loaded: LoadedRunner, prompts: Sequence[TokenIds]) -> list[str]:
    engine = Engine(loaded.config, loaded.runner, loaded.eos, loaded.vocabulary, loaded.cost, window=loaded.window)
    for index, prompt in enumerate(prompts):
        engine.handle(Submit(str(index), tokens=prompt, sampling=Sampling(MOST_NEW_TOKENS)), 0.0)
    written: list[list[int]] = [[] for _ in prompts]
    finished = 0
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Tokens):
                written[int(event.request_id)] += event.tokens
            finished += isinstance(event, Finished)
    if finished != len(prompts):
        raise RuntimeError(f"{len(prompts) - finished} of {len(prompts)} turns were not finished")
    tokenizer: Any = loaded.tokenizer
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]


def _logits(loaded: LoadedRunner, tokens: TokenIds) -> Tensor:
    """Logits after each token [len(tokens), vocabulary], in one step over the store's first pages."""
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
    parser = argparse.ArgumentParser(prog="bench precision", description="What a dtype or a format costs in accuracy.")
    parser.add_argument("--model", default="pocket", help="'pocket' or a model folder with Pocket's tokenizer")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8", help="the others are compared with the first")
    parser.add_argument("--device", default="cpu", choices=DEVICES[1:])
    parser.add_argument("--count", type=int, default=100, help="tasks")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: all cores")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    dtypes = options.dtypes.split(",")
    known = (*PRECISIONS, *RECIPES)
    if unknown := set(dtypes) - set(known):
        parser.error(f"--dtypes: {', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    tasks, first, found = mixed_tasks(options.count), None, []
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
        found.append(compare(outcome, first))
        print(_line(found[-1]), flush=True)
        del loaded
    if options.json:
        told = {"model": options.model, "dtypes": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
