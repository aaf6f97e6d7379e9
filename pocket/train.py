"""Training: ``python -m pocket.train --out DIR``. A second run continues from the last checkpoint.

Muon trains the matrices, AdamW the embeddings and norms. The rate warms up, stays, and falls to zero over the last
``decay`` steps. A checkpoint also has an average of the weights, so it can be exported before the decay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from pocket.batches import Batch, Mix, Pool, Row, collate, feed, tokenized
from pocket.conversations import MOST_TOOLS, lexicon, write
from pocket.model import Pocket, PocketShape
from pocket.pointing import HEADS, pointing_losses
from pocket.tokenizer import load, train_tokenizer
from pocket.words import Split

PROBE_SEED = 7_000_000_019
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""The parts of the shape that are options. Vocabulary and context belong to the tokenizer."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Everything that determines a training run, except the architecture."""

    seed: int = 1
    steps: int = 12_000
    tokens_per_step: int = 4096
    rate: float = 3e-3
    warmup: int = 100
    decay: int = 1500
    weight_decay: float = 0.02
    easy_pools: int = 6
    echo_pools: int = 24
    echo_share: float = 0.4
    long_share: float = 0.0
    drill_share: float = 0.6
    pointing: float = 0.1
    average: float = 0.998
    tokenizer_conversations: int = 6000
    checkpoint_every: int = 200
    probe_every: int = 200
    probe_count: int = 48


