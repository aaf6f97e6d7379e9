"""Clients of others, unmodified: each does a tool task of two turns against `holdfast serve`, which all of them share.

Its replica is Pocket, told that its context is longer, and its engine computes every prompt; where a task is in one,
the reply is scripted (`scripted`), so that there is a call to carry out. `docs/clients.md` has a row for each test.
Runs in `make clients`, which sets HOLDFAST_CLIENTS to the folder that it installs into; what is not there is left out.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import anthropic
import httpx
import openai
import pytest
import real_clients
from scripted import HELLO, WEATHER

CONTEXT = 40_960
SECRET = "heron"
Turns: TypeAlias = Callable[[], dict[str, int]]
Ask: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANSWER = "The tool says: 4 degrees"


@pytest.fixture(scope="module")
def address(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if real_clients.folder() is None:
        pytest.skip("clients are not installed: `make clients`")
    folder = tmp_path_factory.mktemp("clients")
    shutil.copytree(real_clients.WEIGHTS, folder / "pocket")
    config = folder / "pocket" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    settings = f"engine: {{cells: {2 * CONTEXT}, threads: 2}}\nrouter: {{response_cache: false}}\n"
    server = start(folder, settings, "--model", str(folder / "pocket"), replica="scripted:ScriptedReplica")
    try:
        yield server.url
        server.stop(signal.SIGINT)
    finally:
        server.process.kill()


@pytest.fixture
def turns(address: str) -> Turns:
    """The turns that programs have had since the test began, by program; of those that had one."""

    def all_turns() -> dict[str, int]:
        told = httpx.get(f"{address}/v1/cluster/status?programs=1000", timeout=60).json()["programs"]
        return {each["program"]: each["turns"] for each in told}

    before = all_turns()
    return lambda: {each: n - before.get(each, 0) for each, n in all_turns().items() if n > before.get(each, 0)}


def needed(client: str, name: str) -> Path:
    """The executable, or the test is left out."""
    found = real_clients.program(client, name)
    if found is None:
        pytest.skip(f"{client} is not installed: `make clients`")
    return found


# ---- in the development environment ----


def test_openai_chat(address: str, turns: Turns) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused")
    function: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    with client.chat.completions.stream(model="pocket", messages=messages, tools=[function]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4 degrees"}]
    answer = client.chat.completions.create(model="pocket", messages=messages, tools=[function])
    assert answer.choices[0].message.content == ANSWER
    assert list(turns().values()) == [2]


def test_openai_responses(address: str, turns: Turns) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="unused")
    function: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    with client.responses.stream(model="pocket", input=WEATHER, tools=[function]) as stream:
        first = stream.get_final_response()
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    answer = client.responses.create(model="pocket", input=[result], previous_response_id=first.id, tools=[function])
    assert answer.output_text == ANSWER
    assert list(turns().values()) == [2]


def test_anthropic_messages(address: str, turns: Turns) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="unused")
    tool: Any = {"name": "get_weather", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    with client.messages.stream(model="pocket", max_tokens=100, messages=messages, tools=[tool]) as stream:
        message = stream.get_final_message()
    call = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="pocket", max_tokens=100, messages=messages, tools=[tool])
    assert answer.content[0].type == "text"
    assert answer.content[0].text == ANSWER
    assert list(turns().values()) == [2]
    assert [model.id for model in client.models.list()] == ["pocket"]


def test_langgraph(address: str, turns: Turns) -> None:
    from langchain_openai import ChatOpenAI  # here, for who runs other tests waits a second for them
    from langgraph.prebuilt import create_react_agent

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "4 degrees"

    model = ChatOpenAI(base_url=f"{address}/v1", api_key="unused", model="pocket", streaming=True)
    agent = create_react_agent(model, [get_weather])
    told = agent.invoke({"messages": [("user", WEATHER)]})
    assert told["messages"][-1].content == ANSWER
    assert list(turns().values()) == [2]


# ---- installed by `make clients` ----

LITELLM = """
import sys, litellm
base, question, hello = sys.argv[1:]
tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}}, "required": ["city"]}}}

def ask(model, base, **fields):
    return litellm.completion(model=model, api_base=base, api_key="unused", **fields)

for model, where in (("openai/pocket", base + "/v1"), ("hosted_vllm/pocket", base + "/v1"), ("anthropic/pocket", base)):
    messages = [{"role": "user", "content": question}]
    message = ask(model, where, messages=messages, tools=[tool], tool_choice="auto").choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "4 degrees"})
    chunks = list(ask(model, where, messages=messages, tools=[tool], stream=True))
    print("told:", litellm.stream_chunk_builder(chunks).choices[0].message.content)
    try:
        ask(model, where, messages=[{"role": "user", "content": "weather " * 50_000}])
    except litellm.ContextWindowExceededError:
        print("told: it is too long")
greeted = litellm.responses(model="openai/pocket", api_base=base + "/v1", api_key="unused", input=hello)
print("told:", greeted.output_text)
"""


def test_litellm(address: str, turns: Turns, tmp_path: Path) -> None:
    """Its documented tool loop by three of its providers; each knows a prompt that is too long."""
    done = real_clients.run(
        (needed("LiteLLM", "python"), "-c", LITELLM, address, WEATHER, HELLO),
        tmp_path,
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("told: ") for line in done.stdout.splitlines() if line.startswith("told: ")]
    assert said == [ANSWER, "it is too long"] * 3 + ["Hello"], done.stdout
    assert sorted(turns().values()) == [1, 2, 2, 2]


AGENTS = """
import asyncio, sys
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def get_weather(city: str) -> str:
    "The weather in a city."
    return "4 degrees"

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="unused")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(name="w", tools=[get_weather], model=kind(model="pocket", openai_client=client))
        print((await Runner.run(agent, sys.argv[2])).final_output)
        streamed = Runner.run_streamed(agent, sys.argv[2])
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)

