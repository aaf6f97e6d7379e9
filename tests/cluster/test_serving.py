"""A whole cluster as its users see it: conversation, streams, affinity, a dying replica, a vanishing client."""

import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from doc_commands import AGENTS, agent
from listening import listening
from program_load import TOOL
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub
from waiting import until_read

REPLICA = "ServeReplica:holdfast:replicas"
PRICES = Path(__file__).parent.parent.parent / "examples" / "market_data.py"


@pytest.fixture(scope="module")
def http(server: Any) -> Any:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def model(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


def chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def ask(http: httpx.Client, model: str, text: str, **more: Any) -> httpx.Response:
    response = http.post("/v1/chat/completions", json=chat(model, text, **more))
    assert response.status_code == 200, response.text
    return response


def counted(http: httpx.Client, name: str, **labels: str) -> float:
    """Sum of the samples of a metric that carry the labels."""
    total = 0.0
    for found, inside, value in re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", http.get("/metrics").text, re.MULTILINE):
        if found == name and all(f'{key}="{wanted}"' in inside for key, wanted in labels.items()):
            total += float(value)
    return total


def test_a_conversation_with_a_tool_result_stays_on_its_replica_and_in_its_cache(server: Any, model: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {
        "model": model,
        "tools": [TOOL],
        "temperature": 0,
        "max_tokens": 48,
        "extra_body": {"program_id": "conversation"},
    }
    first = client.chat.completions.with_raw_response.create(messages=messages, **options)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 21, "sky": "clear"}'},
    ]
    second = client.chat.completions.with_raw_response.create(messages=messages, **options)
    assert first.headers["x-holdfast-replica"] == second.headers["x-holdfast-replica"]
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= (first.parse().usage.prompt_tokens or 0) - 16


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_of_the_docs_has_its_answer(name: str, server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "ChatOpenAI":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    exec(compile(agent(name, server.url), f"docs/agents.md: {name}", "exec"), {"__name__": "example"})
    assert "rain" in capsys.readouterr().out


def test_the_example_of_prices_has_its_answers(server: Any) -> None:
    ran = subprocess.run([sys.executable, PRICES, server.url], capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    answers = re.findall(r"^(.*\?) .+ \(seen (\d+) of (\d+) appends", ran.stdout, re.MULTILINE)
    assert len(answers) == 3, ran.stdout
    assert all(seen == appends for _, seen, appends in answers), ran.stdout


def test_a_prompt_computed_ahead_is_found_by_its_turn_wherever_that_comes_in(http: httpx.Client, model: str) -> None:
    calls = [
        {"id": city, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for city in ("Oslo", "Rome")
    ]
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather in Oslo and in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain, 7 degrees"} for call in calls]
    ahead = {"model": model, "messages": messages, "tools": [TOOL], "program_id": "ahead"}
    made = http.post("/v1/prefills", json=ahead)
    assert made.status_code == 200, made.text
    path = f"/v1/prefills/{made.json()['id']}"
    longer = http.post(f"{path}/extend", json={"messages": results[:1]}).json()
    assert (longer["complete"], longer["cached_tokens"]) == (True, made.json()["tokens"])
    turn = {"model": model, "messages": [*messages, *results], "tools": [TOOL], "program_id": "ahead", "max_tokens": 8}
    answer = http.post("/v1/chat/completions", json=turn)
    assert answer.headers["x-holdfast-replica"] == made.headers["x-holdfast-replica"]
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == longer["tokens"]
    assert http.delete(path).json()["deleted"]
    assert http.get(path).json()["error"]["code"] == "prefill_not_found"


def test_a_stream_says_what_the_whole_answer_says(server: Any, model: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me something."}],
        "max_tokens": 24,
        "extra_headers": {"cache-control": "no-cache"},
    }
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_programs_stay_on_their_replicas_and_use_both(http: httpx.Client, model: str) -> None:
    def homes(turn: int) -> list[str]:
        # So few at a time that no replica is crowded: programs as short as these would leave it.
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda i: ask(http, model, f"turn {turn} of {i}", program_id=f"stay-{i}"), range(12))
            return [answer.headers["x-holdfast-replica"] for answer in answers]

    first = homes(0)
    assert len(set(first)) == 2
    assert homes(1) == first
    assert homes(2) == first


def test_rays_own_ports_listen_on_this_machine_only(server: Any) -> None:
    """Told by what is listened on, not by who can be reached: another cluster may have the same port of another
    address, as Ray's agents do, 52365.
    """
    everywhere = [
        (command, address, port)
        for pid, command in server.processes().items()
        for address, port in listening(pid)
        if not ipaddress.ip_address(address).is_loopback
    ]
    assert everywhere == []


def test_by_grpc_replicas_serve_nobody_without_the_clusters_key(server: Any) -> None:
    """They run what they are sent, so this is what keeps strangers out where several machines share a network."""
    codes, key = grpc.StatusCode, {}
    for variable in Path(f"/proc/{server.pids(REPLICA)[0]}/environ").read_bytes().split(b"\0"):
        if variable.startswith(b"RAY_AUTH_TOKEN_PATH="):
            token = Path(variable.partition(b"=")[2].decode()).read_text().strip()
            key = {"authorization": f"Bearer {token}"}
    for process in (REPLICA, "ServeReplica:holdfast:router"):
        pids = server.pids(process)
        ports = [port for pid in pids for _, port in listening(pid)]
        served = [port for port in ports if called(port, key) is codes.UNKNOWN]  # what it reads is empty
        assert len(served) == len(pids)
        assert {called(port, {}) for port in served} == {codes.UNAUTHENTICATED}


def called(port: int, metadata: dict[str, str]) -> grpc.StatusCode | None:
    """How a call of Serve's to that port ends; None: it is answered."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=60.0, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return None


def test_every_process_of_a_server_is_looked_at(server: Any) -> None:
    """Also Ray's agents, which write their name over their environment."""
    found = " ".join(server.processes().values())
    for name in ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "haproxy"):
        assert name in found


def both_serve(server: Any, http: httpx.Client) -> bool:
    """Whether two replicas are there, idle, and the routers know them."""
    known = set(re.findall(r'holdfast_cell_capacity\{[^}]*replica="(\w+)"', http.get("/metrics").text))
    return len(server.pids(REPLICA)) == len(known) == 2 and counted(http, "holdfast_sequence_rows_taken") == 0


def test_many_streams_at_once_all_end(http: httpx.Client, model: str) -> None:
    def last_line(i: int) -> str:
        body = chat(model, f"stream {i}", stream=True, program_id=f"many-{i}")
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            return [line for line in response.iter_lines() if line][-1]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(last_line, range(32))) == ["data: [DONE]"] * 32


