"""The files of a model: their folder, missing files, their fingerprint, and loading progress.

Only headers and samples are read, so a large model takes no longer than a small one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model import files
from holdfast.replicas.model import folder as models
from holdfast.replicas.model.progress import LOG_S, Progress
from holdfast.replicas.text.calls.formats import hermes_may_be_told

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ANSWERING = (
    "dtype",
    "device",
    "decoder",
    "context_length",
    "prompt_seed",
    "early_stop",
    "tool_format",
    "tools_guarantee",
)
"""The engine's settings that decide what an answer says; the others decide when it comes and what it costs."""
SAMPLE = 2**23  # bytes read of a file's beginning and of its end
_CLEAR = "\r\x1b[K"


def model_folder(model: str) -> Path:
    """The folder of `model`; see `replicas.model.folder`. Raises ConfigError."""
    try:
        return models.model_folder(model)
    except ConfigError as error:
        raise ConfigError(error.message, "engine.model") from error


def template(engine: EngineConfig) -> str:
    """The chat template that is served with; "" where there is none. Raises ConfigError."""
    if not engine.chat_template:
        return own_template(model_folder(engine.model))
    try:
        return models.read_chat_template(engine.chat_template)
    except ConfigError as error:
        raise ConfigError(error.message, "engine.chat_template") from error


def tools_as_text(engine: EngineConfig) -> bool:
    """Whether the chat template takes no tools, so that the system prompt declares them. Raises ConfigError.

    Here a template takes tools if it names them; an engine renders it to see.
    """
    text = template(engine)
    return bool(text) and "tools" not in text and hermes_may_be_told(text, engine.tool_format)


def settings_digest(engine: EngineConfig, version: str) -> str:
    """A digest of the settings in ANSWERING and the `version` of Holdfast."""
    return sha256(repr([version, *(getattr(engine, name) for name in ANSWERING)]).encode()).hexdigest()


def fingerprint(folder: Path, engine: EngineConfig, version: str) -> str:
    """A digest of everything that affects answers: files, chat template and `settings_digest`.

    Copies of a model have the same digest, whenever they were made.
    """
    digest = sha256(settings_digest(engine, version).encode())
    template_files = [Path(engine.chat_template).expanduser()] if engine.chat_template else []
    for path in (*sorted(folder.iterdir()), *template_files):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"\0{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE))
                file.seek(max(size - SAMPLE, 0))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def missing(folder: Path) -> Iterator[files.Fault]:
    """The faults of the model in `folder`."""
    config = folder / "config.json"
    if not config.is_file():
        yield files.Fault("config.json is missing")
    elif _json(config) is None:
        yield files.Fault("config.json is not JSON")
    yield from files.faults(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield files.Fault(f"there is no tokenizer ({', '.join(TOKENIZERS)})")


def own_template(folder: Path) -> str:
    """The chat templates that come with the tokenizer, one behind the other; "" where there is none."""
    files = (*sorted(folder.glob("chat_template*")), *sorted((folder / "additional_chat_templates").glob("*")))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    config = _json(folder / "tokenizer_config.json")
    own = config.get("chat_template") if isinstance(config, dict) else None
    return "\n".join([*texts, own if isinstance(own, str) else json.dumps(own) if own else ""]).strip()


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights, by their index or else their files; 0 without both."""
    index = _json(folder / files.INDEX)
    if isinstance(index, dict) and not (folder / files.ONE_FILE).is_file():
        total = (index.get("metadata") or {}).get("total_size")
        if isinstance(total, int | float):
            return int(total)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_progress(folder: Path, name: str, progress: Progress) -> None:
    """Put a replica's progress where `read_progress` finds it. A full disk does not keep a replica from loading."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        new = folder / f"{name}.new"
        new.write_text(json.dumps(asdict(progress)))
        os.replace(new, folder / f"{name}.json")


def read_progress(folder: Path) -> Progress | None:
    """The sum of all replicas' loading progress. None: no replica has started to load."""
    reports = []
    for file in folder.glob("*.json"):
        with suppress(OSError):  # its replica has gone
            reports.append(Progress(**json.loads(file.read_text())))
    if not reports:
        return None
    return Progress(sum(p.read for p in reports), sum(p.total for p in reports), max(p.seconds for p in reports))


class ProgressLine:
    """Shows the progress in `folder`: on a terminal one line that is rewritten, elsewhere a line now and then."""

    def __init__(
        self, folder: Path, say: Callable[[str], None], terminal: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._print, self._terminal, self._now = folder, say, terminal, now
        self._shown: Progress | None = None
        self._printed_at = now()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        self._print(text)

    def update(self) -> None:
        """Show what is new."""
        progress = read_progress(self._folder)
        if progress is None or progress == self._shown:
            return
        if self._terminal:
            self._shown = progress
            _write(f"{_CLEAR}weights: {progress}")
        elif self._now() - self._printed_at >= LOG_S:
            self._shown, self._printed_at = progress, self._now()
            self._print(f"weights: {progress}")

    def clear(self) -> None:
        """Leave no half line on the screen."""
        if self._terminal and self._shown is not None:
            _write(_CLEAR)
            self._shown = None


def _write(text: str) -> None:
    with suppress(OSError):  # a terminal that has gone must not keep a server from starting
        sys.stdout.write(text)
        sys.stdout.flush()
