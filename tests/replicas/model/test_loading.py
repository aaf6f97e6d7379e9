"""What loading takes of a process's memory: beside the model about a block of it, whatever the size of the files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.files import INDEX
from holdfast.replicas.model.progress import Progress
from holdfast.replicas.model.weights import read_weights

LAYERS = 8
CONFIG = tf.LlamaConfig(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=8192,
    max_position_embeddings=64,
)
MEASURED = """
import json, os, sys, torch
from transformers import AutoConfig
from holdfast.kernels.linear import Matrix
from holdfast.replicas.kv.tensors import CellShape, KVTensors
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.description import describe
from holdfast.replicas.model.weights import read_weights

path = sys.argv[1]
torch.set_num_threads(1)
config = AutoConfig.from_pretrained(path)

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

Matrix(torch.zeros(64, 64, dtype=torch.bfloat16))(torch.zeros(1, 64, dtype=torch.bfloat16))  # libraries are loaded
described = describe(config)
for way in ("kept", "passed on"):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    kv = KVTensors(CellShape(config.num_hidden_layers, 8, 128), 1, 16, torch.bfloat16)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = kilobytes("VmRSS")
    if way == "kept":
        model = Decoder.load(path, config, kv, 64)
    else:  # as on a GPU: of what is read nothing stays in the host's memory
        for _ in read_weights(path, described, torch.bfloat16, "cpu").blocks:
            pass
    print(json.dumps([(kilobytes("VmHWM") - before) << 10, (kilobytes("VmRSS") - before) << 10]), flush=True)
    os._exit(0)
"""


def shards(folder: Path, count: int = 4, config: tf.LlamaConfig = CONFIG) -> int:
    """Write a random model in so many files of about one size, with their index. Bytes of the largest."""
    with torch.device("meta"):
        module = tf.AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.rand(each.shape).mul_(0.1).to(torch.bfloat16) for name, each in module.named_parameters()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    size = sum(each.nbytes for each in tensors.values()) / count
    files: list[dict[str, Tensor]] = [{}]
    for name, each in tensors.items():
        if sum(held.nbytes for held in files[-1].values()) > size:
            files.append({})
        files[-1][name] = each
    places = {}
    for number, held in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        save_file(held, folder / name)
        places |= dict.fromkeys(held, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    config.save_pretrained(folder)
    return max(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, shards(folder)


def test_loading_takes_little_more_than_what_stays(checkpoint):
    """The peak, files in memory included, is at most the model, if it is kept, and 1.1 times the largest file."""
    folder, largest = checkpoint
    command = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (peak, stays), (peak_passed, _) = map(json.loads, done.stdout.splitlines())
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 3.5 * largest < whole
    assert whole * 0.95 < stays < whole * 1.1  # nothing that was freed is kept
    assert peak < stays + 1.1 * largest
    assert peak_passed < 1.1 * largest


def progress(folder: Path, config: tf.LlamaConfig) -> tuple[int, Progress]:
    """How many blocks are read, and what is told at the end."""
    told: list[Progress] = []
    weights = read_weights(str(folder), describe(config), torch.bfloat16, "cpu", tell=told.append)
    return sum(1 for _ in weights.blocks), told[-1]


def test_what_is_read_is_told_to_the_last_byte(checkpoint):
    blocks, told = progress(checkpoint[0], CONFIG)
    numbers = 2 * CONFIG.vocab_size * 1024 + 1024 + LAYERS * (4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024)
    assert blocks == 2 * LAYERS
    assert told.read == told.total == 2 * numbers


def test_a_tied_head_that_is_stored_as_well_counts(tmp_path):
    config = tf.LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1, "tie_word_embeddings": True})
    shards(tmp_path, 1, config)
    told = progress(tmp_path, config)[1]
    assert told.read == told.total > 2 * 2 * CONFIG.vocab_size * 1024


def test_a_weight_that_is_not_there_is_named_before_any_is_read(checkpoint, tmp_path, monkeypatch):
    """It may be the last one: of a checkpoint of another configuration, or one that somebody has thinned out."""
    folder, _ = checkpoint
    config = tf.LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": LAYERS + 1})
    monkeypatch.setattr("holdfast.replicas.model.mapped.mapped", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match=r"lack 9 weights, model\.layers\.8\.input_layernorm\.weight among"):
        read_weights(str(folder), describe(config), torch.bfloat16, "cpu")
    wide = tf.LlamaConfig(**{**CONFIG.to_dict(), "intermediate_size": 2048})
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \(2816, 1024\), not \(2048, 1024\)"):
        read_weights(str(folder), describe(wide), torch.bfloat16, "cpu")
