"""Sessions whose replicas are lost go on at others: what they answer is what one that never moved answers."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_backend import bearer, keyed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisServer, TestRecords, key_file, shared_records, shared_server
from replicas_in_process import Loop, Replicas, Router, Trap
from waiting import until_async

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.router.config import RouterConfig
from holdfast.router.records.session_histories import SessionHistories
from holdfast.router.records.store import Records
from holdfast.router.tenants import TenantDirectory

CONFIG = EngineConfig(
    cells=8192,
    threads=1,
    context_length=1024,
    max_sequences=20,
    session_rows=16,
    speculation=DraftConfig(enabled=False),
)
ASK: dict[str, Any] = {"text": "\nLast?", "max_tokens": 6, "temperature": 0.8, "ignore_eos": True}


@dataclass
class Cluster:
    """Two routers over the same engines and the same store."""

    loop: Loop
    backend: Replicas
    records: TestRecords
    routers: tuple[Router, Router]
    turn: int = 0

    @classmethod
    def of(
        cls, loop: Loop, backend: Replicas, config: RouterConfig | None = None, tenants: TenantDirectory | None = None
    ) -> "Cluster":
        first = shared_records(key_file=config.cache_key_file if config else "")
        second = shared_records(first, key_file=config.cache_key_file if config else "")
        made = [Router(loop, backend, each, config, tenants) for each in (first, second)]
        return cls(loop, backend, first, (made[0], made[1]))

    def call(self, method: str, path: str, key: str = "", **arguments: Any) -> httpx.Response:
        """One call, of one router and then of the other."""
        self.turn += 1
        return self.routers[self.turn % 2].call(method, f"/v1/sessions{path}", key, **arguments)

    def open(self, session: str, **body: object) -> httpx.Response:
        return self.call("POST", "", json={"model": "pocket", "id": session, **body})

    def do(self, session: str, what: str, key: str = "", **body: object) -> httpx.Response:
        return self.call("POST", f"/{session}/{what}", key, json=body)

    def state(self, session: str) -> Any:
        answer = self.call("GET", f"/{session}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def lose(self, session: str) -> None:
        self.loop.run(self.backend.lose(self.state(session)["replica"]))

    def moves(self) -> dict[str, float]:
        one, two = (router.moves() for router in self.routers)
        return {why: one.get(why, 0.0) + two.get(why, 0.0) for why in {*one, *two}}


def forget_all(loop: Loop, backend: Replicas) -> None:
    """Leave the engines as at their beginning."""
    backend.silent.clear()
    backend.trap = None
    for replica_id in backend.live:
        loop.run(backend.forget(replica_id))


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def engines(loop: Loop) -> Iterator[Replicas]:
    backend = Replicas(2, CONFIG)
    loop.run(backend.load())
    yield backend
    loop.run(backend.close())


@pytest.fixture(scope="module")
def steady(loop: Loop) -> Iterator[Replicas]:
    """One that is never lost."""
    backend = Replicas(1, CONFIG)
    loop.run(backend.load())
    yield backend
    loop.run(backend.close())


@pytest.fixture
def cluster(loop: Loop, engines: Replicas) -> Cluster:
    return Cluster.of(loop, engines)


@pytest.fixture(autouse=True)
def forgotten(loop: Loop, engines: Replicas) -> Iterator[None]:
    """No engine keeps a session of a test that has ended."""
    yield
    forget_all(loop, engines)


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def told(answer: httpx.Response) -> Any:
    """What of an answer does not depend on where and how it was made."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]", answer.text
        chunks = [json.loads(each)["choices"][0] for each in events]
        return "".join(each["text"] for each in chunks), chunks[-1]["finish_reason"]
    body = answer.json()
    if "choices" in body:
        return body["choices"], body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    return body.get("tokens"), body.get("appends")


