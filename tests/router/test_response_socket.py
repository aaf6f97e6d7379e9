"""`/v1/responses` over a WebSocket: the Open Responses cases for it, the official package, and how connections end."""

import asyncio
import json
import threading
from contextlib import contextmanager, nullcontext

import open_responses
import openai
import pytest
from fake_backend import CALL, HELLO, World
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from holdfast.replicas.errors import UnavailableError
from holdfast.router import guard
from holdfast.router.config import RouterConfig
from holdfast.router.drain import Drain
from holdfast.router.limits import BodyMemory
from holdfast.router.parser_process import ParserProcess
from holdfast.router.response_socket import Events, ResponseSocket
from holdfast.router.streaming import COMMENT
from holdfast.router.tenants import Principal, Tenant, TenantDirectory, TenantLimits, hash_key

PATIENT = 60.0  # seconds a slow machine may take
ENDS = {"response.completed", "response.incomplete", "response.failed", "error"}
STREAM_EVENT = TypeAdapter(ResponseStreamEvent)


@contextmanager
def socket(address, **headers):
    url = f"ws{address.removeprefix('http')}/v1/responses"
    with connect(url, additional_headers=headers, open_timeout=PATIENT) as opened:
        yield opened


@pytest.fixture
def world():
    return World()


@pytest.fixture
def address(world):
    with world.served() as address:
        yield address


def ask(opened, **body):
    """The last event of a response, after a look at the form of all."""
    opened.send(json.dumps({"type": "response.create", "model": "pocket", "input": "hello", **body}))
    return answer(opened)


def answer(opened):
    found = [json.loads(opened.recv(PATIENT))]
    while found[-1]["type"] not in ENDS:
        found.append(json.loads(opened.recv(PATIENT)))
    if found[-1]["type"] == "error":
        assert len(found) == 1
        assert isinstance(found[0]["error"]["code"], str)
        return found[0]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        open_responses.check_event(event)
        STREAM_EVENT.validate_python(event)
    return found[-1]


def texts(world):
    return [message["content"] for message in world.backend.requests[-1].prompt.messages]


def missing(told):
    return (told["status"], told["error"]["code"]) == (400, "previous_response_not_found")


# ---- the specification's cases ----


def test_case_a_response(world, address):
    with socket(address) as opened:
        last = ask(opened, input=[{"type": "message", "role": "user", "content": "Count from 1 to 3."}])
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello!"
    assert world.outcomes() == {"completed": 1}, "it counts as a request"


