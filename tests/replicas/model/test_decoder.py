"""Our decoder computes what transformers computes, for every family and option it accepts, and declines the others."""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from families import COMMON, CONFIGS, paged_logits, plain_logits, save
from on_device import DEVICE, device_of
from safetensors.torch import load_file, save_file
from tiny_models import tiny

from holdfast.replicas.errors import ConfigError
from holdfast.replicas.kv.tensors import KVTensors
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.decoder_gpu import GpuDecoder
from holdfast.replicas.model.description import describe

DECLINED = {
    "gpt_neox": tf.GPTNeoXConfig(),
    "mlp bias": tf.LlamaConfig(**COMMON, mlp_bias=True),
    "activation": tf.LlamaConfig(**COMMON, hidden_act="gelu"),
    "dynamic rope": tf.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "gated relu2": tf.LlamaConfig(**COMMON, hidden_act="relu2"),
    "time steps with a limit": tf.NemotronHConfig(time_step_limit=[0.001, 0.1]),
    "no attention": tf.NemotronHConfig(layers_block_type=["linear_attention", "mlp"]),
}


def kv_of(config: tf.PreTrainedConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> KVTensors:
    kinds = describe(config).kinds(160)
    return KVTensors.of(kinds, [20] * len(kinds), 8, dtype, device)


def words(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 97, count).astype(np.int32)


INTERPRETABLE = ("llama", "qwen2 windows", "gpt-oss", "gemma 4", "glm 4", "laguna")  # the others take minutes so
CASES = [(Decoder, name) for name in CONFIGS]
CASES += [(GpuDecoder, name) for name in (INTERPRETABLE if DEVICE == "cpu" else CONFIGS)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_logits_are_transformers_own(kind, name, tmp_path):
    folder, model = tiny(name) if name != "llama" else (tmp_path, save(CONFIGS[name], tmp_path, shards=True))
    kv = kv_of(model.config, device=device_of(kind))
    decoder = kind.load(str(folder), model.config, kv, 160)
    tokens, cuts = (words(150), [60, 61, 64, 130]) if kind is Decoder else (words(24), [21, 22])
    ours, plain = paged_logits(decoder, kv, tokens, cuts), plain_logits(model, tokens)
    tolerance = 2e-3 if name == "packed" else 2e-4  # its logits reach 20, and float32 itself is off by 5e-4 there
    assert torch.allclose(ours, plain, atol=tolerance, rtol=0)
    assert torch.equal(ours.argmax(-1), plain.argmax(-1))


@pytest.mark.parametrize(("kind", "dtype"), [(Decoder, torch.bfloat16), (GpuDecoder, torch.float16)])
def test_sixteen_bits_stay_close(kind, dtype):
    folder, model = tiny("llama")
    kv = kv_of(model.config, dtype, device_of(kind))
    decoder = kind.load(str(folder), model.config, kv, 160)
    ours = paged_logits(decoder, kv, words(24), [20])
    assert torch.cosine_similarity(ours, plain_logits(model, words(24))).min() > 0.99


@pytest.mark.parametrize("name", DECLINED)
def test_what_it_cannot_compute_is_declined(name, tmp_path):
    assert Decoder.load(str(tmp_path), DECLINED[name], None, 64) is None


def assert_read_alike(folder):
    """Our decoder and transformers make the same of a folder, on one prompt."""
    config = tf.AutoConfig.from_pretrained(folder)
    kv = kv_of(config)
    plain = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ours = paged_logits(Decoder.load(str(folder), config, kv, 160), kv, words(60), [40, 41])
    assert torch.allclose(ours, plain_logits(plain, words(60)), atol=2e-4, rtol=0)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("stray", [{}, {"layer_types": ["sliding_attention", "full_attention"]}], ids=str)
def test_a_window_that_the_family_ignores_is_ignored(stray, tmp_path):
    save(CONFIGS["llama"], tmp_path)
    edit_config(tmp_path, sliding_window=24, **stray)
    assert tf.AutoConfig.from_pretrained(tmp_path).sliding_window == 24
    assert_read_alike(tmp_path)


@pytest.mark.parametrize("names", [["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]], ids=str)
def test_a_tied_embedding_may_be_there_as_a_head(names, tmp_path):
    state = save(CONFIGS["llama tied"], tmp_path).state_dict()
    embedding = state.pop("model.embed_tokens.weight")
    state.pop("lm_head.weight", None)
    save_file(state | {name: embedding.clone() for name in names}, tmp_path / "model.safetensors", {"format": "pt"})
    assert_read_alike(tmp_path)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_an_error(tmp_path):
    config = CONFIGS["llama tied"]
    state = save(config, tmp_path).state_dict()
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="tie_word_embeddings") as raised:
        Decoder.load(str(tmp_path), config, kv_of(config), 64)
    assert raised.value.field == "model"


def test_one_file_goes_before_an_index_as_with_transformers(tmp_path):
    state = save(CONFIGS["llama"], tmp_path).state_dict()
    save_file({name: tensor * 2 for name, tensor in state.items()}, tmp_path / "old.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_read_alike(tmp_path)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    state = save(CONFIGS["glm 4"], tmp_path).state_dict()
    edit_config(tmp_path, num_nextn_predict_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert_read_alike(tmp_path)


@pytest.mark.parametrize("change", ["missing", "unknown", "size"])
def test_wrong_files_are_errors_that_name_the_weight(change, tmp_path):
    config = CONFIGS["llama"]
    model = save(config, tmp_path)
    state = model.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del state[name]
    elif change == "unknown":
        name = "model.layers.1.mlp.extra.weight"
        state[name] = torch.zeros(2)
    else:
        state[name] = state[name][:-1]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=name) as raised:
        Decoder.load(str(tmp_path), config, kv_of(config), 64)
    assert raised.value.field == "model"
