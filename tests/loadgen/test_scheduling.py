"""`holdfast bench scheduling`: what is compared with what, and how it is told. The servers here only pretend."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from stub_server import Answer, Answering, Asked, calling, stub_server

from holdfast.cluster.config_file import parse
from holdfast.loadgen import options, scheduling
from holdfast.loadgen.options import Options, Scheduling
from holdfast.loadgen.rows import Job
from holdfast.loadgen.scheduling import engine, faster
from holdfast.loadgen.simulator.policies import POLICIES, policy
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

UNPAUSED = partial(Options, pause_s=0.0)  # the servers here look for no work in busy loops
PAIR = ("request", "continuum")
SMALL = Sizes(jobs=2, rate=1000.0, prompt_tokens=4)


def main(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answering: Answering = calling, **fields: Any
) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the command against servers that only pretend: its status, the ratios it wrote, the servers' settings."""
    started: list[dict[str, Any]] = []

    @contextmanager
    def pretending(model: str, settings: dict[str, Any]) -> Iterator[str]:
        started.append(settings)
        with stub_server(answering) as stub:
            yield stub.url

    monkeypatch.setattr(scheduling, "serving", pretending)
    monkeypatch.setattr(options, "Options", UNPAUSED)
    file = folder / "ratios.json"
    more = {"workload": "arrivals", "sizes": SMALL, "repetitions": 2, "json_file": file, "folder": folder}
    status = scheduling.main(Scheduling(**more, **fields))
    return status, json.loads(file.read_text())["faster"], started


def program(server: str, repetition: int, name: str, seconds: float) -> Job:
    return Job(server, "swe", repetition, name, 2, seconds, None, 0.0, None)


def test_every_policy_is_compared_to_the_first_over_the_programs_both_served() -> None:
    served = (("request", 0, 30.0), ("request", 1, 10.0), ("continuum", 0, 10.0), ("continuum", 1, 10.0))
    programs = [program(server, repetition, "a", seconds) for server, repetition, seconds in served]
    (found,) = faster(programs, 2, "small", 64, PAIR, seed=0)
    assert (found.policy, found.ratio.value, found.each) == ("continuum", 2.0, (3.0, 1.0))
    assert (found.first_mean_s, found.mean_s) == (20.0, 10.0)
    assert str(found).endswith("2 of 2 programs served under both; target 1.3: met")
    (even,) = faster(programs[1:], 1, "large", 64, PAIR, seed=0)
    assert even.ratio.value == 1.0
    assert str(even).endswith("target 0.98: met")


def test_without_the_order_of_requests_there_is_no_target() -> None:
    programs = [program("infercept", 0, "a", 10.0), program("expected_waste", 0, "a", 20.0)]
    (slower,) = faster(programs, 1, "small", 64, ("infercept", "expected_waste"), seed=0)
    assert slower.met
    assert "infercept 10.0 s: 0.50x faster" in str(slower)
    assert str(slower).endswith("1 of 1 programs served under both")
    with pytest.raises(ConfigError, match="no program"):
        faster(programs[:1], 1, "small", 64, ("infercept", "expected_waste"), seed=0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_servers_settings_are_a_configuration(name: str) -> None:
    settings = parse(json.dumps({"engine": engine(policy(name), Scheduling(), 8192)}))
    assert settings.engine.order == POLICIES[name].order
    assert settings.engine.retention.policy == POLICIES[name].retention
    assert settings.engine.cells == 8192


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"policies": ("request",)}, "two policies"),
        ({"policies": ("request", "request")}, "each of them once"),
        ({"policies": ("request", "fcfs")}, "no policy"),
        ({"cells": (1, 2, 3)}, "two caches"),
        ({"workload": "sve"}, "unknown workload 'sve'; nearest: swe"),
        ({"repetitions": 0}, "repetitions must"),
        ({"json_file": Path("file/ratios.json")}, "cannot write"),
        ({"folder": Path("file")}, "cannot write"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(scheduling, "serving", lambda *_: pytest.fail("a server was started"))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=why):
        scheduling.main(Scheduling(**fields))


def test_where_requests_fail_the_status_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    sent = count()
    warm_up = 2 * 6  # requests

    def failing(asked: Asked) -> Answer:
        return Answer.of(b"{}", 500) if asked.method == "POST" and next(sent) == warm_up else calling(asked)

    monkeypatch.setattr(scheduling, "TARGETS", {"small": 0.0, "large": 0.0})
    status, (found,), _ = main(tmp_path, monkeypatch, failing, caches=("small",))
    assert (status, found["pairs"], found["programs"]) == (1, 3, 4)
    assert "3 of 4 programs served under both; target 0: MISSED" in capsys.readouterr().out


def test_both_caches_are_measured_and_the_ratios_written(tmp_path: Path, monkeypatch, capsys) -> None:
    _, found, started = main(tmp_path, monkeypatch, cells=(64, 128))
    assert [(each["order"], each["cells"]) for each in started] == [
        ("request", 64), ("program", 64), ("program", 64), ("request", 64),
        ("request", 128), ("program", 128), ("program", 128), ("request", 128),
    ]  # fmt: skip
    compared = [(line["cache"], line["policy"], len(line["each"])) for line in found]
    assert compared == [("small", "continuum", 2), ("large", "continuum", 2)]
    assert "large cache, 128 cells: continuum" in capsys.readouterr().out
    files = [json.loads((tmp_path / f"small-{number}.json").read_text()) for number in range(2)]
    assert all(each["complete"] for each in files)
    assert files[0]["options"]["seed"] != files[1]["options"]["seed"]
