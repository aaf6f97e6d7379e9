"""Options of one engine, and `resolve`, which fills in those that depend on the hardware and the model.

The classes check their values and raise ConfigError with the name of the field. The comment behind a field is its text
in docs/options.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.types import KVDType, window_pages

T = TypeVar("T")

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Decoder: TypeAlias = Literal["auto", "own", "transformers"]
Guarantee: TypeAlias = Literal["names", "schema", "off"]
Overlap: TypeAlias = Literal["auto", "on", "off"]
Mechanism: TypeAlias = Literal[
    "prefix_cache",
    "sessions",
    "grouped_prefill",
    "chunk_deferral",
    "kv_tags",
    "tokenize_cache",
    "device_sampling",
    "cuda_graphs",
]
CpuKernels: TypeAlias = Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "torch"]

ORDERS = ("auto", "program", "request", "fair")  # the orders of requests that have a short name
POLICIES = ("none", "continuum", "infercept", "expected_waste")  # the retention policies that have one
_RENAMED = {"gittins": "expected_waste"}
_CLASS = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # `module:Class`
OrderName: TypeAlias = Annotated[str, f"^({'|'.join(ORDERS)}|{_CLASS})$"]
PolicyName: TypeAlias = Annotated[str, f"^({'|'.join(POLICIES)}|{_CLASS})$"]

POCKET = "pocket"  # the name of the shipped model
DEVICES = ("auto", "cpu", "cuda")
_STEP_MS_CPU, _STEP_MS_GPU = 200.0, 50.0  # docs/scheduling.md, how long a step is
_INT8_ON_GPU = "int8 products are computed on a CPU: set another dtype, or device to cpu"
_KV_ON = {"int8": ("cpu", "KV in int8 is read on a CPU"), "fp8": ("cuda", "KV in FP8 is read on a GPU")}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a number that is not in int8
SCALE_BYTES = 4  # of each head's keys, and values, of a token, beside them where KV is in int8


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Speculative decoding: tokens are guessed and verified together. It never changes an output."""

    enabled: bool = True  # guess tokens and verify them together; off: draw one token a step
    max_draft: int = 16  # most tokens that a sequence guesses in one step
    memory_bytes: int = 64 << 20  # bytes for the replies of earlier turns, of which one tenant has at most 1/16
    mtp: bool = False  # guess with the checkpoint's layer for multi-token prediction, too, where it has one

    def __post_init__(self) -> None:
        _check(self, _AT_LEAST_ONE, "max_draft", "memory_bytes")


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """How long a program's KV cells are kept between two turns, and how many of them. Times in seconds."""

    policy: PolicyName = (  # when to give up the cells of a program whose tools run: `none`, `continuum`, `infercept`,
        "expected_waste"  # `expected_waste`, or a class of your own as `module:Class` (docs/scheduling.md)
    )
    most_s: float = 60.0  # longest time that the cells of a paused program are kept, whatever the policy says
    share: float = 1.0  # share of all cells that paused programs may keep
    tenant_share: float = 1.0  # share of all cells that the paused programs of one tenant may keep

    def __post_init__(self) -> None:
        _check_name(self.policy, POLICIES, "policy")
        _check(self, _NOT_NEGATIVE, "most_s")
        _check(self, _SHARE, "share", "tenant_share")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Counts are in tokens, cells (the KV of one token) or rows (one sequence each); times in seconds."""

    model: str = POCKET  # `pocket`, a folder, or a hub name that is in the local cache
    served_name: str = ""  # the model's name in the API; empty: the name of its folder
    dtype: DType = (  # auto: the checkpoint's on a GPU, the faster of float32 and bfloat16 on a CPU; int8: products in
        "auto"  # int8 and all else as with auto, on a CPU only
    )
    device: str = "auto"  # auto: cuda if there is a GPU
    decoder: Decoder = "auto"  # auto: our own if it supports the model's family, else transformers
    threads: int = 0  # threads of torch on a CPU; 0: all cores
    cpu_kernels: CpuKernels = (
        "auto"  # best instruction set that CPU kernels may use; auto: all but amx; torch: no kernels
    )

    context_length: int = 0  # longest sequence; 0: as long as the model allows
    cells: int = 0  # KV capacity in tokens; 0: as `kv_memory` says
    kv_memory: float = 1.0  # GiB of KV if `cells` is 0; a GPU takes what `gpu_memory` leaves instead
    kv_dtype: KVDType = (
        "auto"  # auto: as the model computes; int8: one byte a number and a scale a token and head, CPU only; fp8: one
        # byte a number (e4m3), GPU only
    )
    page_size: int = 16  # cells in a page, the unit in which cells are allocated
    state_slots: int = (
        0  # recurrent states of a model with linear layers, running and kept; 0: a share of the KV memory
    )

    window_cells: int = (
        0  # KV capacity in tokens of layers with a sliding window, which keep the last tokens; 0: a share of the memory
    )

    max_sequences: int = 64  # rows: sequences in the batch, and those kept between turns
    session_rows: int = (
        16  # rows of these that are kept for programs and sessions between turns; the most open sessions
    )
    session_idle_s: float = 600.0  # a session without an operation for this long is closed
    tenant_sessions: int = 0  # most open sessions of one tenant; 0: `session_rows`
    max_waiting: int = 4096  # most requests in the queue; another one is refused, or takes the place of a lower class
    queue_timeout_s: float = 300.0  # a request that waits longer than this is refused
    hung_s: float = 180.0  # a step hangs after this time and 20 times the longest step so far; its replica is replaced

    # Stateful inference, section 3.2.
    admission_ceiling: float = 0.75  # share of the cells that admitted requests may need together when they end
    completion_reserve: int = 1024  # most completion tokens that admission reserves for a request
    step_tokens: int = 4096  # most prompt tokens of a step
    step_ms: float = 0.0  # milliseconds that prompts may add to a step; 0: 200 on a CPU, 50 on a GPU

    prompt_seed: bool = True  # a request without a seed gets one from its prompt; false: a random one
    early_stop: bool = True  # a reply ends after its tool calls; false: where the model ends it
    shared_preambles: str = ""  # a JSON file with beginnings of prompts, computed once for all tenants

    speculation: DraftConfig = field(default_factory=DraftConfig)

    chat_template: str = ""  # a file with a chat template, on the machine of each engine; empty: the model's own
    tool_format: str = ""  # how the model writes calls (docs/api.md), or none; empty: detected from the chat template
    tools_guarantee: Guarantee = (  # names: each call has a declared name and an object; schema: its arguments have the
        "schema"  # types of the schema, too; off: only what a request asks for, and undeclared calls are text
    )

    host_cells: int = 0  # tokens of evicted KV that host memory holds; 0: as `host_memory` says
    host_memory: float = (  # GiB for evicted KV if `host_cells` is 0; 0: a quarter of the free memory for a model with
        0.0  # recurrent states or window pages on a GPU, else evicted KV is lost
    )

    order: OrderName = (  # which request is served first: by arrival of its `program` or of the `request`, by tenants'
        "auto"  # weights (`fair`), or a class of your own as `module:Class`; auto: fair with several tenants
    )

    retention: RetentionConfig = field(default_factory=RetentionConfig)

    overlap_steps: Overlap = "auto"  # on: plan the next step while one runs; auto: on a GPU
    gpu_memory: float = 0.9  # share of the GPU's memory for weights, steps and KV together
    batch_invariant: bool = False  # on a GPU, too, answers do not depend on what else is in the batch, to the last bit

    without: tuple[Mechanism, ...] = (
        # Mechanisms to leave out, to measure what each is worth or to find a fault. No answer changes without them.
        # `prefix_cache`: prompts that begin alike share their KV;
        # `sessions`: a program keeps its row between turns, and without `prefix_cache` its cells;
        # `grouped_prefill`: requests that share a prefix wait until the first of them has computed it;
        # `chunk_deferral`: prompts wait while more than 95 % of the cells are in use;
        # `kv_tags`: roles and `kv_hints` decide which cells are evicted first, not age alone;
        # `tokenize_cache`: of a conversation that continues only the new text is tokenized;
        # `device_sampling`: tokens are drawn on the GPU, so logits never cross to the host;
        # `cuda_graphs`: steps of few tokens replay graphs that were captured at the start.
    )

    def __post_init__(self) -> None:
        self._check_each()
        if self.dtype == "int8" and self.device == "cuda":
            raise ConfigError(_INT8_ON_GPU, "dtype")
        check_kv(self.kv_dtype, self.device)
        if self.session_rows >= self.max_sequences:
            raise ConfigError("session_rows must leave at least one row of max_sequences", "session_rows")
        tier = self.host_tier
        if tier and not self.has("prefix_cache"):
            raise ConfigError(f"{tier} holds evicted cells of the prefix cache, and `without` names prefix_cache", tier)

    @property
    def max_waiting_tokens(self) -> int:
        """Most tokens in the prompts of queued requests: they bound the queue's memory. One prompt may always wait."""
        return max(1 << 22, 1024 * self.max_waiting)

    @property
    def latency_chunk(self) -> int:
        """Most prompt tokens of a step that a request for few tokens takes part in."""
        return max(1024, self.step_tokens // 4)

    def has(self, mechanism: Mechanism) -> bool:
        """Whether the engine works with this mechanism."""
        return mechanism not in self.without

    def _check_each(self) -> None:
        known = get_args(Mechanism)
        if wrong := [name for name in self.without if name not in known]:
            nearest = get_close_matches(str(wrong[0]), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{wrong[0]!r} is no mechanism; the nearest is {nearest!r}", "without")
        _check(self, _one_of(DEVICES), "device")
        _check(self, _one_of(get_args(DType)), "dtype")
        _check(self, _one_of(get_args(KVDType)), "kv_dtype")
        _check(self, _one_of(get_args(Decoder)), "decoder")
        _check(self, _one_of(get_args(CpuKernels)), "cpu_kernels")
        _check(self, _one_of(get_args(Guarantee)), "tools_guarantee")
        _check(self, _one_of(get_args(Overlap)), "overlap_steps")
        _check_name(self.order, ORDERS, "order")
        _check(self, _AT_LEAST_ONE, "page_size", "max_sequences", "max_waiting")
        _check(self, _AT_LEAST_ONE, "completion_reserve", "step_tokens")
        _check(self, _POSITIVE_SHARE, "admission_ceiling", "gpu_memory")
        _check(self, _POSITIVE, "session_idle_s", "queue_timeout_s", "kv_memory", "hung_s")
        _check(self, _NOT_NEGATIVE, "threads", "context_length", "cells", "host_cells", "host_memory", "session_rows")
        _check(self, _NOT_NEGATIVE, "step_ms", "tenant_sessions", "state_slots", "window_cells")
        _check(self, _FINITE, "kv_memory", "host_memory")  # a number of cells is made of it

    @property
    def host_slots(self) -> int:
        """Recurrent states in host memory, resolved: as many for each cell as on the device."""
        return -(-self.state_slots * self.host_cells // self.cells) if self.cells else 0

    @property
    def host_window_cells(self) -> int:
        """Window cells in host memory, resolved: as many for each cell as on the device."""
        return -(-self.window_cells * self.host_cells // self.cells) if self.cells else 0

    @property
    def host_tier(self) -> str:
        """The field that asks for a second tier in host memory; empty: there is none."""
        return "host_cells" if self.host_cells else "host_memory" if self.host_memory else ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that an engine runs on."""

    cuda: bool
    cores: int
    cpu_dtype: DType = "float32"  # of this model on a CPU; with int8, of all that is no product
    free_memory: int = 0  # bytes of the host's memory that are available


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The layers whose window has pages of its own: tokens that a sequence keeps, and one token's KV as below."""

    tokens: int
    values: int
    head_dim: int

    def cell_bytes(self, number: int, kv_dtype: KVDType = "auto") -> int:
        return kv_bytes(self.values, self.head_dim, number, kv_dtype)


def kv_bytes(values: int, head_dim: int, number: int, kv_dtype: KVDType) -> int:
    """Bytes of so many values of one token's KV. The model computes with `number` bytes a number."""
    scales = values // head_dim * SCALE_BYTES if kv_dtype == "int8" else 0
    return values * (number if kv_dtype == "auto" else 1) + scales


def check_kv(kv_dtype: KVDType, device: str) -> None:
    """Raises ConfigError for a `kv_dtype` that the kernels of the device do not read."""
    where, why = _KV_ON.get(kv_dtype, (device, ""))
    if device not in (where, "auto"):
        raise ConfigError(f"{why}: set engine.kv_dtype to auto, or engine.device to {where}", "kv_dtype")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that options depend on."""

    context_length: int
    checkpoint_dtype: DType
    cell_values: int  # numbers in one token's KV: 2 * layers * kv_heads * head_dim; without those of `window`
    steady_context: int  # a longer sequence changes what the others of its step compute; at most `context_length`
    head_dim: int
    state_bytes: int = 0  # of one recurrent state, its slot's window of drafts included; 0: the model has none

    window: WindowShape | None = None

    def cell_bytes(self, number: int, kv_dtype: KVDType = "auto") -> int:
        return kv_bytes(self.cell_values, self.head_dim, number, kv_dtype)


PROGRAM_TOKENS, PROGRAM_STATES = 8192, 4
"""What a program in the cache is taken to hold where cells and states share memory: its prompt, and the states of a
running turn, of the last two ends of prompt and reply, and a part of those that programs share."""
PROGRAM_WINDOWS = 1
"""As `PROGRAM_STATES`, for windows. Ends of prompts and replies near each other share most of their pages, and a longer
program has room for several that lie apart.
"""
HOST_SHARE = 0.25  # of the host's free memory, for evicted KV and checkpoints of a model that has them, on a GPU
LEAST_SLOTS = 4  # one state is read while another is written, and both for two sequences


class Memory(NamedTuple):
    """The memory that a budget of bytes buys: whole pages of cells, state slots, whole pages of window cells."""

    cells: int
    slots: int
    window_cells: int = 0


def split_memory(
    config: EngineConfig, model: ModelShape, cell_bytes: int, budget: float, window_bytes: int = 0
) -> Memory:
    """Split a budget between KV cells, recurrent states and window cells of `window_bytes`, as `cells`, `state_slots`
    and `window_cells` ask or by `PROGRAM_TOKENS`.
    """
    size, cells, slots, window = config.page_size, config.cells, config.state_slots, 0
    if not model.state_bytes:
        slots = 0
    elif not slots:
        program, states = PROGRAM_TOKENS * cell_bytes, PROGRAM_STATES * model.state_bytes
        share = cells * cell_bytes * states / program if cells else budget * states / (program + states)
        slots = max(LEAST_SLOTS, int(share / model.state_bytes))
    budget -= slots * model.state_bytes
    if model.window is not None:
        window = config.window_cells or _window_cells(config, model.window, cell_bytes, window_bytes, budget)
        window = -(-window // size) * size
    cells = cells or int((budget - window * window_bytes) / cell_bytes)
    return Memory(max(cells, 0) // size * size, slots, window)


def least_window_cells(window: int, page_size: int) -> int:
    """Window cells of two sequences, at least one of which gets on."""
    return 2 * window_pages(window, page_size) * page_size


def _window_cells(config: EngineConfig, window: WindowShape, cell_bytes: int, window_bytes: int, budget: float) -> int:
    """Window cells for as many programs as there are cells for, and room for a prompt's chunk beside them: that may
    take half of the memory.
    """
    share = min(1.0, PROGRAM_WINDOWS * window.tokens / PROGRAM_TOKENS)  # of a window cell for each cell
    cells = config.cells or budget / (cell_bytes + share * window_bytes)
    chunk = min(config.step_tokens, config.context_length or config.step_tokens)
    most = config.cells or budget / (2 * window_bytes)
    wanted = min(chunk + PROGRAM_WINDOWS * window.tokens, most)
    return int(max(least_window_cells(window.tokens, config.page_size), share * cells, wanted))


def resolve(config: EngineConfig, hardware: Hardware, model: ModelShape) -> EngineConfig:
    """`config` with every "auto" and 0 replaced by a value. Pure.

    Raises ConfigError with the name of the field for a context longer than the model's, fewer cells than a page, and
    int8, or KV in int8, on a GPU, and KV in FP8 on a CPU.
    """
    device = config.device if config.device != "auto" else ("cuda" if hardware.cuda else "cpu")
    dtype = config.dtype
    if dtype == "auto":
        dtype = hardware.cpu_dtype if device == "cpu" else model.checkpoint_dtype
    if dtype == "int8" and device != "cpu":
        raise ConfigError(_INT8_ON_GPU, "dtype")
    check_kv(config.kv_dtype, device)
    context = config.context_length or model.context_length
    if context > model.context_length:
        raise ConfigError(f"context_length {context} is beyond the model's {model.context_length}", "context_length")
    if context > model.steady_context:
        why = f"beyond {model.steady_context} tokens this model's rotary embedding depends on what else is in a step"
        raise ConfigError(f"{why}: set context_length to {model.steady_context} or less", "context_length")
    number = BYTES[hardware.cpu_dtype if dtype == "int8" else dtype]
    size = model.cell_bytes(number, config.kv_dtype)
    window_size = model.window.cell_bytes(number, config.kv_dtype) if model.window is not None else 0
    requested = replace(config, context_length=context)
    cells, slots, window_cells = split_memory(requested, model, size, config.kv_memory * 2**30, window_size)
    if model.window is not None and window_cells < (least := least_window_cells(model.window.tokens, config.page_size)):
        raise ConfigError(f"a window of {model.window.tokens} tokens needs at least {least} cells", "window_cells")
    if cells < config.page_size:
        raise ConfigError(f"{cells} cells are less than one page of {config.page_size}", "cells")
    if slots and slots < LEAST_SLOTS:
        raise ConfigError(f"a model with recurrent states needs at least {LEAST_SLOTS} slots", "state_slots")
    # Bytes of a cell and of its share in checkpoints.
    held = size + (slots * model.state_bytes + window_cells * window_size) / cells
    host = config.host_memory * 2**30
    if (slots or window_cells) and device != "cpu" and config.has("prefix_cache") and not config.host_tier:
        host = HOST_SHARE * hardware.free_memory  # a checkpoint is sooner copied back than computed
    host_cells = config.host_cells or int(host / held)
    if config.host_tier and host_cells < config.page_size:
        message = f"{host_cells} cells in host memory are less than one page of {config.page_size}"
        raise ConfigError(message, config.host_tier)
    return replace(
        config,
        device=device,
        dtype=dtype,
        context_length=context,
        cells=cells,
        state_slots=slots,
        window_cells=window_cells,
        host_cells=host_cells // config.page_size * config.page_size,
        threads=config.threads or hardware.cores,
        step_ms=config.step_ms or (_STEP_MS_CPU if device == "cpu" else _STEP_MS_GPU),
        order="program" if config.order == "auto" else config.order,
        overlap_steps=config.overlap_steps if config.overlap_steps != "auto" else "on" if device != "cpu" else "off",
    )


class _Rule(NamedTuple):
    """A condition on a value, and its text. Every comparison with NaN is false, so NaN is refused."""

    text: str
    holds: Callable[[Any], bool]


_NOT_NEGATIVE = _Rule("at least 0", lambda value: value >= 0)
_POSITIVE = _Rule("more than 0", lambda value: value > 0)
_AT_LEAST_ONE = _Rule("at least 1", lambda value: value >= 1)
_SHARE = _Rule("in [0, 1]", lambda value: 0 <= value <= 1)
_POSITIVE_SHARE = _Rule("in (0, 1]", lambda value: 0 < value <= 1)
_FINITE = _Rule("finite", lambda value: value < math.inf)


def _one_of(values: tuple[str, ...]) -> _Rule:
    return _Rule(f"one of {', '.join(values)}", lambda value: value in values)


def _check(config: object, rule: _Rule, *names: str) -> None:
    """Raise ConfigError, naming the field, where one of these fields of `config` breaks `rule`."""
    for name in names:
        value = getattr(config, name)
        if not rule.holds(value):
            raise ConfigError(f"{name} must be {rule.text}, not {value!r}", name)


def _check_name(value: str, names: tuple[str, ...], field: str) -> None:
    """Raise ConfigError where `value` is none of `names` and does not have the form `module:Class`."""
    if value not in names and not re.fullmatch(_CLASS, value):
        hint = f"; it is called {_RENAMED[value]} now" if value in _RENAMED else ""
        raise ConfigError(f"{field} must be one of {', '.join(names)}, or module:Class, not {value!r}{hint}", field)


def made(name: str, known: Mapping[str, Callable[[], T]], interface: type, field: str) -> T:
    """A new object of the class called `name`: one of `known`, or `module:Class`, which is imported.

    Raises ConfigError, naming the `field`, where the class cannot be imported, cannot be created without arguments, or
    lacks a member of `interface`.
    """
    if name in known:
        return known[name]()
    module, _, attribute = name.partition(":")
    try:
        created = getattr(import_module(module), attribute)()
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError(f"{field} cannot be {name}: {type(error).__name__}: {error}", field) from error
    missing = [each for each in vars(interface) if not each.startswith("_") and not hasattr(created, each)]
    if missing:
        raise ConfigError(f"{field} cannot be {name}: it has no {', '.join(missing)}", field)
    return cast(T, created)
