"""The GGUF file holds the folder's tensors and a tokenizer that llama.cpp cuts otherwise to the same tokens."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers

from holdfast.loadgen.inflate import WEIGHTS
from holdfast.loadgen.inflate.gguf_file import GgufError, check_merges, interleaved, main, write_gguf
from holdfast.loadgen.inflate.model import inflate
from holdfast.loadgen.inflate.shapes import NoRoomError

gguf = pytest.importorskip("gguf")
SHAPE = {"model_type": "qwen3", "vocab_size": 2048, "tie_word_embeddings": True}
SHAPE |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
SHAPE |= {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The file's tensors by name, as stored."""
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    return {
        t.name: torch.tensor(t.data).view(kinds[t.tensor_type.name]).view(*reversed(t.shape.tolist()))
        for t in gguf.GGUFReader(path).tensors
    }


def field(path: Path, name: str) -> Any:
    return gguf.GGUFReader(path).fields[name].contents()


def test_tensors_are_the_folders(tmp_path: Path) -> None:
    found, own = tensors(write_gguf(WEIGHTS, tmp_path / "p.gguf")), load_file(WEIGHTS / "model.safetensors")
    assert len(found) == len(own)
    at, blk = "model.layers.1.", "blk.1."
    assert torch.equal(found["token_embd.weight"], own["model.embed_tokens.weight"])
    assert torch.equal(found[f"{blk}ffn_down.weight"], own[f"{at}mlp.down_proj.weight"])
    assert torch.equal(found[f"{blk}attn_norm.weight"], own[f"{at}input_layernorm.weight"].float())
    assert torch.equal(found[f"{blk}attn_v.weight"], own[f"{at}self_attn.v_proj.weight"])
    keys = own[f"{at}self_attn.k_proj.weight"]
    assert torch.equal(found[f"{blk}attn_k.weight"], interleaved(keys, 2))


