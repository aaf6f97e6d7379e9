"""Clients of others, unmodified: each does a tool task of two turns against the real router over HTTP.

The model behind it is scripted (`scripted`), so that a call is what the client has to carry out. `docs/clients.md` has
a row for each test of this file. Without HOLDFAST_CLIENTS, the folder that `make clients` installs into, those that are
not in the development environment are left out.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import real_clients
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from scripted import Script, ScriptedBackend, scripted
from service_backend import engine_served

SECRET = "heron"
WEATHER = Script({"get_weather": {"city": "Oslo"}}, said="It is ")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = "What is the weather in Oslo?"


@pytest.fixture
def weather() -> Iterator[tuple[str, ScriptedBackend]]:
    with scripted(WEATHER) as served:
        yield served


def needed(client: str, name: str) -> Path:
    """The executable, or the test is left out."""
    found = real_clients.program(client, name)
    if found is None:
        pytest.skip(f"{client} is not installed: `make clients`")
    return found


# ---- in the development environment ----


def test_openai_chat(weather: tuple[str, ScriptedBackend]) -> None:
    client = openai.OpenAI(base_url=f"{weather[0]}/v1", api_key="unused")
    function: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model="pocket", messages=messages, tools=[function]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4 degrees"}]
    answer = client.chat.completions.create(model="pocket", messages=messages, tools=[function])
    assert answer.choices[0].message.content == "It is 4 degrees"


def test_openai_responses(weather: tuple[str, ScriptedBackend]) -> None:
    client = openai.OpenAI(base_url=f"{weather[0]}/v1", api_key="unused")
    function: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    with client.responses.stream(model="pocket", input=QUESTION, tools=[function]) as stream:
        first = stream.get_final_response()
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    answer = client.responses.create(model="pocket", input=[result], previous_response_id=first.id, tools=[function])
    assert answer.output_text == "It is 4 degrees"


def test_anthropic_messages(weather: tuple[str, ScriptedBackend]) -> None:
    client = anthropic.Anthropic(base_url=weather[0], api_key="unused")
    tool: Any = {"name": "get_weather", "input_schema": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(model="pocket", max_tokens=100, messages=messages, tools=[tool]) as stream:
        message = stream.get_final_message()
    call = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="pocket", max_tokens=100, messages=messages, tools=[tool])
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "It is 4 degrees"
    assert [model.id for model in client.models.list()] == ["pocket"]


def test_langgraph(weather: tuple[str, ScriptedBackend]) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "4 degrees"

    model = ChatOpenAI(base_url=f"{weather[0]}/v1", api_key="unused", model="pocket", streaming=True)
    agent = create_react_agent(model, [get_weather])
    told = agent.invoke({"messages": [("user", QUESTION)]})
    assert told["messages"][-1].content == "It is 4 degrees"


# ---- installed by `make clients` ----

LITELLM = """
import sys, litellm
base, tool = sys.argv[1], {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}}, "required": ["city"]}}}

def ask(model, base, **fields):
    return litellm.completion(model=model, api_base=base, api_key="unused", **fields)

for model, where in (("openai/pocket", base + "/v1"), ("hosted_vllm/pocket", base + "/v1"), ("anthropic/pocket", base)):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    message = ask(model, where, messages=messages, tools=[tool], tool_choice="auto").choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"tool_call_id": call.id, "role": "tool", "name": call.function.name, "content": "4 degrees"})
    chunks = list(ask(model, where, messages=messages, tools=[tool], stream=True))
    print(litellm.stream_chunk_builder(chunks).choices[0].message.content)
    try:
        ask(model, where, messages=[{"role": "user", "content": "x" * 200_000}])
    except litellm.ContextWindowExceededError:
        print("too long")
print(litellm.responses(model="openai/pocket", api_base=base + "/v1", api_key="unused", input="hi").output_text)
"""


def test_litellm(weather: tuple[str, ScriptedBackend], tmp_path: Path) -> None:
    """Its documented tool loop by three of its providers; each knows a prompt that is too long."""
    done = real_clients.run(
        (needed("LiteLLM", "python"), "-c", LITELLM, weather[0]), tmp_path, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line in ("It is 4 degrees", "too long", "Hello")]
    assert said == ["It is 4 degrees", "too long"] * 3 + ["Hello"], done.stdout


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
        print((await Runner.run(agent, "What is the weather in Oslo?")).final_output)
        streamed = Runner.run_streamed(agent, "What is the weather in Oslo now?")
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)

asyncio.run(main())
"""


def test_openai_agents(weather: tuple[str, ScriptedBackend], tmp_path: Path) -> None:
    done = real_clients.run((needed("OpenAI Agents SDK", "python"), "-c", AGENTS, weather[0]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["It is 4 degrees"] * 4


def test_guidellm(tmp_path: Path) -> None:
    guidellm, report = needed("guidellm", "guidellm"), tmp_path / "report.json"
    with engine_served() as address:
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


def test_aiperf(tmp_path: Path) -> None:
    aiperf = needed("aiperf", "aiperf")
    with engine_served() as address:
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


def reads_a_file(
    client: Callable[..., subprocess.CompletedProcess[str]], program: Path, folder: Path
) -> tuple[str, ScriptedBackend]:
    """What a command-line agent prints that was asked for the word in a file, and the model that it talked to."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    (work / "note.txt").write_text(f"the secret word is {SECRET}\n")
    script = Script(
        {
            "Read": {"file_path": str(work / "note.txt")},
            "read": {"filePath": str(work / "note.txt")},
            "exec_command": {"cmd": "cat note.txt"},
            "shell": {"command": ["cat", "note.txt"]},
        }
    )
    with scripted(script) as (address, backend):
        done = client(program, address, home, work, "What is the secret word in note.txt?")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with_tools = [request for request in backend.requests if getattr(request.prompt, "tools", ())]
    assert len({request.program_id for request in with_tools}) == 1, "both turns are of one program"
    assert len(with_tools) == 2
    return done.stdout, backend


def test_claude_code(tmp_path: Path) -> None:
    said, backend = reads_a_file(real_clients.claude, needed("Claude Code", "claude"), tmp_path)
    assert SECRET in json.loads(said)["result"]
    first, second = backend.requests
    assert second.prompt.messages[: len(first.prompt.messages)] == first.prompt.messages, "the beginning is found again"


def test_codex(tmp_path: Path) -> None:
    said, _ = reads_a_file(real_clients.codex, needed("Codex CLI", "codex"), tmp_path)
    events = [json.loads(line) for line in said.splitlines()]
    [*_, last] = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
    assert SECRET in last
    assert events[-1]["type"] == "turn.completed"


def test_opencode(tmp_path: Path) -> None:
    said, _ = reads_a_file(real_clients.opencode, needed("OpenCode", "opencode"), tmp_path)
    texts = [event["part"]["text"] for event in map(json.loads, said.splitlines()) if event["type"] == "text"]
    assert SECRET in texts[-1]
