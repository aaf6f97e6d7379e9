"""Steps in a thread of their own: in order, with tokens of the step before, and whatever they raise where they land."""

import asyncio
import threading

import numpy as np
import pytest
from engine_world import words
from fake_runner import EOS, VOCABULARY, FakeRunner, complete

from holdfast.replicas.bridge import Bridge
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.engine import Engine
from holdfast.replicas.events import Draw, Finished, Sampling, Submit, Tokens
from holdfast.replicas.model.runner import Beside
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, RawPrompt
from holdfast.replicas.scheduling.plan import Chunk, RowWrite, StepPlan
from holdfast.replicas.service import Service

PLAIN = DraftConfig(enabled=False)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Gated(FakeRunner):
    """Every step waits for the gate."""

    def __init__(self) -> None:
        super().__init__(8, 4, 2)
        self.gate = threading.Event()

    def run(self, plan):
        assert self.gate.wait(30)
        return super().run(plan)


def chunk(start: int, tokens: list[int], follows: int | None = None) -> Chunk:
    return Chunk(0, start, np.array(tokens, np.int32), Draw(Sampling(), 0), follows)


def test_the_next_step_begins_before_this_one_is_over_and_takes_its_token():
    runner = Gated()
    beside = Beside(runner)
    row = RowWrite(0, 0, np.arange(4, dtype=np.int32))
    first = beside.begin(StepPlan((chunk(0, [5, 6, 7]),), (row,)))
    second = beside.begin(StepPlan((chunk(3, [0], follows=0),)))
    assert runner.plans == []
    runner.gate.set()
    (one,), (two,) = first.land().drawn, second.land().drawn
    assert [*one.tokens, *two.tokens] == complete([5, 6, 7], 2, frozenset())
    runner.fail = lambda plan: len(runner.plans) == 3
    third = beside.begin(StepPlan((chunk(4, [0], follows=0),)))
    fourth = beside.begin(StepPlan((Chunk(1, 0, np.array([0], np.int32), None, 0),), (RowWrite(1, 0, row.pages + 4),)))
    with pytest.raises(RuntimeError, match="injected"):
        third.land()
    assert fourth.land().drawn == (None,)


def test_many_requests_over_a_bridge_with_steps_in_a_thread():
    config = EngineConfig(
        cells=2048, page_size=4, max_sequences=8, session_rows=0, context_length=512, speculation=PLAIN,
        overlap_steps="on",
    )  # fmt: skip

    async def main():
        engine = Engine(config, Beside(FakeRunner(512, 4, 8)), frozenset({EOS}), VOCABULARY)
        bridge = Bridge(engine)

        async def asked(i: int, leaves: bool):
            prompt = words(i, 12)
            tokens = []
            async for events in bridge.run(Submit(f"{i}", np.asarray(prompt, np.int32), Sampling(20))):
                for event in events:
                    tokens += event.tokens if isinstance(event, Tokens) else ()
                if leaves:
                    bridge.stop(f"{i}")
            assert isinstance(events[-1], Finished)
            assert events[-1].usage.completion == len(tokens)
            right = complete(prompt, 20)
            assert tokens == (right[: len(tokens)] if leaves else right)

        await asyncio.gather(*(asked(i, leaves=i % 3 == 0) for i in range(40)))
        await bridge.close()
        assert engine.occupancy().cells_held == 0

    asyncio.run(main())


def requests() -> list[GenerateRequest]:
    weather = ChatPrompt([{"role": "user", "content": "What is the weather in Paris?"}], tools=[TOOL])
    sampled = Sampling(max_tokens=24, temperature=1.2, ignore_eos=True)
    return [
        GenerateRequest("call", weather, Sampling(max_tokens=60), ()),
        GenerateRequest("stop", RawPrompt("The list: 1, 2, 3, 4,"), Sampling(max_tokens=30, ignore_eos=True), (" ",)),
        *(GenerateRequest(f"{i}", RawPrompt(f"Story {i}"), sampled, ()) for i in range(4)),
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_replies_calls_and_stops_are_the_same_with_overlapped_steps(drafts):
    async def replies(overlap):
        config = EngineConfig(cells=8192, threads=1, overlap_steps=overlap, speculation=DraftConfig(enabled=drafts))
        service = Service.load(config)
        try:
            found = await asyncio.gather(*(service.generate(each) for each in requests()))
            assert service.engine.occupancy().cells_held == 0
        finally:
            await service.close()
        return [(reply.text, reply.reason, [call.arguments for call in reply.tool_calls]) for reply in found]

    plain, late = (asyncio.run(replies(overlap)) for overlap in ("off", "on"))
    assert late == plain
    assert plain[0][2]
