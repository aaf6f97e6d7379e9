"""The examples of docs/agents.md, as they stand there, against the router and an engine."""

from collections.abc import Iterator

import pytest
from doc_commands import AGENTS, agent, blocks
from service_backend import ServiceBackend, engine_served


@pytest.fixture(scope="module")
def backend() -> ServiceBackend:
    return ServiceBackend()


@pytest.fixture(scope="module")
def address(backend: ServiceBackend) -> Iterator[str]:
    with engine_served(backend) as address:
        yield address


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_has_its_answer(name: str, backend: ServiceBackend, address: str, capsys) -> None:
    if name == "ChatOpenAI":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    before = len(backend.requests)
    exec(compile(agent(name, address), f"docs/agents.md: {name}", "exec"), {"__name__": "example"})
    asked = [request for request in backend.requests[before:] if request.sampling.max_tokens]  # 0: sent ahead
    assert "rain" in capsys.readouterr().out
    assert len(asked) == 2
    assert {request.program_id for request in asked} == {f"default/trip-{AGENTS.index(name) + 1}"}
    assert asked[1].prompt.messages[2]["role"] == "tool"


def test_every_example_is_run() -> None:
    assert sum(block.language == "python" for block in blocks("agents.md")) == len(AGENTS)
