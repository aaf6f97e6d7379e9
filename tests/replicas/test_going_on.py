"""A reply that one replica has begun and another one ends: together they say what one alone says."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    ChatPrompt,
    GenerateRequest,
    JsonOutput,
    PartialReply,
    Piece,
    RawPrompt,
    ReplyTokens,
)
from holdfast.replicas.service import Service

CONFIG = EngineConfig(cells=4096, threads=1)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}]
ASKED = ChatPrompt([{"role": "user", "content": "What is the weather in Paris, and in Rome?"}], TOOLS)
TOLD = RawPrompt("The weather in Paris is")

CASES: dict[str, GenerateRequest] = {
    "greedy": GenerateRequest("a", TOLD, Sampling(max_tokens=40, ignore_eos=True)),
    "noise of the prompt": GenerateRequest("a", TOLD, Sampling(max_tokens=40, temperature=1.0, ignore_eos=True)),
    "seed": GenerateRequest("a", TOLD, Sampling(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)),
    "penalties": GenerateRequest(
        "a", TOLD, Sampling(max_tokens=40, frequency_penalty=1.0, presence_penalty=0.5, ignore_eos=True)
    ),
    "least": GenerateRequest("a", TOLD, Sampling(max_tokens=40, min_tokens=30, temperature=1.0)),
    "stop": GenerateRequest("a", TOLD, Sampling(max_tokens=60, temperature=1.0, ignore_eos=True), ("e",)),
    "logprobs": GenerateRequest("a", TOLD, Sampling(max_tokens=24, logprobs=2, temperature=1.0, ignore_eos=True)),
    "echo": GenerateRequest("a", replace(TOLD, echo=True), Sampling(max_tokens=16, ignore_eos=True)),
    "calls": GenerateRequest("a", ASKED, Sampling(max_tokens=80)),
    "required": GenerateRequest("a", replace(ASKED, tool_choice="required"), Sampling(max_tokens=80)),
    "form": GenerateRequest("a", replace(ASKED, tools=(), output=JsonOutput(CITY, True)), Sampling(max_tokens=60)),
}

Told = list[tuple[tuple[Piece, ...], ReplyTokens]]


async def told(service: Service, request: GenerateRequest) -> Told:
    """Each batch of pieces, with what was drawn since the one before."""
    drawing = PartialReply(request.drawn)
    return [(pieces, drawing.take()) async for pieces in service.stream(request, drawing)]


def said(batches: Told) -> Answer:
    built = AnswerBuilder()
    for pieces, _ in batches:
        built.add(pieces)
    answer = built.answer()
    assert answer is not None, built.terminal
    return answer


def alike(answer: Answer) -> object:
    """What has to be equal: all but ids that are drawn by chance, how long it took, and bits of log probabilities."""
    calls = [(call.name, call.arguments, call.closed) for call in answer.tool_calls]
    logprobs = [(each.token, pytest.approx(each.logprob, abs=1e-3)) for each in answer.logprobs]
    usage = replace(answer.usage, cached=0)
    return answer.text, calls, logprobs, answer.reason, usage, answer.stop, answer.called


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[bool, GenerateRequest], None]]:
    """`cut` over two services, whose noise comes from the prompt or from chance."""
    with asyncio.Runner() as runner:
        pairs = {seeded: [runner.run(loaded(seeded)) for _ in range(2)] for seeded in (True, False)}
        yield lambda seeded, asked: runner.run(cut(*pairs[seeded], asked))
        for service in (*pairs[True], *pairs[False]):
            runner.run(service.close())


async def loaded(prompt_seed: bool) -> Service:
    return Service.load(replace(CONFIG, prompt_seed=prompt_seed))


async def cut(here: Service, there: Service, request: GenerateRequest) -> None:
    whole = await told(here, request)
    assert len(whole) > 1
    every, drawing = 1 + len(whole) // 8, PartialReply()
    for at in range(1, len(whole)):
        drawing.merge(whole[at - 1][1])
        if at % every and at < len(whole) - 1:  # the last one: all but the end has come
            continue
        rest = await told(there, replace(request, request_id=f"cut {at}", drawn=drawing.whole))
        assert alike(said(whole[:at] + rest)) == alike(said(whole)), at


BY_CHANCE = ("noise of the prompt", "logprobs", "calls")  # where noise does not come from the prompt


@pytest.mark.parametrize(
    ("seeded", "name"), [*((True, name) for name in CASES), *((False, name) for name in BY_CHANCE)]
)
def test_a_reply_goes_on_wherever_it_was_cut(
    run: Callable[[bool, GenerateRequest], None], seeded: bool, name: str
) -> None:
    run(seeded, CASES[name])
