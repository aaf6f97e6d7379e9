"""`holdfast convert`: Pocket from a GGUF file says what Pocket says; other files are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.cluster import cli, convert, doctor, model_files
from holdfast.cluster.config import Settings
from holdfast.cluster.doctor import State
from holdfast.loadgen.inflate import WEIGHTS
from holdfast.loadgen.inflate.gguf_file import write_gguf
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.model.description import inspect_model
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.model.weights import eos_ids, load_tokenizer
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Submit, Tokens

pytest.importorskip("gguf")
TEXTS = (
    "What is the weather in Paris?",
    '<|im_start|>user\nAdd 12345 and 67.<|im_end|>\n<tool_call>\n{"name": "add", "arguments": {"a": [1, 2], "b": ""}}',
    "é🙂 a_b\n\n  x",
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(WEIGHTS, tmp_path_factory.mktemp("file") / "pocket.gguf")


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("accelerate")
    out = tmp_path_factory.mktemp("converted") / "model"
    assert convert.convert(file, out) == []
    return out


def test_the_folder_can_be_served(folder: Path) -> None:
    settings = Settings(engine=EngineConfig(model=str(folder)))
    assert model_files.model_folder(str(folder)) == folder
    assert model_files.own_template(folder)
    assert [found.state for found in doctor.model(settings)] == [State.OK]
    assert (folder / "chat_template.jinja").read_text() == (WEIGHTS / "chat_template.jinja").read_text()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert eos_ids(inspect_model(str(folder))) == {load_tokenizer(inspect_model("pocket")).eos_token_id}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_it_generates_what_pocket_generates(folder: Path) -> None:
    replies = []
    for model in ("pocket", str(folder)):
        loaded = load_runner(EngineConfig(model=model, cells=4096, threads=1))
        prompts = [loaded.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        replies.append([(prompt, greedy(loaded, prompt)) for prompt in prompts])
    assert replies[0] == replies[1]


def greedy(loaded: LoadedRunner, prompt: list[int]) -> list[int]:
    """32 tokens, or as many as there are before the end."""
    engine = Engine(loaded.config, loaded.runner, loaded.eos, loaded.vocabulary)
    assert not engine.handle(Submit("r", tokens=np.asarray(prompt, np.int32), sampling=Sampling(32)), 0.0)
    drawn: list[int] = []
    while engine.busy:
        for event in engine.step(0.0):
            if isinstance(event, Tokens):
                drawn += event.tokens
    return drawn


def test_words_are_cut_as_the_file_says() -> None:
    from tokenizers import Tokenizer, models

    class Wrapped:
        backend_tokenizer: Any = Tokenizer(models.BPE())

    def cut(rule: str, text: str) -> list[str]:
        assert convert._cut(Wrapped, rule)
        return [word for word, _ in Wrapped.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    assert cut("smollm", "in 1234") == ["in", "Ġ", "1", "2", "3", "4"]
    assert cut("superbpe", "in 1234, b") == ["inĠ", "1", "234", ",Ġb"]
    assert cut("qwen2", "a")
    assert not convert._cut(Wrapped, "unheard-of")


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:5000])
    for source in (cut, tmp_path / "no.gguf", WEIGHTS / "config.json"):
        assert cli.main(["convert", str(source), str(tmp_path / "out")]) == cli.MISUSE
        assert str(source) in capsys.readouterr().err
    assert cli.main(["convert", str(file), str(tmp_path)]) == cli.MISUSE
    assert "exists" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [cut]


def test_a_gguf_file_is_named_with_the_command_that_makes_a_folder_of_it(tmp_path: Path, file: Path) -> None:
    only, beside = tmp_path / "only", tmp_path / "beside"
    for folder in (only, beside):
        folder.mkdir()
        shutil.copy(file, folder / "model.gguf")
    (beside / "config.json").write_text("{}")
    for name, source in ((file, file), (only, only / "model.gguf"), (beside, beside / "model.gguf")):
        assert f"holdfast convert {source} FOLDER" in refused(name)


def test_a_weights_file_is_named_with_its_folder(tmp_path: Path) -> None:
    shutil.copy(WEIGHTS / "model.safetensors", tmp_path)
    assert "A model is a folder with config.json" in refused(tmp_path / "model.safetensors")
    shutil.copy(WEIGHTS / "config.json", tmp_path)
    assert f"Serve its folder: {tmp_path}" in refused(tmp_path / "model.safetensors")


def test_doctor_does_not_take_a_file_for_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    (found,) = doctor.model(Settings(engine=EngineConfig(model="models/x.gguf")))
    assert "holdfast convert models/x.gguf FOLDER" in found.found
    assert "hf download" not in found.mend


def refused(model: Path) -> str:
    """What `serve` and `doctor` say of the model."""
    with pytest.raises(ConfigError) as caught:
        model_files.model_folder(str(model))
    (found,) = doctor.model(Settings(engine=EngineConfig(model=str(model))))
    assert (found.state, found.found) == (State.FAIL, caught.value.message)
    return found.found