def test_case_responses_one_after_the_other(world, address):
    with socket(address) as opened:
        for word in ("first", "second"):  # both are sent before the first is answered
            body = {"type": "response.create", "model": "pocket", "store": False, "input": word}
            opened.send(json.dumps(body))
        ids = [answer(opened)["response"]["id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert [request.prompt.messages[0]["content"] for request in world.backend.requests] == ["first", "second"]


def test_case_going_on_with_what_is_not_stored(world, address):
    with socket(address) as opened:
        first = ask(opened, store=False, input="cobalt")["response"]["id"]
        second = ask(opened, store=False, previous_response_id=first, input="which?")["response"]["id"]
        ask(opened, store=False, previous_response_id=second, input="sure?")
        assert texts(world) == ["cobalt", "Hello!", "which?", "Hello!", "sure?"]
        assert len({request.program_id for request in world.backend.requests}) == 1
        assert missing(ask(opened, store=False, previous_response_id=first)), "the latest one only"
    assert world.call("GET", f"/v1/responses/{second}").status_code == 404


def test_case_another_connection_does_not_know_it(world, address):
    with socket(address) as opened:
        first = ask(opened, store=False)["response"]["id"]
        kept = ask(opened, store=True)["response"]["id"]
    with socket(address) as opened:
        assert missing(ask(opened, store=False, previous_response_id=first))
        assert ask(opened, store=False)["type"] == "response.completed"
        assert ask(opened, previous_response_id=kept)["type"] == "response.completed", "what is stored is found"


def test_case_nobody_knows_it(address):
    with socket(address) as opened:
        assert missing(ask(opened, store=False, previous_response_id="resp_missing"))


@pytest.mark.parametrize("status", [400, 503])
def test_case_one_that_fails_cannot_be_gone_on_with(world, address, status):
    with socket(address) as opened:
        first = ask(opened, store=False)["response"]["id"]
        output = [{"type": "function_call_output", "call_id": "nobody", "output": "x"}]
        if status == 503:
            world.backend.script = [UnavailableError("no replica")]
        failed = ask(opened, store=False, previous_response_id=first, input=output if status == 400 else "x")
        assert (failed["type"], failed["status"]) == ("error", status)
        world.backend.script = HELLO
        assert missing(ask(opened, store=False, previous_response_id=first))


def test_case_a_new_chain_from_a_compaction(world, address):
    body = {"model": "pocket", "input": [{"role": "user", "content": "remember 7"}]}
    compacted = world.call("POST", "/v1/responses/compact", json=body).json()["output"]
    with socket(address) as opened:
        items = [*compacted, {"role": "user", "content": "which?"}]
        assert ask(opened, store=False, input=items)["type"] == "response.completed"
    assert (texts(world)[0], texts(world)[-1]) == ("remember 7", "which?")


# ---- the official package ----


def test_the_official_client_has_a_tool_loop(world, address):
    world.backend.script = CALL
    tool = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    def until_end(connection):
        while (event := connection.recv()).type not in ENDS:
            pass
        return event

    with client.responses.connect() as connection:
        connection.response.create(model="pocket", input="weather?", tools=[tool], store=False)
        first = until_end(connection).response
        [call] = first.output
        world.backend.script = HELLO
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
        connection.response.create(model="pocket", input=[output], previous_response_id=first.id, store=False)
        assert until_end(connection).response.output_text == "Hello!"
    assert [message["role"] for message in world.backend.requests[-1].prompt.messages] == ["user", "assistant", "tool"]


# ---- what is wrong, and how a connection ends ----


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("no json", None),
        ("[]", None),
        ('{"type": "response.cancel"}', "type"),
        ('{"model": "pocket", "input": "x"}', "type"),
        ('{"type": "response.create", "model": "pocket"}', "input"),
        ('{"type": "response.create", "model": "pocket", "input": "x", "background": true}', "background"),
    ],
)
def test_what_is_wrong_is_told_and_the_next_is_answered(address, message, param):
    with socket(address) as opened:
        opened.send(message)
        told = answer(opened)
        assert (told["type"], told["status"], told["error"]["param"]) == ("error", 400, param)
        assert ask(opened, stream=False, stream_options={})["type"] == "response.completed"


def test_a_reply_that_breaks_off_has_one_end(world, address):
    world.backend.script = [*HELLO[:1], UnavailableError("lost")]
    with socket(address) as opened:
        assert ask(opened)["type"] == "response.failed"
        world.backend.script = HELLO
        assert ask(opened)["type"] == "response.completed"


def test_who_may_not_call_is_refused_at_the_door():
    world = World(tenants=TenantDirectory([Tenant("acme", (hash_key("k"),))]))
    with world.served() as address:
        with pytest.raises(InvalidStatus) as refused, socket(address):
            pass
        assert refused.value.response.status_code == 401
        with socket(address, authorization="Bearer k") as opened:
            assert ask(opened)["type"] == "response.completed"
    assert world.backend.requests[-1].scope == "acme"


def test_a_page_of_others_is_refused(address):
    with pytest.raises(InvalidStatus) as refused, socket(address, origin="https://evil.example"):
        pass
    assert refused.value.response.status_code == 403


def test_a_client_that_leaves_aborts_its_response(world):
    world.backend.stall = 1
    with world.served() as address:
        with socket(address) as opened:
            opened.send(json.dumps({"type": "response.create", "model": "pocket", "input": "x"}))
            assert world.backend.started.wait(PATIENT)
        assert world.backend.aborted.wait(PATIENT)
    assert (world.backend.open_streams, world.outcomes(), world.in_flight()) == (0, {"aborted": 1}, 0)


class Silent:
    """A socket whose client says nothing; notes what it is told."""

    def __init__(self):
        self.scope = {"extensions": {}}
        self.told = []
        self.closed = None

    async def accept(self):
        return

    async def receive_text(self):
        await asyncio.Event().wait()

    async def send_text(self, text):
        self.told.append(json.loads(text))

    async def close(self, code):
        self.closed = code


class Open:
    """A guard that knows everybody."""

    def authenticate(self, request):
        return Principal(Tenant("t"))

    def messages(self, tenant):
        return nullcontext()


def test_a_connection_has_an_hour():
    silent = Silent()
    asyncio.run(ResponseSocket(None, Open(), Drain(), longest_s=0.0).serve(silent))
    [told] = silent.told
    assert (told["type"], told["error"]["code"]) == ("error", "websocket_connection_limit_reached")
    assert silent.closed == 1000


