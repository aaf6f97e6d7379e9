"""`holdfast convert`: a folder that can be served, made from a GGUF file, with its tokenizer and its chat template.

transformers reads the weights, the configuration and the tokenizer. Its reader leaves out two things that a server
needs, and they are completed here: the tokens that end a reply, and the words that some tokenizers cut a text into.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.folder import is_gguf

NEEDS = ("gguf", "accelerate")
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message
GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})  # names of the words that transformers takes by default
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
SUPERBPE = (r"\p{N}+", r"(?=(\d{3})+(?!\d))")  # cuts at digits, in groups of three, and nowhere else


def convert(file: Path, out: Path) -> list[str]:
    """Write the model of a GGUF file into the new folder `out`, which appears whole or not at all.

    Weights that the file holds in float32 stay float32; all others, quantised ones included, become bfloat16. Returns
    notes for the user about the result. Raises ConfigError when the file cannot be converted.
    """
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        how = "pip install -e '.[gguf]' -c constraints.txt"
        raise ConfigError(f"{' and '.join(missing)} must be installed to read GGUF files: {how}")
    if not file.is_file() or not is_gguf(file):
        raise ConfigError(f"{file} is not a GGUF file")
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        notes = _write(file, part)
        part.chmod(0o755)
        part.rename(out)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{file} cannot be converted: {reason}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return notes


def _write(file: Path, folder: Path) -> list[str]:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reader = gguf.GGUFReader(file)
    if (parts := _field(reader, "split.count")) and parts > 1:
        raise ValueError(f"it is one of {parts} parts; join them first: llama-gguf-split --merge {file} WHOLE.gguf")
    matrices = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    dtype = torch.float32 if matrices == {gguf.GGMLQuantizationType.F32} else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, dtype=dtype, output_loading_info=True
    )
    if lacking := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {len(lacking)} weights, {lacking[0]} among them")
    ends = sorted({token for name in ENDS if (token := _field(reader, f"tokenizer.ggml.{name}_token_id")) is not None})
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = ends or tokenizer.eos_token_id
        settings.bos_token_id, settings.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    # transformers refuses to save a model that it still takes for a quantised one.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    words = _field(reader, "tokenizer.ggml.pre") if _field(reader, "tokenizer.ggml.model") == "gpt2" else None
    known = words is None or _cut(tokenizer, words)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    notes = []
    if not known:
        notes.append(
            f"The tokenizer's rule for words, {words!r}, is not known here: text may become other tokens than it "
            "should. Copy the original model's tokenizer.json into the folder."
        )
    if not tokenizer.chat_template:
        notes.append("The file has no chat template: the server refuses chats until engine.chat_template names one.")
    return notes


def _cut(tokenizer: Any, words: str) -> bool:
    """Let the tokenizer cut a text into words by the rule that llama.cpp calls `words`; whether the rule is known."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers.integrations.gguf import gguf_tokenizer_mapping as known

    if words in DIGITS:
        parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif words == "superbpe":
        cuts = [Split(Regex(pattern), "isolated") for pattern in SUPERBPE]
        parts = [*cuts, ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        return words in GPT2 or words in known.GGUF_PRE_TOKENIZER_SPLITS
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
    return True


def _field(reader: Any, name: str) -> Any:
    """A value of the file's metadata, or None."""
    entry = reader.get_field(name)
    return None if entry is None else entry.contents()
