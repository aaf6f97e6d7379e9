"""The memory left beside a model's weights, computed from the model's shape. Nothing is loaded or measured.

    left     = share x memory of the GPU - weights - largest step - CUDA graphs
    program  = KV of its tokens, and its recurrent states
    programs = left / program

If windows have pages of their own, the rest is split between cells and window cells as an engine does.

`share` is `engine.gpu_memory`. An engine measures what its largest step takes; here that is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.cluster.known_models import MODELS, Known
from holdfast.cluster.shapes import BYTES, Shape
from holdfast.replicas.config import PROGRAM_STATES, EngineConfig, Memory, ModelShape, WindowShape, split_memory
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import KVDType

GB = 10**9  # as data sheets count
MIB, GIB = 2**20, 2**30
TOKENS = 30_000  # of a program, where nothing else is said: a coding agent's
GPUS: Mapping[str, int] = {"L4": 24, "A100": 40, "L40S": 48, "H100": 80, "H200": 141, "B200": 180}  # GB
_DRAWN = 16  # bytes of a logit while the largest step draws: in 32 bits, and sorted with its index
_GRAPHS, _GRAPH_ROWS = 512 * MIB, 256  # of CUDA graphs: bytes, and rows of logits twice


def gpu_bytes(name: str) -> int:
    """The memory of a GPU: a name in `GPUS`, with its size behind it or without, or a number of GiB.

    Raises ConfigError for another name.
    """
    key, _, size = name.upper().partition("-")
    try:
        if key in GPUS:
            return int(size.removesuffix("GB")) * GB if size else GPUS[key] * GB
        return round(float(name.lower().removesuffix("gib")) * GIB)
    except ValueError:
        names = ", ".join(GPUS).lower()
        raise ConfigError(f"no GPU is called {name}: give one of {names}, or its memory in GiB", "gpu") from None


def window(engine: EngineConfig) -> int:
    """The number of tokens after its state whose inputs a sequence keeps: drafts, and the token before them."""
    return 1 + (engine.speculation.max_draft if engine.speculation.enabled else 0)


def split(shape: Shape, engine: EngineConfig, number: int, budget: float) -> Memory:
    """Cells, states and window cells of an engine that has `budget` bytes for them. Numbers that its options fix stay.

    `number`: bytes of a number as the model computes.
    """
    tokens, cell, in_window = _kinds(shape, engine, number)
    windows = WindowShape(tokens, 0, 1) if tokens else None
    sizes = ModelShape(0, "bfloat16", 0, 0, 1, shape.state_bytes(number, window(engine)), windows)
    return split_memory(engine, sizes, cell, budget, in_window)


def held_bytes(shape: Shape, engine: EngineConfig, number: int, held: Memory) -> int:
    """Bytes of cells, states and window cells."""
    _, cell, in_window = _kinds(shape, engine, number)
    states = held.slots * shape.state_bytes(number, window(engine))
    return held.cells * cell + held.window_cells * in_window + states


def _kinds(shape: Shape, engine: EngineConfig, number: int) -> tuple[int, int, int]:
    """The window of layers that have pages of their own, 0 where none have; bytes of a cell, and of a window cell."""
    kv = (number, engine.kv_dtype)
    whole, *windows = sorted({each.window for each in shape.kv})
    apart = not whole and len(windows) == 1 and shape.states is None
    if not apart or 0 < engine.context_length <= windows[0]:
        return 0, shape.cell_bytes(*kv), 0
    cell = sum(each.bytes(*kv) for each in shape.kv if not each.window)
    return windows[0], cell, shape.cell_bytes(*kv) - cell


def step_bytes(shape: Shape, engine: EngineConfig, number: int) -> int:
    """An estimate of the largest step's bytes: its tokens at the widest layer, and the logits that it samples from.

    CUDA graphs take as much again as these logits.
    """
    tokens = min(engine.step_tokens, engine.context_length or engine.step_tokens)
    return tokens * (shape.inner + 4 * shape.hidden) * number + engine.max_sequences * shape.vocabulary * _DRAWN


def graph_bytes(shape: Shape, number: int) -> int:
    """The most bytes that an engine on a GPU reserves for CUDA graphs."""
    return _GRAPHS + 2 * number * _GRAPH_ROWS * shape.vocabulary


@dataclass(frozen=True, slots=True)
class Fit:
    """An engine's memory. In bytes: `weights`, the largest `step`, and `left` for KV and states; negative if the others
    do not fit.
    """

    weights: float
    step: float
    left: float
    held: Memory
    programs: int


def fit(
    shape: Shape,
    engine: EngineConfig,
    budget: float,
    weights: float = 0,
    step: float = 0,
    tokens: int = TOKENS,
    number: int = BYTES,
) -> Fit:
    """The fit in `budget` bytes: `weights`, the largest `step`, and the number of programs of `tokens` tokens."""
    left = budget - weights - step
    held = split(shape, engine, number, left) if left > 0 or engine.cells else Memory(0, 0)
    if engine.cells or held.window_cells:
        programs = held.cells // tokens
    else:
        states = held.slots * shape.state_bytes(number, window(engine))
        kv = shape.sequence_bytes(tokens, number, engine.kv_dtype)
        programs = max(0, int((left - states) // kv))
    if shape.states is not None:
        programs = min(programs, held.slots // PROGRAM_STATES)
    if held.window_cells:
        programs = min(programs, held.window_cells // min(tokens, _kinds(shape, engine, number)[0]))
    return Fit(weights, step, left, held, programs)


def on_gpu(
    shape: Shape,
    engine: EngineConfig,
    memory: float,
    weights: float,
    tokens: int = TOKENS,
    number: int = BYTES,
    others: float = 0,
) -> Fit:
    """The fit on a GPU of `memory` bytes, of which other processes use `others`."""
    step = step_bytes(shape, engine, number) + graph_bytes(shape, number)
    return fit(shape, engine, engine.gpu_memory * memory - others, weights, step, tokens, number)


def summary(shape: Shape, fit: Fit, tokens: int, number: int = BYTES, kv_dtype: KVDType = "auto") -> str:
    """The fit in one line."""
    kv = (number, kv_dtype)
    each = [f"{sum(each.bytes(*kv) for each in shape.kv if not each.window) / 1024:.0f} KiB a token"]
    each += [f"{e.bytes(*kv) / 1024:.0f} KiB for each of its last {e.window:,}" for e in shape.kv if e.window]
    if shape.states is not None:
        each.append(f"{fit.held.slots:,} states of {shape.state_bytes(number) / MIB:.0f} MiB")
    room = f"{max(fit.left, 0) / GIB:.1f} GiB for KV and states"
    cells = f", {fit.held.cells:,} cells"
    if fit.held.window_cells:
        cells += f" and {fit.held.window_cells:,} window cells"
    return f"{room}: {fit.programs:,} programs of {tokens:,} tokens{cells} ({', '.join(each)})"


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


# ---- tables of the documentation


def tables(tokens: int = TOKENS) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    """`families` and `table` of all models and GPUs."""
    return families(MODELS), table(MODELS, GPUS, EngineConfig().gpu_memory, tokens)


def families(models: Mapping[str, Known]) -> list[Sequence[str]]:
    """Rows, a head first: parameters, those that a token uses, weights by format, KV and states."""
    rows: list[Sequence[str]] = [("model", "parameters", "active", "weights, GB", "KV a token", "windows", "states")]
    for name, model in models.items():
        shape = model.shape
        weights = ", ".join(f"{each} {shape.stored_bytes(each) / GB:.{_digits(shape)}f}" for each in model.ships)
        full = sum(each.bytes() for each in shape.kv if not each.window)
        windows = ", ".join(f"{each.bytes() / 1024:.0f} KiB x {each.window:,}" for each in shape.kv if each.window)
        states = f"{shape.state_bytes() / MIB:.0f} MiB" if shape.states is not None else ""
        sizes = (count(each) for each in (shape.parameters, shape.active))
        rows.append((name, *sizes, weights, f"{full / 1024:.0f} KiB", windows, states))
    return rows


def _digits(shape: Shape) -> int:
    return int(shape.parameters < 10e9)


def table(models: Mapping[str, Known], gpus: Mapping[str, int], share: float, tokens: int) -> list[Sequence[str]]:
    """Rows, a head first: programs of `tokens` that fit on each GPU, for each format that a model ships in; "-": the
    weights do not fit.
    """
    engine = EngineConfig(gpu_memory=share, page_size=1)
    rows: list[Sequence[str]] = [("model", "ships as", *(f"{name} {size}" for name, size in gpus.items()))]
    for name, model in models.items():
        shape = model.shape
        cells = []
        for size in gpus.values():
            fits = (on_gpu(shape, engine, size * GB, shape.stored_bytes(each), tokens) for each in model.ships)
            cells.append(" / ".join("-" if each.left <= 0 else str(each.programs) for each in fits))
        rows.append((name, " / ".join(model.ships), *cells))
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table for the documentation."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])
