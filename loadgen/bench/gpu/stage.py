"""What is played in whole workflows: recorded conversations, and inflated Pocket.

Inflated Pocket says what Pocket says, at the cost of a large model. It is written to a folder first, because there is
one way to load a model. The history of a turn has the replies on record, whatever was generated (teacher forcing), and
tool results.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.conversations import Conversation, recorded, spans
from holdfast.loadgen.bench.gpu.accounting import Bounds, CountingRunner
from holdfast.loadgen.bench.parts import Once, free_device
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.loadgen.inflate.model import inflate
from holdfast.replicas.config import POCKET, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.model.description import describe, inspect_model
from holdfast.replicas.model.graphs import gpu_capture, room_for
from holdfast.replicas.model.runner_gpu import GpuRunner
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.model.weights import load_tokenizer
from holdfast.replicas.types import TokenIds


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn: all that is known before it, and what is said in it, the end of the turn included."""

    prompt: TokenIds
    reply: TokenIds


Dialogue: TypeAlias = tuple[Exchange, ...]
"""The turns of one program."""


def dialogues(tokenizer: Any, programs: int, turns: int, most_tokens: int, seed: int = 0) -> list[Dialogue]:
    """The first `turns` turns of `programs` recorded conversations, none longer than `most_tokens` with its last reply.

    Another `seed` begins at another conversation. Raises ValueError where too few of them are short enough.
    """
    first = seed * len(recorded()) // 2 % len(recorded())
    found: list[Dialogue] = []
    for conversation in recorded()[first:] + recorded()[:first]:
        if len(found) < programs and (exchanges := _exchanges(tokenizer, conversation, turns, most_tokens)):
            found.append(exchanges)
    if len(found) < programs:
        raise ValueError(f"{len(found)} recorded conversations have {turns} turns in {most_tokens} tokens")
    return found


def _exchanges(tokenizer: Any, conversation: Conversation, turns: int, most_tokens: int) -> Dialogue:
    """The first `turns` turns; empty where there are fewer or they are too long."""

    def ids(text: str) -> TokenIds:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    texts: list[tuple[str, str]] = []
    before = ""
    for span in spans(conversation):
        if span.learned:
            texts.append((before, span.text))
        before += span.text
    texts = texts[:turns]
    if len(texts) < turns or len(ids("".join(texts[-1]))) > most_tokens:
        return ()
    return tuple(Exchange(ids(prompt), ids(reply)) for prompt, reply in texts)


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """What the workflows are. `shape`: a name that `inflate` knows, or a configuration."""

    shape: str | dict[str, Any]
    device: str
    dtype: torch.dtype
    turns: tuple[int, ...] = (6, 35)
    rows: tuple[int, ...] = (1, 32)
    most_tokens: int = 5000  # of a conversation
    warm_turns: int = 3


def full_turns() -> TurnSizes:
    """Llama 3.1 8B's shape on a large GPU."""
    return TurnSizes("llama-3.1-8b", "cuda", torch.bfloat16)


def small_turns() -> TurnSizes:
    """A little more than Pocket itself, on a CPU."""
    shape = json.loads((WEIGHTS / "config.json").read_text())
    shape["hidden_size"] += 8 * shape["num_attention_heads"]
    shape |= {"vocab_size": shape["vocab_size"] + 64, "tie_word_embeddings": False}
    return TurnSizes(shape, "cpu", torch.float32, turns=(1, 2), rows=(1, 2), most_tokens=1000, warm_turns=1)


class Stage:
    """The model on disk and on the device, each made when it is first needed; and what is played.

    Call `close` in the end: the folder is as large as the model.
    """

    def __init__(self, sizes: TurnSizes, ceilings: Ceilings) -> None:
        self.sizes, self.ceilings = sizes, ceilings
        self.folder, self.loaded = Once(self._inflate), Once(self._load)
        self._tokenizer = Once(lambda: load_tokenizer(inspect_model(POCKET)))
        self._recorded: dict[tuple[int, int, int], list[Dialogue]] = {}
        self._made = tempfile.TemporaryDirectory(prefix="bench.")

    def _inflate(self) -> Path:
        """Write the model. Raises InflateError."""
        shape, base = self.sizes.shape, Path(self._made.name)
        if isinstance(shape, dict):
            (base / "shape.json").write_text(json.dumps(shape))
            shape = str(base / "shape.json")
        return inflate(POCKET, shape, base / "model", dtype=self.sizes.dtype, pad_vocabulary=True)

    def dialogues(self, turns: int, rows: int, seed: int = 0) -> list[Dialogue]:
        """The same conversations in each call."""
        key = (turns, rows, seed)
        if key not in self._recorded:
            self._recorded[key] = dialogues(self._tokenizer(), rows, turns, self.sizes.most_tokens, seed)
        return self._recorded[key]

    def _load(self) -> LoadedRunner:
        """The model with its graphs. Raises ConfigError where it does not fit."""
        sizes, most, defaults = self.sizes, max(self.sizes.rows), EngineConfig()
        pages = -(-sizes.most_tokens // defaults.page_size) + 1
        gpu = sizes.device != "cpu"
        config = EngineConfig(
            model=str(self.folder()),
            dtype="auto" if gpu else "float32",
            device=sizes.device,
            threads=0 if gpu else 1,
            cells=int(most * pages * defaults.page_size / defaults.admission_ceiling),
            session_rows=most,
            max_sequences=max(2 * most, 2),
        )
        return load_runner(config)

    @property
    def bounds(self) -> Bounds:
        shape = describe(inspect_model(str(self.folder())).config)
        assert shape is not None  # a Llama
        kv = self.loaded().runner.kv
        return Bounds(shape, kv.dtype.itemsize, kv.cell_bytes, self.ceilings)

    def engine(self, speculation: bool = True) -> tuple[Engine, CountingRunner]:
        """An engine with nothing cached and nothing remembered, as it is served; or without drafts."""
        loaded = self.loaded()
        config = replace(loaded.config, speculation=replace(loaded.config.speculation, enabled=speculation))
        counting = CountingRunner(loaded.runner)
        return Engine(config, counting, loaded.eos, loaded.vocabulary, loaded.cost, window=loaded.window), counting

    def close(self) -> None:
        """Give the device's memory back, and remove what is on disk."""
        self.loaded.drop()
        free_device()
        self._made.cleanup()


def capture_graphs(runner: GpuRunner, device: str, tokens: int, say: Callable[[str], None] = lambda _: None) -> None:
    """Graphs of up to `tokens` tokens, of the model as it is now; without a GPU the calls are only recorded.

    The model has run before, so the shapes of its attention are known.
    """
    shapes = runner.model.attention
    assert shapes
    if device == "cuda":
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        runner.capture(gpu_capture(), room_for(tokens, shapes, processors), say)
    else:
        runner.capture(lambda call: call, room_for(tokens, shapes, 1, 1 << 20), say)
