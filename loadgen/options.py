"""The options of every benchmark. A field with a help text is a flag; values are checked before anything is sent."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from holdfast.loadgen.flags import above_zero, at_least, nested, option
from holdfast.loadgen.workloads.catalog import LOADED_BY, WORKLOADS
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

NOVEL = ("agents", "bugfix", "webapp", "burst", "concurrency")
"""Workloads without repeated requests: the default of a comparison."""
PAUSE_S = 1.5
"""Seconds before a server begins after another one: vLLM looks for more work in a busy loop for a second."""
MAX_TOKENS = 128
FORMATS = "mooncake_trace, openai or mini-swe-agent"
_PAUSE = "seconds before a server begins after another one, which may be busy for a while"
_FORCED = "histories hold the scripted answers, the same everywhere"
_SEED = "another seed draws other texts (default: 0)"
_REPETITIONS = "repetitions of every workload or trace"


# ---- texts of the command line ----


def parse_server(text: str) -> tuple[str, str]:
    """Name and address from ``NAME=URL``; the address with or without ``/v1``. Raises ConfigError."""
    name, equals, url = text.partition("=")
    if not equals or not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not NAME=URL, as in holdfast=http://127.0.0.1:8000", "server")
    return name, url.rstrip("/").removesuffix("/v1")


def parse_path(text: str, field_name: str = "venv") -> tuple[str, Path]:
    """Name and path from ``NAME=PATH``. Raises ConfigError."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"{text!r} is not NAME=PATH", field_name)
    return name, Path(path)


def parse_tenant_key(text: str) -> tuple[str, str]:
    """Name and key from ``NAME=FILE``. Raises ConfigError."""
    name, path = parse_path(text, "tenant-key-file")
    return name, read_key(path)


def read_key(path: Path) -> str:
    """The API key in a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "api-key-file") from error


def parse_variant(text: str) -> tuple[str, tuple[str, ...]]:
    """Name, and a peer with its options, from ``NAME=PEER OPTIONS``. Raises ConfigError."""
    name, _, command = text.partition("=")
    words = shlex.split(command)
    if not name or not words:
        raise ConfigError(f"{text!r} is not NAME=PEER OPTIONS, as in small=vllm --num-gpu-blocks-override 64", "peer")
    return name, tuple(words)


def parse_engine(text: str) -> tuple[str, Mapping[str, Any]]:
    """Name and `engine` section from ``NAME=JSON``. Raises ConfigError."""
    name, _, section = text.partition("=")
    try:
        engine = json.loads(section)
    except ValueError:
        engine = None
    if not name or not isinstance(engine, dict):
        raise ConfigError(f"""{text!r} is not NAME=JSON, as in {OURS}={{"dtype": "bfloat16"}}""", "engine")
    return name, engine


# ---- compare and replay ----


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a comparison. Raises ConfigError."""

    servers: tuple[tuple[str, str], ...] = option(
        "once for each server", (), flag="--server", metavar="NAME=URL", parse=parse_server
    )
    workloads: tuple[str, ...] = option(
        f"{', '.join(NOVEL)} (by default these), {', '.join(name for name in WORKLOADS if name not in NOVEL)}; "
        "repeatable", NOVEL, flag="--workload", metavar="WORKLOAD"
    )  # fmt: skip
    repetitions: int = option(_REPETITIONS, 3)
    seed: int = option(_SEED, 0)
    sizes: Sizes = nested(Sizes())
    forced: bool = option(_FORCED, False)
    model: str = option("model name to ask for (default: the first that each server names)", "")
    max_tokens: int = option("limit of every answer", MAX_TOKENS)
    timeout_s: float = option("seconds a request may take", 300.0)
    warm_up: int = option("programs of six turns sent to each server before", 1)
    pause_s: float = option(_PAUSE, PAUSE_S, metavar="SECONDS")
    api_key: str = field(
        default="", repr=False, metadata={"help": "file with the API key, sent to every server",
                                          "flag": "--api-key-file", "metavar": "FILE", "parse": read_key}
    )  # fmt: skip
    json_file: Path | None = option("write every request and every figure", None, flag="--json", metavar="FILE")
    record: Path | None = option("write the run as a mooncake_trace", None, metavar="FILE")
    tenant_keys: tuple[tuple[str, str], ...] = field(
        default=(), repr=False, metadata={"help": "API key of a tenant: of noisy, quiet-0, ..., or of the trace's",
                                          "flag": "--tenant-key-file", "metavar": "NAME=FILE",
                                          "parse": parse_tenant_key}
    )  # fmt: skip
    trace: str = ""  # describes the replay in place of workloads
    html_file: Path | None = option(
        "write a page with tables and plots; needs matplotlib", None, flag="--html", metavar="FILE"
    )
    rates: tuple[float, ...] = option("each of these rates in turn", (), metavar="R,R,..")
    concurrencies: tuple[int, ...] = option("each of these in turn, as --programs and --burst", (), metavar="N,N,..")

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("a comparison needs at least one --server NAME=URL", "server")
        if len(dict(self.servers)) < len(self.servers):
            raise ConfigError("two servers have the same name", "server")
        for name in self.workloads:
            if name not in WORKLOADS:
                matches = get_close_matches(name, WORKLOADS, 1) or WORKLOADS
                raise ConfigError(f"unknown workload {name!r}; nearest: {', '.join(matches)}", "workload")
        if self.record is not None and len(self.servers) > 1:
            raise ConfigError("a trace is of one server: --record goes with one --server", "record")
        at_least(1, "repetitions max_tokens", self)
        at_least(0, "seed warm_up pause_s", self)
        above_zero("timeout_s", self)
        _check_distinct("workload", self.workloads)
        self._check_loads("rates", self.rates, ("rate",))
        self._check_loads("concurrencies", self.concurrencies, ("programs", "burst"))

    def _check_loads(self, name: str, values: tuple[float, ...], sizes: tuple[str, ...]) -> None:
        fitting = [workload for workload, size in LOADED_BY.items() if size in sizes]
        if values and not set(fitting) & set(self.workloads):
            raise ConfigError(f"--{name} goes with --workload {', '.join(fitting)}", name)
        if not all(0 < value < inf for value in values):
            raise ConfigError("a load must be a number more than 0", name)
        _check_distinct(name, [f"{value:g}" for value in values])

    @property
    def as_json(self) -> dict[str, Any]:
        """JSON values for the file, without keys."""
        values = asdict(self) | {"api_key": bool(self.api_key), "tenant_keys": [name for name, _ in self.tenant_keys]}
        values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return values | {name: str(value) for name, value in values.items() if isinstance(value, Path)}


