"""The examples of the docs, as they stand there, against the router and an engine with the shipped model."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from doc_commands import AGENTS, agent, blocks
from service_backend import ServiceBackend, engine_served

from holdfast.replicas.config import EngineConfig

PRICES = Path(__file__).parent.parent / "examples" / "market_data.py"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServiceBackend, str]]:
    """A server and its address."""
    backend = ServiceBackend(EngineConfig(cells=8192, threads=1, context_length=2048, max_sequences=8, session_rows=4))
    with engine_served(backend) as address:
        yield backend, address


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_of_agents_has_its_answer(name: str, served: tuple[ServiceBackend, str], capsys) -> None:
    if name == "ChatOpenAI":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    backend, address = served
    before = len(backend.requests)
    exec(compile(agent(name, address), f"docs/agents.md: {name}", "exec"), {"__name__": "example"})
    asked = [request for request in backend.requests[before:] if request.sampling.max_tokens]  # 0: sent ahead
    assert "rain" in capsys.readouterr().out
    assert len(asked) == 2
    assert {request.program_id for request in asked} == {f"default/trip-{AGENTS.index(name) + 1}"}
    assert asked[1].prompt.messages[2]["role"] == "tool"


def test_every_example_of_agents_is_run() -> None:
    assert sum(block.language == "python" for block in blocks("agents.md")) == len(AGENTS)


def test_prices_are_watched(served: tuple[ServiceBackend, str]) -> None:
    market, said = SimpleNamespace(**runpy.run_path(str(PRICES))), []
    with httpx.Client(base_url=served[1], timeout=market.PATIENCE_S) as client:
        answers = market.watch(client, "pocket", said.append)
        assert client.get("/v1/sessions").json()["data"] == []
    assert [(each["append"], each["up_to_date"]) for each in answers] == [(market.TICKS + 1, True)] * 3
    assert all(each["answer"]["usage"]["completion_tokens"] > 0 for each in answers)
    computed = [int(line.split("   ")[1].split()[0]) for line in said[: market.TICKS]]
    assert max(computed) < 64  # a tick costs a tick, however many came before
    assert len(said) == market.TICKS + 1 + 3
