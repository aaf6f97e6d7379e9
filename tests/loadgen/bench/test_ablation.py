"""The ablation benchmark: its workload, its figures, and one small run of it."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from holdfast.loadgen.bench.__main__ import main
from holdfast.loadgen.bench.ablation import Samples, alternate, compared
from holdfast.loadgen.bench.workload import SCENARIOS, Scenario, rounds
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.requests import Answer, GenerateRequest, Timing, Usage
from holdfast.replicas.service import Service


def test_each_prompt_goes_on_from_the_one_before_and_rounds_repeat_nothing() -> None:
    scenario = Scenario("s", lanes=2, turns=4, rounds=2)
    lanes = [lane for each in rounds(scenario) for lane in each.lanes]
    assert len(lanes) == 4
    for lane in lanes:
        assert len(lane) >= 4
        for before, after in pairwise(lane):
            assert list(after.messages[: len(before.messages)]) == list(before.messages)
            assert after.messages[len(before.messages)]["role"] == "assistant"
    assert len({json.dumps(list(lane[0].messages)) for lane in lanes}) == 4
    again = [lane for each in rounds(scenario) for lane in each.lanes]
    assert [list(lane[-1].messages) for lane in again] == [list(lane[-1].messages) for lane in lanes]


@pytest.mark.parametrize("scale", [0.1, 1.0, 1.5])
def test_lanes_have_an_even_number_of_rounds_so_that_each_side_begins_as_often(scale: float) -> None:
    for scenario in (*SCENARIOS, Scenario("s", lanes=2, turns=1, rounds=1)):
        found = len(list(rounds(scenario, scale=scale)))
        assert found % 2 == 0 or scenario.lanes == 1
        assert found >= scenario.rounds * scale - 0.5


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.shared], ids=lambda one: one.name)
def test_a_shared_preamble_comes_before_different_requests(scenario: Scenario) -> None:
    prompts = [lane[0] for lane in next(iter(rounds(scenario))).lanes]
    assert len({json.dumps(list(prompt.tools)) for prompt in prompts}) == 1
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == 1
    assert len({prompt.messages[1]["content"] for prompt in prompts}) > 1


def answer(text: str) -> Answer:
    return Answer(text, (), (), "stop", Usage(), Timing(0.0))


def test_figures_compare_turn_with_turn() -> None:
    on = Samples([1.0, 2.0, 3.0], [6.0], 3, [answer("a"), answer("b"), answer("c")])
    off = Samples([2.0, 4.0, 6.0], [9.0], 3, [answer("a"), answer("b"), answer("x")])
    found = compared("memory", "s", on, off)
    assert (found["ratio"], found["wall_ratio"]) == (2.0, 1.5)
    assert (found["on_median_ms"], found["off_median_ms"]) == (2000.0, 4000.0)
    assert found["low"] == found["high"] == 2.0
    assert found["equal"] == pytest.approx(2 / 3, abs=1e-3)


def test_turns_of_one_lane_alternate_and_both_services_see_the_same() -> None:
    scenario = Scenario("s", lanes=1, turns=2, rounds=1)

    async def both() -> tuple[Samples, Samples]:
        service = Service.load(EngineConfig(cells=4096, threads=1))
        try:
            return await alternate(service, service, list(rounds(scenario)), "test")
        finally:
            await service.close()

    on, off = asyncio.run(both())
    assert len(on.turns) == len(off.turns) >= 2
    assert [a.text for a in on.answers] == [a.text for a in off.answers]
    assert np.all(np.array(on.turns) > 0)


def test_interleaved_lanes_run_a_turn_at_a_time() -> None:
    scenario = Scenario("s", lanes=2, turns=3, rounds=1, shared=True, interleaved=True)
    running, order = set[str](), list[str]()

    class Recording:
        async def generate(self, request: GenerateRequest) -> Answer:
            assert not running
            running.add(request.request_id)
            await asyncio.sleep(0)
            running.clear()
            order.append(request.request_id.removeprefix("x/0."))
            return answer("a")

    service = cast("Service", Recording())
    asyncio.run(alternate(service, service, list(rounds(scenario))[:1], "x"))
    assert order == ["0/0", "1/0", "0/1", "1/1", "0/2", "1/2"] * 2


def test_a_wrong_name_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ablation", "--scenarios", "magic", "--json", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith("bench ablation: there is no magic")


def test_figures_that_could_not_be_written_are_not_measured(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Service, "load", lambda *_: pytest.fail("it measures"))
    assert main(["ablation", "--json", str(tmp_path / "none" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_variant_that_cannot_act_is_named_and_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "x"
    assert main(["ablation", "--off", "prompt_seed,cuda_graphs", "--threads", "1", "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "prompt_seed     left out: it acts on sampled turns" in said
    assert "cuda_graphs     left out: it acts on a GPU" in said
    assert json.loads(out.read_text()) == []
