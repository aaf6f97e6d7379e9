"""The examples of docs/agents.md, as they stand there, against the router and an engine."""

from collections.abc import Iterator

import pytest
from doc_commands import blocks
from service_backend import ServiceBackend, engine_served

ADDRESS = "http://127.0.0.1:8000"
EXAMPLES = {
    name: next(
        block.text for block in blocks("agents.md") if block.language == "python" and f"import {name}\n" in block.text
    )
    for name in ("Orchestrator", "OpenAI", "ChatOpenAI")
}


@pytest.fixture(scope="module")
def backend() -> ServiceBackend:
    return ServiceBackend()


@pytest.fixture(scope="module")
def address(backend: ServiceBackend) -> Iterator[str]:
    with engine_served(backend) as address:
        yield address


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_its_answer(
    name: str, backend: ServiceBackend, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "ChatOpenAI":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    assert ADDRESS in EXAMPLES[name]
    before = len(backend.requests)
    exec(compile(EXAMPLES[name].replace(ADDRESS, address), f"docs/agents.md: {name}", "exec"), {"__name__": "example"})
    asked = [request for request in backend.requests[before:] if request.sampling.max_tokens]  # 0: sent ahead
    assert "rain" in capsys.readouterr().out
    assert len(asked) == 2
    assert {request.program_id for request in asked} == {f"default/trip-{list(EXAMPLES).index(name) + 1}"}
    assert asked[1].prompt.messages[2]["role"] == "tool"


def test_every_example_is_run() -> None:
    assert sum(block.language == "python" for block in blocks("agents.md")) == len(EXAMPLES)
