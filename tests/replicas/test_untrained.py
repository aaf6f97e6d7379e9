"""Formats that the shipped model does not write, through the whole engine.

A model that was never trained draws them, with the special tokens and the template of the family.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from chat_templates import HARMONY, TEMPLATES
from jsonschema import Draft202012Validator
from serving import serving

from holdfast.loadgen.bench.calls import is_whole, random_model
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest, JsonOutput

MARKS = [f"<|{word}|>" for word in ("start", "end", "message", "channel", "constrain", "return", "call")]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
# A model that was never trained ends no string: these have an end.
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}}, "required": ["days"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": DAYS}} for name in ("get_weather", "f")]
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
BUDGET = 6


def untrained(folder: Path, marks: list[str], template: str, end: str = "") -> EngineConfig:
    random_model(folder, 1536)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in marks if mark.startswith("<|")]})
    tokenizer.add_tokens([mark for mark in marks if not mark.startswith("<|")])
    tokenizer.eos_token, tokenizer.chat_template = end or tokenizer.eos_token, template
    tokenizer.save_pretrained(folder)
    return EngineConfig(model=str(folder), cells=8192, threads=1)


async def test_whatever_harmony_draws_calls_and_json_are_whole_and_nothing_is_markup(tmp_path: Path) -> None:
    prompts = {
        "required": ChatPrompt(ASK, TOOLS, "required"),
        "auto": ChatPrompt(ASK, TOOLS),
        "json": ChatPrompt(ASK, output=JsonOutput(SCHEMA, strict=True)),
        "plain": ChatPrompt(ASK),
    }
    async with serving(untrained(tmp_path / "model", MARKS, HARMONY, "<|return|>")) as service:
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


async def test_a_reply_thinks_as_long_as_it_may_and_goes_on(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    prompts = [
        ChatPrompt(ASK, thinking_budget=BUDGET),
        ChatPrompt(ASK, [tool], thinking_budget=BUDGET),
        ChatPrompt(ASK, [tool], "required", thinking_budget=BUDGET),
        ChatPrompt(ASK, thinking_budget=0),
        ChatPrompt(ASK),
    ]
    requests = [
        GenerateRequest(f"{number}.{seed}", prompt, Sampling(48, temperature=1.0, seed=seed))
        for number, prompt in enumerate(prompts)
        for seed in range(3)
    ]
    async with serving(untrained(tmp_path, ["<think>", "</think>"], TEMPLATES["Qwen 3.8"][1])) as service:
        answers = await asyncio.gather(*map(service.generate, requests))
    assert all(isinstance(answer, Answer) for answer in answers)
    thought = [answer.usage.reasoning for answer in answers]
    assert thought[:9] == [BUDGET + 1] * 9, "and the token that ends the block"
    assert thought[9:12] == [1] * 3
    assert all(tokens > BUDGET + 1 for tokens in thought[12:])
    assert all(answer.text for answer in answers[:3])
    assert all(answer.tool_calls for answer in answers[6:9])
