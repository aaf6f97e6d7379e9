"""A checkpoint as a transformers folder: ``python -m pocket.export --checkpoint DIR --out DIR``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from holdfast.loadgen.bench.conversations import END
from holdfast.loadgen.inflate import WEIGHTS
from pocket.model import PocketShape
from pocket.tokenizer import SPECIAL, load, packaged

_EXPORTED = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
_EXTRA_FILES = {"README.md", "scores.json"}  # a model card, and the scores of the old weights


def export(
    weights: Mapping[str, Tensor], shape: PocketShape, tokenizer_folder: Path, out: Path, dtype: torch.dtype
) -> None:
    """Write config, weights, tokenizer and chat template. ``out`` appears whole or not at all.

    A model card in ``out`` is kept, and an older export is replaced. Raises FileExistsError if ``out`` has other files.
    """
    check_free(out)
    tokenizer = packaged(load(tokenizer_folder))
    end, pad = (tokenizer.convert_tokens_to_ids(token) for token in (END, SPECIAL[0]))
    config = LlamaConfig(
        **shape.as_dict(), tie_word_embeddings=True, bos_token_id=None, eos_token_id=end, pad_token_id=pad
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad, do_sample=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as parent:
        temporary = Path(parent) / "model"
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        _add_old_names(temporary / "config.json", shape)
        if (out / "README.md").exists():
            shutil.copy(out / "README.md", temporary / "README.md")
        for file in temporary.iterdir():
            file.chmod(0o644)
        replace_folder(temporary, out)


def check_free(out: Path) -> None:
    """Raise FileExistsError unless ``out`` is missing, empty, or an older export."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} exists and is not a folder")
    others = sorted({file.name for file in out.iterdir()} - _EXPORTED - _EXTRA_FILES) if out.exists() else []
    if others:
        raise FileExistsError(f"{out} holds {others[0]}, which no export writes: give a new or empty folder")


def replace_folder(new: Path, out: Path) -> None:
    """Put ``new`` where ``out`` is."""
    if out.exists():
        os.replace(out, new.with_name("old"))
    os.replace(new, out)


def _add_old_names(path: Path, shape: PocketShape) -> None:
    """Add keys that programs older than transformers 5 read."""
    config = json.loads(path.read_text())
    config |= {"rope_theta": shape.rope_theta, "torch_dtype": config["dtype"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a refusal is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="pocket export", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="training folder")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--last", action="store_true", help="export the last weights instead of their average")
    options = parser.parse_args(argv)
    state = torch.load(options.checkpoint / "checkpoint.pt", map_location="cpu", weights_only=True)
    try:
        export(
            state["model" if options.last else "average"],
            PocketShape(**state["shape"]),
            options.checkpoint,
            options.out,
            getattr(torch, options.dtype),
        )
    except FileExistsError as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    print(f"step {state['step']}, {state['tokens']} tokens -> {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
