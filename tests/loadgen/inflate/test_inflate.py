"""Inflated models say what the source says, in every family and for every option that changes the arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from holdfast.loadgen.inflate import model as inflating
from holdfast.loadgen.inflate.model import config_of, inflate, main, total_bytes
from holdfast.loadgen.inflate.shapes import SHAPES, IncompatibleShapeError, NoRoomError, tensors_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SOURCE = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, **HEADS}
SOURCE |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 128}
TARGET = {"model_type": "llama", "vocab_size": 100, "tie_word_embeddings": False}
TARGET |= {"hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 3}
TARGET |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3}
QWEN2 = {"model_type": "qwen2", "head_dim": None, "hidden_size": 128}
QWEN3_MOE = {"model_type": "qwen3_moe", **EXPERTS}
HYBRID = {"model_type": "qwen3_5_text", "num_hidden_layers": 9, "full_attention_interval": 4}
HYBRID |= {"head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.25}}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
HYBRID_MOE = {**HYBRID, **EXPERTS, "model_type": "qwen3_5_moe_text"}
HYBRID_MOE |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 48}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8}
GPT_OSS |= {"num_local_experts": 6, "num_experts_per_tok": 3}
GEMMA4 = {"model_type": "gemma4_text", "intermediate_size": 210, "num_hidden_layers": 6, "tie_word_embeddings": True}
GEMMA4 |= {"head_dim": 16, "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 8}
GEMMA4 |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16}
GEMMA4 |= {"hidden_size_per_layer_input": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 5e3}
    return save(tmp_path_factory.mktemp("source"), tie_word_embeddings=True, rope_parameters=rope)


@pytest.fixture(scope="module")
def said(source: Path) -> torch.Tensor:
    """The source's logits."""
    return logits(source)


def save(folder: Path, **options: Any) -> Path:
    """A random Llama."""
    torch.manual_seed(3)
    config = LlamaConfig(**SOURCE, **options)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return folder


def target(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "target.json"
    path.write_text(json.dumps({k: v for k, v in (TARGET | changes).items() if v is not None}))
    return str(path)


def inflated(source: Path, tmp_path: Path, pad_vocabulary: bool = False, **changes: object) -> Path:
    shape = target(tmp_path, **changes)
    return inflate(str(source), shape, tmp_path / "out", dtype=torch.float32, pad_vocabulary=pad_vocabulary)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(90).remainder(61)[None]
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 10, "num_key_value_heads": 2},
        {"head_dim": 8, "hidden_size": 24, "num_hidden_layers": 2},
        {"head_dim": 20},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "mistral", "sliding_window": 4096},
        QWEN2,
        QWEN2 | {"use_sliding_window": False, "sliding_window": 32},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True},
        HYBRID,
        HYBRID | {"tie_word_embeddings": True, "attention_bias": True},
        HYBRID | {"num_attention_heads": 8, "num_key_value_heads": 8, "full_attention_interval": 3, "head_dim": 64},
        HYBRID | {"layer_types": ["linear_attention", "full_attention"] * 4 + ["linear_attention"]},
        HYBRID
        | {"rope_parameters": {"partial_rotary_factor": 0.5}}
        | {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
        QWEN3_MOE,
        HYBRID_MOE,
        GPT_OSS,
    ],
    ids=str,
)
def test_logits_are_the_sources(source: Path, said: torch.Tensor, tmp_path: Path, changes: dict[str, object]) -> None:
    torch.testing.assert_close(logits(inflated(source, tmp_path, **changes)), said, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        GEMMA4,
        # One layer that sees everything: the window of the others holds the rest of the source.
        GEMMA4
        | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        | {"num_hidden_layers": 3, "sliding_window": 96},
    ],
    ids=str,
)
def test_gelu_comes_near_the_source(source: Path, said: torch.Tensor, tmp_path: Path, changes, caplog) -> None:
    torch.testing.assert_close(logits(inflated(source, tmp_path, **changes)), said, rtol=2e-4, atol=2e-4)
    assert ("beyond 96 tokens answers differ" in caplog.text) == (changes["num_hidden_layers"] == 3)


@pytest.mark.parametrize("changes", [QWEN3_MOE, HYBRID_MOE, GPT_OSS, GEMMA4], ids=lambda each: each["model_type"])
def test_experts_cost_what_they_cost_elsewhere(source: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    out = inflated(source, tmp_path, pad_vocabulary=True, **changes)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    routers = [each for name, each in model.named_modules() if name.endswith((".gate", ".router"))]
    chosen: list[torch.Tensor] = []
    routers[-1].register_forward_hook(lambda module, given, found: chosen.append(found[2]))
    with torch.inference_mode():
        model(torch.arange(60)[None])
    counts = chosen[0].flatten().bincount(minlength=6)
    assert (counts > 0).all()
    assert counts.max() < 60


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen3"}, HYBRID, GPT_OSS, GEMMA4], ids=str
)
def test_added_vocabulary_is_never_sampled(source, said: torch.Tensor, tmp_path, changes: dict[str, object]) -> None:
    found = logits(inflated(source, tmp_path, pad_vocabulary=True, **changes))
    assert found.shape[-1] == TARGET["vocab_size"]
    torch.testing.assert_close(found[..., :64], said, rtol=2e-5, atol=1e-3)
    assert (found[..., 64:].amax(-1) < found[..., :64].amax(-1) - 100).all()


