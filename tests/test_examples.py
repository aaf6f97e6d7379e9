"""The example of the docs, against the shipped model."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import httpx
from service_backend import ServiceBackend, engine_served

from holdfast.replicas.config import EngineConfig

PATH = Path(__file__).parent.parent / "examples" / "market_data.py"


def test_prices_are_watched() -> None:
    market = SimpleNamespace(**runpy.run_path(str(PATH)))
    backend = ServiceBackend(EngineConfig(cells=8192, threads=1, context_length=2048, max_sequences=8, session_rows=4))
    said: list[str] = []
    with engine_served(backend) as address, httpx.Client(base_url=address, timeout=market.PATIENCE_S) as client:
        answers = market.watch(client, "pocket", said.append)
        assert client.get("/v1/sessions").json()["data"] == []
    assert [(each["append"], each["up_to_date"]) for each in answers] == [(market.TICKS + 1, True)] * 3
    assert all(each["answer"]["usage"]["completion_tokens"] > 0 for each in answers)
    computed = [int(line.split("   ")[1].split()[0]) for line in said[: market.TICKS]]
    assert max(computed) < 64  # a tick costs a tick, however many came before
    assert len(said) == market.TICKS + 1 + 3
