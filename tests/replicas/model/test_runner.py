"""What a failed step leaves behind, the order of effects, timing; and steps in a thread, begun one ahead."""

import asyncio
import json
import shutil
import threading

import numpy as np
import pytest
import torch
from engine_world import words
from tiny_decoder import TinyEngine

from holdfast.replicas.bridge import Bridge
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.kv.pages import PageCopy
from holdfast.replicas.model.folder import model_folder
from holdfast.replicas.model.startup import load_runner
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan
from holdfast.replicas.requests import ChatPrompt, Finished, GenerateRequest, RawPrompt, Stop, Submit, Tokens
from holdfast.replicas.service import Service


def test_a_failed_step_leaves_the_runner_usable(tiny):
    prompt = tiny.prompt(20)
    loop = tiny.Loop("llama")
    stream = loop.stream(prompt)
    loop.step([stream])
    outside = Chunk(stream.row, 600, np.array([1], dtype=np.int32))
    foreign = RowWrite(3, 0, np.array([10**6], dtype=np.int32))
    unknown = Chunk(stream.row, 20, np.array([10**6], dtype=np.int32))
    for plan in (StepPlan((outside,)), StepPlan((), (foreign,)), StepPlan((unknown,))):
        with pytest.raises(EngineError, match="failed"):
            loop.runner.begin(plan).land()
    for _ in range(11):
        loop.step([stream])
    assert tuple(stream.tokens[20:]) == tiny.reference("llama", prompt, 12)


def test_a_model_that_fails_half_way_leaves_the_runner_usable(tiny, monkeypatch):
    prompt = tiny.prompt(20)
    loop = tiny.Loop("llama")
    stream = loop.stream(prompt)
    loop.step([stream])
    computed, tokens = stream.computed, list(stream.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(type(tiny.model("llama").lm_head), "forward", _fail)
        with pytest.raises(EngineError, match="no memory"):
            loop.step([stream])
    assert (stream.computed, stream.tokens) == (computed, tokens)
    for _ in range(11):
        loop.step([stream])
    assert tuple(stream.tokens[20:]) == tiny.reference("llama", prompt, 12)


def _fail(*_):
    raise RuntimeError("no memory")


def test_copies_come_before_the_forward_and_work_alone(tiny):
    loop = tiny.Loop("llama")
    donor = loop.stream(tiny.prompt(16))
    loop.step([donor])
    page, target = donor.pages[0], loop.free[0]
    output = loop.runner.begin(StepPlan((), copies=(PageCopy(page, target, 16),))).land()
    assert output.drawn == ()
    assert (loop.kv.data[:, :, target] == loop.kv.data[:, :, page]).all()


def test_seconds_are_measured_and_chunks_that_draw_nothing_say_so(tiny):
    loop = tiny.Loop("llama")
    row = RowWrite(0, 0, np.array(loop.free[:1], dtype=np.int32))
    output = loop.runner.begin(StepPlan((Chunk(0, 0, np.array([1, 2], dtype=np.int32)),), (row,))).land()
    assert output.drawn == (None,)
    assert output.forward_s > 0
    assert output.sample_s >= 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sampled_tokens_do_not_depend_on_batch_chunks_or_drafts(tiny, family):
    sampling = Sampling(temperature=0.9, top_p=0.95)
    prompt = tiny.prompt(33)
    settings = {"sampling": sampling, "seed": 77}
    alone = tiny.Loop(family).generate(prompt, 16, **settings)
    assert len(set(alone)) > 4
    loop = tiny.Loop(family, page_size=1)
    stream = loop.stream(prompt, chunk=5, **settings)
    other = loop.stream(tiny.prompt(4, seed=9), sampling=Sampling(temperature=2.0))
    while (done := len(stream.tokens) - len(prompt)) < 16:
        drafts = alone[done : done + 2] if stream.computed >= len(prompt) else ()
        loop.step([other, stream], {stream.row: drafts})
    assert tuple(stream.tokens[len(prompt) :][:16]) == alone


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


async def test_many_requests_over_a_bridge_with_steps_in_a_thread():
    prompts = [np.asarray(words(i, 12), np.int32) for i in range(40)]
    submits = [Submit(f"{i}", tokens=prompt, sampling=Sampling(20)) for i, prompt in enumerate(prompts)]
    right = TinyEngine("plain", max_sequences=8).answers(submits)
    engine = TinyEngine("plain", "on", max_sequences=8).engine
    bridge = Bridge(engine)

    async def asked(submit: Submit, leaves: bool):
        name, tokens = submit.request_id, ()
        async for events in bridge.run(submit):
            for event in events:
                tokens += event.tokens if isinstance(event, Tokens) else ()
            if leaves:
                bridge.thread.send(Stop(name))
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion == len(tokens)
        assert tokens == (right[name][: len(tokens)] if leaves else right[name])

    await asyncio.gather(*(asked(submit, leaves=i % 3 == 0) for i, submit in enumerate(submits)))
    await bridge.close()
    assert engine.occupancy().cells_held == 0


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