@dataclass(slots=True)
class Run:
    """A training run in progress: its position in the data, its weights and their average."""

    config: TrainConfig
    model: Pocket
    optimizers: list[torch.optim.Optimizer]
    average: dict[str, Tensor]
    step: int = 0
    pool: int = 0
    used: int = 0
    tokens: int = 0

    def state(self) -> dict[str, Any]:
        """Everything that a later process needs to continue."""
        return {
            "config": asdict(self.config),
            "shape": self.model.shape.as_dict(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": self.average,
            "step": self.step,
            "pool": self.pool,
            "used": self.used,
            "tokens": self.tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.average = state["average"]
        self.step, self.pool, self.used, self.tokens = (state[key] for key in ("step", "pool", "used", "tokens"))


def new_run(config: TrainConfig, shape: PocketShape, device: torch.device) -> Run:
    """A run at step zero."""
    model = Pocket(shape, config.seed).to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=config.rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    return Run(config, model, optimizers, {name: p.detach().clone() for name, p in model.named_parameters()})


def rate_at(config: TrainConfig, step: int) -> float:
    """Learning rate of one step: warm-up, plateau, linear fall."""
    rising = min(1.0, (step + 1) / config.warmup)
    falling = min(1.0, (config.steps - step) / config.decay) if config.decay else 1.0
    return config.rate * rising * max(0.0, falling)


def train_step(run: Run, batch: Batch) -> Tensor:
    """Make one update. Returns the losses before it, on the model's device: per learned token, then of ``HEADS``."""
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(run.config, run.step)
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        logits, projections = run.model(batch.ids, batch.positions, batch.where)
        losses = torch.stack((F.cross_entropy(logits, batch.targets), *pointing_losses(projections, batch.pointing)))
    (losses[0] + run.config.pointing * losses[1:].sum()).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.step += 1
    run.tokens += batch.tokens
    keep = min(run.config.average, run.step / (run.step + 10))
    weights = dict(run.model.named_parameters())
    with torch.no_grad():
        torch._foreach_lerp_([run.average[name] for name in weights], list(weights.values()), 1 - keep)
    return losses.detach()


def mix_at(config: TrainConfig, pool: int) -> Mix:
    """The mix of a pool. Early pools have few tools and much copying, which the model must learn first."""
    return Mix(
        most_tools=2 if pool < config.easy_pools else MOST_TOOLS,
        long_share=config.long_share,
        echo_share=config.echo_share if pool < config.echo_pools else 0.02,
        drill_share=config.drill_share if pool >= config.easy_pools else 0.0,
    )


def data(run: Run, folder: Path, workers: int = 0) -> Iterator[Batch]:
    """Batches from the run's position on. Each batch advances the position."""
    config = run.config
    pools = (
        Pool(config.seed, pool, config.tokens_per_step, mix_at(config, pool)) for pool in itertools.count(run.pool)
    )
    for pool in feed(pools, folder, workers):
        for batch in pool[run.used :]:
            run.used += 1
            yield batch
        run.pool, run.used = run.pool + 1, 0


def save(run: Run, folder: Path) -> None:
    """Write the checkpoint atomically: a reader sees the old one or the new one."""
    temporary = folder / "checkpoint.tmp"
    torch.save(run.state(), temporary)
    os.replace(temporary, folder / "checkpoint.pt")


def train(
    config: TrainConfig,
    shape: PocketShape | None,
    folder: Path,
    device: torch.device,
    workers: int = 0,
    stop: threading.Event | None = None,
) -> Run:
    """Train in ``folder`` until ``config.steps``, from its checkpoint if there is one.

    ``workers`` processes make the batches, 0: this process. The checkpoint's shape must be ``shape``, unless that is
    None. After ``stop`` is set, the run finishes its step, saves and ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(config.tokenizer_conversations, config.seed << 40).save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    run = open_run(config, shape, folder, device)
    rows = probe_rows(tokenizer, config.probe_count, PROBE_SEED)
    started, mean = time.monotonic(), torch.zeros(1 + len(HEADS), device=device)
    first_tokens, first_step = run.tokens, run.step
    for batch in data(run, folder, workers) if run.step < config.steps else ():
        mean = mean.lerp(train_step(run, batch.to(device)), max(0.05, 1 / (run.step - first_step)))
        last = run.step >= config.steps or (stop is not None and stop.is_set())
        if run.step % 20 == 0 or last:
            speed = (run.tokens - first_tokens) / (time.monotonic() - started)
            losses = dict(zip(("loss", *HEADS), (round(value, 4) for value in mean.tolist()), strict=True))
            log(
                folder,
                step=run.step,
                tokens=run.tokens,
                **losses,
                tokens_per_second=round(speed),
            )
        if run.step % config.checkpoint_every == 0 or last:
            save(run, folder)
        if run.step % config.probe_every == 0 or last:
            log(folder, step=run.step, **probe_average(run, rows, tokenizer))
        if last:
            break
    return run


def open_run(config: TrainConfig, shape: PocketShape | None, folder: Path, device: torch.device) -> Run:
    """The run of the checkpoint in ``folder``, or a new one. Raises ValueError if it has another shape."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return new_run(config, shape or PocketShape(), device)
    state = torch.load(path, map_location=device, weights_only=True)
    saved = PocketShape(**state["shape"])
    if shape not in (None, saved):
        raise ValueError(f"the checkpoint in {folder} has another shape: {saved}")
    run = new_run(config, saved, device)
    run.restore(state)
    return run


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """Mean loss and shares of right turns. A turn is right if each of its tokens is the most likely one."""

    loss: float
    calls: float
    texts: float


def probe_rows(tokenizer: Tokenizer, count: int, seed: int) -> list[Row]:
    """Held-out conversations with one to eight tools."""
    rng = random.Random(seed)
    lex = lexicon(Split.HELD_OUT)
    return [
        tokenized(write(rng, lex, tools=rng.randint(1, 8), turns=rng.randint(2, 8)), tokenizer, rng)
        for _ in range(count)
    ]


@torch.no_grad()
def probe(model: Pocket, rows: list[Row], tokenizer: Tokenizer) -> ProbeScore:
    """Score ``rows`` in one teacher-forced pass."""
    mark = tokenizer.token_to_id("<tool_call>")
    right: dict[bool, list[bool]] = {True: [], False: []}
    losses: list[float] = []
    device = next(model.parameters()).device
    for row in rows:
        batch = collate([row]).to(device)
        logits = model.logits(batch.ids, batch.positions, batch.where)
        losses.append(float(torch.nn.functional.cross_entropy(logits, batch.targets)))
        hits = (logits.argmax(-1) == batch.targets).tolist()
        turn_hits: list[bool] = []
        turn_tokens: list[int] = []
        for index, (at, target) in enumerate(zip(batch.where.tolist(), batch.targets.tolist(), strict=True)):
            turn_hits.append(hits[index])
            turn_tokens.append(target)
            if index + 1 == len(hits) or batch.where[index + 1] != at + 1:
                right[turn_tokens[0] == mark].append(all(turn_hits))
                turn_hits, turn_tokens = [], []
    return ProbeScore(sum(losses) / len(losses), _share(right[True]), _share(right[False]))


def _share(values: list[bool]) -> float:
    return sum(values) / max(1, len(values))


def probe_average(run: Run, rows: list[Row], tokenizer: Tokenizer) -> dict[str, float]:
    """The quick score of the averaged weights."""
    own = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.model.load_state_dict(run.average)
    score = probe(run.model, rows, tokenizer)
    run.model.load_state_dict(own)
    return {f"held_out_{key}": round(value, 4) for key, value in asdict(score).items()}


def log(folder: Path, **values: float) -> None:
    """Append one line of JSON to the log and print it."""
    line = json.dumps(values)
    print(line, flush=True)
    with (folder / "log.jsonl").open("a") as file:
        file.write(line + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Every field of ``TrainConfig`` and every size of ``PocketShape`` is an option.

    On SIGTERM a run saves its state and ends.
    """
    parser = argparse.ArgumentParser(prog="pocket train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for all")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches, 0: the training process")
    for name, value in asdict(TrainConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    for name in SIZES:
        default = getattr(PocketShape(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of a new run; {default} by default")
    options = vars(parser.parse_args(argv))
    sizes = {name: size for name in SIZES if (size := options.pop(name)) is not None}
    out, device, threads, workers = (options.pop(name) for name in ("out", "device", "threads", "workers"))
    if threads:
        torch.set_num_threads(threads)
    shape = replace(PocketShape(), **sizes) if sizes else None
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    train(replace(TrainConfig(), **options), shape, out, torch.device(device), workers, stop)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
