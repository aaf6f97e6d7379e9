"""Checkpoints that are broken or none at all: each is named, with what to do, before anything is loaded."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model import startup
from holdfast.replicas.model.files import INDEX, ONE_FILE, stored_tensors
from holdfast.replicas.model.folder import model_folder

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with a tensor each, and their index."""
    (tmp_path / "config.json").write_text("{}")
    for number, shard in enumerate(SHARDS):
        save_file({f"layer.{number}": torch.ones(4, 3, dtype=torch.bfloat16)}, tmp_path / shard)
    index = {"metadata": {"total_size": 48}, "weight_map": {f"layer.{i}": shard for i, shard in enumerate(SHARDS)}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def fault(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        stored_tensors("mine", folder)
    assert refused.value.field == "model"
    assert refused.value.message.startswith("cannot serve model 'mine': ")
    return refused.value.message.partition(": ")[2]


def header(shape: list[int], begin: int, end: int, data: int) -> bytes:
    text = json.dumps({"layer.1": {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def test_tensors_that_are_all_there_are_found_in_their_files(folder):
    stored = stored_tensors("mine", folder)
    assert {name: (each.file.name, each.dtype, each.shape) for name, each in stored.items()} == {
        f"layer.{i}": (shard, "BF16", (4, 3)) for i, shard in enumerate(SHARDS)
    }
    for each in stored.values():
        assert each.file.read_bytes()[each.begin : each.end] == b"\x80\x3f" * 12
    save_file({"whole": torch.zeros(2)}, folder / ONE_FILE)  # is read in place of the others
    assert set(stored_tensors("mine", folder)) == {"whole"}


def test_a_shard_that_is_missing(folder):
    (folder / SHARDS[1]).unlink()
    assert fault(folder) == f"{SHARDS[1]} is missing. Download it again: hf download NAME --local-dir FOLDER"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty or cut off"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "git-lfs pointer to the weights. Fetch",
        ),
        (b"GGUF" + bytes(60), "is no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is no safetensors file"),
        (struct.pack("<Q", 900) + b"{", "its header is cut off"),
        (header([4, 3], 0, 24, 23), "bytes instead of"),
        (header([4, 4], 0, 24, 24), "has 24 bytes, which is not BF16 of [4, 4]"),
        (header([4, 3], 0, 24, 24).replace(b"layer.1", b"layer.7"), "lack 1 weights that the index names, layer.1 in"),
    ],
    ids=["empty", "lfs", "gguf", "no header", "half a header", "truncated", "other size", "no tensor"],
)
def test_a_shard_that_is_none(folder, content, words):
    (folder / SHARDS[1]).write_bytes(content)
    message = fault(folder)
    assert words in message
    assert "hf download" in message or "git lfs pull" in message


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}'])
def test_an_index_that_is_none(folder, index):
    (folder / INDEX).write_text(index)
    assert f"{INDEX} is not an index of weights" in fault(folder)


def test_weights_in_another_format(folder):
    for name in (INDEX, *SHARDS):
        (folder / name).unlink()
    assert "there are no safetensors weights. Download them" in fault(folder)
    (folder / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin, which may run code" in fault(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("", "", "is empty. Download the model"),
        ("notes.txt", "", "there is no config.json"),
        ("adapter_config.json", '{"base_model_name_or_path": "org/base"}', "an adapter (LoRA) of org/base. Merge it"),
        ("adapter_config.json", "{", "an adapter (LoRA). Merge it"),
        ("model.gguf", "GGUF", "holdfast convert"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path, name, content, words):
    if name:
        (tmp_path / name).write_text(content)
    if name.startswith("adapter"):
        (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError) as refused:
        model_folder(str(tmp_path))
    assert words in refused.value.message


def test_nothing_is_allocated_for_a_broken_checkpoint(tmp_path, monkeypatch):
    pocket = model_folder("pocket")
    for file in pocket.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / ONE_FILE).write_bytes((tmp_path / ONE_FILE).read_bytes()[:-9])
    monkeypatch.setattr(startup, "KVTensors", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ConfigError, match="the download broke off"):
        startup.load_runner(EngineConfig(model=str(tmp_path), cells=64))