SESSIONS = ("one", "two")
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(SESSIONS), st.sampled_from(["", "k1", "k2"]), st.integers(0, 9)),
    st.tuples(st.just("query"), st.sampled_from(SESSIONS), st.booleans(), st.booleans()),
    st.tuples(st.just("fork"), st.sampled_from(SESSIONS)),
    st.tuples(st.just("state"), st.sampled_from(SESSIONS)),
    st.tuples(st.sampled_from(["lose", "forget", "silence"]), st.sampled_from(SESSIONS)),
    st.tuples(st.just("trap"), st.sampled_from(list(Trap))),
    st.tuples(st.just("heard")),
)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=14))
def test_a_session_that_moves_answers_as_one_that_never_did(
    loop: Loop, engines: Replicas, steady: Replicas, operations: list[tuple[Any, ...]]
) -> None:
    moving, staying = Cluster.of(loop, engines), Cluster.of(loop, steady)
    contents: dict[tuple[str, str], int] = {}
    forks = 0

    def same(session: str, *what: str, **body: Any) -> None:
        assert told(moving.do(session, *what, **body)) == told(staying.do(session, *what, **body))

    try:
        for session in SESSIONS:
            assert told(moving.open(session, text="Readings:")) == told(staying.open(session, text="Readings:"))
        for what, *which in operations:
            if what == "append":
                session, key, value = which
                value = contents.setdefault((session, key), value) if key else value
                same(session, "append", key, text=f"\nreading {value}")
            elif what == "query":
                session, keep, stream = which
                same(session, "query", **ASK, keep=keep, stream=stream)
            elif what == "fork":
                forks += 1
                body = {"id": f"fork-{forks}"}
                same(which[0], "fork", **body)
                same(body["id"], "query", **ASK)
                for cluster in (moving, staying):
                    assert cluster.call("DELETE", f"/{body['id']}").status_code == 200
            elif what == "state":
                found, known = moving.state(which[0]), staying.state(which[0])
                assert (found["tokens"], found["appends"]) == (known["tokens"], known["appends"])
            elif what == "trap":
                engines.trap = which[0]
            elif what == "heard":
                engines.silent.clear()
            elif what == "lose":
                moving.lose(which[0])
            elif what == "forget":
                loop.run(engines.forget(moving.state(which[0])["replica"]))
            elif not engines.silent:
                engines.silent.add(moving.state(which[0])["replica"])
        for session in SESSIONS:
            same(session, "query", **ASK)
    finally:
        forget_all(loop, engines)
        forget_all(loop, steady)


def test_a_session_goes_on_where_its_replica_is_gone(cluster: Cluster, engines: Replicas) -> None:
    cluster.open("s", text="Readings:")
    cluster.do("s", "append", text="\n20")
    before = cluster.state("s")
    cluster.lose("s")
    after = cluster.state("s")
    assert after["replica"] != before["replica"]
    assert (after["tokens"], after["appends"]) == (before["tokens"], before["appends"])
    assert cluster.moves() == {"gone": 1.0}
    cluster.loop.run(engines.forget(cluster.state("s")["replica"]))
    assert cluster.do("s", "append", text="\n21").status_code == 200
    assert cluster.moves() == {"gone": 1.0, "forgotten": 1.0}
    engines.silent.add(cluster.state("s")["replica"])
    assert cluster.do("s", "query", **ASK).status_code == 200
    assert cluster.moves() == {"gone": 1.0, "forgotten": 1.0, "silent": 1.0}
    assert cluster.state("s")["appends"] == 3


@pytest.mark.parametrize("trap", [Trap.AFTER, Trap.CUT])
def test_what_another_router_has_told_of_an_append_is_not_done_again(cluster: Cluster, trap: Trap) -> None:
    """It was done, its own router does not know, and the next append's router has kept both."""
    cluster.open("s", tokens=[5])
    one, two = cluster.routers
    path = "/v1/sessions/s/append"
    cluster.backend.trap = trap
    cluster.backend.meanwhile = lambda: two.acall("POST", path, json={"tokens": [8]})
    assert one.call("POST", path, json={"tokens": [6, 7]}).json()["tokens"] == 3
    assert (cluster.state("s")["tokens"], cluster.state("s")["appends"]) == (4, 3)
    assert sum(cluster.moves().values()) == 1


