"""A server on every interface: strangers need a key, and SIGTERM leaves nothing behind."""

import signal
from pathlib import Path
from typing import Any

import httpx

from holdfast.router.tenants import hash_key

SETTINGS = f"""
server: {{host: 0.0.0.0}}
engine: {{threads: 1, kv_memory: 0.1}}
tenants:
  - {{name: acme, key_hashes: ['{hash_key("right")}']}}
"""


def test_strangers_need_a_key_whatever_the_proxy_makes_of_their_address(
    start: Any, tmp_path: Path, own_address: str
) -> None:
    server = start(tmp_path, SETTINGS)
    try:
        for host in (own_address, "127.0.0.1"):
            for headers, status in (
                ({}, 401),
                ({"authorization": "Bearer wrong"}, 401),
                ({"x-forwarded-for": "127.0.0.1"}, 401),
                ({"authorization": "Bearer right"}, 200),
            ):
                url = f"http://{host}:{server.port}/v1/models"
                assert httpx.get(url, headers=headers, trust_env=False).status_code == status
        metrics = f"http://{own_address}:{server.port}/metrics"
        assert httpx.get(metrics, trust_env=False).status_code == 401
        server.stop(signal.SIGTERM)
    finally:
        server.process.kill()
