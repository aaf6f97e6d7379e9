"""A real server among clients that trickle, idle and send too much: who is polite is served, and nothing is left over.

How long the polite ones wait is measured by `tools/rude_clients.py`, not asserted here.
"""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import rude_clients

IDLE = 512  # at once; thousands take the machine half a minute
SETTINGS = {
    "engine": rude_clients.ENGINE,
    "router": {"body_timeout_s": 3},
    "tenants": rude_clients.TENANTS,
}


@pytest.fixture(scope="module")
def measured(start: Any, eventually: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    server = start(tmp_path_factory.mktemp("server"), json.dumps(SETTINGS))
    try:
        polite, rude = rude_clients.beside(server.url, "polite", "limited", 12.0, IDLE)  # headers have 10 s
        limited = [
            httpx.post(url, json={}, headers={"Authorization": "Bearer limited"}, timeout=60.0, trust_env=False)
            for url in [f"{server.url}/v1/chat/completions"] * 70
        ]

        def running() -> dict[str, int]:
            headers = {"Authorization": "Bearer polite"}
            status = httpx.get(f"{server.url}/v1/cluster/status", headers=headers, timeout=60.0, trust_env=False).json()
            return {each["name"]: each["running"] for each in status["tenants"]}

        eventually(lambda: not any(running().values()), 60.0)  # the last long bodies are parsed to their ends
        yield {"polite": polite, "rude": rude, "limited": {each.status_code for each in limited}, "running": running()}
        server.stop(signal.SIGINT)
    finally:
        server.process.kill()


def test_every_polite_request_is_answered_and_nothing_is_left_over(measured: dict[str, Any]) -> None:
    assert measured["polite"]["requests"] > 0  # one that failed would have raised
    assert measured["running"] == {"polite": 0, "limited": 0}


def test_who_trickles_is_thrown_out_and_who_sends_too_much_is_refused(measured: dict[str, Any]) -> None:
    told = measured["rude"]
    assert told["headers: 408 Request Time-out"] > 0
    assert told["idle: 408 Request Time-out"] > 0
    assert told["idle connected"] >= IDLE
    refused = {name: n for name, n in told.items() if name.startswith(("body: ", "32 MiB: "))}
    assert {name.partition(": ")[2][:3] for name in refused} <= {"400", "408", "413", "429"}, refused
    assert 429 in measured["limited"]
