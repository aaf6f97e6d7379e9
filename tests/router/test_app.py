import asyncio
from dataclasses import replace
from importlib import metadata

import orjson
import pytest
from fake_backend import CARD, DONE, HELLO, FakeBackend, World, bearer, chat_body, config_of, keyed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.replicas.errors import ErrorInfo, ErrorKind, OverloadedError, UnavailableError
from holdfast.replicas.requests import Errored, ModelCard, TextDelta
from holdfast.router.config import RouterConfig
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key

OURS = ("x-request-id", "x-holdfast-cache", "x-holdfast-replica")
ACME = Tenant("acme", (hash_key("a"),))
OTHER = Tenant("other", (hash_key("b"),), weight=2.5, limits=TenantLimits(max_concurrent=1, requests_per_minute=2))


def test_the_clients_request_id_comes_back_and_the_engines_is_unique():
    world = World()
    headers = {"X-Request-ID": "mine-1", "Cache-Control": "no-cache"}
    call = ("POST", "/v1/chat/completions", {"json": chat_body(), "headers": headers})
    assert [answer.headers["x-request-id"] for answer in world.calls([call, call])] == ["mine-1", "mine-1"]
    assert len({request.request_id for request in world.backend.requests}) == 2
    odd = world.call("GET", "/health", headers={"X-Request-ID": "a b"})
    assert odd.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_is_answered_without_a_replica_in_either_shape(stream):
    world = World()
    asked = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first, again = world.chat(), world.chat(**asked)
    assert (again.headers["x-holdfast-cache"], again.headers["x-holdfast-replica"]) == ("hit", "none")
    assert "server-timing" in first.headers
    assert "server-timing" not in again.headers  # no engine worked for it
    assert '"timing"' not in again.text
    assert len(world.backend.requests) == 1
    if stream:
        assert again.headers["content-type"].startswith("text/event-stream")
        assert '"content":"Hello!"' in again.text
        assert again.text.endswith("data: [DONE]\n\n")
    else:
        assert again.json()["choices"] == first.json()["choices"]
        assert again.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}
    assert world.outcomes() == {"completed": 1, "cached": 1}


def test_tenants_do_not_share_answers_or_programs():
    world = World(tenants=TenantDirectory([ACME, OTHER]))
    call = ("POST", "/v1/chat/completions")
    for key in ("a", "b"):
        answer = world.call(*call, json=chat_body(program_id="p"), headers=bearer(key))
        assert answer.headers["x-holdfast-cache"] == "miss"
    assert [request.program_id for request in world.backend.requests] == ["acme/p", "other/p"]
    assert [request.scope for request in world.backend.requests] == ["acme", "other"]
    assert [request.weight for request in world.backend.requests] == [1.0, 2.5]


@pytest.mark.parametrize("named", [False, True])
def test_a_branch_says_which_conversation_it_leaves(named: bool):
    """Whether its client names it or not, and whether it names a parent or not."""
    world = World()
    begun = chat_body()["messages"]
    ids = ({"program_id": each} for each in ("main", "main", "branch")) if named else iter([{}] * 3)
    said = world.chat(**next(ids)).json()["choices"][0]["message"]
    for more in ("and then?", "and else?"):
        world.chat(
            messages=[*begun, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": more}],
            **next(ids),
        )
    first, second, branch = world.backend.places
    assert (second.home, branch.home) == ("r1", None)
    assert first.histories[0][0] in dict(branch.histories)
    assert branch.histories[0][0] != second.histories[0][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "status", "outcome"),
    [
        (ErrorKind.TOO_LONG, 400, "rejected"),
        (ErrorKind.OVERLOADED, 429, "rejected"),
        (ErrorKind.INTERNAL, 500, "failed"),
        (ErrorKind.UNAVAILABLE, 503, "failed"),
        (ErrorKind.TIMEOUT, 504, "failed"),
        (OverloadedError("told"), 429, "rejected"),
        (UnavailableError("told"), 503, "failed"),
        (ZeroDivisionError("secret"), 500, "failed"),
    ],
)
def test_an_error_before_the_first_piece_has_its_http_status(stream, fault, status, outcome):
    """As the last piece of a replica, or raised on the way to it."""
    script = [fault] if isinstance(fault, Exception) else [(Errored(ErrorInfo(fault, "told")),)]
    world = World(FakeBackend(script))
    answer = world.chat(stream=stream)
    assert answer.status_code == status
    assert "secret" not in answer.text
    assert isinstance(fault, ZeroDivisionError) or answer.json()["error"]["message"] == "told"
    assert all(name in answer.headers for name in OURS)
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert world.outcomes() == {outcome: 1}
    assert world.chat(stream=stream).headers["x-holdfast-cache"] == "miss", "errors are not kept"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/redoc", 404)],
)
def test_what_is_not_served_is_refused_in_the_same_shape(method, path, status):
    answer = World().call(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert all(name in answer.headers for name in OURS)


def test_bad_requests_are_named_and_counted():
    world = World()
    calls = [
        ({"content": b"{"}, 400, None),
        ({"json": chat_body(model="gpt")}, 404, "model"),
        ({"json": chat_body(messages=[])}, 400, "messages"),
        ({"json": chat_body(max_tokens=0)}, 400, "max_tokens"),
        ({"json": chat_body(program_id="a\nb")}, 400, "program_id"),
    ]
    for arguments, status, field in calls:
        answer = world.call("POST", "/v1/chat/completions", **arguments)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], len(error)) == (status, field, 4)
        assert {"message", "type", "code"} < error.keys()
        assert field != "model" or "'pocket'" in error["message"], "what there is"
    assert world.outcomes() == {"rejected": len(calls)}
    assert world.backend.requests == []


