"""Several answers to one request, whole and streamed; and what else clients send that other requests do not have."""

import json

import pytest
from fake_backend import CALL, DONE, HELLO, FakeBackend, World, chat_body

from holdfast.replicas.errors import ErrorInfo, ErrorKind, OverloadedError
from holdfast.replicas.requests import Errored, ReasoningDelta, TextDelta
from holdfast.router.config import RouterConfig
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key

BY_KEY = {"Authorization": "Bearer k"}


class Scripts(FakeBackend):
    """Replies to each request with a script of its own, by the choice that it is."""

    def __init__(self, *scripts):
        super().__init__()
        self.scripts = scripts

    def stream(self, request, place):
        self.script = self.scripts[min(request.sampling.choice, len(self.scripts) - 1)]
        return super().stream(request, place)


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def completion(world, **body):
    return world.call("POST", "/v1/completions", json={"model": "pocket", **body})


def test_choices_come_in_order_and_the_prompt_counts_once():
    world = World(Scripts(HELLO, CALL))
    answer = world.chat(n=2, program_id="p")
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "tool_calls"]
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["completion_tokens"] == 6
    assert answer.headers["x-holdfast-cache"] == "bypass"
    assert world.outcomes() == {"completed": 1}
    first, second = world.backend.requests
    assert (first.program_id, second.program_id) == ("default/p", "")
    assert second.request_id == f"{first.request_id}-1"
    assert (first.sampling.choice, second.sampling.choice) == (0, 1)


def test_several_prompts_are_answered_in_their_order_and_each_counts():
    world = World()
    body = completion(world, prompt=["a", "b"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [request.prompt.content for request in world.backend.requests] == ["a", "a", "b", "b"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (20, 12)


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_streamed_choices_have_their_index_and_end_once(path):
    world = World(Scripts(HELLO, ((TextDelta("Bye"),), (DONE,))))
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    answer = world.chat(**options) if path == "chat" else completion(world, prompt="x", **options)
    *chunks, usage = events(answer)
    texts, ends = {}, []
    for chunk in chunks:
        [choice] = chunk["choices"]
        text = choice["delta"].get("content") if path == "chat" else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "Hello!", 1: "Bye", 2: "Bye"}
    assert sorted(ends) == [0, 1, 2]
    assert ends[-1] == 0
    assert usage["usage"]["completion_tokens"] == 9
    assert world.backend.open_streams == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault", [(Errored(ErrorInfo(ErrorKind.INTERNAL, "broke")),), OverloadedError("full"), ZeroDivisionError("bug")]
)
def test_one_choice_that_fails_fails_the_request_and_ends_the_others(stream, fault):
    backend = Scripts(HELLO, [(TextDelta("x"),), fault])
    world = World(backend)
    answer = world.chat(n=3, stream=stream)
    if stream and answer.status_code == 200:
        assert '"error"' in answer.text.split("\n\n")[-2]
    else:
        assert answer.status_code in (429, 500)
    assert backend.open_streams == 0
    assert sum(world.outcomes().values()) == 1
    assert "completed" not in world.outcomes()


def test_each_answer_counts_against_the_limits_of_its_tenant():
    tenant = Tenant("acme", (hash_key("k"),), limits=TenantLimits(max_concurrent=3))
    world = World(tenants=TenantDirectory([tenant]))

    def ask(n):
        return world.call("POST", "/v1/chat/completions", json=chat_body(n=n), headers=BY_KEY)

    assert [ask(n).status_code for n in (3, 4, 3)] == [200, 429, 200]


def test_the_models_defaults_can_be_left_out():
    for on in (True, False):
        world = World(config=RouterConfig(model_defaults=on))
        world.backend.cards = tuple(
            type(card)(card.name, card.context_length, card.vocabulary, defaults={"temperature": 0.25})
            for card in world.backend.cards
        )
        world.chat()
        world.call("POST", "/v1/messages", json=chat_body(max_tokens=5))
        told = world.call("POST", "/v1/responses", json={"model": "pocket", "input": "hello"}).json()["temperature"]
        used = {request.sampling.temperature for request in world.backend.requests}
        assert used == {0.25 if on else 1.0} == {told}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_where_it_is_not_wanted(stream):
    world = World(FakeBackend(((ReasoningDelta("Let me see."),), (TextDelta("Four."),), (DONE,))))
    asked = {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    told, silent = world.chat(**asked), world.chat(**asked, include_reasoning=False)
    assert ("Let me see." in told.text, "Let me see." in silent.text) == (True, False)
    assert "Four." in silent.text
    assert silent.headers["x-holdfast-cache"] == "hit", "what is computed is the same"
    for name in ("include_reasoning", "separate_reasoning"):
        refused = world.call("POST", "/v1/completions", json={"model": "pocket", "prompt": "x", name: False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        taken = world.call("POST", "/v1/completions", json={"model": "pocket", "prompt": "x", name: True})
        assert taken.status_code == 200


def test_models_in_the_shape_of_the_client_that_asks():
    world, headers = World(), {"anthropic-version": "2023-06-01"}
    listed = world.call("GET", "/v1/models", headers=headers).json()
    [model] = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "pocket", "pocket")
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("pocket", "pocket", False)
    assert world.call("GET", "/v1/models/pocket", headers=headers).json() == model
    assert world.call("GET", "/v1/models").json()["object"] == "list"


def test_the_input_of_a_response_is_counted():
    world = World()
    for body in ({"input": "hello"}, {"model": "pocket", "input": "hello"}):
        answer = world.call("POST", "/v1/responses/input_tokens", json=body)
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": 1}
    first = world.call("POST", "/v1/responses", json={"model": "pocket", "input": "hello"}).json()["id"]
    chained = {"input": "more", "previous_response_id": first, "instructions": "be brief"}
    assert world.call("POST", "/v1/responses/input_tokens", json=chained).json()["input_tokens"] == 4
    refused = world.call("POST", "/v1/responses/input_tokens", json={"model": "gpt", "input": "hello"})
    assert refused.status_code == 404
    assert world.backend.requests[1:] == []


@pytest.mark.parametrize(("origins", "allowed"), [((), False), (("https://a.example",), True), (("*",), True)])
def test_pages_may_call_where_the_configuration_says_so(origins, allowed):
    tenants = TenantDirectory([Tenant("acme", (hash_key("k"),))], origins=origins)
    world = World(tenants=tenants, config=RouterConfig(cors_origins=origins))
    page = {"Origin": "https://a.example"}
    asked = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = world.call("OPTIONS", "/v1/chat/completions", headers=asked)
    answer = world.call("POST", "/v1/chat/completions", json=chat_body(), headers={**page, **BY_KEY})
    refused = world.call("POST", "/v1/chat/completions", json=chat_body(), headers=page)
    assert (before.status_code == 200) is allowed
    assert (answer.status_code, refused.status_code) == (200, 401)
    for each in (answer, refused):  # a page may read why it was refused
        assert ("access-control-allow-origin" in each.headers) is allowed


@pytest.mark.parametrize(("origins", "status"), [(("https://a.example",), 200), (("*",), 403), ((), 403)])
def test_without_keys_a_page_is_named_or_refused(origins, status):
    world = World(tenants=TenantDirectory(origins=origins), config=RouterConfig(cors_origins=origins))
    page = {"Origin": "https://a.example"}
    assert world.call("POST", "/v1/chat/completions", json=chat_body(), headers=page).status_code == status