def test_a_stream_does_not_go_on_from_another_history_than_it_was_begun_with(cluster: Cluster) -> None:
    cluster.open("s", text="Readings:")
    one, two = cluster.routers
    for keep in (False, True):
        before = cluster.state("s")
        cluster.backend.trap = Trap.DURING
        cluster.backend.meanwhile = lambda: two.acall("POST", "/v1/sessions/s/append", json={"tokens": [8]})
        stream = one.call("POST", "/v1/sessions/s/query", json={**ASK, "max_tokens": 300, "stream": True, "keep": keep})
        last = json.loads(stream.text.split("data: ")[-1])  # the answer itself, where nothing of a stream was sent yet
        assert last["error"]["code"] == "session_changed"
        assert cluster.state("s")["tokens"] == before["tokens"] + 1


def test_a_key_is_done_once_wherever_the_session_is(cluster: Cluster) -> None:
    cluster.open("s", text="Readings:")
    first = cluster.do("s", "append", "k", text="\n20").json()
    kept = cluster.do("s", "query", "q", **ASK, keep=True)
    assert kept.status_code == 200
    whole = cluster.state("s")
    for _ in range(2):
        again = cluster.do("s", "append", "k", text="\n20").json()
        assert again["tokens"] == first["tokens"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == first["tokens"]
        assert error(cluster.do("s", "append", "k", text="\n21")) == (409, "operation_done")
        assert error(cluster.do("s", "query", "q", **ASK, keep=True)) == (409, "operation_done")
        assert (cluster.state("s")["tokens"], cluster.state("s")["appends"]) == (whole["tokens"], 3)
        cluster.lose("s")
    assert cluster.do("s", "append", "k" * 256, text="\n22").status_code == 200
    assert cluster.do("s", "append", "k" * 257, text="\n22").status_code == 400


@pytest.mark.parametrize("lost", [False, True])
def test_what_two_routers_append_at_once_is_there_once(cluster: Cluster, loop: Loop, lost: bool) -> None:
    cluster.open("s", text="Readings:")
    begun = cluster.state("s")
    home = begun["replica"]

    async def all_at_once() -> list[httpx.Response]:
        path = "/v1/sessions/s/append"
        appends = [
            asyncio.ensure_future(cluster.routers[i % 2].acall("POST", path, json={"tokens": [100 + i]}))
            for i in range(20)
        ]
        if lost:
            await asyncio.wait(appends, return_when=asyncio.FIRST_COMPLETED)
            await cluster.backend.lose(home)
        return await asyncio.gather(*appends)

    answers = loop.run(all_at_once())
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["tokens"] for answer in answers) == [begun["tokens"] + i for i in range(1, 21)]
    assert (cluster.state("s")["tokens"], cluster.state("s")["appends"]) == (begun["tokens"] + 20, 21)
    histories = SessionHistories(cluster.records, RouterConfig())
    kept = loop.run(histories.read("default", "s"))
    assert kept is not None
    tokens = [int.from_bytes(kept.history.tokens[i : i + 4], "little") for i in range(0, len(kept.history.tokens), 4)]
    assert sorted(tokens[-20:]) == [100 + i for i in range(20)]


def test_questions_stand_again_after_a_move(cluster: Cluster) -> None:
    cluster.open("s", text="Readings:")
    asked = cluster.do("s", "questions", **{**ASK, "stop": ["."], "logit_bias": {"7": -1}}).json()["id"]
    gone = cluster.do("s", "questions", **ASK).json()["id"]
    assert cluster.call("DELETE", f"/s/questions/{gone}").status_code == 200
    cluster.do("s", "append", text="\n20")
    cluster.lose("s")
    assert cluster.state("s")["questions"] == [asked]
    (service,) = [each for each in cluster.backend.live.values() if each.sessions.of("default")]
    (state,) = service.sessions.of("default")
    question = state.questions[0].question
    assert (question.stop, question.sampling.logit_bias) == ((".",), {7: -1})
    assert cluster.call("GET", f"/s/questions/{asked}").status_code == 200


