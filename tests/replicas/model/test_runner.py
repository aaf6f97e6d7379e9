"""What a failed step leaves behind, the order of effects, timing; and steps in a thread, begun one ahead."""

import asyncio
import json
import shutil
import threading

import numpy as np
import pytest
import torch
from tiny_decoder import TinyEngine

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, RawPrompt, Submit
from holdfast.replicas.service import Service

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chunk(start: int, tokens: list[int], follows: int | None = None) -> Chunk:
    return Chunk(0, start, np.array(tokens, np.int32), Draw(Sampling(), 0), follows)


def test_the_next_step_begins_before_this_one_is_over_and_takes_its_token(monkeypatch):
    tiny, gate, forwards = TinyEngine("plain", "on"), threading.Event(), []
    runner, forward = tiny.runner, tiny.runner.model.forward

    def gated(batch):
        assert gate.wait(60)
        forwards.append(batch)
        if len(forwards) == 3:
            raise RuntimeError("no memory")
        return forward(batch)

    monkeypatch.setattr(type(runner.model), "forward", lambda self, batch: gated(batch))
    row = RowWrite(0, 0, np.arange(4, dtype=np.int32))
    first = runner.begin(StepPlan((chunk(0, [5, 6, 7]),), (row,)))
    second = runner.begin(StepPlan((chunk(3, [0], follows=0),)))
    assert forwards == []
    gate.set()
    (one,), (two,) = first.land().drawn, second.land().drawn
    third = runner.begin(StepPlan((chunk(4, [0], follows=0),)))
    fourth = runner.begin(StepPlan((Chunk(1, 0, np.array([0], np.int32), None, 0),), (RowWrite(1, 0, row.pages + 4),)))
    with pytest.raises(EngineError, match="no memory"):
        third.land()
    assert fourth.land().drawn == (None,)
    alone = Submit("r", tokens=np.array([5, 6, 7], np.int32), sampling=Sampling(2))
    (answer,) = TinyEngine("plain").answers([alone]).values()
    assert (*one.tokens, *two.tokens) == answer


def requests() -> list[GenerateRequest]:
    weather = ChatPrompt([{"role": "user", "content": "What is the weather in Paris?"}], tools=[TOOL])
    sampled = Sampling(max_tokens=24, temperature=1.2, ignore_eos=True)
    return [
        GenerateRequest("call", weather, Sampling(max_tokens=60), ()),
        GenerateRequest("stop", RawPrompt("The list: 1, 2, 3, 4,"), Sampling(max_tokens=30, ignore_eos=True), (" ",)),
        *(GenerateRequest(f"{i}", RawPrompt(f"Story {i}"), sampled, ()) for i in range(4)),
    ]


def test_replies_calls_and_stops_are_the_same_with_overlapped_steps():
    async def replies(overlap):
        config = EngineConfig(cells=8192, threads=1, overlap_steps=overlap)
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


def test_int8_is_of_all_products_and_of_nothing_else():
    loaded = load_runner(EngineConfig(dtype="int8", device="cpu", cells=256, speculation=DraftConfig(enabled=False)))
    assert loaded.config.dtype == "int8"
    assert loaded.runner.kv.data.dtype == torch.float32
    assert all(matrix.plain is None for matrix in loaded.runner.model.matrices)


@pytest.mark.parametrize("why", ["is set to transformers", "does not know this model"])
def test_int8_is_refused_by_name_where_transformers_would_compute(why, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder("pocket"), folder)
    told = json.loads((folder / "config.json").read_text())
    if "know" in why:
        (folder / "config.json").write_text(json.dumps(told | {"hidden_act": "gelu"}))
    decoder = "auto" if "know" in why else "transformers"
    with pytest.raises(ConfigError, match=why) as raised:
        load_runner(EngineConfig(model=str(folder), dtype="int8", device="cpu", decoder=decoder, cells=256))
    assert raised.value.field == "dtype"


def test_where_a_gpu_is_asked_for_and_none_works_the_load_fails(monkeypatch):
    """An engine that went on with the CPU would serve, and slowly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU") as caught:
        load_runner(EngineConfig(device="cuda"))
    assert caught.value.field == "device"
