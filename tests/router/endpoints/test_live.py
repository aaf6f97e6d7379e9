"""`/v1/live` and the page's files: what is in them, for whom, and how often."""

import json
from pathlib import Path

import pytest
from fake_backend import CALL, CARD, DONE, HELLO, USAGE, Ends, FakeBackend, World, bearer, begun, chat_body

from holdfast.replicas.requests import Completed
from holdfast.replicas.retention.latency import Called
from holdfast.router.config import RouterConfig
from holdfast.router.endpoints import status
from holdfast.router.endpoints.status import MOST_ASKED
from holdfast.router.entry import turn_log
from holdfast.router.entry.metrics import Outcome
from holdfast.router.entry.turn_log import TurnLog
from holdfast.router.tenants import Tenant, TenantDirectory, TenantLimits, hash_key

LIVE = "/v1/live"
CHAT = "/v1/chat/completions"
FRESH = {"cache-control": "no-store"}


class Telling(FakeBackend):
    """One replica, which says for whom it was asked; every turn calls a tool."""

    def __init__(self) -> None:
        super().__init__((*CALL[:-1], (Completed("tool_calls", USAGE, DONE.timing, Called(("get_weather",))),)))
        self.looks: list[str | None] = []

    async def activity(self, scope: str | None) -> list[bytes]:
        self.looks.append(scope)
        return [json.dumps({"replica": "r1", "status": None, "turns": [], "pins": []}).encode()]


def ended(told: dict[str, object]) -> list[dict[str, object]]:
    fields = told["fields"]["ended"]  # type: ignore[index]
    return [dict(zip(fields, row, strict=True)) for row in told["ended"]]  # type: ignore[call-overload]


def test_turns_that_have_ended_with_their_stages_and_tokens() -> None:
    world = World(Telling())
    turn = {"json": chat_body(program_id="trip", messages=[{"role": "user", "content": "xylophone"}])}
    *_, answer = world.calls([("POST", CHAT, turn), ("POST", CHAT, turn), ("GET", LIVE, {})])
    told = answer.json()
    assert (told["tenant"], told["operator"], told["live"], told["left_out"]) == ("default", True, [], False)
    first, second = ended(told)
    assert first.items() >= {"program": "default/trip", "outcome": "completed", "replica": "r1"}.items()
    assert first.items() >= {"tools": "get_weather", "queue_s": 0.125, "prefill_s": 0.125, "decode_s": 0.25}.items()
    assert (first["prompt"], first["cached"], first["drawn"]) == (10, 4, 3)
    assert second["outcome"] == "cached"
    assert told["replicas"] == [{"replica": "r1", "status": None, "turns": [], "pins": []}]
    (tenant,) = told["tenants"]
    assert (tenant["name"], tenant["cached_tokens"], tenant["cached_answers"]) == ("default", 4, 1)
    assert "xylophone" not in answer.text  # nor anything else that was said
    assert "Oslo" not in answer.text


