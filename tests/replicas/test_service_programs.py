"""Text and engine together: the engine learns which tools a reply called, and keeps or drops the cells."""

from dataclasses import replace

import pytest
from pinning import KEEP
from serving import serving, tool

from holdfast.loadgen.simulator.policies import RETENTION
from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, ProgramEnded, RawPrompt, ToolLatencies
from holdfast.replicas.retention.latency import Called, LatencySnapshot, ToolLatency
from holdfast.replicas.service import Service

TOOL = tool("get_weather", "Get the current weather in a city.", city={"type": "string"})
HELLO = [{"role": "user", "content": "Hello"}]
ASKS = [{"role": "user", "content": "What is the weather in Oslo?"}]


def keeping(policy: str = KEEP):
    return serving(EngineConfig(cells=8192, threads=1, retention=RetentionConfig(policy, most_s=600.0)))


def turn(name: str, *, forced: bool, ends: bool = False, most: int = 60) -> GenerateRequest:
    """A turn that must call the tool, or has none."""
    prompt = ChatPrompt(ASKS, (TOOL,), "required", forced_tool="get_weather") if forced else ChatPrompt(HELLO)
    return GenerateRequest(name, prompt, Sampling(most), program_id="p", program_end=ends)


async def settled(service: Service) -> tuple[int, int]:
    """Pins now and in total. A further request makes sure that the engine has read all earlier commands."""
    await service.generate(GenerateRequest("behind", RawPrompt([5, 6]), Sampling(1)))
    now = service.engine.occupancy()
    return now.pins, service.engine.stats.pins


async def test_cells_of_a_tool_call_are_kept_until_the_program_ends():
    async with keeping() as service:
        answer = await service.generate(turn("a", forced=True))
        assert answer.called == Called(("get_weather",))
        assert await settled(service) == (1, 1)
        service.notice(ProgramEnded("", "p"))
        assert await settled(service) == (0, 1)


async def test_an_unclosed_call_and_a_truncated_reply_are_neither_a_call_nor_a_last_turn():
    async with keeping() as service:
        prompt = ChatPrompt(ASKS, (TOOL,), "required")
        answer = await service.generate(GenerateRequest("a", prompt, Sampling(60), ("city",), program_id="p"))
        assert ([call.name for call in answer.tool_calls], answer.reason) == (["get_weather"], "stop")
        truncated = await service.generate(turn("b", forced=False, most=1))
        assert truncated.reason == "length"
        assert answer.called == truncated.called == Called()


@pytest.mark.parametrize(("forced", "ends"), [(False, False), (True, True)])
async def test_a_last_turn_is_not_kept(forced, ends):
    async with keeping() as service:
        answer = await service.generate(turn("a", forced=forced, ends=ends, most=200))
        assert answer.reason != "length"
        assert answer.called.last
        assert await settled(service) == (0, 0)


async def test_the_engine_learns_how_many_turns_an_answer_took():
    async with keeping() as service:
        last = replace(turn("a", forced=False, ends=True), program_turns=7, answered_turns=5)
        await service.generate(last)
        await settled(service)
        assert service.engine._load.turns.mean == 3.0


async def test_the_engine_decides_by_what_the_cluster_knows():
    async with keeping(RETENTION["fixed"]) as service:
        slow = ToolLatency(5, 9999.0)
        service.notice(ToolLatencies(LatencySnapshot(slow, {("", "get_weather"): slow})))
        await service.generate(turn("a", forced=True))
        assert await settled(service) == (0, 0)
