"""Several machines, really: namespaces on a bridge, the documented steps, and a link that is cut under load.

Skipped where namespaces cannot be made (not root, not Linux). The other events, about five minutes:

    HOLDFAST_TEST_MACHINES=1 .venv/bin/pytest -s tests/cluster/test_machines.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import machines as machines_command
import pytest
import ray
import waiting
from agents import AGENTS, Agents, Asked, homes, told
from machines import KEY, PATIENT_S, Machines, up, usable, within

ENTRIES = ("head", "one", "two")
LONGER = pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_MACHINES"), reason="set HOLDFAST_TEST_MACHINES=1")
pytestmark = pytest.mark.skipif(not usable(), reason="no namespaces here: root and Linux are needed")


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines() as made:
        up(made)
        yield made


def watched(machines: Machines, event: Callable[[], object], over: Callable[[list[Asked]], bool]) -> list[Asked]:
    """What became of requests that had not ended at `event` or came after it, until they are as `over` wants them."""
    agents = Agents(machines["client"].space, [f"http://{machines[name].address}:8000" for name in ENTRIES])
    with agents.at_work():
        until(lambda: len(agents.asked) > 40)
        at = time.monotonic()
        event()
        until(lambda: over([each for each in agents.since(at) if each.at > at]))
    asked = agents.since(at)
    print(told(asked, at))
    return asked


def until(condition: Callable[[], bool], within_s: float = PATIENT_S) -> None:
    waiting.until(condition, within_s, every_s=0.1)


def engine_alone(machines: Machines) -> str:
    """A worker with an engine; one without a router, where there is one."""
    workers = ("one", "two")
    return next((name for name in workers if not machines.runs(name, "ray::ServeReplica:holdfast:router")), workers[-1])


def with_a_router(machines: Machines) -> str:
    """A worker with a router, which has an engine, too."""
    return next(name for name in ("one", "two") if machines.runs(name, "ray::ServeReplica:holdfast:router"))


@LONGER
def test_the_command_finds_what_another_has_made_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its calls stands a file."""
    monkeypatch.setattr(machines_command, "STATE", state := tmp_path / machines_command.STATE.name)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command, there = [sys.executable, machines_command.__file__, *words], {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, env=there, capture_output=True, text=True)

    assert call("down").stderr == "no machines are up\n"
    with Machines() as made:
        made.keep()
        refused = call("up")
        assert (refused.returncode, refused.stderr) == (1, f"they are up; what is left of them stands in {state}\n")
        done = call("run", "one", "ip", "-br", "address", "show", "eth0")
        assert made["one"].address in done.stdout, done.stderr
        before = made["one"].init
        assert call("off", "client").returncode == 0
        after = json.loads(state.read_text())[2]
        assert (after["one"], after["client"]) == (before, 0)
        assert call("down").returncode == 0
        for machine in made.machines.values():
            machine.init = 0  # Trap: the numbers of processes that have ended are others' by and by
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert made.tag not in spaces
        assert not Path(f"/proc/{before}").exists()
        assert not made.folder.exists()
        assert not state.exists()


def test_routers_and_engines_stand_on_machines_of_their_own(machines: Machines) -> None:
    for deployment, most in (("router", 2), ("replicas", 2)):
        counts = [len(machines.runs(name, f"ray::ServeReplica:holdfast:{deployment}")) for name in ENTRIES]
        assert (sum(counts), max(counts)) == (most, 1)


@pytest.mark.parametrize("which", [with_a_router, pytest.param(engine_alone, marks=LONGER)])
def test_a_machine_that_vanishes_is_passed_by_and_its_requests_end(
    machines: Machines, which: Callable[[Machines], str]
) -> None:
    """Nothing is refused and no connection ends: TCP alone would learn of it after a quarter of an hour."""
    until(lambda: engines(machines) == 2)
    gone = which(machines)
    others = [name for name in ENTRIES if name != gone]
    assert any(machines.runs(name, "ray::ServeReplica:holdfast:router") for name in others)

    def elsewhere(asked: list[Asked]) -> list[Asked]:
        return [each for each in asked if machines[gone].address not in each.entry]

    def served(asked: list[Asked]) -> bool:
        """Also those whose entry was lost, at the next one."""
        answered = [each for each in elsewhere(asked) if each.outcome == "answered"]
        return len(answered) > 60 and {each.program for each in answered} == set(range(AGENTS))

    asked = watched(machines, lambda: machines.cut(gone), served)
    machines.heal(gone)
    there = elsewhere(asked)
    assert {each.outcome for each in there} <= {"answered", "error", "503", "cut"}, "silence at no entry that is there"
    assert sum(each.outcome != "answered" for each in there) <= AGENTS, "one of each agent's at most"
    machines.ready(gone)