def test_only_what_ended_since() -> None:
    world = World(Telling())

    def turn(name: str) -> tuple[str, str, dict[str, object]]:
        return "POST", CHAT, {"json": chat_body(program_id=name), "headers": FRESH}

    _, first = world.calls([turn("a"), ("GET", LIVE, {})])
    since = f"other:1,{first.json()['router']}:{first.json()['number']}"
    *_, second, again = world.calls([turn("b"), ("GET", f"{LIVE}?since={since}", {}), ("GET", LIVE, {})])
    assert [each["program"] for each in ended(second.json())] == ["default/b"]
    assert [each["program"] for each in ended(again.json())] == ["default/a", "default/b"]
    for wrong in ("router:x", "router:-1", "router:" + "9" * 30, "r" * 2000):
        refused = world.call("GET", f"{LIVE}?since={wrong}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


def test_what_is_being_served() -> None:
    seen: list[object] = []

    class Looks(FakeBackend):
        async def generate(self, request, place=None):
            async with world.client() as client:
                live = (await client.get(LIVE)).json()["live"]
            seen.append((live[0][0], live[0][1] == request.request_id))
            return await super().generate(request, place)

    world = World(Looks())
    world.chat(program_id="now")
    assert seen == [("default/now", True)]


NAMES = ("one", "two", "ops")
TENANTS = TenantDirectory([Tenant(name, (hash_key(name),), operator=name == "ops") for name in NAMES])


def test_a_key_sees_its_own_tenant_and_an_operator_all() -> None:
    backend = Telling()
    world = World(backend, tenants=TENANTS)
    turns = [("POST", CHAT, {"json": chat_body(program_id="p"), "headers": FRESH | bearer(name)}) for name in NAMES[:2]]
    looks = [("GET", LIVE, {"headers": bearer(name)}) for name in (*NAMES, "wrong")]
    *_, one, two, ops, wrong, none = world.calls([*turns, *looks, ("GET", LIVE, {})])
    assert [none.status_code, wrong.status_code] == [401, 401]
    for answer, name, other in ((one, "one", "two"), (two, "two", "one")):
        told = answer.json()
        assert [each["program"] for each in ended(told)] == [f"{name}/p"]
        assert [each["name"] for each in told["tenants"]] == [name]
        assert (told["tenant"], told["operator"]) == (name, False)
        assert other not in answer.text
    assert {each["program"] for each in ended(ops.json())} == {"one/p", "two/p"}
    assert [each["name"] for each in ops.json()["tenants"]] == ["one", "two"]
    assert backend.looks == ["one", "two", None]


def test_many_pages_ask_replicas_as_often_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOOK_S", 60.0)  # eight answers may take a second on a busy machine
    backend = Telling()
    answers = World(backend).calls([("GET", LIVE, {})] * 8)
    assert {answer.status_code for answer in answers} == {200}
    assert len(backend.looks) == 1


def test_a_tenant_that_asks_without_end_is_refused() -> None:
    turns = TurnLog(clock=lambda: 1000.0)  # all of it within a second
    world = World(turns=turns, tenants=TENANTS)
    look = ("GET", LIVE, {"headers": bearer("one")})
    *before, over = world.calls([look] * (MOST_ASKED + 1))
    assert {answer.status_code for answer in before} == {200}
    assert (over.status_code, over.headers["retry-after"]) == (429, "1")
    assert world.call("GET", LIVE, headers=bearer("two")).status_code == 200


def test_looking_counts_against_no_limit() -> None:
    limited = Tenant("one", (hash_key("one"),), limits=TenantLimits(requests_per_minute=1))
    world = World(tenants=TenantDirectory((limited,)))
    look = ("GET", LIVE, {"headers": bearer("one")})
    turn = ("POST", CHAT, {"json": chat_body(), "headers": bearer("one")})
    assert [each.status_code for each in world.calls([look, look, turn, look])] == [200, 200, 200, 200]


def turn(turns: TurnLog, tenant: str) -> None:
    call = begun(tenant=Tenant(tenant), turns=turns)
    call.facts.program = f"{tenant}/p"
    call.end(Outcome.COMPLETED)


def test_one_tenant_pushes_no_others_turns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_log, "REMEMBERED", 64)
    turns = TurnLog()
    turn(turns, "quiet")
    for _ in range(128):
        turn(turns, "loud")
    assert len(turns.ended(0, "quiet", 10)) == 1
    assert len(turns.ended(0, None, 10**6)) == 64


def test_numbers_rise_though_the_clock_does_not() -> None:
    times = iter([5.0] * 40 + [4.0] * 40)
    turns = TurnLog(clock=lambda: next(times))
    for _ in range(8):
        before = turns.number
        turn(turns, "t")
        assert [each.number > before for each in turns.ended(before, "t", 10)] == [True]


def test_the_seconds_of_a_request_are_right_where_the_clock_is_set_back() -> None:
    times, books = iter([5000.0] + [1000.0] * 9), Ends()
    call = begun(turns=TurnLog(clock=lambda: next(times)), books=books)
    call.asks("pocket")
    call.end(Outcome.COMPLETED)
    [end] = books.ends
    assert end.record is not None
    assert 0 <= end.record.seconds < 1000


@pytest.mark.parametrize("path", ["/", "/page/nothing.js", "/page/app.js", "/v1/live"])
def test_it_can_be_turned_off(path: str) -> None:
    assert World(config=RouterConfig(page=False)).call("GET", path).status_code == 404


def test_the_page_is_files_that_a_policy_shuts_in() -> None:
    world = World(FakeBackend(HELLO), tenants=TENANTS)  # open without a key: nothing is in it
    answer = world.call("GET", "/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    names = {path.name for path in status.FOLDER.iterdir()}
    for name in names:
        found = world.call("GET", f"/page/{name}")
        assert found.status_code == 200
        assert found.headers["content-security-policy"] == policy
        assert world.call("GET", f"/page/{name}", headers={"if-none-match": found.headers["etag"]}).status_code == 304
    for asked in ("nothing.js", "..%2Fapp.py", "app.py"):
        assert world.call("GET", f"/page/{asked}").status_code == 404


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for path in Path(status.FOLDER).iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        assert "innerHTML" not in text, path.name
    assert CARD.name not in (status.FOLDER / "index.html").read_text()
