"""Command-line agents against `holdfast serve`: two turns each, of the shipped model with a longer context.

What it says does not matter, and cannot: it is asked for more than it was trained on. That the protocol carries prompts
of such agents, whole, streamed and continued, does. Runs in `make clients` alone.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import real_clients

CONTEXT = 40_960
START_S, STOP_S = 240.0, 60.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if real_clients.folder() is None:
        pytest.skip("clients are not installed: `make clients`")
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(real_clients.WEIGHTS, folder / "pocket")
    config = folder / "pocket" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    settings = folder / "holdfast.yaml"
    settings.write_text(f"engine: {{cells: {2 * CONTEXT}, threads: 2}}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "holdfast.cluster.cli", "serve", "--config", str(settings), "--port", str(port)]
    with (folder / "output.txt").open("wb") as output:
        server = subprocess.Popen(
            [*command, "--model", str(folder / "pocket")], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    deadline = time.monotonic() + START_S
    while "Holdfast serves" not in (folder / "output.txt").read_text():
        assert server.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    try:
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGINT)
        assert server.wait(STOP_S) == 0
    finally:
        server.kill()


def programs(address: str) -> dict[str, int]:
    """The turns of each program so far."""
    told = httpx.get(f"{address}/v1/cluster/status", timeout=30).json()["programs"]
    return {each["program"]: each["turns"] for each in told}


@pytest.mark.parametrize("name", ["claude", "codex", "opencode"])
def test_a_command_line_agent_goes_on_where_it_was(address: str, name: str, tmp_path: Path) -> None:
    client = {"claude": "Claude Code", "codex": "Codex CLI", "opencode": "OpenCode"}[name]
    program = real_clients.program(client, name)
    if program is None:
        pytest.skip(f"{client} is not installed: `make clients`")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    again = {"claude": ("--continue",), "codex": ("resume", "--last"), "opencode": ("--continue",)}[name]
    before = programs(address)
    for more in ((), again):
        ask = getattr(real_clients, name)
        done = ask(program, address, home, work, *more, "Say hello.")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ours = {each: turns for each, turns in programs(address).items() if each not in before}
    assert max(ours.values()) >= 2, "both turns are of one program"
