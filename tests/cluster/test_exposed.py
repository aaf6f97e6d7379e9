"""A server on every interface: strangers need a key, Prometheus finds every process, and SIGTERM leaves nothing behind.

Under a little load every panel, recording rule and alert has data. Rude clients keep nobody from being served.
"""

import random
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from program_load import Load
from prometheus_server import Prometheus, found
from waiting import PATIENCE_S, until

from helm.build.dashboards import BOARDS
from helm.build.rules import ALERTS, RECORDINGS, files
from holdfast.cluster import environment
from holdfast.router.tenants import hash_key

WITHIN_S = 240.0  # on a machine that others keep busy; a few seconds on one that is free
IDLE = 64  # connections at once
RAY_PORT = environment.internal_ports(random.Random()).stats
SETTINGS = f"""
server: {{host: 0.0.0.0, ray_metrics_port: {RAY_PORT}}}
engine: {{threads: 1, kv_memory: 0.1, host_memory: 0.05}}
router: {{body_timeout_s: 3}}
tenants:
  - {{name: acme, key_hashes: ['{hash_key("acme")}'], limits: {{max_concurrent: 64}}}}
  - {{name: small, key_hashes: ['{hash_key("small")}'], limits: {{requests_per_minute: 1}}}}
  - {{name: watcher, key_hashes: ['{hash_key("watcher")}'], operator: true}}
"""


@pytest.fixture(scope="module")
def exposed(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_metrics_report_interval_ms", "1000")  # ten seconds by default
        server = start(tmp_path_factory.mktemp("server"), SETTINGS)
    try:
        yield server
        server.stop(signal.SIGTERM)
    finally:
        server.process.kill()


def test_ray_says_how_it_is_on_the_port_that_it_is_given(exposed: Any, eventually: Any) -> None:
    eventually(
        lambda: "ray_serve_" in httpx.get(f"http://127.0.0.1:{RAY_PORT}/metrics", trust_env=False).text,
        WITHIN_S,
    )


def test_its_redis_and_its_proxy_are_processes_of_its_own(exposed: Any) -> None:
    commands = " ".join(exposed.processes().values())
    assert "redis-server" in commands
    assert "haproxy" in commands


def test_strangers_need_a_key_whatever_the_proxy_makes_of_their_address(exposed: Any, own_address: str) -> None:
    for host in (own_address, "127.0.0.1"):
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"x-forwarded-for": "127.0.0.1"}, 401),
            ({"authorization": "Bearer acme"}, 200),
        ):
            url = f"http://{host}:{exposed.port}/v1/models"
            assert httpx.get(url, headers=headers, trust_env=False).status_code == status
    for path in ("/metrics", "/metrics/targets"):
        url = f"http://{own_address}:{exposed.port}{path}"
        for key, status in (("wrong", 401), ("acme", 403), ("watcher", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(url, headers=headers, trust_env=False).status_code == status


def test_rude_clients_are_cut_off_and_a_polite_one_is_answered(exposed: Any, eventually: Any) -> None:
    """Some say nothing, one never ends its headers, one never ends its body. `tools/rude_clients.py` measures more."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer acme\r\n"
    sent = [*[b""] * IDLE, head, head + b"Content-Length: 100\r\n\r\n{"]
    with ExitStack() as open_connections:
        rude = [
            open_connections.enter_context(socket.create_connection(("127.0.0.1", exposed.port), timeout=PATIENCE_S))
            for _ in sent
        ]
        for client, data in zip(rude, sent, strict=True):
            client.sendall(data)
        body = {"model": "pocket", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        polite = {"authorization": "Bearer acme"}
        answer = httpx.post(f"{exposed.url}/v1/chat/completions", json=body, headers=polite, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert {client.recv(4096).split()[1] for client in rude} == {b"408"}

    def running() -> int:
        headers = {"authorization": "Bearer watcher"}
        status = httpx.get(f"{exposed.url}/v1/cluster/status", headers=headers, trust_env=False).json()
        return sum(tenant["running"] for tenant in status["tenants"])

    eventually(lambda: not running())


@pytest.fixture(scope="module")
def prometheus(exposed: Any, eventually: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes the server every two seconds while there is load."""
    found("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    started = Prometheus(
        folder, configuration(exposed.url, folder), environment.internal_ports(random.Random()).metrics
    )
    load = Load(exposed.url)
    try:
        eventually(lambda: started.ready, WITHIN_S)
        yield started
    finally:
        load.stop()
        started.stop()


def configuration(url: str, folder: Path) -> dict[str, Any]:
    for name, text in files().items():
        (folder / name).write_text(text)
    # Trap: without a type, service discovery of Debian's version sends the key in no way that a server knows.
    key = {"type": "Bearer", "credentials": "watcher"}
    discovered = {"url": f"{url}/metrics/targets", "refresh_interval": "2s", "authorization": key}
    return {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(folder / name) for name in files()],
        "scrape_configs": [
            {"job_name": "holdfast", "authorization": key, "http_sd_configs": [discovered]},
            {"job_name": "ray", "static_configs": [{"targets": [f"127.0.0.1:{RAY_PORT}"]}]},
        ],
    }


def asked() -> dict[str, str]:
    """Every expression, by what asks it. Over the last seconds, for a gauge may be nothing between two requests."""
    asking = {f"rule {each.name}": each.expression for each in RECORDINGS}
    asking |= {f"alert {each.name}": each.value for each in ALERTS}
    for board in BOARDS:
        for row in board.rows:
            for panel in row.panels:
                for query in () if panel.gpu else panel.queries:
                    asking[f"{board.name} / {panel.title} / {query.legend}"] = chosen(query.expression)
    return {name: f"last_over_time(({expression})[60s:2s])" for name, expression in asking.items()}


def chosen(expression: str) -> str:
    """As Grafana asks, with everything chosen."""
    return re.sub(r'"\$\w+"', '".*"', expression).replace("$__rate_interval", "30s")


def test_every_process_is_found_and_answers(prometheus: Prometheus, eventually: Any) -> None:
    """Each at some time: on a busy machine a scrape may take longer than it is given."""

    def answered() -> list[tuple[str, str]]:
        rows = prometheus.ask("query", query="max_over_time(up[10m]) == 1")["result"]
        return sorted((row["metric"]["job"], row["metric"].get("process", "")) for row in rows)

    wanted = [("holdfast", "replica"), ("holdfast", "router"), ("ray", "")]
    eventually(lambda: answered() == wanted, WITHIN_S)


def test_every_panel_and_rule_has_data(prometheus: Prometheus) -> None:
    waiting = asked()

    def answered() -> bool:
        nonlocal waiting
        waiting = {name: each for name, each in waiting.items() if not prometheus.values(each)}
        return not waiting

    with suppress(TimeoutError):
        until(answered, WITHIN_S, every_s=0.5)
    assert sorted(waiting) == []


def test_panels_that_need_a_gpu_parse(prometheus: Prometheus) -> None:
    panels = [panel for board in BOARDS for row in board.rows for panel in row.panels if panel.gpu]
    assert panels
    for panel in panels:
        for query in panel.queries:
            prometheus.ask("query", query=chosen(query.expression))


def test_prometheus_has_taken_every_rule_and_none_fires_that_should_not(prometheus: Prometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert {name: rule["lastError"] for name, rule in rules.items() if rule.get("lastError")} == {}
    assert rules.keys() == {each.name for each in (*ALERTS, *RECORDINGS)}
    critical = {each.name for each in ALERTS if each.severity == "critical"}
    assert {name for name in critical if rules[name]["state"] == "firing"} == set()