@LONGER
@pytest.mark.parametrize("event", ["slow", "crash"])
def test_the_others_go_on(machines: Machines, event: str) -> None:
    """A link with 200 ms a round trip that loses 5 % of frames each way; a machine whose processes all die."""
    gone = engine_alone(machines)
    machines.ready(gone)
    asked = watched(machines, lambda: getattr(machines, event)(gone), lambda found: len(found) > 200)
    if event == "slow":
        machines.heal(gone)
    else:
        machines.ray_start(gone)
    assert sum(each.outcome == "answered" for each in asked) > 0.9 * len(asked)
    assert "silence" not in {each.outcome for each in asked}


@LONGER
def test_machines_are_restarted_one_after_the_other_and_no_request_is_lost(machines: Machines) -> None:
    """Each is drained first, as documented; clients are at an entry that stays. A program moves once at most."""
    agents = Agents(machines["client"].space, [f"http://{machines['head'].address}:8000"])
    until(lambda: engines(machines) == 2)
    with agents.at_work():
        until(lambda: len(agents.asked) > 40)
        for name in ("one", "two"):
            at = time.monotonic()
            machines.leave(name)
            machines.power_off(name)
            machines.boot(name)
            machines.ray_start(name)
            until(lambda: engines(machines) == 2)
            machines.ready(name)
            until(lambda: len(agents.since(time.monotonic() - 1.0)) > 0)
            asked = agents.since(at)
            print(name, told(asked, at), homes(asked))
            assert {each.outcome for each in asked} == {"answered"}
            assert all(len(found) <= 2 for found in homes(asked).values()), homes(asked)


@LONGER
def test_rays_control_plane_dies_and_comes_back(machines: Machines) -> None:
    """It has its state in Redis. Until its machine is started again all that is there serves, at each entry."""
    until(lambda: engines(machines) == 2)

    def killed() -> None:
        for pid in machines.runs("head", str(Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server")):
            os.kill(pid, signal.SIGKILL)
            return
        raise AssertionError("it does not run")

    asked = watched(machines, killed, lambda found: len(found) > 200)
    machines.power_off("head")
    machines.boot("head")
    machines.ray_start("head")
    machines.ready("head")
    assert {each.outcome for each in asked} == {"answered"}


@LONGER
def test_the_head_is_lost_and_comes_back(machines: Machines) -> None:
    """Ray's control plane has its state in Redis; the two others serve meanwhile."""
    agents = Agents(machines["client"].space, [f"http://{machines[name].address}:8000" for name in ("one", "two")])
    until(lambda: engines(machines) == 2)
    with agents.at_work():
        until(lambda: len(agents.asked) > 40)
        at = time.monotonic()
        machines.power_off("head")
        until(lambda: len(agents.since(at)) > 200)
        machines.boot("head")
        machines.ray_start("head")
        machines.ready("head")
        back = time.monotonic()
        until(lambda: len([each for each in agents.since(back) if each.outcome == "answered"]) > 100)
    asked = agents.since(at)
    print(told(asked, at))
    assert "silence" not in {each.outcome for each in asked}
    assert sum(each.outcome == "answered" for each in asked) > 0.9 * len(asked)


def engines(machines: Machines) -> int:
    """How many take requests, as a router knows it."""

    def known() -> str:
        url = f"http://{machines['head'].address}:8000/metrics"
        with suppress(httpx.HTTPError):
            return httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).text
        return ""

    found = within(machines["client"].space, known)
    return len(set(re.findall(r'holdfast_cell_capacity\{[^}]*replica="(\w+)"', found)))