def _check_distinct(name: str, values: Sequence[str]) -> None:
    """Raise ConfigError for a repeated value: rows are distinguished by them."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(f"{name} has {twice[0]} twice", name)


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay of a trace."""

    trace: Path = option("file to replay", flag="")
    format: str = option(FORMATS, "mooncake_trace")
    recorded_answers: bool = option("histories hold the trace's answers", False)
    forced_lengths: bool = option("answers get their recorded lengths", False)
    forcing: str = option("how a length is requested: holdfast, vllm or limit", "holdfast")
    speed: float = option("divide the recorded times by this", 1.0)
    scale: float = option("multiply prompts that are only a length", 1.0)
    max_tokens: int | None = option(
        "limit of answers without one in the trace, or without a length where lengths are forced "
        f"(default: {MAX_TOKENS}; none where lengths are forced)", None
    )  # fmt: skip
    rate: float | None = option("programs a second, of a trace without times (default: all at once)", None)


@dataclass(frozen=True, slots=True)
class Market:
    """Each of `rates` with each of `lines` that a context begins with. Raises ConfigError."""

    servers: tuple[tuple[str, str], ...] = option(
        "once for each server", (), flag="--server", metavar="NAME=URL", parse=parse_server
    )
    rates: tuple[float, ...] = option("lines a second", (1.0, 4.0), metavar="R,R,..")
    lines: tuple[int, ...] = option("lines at the beginning", (50, 200), metavar="N,N,..")
    feeds: int = option("contexts at once", 1)
    seconds: float = option("seconds of each run", 20.0)
    every_s: float = option("seconds between two questions", 2.0)
    max_tokens: int = option("tokens of every answer", 16)
    json_file: Path | None = option("write all times", None, flag="--json", metavar="FILE")
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("name at least one server as NAME=URL", "server")
        for name in ("rates", "lines"):
            if not all(value > 0 for value in getattr(self, name)):
                raise ConfigError(f"{name} must be above 0", name)
        above_zero("feeds seconds every_s max_tokens", self)


# ---- files ----


@dataclass(frozen=True, slots=True)
class Conversion:
    """From another format of traces to `mooncake_trace`."""

    source: Path = option("file to read", flag="")
    target: Path = option("file to write", flag="")
    read_as: str = option(FORMATS, flag="--from")
    tools: Path | None = option("JSON list of tools, for logs that do not declare their own", None)


