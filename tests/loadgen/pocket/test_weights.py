"""The shipped model, through plain transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.loadgen.pocket.evaluate import answers, judge, parse_calls, tasks
from holdfast.loadgen.pocket.inflate import inflate
from holdfast.loadgen.pocket.tokenizer import WEIGHTS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City name"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(WEIGHTS)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


def test_the_model_is_small_enough(model: Any) -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 16 << 20
    assert model.num_parameters() <= 8_000_000
    assert model.config.max_position_embeddings >= 8192
    assert model.config.model_type == "llama"


def test_weather_in_paris(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    inputs = tokenizer.apply_chat_template(
        messages, tools=[WEATHER], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert parse_calls(text) == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    assert out[-1] == tokenizer.eos_token_id


def test_small_talk_is_text(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tools=[WEATHER], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "Hello! How can I help you?"


def test_held_out_calls_are_mostly_right(model: Any, tokenizer: Any) -> None:
    found = tasks("single", 16, seed=5)
    outcomes = [judge(*pair) for pair in zip(found, answers(model, tokenizer, found), strict=True)]
    assert sum(outcome.named for outcome in outcomes) >= 11
    assert sum(outcome.exact for outcome in outcomes) >= 6


def test_inflated_weights_say_the_same(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    shape = {
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    folder = inflate("pocket", str(tmp_path), tmp_path / "out", dtype=torch.float32, pad_vocabulary=True)
    large = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for task in tasks("single", 6, seed=8):
        prompt = tokenizer.apply_chat_template(
            list(task.messages), tools=list(task.tools), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            own, padded = model(input_ids=ids).logits, large(input_ids=ids).logits
        assert torch.equal(padded.argmax(-1), own.argmax(-1))  # added vocabulary rows never win
        assert torch.allclose(padded[..., : own.shape[-1]], own, atol=1e-3, rtol=0)