def test_a_client_that_goes_aborts_its_request(eventually: Any, http: httpx.Client, model: str) -> None:
    aborted = counted(http, "holdfast_engine_requests_total", outcome="aborted")
    body = chat(model, "a long answer", stream=True, max_tokens=4000, logit_bias={}, ignore_eos=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    eventually(lambda: counted(http, "holdfast_engine_requests_total", outcome="aborted") == aborted + 1)
    eventually(lambda: counted(http, "holdfast_sequences_running") == 0)
    assert counted(http, "holdfast_cells", state="held") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_pays_for_what_was_drawn(
    server: Any, eventually: Any, http: httpx.Client, model: str, stream: bool
) -> None:
    def paid(kind: str) -> float:
        return counted(http, "holdfast_tenant_tokens_total", kind=kind)

    eventually(lambda: counted(http, "holdfast_sequences_running") == 0)
    prompt, completion = paid("prompt"), paid("completion")
    body = chat(model, f"a long answer, left early: {stream}", stream=stream, max_tokens=3000, ignore_eos=True)
    encoded = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(encoded)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + encoded)
        eventually(lambda: counted(http, "holdfast_sequences_running") == 1)
    eventually(lambda: paid("completion") > completion)
    assert paid("prompt") > prompt
    assert paid("completion") - completion <= 3000


def test_a_client_that_goes_before_a_whole_answer_aborts_its_request(
    server: Any, eventually: Any, http: httpx.Client, model: str
) -> None:
    """Its body came after its headers, in a read of its own, as clients send it that do not wait for one buffer."""
    aborted = counted(http, "holdfast_engine_requests_total", outcome="aborted")
    body = json.dumps(chat(model, "a long answer to nobody", max_tokens=4000, logit_bias={}, ignore_eos=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head)
            until_read(client)
            client.sendall(body)
            eventually(lambda: counted(http, "holdfast_sequences_running") == 1)
        eventually(lambda: counted(http, "holdfast_sequences_running") == 0)
    eventually(lambda: counted(http, "holdfast_engine_requests_total", outcome="aborted") == aborted + 2)


def test_a_request_may_be_longer_than_a_message_of_grpc(http: httpx.Client, model: str) -> None:
    response = http.post("/v1/chat/completions", json=chat(model, "a" * 5_000_000))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_an_exact_repeat_comes_from_the_response_cache(eventually: Any, http: httpx.Client, model: str) -> None:
    first = ask(http, model, "say it again")
    assert first.headers["x-holdfast-cache"] == "miss"

    def cached() -> str:
        return str(ask(http, model, "say it again").headers["x-holdfast-cache"])

    eventually(lambda: cached() == "hit")  # the other router finds it in Redis, soon after the answer
    again = ask(http, model, "say it again")
    assert again.headers["x-holdfast-cache"] == "hit"
    assert again.json()["choices"] == first.json()["choices"]
    bypassed = http.post(
        "/v1/chat/completions", json=chat(model, "say it again"), headers={"cache-control": "no-store"}
    )
    assert bypassed.headers["x-holdfast-cache"] == "bypass"


def test_how_long_a_tool_takes_reaches_every_replica_and_a_program_can_be_ended(
    eventually: Any, http: httpx.Client, model: str
) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, "program_id": "weather"}
    before = http.get("/v1/tools/latency").json()["overall"]["count"]
    for turn in range(3):
        ask(http, model, f"What is the weather in Oslo on day {turn}?", **forced)
    eventually(lambda: http.get("/v1/tools/latency").json()["overall"]["count"] == before + 2)
    found = http.get("/v1/tools/latency").json()
    assert [tool["tools"] for tool in found["data"]] == [["get_weather"]]
    assert found["data"][0]["count"] == found["overall"]["count"]
    assert counted(http, "holdfast_pin_misses_total") + counted(http, "holdfast_pin_hits_total") >= 2
    pinned = counted(http, "holdfast_programs_pinned")  # those of other programs last as long as nobody needs cells
    assert http.delete("/v1/programs/weather").json()["deleted"]
    assert http.delete("/v1/programs/weather").status_code == 404
    eventually(lambda: counted(http, "holdfast_programs_pinned") < pinned)


