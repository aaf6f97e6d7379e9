"""Two routers, real replicas and a real Redis: programs whose turns alternate between the routers stay one truth.

A replica is killed while turns run; then a router while turns run, behind the proxy. With more programs:

    HOLDFAST_TEST_PROGRAMS=200 .venv/bin/pytest -s tests/cluster/test_several_routers.py
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from listening import listening
from waiting import until

from holdfast.cluster import doctor
from holdfast.cluster.config import Settings

PROGRAMS = int(os.environ.get("HOLDFAST_TEST_PROGRAMS", "6"))
TURNS = 4
AT_ONCE = 10
TOOL_S = 1.5  # the least time a tool takes
REPLICA, ROUTER = "ServeReplica:holdfast:replicas", "ServeReplica:holdfast:router"
FRESH = {"cache-control": "no-cache"}
WAITS: dict[str, Any] = {"timeout": 60.0, "trust_env": False}  # nothing for so long is silence, which is a failure
CUT = (httpx.RemoteProtocolError, httpx.ReadError)  # an answer that was begun and has no end
# Agents have long instructions. A program of a few hundred tokens is computed again so soon that it leaves its replica
# whenever the other one has less to do.
INSTRUCTIONS = {"role": "system", "content": "weather " * 2000}


@dataclass
class Program:
    """One agent with a tool of its own, so that its pauses are told apart from all others."""

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # what became of turns that had no answer
    replied: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The next turn, which calls this program's tool."""
        if not self.messages:
            self.messages += [INSTRUCTIONS, {"role": "user", "content": f"Run {self.name}."}]
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        tool = {"type": "function", "function": {"name": self.name, "parameters": nothing, "strict": True}}
        body = {"model": "pocket", "messages": self.messages, "tools": [tool], "tool_choice": "required"}
        return body | {"program_id": self.name, "max_tokens": 64, "parallel_tool_calls": False}

    def turn(self, router: str) -> None:
        """The next turn, asked of this router; raises where it has no answer."""
        body = self.body
        if self.replied is not None:
            until(lambda: time.monotonic() >= self.replied + TOOL_S)  # its tool runs
            self.pauses.append(time.monotonic() - self.replied)
        answer = httpx.post(f"{router}/v1/chat/completions", json=body, headers=FRESH, timeout=120.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        self.replied = time.monotonic()
        self.replicas.append(answer.headers["x-holdfast-replica"])
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
        self._called(answer.json()["choices"][0]["message"])

    def go_on(self, url: str, stream: bool) -> None:
        """The next turn, sent again as long as it is lost with what served it. Any other failure raises."""
        while not (self._streamed(url) if stream else self._whole(url)):
            pass

    def _whole(self, url: str) -> bool:
        # The request is short enough to be sent again, so a connection that ends without an answer is a failure.
        answer = httpx.post(f"{url}/v1/chat/completions", json=self.body, headers=FRESH, **WAITS)
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "unavailable"
            assert "retry-after" in answer.headers
            self.lost.append("503")
            return False
        assert answer.status_code == 200, answer.text
        self.replicas.append(answer.headers["x-holdfast-replica"])
        self._called(answer.json()["choices"][0]["message"])
        return True

    def _streamed(self, url: str) -> bool:
        chunks: list[dict[str, Any]] = []
        body = {**self.body, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=FRESH, **WAITS) as answer:
            if answer.status_code == 503:
                self.lost.append("503")
                return False
            assert answer.status_code == 200, answer.read()
            try:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.replicas.append(answer.headers["x-holdfast-replica"])
                        self._called(together(chunks))
                        return True
                    if line.startswith("data: "):
                        chunks.append(json.loads(line.removeprefix("data: ")))
                        if "error" in chunks[-1]:
                            self.lost.append(chunks[-1]["error"]["code"])
                            return False
            except CUT as error:
                self.lost.append(str(error))
                return False
        raise AssertionError("a stream came to its end as if it were whole")

    def _called(self, message: dict[str, Any]) -> None:
        self.messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}]

    @property
    def moves(self) -> int:
        return sum(one != two for one, two in zip(self.replicas, self.replicas[1:], strict=False))


