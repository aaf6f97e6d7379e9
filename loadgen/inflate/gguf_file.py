"""A model folder as a GGUF file for llama.cpp: Pocket, or what ``inflate`` wrote.

``python -m holdfast.loadgen.inflate.gguf_file MODEL --out FILE`` (needs the package ``gguf``), with ``--q8-0`` in
llama.cpp's eight bits: matrices, the embedding included, in blocks of 32 numbers with a scale. llama.cpp knows how to
cut text into words only by the name of the cut, and Pocket's has none there. But no merge of Pocket's tokenizer joins
characters of two kinds, so a coarser cut yields the same tokens: ``superbpe``, which cuts at digits and nowhere else.
That is checked on the merges, and other tokenizers are refused.

llama.cpp stores some tensors differently: Llama's rotary pairs side by side, norms of Qwen3.5 with their 1 added, and
what belongs to the value heads of linear attention in another order (`value_order`).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, decoders, pre_tokenizers
from torch import Tensor

from holdfast.kernels.linear_state import LinearShape
from holdfast.loadgen.inflate import CUT, WEIGHTS
from holdfast.loadgen.inflate.shapes import Family, InflateError, NoRoomError, Shape, full_config, read_object, shape_of

CUT_AT_DIGITS = "superbpe"
_ARCHITECTURES = {Family.MISTRAL: "llama", Family.QWEN35: "qwen35"}  # where llama.cpp has another name
_DTYPES = ("F32", "F16", "BF16")
_SPARE_BYTES = 16 << 20


class GgufError(InflateError):
    """The folder cannot be written as GGUF; nothing has been written."""


def write_gguf(folder: Path, out: Path, q8_0: bool = False) -> Path:
    """Write the Llama, Mistral, Qwen2, Qwen3 or Qwen3.5 in ``folder`` to the new file ``out``, in its dtype or Q8_0.

    Returns ``out``, which appears whole or not at all. Raises GgufError or another InflateError before anything is
    written; memory holds one tensor at a time.
    """
    try:
        import gguf
    except ImportError as error:
        raise GgufError("the package gguf is missing: .venv/bin/pip install -e '.[gguf]' -c constraints.txt") from error
    content = read_object(folder / "config.json", GgufError)
    tokenizer = read_object(folder / "tokenizer.json", GgufError)
    shape = shape_of(content, context=0)
    config = full_config(content)
    check_merges(tokenizer)
    if shape.linear is not None and shape.linear.key_dim != shape.linear.value_dim:
        raise GgufError("llama.cpp wants keys and values of linear attention of one size")
    if out.exists():
        raise NoRoomError(f"{out} exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    size, free = sum(file.stat().st_size for file in _shards(folder)), shutil.disk_usage(out.parent).free
    if free < size + _SPARE_BYTES:
        raise NoRoomError(f"{size / 1e9:.1f} GB are needed, {out.parent} has {free / 1e9:.1f} GB free")
    family = _ARCHITECTURES.get(shape.family, str(shape.family))
    temporary = out.with_name(f".{out.name}.part")
    writer = gguf.GGUFWriter(temporary, family)
    try:
        _add_sizes(writer, shape, config)
        _add_tokenizer(writer, folder, config, tokenizer, gguf.TokenType)
        if q8_0:
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_tensors(writer, folder, shape, family, gguf, q8_0)
        writer.close()
        os.replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise GgufError(f"{folder} cannot be written to {out}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return out


def check_merges(tokenizer: dict[str, Any]) -> None:
    """Raise GgufError unless the tokenizer has Pocket's cut and that may be left out: no merge joins two words."""
    cuts = [part.get("pattern") for part in (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers", ())]
    if {"Regex": CUT} not in cuts or tokenizer["model"]["type"] != "BPE":
        raise GgufError("only Pocket's tokenizer, or one trained in its way, can be written")
    cut, bytes_of = pre_tokenizers.Split(Regex(CUT), "isolated"), decoders.ByteLevel()
    for left, right in tokenizer["model"]["merges"]:
        text = bytes_of.decode([left + right])
        if "\ufffd" in text or any(sign.isnumeric() for sign in text) or len(cut.pre_tokenize_str(text)) != 1:
            raise GgufError(f"the merge {text!r} joins what another cut into words may divide")


def _shards(folder: Path) -> list[Path]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise GgufError(f"{folder} holds no model.safetensors")
    return files


def _add_sizes(writer: Any, shape: Shape, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.rotary_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if shape.linear is not None:
        linear, pairs = shape.linear, shape.rotary_dim // 2
        # Text has one position for all three axes; together they have to cover every pair.
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        writer.add_full_attention_interval(shape.interval)
        writer.add_ssm_conv_kernel(linear.kernel)
        writer.add_ssm_state_size(linear.key_dim)
        writer.add_ssm_group_count(linear.key_heads)
        writer.add_ssm_time_step_rank(linear.value_heads)
        writer.add_ssm_inner_size(linear.value_heads * linear.value_dim)


def _add_tokenizer(writer: Any, folder: Path, config: Any, tokenizer: dict[str, Any], types: Any) -> None:
    """Tokens with their types, merges, control ids and the chat template; rows without a token are marked unused."""
    texts = [f"[unused {index}]" for index in range(config.vocab_size)]
    kinds = [types.UNUSED] * len(texts)
    most = max([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])])
    if most >= len(texts):
        raise GgufError(f"the tokenizer has a token {most}, the model {len(texts)} of them")
    for text, index in tokenizer["model"]["vocab"].items():
        texts[index], kinds[index] = text, types.NORMAL
    for token in tokenizer["added_tokens"]:
        kind = types.CONTROL if token["special"] else types.USER_DEFINED
        texts[token["id"]], kinds[token["id"]] = token["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(CUT_AT_DIGITS)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(_token_id(config, "eos_token_id"))
    writer.add_pad_token_id(_token_id(config, "pad_token_id"))
    writer.add_bos_token_id(_token_id(config, "pad_token_id"))  # never added, but llama.cpp wants to know one
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))