@dataclass(frozen=True, slots=True)
class View:
    """A comparison in another form: as a page or a timeline."""

    source: Path = option("output of `bench compare --json`", flag="", metavar="RUN.json")
    target: Path = option("the file to write", flag="", metavar="OUT")


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafters on a trace."""

    trace: Path = option("JSON lines with OpenAI-format 'messages'")
    tools: Path | None = option("JSON list of OpenAI-format tools that the conversations had", None)
    tokenizer: Path | None = option("folder of a tokenizer (default: one trained on the trace)", None)
    cut: str = option("how that one cuts words: pocket, qwen, gpt2 or llama", "pocket")
    as_json: bool = option("print JSON", False, flag="--json")


# ---- benchmarks that start their servers ----

_MODEL = "as for serve"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Holdfast compared with its engine alone. Raises ConfigError."""

    model: str = option(_MODEL, "pocket")
    requests: int = option("requests of each kind", 200)

    def __post_init__(self) -> None:
        at_least(1, "requests", self)


@dataclass(frozen=True, slots=True)
class Overload:
    """Multiples of a server's capacity: ``seconds`` of each run after ``warm_s``; each prompt has ``words`` words."""

    model: str = option(_MODEL, "pocket")
    loads: tuple[float, ...] = option("multiples of the capacity", (0.8, 1.0, 2.0, 3.0), metavar="X,X,..")
    seconds: float = option("seconds of each run", 40.0)
    deadline_s: float = option("mean seconds; from half to one and a half", 6.0)
    sequences: int = option("engine.max_sequences", 8)
    warm_s: float = 10.0
    tokens: int = 96
    words: int = 150
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Orchestrated:
    """Runs of the orchestrator in each way. Raises ConfigError."""

    model: str = option(_MODEL, "pocket")
    rounds: int = option("rounds of one run each way", 30)
    calls: int = option("calls that each run's question asks for", 3)
    words: int = option("words that each tool returns", 100)

    def __post_init__(self) -> None:
        at_least(1, "rounds calls", self)
        at_least(0, "words", self)


CACHES = ("small", "large")


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Policies side by side. `cells`: of the small and of the large cache. Raises ConfigError."""

    policies: tuple[str, ...] = option(
        "as for simulate; repeatable, the others are compared to the first (default: request, continuum)",
        ("request", "continuum"), flag="--policy", metavar="POLICY"
    )  # fmt: skip
    caches: tuple[str, ...] = option("small or large (default: both)", CACHES, flag="--cache", metavar="CACHE")
    cells: tuple[int, ...] = option("cells of both caches", (8192, 65536), metavar="N,N")
    host_cells: int = option("cells that each engine has in host memory beside them", 0)
    model: str = option(_MODEL, "pocket")
    threads: int = option("threads of each engine", 1)
    workload: str = option("swe, mixed, coding or bfcl", "swe")
    sizes: Sizes = nested(
        Sizes(jobs=12, rate=1.0, prompt_tokens=600), "jobs", "rate", "prompt_tokens", "turns_times", "tool_times"
    )
    max_tokens: int = option("limit of every answer", 96)
    repetitions: int = option("repetitions, each of other programs on new servers", 3)
    seed: int = option("seed of the first repetition's programs (default: 0)", 0)
    folder: Path | None = option("write small-0.json, small-1.json and so on, as compare does", None, metavar="DIR")
    json_file: Path | None = option("write the ratios", None, flag="--json", metavar="FILE")

    def __post_init__(self) -> None:
        if len(self.policies) < 2 or len(set(self.policies)) < len(self.policies):
            raise ConfigError("a comparison needs two policies at least, each of them once", "policy")
        if len(self.cells) != len(CACHES):
            raise ConfigError(f"two caches are compared, a small and a large one, not {len(self.cells)}", "cells")
        if not set(self.caches) <= set(CACHES):
            raise ConfigError(f"a cache is {' or '.join(CACHES)}", "cache")
        at_least(1, "repetitions", self)
        at_least(0, "host_cells", self)
        self.comparison([(name, "") for name in self.policies], None)  # raises before a server is started

    def comparison(self, servers: Sequence[tuple[str, str]], file: Path | None, number: int = 0) -> Options:
        """The options of one repetition. Raises ConfigError."""
        seed, sizes, tokens = self.seed + number, self.sizes, self.max_tokens
        return Options(tuple(servers), (self.workload,), 1, seed=seed, sizes=sizes, max_tokens=tokens, json_file=file)


# ---- peers ----

OURS = "holdfast"
NGRAM, Q8_0 = "-ngram", "-q8_0"  # suffixes of a peer's name
GROUPS = tuple((OURS, peer + drafts) for peer in ("vllm", "llama.cpp", "llama.cpp" + Q8_0) for drafts in ("", NGRAM))
SIZES = Sizes(webapp_turns=25, webapp_words=1350, programs=8, burst=8, bursts=5, jobs=6, rate=0.5, prompt_tokens=500)
"""25 turns that end near 6,000 of Pocket's tokens; eight programs; bursts of eight prompts of about 830 tokens; six
scheduled agents, one every two seconds.
"""
ENGINE = {"dtype": "bfloat16", "kv_memory": 2}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The peer's model, and its settings. Raises ConfigError."""

    peer: str = option("vllm or llama.cpp", flag="")
    model: str = option("folder or name of the model, for llama.cpp a GGUF file", flag="")
    port: int = option("port on 127.0.0.1", 8101)
    venv: Path | None = option("virtual environment that has it (default: the search path)", None)
    ngram: bool = option("with n-gram speculation, where it has any", False)
    gpu: bool = option("for a GPU", False)
    context: int = option("longest context", 8192)
    tool_parser: str | None = option("vLLM's parser of tool calls (default: hermes)", None)
    start: bool = option("start it instead of printing the command", False)
    more: tuple[str, ...] = ()  # further options of the peer's own

    def __post_init__(self) -> None:
        at_least(1, "context", self)


