"""Failures under load: a real server, clients that know what each answer must be, and one failure after the other.

    python tests/support/chaos.py                    # each failure once: the table of docs/reliability.md
    python tests/support/chaos.py --seconds 7200     # failures drawn by chance, for two hours
    python tests/support/chaos.py --only "Redis"     # those whose name has this in it

Two routers, two engines with the shipped model, Redis in a process of its own. The clients, half of which stream, send
prompts whose answers were asked for before anything failed, at temperature 1, past the response cache. So a stream that
goes on elsewhere with other words, or with a word too many, counts as wrong. After each failure all must be well again:
both engines there, and answers one after the other. At the end the books must be even: every request one outcome, no
cell and no row held, nothing running in any engine or in any tenant's count.

Prints a line for each failure; the exit status is 1 where one had an outcome that it may not have.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import redis
from redis_server import RedisServer

CLIENTS, PROMPTS = 6, 24
PATIENCE_S = 90.0  # a client that hears nothing for longer calls it silence; more than `placement.no_replica_s`
SETTLED = 24  # so many answers in a row, with both engines there: it is over
WITHIN_S = 240.0
REPLICA, ROUTER, CONTROLLER = "ServeReplica:holdfast:replicas", "ServeReplica:holdfast:router", "ServeController"
SETTINGS = "engine: {{threads: 1, kv_memory: 0.1}}\nredis: {{url: '{url}'}}\n"
FRESH = {"cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it was sent, how long it took, the longest pause in it, and what it ended in."""

    at: float
    seconds: float
    pause: float
    outcome: str  # answered, wrong, error (an error event), cut, refused, silence, or a status

    @property
    def ended(self) -> float:
        return self.at + self.seconds


class Clients:
    """They ask without a pause until they are told to stop; one that was not answered waits a moment."""

    def __init__(self, url: str) -> None:
        self.asked: list[Asked] = []
        self.sent = 0
        self._url = url
        self._number = count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(CLIENTS)]
        with self._http() as http:
            self._answers = [self._ask(http, i, stream=False)[1] for i in range(PROMPTS)]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def since(self, at: float) -> list[Asked]:
        """Requests that had not ended then, in the order of their ends."""
        return [each for each in list(self.asked) if each.ended > at]

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with self._http() as http:
            while not self._over.is_set():
                prompt = chance.randrange(PROMPTS)
                self.sent += 1
                asked, said = self._ask(http, prompt, stream=number % 2 == 0)
                if asked.outcome == "answered" and said != self._answers[prompt]:
                    asked = Asked(asked.at, asked.seconds, asked.pause, "wrong")
                self.asked.append(asked)
                if asked.outcome != "answered":
                    self._over.wait(0.2)

    def _ask(self, http: httpx.Client, prompt: int, *, stream: bool) -> tuple[Asked, str]:
        messages = [{"role": "user", "content": f"Tell story number {prompt}."}]
        body = {"model": "pocket", "messages": messages, "max_tokens": 96, "ignore_eos": True, "temperature": 1.0}
        body |= {"stream": stream, "program_id": f"story-{next(self._number)}", "program_end": True}
        began = last = time.monotonic()
        pause, lines, outcome, said = 0.0, [], "cut", ""
        try:
            with http.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=FRESH) as answer:
                for line in answer.iter_lines():
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    lines.append(line)
            outcome, said = told(answer.status_code, stream, lines)
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.TimeoutException:
            outcome = "silence"
        except httpx.TransportError:
            outcome = "cut"
        return Asked(began, time.monotonic() - began, pause, outcome), said

    @staticmethod
    def _http() -> httpx.Client:
        return httpx.Client(timeout=PATIENCE_S, trust_env=False)