def test_answers_carry_the_request_id_once(http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert len(http.get("/v1/models").headers.get_list("x-request-id")) == 1


def test_tokens_go_there_and_back(http: httpx.Client, model: str) -> None:
    tokens = http.post("/tokenize", json={"model": model, "prompt": "Hello, world"}).json()["tokens"]
    back = http.post("/detokenize", json={"model": model, "tokens": tokens}).json()
    assert "Hello, world" in str(back)


def test_health_and_metrics_of_every_replica(server: Any, eventually: Any, http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200

    eventually(lambda: both_serve(server, http), 60.0)
    assert "holdfast_time_to_first_token_seconds" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/completions", b'{"model": "pocket", "prompt": "%s", "max_tokens": 1}' % (b"word " * 20000), 400),
        ("/nowhere", b"{}", 404),
    ],
    ids=["not JSON", "too long", "no such path"],
)
def test_bad_requests_are_refused_in_the_openai_shape(http: httpx.Client, path: str, body: bytes, status: int) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_nothing_that_serves_models_listens_beyond_this_machine(server: Any) -> None:
    """Without API keys neither the proxy nor a replica behind it can be reached from elsewhere."""
    places = {place for pid in server.processes() for place in listening(pid)}
    serving = {(address, port) for address, port in places if _answers(port)}
    assert server.port in {port for _, port in serving}
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in serving), serving


def _answers(port: int) -> bool:
    try:
        response = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)
    except httpx.HTTPError:
        return False
    return "x-holdfast-cache" in response.headers


@contextmanager
def lost(server: Any, how: signal.Signals) -> Iterator[int]:
    """One of two replicas is killed, or stands still with all its threads, and is killed afterwards."""
    victim = server.pids(REPLICA)[0]
    os.kill(victim, how)
    try:
        yield victim
    finally:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "still"])
def test_a_lost_replica_costs_its_programs_one_move_and_its_requests_some_time(
    server: Any, eventually: Any, http: httpx.Client, model: str, how: signal.Signals
) -> None:
    """Requests that stream go on where they were: the rest is what the first replica would have said.

    The console names the loss and the recovery.
    """
    begun: set[int] = set()
    path, headers = "/v1/chat/completions", {"cache-control": "no-store"}
    said_before = len(server.output.read_text())

    def said() -> str:
        return str(server.output.read_text()[said_before:])

    def home(program: str, turn: int) -> str:
        return str(ask(http, model, f"turn {turn} of {program}", program_id=program).headers["x-holdfast-replica"])

    def body(i: int, **more: Any) -> dict[str, Any]:
        options = {"max_tokens": 400, "ignore_eos": True, "program_id": f"survivor-{how}-{i}", "temperature": 1.0}
        return chat(model, f"a long answer, number {i}, {how}", **options, **more)

    def whole(i: int) -> str:
        return str(http.post(path, json=body(i), headers=headers).json()["choices"][0]["message"]["content"])

    def streamed(i: int) -> str:
        choices = []
        with http.stream("POST", path, json=body(i, stream=True), headers=headers) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices.append(json.loads(line[6:])["choices"][0])  # an error has none
                    begun.add(i)
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["delta"].get("content", "") for choice in choices)

    eventually(lambda: both_serve(server, http), 120.0)
    programs = [f"move-{how}-{i}" for i in range(8)]
    before = {program: home(program, 0) for program in programs}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(whole if i < 2 else streamed, i) for i in range(6)]
        eventually(lambda: counted(http, "holdfast_sequences_running") == 6 and len(begun) == 4)
        with lost(server, how):
            texts = [each.result() for each in answers]
            after = {program: home(program, 1) for program in programs}
            gone = set(before.values()) - set(after.values())
            assert len(gone) == 1
            assert all(after[program] == before[program] for program in programs if before[program] not in gone)
            assert {program: home(program, 2) for program in programs} == after
        assert texts == list(pool.map(whole, range(6)))
    eventually(lambda: "of 'replicas' died" in said(), 120.0)
    eventually(lambda: "of 'replicas' serve again: 2 in all" in said(), 120.0)
    assert "\x1b" not in said()  # a file gets no colour codes, nor from Ray