def _token_id(config: Any, name: str) -> int:
    value = getattr(config, name)
    if not isinstance(value, int):
        raise GgufError(f"{name} of config.json is {value!r}, not one number")
    return value


def _write_tensors(writer: Any, folder: Path, shape: Shape, family: str, gguf: Any, q8_0: bool) -> None:
    """Announce every tensor, then copy them one by one; vectors are float32, as llama.cpp wants them."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names, kinds = gguf.get_tensor_name_map(architecture, shape.layers), gguf.GGMLQuantizationType
    # Head norms scale tiny queries and keys up again; the blocks' scales of Q8_0 are float16, which would lose them.
    exact = ("q_proj", "k_proj") if shape.head_norms else ()
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(shard, framework="pt")) for shard in _shards(folder)]
        slots, tensors = [], [(file, name) for file in files for name in file.keys()]  # noqa: SIM118
        for file, name in tensors:
            part = file.get_slice(name)
            sizes = [size for size in part.get_shape() if "conv1d" not in name or size > 1]
            plain_name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
            placed = names.get_name(plain_name, try_suffixes=(".weight", ".bias"))
            if placed is None or part.get_dtype() not in _DTYPES:
                raise GgufError(f"{name} in {part.get_dtype()} cannot be written")
            eight = q8_0 and not any(pattern in name for pattern in exact)
            plain = len(sizes) == 1 or "conv1d" in name
            kind = kinds["F32" if plain else "Q8_0" if eight else part.get_dtype()]
            block, length = gguf.GGML_QUANT_SIZES[kind]
            if sizes[-1] % block:
                raise GgufError(f"{name} has rows of {sizes[-1]}, which blocks of {block} do not divide")
            sizes = [*sizes[:-1], sizes[-1] // block * length]
            writer.add_tensor_info(placed, sizes, np.dtype(np.uint8), math.prod(sizes), raw_dtype=kind)
            slots.append((file, name, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for file, name, kind in slots:
            tensor = _converted(name, file.get_tensor(name), shape)
            if kind == kinds.Q8_0:
                writer.write_tensor_data(gguf.quants.quantize(tensor.float().numpy(), kind))
            else:
                tensor = tensor.float() if kind == kinds.F32 else tensor
                writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())


def _converted(name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor as llama.cpp stores it."""
    if shape.family in (Family.LLAMA, Family.MISTRAL) and ("q_proj" in name or "k_proj" in name):
        return interleaved(tensor, shape.heads if "q_proj" in name else shape.kv_heads)
    if shape.linear is None:
        return tensor
    if ".linear_attn." not in name:
        return tensor.float() + 1.0 if name.endswith("norm.weight") else tensor
    part = name.split(".linear_attn.")[1]
    heads = value_order(shape.linear)
    rows = (heads[:, None] * shape.linear.value_dim + torch.arange(shape.linear.value_dim)).flatten()
    if part == "A_log":
        return -tensor.float()[heads].exp()
    if part in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return tensor[heads]
    if part == "in_proj_z.weight":
        return tensor[rows]
    if part == "out_proj.weight":
        return tensor[:, rows]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = shape.linear.channels - len(rows)
        return tensor[torch.cat((torch.arange(keys), keys + rows))]
    return tensor


def value_order(linear: LinearShape) -> Tensor:
    """The value heads in llama.cpp's order: the first of every key head, then the second of every key head."""
    return torch.arange(linear.value_heads).view(linear.key_heads, -1).T.flatten()


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection with the halves of every rotary pair side by side, as llama.cpp turns them."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, -1).transpose(1, 2).reshape(rows.shape)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; a refusal is one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="pocket gguf", description=__doc__)
    parser.add_argument("model", nargs="?", default="pocket", help="'pocket' or a model folder")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--q8-0", action="store_true", help="matrices in eight bits rather than in their dtype")
    options = parser.parse_args(argv)
    try:
        print(write_gguf(WEIGHTS if options.model == "pocket" else Path(options.model), options.out, options.q8_0))
    except InflateError as error:
        print(f"gguf: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
