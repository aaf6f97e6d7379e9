"""Sessions over HTTP, from the shipped model behind a real server: opened, fed, asked, forked and closed."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_backend import World
from service_backend import ServiceBackend
from waiting import until

from holdfast.replicas import questions
from holdfast.replicas.config import DraftConfig, EngineConfig

CONFIG = EngineConfig(
    cells=8192, threads=1, context_length=1024, max_sequences=8, session_rows=4, speculation=DraftConfig(enabled=False)
)
PATIENT = 60.0  # seconds a slow machine may take
HELLO = [{"role": "system", "content": "Answer shortly."}, {"role": "user", "content": "Here are readings."}]
ASK: dict[str, Any] = {"text": "\nLast?", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Client(httpx.Client):
    """Of one session at a time: `do` is its path."""

    def open(self, **body: object) -> str:
        answer = self.post("/v1/sessions", json={"model": "pocket", **body})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def do(self, session: str, what: str, **body: object) -> httpx.Response:
        return self.post(f"/v1/sessions/{session}/{what}", json=body)

    def state(self, session: str) -> Any:
        return self.get(f"/v1/sessions/{session}").json()

    def text(self, session: str, **body: object) -> str:
        answer = self.do(session, "query", **{**ASK, **body})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def close_all(self) -> None:
        for each in self.get("/v1/sessions").json()["data"]:
            assert self.delete(f"/v1/sessions/{each['id']}").status_code == 200


@pytest.fixture(scope="module")
def backend() -> Iterator[ServiceBackend]:
    backend = ServiceBackend(CONFIG)
    yield backend
    backend.stop()


@pytest.fixture(scope="module")
def world(backend: ServiceBackend) -> World:
    return World(backend)


@pytest.fixture(scope="module")
def address(world: World) -> Iterator[str]:
    with world.served() as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(base_url=address, timeout=PATIENT) as client:
        yield client
        client.close_all()


def error(answer: httpx.Response) -> tuple[int, str, str]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["param"]


def test_a_session_is_opened_fed_asked_and_closed(client: Client, backend: ServiceBackend) -> None:
    session = client.open(messages=HELLO, id="log-1")
    begun = client.state(session)
    assert (begun["id"], begun["appends"], begun["busy"], begun["replica"]) == ("log-1", 1, False, "r1")
    assert begun["created"] <= time.time() < begun["expires"]

    appended = client.do(session, "append", text="\nline 1: 20 degrees")
    assert appended.status_code == 200
    assert appended.headers["x-holdfast-replica"] == "r1"
    usage = appended.json()["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens"] == begun["tokens"] > 0
    by_ids = client.do(session, "append", tokens=[5, 6, 7])
    assert by_ids.json()["tokens"] == usage["prompt_tokens"] + 3
    assert client.state(session)["tokens"] == usage["prompt_tokens"] + 3

    answer = client.do(session, "query", **ASK).json()
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("text_completion", 6)
    n_new = answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < n_new < 24 + CONFIG.page_size  # the question alone
    assert client.state(session)["appends"] == 3  # nothing was kept

    with client.stream("POST", f"/v1/sessions/{session}/query", json={**ASK, "stream": True}) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == answer["choices"][0]["text"]

    kept = client.do(session, "query", **ASK, keep=True).json()
    assert kept["choices"] == answer["choices"]
    after = client.state(session)
    assert after["appends"] == 4
    assert after["tokens"] == kept["usage"]["total_tokens"]

    assert client.delete(f"/v1/sessions/{session}").json()["deleted"] is True
    assert client.get(f"/v1/sessions/{session}").status_code == 404
    assert backend.places[-1].bound
    assert backend.places[-1].home == "r1"


def test_what_is_fed_piece_by_piece_is_answered_as_the_whole(client: Client) -> None:
    pieces = [f"\nreading {i} is {i * 7 % 10}" for i in range(5)]
    one, whole = client.open(text="Readings:"), client.open()
    for piece in pieces:
        client.do(one, "append", text=piece)
    tokens = client.post("/tokenize", json={"prompt": "Readings:"}).json()["tokens"]
    for piece in pieces:
        tokens += client.post("/tokenize", json={"prompt": piece}).json()["tokens"]
    client.do(whole, "append", tokens=tokens)
    assert client.state(one)["tokens"] == client.state(whole)["tokens"]
    assert client.text(one) == client.text(whole)


def test_messages_go_on_where_the_conversation_was(client: Client) -> None:
    """Whoever feeds messages has the very prompt that the whole conversation would have had."""
    session = client.open(messages=HELLO)
    said = [*HELLO, {"role": "assistant", "content": "Ready."}, {"role": "user", "content": "20, 21"}]
    client.do(session, "append", messages=said[2:])
    asked = {"role": "user", "content": "And the last?"}
    question = {"messages": [asked], "max_tokens": 5, "temperature": 0, "keep": True}
    answer = client.do(session, "query", **question).json()
    chat = {"model": "pocket", "messages": [*said, asked], "max_tokens": 5, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=chat, headers={"cache-control": "no-store"}).json()
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    # The kept answer is closed as the template closes it: what comes next continues the conversation.
    text = answer["choices"][0]["text"]
    later = [*said, asked, {"role": "assistant", "content": text}, {"role": "user", "content": "Thanks"}]
    client.do(session, "append", messages=later[-1:])
    again = client.do(session, "query", messages=[asked], max_tokens=1).json()
    with_question = client.post("/tokenize", json={"messages": [*later, asked]}).json()
    assert again["usage"]["prompt_tokens"] == with_question["count"]


def test_a_fork_has_what_came_before_it_and_goes_its_own_way(client: Client) -> None:
    session = client.open(text="A long story. " * 20)
    answers = []

    def append() -> None:
        answers.append(client.do(session, "append", text="It goes on. " * 40))

    before = client.state(session)["tokens"]
    thread = threading.Thread(target=append)
    thread.start()
    forked = client.do(session, "fork", id="branch")
    thread.join()
    assert [answer.status_code for answer in answers] == [200]
    assert forked.status_code == 200
    # In order, whichever came first: with the append as a whole or without it.
    assert forked.json()["tokens"] in (before, client.state(session)["tokens"])
    client.do("branch", "append", text="Here it ends.")
    assert client.state("branch")["tokens"] != client.state(session)["tokens"]
    listed = client.get("/v1/sessions").json()
    assert {each["id"] for each in listed["data"]} == {session, "branch"}
    assert client.get("/v1/sessions?limit=1").json()["has_more"] is True


def test_errors_name_the_field(client: Client) -> None:
    session = client.open(text="x")
    for method, name in (("GET", "nothing"), ("DELETE", "nothing"), ("GET", "n\u00f6"), ("GET", "~")):
        assert error(client.request(method, f"/v1/sessions/{name}")) == (404, "session_not_found", "session_id")
    for what, body in (("append", {"text": "x"}), ("query", ASK), ("fork", {})):
        assert error(client.do("nothing", what, **body)) == (404, "session_not_found", "session_id")
    for what, body, param in (
        ("append", {}, "text"),
        ("append", {"text": "x", "tokens": [1]}, "text"),
        ("append", {"tokens": [10**6]}, "tokens.0"),
        ("append", {"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ("append", {"text": "x", "speed": 1}, "speed"),
        ("query", {"text": "x"}, "max_tokens"),
        ("query", {**ASK, "program_id": "p"}, "program_id"),
        ("fork", {"id": "no spaces"}, "id"),
        ("questions", {**ASK, "stream": True}, "stream"),
        ("questions", {**ASK, "max_tokens": 257}, "max_tokens"),
    ):
        answer = client.do(session, what, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    for what, body, param in (
        ("append", {"text": "word " * 3000}, "text"),
        ("append", {"tokens": [5] * 1024}, "tokens"),
        ("append", {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ("query", {"tokens": [5] * 1024, "max_tokens": 9}, "tokens"),
    ):
        assert error(client.do(session, what, **body)) == (400, "context_length_exceeded", param)
    twice = client.post("/v1/sessions", json={"model": "pocket", "id": session})
    assert error(twice) == (409, "session_exists", "id")
    assert error(client.do(session, "fork", id=session)) == (409, "session_exists", "id")
    assert error(client.get(f"/v1/sessions/{session}/questions/q")) == (404, "question_not_found", "question_id")
    assert client.get("/v1/sessions?limit=0").json()["error"]["param"] == "limit"
    assert client.state(session)["appends"] == 1


def test_a_session_that_cannot_be_opened_is_not_open_and_its_name_is_free(client: Client) -> None:
    refused = client.post("/v1/sessions", json={"model": "pocket", "id": "s", "text": "word " * 3000})
    assert error(refused) == (400, "context_length_exceeded", "text")
    until(lambda: client.post("/v1/sessions", json={"model": "pocket", "id": "s"}).status_code == 200)


def test_one_too_many_is_refused(client: Client) -> None:
    names = [client.open() for _ in range(CONFIG.session_rows)]
    answer = client.post("/v1/sessions", json={"model": "pocket", "id": "over"})
    assert error(answer) == (429, "overloaded", "session_id")
    client.delete(f"/v1/sessions/{names[0]}")
    until(lambda: client.post("/v1/sessions", json={"model": "pocket", "id": "over"}).status_code == 200)


@pytest.mark.parametrize("what", ["append", "query"])
def test_a_client_that_leaves_in_the_middle_changes_nothing(
    client: Client, backend: ServiceBackend, world: World, what: str
) -> None:
    session = client.open(text="The beginning.")
    before, ended = client.state(session), dict(backend.service.engine.stats.ended)
    come = sum(world.outcomes().values())
    body: dict[str, Any] = {"text": " and so on" * 150}
    if what == "query":
        body = {"text": "Go on", "max_tokens": 900, "ignore_eos": True, "keep": True, "stream": True}
    leaver = http.client.HTTPConnection(str(client.base_url.host), client.base_url.port)
    leaver.request("POST", f"/v1/sessions/{session}/{what}", json.dumps(body))
    if what == "query":
        assert leaver.getresponse().read(1)
    leaver.close()
    # It may have left before the server had read what it sent.
    until(lambda: sum(world.outcomes().values()) > come and not client.state(session)["busy"])
    now = client.state(session)
    done = backend.service.engine.stats.ended["finished"] - ended["finished"]
    # All of it or nothing, and never both: what was computed before the client was missed stays.
    assert (now["appends"] - before["appends"], now["tokens"] > before["tokens"]) == (done, bool(done))
    assert client.text(session)


def test_a_session_that_nobody_uses_is_closed(client: Client, backend: ServiceBackend) -> None:
    engine = backend.service.engine
    engine._sessions.idle_s, kept = 0.05, engine._sessions.idle_s
    try:
        session = client.open(text="x")
        until(lambda: not engine.sessions("default"))
        until(lambda: client.get(f"/v1/sessions/{session}").status_code == 404)  # what was kept of it has expired
    finally:
        engine._sessions.idle_s = kept
    assert error(client.do(session, "append", text="y")) == (404, "session_not_found", "session_id")
    assert client.open(id=session) == session  # the name is free again


# ---- standing questions ----


def test_a_standing_question_is_answered_ahead_after_each_append(client: Client, backend: ServiceBackend) -> None:
    session = client.open(text="Readings:")
    asked = client.do(session, "questions", **ASK).json()
    assert (asked["answer"], asked["up_to_date"], asked["appends"]) == (None, False, 1)
    where = f"/v1/sessions/{session}/questions/{asked['id']}"
    for n, value in enumerate((20, 21, 25), 2):
        client.do(session, "append", text=f"\n{value}")
        until(lambda: bool(client.get(where).json()["up_to_date"]))
        answered = client.get(where).json()
        assert (answered["append"], answered["appends"]) == (n, n)
        assert answered["age_s"] >= 0
        assert answered["answer"]["text"] == client.text(session)  # as if it were asked now
        assert client.state(session)["appends"] == n
    stats = backend.service.questions.stats
    assert stats.asked["answered"] >= 3
    assert stats.standing == 1
    assert client.state(session)["questions"] == [asked["id"]]
    assert [each["id"] for each in client.get(f"/v1/sessions/{session}/questions").json()["data"]] == [asked["id"]]
    assert client.delete(where).json()["deleted"] is True
    assert error(client.get(where)) == (404, "question_not_found", "question_id")
    assert error(client.delete(where)) == (404, "question_not_found", "question_id")


def test_questions_are_bounded_and_go_with_their_session(
    client: Client, backend: ServiceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "SESSION_QUESTIONS", 3)
    monkeypatch.setattr(questions, "TENANT_QUESTIONS", 4)
    one, two = client.open(text="x"), client.open(text="y")
    for session, n in ((one, 3), (two, 1)):
        for _ in range(n):
            assert client.do(session, "questions", **ASK).status_code == 200
        assert error(client.do(session, "questions", **ASK)) == (429, "overloaded", "session_id")
    client.delete(f"/v1/sessions/{one}")
    assert client.open(id=one) == one
    assert client.state(one)["questions"] == []
    assert client.do(two, "questions", **ASK).status_code == 200
    assert backend.service.questions.stats.standing == 2


def test_what_is_asked_ahead_gives_way_and_comes_back(client: Client, backend: ServiceBackend) -> None:
    """Appends come faster than answers: each gives the answer in the making up, and one is made of all of them."""
    session = client.open(text="Readings:")
    question = client.do(session, "questions", **{**ASK, "max_tokens": 16}).json()["id"]
    for i in range(20):
        assert client.do(session, "append", text=f"\n{i}").status_code == 200
    where = f"/v1/sessions/{session}/questions/{question}"
    until(lambda: bool(client.get(where).json()["up_to_date"]))
    last = client.get(where).json()
    assert last["append"] == 21
    assert last["answer"]["text"] == client.text(session, max_tokens=16)
    stats = backend.service.questions.stats
    assert stats.tokens["answered"] > 0