def test_a_server_that_stops_waits_for_no_connection_that_asks_nothing():
    async def scenario():
        silent, drain = Silent(), Drain()
        serving = asyncio.create_task(ResponseSocket(None, Open(), drain).serve(silent))
        for _ in range(5):
            await asyncio.sleep(0)
        drain.bound(3600.0)
        await asyncio.wait_for(serving, PATIENT)
        return silent

    silent = asyncio.run(scenario())
    assert (silent.told, silent.closed) == ([], 1001)


# ---- bounds: as of a body over HTTP ----


def long(size, **body):
    message = {"type": "response.create", "model": "pocket", "input": "x" * 10, **body}
    return json.dumps({**message, "metadata": {str(n): "y" * 500 for n in range(size // 500)}})


def bounded(**more):
    sizes = {"max_body_bytes": 20_000, "long_body_bytes": 4_000, "body_memory": 40_000, **more}
    return World(config=RouterConfig(**sizes))


def test_a_message_has_the_bounds_of_a_body():
    """Its size, its depth, and how many values a long one has; then the next one is answered."""
    deep = json.dumps({"type": "response.create", "model": "pocket", "input": "x"})[:-1]
    deep += ', "chat_template_kwargs": ' + '{"a":' * 300 + "1" + "}" * 301
    many = json.dumps({"type": "response.create", "model": "pocket", "input": "x", "include": ["x"] * 3000})
    world = bounded(max_body_values=1000)
    with world.served() as address, socket(address) as opened:
        for message, status in ((long(30_000), 413), (deep, 400), (many, 413)):
            opened.send(message)
            told = answer(opened)
            assert (told["type"], told["status"]) == ("error", status)
        assert ask(opened)["type"] == "response.completed"
    assert len(world.backend.requests) == 1


def test_a_long_message_is_parsed_beside_the_event_loop(monkeypatch):
    parsed = []

    async def call(self, function, most, parse, arguments, *, body, payer, work):
        with body:
            parsed.append(parse.__name__)
        raise UnavailableError("told")

    monkeypatch.setattr(ParserProcess, "call", call)
    with bounded().served() as address, socket(address) as opened:
        assert ask(opened)["type"] == "response.completed"
        assert parsed == []
        opened.send(long(6_000))
        assert answer(opened)["status"] == 503
    assert parsed == ["read_create"]


def test_messages_that_wait_count_among_the_bodies(monkeypatch):
    """No more of them wait than there is room for, and a connection that ends gives all back."""
    taken, full, empty = [0], threading.Event(), threading.Event()

    class Watched(BodyMemory):
        def take(self, tenant, amount):
            room = super().take(tenant, amount)
            taken.append(self.total)
            if not room:
                full.set()
            return room

        def give_back(self, tenant, amount):
            super().give_back(tenant, amount)
            if full.is_set() and not self.total:
                empty.set()

    monkeypatch.setattr(guard, "BodyMemory", Watched)
    world = bounded()
    world.backend.stall = 1
    with world.served() as address:
        with socket(address) as opened:
            opened.send(json.dumps({"type": "response.create", "model": "pocket", "input": "x"}))
            assert world.backend.started.wait(PATIENT)
            for _ in range(4):
                opened.send(long(15_000))
            assert full.wait(PATIENT)
        assert empty.wait(PATIENT)
    assert 15_000 < max(taken) <= 40_000


def test_a_wrong_message_counts_as_a_request():
    """So nobody makes a router parse for nothing."""
    tenants = TenantDirectory([Tenant("acme", (hash_key("k"),), limits=TenantLimits(requests_per_minute=1))])
    with World(tenants=tenants).served() as address, socket(address, authorization="Bearer k") as opened:
        statuses = []
        for _ in range(2):
            opened.send("no json")
            statuses.append(answer(opened)["status"])
    assert statuses == [400, 429]


def test_what_tells_of_silence_is_no_message():
    async def scenario():
        told = []

        class Socket:
            async def send_text(self, text):
                told.append(text)

        events = Events(Socket())
        await events.send({"type": "http.response.start", "status": 200})
        for body in (COMMENT, b'event: response.created\ndata: {"a":1}\n\n' + COMMENT, b"data: [DONE]\n\n"):
            await events.send({"type": "http.response.body", "body": body, "more_body": True})
        await events.send({"type": "http.response.body", "body": b"", "more_body": False})
        assert (told, events.complete) == (['{"a":1}'], True)

    asyncio.run(scenario())