def test_in_eight_bits_a_matrix_is_within_half_a_step_of_the_folders(tmp_path: Path) -> None:
    read = gguf.GGUFReader(write_gguf(WEIGHTS, tmp_path / "q8.gguf", q8_0=True))
    found, own = {t.name: t for t in read.tensors}, load_file(WEIGHTS / "model.safetensors")
    for name, stored in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_down", "model.layers.1.mlp.down_proj")):
        tensor, matrix = found[f"{name}.weight"], own[f"{stored}.weight"].float()
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
        assert tuple(reversed(tensor.shape.tolist())) == tuple(matrix.shape)
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(-1, 32)
        blocks = matrix.reshape(-1, 32)
        step = blocks.abs().amax(1, keepdim=True) / 127
        assert ((values - blocks).abs() <= 0.51 * step + 127 * step * 2**-11).all()  # its scale is a float16
    assert found["blk.1.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_rotary_halves_become_neighbours() -> None:
    rows = torch.arange(2 * 6).view(12, 1)
    assert interleaved(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_an_inflated_folder_with_added_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    folder = inflate("pocket", str(tmp_path), tmp_path / "large", dtype=torch.float32, pad_vocabulary=True)
    path = write_gguf(folder, tmp_path / "large.gguf")
    found, own = tensors(path), load_file(folder / "model.safetensors")
    assert torch.equal(found["blk.5.attn_q.weight"], own["model.layers.5.self_attn.q_proj.weight"])
    assert torch.equal(found["blk.0.attn_k_norm.weight"], own["model.layers.0.self_attn.k_norm.weight"])
    types = field(path, "tokenizer.ggml.token_type")
    assert len(types) == 2048
    assert set(types[1536:]) == {gguf.TokenType.UNUSED}
    assert field(path, "qwen3.rope.dimension_count") == 128


HYBRID = SHAPE | {"model_type": "qwen3_5_text", "num_hidden_layers": 14, "full_attention_interval": 2, "head_dim": 256}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


def test_a_hybrid(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    folder = inflate("pocket", str(tmp_path), tmp_path / "large")
    path = write_gguf(folder, tmp_path / "large.gguf")
    found, own = tensors(path), load_file(folder / "model.safetensors")
    assert len(found) == len(own)
    assert torch.equal(found["blk.1.attn_q.weight"], own["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(found["blk.1.attn_norm.weight"], own["model.layers.1.input_layernorm.weight"].float() + 1)
    at = "model.layers.0.linear_attn."
    assert torch.equal(found["blk.0.ssm_norm.weight"], own[f"{at}norm.weight"].float())
    order = [0, 3, 1, 4, 2, 5]  # three value heads for each of two key heads
    assert torch.equal(found["blk.0.ssm_a"], -own[f"{at}A_log"].float().exp()[order])
    assert torch.equal(found["blk.0.ssm_dt.bias"], own[f"{at}dt_bias"].float()[order])
    assert torch.equal(found["blk.0.ssm_beta.weight"], own[f"{at}in_proj_b.weight"][order])
    gate = own[f"{at}in_proj_z.weight"].view(6, 16, -1)[order].flatten(0, 1)
    assert torch.equal(found["blk.0.attn_gate.weight"], gate)
    mixed = own[f"{at}in_proj_qkv.weight"]
    values = mixed[64:].view(6, 16, -1)[order].flatten(0, 1)
    assert torch.equal(found["blk.0.attn_qkv.weight"], torch.cat((mixed[:64], values)))
    kernel = own[f"{at}conv1d.weight"].float()[:, 0]
    kernel = torch.cat((kernel[:64], kernel[64:].view(6, 16, -1)[order].flatten(0, 1)))
    assert torch.equal(found["blk.0.ssm_conv1d.weight"], kernel)
    for name, value in {
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
    }.items():
        assert field(path, f"qwen35.{name}") == value
    assert main([str(folder), "--out", str(tmp_path / "q8.gguf"), "--q8-0"]) == 0
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "q8.gguf").tensors}
    assert kinds["blk.1.attn_q.weight"] == kinds["blk.1.attn_k.weight"] == "BF16"  # too small for Q8_0
    assert kinds["blk.1.attn_v.weight"] == kinds["blk.0.attn_qkv.weight"] == "Q8_0"


def test_the_tokenizer_is_the_folders(tmp_path: Path) -> None:
    path = write_gguf(WEIGHTS, tmp_path / "p.gguf")
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    texts = field(path, "tokenizer.ggml.tokens")
    assert texts == [tokenizer.id_to_token(index) for index in range(len(texts))]
    types = dict(zip(texts, field(path, "tokenizer.ggml.token_type"), strict=True))
    assert types["<|im_end|>"] == gguf.TokenType.CONTROL
    assert types["<tool_call>"] == gguf.TokenType.USER_DEFINED
    assert texts[field(path, "tokenizer.ggml.eos_token_id")] == "<|im_end|>"


@given(st.text(st.characters(codec="utf-8") | st.sampled_from('aeé "{}[]:,\n·19_-.'), max_size=60))
@settings(max_examples=200)
def test_a_cut_at_digits_alone_yields_the_same_tokens(text: str) -> None:
    expected, cut = tokenizers()
    assert cut.encode(text).ids == expected.encode(text).ids


@cache
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Pocket's as it is, and cut at digits alone."""
    plain, cut = (Tokenizer.from_file(str(WEIGHTS / "tokenizer.json")) for _ in range(2))
    digits = pre_tokenizers.Split(Regex(r"\p{N}+"), "isolated")
    cut.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return plain, cut


def test_refusals_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((WEIGHTS / "tokenizer.json").read_text())
    joined = tokenizer | {"model": tokenizer["model"] | {"merges": [["a", ":"]]}}
    with pytest.raises(GgufError, match="joins"):
        check_merges(joined)
    with pytest.raises(GgufError, match="only Pocket's tokenizer"):
        check_merges(tokenizer | {"pre_tokenizer": {"type": "ByteLevel"}})
    with pytest.raises(NoRoomError, match="exists"):
        write_gguf(WEIGHTS, WEIGHTS / "config.json")
    assert main([str(tmp_path), "--out", str(tmp_path / "x.gguf")]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["truncated", "no template", "no pad", "few tokens", "list"])
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, change: str, capsys) -> None:
    folder = Path(shutil.copytree(WEIGHTS, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    changes = {"no pad": {"pad_token_id": None}, "few tokens": {"vocab_size": 100}}.get(change, {})
    (folder / "config.json").write_text(json.dumps(config | changes if change != "list" else [config]))
    if change == "truncated":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif change == "no template":
        (folder / "chat_template.jinja").unlink()
    assert main([str(folder), "--out", str(tmp_path / "x.gguf")]) == 2
    assert capsys.readouterr().err.startswith("gguf: ")
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_folder_does_not_say_is_its_familys_default(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(WEIGHTS, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    missing = ("rms_norm_eps", "rope_theta", "rope_parameters")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in missing}))
    out = write_gguf(folder, tmp_path / "x.gguf")
    assert field(out, "llama.rope.freq_base") == 10_000.0
    assert field(out, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