def test_a_closed_session_stays_closed_and_its_name_is_free(cluster: Cluster, engines: Replicas) -> None:
    cluster.open("s", text="old")
    engines.silent.add(cluster.state("s")["replica"])
    assert cluster.call("DELETE", "/s").status_code == 200
    assert error(cluster.do("s", "append", text="x")) == (404, "session_not_found")
    assert error(cluster.call("DELETE", "/s")) == (404, "session_not_found")
    engines.silent.clear()
    # Where its replica could not be told, what it still has is not in the way of one of the same name.
    for _ in range(3):
        assert cluster.open("s", text="new and longer").status_code == 200
        assert cluster.state("s")["appends"] == 1
        assert error(cluster.open("s")) == (409, "session_exists")
        cluster.lose("s")
        assert error(cluster.open("s")) == (409, "session_exists")  # it is there, though it has no replica now
        assert cluster.call("DELETE", "/s").status_code == 200


def test_what_an_append_costs_is_what_it_appends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    script = Records.try_script

    async def watched(self: Records, source: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        reply = await script(self, source, keys, arguments)
        if any("sessions/" in key for key in keys):
            sizes.append(len(str(arguments)) + len(str(reply)))
        return reply

    monkeypatch.setattr(Records, "try_script", watched)
    cluster.open("s", tokens=[5] * 800)
    assert max(sizes) > 3200
    sizes.clear()
    for _ in range(10):
        assert cluster.do("s", "append", tokens=[6]).status_code == 200
        assert cluster.do("s", "query", **ASK).status_code == 200
    assert max(sizes) < 500


def test_a_replica_that_is_lost_while_it_takes_a_session_in_is_followed_by_another(cluster: Cluster) -> None:
    cluster.open("s", text="Readings:")
    before = cluster.state("s")["tokens"]
    home = cluster.state("s")["replica"]
    cluster.backend.restore_fails = 2
    cluster.loop.run(cluster.backend.lose(home))
    assert cluster.do("s", "append", tokens=[5]).json()["tokens"] == before + 1
    assert cluster.moves() == {"gone": 1.0}
    cluster.backend.restore_fails = 99
    cluster.loop.run(cluster.backend.lose(cluster.state("s")["replica"]))
    assert error(cluster.do("s", "append", tokens=[5])) == (503, "unavailable")
    cluster.backend.restore_fails = 0
    assert cluster.do("s", "append", tokens=[5]).json()["tokens"] == before + 2


def test_a_history_that_has_no_room_is_given_up_and_the_error_says_so(loop: Loop, engines: Replicas) -> None:
    cluster = Cluster.of(loop, engines, config=RouterConfig(session_tenant_bytes=3000))
    cluster.open("s", tokens=[5] * 300)
    cluster.open("other", tokens=[5] * 100)
    for _ in range(3):
        assert cluster.do("s", "append", tokens=[6] * 150).status_code == 200
    assert cluster.state("s")["tokens"] == 750
    assert cluster.do("s", "query", **ASK).status_code == 200
    cluster.lose("other")
    assert cluster.state("other")["tokens"] == 100
    assert cluster.do("other", "append", tokens=[6] * 300).status_code == 200  # what was given up leaves room
    loop.run(engines.lose(cluster.state("s")["replica"]))
    for answer in (cluster.do("s", "append", text="x"), cluster.do("s", "query", **ASK), cluster.call("GET", "/s")):
        assert error(answer) == (410, "session_lost")
        assert "session_tenant_bytes" in answer.json()["error"]["message"]
    assert cluster.open("s").status_code == 200  # its name is free


def test_without_histories_a_session_is_lost_with_its_replica(loop: Loop, engines: Replicas) -> None:
    cluster = Cluster.of(loop, engines, config=RouterConfig(session_tenant_bytes=0))
    cluster.open("s", text="Readings:")
    for _ in range(2):
        assert cluster.do("s", "append", "k", text="\n1").status_code == 200
    assert cluster.state("s")["appends"] == 2
    cluster.lose("s")
    answer = cluster.do("s", "append", text="x")
    assert error(answer) == (410, "session_lost")
    assert "session_tenant_bytes" in answer.json()["error"]["message"]
    assert cluster.call("DELETE", "/s").status_code == 200
    assert error(cluster.call("GET", "/s")) == (404, "session_not_found")


def test_where_the_store_has_lost_a_history_the_session_is_lost_or_kept_anew(cluster: Cluster, loop: Loop) -> None:
    cluster.open("s", text="Readings:")
    question = cluster.do("s", "questions", **ASK).json()["id"]
    loop.run(cluster.records.delete("sessions/default/s"))
    assert cluster.do("s", "append", text="\n1").status_code == 200  # its replica has it all
    cluster.lose("s")
    assert (cluster.state("s")["appends"], cluster.state("s")["questions"]) == (2, [question])
    home = cluster.state("s")["replica"]
    loop.run(cluster.records.delete("sessions/default/s"))
    loop.run(cluster.backend.lose(home))
    answer = cluster.do("s", "query", **ASK)
    assert error(answer) == (410, "session_lost")
    assert "store" in answer.json()["error"]["message"]


def test_a_tenant_does_not_reach_anothers_session(loop: Loop, engines: Replicas) -> None:
    cluster = Cluster.of(loop, engines, tenants=keyed(*"ab", exposed=True))

    def call(who: str, method: str, path: str, **body: object) -> httpx.Response:
        arguments: dict[str, Any] = {"json": body} if body else {}
        return cluster.call(method, path, headers=bearer(who), **arguments)

    assert call("a", "POST", "", model="pocket", id="s", text="secret").status_code == 200
    loop.run(engines.lose(call("a", "GET", "/s").json()["replica"]))
    for method, path, body in (
        ("GET", "/s", {}),
        ("POST", "/s/append", {"text": "x"}),
        ("POST", "/s/query", ASK),
        ("POST", "/s/fork", {"id": "mine"}),
        ("DELETE", "/s", {}),
    ):
        assert error(call("b", method, path, **body)) == (404, "session_not_found")
    assert call("b", "POST", "", model="pocket", id="s").status_code == 200  # a session of its own
    assert call("b", "GET", "/s").json()["tokens"] == 0
    assert call("a", "GET", "/s").json()["tokens"] > 0


def test_histories_are_encrypted_where_answers_are(loop: Loop, engines: Replicas, tmp_path: Any) -> None:
    cluster = Cluster.of(loop, engines, RouterConfig(cache_key_file=key_file(tmp_path)))
    cluster.open("s", tokens=[900, 901, 902])
    cluster.do("s", "append", "shown", tokens=[903, 904])
    cluster.do("s", "questions", **{**ASK, "text": "secret question"})
    with shared_server().client() as redis:
        stored = b"".join(redis.lrange(f"{cluster.records.namespace}/records/sessions/default/s", 0, -1))
    for plain in ((903).to_bytes(4, "little"), b"shown", b"secret", b"appends"):
        assert plain not in stored
    cluster.lose("s")
    assert cluster.state("s")["tokens"] == 5


def test_two_routers_over_a_redis_that_is_lost(loop: Loop, engines: Replicas, server: RedisServer) -> None:
    async def connect() -> Records:
        return server.records()

    records = [loop.run(connect()) for _ in range(2)]
    one, two = (Router(loop, engines, each) for each in records)
    cluster = Cluster(loop, engines, records[0], (one, two))  # type: ignore[arg-type]
    try:
        cluster.open("s", text="Readings:")
        cluster.open("gone", text="Nothing")
        assert cluster.call("DELETE", "/gone").status_code == 200
        with server.client() as redis:
            assert redis.keys("holdfast/records/sessions/*") == [b"holdfast/records/sessions/default/s"]
            assert 0 < redis.pttl("holdfast/records/sessions/default/s") <= CONFIG.session_idle_s * 1000
        # While Redis is away nothing is done that no other router would know of.
        server.kill()
        for answer in (
            cluster.do("s", "append", text="\nlost"),
            cluster.do("s", "query", **ASK),
            cluster.call("GET", "/s"),
            cluster.call("DELETE", "/s"),
            cluster.open("new"),
        ):
            assert error(answer) == (503, "unavailable")
        server.start()
        for each in records:
            loop.run(until_async(lambda each=each: not each.degraded))
        assert error(cluster.call("GET", "/s")) == (404, "session_not_found"), "it comes back empty"
    finally:
        for each in records:
            loop.run(each.close())
