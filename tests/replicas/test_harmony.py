"""gpt-oss' format through the whole engine: a model that was never trained, with the special tokens and a template."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_templates import HARMONY
from jsonschema import Draft202012Validator

from holdfast.loadgen.bench.calls import is_whole, random_model
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest, JsonOutput
from holdfast.replicas.service import Service

MARKS = [f"<|{word}|>" for word in ("start", "end", "message", "channel", "constrain", "return", "call")]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
# A model that was never trained ends no string: these have an end.
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}}, "required": ["days"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": DAYS}} for name in ("get_weather", "f")]
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    random_model(folder, 1536)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.eos_token, tokenizer.chat_template = "<|return|>", HARMONY
    tokenizer.save_pretrained(folder)
    return folder


@asynccontextmanager
async def serving(model: Path) -> Any:
    service = Service.load(EngineConfig(model=str(model), cells=8192, threads=1))
    try:
        yield service
    finally:
        await service.close()


async def test_whatever_is_drawn_calls_and_json_are_whole_and_nothing_is_markup(model: Path) -> None:
    prompts = {
        "required": ChatPrompt(ASK, TOOLS, "required"),
        "auto": ChatPrompt(ASK, TOOLS),
        "json": ChatPrompt(ASK, output=JsonOutput(SCHEMA, strict=True)),
        "plain": ChatPrompt(ASK),
    }
    async with serving(model) as service:
        requests = [
            GenerateRequest(f"{kind}.{seed}", prompt, Sampling(96, temperature=float(seed > 0), seed=seed))
            for kind, prompt in prompts.items()
            for seed in range(10)
        ]
        answers = await asyncio.gather(*map(service.generate, requests))
        called = 0
        for request, answer in zip(requests, answers, strict=True):
            assert isinstance(answer, Answer), answer
            kind = request.request_id.partition(".")[0]
            for call in answer.tool_calls:
                assert not call.closed or is_whole(call.name, call.arguments, TOOLS)
            called += answer.reason == "tool_calls"
            if kind == "required":
                assert not answer.text
                assert (answer.reason == "length") is not bool(answer.tool_calls and answer.tool_calls[-1].closed)
            if kind == "json" and answer.reason == "stop":
                Draft202012Validator(SCHEMA).validate(json.loads(answer.text))
        assert called
        call = next(each for answer in answers for each in answer.tool_calls if each.closed)
        function = {"name": call.name, "arguments": call.arguments}
        turn = {
            "role": "assistant",
            "reasoning_content": "Ask.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": call.call_id, "content": "21"}
        going_on = replace(prompts["auto"], messages=[*ASK, turn, result])
        reply = await service.generate(GenerateRequest("next", going_on, Sampling(8)))
        assert isinstance(reply, Answer)