def test_shards_hold_what_one_file_holds(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = inflate(str(source), target(tmp_path), tmp_path / "whole", dtype=torch.float32)
    monkeypatch.setattr(inflating, "SHARD_BYTES", 40_000)
    parts = inflated(source, tmp_path)
    assert len(list(parts.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(parts), logits(whole), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden"),
        ({"num_attention_heads": 12}, "not a multiple"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "heads"),
        ({"num_key_value_heads": 1}, "key-value"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 17}, "even"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_hidden_layers": 1}, "--layers 2"),
        (HYBRID | {"num_hidden_layers": 7}, "--layers 8"),
        (HYBRID | {"head_dim": 16}, "rotary_dim"),
        (HYBRID | {"head_dim": 36}, "even"),
        (HYBRID | {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 7}, "fixed interval"),
        ({"hidden_act": "gelu"}, "gelu"),
        (GPT_OSS | {"num_hidden_layers": 3}, "--layers 4"),
        (GEMMA4 | {"intermediate_size": 190}, "neurons"),
        (GEMMA4 | {"global_head_dim": 16}, "rotary_dim"),
        (GEMMA4 | {"enable_moe_block": False}, "without experts"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_incompatible_shapes_are_refused(source: Path, tmp_path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(IncompatibleShapeError, match=message):
        inflate(str(source), target(tmp_path, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_may_be_others_than_the_shapes(source: Path, said: torch.Tensor, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(source), "--shape", target(tmp_path), "--layers", "5", "--out", str(out), "--dtype", "float32"]
    assert main(command) == 0
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 5
    torch.testing.assert_close(logits(out), said, rtol=2e-5, atol=2e-5)


def test_a_hybrid_may_stand_in_a_model_of_text_and_images(source: Path, tmp_path: Path) -> None:
    path = Path(target(tmp_path, **HYBRID))
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}))
    written = json.loads((inflate(str(source), str(path), tmp_path / "out") / "config.json").read_text())
    assert written["architectures"] == ["Qwen3_5ForCausalLM"]
    period = ["linear_attention"] * 3 + ["full_attention"]
    assert written["layer_types"] == period * 2 + ["linear_attention"]


def test_a_head_of_its_own_is_not_tied_away(tmp_path: Path) -> None:
    save(tmp_path / "source", tie_word_embeddings=False)
    with pytest.raises(IncompatibleShapeError, match="head of its own"):
        inflate(str(tmp_path / "source"), target(tmp_path, tie_word_embeddings=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = inflated(tmp_path / "source", tmp_path)
    torch.testing.assert_close(logits(out), logits(tmp_path / "source"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("missing", [["rope_parameters"], ["rms_norm_eps"], ["bos_token_id", "eos_token_id"]], ids=str)
def test_what_a_source_does_not_say_is_llamas_default(tmp_path: Path, missing: list[str]) -> None:
    folder = save(tmp_path / "source", tie_word_embeddings=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in missing}))
    torch.testing.assert_close(logits(inflated(folder, tmp_path)), logits(folder), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("change", ["truncated", "missing", "size", "config", "type"])
def test_a_damaged_source_is_refused_in_one_line(tmp_path: Path, change: str, capsys) -> None:
    folder = save(tmp_path / "source", tie_word_embeddings=True)
    file, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif change == "config":
        config.write_text("{")
    elif change == "type":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": "small"}))
    else:
        up = weights.pop("model.layers.1.mlp.up_proj.weight")
        save_file(weights | ({"model.layers.1.mlp.up_proj.weight": up[:-1]} if change == "size" else {}), file)
    capsys.readouterr()
    assert main([str(folder), "--shape", target(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("inflate: ")
    assert not (tmp_path / "out").exists()


def test_unknown_shape_names_the_known_ones(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--shape", "llama-9", "--out", str(tmp_path / "out")]) == 2
    assert "qwen3-14b" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_room_is_said_before_writing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(NoRoomError, match="not an empty folder"):
        inflate(str(source), target(tmp_path), tmp_path / "full")
    with pytest.raises(NoRoomError, match="not a folder"):
        inflate(str(source), target(tmp_path), tmp_path / "full" / "file" / "out")
    free = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(NoRoomError, match="GB free"):
        inflate(str(source), target(tmp_path), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3.5-0.8b", 752_393_024),
        ("qwen3.5-2b", 1_881_825_088),
        ("qwen3.5-27b", 26_895_998_464),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3.6-35b-a3b", 34_660_610_688),
        ("gpt-oss-20b", 20_914_757_184),
        ("gemma-4-26b-a4b", 25_233_141_790),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert total_bytes(tensors_of(config_of(SHAPES[name])), torch.bfloat16) == 2 * parameters