def test_a_body_that_is_too_long_is_refused_declared_or_not():
    world = World(config=RouterConfig(max_body_bytes=100))

    async def chunks():
        for _ in range(20):
            yield b" " * 10

    for content in (b" " * 101, chunks()):
        answer = world.call("POST", "/v1/chat/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_keys_and_addresses():
    keyed = World(tenants=TenantDirectory([ACME]))
    assert keyed.chat().status_code == 401
    good = keyed.call("POST", "/v1/chat/completions", peer="203.0.113.9", json=chat_body(), headers=bearer("a"))
    assert good.status_code == 200
    assert World().chat(peer="203.0.113.9").status_code == 403
    forwarded = {"X-Forwarded-For": "203.0.113.9"}
    assert World().call("POST", "/v1/chat/completions", json=chat_body(), headers=forwarded).status_code == 403
    assert World(tenants=TenantDirectory(exposed=True)).chat().status_code == 403
    metrics = ("/metrics", "/metrics/targets", "/metrics/processes/r-0")
    for path in ("/v1/models", "/v1/models/pocket", *metrics):
        assert World().call("GET", path, peer="203.0.113.9").status_code == 403
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert World().call("POST", path, peer="203.0.113.9", json=body).status_code == 403
    assert World().call("GET", "/health", peer="203.0.113.9").status_code == 200


def test_every_call_of_a_tenant_counts_against_its_rate():
    world = World(tenants=TenantDirectory([OTHER]))
    call = ("POST", "/v1/chat/completions")
    seeds = [1, 2, 3, 1]
    answers = [world.call(*call, json=chat_body(seed=seed), headers=bearer("b")) for seed in seeds]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert int(answers[2].headers["retry-after"]) > 0
    assert world.outcomes() == {"completed": 2, "rejected": 2}


READS = ("GET /v1/tools/latency", "GET /v1/models", "GET /v1/models/pocket", "GET /version", "DELETE /v1/programs/p")
POSTS = ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize")


@pytest.mark.parametrize("operation", [*READS, *POSTS])
def test_a_tenant_that_was_refused_is_so_again_before_its_body_is_read(operation):
    world, read = World(tenants=TenantDirectory([OTHER])), []

    async def body():
        read.append(operation)
        yield b"{}"

    answers = [world.call("DELETE", "/v1/programs/x", headers=bearer("b")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [404, 404, 429]
    refused = world.call(*operation.split(), content=body(), headers=bearer("b"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert read == []
    assert world.call("GET", "/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_stranger_is_refused_before_its_body_is_read(path):
    world, read = World(tenants=TenantDirectory([OTHER])), []

    async def body():
        read.append(path)
        yield b"{}"

    for headers in ({}, bearer("nobody's")):
        assert world.call("POST", path, content=body(), headers=headers).status_code == 401
    assert read == []


@pytest.mark.anyio
async def test_a_place_is_taken_while_the_body_comes():
    others = TenantDirectory([replace(OTHER, limits=TenantLimits())])
    world = World(tenants=others, config=RouterConfig(max_in_flight=1))
    coming, begun = asyncio.Event(), asyncio.Event()

    async def slow():
        begun.set()
        await coming.wait()
        yield orjson.dumps(chat_body())

    async with world.client(headers=bearer("b")) as client:
        first = asyncio.create_task(client.post("/v1/chat/completions", content=slow()))
        await begun.wait()
        assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 429
        coming.set()
        assert (await first).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.anyio
async def test_bodies_that_are_too_much_at_once_are_refused_by_tenant():
    """What is kept for one tenant another does not get; and all of it is given back."""
    config = config_of(max_body_bytes=1000, body_memory=2000)
    world = World(tenants=keyed("a", "quiet"), config=config)
    whole = orjson.dumps(chat_body(user="x" * 600))
    held, going_on = asyncio.Event(), asyncio.Event()

    async def slow():
        yield whole[:500]
        held.set()
        await going_on.wait()
        yield whole[500:]

    async def pieces():
        for at in range(0, len(whole), 100):
            yield whole[at : at + 100]

    async with world.client() as client:

        async def send(key, content):
            return await client.post("/v1/chat/completions", content=content, headers=bearer(key))

        sending = []
        for _ in range(3):
            held.clear()
            sending.append(asyncio.ensure_future(send("a", slow())))
            await held.wait()
        for content in (whole, pieces()):
            refused = await send("a", content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
        assert (await send("quiet", orjson.dumps(chat_body()))).status_code == 200
        going_on.set()
        slow_ones = {answer.status_code for answer in await asyncio.gather(*sending)}
        assert slow_ones == {200, 429}  # each came to more than there is for all; as one was refused, there was room
        assert (await send("a", whole)).status_code == 200


def test_values_of_a_body_are_counted_outside_of_strings():
    world = World(config=config_of(max_body_values=50))
    call = ("POST", "/v1/chat/completions")
    answers = world.calls(
        [
            (*call, {"json": chat_body(messages=[{"role": "user", "content": "long" * 100}])}),
            (*call, {"json": chat_body(stop=[1] * 20 + ["long" * 100])}),
            (*call, {"json": chat_body(metadata={"a": [[]] * 200})}),
            (*call, {"json": chat_body(messages=[{"role": "user", "content": '\\",[{' * 100}])}),
            (*call, {"content": b'{"' + b'\\"' * 500}),
            ("POST", "/tokenize", {"json": {"prompt": "abc" * 100}}),
            ("POST", "/detokenize", {"json": {"tokens": [100_000_000] * 40}}),
        ]
    )
    assert [answer.status_code for answer in answers] == [200, 400, 413, 200, 400, 200, 400]
    assert answers[1].json()["error"]["param"].startswith("stop.0")
    assert answers[5].json()["count"] == 300
    assert [len(request.prompt.messages[0]["content"]) for request in world.backend.requests] == [400, 500]


@pytest.mark.parametrize(
    "host", ["localhost:8000", "LOCALHOST", "a.localhost", "127.0.0.1:1", "[::1]:8000", "named:80"]
)
def test_without_keys_this_machine_is_called_by_its_own_names(host):
    world = World(tenants=TenantDirectory(hosts=("Named",)))
    assert world.call("GET", "/v1/models", headers={"Host": host}).status_code == 200


HOSTS = ("evil.example", "evil.example:8000", "localhost.evil.example", "0.0.0.0:8000", "192.168.1.2")
ORIGINS = ("https://evil.example", "null", "http://localhost.evil.example:8000")


@pytest.mark.parametrize("headers", [*({"Host": each} for each in HOSTS), *({"Origin": each} for each in ORIGINS)])
def test_pages_of_others_reach_nothing_through_a_browser_here(headers):
    for path in ("/v1/models", "/metrics", "/v1/cluster/status"):
        answer = World().call("GET", path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    keyed = World(tenants=TenantDirectory([ACME]))
    assert keyed.call("GET", "/v1/models", headers={**headers, **bearer("a")}).status_code == 200
    assert keyed.call("GET", "/metrics", headers=headers).status_code == 401
    assert World().call("GET", "/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_models():
    world = World()
    assert [model["id"] for model in world.call("GET", "/v1/models").json()["data"]] == ["pocket"]
    assert world.call("GET", "/v1/models/pocket").json()["max_model_len"] == CARD.context_length
    assert world.call("GET", "/v1/models/other").status_code == 404
    world.backend.cards = (ModelCard("org/name", 100, 100),)
    assert world.call("GET", "/v1/models/org/name").json()["id"] == "org/name"


def test_before_a_model_is_loaded():
    world = World()
    world.backend.cards = ()
    assert world.chat().status_code == 503
    assert world.call("POST", "/tokenize", json={"prompt": "hi"}).status_code == 503


def test_tokenize_and_detokenize():
    world = World()
    messages = chat_body()["messages"]
    answer = world.call("POST", "/tokenize", json={"model": "pocket", "prompt": "abc"}).json()
    assert answer == {"count": 3, "max_model_len": CARD.context_length, "tokens": [0, 1, 2], "token_strs": None}
    assert world.call("POST", "/tokenize", json={"messages": messages}).json()["count"] == 1
    assert world.call("POST", "/detokenize", json={"tokens": [1, 999]}).json() == {"prompt": "1 999"}
    assert world.call("POST", "/detokenize", json={"tokens": [13]}).json()["error"]["message"] == "unlucky"
    assert world.call("POST", "/detokenize", json={"tokens": [1, 1000]}).json()["error"]["param"] == "tokens.1"
    for body in ({}, {"prompt": "hi", "messages": messages}):
        assert world.call("POST", "/tokenize", json=body).status_code == 400


def test_version():
    assert World().call("GET", "/version").json() == {"version": metadata.version("holdfast")}


def test_health():
    world = World()
    assert world.call("GET", "/health").json() == {"status": "ok"}
    world.backend.ready = False
    assert world.call("GET", "/health").status_code == 503


STEPS = st.one_of(
    st.sampled_from([(TextDelta("x"),), (TextDelta("x"), TextDelta("y"))]),
    st.sampled_from([(DONE,), (TextDelta("z"), DONE)]),
    st.sampled_from([(Errored(ErrorInfo(kind, "told")),) for kind in ErrorKind]),
    st.sampled_from([OverloadedError("full"), ZeroDivisionError("bug")]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.lists(STEPS, min_size=1, max_size=4), st.integers(0, 1)), min_size=1, max_size=4))
def test_every_request_ends_in_one_outcome_and_gives_everything_back(requests):
    world = World(config=RouterConfig(max_in_flight=1))
    for script, seed in requests:
        world.backend.script = script if isinstance(script[-1], Exception) else [*script, *HELLO[-1:]]
        answer = world.chat(stream=True, seed=seed)
        assert answer.status_code != 429 or "in flight" not in answer.text
    assert sum(world.outcomes().values()) == len(requests)
    assert world.in_flight() == 0
    assert world.backend.open_streams == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_prompt_that_cannot_fit_whatever_its_tokens_is_refused_by_the_router(path):
    """No replica is asked, and none of its characters is looked at again."""
    card = ModelCard("pocket", 100, 1000, longest_token=4)
    world = World()
    world.backend.cards = (card,)
    for characters, status in ((400, 200), (404, 400)):
        text = "x" * characters + " " * 1000
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        if path == "/v1/responses":
            body = {"input": text}
        elif path == "/v1/completions":
            body = {"prompt": text}
        before = len(world.backend.requests)
        answer = world.call("POST", path, json={"model": "pocket", **body})
        assert answer.status_code == status, answer.text
        assert len(world.backend.requests) - before == (status == 200)
    assert "maximum context length is 100 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "within_s"),
    [
        ("/v1/chat/completions", chat_body(timeout=5), {}, 5.0),
        ("/v1/chat/completions", chat_body(timeout=5, stream=True), {"x-stainless-timeout": "3"}, 3.0),
        ("/v1/completions", {"model": "pocket", "prompt": "hi"}, {"x-envoy-expected-rq-timeout-ms": "2000"}, 2.0),
        ("/v1/messages", {**chat_body(timeout=5), "max_tokens": 5}, {"x-stainless-timeout": "600"}, 5.0),
        ("/v1/responses", {"model": "pocket", "input": "hi", "timeout": 7.5}, {}, 7.5),
        ("/v1/chat/completions", chat_body(), {}, float("inf")),
    ],
)
def test_how_long_a_client_waits_goes_to_the_replica(path, body, headers, within_s):
    world = World()
    assert world.call("POST", path, json=body, headers=headers).status_code == 200
    [request] = world.backend.requests
    assert request.within_s == within_s or within_s - 1.0 < request.within_s <= within_s
    assert request.begins is bool(body.get("stream"))


def test_an_answer_that_cannot_be_in_time_is_a_429_that_says_when_to_come_again():
    info = ErrorInfo(ErrorKind.DEADLINE, "too late", "timeout", retry_after_s=6.2)
    for stream in (False, True):
        world = World(FakeBackend([(Errored(info),)]))
        answer = world.chat(stream=stream)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["code"] == "deadline_unmet"
        assert world.outcomes() == {"rejected": 1}
