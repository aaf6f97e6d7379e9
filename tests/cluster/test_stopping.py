"""A real cluster seen from outside: one trace over its processes, log lines of all of them, its status, its end.

Told to stop while it writes to clients, it answers what ends in time, tells who outlives the drain time why, and who
comes when to come again.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from doc_commands import ROOT, blocks
from otlp_collector import Collector
from program_load import TOOL
from redis_server import RedisServer
from terminal import Terminal

from holdfast.cluster import environment
from holdfast.router.config import RouterConfig
from holdfast.router.entry.quotas import Quotas
from holdfast.router.entry.usage import UsageBooks
from holdfast.router.records.store import Records, RedisAddress

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "xylophone"
SCRIPTS = sysconfig.get_path("scripts")


@dataclass(frozen=True)
class Stopped:
    """What clients saw of a server that was stopped while it wrote to them."""

    stream: list[str]
    whole: httpx.Response
    short: httpx.Response
    late: list[tuple[int, dict[str, str], str]]


@dataclass(frozen=True)
class Watched:
    """A stopped server's traces and log lines, and its answers while it ran."""

    collector: Collector
    lines: list[dict[str, Any]]
    whole: dict[str, Any]
    status: dict[str, Any]
    quickstart: dict[str, str]  # the output of each command of the page
    stopped: Stopped
    said: str
    booked: list[dict[str, Any]]  # records of usage


@pytest.fixture(scope="module")
def watched(cluster: Any, tmp_path_factory: pytest.TempPathFactory, eventually: Any) -> Watched:
    server, statuses = cluster.server, list[dict[str, Any]]()

    def status_with(program: str) -> bool:
        """Programs and tenants are those of the router that answers."""
        statuses.append(client.get("/v1/cluster/status").json())
        return program in {each["program"] for each in statuses[-1]["programs"]}

    with httpx.Client(base_url=server.url, trust_env=False) as client:
        body = {
            "model": "pocket",
            "messages": [{"role": "user", "content": f"What is the weather in Paris? {SECRET}"}],
            "tools": [TOOL],
            "temperature": 0,
            "program_id": "trip",
            "max_tokens": 32,
        }
        trace = {"traceparent": CALLER, "tracestate": "vendor=1"}
        whole = client.post("/v1/chat/completions", json=body, headers=trace).json()
        streamed = {**body, "stream": True, "program_id": "stream"}
        client.post("/v1/chat/completions", json=streamed, headers={"cache-control": "no-store"})
        client.post("/v1/chat/completions", json={**body, "nonsense": 1}, headers={"x-request-id": "bad-1"})
        eventually(lambda: status_with("trip"))
    quickstart = follow(tmp_path_factory.mktemp("quickstart"), server.port)
    stopped = stop(server, eventually)
    lines = [json.loads(line) for line in cluster.log.read_text().splitlines()]
    booked = asyncio.run(records(cluster.redis))
    said = server.output.read_text()
    return Watched(cluster.collector, lines, whole, statuses[-1], quickstart, stopped, said, booked)


async def records(redis: RedisServer) -> list[dict[str, Any]]:
    """The last records in the books of the only tenant."""
    store = Records(RedisAddress(redis.url, namespace="holdfast/accounts"), 60.0)
    try:
        return await UsageBooks(RouterConfig(), Quotas(store)).records("default", "-", "+", 100_000)
    finally:
        await store.close()


def stop(server: Any, eventually: Any) -> Stopped:
    """By Ctrl-C, while a stream and a whole answer run that take minutes, and one that takes a second or so."""
    lines: list[str] = []
    late: list[tuple[int, dict[str, str], str]] = []
    url = f"{server.url}/v1/chat/completions"

    def post(text: str, tokens: int) -> httpx.Response:
        return httpx.post(url, json=long(text, max_tokens=tokens), headers=named(text), trust_env=False)

    def stream() -> None:
        body = long("a", stream=True)
        with httpx.stream("POST", url, json=body, headers=named("a"), trust_env=False) as response:
            lines.extend(line for line in response.iter_lines() if line)

    def running() -> int:
        status = httpx.get(f"{server.url}/v1/cluster/status", trust_env=False).json()
        return sum(int(replica["running"]) for replica in status["replicas"])

    with ThreadPoolExecutor(3) as pool:
        outliving = [pool.submit(stream), pool.submit(post, "b", 3900)]
        eventually(lambda: running() == 2, 60.0)
        short = pool.submit(post, "c", 150)

        def runs_beside() -> bool:
            nonlocal short
            if short.done():  # before anybody saw it
                short = pool.submit(post, "c", 150)
            return running() == 3

        eventually(runs_beside, 60.0)
        os.kill(server.process.pid, signal.SIGINT)
        eventually(lambda: "stopping" in server.output.read_text())
        while not all(each.done() for each in outliving):
            answer = httpx.get(f"{server.url}/v1/models", trust_env=False)
            if answer.status_code != 200:  # it may come before the routers have been told
                late.append((answer.status_code, dict(answer.headers), answer.text))
    assert server.process.wait(60.0) == 0
    assert server.processes() == {}
    outliving[0].result()
    return Stopped(lines, outliving[1].result(), short.result(), late)


