"""`holdfast chat`: on a terminal of our own and in a pipe, against a router with a real engine."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fake_backend import HELLO, FakeBackend, FakeTurns, World, called
from program_load import TOOL
from rich.console import Console
from service_backend import ServiceBackend, engine_served
from terminal import Terminal

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen.chat import ChatClient
from holdfast.loadgen.talk import ChatOptions, Talk, read_tools
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.requests import TextDelta, ToolCallDelta
from holdfast.router.tenants import Tenant, TenantDirectory, hash_key

QUESTION = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with engine_served(ServiceBackend(EngineConfig(cells=8192, threads=1))) as address:
        yield address


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL["function"]]))
    return str(path)


@pytest.fixture
def piped(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command with words on its standard input: its status, output and errors."""

    def run(words: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(words))
        return (holdfast(["chat", *arguments]), *capsys.readouterr())

    return run


def test_a_call_is_shown_answered_and_told_what_it_cost(url: str, tools: str) -> None:
    shown = Terminal("chat", "--url", url, "--tools", tools, "--program", "talk")
    try:
        shown.until(lambda lines: any(line.startswith("you>") for line in lines))
        assert "pocket, program talk" in shown.lines[0]
        shown.press(f"{QUESTION}\r")
        shown.until(lambda lines: any(line.startswith("result of get_weather>") for line in lines))
        shown.press("21 degrees, sunny\r")
        lines = shown.until(lambda lines: sum(line.startswith("you>") for line in lines) == 2)
        call = next(line for line in lines if line.startswith('get_weather {"city": "Paris"}'))
        assert "closed after" in call
        costs = [line for line in lines if "prompt tokens" in line]
        assert len(costs) == 2
        assert ", 0 cached" in costs[0]
        assert int(costs[1].split(" prompt tokens, ")[1].split()[0]) > 50
        assert any("21" in line for line in lines[lines.index(costs[0]) + 2 :])
        told = httpx.get(f"{url}/v1/cluster/status", trust_env=False).json()
        assert [each["turns"] for each in told["programs"] if each["program"] == "talk"] == [2]
        shown.press("\x04")
        assert shown.leave() == 0
    finally:
        shown.close()
    told = httpx.get(f"{url}/v1/cluster/status", trust_env=False).json()
    assert "talk" not in [each["program"] for each in told["programs"]]  # nobody comes back for it


def test_a_pipe_gets_answers_and_nothing_else(url: str, tools: str) -> None:
    command = [sys.executable, "-m", "holdfast.cluster.cli", "chat", "--url", url, "--tools", tools]
    words = f"{QUESTION}\n21 degrees, sunny\n"
    done = subprocess.run(command, input=words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    call, answer = done.stdout.splitlines()
    assert call == 'get_weather {"city": "Paris"}'
    assert "21" in answer
    assert "\x1b" not in done.stdout


def test_a_call_that_was_cut_is_shown_and_not_asked_for_and_what_failed_was_not_said(piped) -> None:
    whole = [ToolCallDelta(i, f"c{i}", "f", "{}", closed=True) for i in range(2)]
    cut = ToolCallDelta(1, "c9", "g", '{"a')
    backend = FakeTurns(
        called(whole[0], cut, reason="length"), HELLO, called(cut, reason="length"), called(*whole), (ValueError("no"),)
    )
    with World(backend).served() as address:
        status, shown, _ = piped("one\nits result\ntwo\nthree\nr0\nr1\n", "--url", address)
    lines = ["f {}", 'g {"a (cut off)', "Hello!", 'g {"a (cut off)', "f {}", "f {}"]
    assert (status, shown.splitlines()[:6]) == (1, lines)
    asked = [[(m["role"], m.get("content")) for m in request.prompt.messages] for request in backend.requests]
    calls = [m.get("tool_calls") for m in backend.requests[-1].prompt.messages if m["role"] == "assistant"]
    assert [[call["id"] for call in each or ()] for each in calls] == [["c0"], [], [], ["c0", "c1"]]
    assert asked[3][:2] == [("user", "one"), ("assistant", None)]
    assert asked[3][2:5] == [("tool", "its result"), ("assistant", "Hello!"), ("user", "two")]
    assert asked[3][5:] == [("assistant", ""), ("user", "three")]


def test_a_turn_that_fails_leaves_the_conversation_as_it_was_before_the_user_spoke() -> None:
    whole = [ToolCallDelta(i, f"c{i}", "f", "{}", closed=True) for i in range(2)]
    backend = FakeTurns(HELLO, called(*whole), (ValueError("no"),), HELLO)

    async def main(address: str) -> None:
        async with ChatClient(address, 60.0) as client:
            talk = Talk(client, Console(quiet=True), ChatOptions(), "pocket")
            talk.hear("one")
            assert await talk.turn() == []
            before = list(talk.messages)
            talk.hear("two")
            talk.messages += [{"role": "tool", "tool_call_id": c.call_id, "content": "1"} for c in await talk.turn()]
            with pytest.raises(UnavailableError):
                await talk.turn()
            assert talk.messages == before
            talk.hear("three")
            assert await talk.turn() == []
            assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2

    with World(backend).served() as address:
        asyncio.run(main(address))


def test_what_a_model_writes_is_no_command_to_the_terminal(piped) -> None:
    script = ((TextDelta("a\x1b[2Jb\rc\x07\n"),), *FakeBackend().script[-1:])
    with World(FakeBackend(script)).served() as address:
        assert piped("hi\n", "--url", address)[1] == "a[2Jbc\n\n"


def test_without_a_server_or_a_key_it_says_so(piped, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, error = piped("hi\n", "--url", "http://127.0.0.1:9")
    assert status != 0
    assert error == "holdfast: no server answers at http://127.0.0.1:9; `--url` names another one\n"
    world = World(tenants=TenantDirectory((Tenant("acme", (hash_key("right"),)),)))
    with world.served() as address:
        assert "HOLDFAST_API_KEY" in piped("hi\n", "--url", address)[2]
        monkeypatch.setenv("HOLDFAST_API_KEY", "right")
        assert piped("hi\n", "--url", address)[1] == "Hello!\n"
        world.backend.script = (ValueError("broken"),)  # type: ignore[attr-defined]
        status, shown, _ = piped("again\n", "--url", address)
    assert (status, shown.count("500")) == (1, 1)


def test_tools_are_read_with_and_without_their_outside_and_else_refused(tmp_path: Path) -> None:
    inside, file = TOOL["function"], tmp_path / "tools.json"
    for content in (inside, TOOL, [inside], [TOOL]):
        file.write_text(json.dumps(content))
        assert read_tools(file) == (TOOL,)
    for text in ("{", "[1]", "[{}]", '{"function": 1}', '{"function": {"name": ""}}'):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_tools(file)
