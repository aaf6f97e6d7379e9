"""Loading checkpoints from folders: what is read, and each way it can fail, as an error that names the field."""

import json
import logging
import os
import shutil
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from tiny_models import VOCABULARY, add_tokenizer, greedy, words

from holdfast.kernels import attention, layer, linear, native
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.model.weights import eos_ids, load_tokenizer, sampling_defaults
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save(config, folder):
    """A random model of this configuration, with a tokenizer."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.data.normal_(std=0.3)
        if "sinks" in name:
            weight.data.normal_(std=2.0)
    model.save_pretrained(folder)
    add_tokenizer(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama with a tokenizer and two end-of-sequence ids."""
    folder = tmp_path_factory.mktemp("saved")
    save(tf.LlamaConfig(**SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 512}), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 96]}))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "tiny-llama")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config_of(folder, **settings):
    return EngineConfig(model=str(folder), threads=1, cells=512, max_sequences=4, session_rows=1, **settings)


def assert_refused(folder, field="model", words=None, **settings):
    """Returns the message."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_runner(config_of(folder, **settings))
    assert caught.value.field == field
    return caught.value.message


def assert_answers_like_transformers(loaded, folder):
    """The first token after a prompt is the one of transformers."""
    chunk = Chunk(2, 0, np.array(words(0, 20), np.int32), Draw(Sampling(), 0))
    (drawn,) = loaded.runner.begin(StepPlan((chunk,), (RowWrite(2, 0, np.array([7, 3], np.int32)),))).land().drawn
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert list(drawn.tokens) == greedy(model.eval(), words(0, 20), 1)


def test_a_loaded_runner_answers_like_the_model(folder):
    loaded = load_runner(config_of(folder))
    assert loaded.eos == {2, 96}
    assert loaded.vocabulary == VOCABULARY == len(loaded.tokenizer)
    config = loaded.config
    assert (config.served_name, config.device, config.dtype) == ("tiny-llama", "cpu", "float32")
    assert (config.context_length, config.cells, config.threads) == (512, 512, 1)
    assert_answers_like_transformers(loaded, folder)


@pytest.fixture
def only_avx2(monkeypatch):
    """A processor that has AVX2 and nothing above, and afterwards what there is."""
    has = {name: name in ("avx2", "fma3", "bmi", "bmi2", "f16c") for name in torch.cpu.get_capabilities()}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    yield
    monkeypatch.undo()
    native.limit("auto")


@pytest.mark.skipif(not linear.available(), reason="no kernels of our own here")
def test_the_kernels_instructions_are_chosen_and_what_is_not_there_is_refused(folder, only_avx2):
    weight = torch.zeros(64, 64)
    for asked, chosen in (("auto", "avx2"), ("torch", "torch")):
        loaded = load_runner(config_of(folder, cpu_kernels=asked))
        assert loaded.config.cpu_kernels == native.level() == chosen
        product = linear.variant_for(weight)
        assert (product.name if product else "torch") == {"avx2": "reals_avx2", "torch": "torch"}[chosen]
        for kernel in (attention.kernel(chosen, torch.float32), layer.kernel("norm", chosen, torch.float32)):
            assert (kernel is None) == (chosen == "torch")
    assert_refused(folder, "cpu_kernels", "only avx2, torch", cpu_kernels="avx512")


@pytest.mark.parametrize(
    ("kernel", "lost"), [(attention, "attention"), (linear, "products"), (layer, "norms and rotary embedding")]
)
def test_a_library_that_is_missing_is_said_by_what_is_lost(folder, monkeypatch, caplog, request, kernel, lost):
    if native.limit("auto") == "torch":
        pytest.skip("no kernels of our own here")
    monkeypatch.setattr(kernel, "LIBRARY", SimpleNamespace(missing="it is not built"))
    for cached in (attention.kernel, layer.kernel):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    with caplog.at_level(logging.WARNING):
        load_runner(config_of(folder))
    assert [record.getMessage() for record in caplog.records if "by torch" in record.getMessage()] == [
        f"{lost} on the CPU by torch, which is slower: it is not built"
    ]
    assert_refused(folder, "cpu_kernels", lost, cpu_kernels="avx2")


def test_bfloat16_is_loaded_on_request(folder):
    loaded = load_runner(config_of(folder, dtype="bfloat16", served_name="mine"))
    assert loaded.runner.kv.data.dtype == torch.bfloat16
    assert loaded.config.served_name == "mine"


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_kv_in_int8_is_loaded_on_request(folder, decoder):
    loaded = load_runner(config_of(folder, kv_dtype="int8", decoder=decoder))
    assert (loaded.runner.kv.data.dtype, loaded.runner.kv.dtype) == (torch.int8, torch.float32)
    assert_answers_like_transformers(loaded, folder)


def test_shape_is_read_from_the_configuration(folder):
    info = inspect_model(str(folder))
    assert (info.cell.layers, info.cell.kv_heads, info.cell.head_dim) == (2, 2, 8)
    assert (info.shape.context_length, info.shape.checkpoint_dtype, info.shape.cell_values) == (512, "float32", 64)


def test_one_end_id_of_the_configuration_is_read_too(folder):
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=5)
    assert eos_ids(inspect_model(str(folder))) == {5}


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "nowhere"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ConfigError, match="there is no folder") as caught:
        model_folder(name)
    assert caught.value.field == "model"


def test_a_hub_name_that_is_not_cached_is_refused_offline():
    assert_refused("holdfast-tests/never-published", words="holdfast-tests/never-published")


def test_a_cached_hub_name_is_its_snapshot_and_runs_on_our_decoder(folder, tmp_path, monkeypatch):
    commit = "a" * 40
    cached = tmp_path / "hub" / "models--holdfast-tests--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cached / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert model_folder("holdfast-tests/tiny") == cached / "snapshots" / commit
    loaded = load_runner(EngineConfig(model="holdfast-tests/tiny", threads=1, cells=512))
    assert isinstance(loaded.runner.model, Decoder)
    assert loaded.config.served_name == "holdfast-tests/tiny"


def test_a_checkpoints_own_code_is_never_run(folder, tmp_path):
    """Of none of the three that may bring some: configuration, model, tokenizer."""
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    own = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "own.Own")
    edit_config(folder, auto_map=own)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    changed = told | {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    for decoder in ("own", "transformers"):
        with suppress(ConfigError):  # of a kind that transformers knows, its own code is taken
            load_runner(config_of(folder, decoder=decoder))
    edit_config(folder, model_type="own")
    assert_refused(folder)
    assert not ran.exists()


def test_pickled_weights_are_not_read(folder):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Runs()}, folder / "pytorch_model.bin")
    for decoder in ("auto", "transformers"):
        assert_refused(folder, decoder=decoder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rms_norm_eps": "1e-5"}, "expected float"),
        ({"max_position_embeddings": 512.0}, "expected int"),
        ({"layer_types": 5}, "not iterable"),
    ],
    ids=str,
)
def test_a_configuration_of_wrong_types_is_refused(folder, changes, word):
    edit_config(folder, **changes)
    assert_refused(folder, words=word)


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [2.5]}'])
def test_generation_settings_that_say_nothing_of_the_end_are_refused(folder, text):
    (folder / "generation_config.json").write_text(text)
    assert_refused(folder, words="generation_config|eos_token_id")


def test_a_missing_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert_refused(folder, words="tokenizer")


def test_an_encoder_decoder_is_refused(tmp_path):
    tf.T5Config().save_pretrained(tmp_path)
    assert_refused(tmp_path, words="encoder-decoder")


@pytest.mark.parametrize(
    "config",
    [
        tf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1),
        tf.Qwen3NextConfig(num_hidden_layers=4, hidden_act="relu"),
        tf.CodeGenConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64),
    ],
    ids=["no attention", "linear attention", "own attention"],
)
def test_a_model_that_would_answer_wrongly_is_refused(config, tmp_path):
    if config.model_type == "qwen3_next":
        config.save_pretrained(tmp_path)
    else:
        save(config, tmp_path)
    assert "its files lack" not in assert_refused(tmp_path)


def test_a_model_whose_window_does_not_reach_its_attention_serves_contexts_within_it(tmp_path):
    save(tf.PhimoeConfig(**SMALL, sliding_window=20, num_local_experts=2, num_experts_per_tok=1), tmp_path)
    assert_refused(tmp_path, "context_length", "20 or less")
    assert load_runner(config_of(tmp_path, context_length=20)).config.context_length == 20


def test_a_model_with_sinks_is_served(tmp_path):
    """Loading compares it with what transformers computes: sinks of 2 that were left out would show."""
    save(tf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1), tmp_path)
    assert load_runner(config_of(tmp_path)).vocabulary == 97


def test_a_context_beyond_the_models_is_refused(folder):
    assert_refused(folder, "context_length", context_length=1000)


def test_longrope_is_served_up_to_the_original_context(tmp_path):
    # Beyond it a long sequence in a step would change how the positions of the others are turned.
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    save(tf.Phi3Config(**SMALL, original_max_position_embeddings=64, rope_parameters=rope), tmp_path)
    for context in (0, 65):
        assert_refused(tmp_path, "context_length", "64 or less", context_length=context)
    assert load_runner(config_of(tmp_path, context_length=64)).config.context_length == 64


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_yarn_stretches_the_context(folder, kind):
    scaling = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit_config(folder, rope_scaling=scaling, rope_parameters=None, rope_theta=1e4)
    assert inspect_model(str(folder)).shape.context_length == 2048
    assert load_runner(config_of(folder, context_length=2000, admission_ceiling=1.0)).config.context_length == 2000
    edit_config(folder, max_position_embeddings=4096)
    assert inspect_model(str(folder)).shape.context_length == 4096


@pytest.mark.parametrize(
    ("factor", "original", "word"),
    [
        ("4", 512, "rope_parameters.factor is '4'"),
        ([4.0], 512, "rope_parameters.factor"),
        (True, 512, "rope_parameters.factor"),
        (float("inf"), 512, "infinity"),
    ],
)
def test_a_context_stretched_by_what_is_no_number_is_refused(folder, factor, original, word):
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    edit_config(folder, rope_scaling=scaling, rope_parameters=None, rope_theta=1e4)
    with pytest.raises(ConfigError) as caught:
        inspect_model(str(folder))
    assert (caught.value.field, word in caught.value.message) == ("model", True), caught.value.message


@pytest.mark.parametrize("device", ["gpu", "mps", "CPU", "cpu:0", "cuda:1", ""])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(device=device)
    assert caught.value.field == "device"


@pytest.mark.parametrize(("name", "value"), [("host_cells", 15), ("host_memory", 1e-7)])
def test_a_second_tier_that_cannot_be_is_refused(folder, name, value):
    assert_refused(folder, name, **{name: value})
    with pytest.raises(ConfigError, match="prefix_cache") as caught:
        config_of(folder, without=("prefix_cache",), **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, {}),
        ("{", {}),
        ("[1]", {}),
        ('{"do_sample": false, "eos_token_id": [2]}', {}),
        ('{"temperature": 0.6, "top_k": 20, "top_p": 0.95}', {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ('{"temperature": 9, "top_k": true, "min_p": "x", "repetition_penalty": 1}', {"repetition_penalty": 1.0}),
    ],
)
def test_what_a_checkpoint_says_of_sampling_as_far_as_the_api_takes_it(text, found, tmp_path):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert sampling_defaults(str(tmp_path)) == found


def test_a_file_takes_the_place_of_the_chat_template(folder, tmp_path):
    file = tmp_path / "other.jinja"
    file.write_text("{{ raise_exception('refused') }}")
    assert load_tokenizer(inspect_model(str(folder)), str(file)).chat_template == file.read_text()


@pytest.mark.parametrize("content", [None, b"\xff", b"{% for m in messages %}", b"{% nothing %}"])
def test_a_file_that_is_no_chat_template_is_refused(folder, tmp_path, content):
    file = tmp_path / "other.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.jinja") as refused:
        load_tokenizer(inspect_model(str(folder)), str(file))
    assert refused.value.field == "chat_template"