asyncio.run(main())
"""


def test_openai_agents(address: str, turns: Turns, tmp_path: Path) -> None:
    done = real_clients.run((needed("OpenAI Agents SDK", "python"), "-c", AGENTS, address, WEATHER), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [ANSWER] * 4
    assert list(turns().values()) == [2] * 4


def test_guidellm(address: str, turns: Turns, tmp_path: Path) -> None:
    guidellm, report = needed("guidellm", "guidellm"), tmp_path / "report.json"
    done = real_clients.run(
        (
            *(guidellm, "run", "--backend", f"kind=openai_http,target={address},model=pocket"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=hf_auto,model={real_clients.WEIGHTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ),
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)
    assert sum(turns().values()) >= 4


def test_aiperf(address: str, turns: Turns, tmp_path: Path) -> None:
    aiperf = needed("aiperf", "aiperf")
    done = real_clients.run(
        (
            *(aiperf, "profile", "--model", "pocket", "--url", address, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", real_clients.WEIGHTS, "--request-count", "6", "--concurrency", "2"),
            *("--isl", "64", "--osl", "8", "--artifact-dir", tmp_path / "out", "--ui", "none"),
        ),
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    [summary] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    assert json.loads(summary.read_text())["request_count"]["avg"] == 6
    assert sum(turns().values()) >= 6


def works_twice(
    ask: Ask, program: Path, address: str, turns: Turns, folder: Path, *again: str, titles: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a command-line agent prints, lines of JSON, that reads a file, and that is greeted in a second invocation.

    The first has two turns, and asks for so many `titles`, all of one program; the second, with the arguments `again`,
    has one more turn of it.
    """
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(f"the secret word is {SECRET}\n")
    told, had = [], []
    for arguments in ((f"What is the secret word in {work / 'note.txt'}?",), (*again, HELLO)):
        done = ask(program, address, home, work, *arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        told.append([json.loads(line) for line in done.stdout.splitlines()])
        had.append(turns())
    [reader] = had[0]
    assert had == [{reader: 2 + titles}, {reader: 3 + titles}]
    return told[0], told[1]


def goes_on_from(prompt: int, cached: int) -> None:
    """Of a prompt as such agents send them, all but what is new in its last turn was computed before."""
    assert 10_000 <= prompt <= 30_000
    assert prompt - 200 < cached < prompt


def test_claude_code(address: str, turns: Turns, tmp_path: Path) -> None:
    program = needed("Claude Code", "claude")
    [first], [second] = works_twice(real_clients.claude, program, address, turns, tmp_path, "--continue")
    assert SECRET in first["result"]
    assert second["result"] == "Hello"
    used = second["usage"]
    goes_on_from(used["input_tokens"] + used["cache_read_input_tokens"], used["cache_read_input_tokens"])


def test_codex(address: str, turns: Turns, tmp_path: Path) -> None:
    program = needed("Codex CLI", "codex")
    first, second = works_twice(real_clients.codex, program, address, turns, tmp_path, "resume", "--last")
    for events, said in ((first, SECRET), (second, "Hello")):
        [*_, last] = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
        assert said in last
        assert events[-1]["type"] == "turn.completed"
    used, before = second[-1]["usage"], first[-1]["usage"]  # of all turns by then
    goes_on_from(*(used[kind] - before[kind] for kind in ("input_tokens", "cached_input_tokens")))


@pytest.mark.parametrize("name", ["Holdfast", "OpenAI"])
def test_codex_compacts(address: str, turns: Turns, tmp_path: Path, name: str) -> None:
    """Its context counts as full after every answer: it goes on from a summary, which it has the model write as any
    answer, or, of a provider by OpenAI's name, asks for as a compaction.
    """
    program = needed("Codex CLI", "codex")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(f"the secret word is {SECRET}\n")
    full = ("-c", "model_auto_compact_token_limit=5000", "-c", f"model_providers.holdfast.name={name}")
    for arguments, said in (
        ((f"What is the secret word in {work / 'note.txt'}?",), SECRET),
        (("resume", "--last", HELLO), "Hello"),
    ):
        done = real_clients.codex(program, address, home, work, *full, *arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        events = [json.loads(line) for line in done.stdout.splitlines()]
        told = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
        assert said in told[-1], events
    assert sum(turns().values()) > 3, "no turn made it short"


def test_opencode(address: str, turns: Turns, tmp_path: Path) -> None:
    program = needed("OpenCode", "opencode")
    first, second = works_twice(real_clients.opencode, program, address, turns, tmp_path, "--continue", titles=1)
    for events, said in ((first, SECRET), (second, "Hello")):
        [*_, last] = [event["part"]["text"] for event in events if event["type"] == "text"]
        assert said in last
    used = second[-1]["part"]["tokens"]
    goes_on_from(used["input"] + used["cache"]["read"], used["cache"]["read"])