def together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream that has one call."""
    calls = [call for chunk in chunks for each in chunk["choices"] for call in each["delta"].get("tool_calls") or ()]
    function = {
        "name": calls[0]["function"]["name"],
        "arguments": "".join(call["function"].get("arguments") or "" for call in calls),
    }
    call = {"id": calls[0]["id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_programs_that_alternate_between_two_routers(
    server: Any, cluster: Any, eventually: Callable[..., None]
) -> None:
    programs = [Program(f"tool_{i}") for i in range(PROGRAMS)]
    routers = Routers(server, eventually)
    began = time.monotonic()
    for turn in range(TURNS):
        served = Countdown(PROGRAMS // 2)
        if turn == 2:
            threading.Thread(target=kill_one_replica, args=(server, served), daemon=True).start()
        to = [routers.urls[(i + turn) % 2] for i in range(PROGRAMS)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask, programs, to, [served] * PROGRAMS))
    seconds = time.monotonic() - began

    with cluster.redis.client() as client:
        keys = [client.keys(f"*/program/{{default}}/{program.name}") for program in programs]
        records = {program.name: client.hgetall(key) for program, (key,) in zip(programs, keys, strict=True)}
    assert [int(record[b"turns"]) for record in records.values()] == [TURNS] * PROGRAMS
    for program in programs:
        assert records[program.name][b"last_replica"].decode() == program.replicas[-1]

    told = httpx.get(f"{routers.urls[0]}/v1/tools/latency", trust_env=False).json()["data"]
    recorded = {each["tools"][0]: each for each in told}
    worst = 0.0
    for program in programs:
        mean = sum(program.pauses) / len(program.pauses)
        assert recorded[program.name]["count"] == TURNS - 1
        worst = max(worst, abs(recorded[program.name]["mean_s"] / mean - 1))
    # A pause counted from a turn at the other router would have about twice its length.
    assert worst < 0.75, f"a recorded pause is off by {worst:.1%}"

    moved = [program for program in programs if program.moves]
    assert moved, "a replica was killed"
    assert max(program.moves for program in programs) == 1, [program.replicas for program in moved if program.moves > 1]
    assert len({program.replicas[0] for program in moved}) == 1, "only those of the replica that was killed"
    print(
        f"{PROGRAMS} programs, {PROGRAMS * TURNS} turns in {seconds:.0f} s: all answered and counted; "
        f"{len(moved)} moved, each once; recorded pauses off by {worst:.1%} at most"
    )


def test_a_program_that_one_router_ends_the_other_has_forgotten(server: Any, eventually: Callable[..., None]) -> None:
    one, two = Routers(server, eventually).urls
    program = Program("ends")
    program.turn(one)
    program.turn(two)
    assert httpx.delete(f"{one}/v1/programs/ends", trust_env=False).status_code == 200
    assert httpx.delete(f"{two}/v1/programs/ends", trust_env=False).status_code == 404
    program.turn(two)
    told = httpx.get(f"{two}/v1/cluster/status", params={"programs": 1000}, trust_env=False).json()["programs"]
    assert [each["turns"] for each in told if each["program"] == "ends"] == [1]


def test_what_a_page_hears_behind_the_proxy_adds_up_to_both_routers(
    server: Any, eventually: Callable[..., None]
) -> None:
    program = Program("watched")
    for router in Routers(server, eventually).urls:
        program.turn(router)
    heard: dict[str, set[str]] = {}
    kept: set[str] = set()

    def both() -> bool:
        told = httpx.get(f"{server.url}/v1/live", **WAITS).json()
        fields = told["fields"]["ended"]
        ended = [dict(zip(fields, row, strict=True)) for row in told["ended"]]
        heard[told["router"]] = {each["request"] for each in ended if each["program"] == "default/watched"}
        kept.update(pin[0] for replica in told["replicas"] for pin in replica["pins"])
        return len(heard) == 2

    eventually(both)
    assert [len(turns) for turns in heard.values()] == [1, 1]
    assert len(set.union(*heard.values())) == 2
    assert "default/watched" in kept


def test_sessions_are_found_by_both_routers_and_go_on_where_their_replica_dies(
    server: Any, eventually: Callable[..., None]
) -> None:
    """A replica is killed while half of the sessions that it has are appended to, and before the others are asked."""
    routers = Routers(server, eventually).urls
    sessions = [f"feed-{i}" for i in range(6)]
    homes: dict[str, str] = {}
    ask: dict[str, Any] = {"text": "?", "max_tokens": 8, "ignore_eos": True}

    def call(router: str, path: str, key: str = "", **body: object) -> httpx.Response:
        headers = {"idempotency-key": key} if key else {}
        return httpx.post(f"{router}/v1/sessions{path}", json=body, headers=headers, **WAITS)

    def state(router: str, name: str) -> Any:
        return httpx.get(f"{router}/v1/sessions/{name}", **WAITS).json()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        opened = pool.map(lambda name: call(routers[0], "", model="pocket", id=name, text="weather " * 200), sessions)
        assert [answer.status_code for answer in opened] == [200] * len(sessions)
    for n in range(2, 5):
        for name in sessions:
            answer = call(routers[n % 2], f"/{name}/append", text=f" and {n}")
            assert answer.status_code == 200, answer.text
            assert homes.setdefault(name, answer.headers["x-holdfast-replica"]) == answer.headers["x-holdfast-replica"]
            assert state(routers[1 - n % 2], name)["appends"] == n
    assert len(set(homes.values())) == 2
    assert call(routers[1], "", model="pocket", id=sessions[0]).status_code == 409
    listed = httpx.get(f"{routers[1]}/v1/sessions", **WAITS).json()["data"]
    assert {each["id"]: each["replica"] for each in listed if each["id"] in homes} == homes
    assert call(routers[1], f"/{sessions[0]}/fork", id="fork").json()["replica"] == homes[sessions[0]]
    answers = [call(routers[n % 2], f"/{name}/query", **ask).json() for n, name in enumerate(sessions)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1  # all have the same

    began = time.monotonic()
    more = "weather " * 300
    with ThreadPoolExecutor(AT_ONCE) as pool:
        appends = {
            name: pool.submit(call, routers[n % 2], f"/{name}/append", "once", text=more)
            for n, name in enumerate(sessions[::2])
        }
        until(lambda: any(each.done() for each in appends.values()))  # the others are under way
        os.kill(server.pids(REPLICA)[0], signal.SIGKILL)
        told = {name: append.result() for name, append in appends.items()}
    assert {answer.status_code for answer in told.values()} == {200}, [answer.text for answer in told.values()]
    for n, name in enumerate(sessions):  # sent again, or for the first time
        answer = call(routers[n % 2], f"/{name}/append", "once", text=more)
        assert answer.status_code == 200, answer.text
        assert state(routers[1 - n % 2], name)["appends"] == 5
    asked = [call(routers[1 - n % 2], f"/{name}/query", **ask) for n, name in enumerate(sessions)]
    seconds = time.monotonic() - began
    assert {answer.status_code for answer in asked} == {200}, [answer.text for answer in asked]
    now = {name: answer.headers["x-holdfast-replica"] for name, answer in zip(sessions, asked, strict=True)}
    moved = [name for name in sessions if now[name] != homes[name]]
    assert len({homes[name] for name in moved}) == 1
    assert {answer.json()["usage"]["prompt_tokens"] for answer in asked} == {
        state(routers[0], sessions[0])["tokens"] + 1
    }
    (text,) = {answer.json()["choices"][0]["text"] for answer in asked}  # to the token, moved or not
    assert state(routers[0], "fork")["appends"] == 4
    metrics = httpx.get(f"{server.url}/metrics", **WAITS).text
    assert "holdfast_session_moves_total" in metrics
    for name in (*sessions, "fork"):
        answer = httpx.delete(f"{routers[1]}/v1/sessions/{name}", **WAITS)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{routers[0]}/v1/sessions/{name}", **WAITS).status_code == 404
    assert call(routers[0], "", model="pocket", id=moved[0]).status_code == 200
    print(
        f"{len(moved)} of {len(sessions)} sessions moved; 9 appends and 6 queries in {seconds:.1f} s, answered {text!r}"
    )


def test_a_router_that_dies_under_load_takes_with_it_what_it_had_and_no_more(
    server: Any, cluster: Any, eventually: Callable[..., None]
) -> None:
    """Behind the proxy: what it had not begun to answer goes to the other one, the rest ends so that clients notice."""
    programs = [Program(f"behind_{i}") for i in range(PROGRAMS)]
    Routers(server, eventually)
    served = Countdown(PROGRAMS * TURNS // 3)

    def run(program: Program) -> None:
        for turn in range(TURNS):
            program.go_on(server.url, stream=turn % 2 == 0)
            served.one()

    killer = threading.Thread(target=kill_one_router, args=(server, served), daemon=True)
    killer.start()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, programs))
    killer.join()
    lost = [each for program in programs for each in program.lost]
    assert len(lost) <= AT_ONCE, lost  # what was in flight, and nothing else
    with cluster.redis.client() as client:
        for program in programs:
            (key,) = client.keys(f"*/program/{{default}}/{program.name}")
            record = client.hgetall(key)
            # A turn may have been counted whose answer was lost; it was computed, so it counts.
            assert TURNS <= int(record[b"turns"]) <= TURNS + len(program.lost)
            assert record[b"last_replica"].decode() == program.replicas[-1]
    assert max(program.moves for program in programs) <= 1, [program.replicas for program in programs if program.moves]
    moved = sum(program.moves for program in programs)
    print(
        f"{PROGRAMS} programs, {PROGRAMS * TURNS} turns behind the proxy, a router killed: lost {lost}, moved {moved}"
    )


def test_doctor_counts_as_much_for_a_router_and_the_proxy_as_they_take(
    server: Any, eventually: Callable[..., None]
) -> None:
    Routers(server, eventually)  # one was killed
    routers = [resident(pid) for pid in server.pids(ROUTER)]
    assert len(routers) == 2
    assert max(routers) < doctor.router_bytes(Settings())
    # Of the two processes of Serve that tend the proxy half is what all of Ray's share.
    tended = [resident(pid) / 2 for name in ("ray::ProxyActor", "ray::HAProxyManager") for pid in server.pids(name)]
    proxy = sum(resident(pid) for pid in server.pids("/haproxy -")) + sum(tended)
    assert 0 < proxy < doctor.PROXY
    print(f"routers {[each >> 20 for each in routers]} MiB, proxy {proxy / 2**20:.0f} MiB")


def ask(program: Program, router: str, served: "Countdown") -> None:
    program.turn(router)
    served.one()


def kill_one_replica(server: Any, served: "Countdown") -> None:
    """Kill it when half of the programs have had this turn; the others' are running or to come."""
    served.over.wait(120.0)
    os.kill(server.pids(REPLICA)[0], signal.SIGKILL)


def kill_one_router(server: Any, served: "Countdown") -> None:
    served.over.wait(300.0)
    os.kill(server.pids(ROUTER)[0], signal.SIGKILL)


class Countdown:
    """Says when so many turns have been served."""

    def __init__(self, left: int) -> None:
        self.over = threading.Event()
        self._left = left
        self._lock = threading.Lock()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
        if self._left <= 0:
            self.over.set()


class Routers:
    """The two routers of a cluster, each at its own address: what a proxy in front of them would choose from."""

    def __init__(self, server: Any, eventually: Callable[..., None]) -> None:
        self._server = server
        self._eventually = eventually
        self.urls: list[str] = []
        self._eventually(self._found, 120.0)

    def _found(self) -> bool:
        ports = {port for pid in self._server.pids(ROUTER) for _, port in listening(pid)}
        urls = [url for port in ports if answers(url := f"http://127.0.0.1:{port}")]
        self.urls = sorted(urls)
        return len(urls) == 2


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answers(url: str) -> bool:
    """Whether this is the address of a router that knows both replicas."""
    with suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/v1/cluster/status", trust_env=False)
        return answer.status_code == 200 and len(answer.json()["replicas"]) == 2
    return False
