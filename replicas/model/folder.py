"""Where a configured model lies: "pocket", a folder as transformers saves it, or a hub name in the local cache.

Nothing is downloaded. Nothing heavy is imported: command lines ask, too. `weights` and `description` read the folder.
"""

import json
from pathlib import Path

from holdfast.replicas.config import POCKET
from holdfast.replicas.errors import ConfigError

_ADAPTER = "adapter_config.json"
_POCKET_FOLDER = Path(__file__).parent.parent / "pocket" / "weights"


def model_folder(name: str) -> Path:
    """The folder of a configured model; of a hub name that of its cached snapshot.

    Raises ConfigError for a file, and for a folder that is missing, empty, without config.json, or of a GGUF file or an
    adapter alone.
    """
    folder = _POCKET_FOLDER if name == POCKET else Path(name).expanduser()
    if folder.is_file():
        raise cannot_serve(name, _file(folder))
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")) and (ggufs := sorted(folder.glob("*.gguf"))):
            raise cannot_serve(name, f"its weights are a GGUF file. {_convert(ggufs[0])}")
        if (folder / _ADAPTER).is_file() and not (folder / "model.safetensors").is_file():
            raise cannot_serve(name, _adapter(folder / _ADAPTER))
        if not any(folder.iterdir()):
            raise cannot_serve(name, f"{folder} is empty. Download the model: hf download NAME --local-dir {folder}")
        if not (folder / "config.json").is_file():
            raise cannot_serve(name, f"there is no config.json in {folder}")
        return folder
    if name == POCKET:
        raise cannot_serve(name, f"there is no folder {folder}")
    cached = _cached(name)
    if cached is None:
        raise cannot_serve(name, f"there is no folder {folder}, and no model of that name in the local hub cache")
    return cached


def _file(file: Path) -> str:
    """Why a file is no model, and what to do."""
    if is_gguf(file):
        return f"it is a GGUF file. {_convert(file)}"
    if (file.parent / "config.json").is_file():
        return f"it is one file of a model. Serve its folder: {file.parent}"
    return "it is a file. A model is a folder with config.json, tokenizer.json and safetensors files"


def _adapter(file: Path) -> str:
    """Advice for serving an adapter, by its configuration."""
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {base}" if base else ""
    return f"it is an adapter (LoRA){of}. Merge it into its model with peft (merge_and_unload), and serve the result"


def _convert(file: Path) -> str:
    return f"Make a folder of it with `holdfast convert {file} FOLDER`, and serve FOLDER"


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # no hub name
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_gguf(file: Path) -> bool:
    """Whether a file begins as a GGUF file does. Raises OSError for an unreadable one."""
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def read_chat_template(file: str) -> str:
    """The chat template in a file. Raises ConfigError for an unreadable one."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "chat_template") from error


def served_name(name: str) -> str:
    """The API's default name for a model: the folder's name, or the hub name."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def cannot_serve(name: str, why: str) -> ConfigError:
    return ConfigError(f"cannot serve model {name!r}: {why}", "model")