@dataclass(frozen=True, slots=True)
class Peers:
    """Which servers are compared, and how. Raises ConfigError."""

    model: str = option("folder of the model, for Holdfast and vLLM")
    folder: Path = option("folder of the comparisons' files and the peers' logs", metavar="DIR")
    groups: tuple[tuple[str, ...], ...] = option(
        "servers that take turns, Holdfast first: vllm, llama.cpp, llama.cpp-q8_0, each also with -ngram; repeatable "
        "(default: each, plain and with n-grams)",
        GROUPS, flag="--group", metavar="NAME,NAME,..", parse=lambda text: tuple(text.split(","))
    )  # fmt: skip
    engines: Mapping[str, Mapping[str, Any]] = option(
        'a Holdfast of this name with this `engine` section (default: holdfast={"dtype": "bfloat16", "kv_memory": 2})',
        factory=lambda: {OURS: ENGINE}, flag="--engine", metavar="NAME=JSON", parse=parse_engine
    )  # fmt: skip
    gguf: str = option("the same model for llama.cpp", "", metavar="FILE")
    gguf_q8_0: str = option("the same in llama.cpp's eight bits", "", metavar="FILE")
    venvs: Mapping[str, Path] = option(
        "virtual environment of a peer", factory=dict, flag="--venv", metavar="PEER=DIR", parse=parse_path
    )
    variants: Mapping[str, tuple[str, ...]] = option(
        "a peer of this name with further options of its own, as in 'small=vllm --num-gpu-blocks-override 64'",
        factory=dict, flag="--peer", metavar="NAME=PEER OPTIONS", parse=parse_variant
    )  # fmt: skip
    workloads: tuple[str, ...] = option(
        "bugfix, webapp, concurrency or burst (default: all of them), or another of `bench compare`",
        ("bugfix", "webapp", "concurrency", "burst"), flag="--workload", metavar="WORKLOAD"
    )  # fmt: skip
    repetitions: int = option("repetitions of every workload", 2)
    seed: int = option(_SEED, 0)
    forced: bool = option(_FORCED, False)
    pause_s: float = option(_PAUSE, PAUSE_S, metavar="SECONDS")

    def __post_init__(self) -> None:
        for group in self.groups:
            if group[0] not in self.engines:
                raise ConfigError(f"a group begins with Holdfast ({', '.join(self.engines)}), not {group[0]}", "group")
            self.comparison([(name, "") for name in group], None)

    def comparison(self, servers: Sequence[tuple[str, str]], file: Path | None) -> Options:
        """The options of one group's comparison. Raises ConfigError."""
        of_peers = {name: getattr(self, name) for name in ("workloads", "repetitions", "seed", "forced", "pause_s")}
        return Options(tuple(servers), sizes=SIZES, json_file=file, **of_peers)