def named(text: str) -> dict[str, str]:
    """A request's id, by which the books name it."""
    return {"x-request-id": f"outlives-{text}"}


def long(text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "pocket", "messages": [{"role": "user", "content": text}], "max_tokens": 3900}
    return {**body, "ignore_eos": True, "temperature": 1.0, **more}


def follow(folder: Path, port: int) -> dict[str, str]:
    """Type what the quickstart says for this machine, beside a server on another port."""
    shown: dict[str, str] = {}
    for command in [each for block in blocks("quickstart.md") if not block.cluster for each in block.commands]:
        text = command.replace(":8000", f":{port}")
        text = text.replace("$PWD/.venv", str(ROOT / ".venv"))
        if command == "holdfast doctor":  # as the page says: the server's own port is taken
            text += f" --port {environment.internal_ports(random.Random()).stats}"
        if command == "make serve":
            shown[command] = run(["make", "--dry-run", "serve"], ROOT)
        elif command == "holdfast top":
            shown[command] = on_a_terminal(port)
        else:
            asks = command == "holdfast status" or "| holdfast chat" in command
            url = f" --url http://127.0.0.1:{port}" if asks else ""
            shell = ["bash", "-c", f'export PATH="{SCRIPTS}:$PATH"; {text}{url}']
            shown[command] = run(shell, folder)
            while command == "holdfast status" and "trip-1" not in shown[command]:  # the other router answered
                shown[command] = run(shell, folder)
    return shown