def told(status: int, stream: bool, lines: Sequence[str]) -> tuple[str, str]:
    """What an answer ends in and what it says. Raises AssertionError for a stream that ends in no way, or in two."""
    if status != 200:
        return str(status), ""
    if not stream:
        return "answered", json.loads("".join(lines))["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    errors = [each for each in events if "error" in each]
    choices = [each["choices"][0] for each in events if "error" not in each]
    ends = [each for each in choices if each["finish_reason"]]
    assert len(errors) + len(ends) == 1, lines[-5:]
    return "error" if errors else "answered", "".join(each["delta"].get("content") or "" for each in choices)


@dataclass(frozen=True)
class World:
    server: Any  # tests/cluster/conftest.py's
    store: RedisServer

    def pids(self, name: str) -> list[int]:
        return [pid for pid, command in self.server.processes().items() if name in command]

    def kill(self, name: str, most: int, how: signal.Signals = signal.SIGKILL) -> None:
        for pid in self.pids(name)[:most]:
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", timeout=10.0, trust_env=False)

    def said(self) -> str:
        """How it is, in its own words."""
        try:
            there = f"{len(self.pids(REPLICA))} engines, {len(self.pids(ROUTER))} routers"
            return f"{there}, {self.get('/v1/cluster/status').text}"
        except httpx.HTTPError as error:
            return f"no status: {error!r}"

    def whole(self) -> bool:
        """Both routers and both engines are there and say how they are."""
        with suppress(httpx.HTTPError, KeyError, ValueError):
            replicas = self.get("/v1/cluster/status").json()["replicas"]
            return len(replicas) == 2 and len(self.pids(ROUTER)) == 2
        return False

    def idle(self) -> list[str]:
        """What is still held, by whom; nothing where the books are even."""
        status = self.get("/v1/cluster/status").json()
        held = [f"{each['id']}: {name}" for each in status["replicas"] for name in ("running", "waiting") if each[name]]
        held += [f"{each['name']}: {each['running']} running" for each in status["tenants"] if each["running"]]
        for line in self.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            taken = name.startswith("holdfast_sequence_rows_taken{")
            if (taken or (name.startswith("holdfast_cells{") and 'state="held"' in name)) and float(value):
                held.append(line)
        return held


@dataclass(frozen=True)
class Failure:
    """`happen` is done under load, and undone by `mend` after `seconds`. `may`: how requests may end besides."""

    name: str
    happen: Callable[[World], None]
    may: frozenset[str] = frozenset()
    mend: Callable[[World], None] = lambda world: None
    seconds: float = 0.0


def restart(world: World) -> None:
    world.store.start()


def limited(world: World, most: int) -> None:
    with redis.Redis(unix_socket_path=str(world.store.socket)) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", most)


FAILURES = (
    Failure("one engine killed", lambda world: world.kill(REPLICA, 1)),
    Failure(
        "one engine stands still, and is killed",
        lambda world: world.kill(REPLICA, 1, signal.SIGSTOP),
        frozenset(),
        lambda world: world.kill(REPLICA, 1),
        12.0,
    ),
    Failure("all engines killed", lambda world: world.kill(REPLICA, 2), frozenset({"503", "error"})),
    Failure("one of two routers killed", lambda world: world.kill(ROUTER, 1), frozenset({"cut", "502", "503"})),
    Failure("both routers killed", lambda world: world.kill(ROUTER, 2), frozenset({"cut", "502", "503"})),
    Failure("the proxy killed", lambda world: world.kill("haproxy", 9), frozenset({"cut", "refused", "503"})),
    Failure("Serve's controller killed", lambda world: world.kill(CONTROLLER, 1)),
    Failure("Redis killed, and back empty", lambda world: world.store.kill(), frozenset(), restart, 4.0),
    Failure(
        "Redis stands still",
        lambda world: world.store.process.send_signal(signal.SIGSTOP),
        frozenset(),
        lambda world: world.store.process.send_signal(signal.SIGCONT),
        4.0,
    ),
    Failure("Redis full", lambda world: limited(world, 1), frozenset(), lambda world: limited(world, 0), 4.0),
)


def survive(world: World, clients: Clients, failure: Failure) -> tuple[str, bool]:
    """The failure's line of the table, and whether requests ended as they may."""
    at = time.monotonic()
    failure.happen(world)
    time.sleep(failure.seconds)
    failure.mend(world)
    try:
        within(lambda: settled(world, clients, at))
    except TimeoutError:
        print(f"{failure.name}: it did not come right again. {world.said()}", flush=True)
        print(
            f"{clients.sent - len(clients.asked)} under way, the last ended in {clients.asked[-SETTLED:]}", flush=True
        )
        raise
    asked = clients.since(at)
    bad = [each for each in asked if each.outcome != "answered"]
    over = max([each.ended for each in bad], default=at) - at
    counts = Counter(each.outcome for each in asked)
    longest = max(each.ended - max(at, each.at) for each in asked if each.outcome == "answered")
    others = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common() if outcome != "answered") or "none"
    line = f"| {failure.name} | {counts['answered']}, longest {longest:.1f} s | {others} | {over:.1f} s |"
    return line, counts.keys() <= {"answered", *failure.may}


def settled(world: World, clients: Clients, at: float) -> bool:
    """All is well, and has been for the last answers, which were asked for since."""
    last = [each for each in clients.since(at) if each.at > at][-SETTLED:]
    return len(last) == SETTLED and {each.outcome for each in last} == {"answered"} and world.whole()


def within(condition: Callable[[], bool], seconds: float = WITHIN_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come right again")
        time.sleep(0.2)


def chosen(only: str, seconds: float, seed: int) -> Iterator[Failure]:
    some = [each for each in FAILURES if only.lower() in each.name.lower()]
    if not seconds:
        yield from some
        return
    chance, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(chance.expovariate(1 / 5.0))
        yield chance.choice(some)


def run(start: Callable[..., Any], folder: Path, failures: Iterator[Failure]) -> bool:
    """Let them happen, one after the other; whether all was as it may be."""
    with ExitStack() as held:
        store = RedisServer(folder)
        store.start()
        held.callback(store.kill)
        server = start(folder, SETTINGS.format(url=store.url), "--replicas", "2", "--routers", "2")
        held.callback(server.process.kill)
        world, clients = World(server, store), Clients(server.url)
        fine = True
        print("| what happens | answered | not answered | until then |\n|---|---|---|---|", flush=True)
        with clients.at_work():
            within(lambda: world.whole() and len(clients.asked) > SETTLED)
            for failure in failures:
                line, as_it_may = survive(world, clients, failure)
                fine &= as_it_may
                print(line if as_it_may else f"{line} NOT AS IT MAY BE", flush=True)
        within(lambda: not world.idle(), 30.0)
        assert clients.sent == len(clients.asked)
        counts = Counter(each.outcome for each in clients.asked)
        print(f"{clients.sent} requests, each with one outcome: {dict(counts)}; nothing is held", flush=True)
        server.stop(signal.SIGINT)
        return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for so long, with failures drawn by chance")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = Path(__file__).parents[1] / "cluster" / "conftest.py"
    spec = importlib.util.spec_from_file_location("servers", path)
    assert spec is not None
    assert spec.loader is not None
    servers = sys.modules["servers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)
    with tempfile.TemporaryDirectory() as folder:
        fine = run(servers.start, Path(folder), chosen(options.only, options.seconds, options.seed))
    sys.exit(not fine)


if __name__ == "__main__":
    main()
