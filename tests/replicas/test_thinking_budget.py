"""A budget of thinking through the whole engine, with a model that was never trained and thinks without end."""

import asyncio
from pathlib import Path

import transformers
from chat_templates import TEMPLATES

from holdfast.loadgen.bench.calls import random_model
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest
from holdfast.replicas.service import Service

BUDGET = 6


def test_a_reply_thinks_as_long_as_it_may_and_goes_on(tmp_path: Path) -> None:
    random_model(tmp_path, 1536)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATES["Qwen 3.8"][1]
    tokenizer.save_pretrained(tmp_path)
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    prompts = [
        ChatPrompt(ask, thinking_budget=BUDGET),
        ChatPrompt(ask, [tool], thinking_budget=BUDGET),
        ChatPrompt(ask, [tool], "required", thinking_budget=BUDGET),
        ChatPrompt(ask, thinking_budget=0),
        ChatPrompt(ask),
    ]

    async def main() -> list[Answer]:
        service = Service.load(EngineConfig(model=str(tmp_path), cells=4096, threads=1))
        try:
            requests = [
                GenerateRequest(f"{number}.{seed}", prompt, Sampling(48, temperature=1.0, seed=seed))
                for number, prompt in enumerate(prompts)
                for seed in range(3)
            ]
            return [
                answer
                for answer in await asyncio.gather(*map(service.generate, requests))
                if isinstance(answer, Answer)
            ]
        finally:
            await service.close()

    answers = asyncio.run(main())
    assert len(answers) == 3 * len(prompts)
    thought = [answer.usage.reasoning for answer in answers]
    assert thought[:9] == [BUDGET + 1] * 9, "and the token that ends the block"
    assert thought[9:12] == [1] * 3
    assert all(tokens > BUDGET + 1 for tokens in thought[12:])
    assert all(answer.text for answer in answers[:3])
    assert all(answer.tool_calls for answer in answers[6:9])
