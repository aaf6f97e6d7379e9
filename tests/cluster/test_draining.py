"""A real server that is told to stop: who comes is told when to come again, who outlives the drain time is told why."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

SETTINGS = "{server: {drain_s: 4}, engine: {threads: 1, kv_memory: 0.1}}"
LONG = {"model": "pocket", "max_tokens": 3900, "ignore_eos": True, "temperature": 1.0}


@dataclass(frozen=True)
class Stopped:
    """What clients saw of a server that was stopped while it wrote to them."""

    stream: list[str]
    whole: httpx.Response
    late: list[tuple[int, dict[str, str], Any]]
    said: str


def body(text: str, **more: Any) -> dict[str, Any]:
    return {**LONG, "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture(scope="module")
def stopped(start: Any, eventually: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    server = start(tmp_path_factory.mktemp("server"), SETTINGS)
    lines: list[str] = []
    wholes: list[httpx.Response] = []
    late: list[tuple[int, dict[str, str], Any]] = []

    def stream() -> None:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body("a", stream=True), timeout=60.0, trust_env=False) as response:
            lines.extend(line for line in response.iter_lines() if line)

    def whole() -> None:
        url = f"{server.url}/v1/chat/completions"
        wholes.append(httpx.post(url, json=body("b"), timeout=60.0, trust_env=False))

    def running() -> int:
        status = httpx.get(f"{server.url}/v1/cluster/status", timeout=60.0, trust_env=False).json()
        return int(status["replicas"][0]["running"])

    try:
        threads = [threading.Thread(target=each, daemon=True) for each in (stream, whole)]
        for thread in threads:
            thread.start()
        eventually(lambda: running() == 2, 60.0)
        os.kill(server.process.pid, signal.SIGINT)
        eventually(lambda: "stopping" in server.output.read_text())
        while any(thread.is_alive() for thread in threads):
            answer = httpx.get(f"{server.url}/v1/models", timeout=60.0, trust_env=False)
            if answer.status_code != 200:  # it may come before the routers have been told
                late.append((answer.status_code, dict(answer.headers), answer.text))
        assert server.process.wait(60.0) == 0
        assert server.processes() == {}
        yield Stopped(lines, wholes[0], late, server.output.read_text())
    finally:
        server.process.kill()


def test_a_stream_that_outlives_the_drain_ends_with_an_error_event(stopped: Stopped) -> None:
    last = json.loads(stopped.stream[-1].removeprefix("data: "))
    assert last["error"]["code"] == "unavailable"
    assert "stopped before" in last["error"]["message"]
    assert len(stopped.stream) > 10


def test_a_whole_answer_that_outlives_it_is_refused_in_json(stopped: Stopped) -> None:
    assert stopped.whole.status_code == 503
    assert stopped.whole.json()["error"]["code"] == "unavailable"


def test_who_comes_meanwhile_is_told_when_to_come_again(stopped: Stopped) -> None:
    assert stopped.late
    for status, headers, text in stopped.late:
        assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")
        assert int(headers["retry-after"]) > 0


def test_the_console_says_that_it_stops_and_nothing_of_errors(stopped: Stopped) -> None:
    assert "stopping" in stopped.said
    assert "ERROR" not in stopped.said
