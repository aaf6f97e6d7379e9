"""The options of a comparison, checked before anything is sent, and how a command line gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from holdfast.loadgen.workloads.catalog import LOADED_BY, WORKLOADS
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

NOVEL = ("agents", "bugfix", "webapp", "burst", "concurrency")
"""Workloads without repeated requests: the default of a comparison."""
PAUSE_S = 1.5
"""Seconds before a server begins after another one: vLLM looks for more work in a busy loop for a second."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a comparison. Raises ConfigError."""

    servers: tuple[tuple[str, str], ...]  # name and address
    workloads: tuple[str, ...] = NOVEL
    repetitions: int = 3
    seed: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    forced: bool = False
    model: str = ""  # empty: the first that each server names
    max_tokens: int = 128
    timeout_s: float = 300.0
    warm_up: int = 1  # programs of six turns
    pause_s: float = PAUSE_S
    api_key: str = field(default="", repr=False)
    json_file: Path | None = None
    record: Path | None = None  # the trace of the run goes there
    tenant_keys: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # name and API key
    trace: str = ""  # describes the replay in place of workloads
    html_file: Path | None = None
    ablation: Path | None = None  # output of `bench ablation`, for the files
    rates: tuple[float, ...] = ()  # each of them in turn, for workloads that arrive by a schedule
    concurrencies: tuple[int, ...] = ()  # each of them in turn, for workloads that send so many at once

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("a comparison needs at least one --server NAME=URL", "server")
        if len(dict(self.servers)) < len(self.servers):
            raise ConfigError("two servers have the same name", "server")
        for name in self.workloads:
            if name not in WORKLOADS:
                near = get_close_matches(name, WORKLOADS, 1) or WORKLOADS
                raise ConfigError(f"unknown workload {name!r}; nearest: {', '.join(near)}", "workload")
        if self.record is not None and len(self.servers) > 1:
            raise ConfigError("a trace is of one server: --record goes with one --server", "record")
        self._check_numbers()
        _check_distinct("workload", self.workloads)
        self._check_loads("rates", self.rates, ("rate",))
        self._check_loads("concurrencies", self.concurrencies, ("programs", "burst"))

    def _check_numbers(self) -> None:
        if self.repetitions < 1:
            raise ConfigError("there must be at least one repetition", "repetitions")
        if self.seed < 0:
            raise ConfigError("a seed is 0 or more", "seed")
        if self.max_tokens < 1:
            raise ConfigError("max-tokens must be at least 1", "max-tokens")
        if self.warm_up < 0:
            raise ConfigError("warm-up must be at least 0", "warm-up")
        if not 0 <= self.pause_s < inf:
            raise ConfigError("pause must be a number of seconds, 0 or more", "pause")
        if not 0 < self.timeout_s < inf:
            raise ConfigError("timeout must be a number of seconds above 0", "timeout")

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
        paths = {name: getattr(self, name) for name in ("json_file", "html_file", "record", "ablation")}
        return asdict(self) | {
            "api_key": bool(self.api_key),
            "tenant_keys": [name for name, _ in self.tenant_keys],
            "rates": list(self.rates),
            "concurrencies": list(self.concurrencies),
            **{name: None if path is None else str(path) for name, path in paths.items()},
        }


def _check_distinct(name: str, values: Sequence[str]) -> None:
    """Raise ConfigError for a repeated value: rows are distinguished by them."""
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(f"{name} has {twice[0]} twice", name)


def parse_server(text: str) -> tuple[str, str]:
    """Name and address from ``NAME=URL``; the address with or without ``/v1``. Raises ConfigError."""
    name, equals, url = text.partition("=")
    if not equals or not name or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not NAME=URL, as in holdfast=http://127.0.0.1:8000", "server")
    return name, url.rstrip("/").removesuffix("/v1")


def parse_tenant_key(text: str) -> tuple[str, str]:
    """Name and key from ``NAME=FILE``. Raises ConfigError."""
    name, path = parse_path(text, "tenant-key-file")
    return name, read_key(path)


def parse_path(text: str, field_name: str) -> tuple[str, Path]:
    """Name and path from ``NAME=PATH``. Raises ConfigError."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"{text!r} is not NAME=PATH", field_name)
    return name, Path(path)


def read_key(path: Path) -> str:
    """The API key in a file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "api-key-file") from error
