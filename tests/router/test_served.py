"""The router behind a real HTTP server, with the clients people use."""

import http.client
import json
import socket

import httpx
import openai
import pytest
from fake_backend import CALL, FakeBackend, World, chat_body, config_of

from holdfast.replicas.errors import ErrorInfo, ErrorKind
from holdfast.replicas.requests import Errored, TextDelta, Usage

MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}, "strict": True}}]
PATIENT = 60.0  # seconds a slow machine may take


@pytest.fixture
def world():
    return World()


@pytest.fixture
def client(world):
    with world.served() as address, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(world, client):
    asked = {"model": "pocket", "messages": MESSAGES, "seed": 5, "extra_body": {"program_id": "p"}}
    raw = client.chat.completions.with_raw_response.create(**asked)
    answer = raw.parse()
    assert (answer.object, answer.choices[0].finish_reason) == ("chat.completion", "stop")
    message = answer.choices[0].message.model_dump(exclude_unset=True)
    assert message == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert (raw.headers["x-holdfast-cache"], raw.headers["x-holdfast-replica"]) == ("miss", "r1")
    assert raw.headers["server-timing"] == "queue;dur=125.0, prefill;dur=125.0, decode;dur=250.0"
    [request] = world.backend.requests
    assert (request.scope, request.program_id, request.sampling.seed) == ("default", "default/p", 5)
    assert request.program_arrival > 0


def test_openai_streaming(client):
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="pocket", messages=MESSAGES, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello!"
    assert chunks[-1].usage.total_tokens == 13
    assert chunks[-1].timing == {"queue_ms": 125.0, "prefill_ms": 125.0, "decode_ms": 250.0}


def test_an_agents_turn_with_a_tool_and_its_result(world, client):
    world.backend.script = CALL
    first = client.chat.completions.create(model="pocket", messages=MESSAGES, tools=TOOLS, tool_choice="auto")
    message = first.choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    returned = message.model_dump()  # every field, null or not
    client.chat.completions.create(model="pocket", messages=[*MESSAGES, returned, result], tools=TOOLS)
    one, two = world.backend.requests
    assert one.program_id == two.program_id
    assert two.prompt.messages[1]["tool_calls"][0]["id"] == "call_1"


def test_a_message_that_the_client_parsed_comes_back(world, client):
    world.backend.script = CALL
    first = client.chat.completions.parse(model="pocket", messages=MESSAGES, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4 degrees"}
    client.chat.completions.create(model="pocket", messages=[*MESSAGES, message, result])
    function = world.backend.requests[-1].prompt.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "get_weather", "arguments": '{"city":"Oslo"}'}


def test_openais_accumulator_reads_our_tool_calls(world, client):
    world.backend.script = CALL
    with client.chat.completions.stream(model="pocket", messages=MESSAGES, tools=TOOLS) as stream:
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "get_weather", '{"city":"Oslo"}')


def test_openai_completions_and_models(client):
    assert client.completions.create(model="pocket", prompt="hi").choices[0].text == "Hello!"
    streamed = client.completions.create(model="pocket", prompt=[1, 2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello!"
    assert [model.id for model in client.models.list()] == ["pocket"]


def test_openai_errors(world, client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="pocket", messages=MESSAGES, n=17)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    world.backend.script = [(TextDelta("half"),), (Errored(ErrorInfo(ErrorKind.INTERNAL, "broke")),)]
    with pytest.raises(openai.APIError, match="broke"):
        list(client.chat.completions.create(model="pocket", messages=MESSAGES, stream=True))


@pytest.mark.parametrize("stalled_before", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request_and_pays_for_what_was_drawn(stream, stalled_before):
    backend = FakeBackend()
    backend.stall, backend.used = stalled_before, Usage(prompt=10, cached=4, completion=2)
    world = World(backend)
    with world.served() as address:
        connection = http.client.HTTPConnection(address.removeprefix("http://"))
        connection.request("POST", "/v1/chat/completions", json.dumps(chat_body(stream=stream)))
        assert backend.started.wait(PATIENT)
        assert not backend.aborted.is_set()
        connection.close()
        assert backend.aborted.wait(PATIENT)
        assert backend.counted.wait(PATIENT)
        told = httpx.get(f"{address}/v1/cluster/status", timeout=PATIENT).json()
    assert backend.asked == [backend.requests[0].request_id]
    assert (world.outcomes(), world.in_flight(), backend.open_streams) == ({"aborted": 1}, 0, 0)
    for kind, n in (("prompt", 10), ("cached", 4), ("completion", 2)):
        labels = {"tenant": "default", "model": "pocket", "kind": kind}
        assert world.registry.get_sample_value("holdfast_tenant_tokens_total", labels) == n
    [tenant] = told["tenants"]
    assert (tenant["prompt_tokens"], tenant["completion_tokens"]) == (10, 2)


def test_who_stays_to_the_end_pays_once(world, client):
    world.backend.used = Usage(prompt=999)
    client.chat.completions.create(model="pocket", messages=MESSAGES)
    list(client.chat.completions.create(model="pocket", messages=MESSAGES, stream=True, temperature=0.5))
    assert world.backend.asked == []


def test_a_client_that_never_reads_is_ended():
    lines = 2**14  # of a kilobyte: more than sockets and the server keep for a reader
    world = World(FakeBackend([(TextDelta("x" * 1000),)] * lines), config=config_of(stall_s=0.2))
    body = json.dumps(chat_body(stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with world.served() as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        client.sendall(head + body)
        assert world.backend.aborted.wait(PATIENT)
    assert world.outcomes() == {"aborted": 1}
    assert world.backend.open_streams == 0


def test_a_long_body_is_refused_over_a_socket(world):
    with world.served() as address:
        answer = httpx.post(f"{address}/v1/chat/completions", content=b" " * (33 * 2**20), timeout=PATIENT)
    assert answer.status_code == 413