def run(command: list[str], folder: Path) -> str:
    """What it prints; it has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def on_a_terminal(port: int) -> str:
    """`holdfast top`, left by its key."""
    shown = Terminal("top", "--url", f"http://127.0.0.1:{port}")
    try:
        lines = shown.until(lambda lines: any("trip-1" in line for line in lines))
        shown.press("q")
        assert shown.leave() == 0
        return "\n".join(lines)
    finally:
        shown.close()


def test_what_ends_in_time_is_answered(watched: Watched) -> None:
    assert watched.stopped.short.json()["usage"]["completion_tokens"] == 150, watched.stopped.short.text
    assert "running requests have 4 s to end; interrupt again to stop at once" in watched.said


def test_a_stream_that_outlives_the_drain_ends_with_an_error_event(watched: Watched) -> None:
    last = json.loads(watched.stopped.stream[-1].removeprefix("data: "))
    assert last["error"]["code"] == "unavailable"
    assert "stopped before" in last["error"]["message"]
    assert len(watched.stopped.stream) > 10


def test_a_whole_answer_that_outlives_it_is_refused_in_json(watched: Watched) -> None:
    assert watched.stopped.whole.status_code == 503
    assert watched.stopped.whole.json()["error"]["code"] == "unavailable"


def test_what_was_done_for_both_is_in_the_books(watched: Watched) -> None:
    cut_off = [each for each in watched.booked if each["http_id"] in ("outlives-a", "outlives-b")]
    assert [each["outcome"] for each in cut_off] == ["failed", "failed"]
    assert all(each["input"] > 0 and each["output"] > 0 and each["drawn"] >= each["output"] for each in cut_off)


def test_who_comes_meanwhile_is_told_when_to_come_again(watched: Watched) -> None:
    assert watched.stopped.late
    for status, headers, text in watched.stopped.late:
        assert (status, json.loads(text)["error"]["code"]) == (503, "unavailable")
        assert int(headers["retry-after"]) > 0


def test_the_console_says_that_it_stops_and_nothing_of_errors(watched: Watched) -> None:
    assert "stopping" in watched.said
    assert "ERROR" not in watched.said.partition("stopping")[2]


def test_one_trace_from_the_caller_over_ray_to_the_engine(watched: Watched) -> None:
    spans = [span for span in watched.collector.spans if span.trace_id == CALLER.split("-")[1]]
    names = {span.span_id: span.name for span in spans}
    parents = {span.name: names.get(span.parent_id, span.parent_id) for span in spans}
    turn = "POST /v1/chat/completions"
    parts = ("render", "queue", "prefill", "decode", "validate")
    assert len(spans) == 8
    assert parents == {
        turn: CALLER.split("-")[2],
        "replica": turn,
        "generate": "replica",
        **dict.fromkeys(parts, "generate"),
    }
    by_name = {span.name: span for span in spans}
    assert by_name[turn].process == "router"
    assert by_name["generate"].process.startswith("replica ")
    assert by_name[turn].state == "vendor=1"
    assert not any(span.failed for span in spans)
    for before, after in zip(("render", "queue", "prefill"), ("queue", "prefill", "decode"), strict=True):
        assert by_name[before].end == by_name[after].begin
    validate = by_name["validate"]
    assert by_name["generate"].end >= validate.end >= by_name["decode"].end > by_name["prefill"].begin
    assert 0 < validate.attributes["holdfast.busy_s"] < 1e-9 * (validate.end - validate.begin)
    for name in (turn, "generate"):
        told = by_name[name].attributes
        assert told["holdfast.request_id"] == watched.whole["id"].removeprefix("chatcmpl-")
        assert (told["holdfast.program_id"], told["holdfast.tenant"]) == ("default/trip", "default")
    # Clocks of two processes of one machine: the engine's part lies inside of the router's.
    slack = 2_000_000
    assert by_name["replica"].begin <= by_name["generate"].begin + slack
    assert by_name["generate"].end <= by_name["replica"].end + slack


def test_a_streamed_reply_has_the_same_spans(watched: Watched) -> None:
    streamed = [span for span in watched.collector.spans if span.attributes.get("holdfast.stream")]
    (turn,) = [span for span in streamed if span.attributes["holdfast.program_id"] == "default/stream"]
    inside = [span for span in watched.collector.spans if span.trace_id == turn.trace_id]
    assert sorted(span.name for span in inside) == sorted(
        [turn.name, "replica", "generate", "render", "queue", "prefill", "decode", "validate"]
    )
    assert turn.attributes["holdfast.outcome"] == "completed"


def test_log_lines_tell_request_program_tenant_and_trace(watched: Watched) -> None:
    ended = [line for line in watched.lines if line["message"] == "turn ended"]
    whole = next(line for line in ended if line.get("program_id") == "default/trip")
    assert (
        whole.items()
        >= {
            "process": "router",
            "level": "info",
            "request_id": watched.whole["id"].removeprefix("chatcmpl-"),
            "tenant": "default",
            "trace_id": CALLER.split("-")[1],
            "outcome": "completed",
            "prompt_tokens": watched.whole["usage"]["prompt_tokens"],
            "completion_tokens": watched.whole["usage"]["completion_tokens"],
            "model": "pocket",
        }.items()
    )
    assert whole["seconds"] > 0
    assert [line["outcome"] for line in ended if line.get("http_id") == "bad-1"] == ["rejected"]
    assert {line["process"].split()[0] for line in watched.lines} == {"router", "replica"}


def test_neither_lines_nor_spans_tell_what_a_client_wrote(watched: Watched, tmp_path: Path) -> None:
    assert SECRET not in json.dumps(watched.lines)
    assert SECRET.encode() not in b"".join(watched.collector.bodies)


def test_the_status_of_a_real_cluster(watched: Watched) -> None:
    assert len(watched.status["replicas"]) == 2
    for replica in watched.status["replicas"]:
        assert replica["model"] == "pocket"
        assert replica["cells_free"] + replica["cells_tree"] + replica["cells_held"] == replica["cells_total"] > 0
    assert any(replica["completion"] > 0 for replica in watched.status["replicas"])
    assert watched.status["store"] == "ok"
    assert [tenant["name"] for tenant in watched.status["tenants"]] == ["default"]


def test_the_quickstart_on_this_machine_does_what_it_says(watched: Watched) -> None:
    shown = watched.quickstart
    answer = next(json.loads(text) for command, text in shown.items() if command.startswith("curl"))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert any("bin/holdfast serve" in line for line in shown["make serve"].splitlines())
    assert "ok  model: pocket" in shown["holdfast doctor"]
    for command in ("holdfast status", "holdfast top"):
        assert shown[command].startswith("Holdfast ")
        assert "trip-1" in shown[command]
    (said,) = [text for command, text in shown.items() if "| holdfast chat" in command]
    assert said.startswith('get_weather {"city": "Oslo"}\n')
    assert "12" in said
    assert shown["holdfast config check holdfast.yaml"] == "holdfast.yaml is a valid configuration\n"
    assert "kv_memory: 0.5" in shown["holdfast config show --config holdfast.yaml"]
    assert "key_hashes" in shown["holdfast key acme"]
