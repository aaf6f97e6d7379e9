"""The example of the docs, against the shipped model."""

import importlib.util
from pathlib import Path
from typing import Any

import httpx
from fake_backend import World
from service_backend import ServiceBackend

from holdfast.replicas.config import EngineConfig

PATH = Path(__file__).parent.parent / "examples" / "market_data.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("market_data", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prices_are_watched() -> None:
    market = example()
    backend = ServiceBackend(EngineConfig(cells=8192, threads=1, context_length=2048, max_sequences=8, session_rows=4))
    said: list[str] = []
    try:
        with World(backend).served() as address, httpx.Client(base_url=address, timeout=market.PATIENCE_S) as client:
            answers = market.watch(client, "pocket", said.append)
            assert client.get("/v1/sessions").json()["data"] == []
    finally:
        backend.stop()
    assert [(each["append"], each["up_to_date"]) for each in answers] == [(market.TICKS + 1, True)] * 3
    assert all(each["answer"]["usage"]["completion_tokens"] > 0 for each in answers)
    computed = [int(line.split("   ")[1].split()[0]) for line in said[: market.TICKS]]
    assert max(computed) < 64  # a tick costs a tick, however many came before
    assert len(said) == market.TICKS + 1 + 3
