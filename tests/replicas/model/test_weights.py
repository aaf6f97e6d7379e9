"""Loading checkpoints from folders: what is read, and each way it can fail, as an error that names the field."""

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.events import Sampling
from holdfast.replicas.model.runner import load_runner
from holdfast.replicas.model.weights import inspect_model, load_model, model_path
from holdfast.replicas.scheduling.plan import Chunk, Draw, RowWrite, StepPlan


def add_tokenizer(folder, size):
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tf.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)


@pytest.fixture
def folder(tiny, tmp_path):
    """A saved tiny Llama with a tokenizer and two end-of-sequence ids."""
    model = tiny.model("llama")
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "tiny-llama")
    add_tokenizer(tmp_path / "tiny-llama", tiny.vocabulary)
    settings = tmp_path / "tiny-llama" / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [2, 96]}))
    return tmp_path / "tiny-llama"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config_of(folder, **settings):
    return EngineConfig(model=str(folder), threads=1, cells=512, max_sequences=4, session_rows=1, **settings)


def refusal(folder, **settings):
    with pytest.raises(ConfigError) as caught:
        load_runner(config_of(folder, **settings))
    return caught.value


def test_a_loaded_runner_answers_like_the_model(tiny, folder):
    loaded = load_runner(config_of(folder))
    assert loaded.eos == {2, 96}
    assert loaded.vocabulary == tiny.vocabulary == len(loaded.tokenizer)
    config = loaded.config
    assert (config.served_name, config.device, config.dtype) == ("tiny-llama", "cpu", "float32")
    assert (config.context_length, config.cells, config.threads) == (512, 512, 1)
    prompt = tiny.prompt(20)
    pages = np.array([7, 3], dtype=np.int32)
    chunk = Chunk(2, 0, np.array(prompt, dtype=np.int32), Draw(Sampling(), 0))
    (drawn,) = loaded.runner.run(StepPlan((chunk,), (RowWrite(2, 0, pages),))).drawn
    assert drawn.tokens == tiny.reference("llama", prompt, 1)


def test_bfloat16_is_loaded_on_request(folder):
    loaded = load_runner(config_of(folder, dtype="bfloat16", served_name="mine"))
    assert loaded.runner.kv.data.dtype == torch.bfloat16
    assert loaded.config.served_name == "mine"


def test_shape_is_read_from_the_configuration(folder):
    info = inspect_model(str(folder))
    assert (info.cell.layers, info.cell.kv_heads, info.cell.head_dim) == (2, 2, 8)
    assert (info.shape.context_length, info.shape.checkpoint_dtype, info.shape.cell_values) == (512, "float32", 64)


def test_one_end_id_of_the_configuration_is_read_too(folder):
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=5)
    assert load_model(inspect_model(str(folder)), "float32", "cpu").eos == {5}


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "nowhere"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ConfigError, match="there is no folder") as caught:
        model_path(name)
    assert caught.value.field == "model"


def test_a_hub_name_that_is_not_cached_is_refused_offline():
    error = refusal("holdfast-tests/never-published")
    assert error.field == "model"
    assert "holdfast-tests/never-published" in error.message


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    error = refusal(tmp_path)
    assert (error.field, "no config.json" in error.message) == ("model", True)


def test_damaged_or_missing_files_are_refused(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[: len(whole) // 2], b"", None):
        weights.unlink() if content is None else weights.write_bytes(content)
        assert refusal(folder).field == "model"
    (folder / "config.json").write_text("{")
    assert refusal(folder).field == "model"


def test_weights_that_are_not_all_there_are_refused(folder):
    edit_config(folder, num_hidden_layers=3)
    assert "lack" in refusal(folder).message


def test_a_missing_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "tokenizer" in refusal(folder).message


def test_an_encoder_decoder_is_refused(tmp_path):
    tf.T5Config().save_pretrained(tmp_path)
    assert "encoder-decoder" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "config",
    [
        tf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1),
        tf.Qwen3NextConfig(num_hidden_layers=4),
        tf.CodeGenConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64),
        tf.GptOssConfig(
            vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, pad_token_id=None,
            bos_token_id=None, eos_token_id=None,
        ),
    ],
    ids=["no attention", "linear attention", "own attention", "attention with sinks"],
)  # fmt: skip
def test_a_model_that_would_answer_wrongly_is_refused(config, tmp_path):
    if config.model_type == "qwen3_next":
        config.save_pretrained(tmp_path)
    else:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            weight.data.normal_(std=2.0 if "sinks" in name else 0.3)
        model.save_pretrained(tmp_path)
        add_tokenizer(tmp_path, 97)
    error = refusal(tmp_path)
    assert error.field == "model"
    assert "its files lack" not in error.message


def test_a_context_beyond_the_models_is_refused(folder):
    assert refusal(folder, context_length=1000).field == "context_length"
