"""The simulator's programs over HTTP: what a server is sent, and what is told of its answers."""

import json
import re
import threading
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from stub_server import DONE, Answer, Asked, chunk, models, stub_server, usage

from holdfast.loadgen.simulator.live import main
from holdfast.loadgen.simulator.workloads import Crowd

GOOD = ((0.0, chunk({"content": "hello"}) + usage(30, 1, 2) + DONE),)


QUICK = "--rate 1000 --scale 0.002 --tools 0"


def answering(asked: Asked) -> Answer:
    return models() if asked.method == "GET" else Answer(GOOD)


def number(asked: Asked) -> str:
    return asked.headers["x-program-id"].partition("program-")[2]


def test_programs_grow_and_sub_agents_name_their_parent(capsys: pytest.CaptureFixture[str]) -> None:
    with stub_server(answering) as stub:
        assert main(f"{stub.url} --workload fan-out --programs 4 {QUICK}".split()) == 0
        sent = [each for each in stub.asked if each.method == "POST"]
    told = json.loads(capsys.readouterr().out)
    programs = list(Crowd("fan-out", 4, 1000.0).draw(100))
    children = [child for program in programs for turn in program.turns for child in turn.children]
    turns = Counter(map(number, sent))
    assert turns == {str(program.number): len(program.turns) for program in programs + children}
    assert told["turns"] == len(sent)
    assert told["hit"] == pytest.approx(1 / 30)
    by_program: dict[str, list[list[dict]]] = {}
    for each in sent:
        by_program.setdefault(each.headers["x-program-id"], []).append(each.body["messages"])
    for conversation in by_program.values():
        for before, after in pairwise(conversation):
            assert after[: len(before)] == before
            assert after[len(before)]["content"] == "hello"
    named = [each for each in sent if "x-parent-session-id" in each.headers]
    assert {number(each) for each in named} == {str(child.number) for child in children}
    for each in named:
        parent = by_program[each.headers["x-parent-session-id"]]
        assert each.body["messages"][:2] == parent[0][:2]


def test_a_server_that_fails_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    first = threading.Lock()

    def failing(asked: Asked) -> Answer:
        if asked.method == "GET":
            return models()
        return Answer(GOOD) if first.acquire(blocking=False) else Answer.of(b"busy", status=503)

    with stub_server(failing) as stub:
        assert main(f"{stub.url} --programs 3 {QUICK}".split()) == 1
    captured = capsys.readouterr()
    assert "http: 503" in captured.err
    assert json.loads(captured.out)["turns"] == 1


def test_placements_take_turns_and_are_named_by_their_programs(tmp_path: Path, capsys) -> None:
    with stub_server(answering) as stub:
        ways = f"--rounds 2 --placement ours --placement prefix --json {tmp_path / 'runs.json'}"
        assert main(f"{stub.url} --programs 2 {QUICK} {ways}".split()) == 0
        sent = [each for each in stub.asked if each.method == "POST"]
    ways_sent = [each.headers["x-program-id"].partition(".")[0] for each in sent]
    assert [way for way, _ in groupby(ways_sent)] == ["ours", "prefix", "ours"], "the second round turns them around"
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    rounds = [("ours", 100), ("prefix", 100), ("prefix", 101), ("ours", 101)]
    assert [(run["placement"], run["seed"]) for run in runs] == rounds
    for figures in (run["figures"] for run in runs):
        assert (figures["computed"], figures["moves"]) == (29 * figures["turns"], 0)
    assert re.search(r"prefix +0\.0333 \(0\.0333 to 0\.0333\)", capsys.readouterr().out)
    texts = {each.body["messages"][0]["content"] for each in sent}
    assert len(texts) == 4, "no run finds what another has left"
