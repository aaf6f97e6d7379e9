"""The shipped model, through plain transformers."""

from typing import Any

import pytest
import torch
from program_load import TOOL
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.loadgen.inflate import WEIGHTS
from pocket.evaluate import answers, judge, parse_calls, tasks


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
        messages, tools=[TOOL], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert parse_calls(text) == [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    assert out[-1] == tokenizer.eos_token_id


def test_held_out_calls_are_mostly_right(model: Any, tokenizer: Any) -> None:
    suite = tasks("single", 16, seed=5)
    outcomes = [judge(*pair) for pair in zip(suite, answers(model, tokenizer, suite), strict=True)]
    assert sum(outcome.named for outcome in outcomes) >= 11
    assert sum(outcome.exact for outcome in outcomes) >= 6
