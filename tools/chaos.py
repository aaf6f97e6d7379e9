"""Failures under load: a real server, clients that know the right answers, and one failure after the other.

    python tools/chaos.py                    # each failure once: the table of docs/failures.md
    python tools/chaos.py --seconds 7200     # random failures for two hours
    python tools/chaos.py --only "Redis"     # failures whose name contains this
    python tools/chaos.py --table FILE       # the worst case of each failure in a run's journal (--journal FILE)

The server has two routers, two engines with the shipped model, and Redis in a process of its own. The clients belong to
three tenants, one of them limited. Half of them stream. Two are agents, whose programs wait for a tool between two
turns. All requests run at temperature 1 and skip the response cache. The right answers were computed before any
failure. A stream that moves to another engine and changes or repeats a word counts as wrong.

After each failure the server must recover: both engines serve, and a row of requests is answered. Then the clients
pause, and the books must balance. Every request has one outcome. Every answer is billed once, with the tokens that its
client received. No cell and no row is held, and nothing runs in any engine or tenant. If no counter was lost, the new
records add up to the engines' counters, to the token.

Prints a line for each failure. The journal keeps each fault with the state of all processes, and the run goes on. If
the server does not recover, the run goes on with a new one. The exit status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import httpx
from chaos_books import Books, Usage, usage_of
from redis_server import RedisServer

from holdfast.router.tenants import hash_key

CLIENTS, AGENTS, PROMPTS = 6, 2, 24
PAUSE_S = 1.0  # mean pause between a client's requests; an agent's tool runs in it
SILENCE_S = 90.0  # a client that receives nothing for longer reports silence; more than `placement.no_replica_s`
RECOVERED_ANSWERS = 24  # the server has recovered after this many answers in a row, with both engines running
RECOVERY_S = 240.0
BOOKS_S = 120.0  # for the books, including the wait for the server that reports them
START_S, STOP_S = 600.0, 300.0  # limits for a server on a busy machine; slow starts are no fault here
REPLICA, ROUTER, CONTROLLER = "ServeReplica:holdfast:replicas", "ServeReplica:holdfast:router", "ServeController"
TENANTS, LIMITED, OPERATOR, ADMIN = ("acme", "beta", "guest"), "guest", "watch", "admin"  # each is its own key
SETTINGS = f"""\
engine: {{{{threads: 1, kv_memory: 0.1}}}}
redis: {{{{url: '{{url}}'}}}}
router: {{{{admin_key_hashes: ['{hash_key(ADMIN)}'], usage_records: 100000}}}}
tenants:
- {{{{name: acme, key_hashes: ['{hash_key("acme")}']}}}}
- {{{{name: beta, key_hashes: ['{hash_key("beta")}']}}}}
- {{{{name: guest, key_hashes: ['{hash_key("guest")}'], limits: {{{{requests_per_minute: 30}}}}}}}}
- {{{{name: watch, key_hashes: ['{hash_key(OPERATOR)}'], operator: true}}}}
"""
FRESH = {"cache-control": "no-store"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request: start, duration, longest pause and outcome."""

    at: float
    seconds: float
    pause: float
    outcome: str  # answered, wrong, error (an error event), cut, refused, limited, silence, or a status
    name: str = ""  # its `x-request-id`
    tenant: str = ""
    usage: Usage | None = None  # as the client received it

    @property
    def ended(self) -> float:
        return self.at + self.seconds


class Clients:
    """Clients that send requests until the end, with mean pauses of `pause_s`. After a failure they wait."""

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        self.results: list[RequestResult] = []
        self.sent = 0
        self._url, self._pause_s = url, pause_s
        self._number = count()
        self._mark = secrets.token_hex(4)
        self._over, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(CLIENTS + AGENTS)]
        self._answers: dict[tuple[str, int], list[Any]] = {}
        with self._http() as http:
            for i in range(PROMPTS):
                self._answers["plain", i] = [self._turn(http, "acme", story(i), stream=False)[1]]
            for i in range(AGENTS):
                self._answers["agent", i] = [reply for _, reply in self._program(http, "acme", i)]
        assert all(result.outcome == "answered" for result in self.results), self.results

    @contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._go.set()
            for thread in self._threads:
                thread.join()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pause all clients; every request that was sent has ended."""
        with self._lock:
            self._go.clear()
        try:
            within(lambda: self.sent == len(self.results), SILENCE_S + 30.0)
            yield
        finally:
            self._go.set()

    def since(self, at: float) -> list[RequestResult]:
        """Requests that ended after `at`, in the order of their ends."""
        return [each for each in list(self.results) if each.ended > at]

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        tenant = TENANTS[number % len(TENANTS)]
        with self._http() as http:
            while not self._over.is_set():
                if number < CLIENTS:
                    prompt = rng.randrange(PROMPTS)
                    expected = self._answers["plain", prompt]
                    turns = iter(
                        [self._turn(http, tenant, story(prompt), stream=number % 2 == 0, expected=expected[0])]
                    )
                else:
                    expected = self._answers["agent", number - CLIENTS]
                    turns = self._program(http, TENANTS[number - CLIENTS], number - CLIENTS, expected)
                for result, _ in turns:
                    if result.outcome == "limited":
                        self._over.wait(2.0)
                    elif result.outcome != "answered":
                        self._over.wait(0.2)
                    elif self._pause_s:
                        self._over.wait(min(rng.expovariate(1 / self._pause_s), 5 * self._pause_s))

    def _program(
        self, http: httpx.Client, tenant: str, number: int, expected: Sequence[Any] = ()
    ) -> Iterator[tuple[RequestResult, Any]]:
        """A turn that calls a tool, and a turn with its result. The tool runs while the caller holds the generator.

        There is no second turn if the first one fails.
        """
        program = f"agent-{self._mark}-{next(self._number)}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look something up, number {number}."}]
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 48, "program_id": program}
        call = {"tool_choice": "required", "parallel_tool_calls": False}
        result, reply = self._turn(http, tenant, body | call, stream=False, expected=expected[0] if expected else None)
        yield result, reply
        if result.outcome != "answered":
            return
        calls = [{"id": "call_1", "type": "function", "function": reply[1][0]}]
        messages.append({"role": "assistant", "content": reply[0], "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": f"It is {number}."})
        last_body = body | {"tool_choice": "none", "ignore_eos": True, "program_end": True}
        yield self._turn(http, tenant, last_body, stream=True, expected=expected[1] if expected else None)

    def _turn(
        self, http: httpx.Client, tenant: str, body: dict[str, Any], *, stream: bool, expected: Any = None
    ) -> tuple[RequestResult, Any]:
        """Send a request and record it. Returns the record and the reply: a text and calls."""
        while True:
            self._go.wait()
            with self._lock:
                if self._go.is_set():  # and no pause has begun meanwhile
                    self.sent += 1
                    break
        result, reply = self._ask(http, tenant, body, stream=stream)
        if result.outcome == "answered" and expected is not None and reply != expected:
            result = replace(result, outcome="wrong")
        self.results.append(result)
        return result, reply

    def _ask(self, http: httpx.Client, tenant: str, body: dict[str, Any], *, stream: bool) -> tuple[RequestResult, Any]:
        name = f"chaos-{self._mark}-{next(self._number)}"
        body = {"model": "pocket", "temperature": 1.0, "stream": stream, "program_id": name} | body
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        headers = {**FRESH, "x-request-id": name, "authorization": f"Bearer {tenant}"}
        start = last = time.monotonic()
        pause, lines, outcome, reply, usage = 0.0, [], "cut", None, None
        try:
            with http.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
                for line in answer.iter_lines():
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    lines.append(line)
            outcome, reply, usage = read_answer(answer.status_code, stream, lines)
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.TimeoutException:
            outcome = "silence"
        except httpx.TransportError:
            outcome = "cut"
        if outcome == "429" and tenant == LIMITED:
            outcome = "limited"
        return RequestResult(start, time.monotonic() - start, pause, outcome, name, tenant, usage), reply

    @staticmethod
    def _http() -> httpx.Client:
        return httpx.Client(timeout=SILENCE_S, trust_env=False)


def story(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell story number {number}."}]
    return {"messages": messages, "max_tokens": 96, "ignore_eos": True, "program_end": True}


def read_answer(status: int, stream: bool, lines: Sequence[str]) -> tuple[str, Any, Usage | None]:
    """An answer's outcome, its reply (a text and calls) and its usage.

    Raises AssertionError for a stream with no end or with two.
    """
    if status != 200:
        return str(status), None, None
    if not stream:
        answer = json.loads("".join(lines))
        message = answer["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls") or []]
        return "answered", (message["content"] or "", calls), usage_of(answer["usage"])
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    errors = [each for each in events if "error" in each]
    choices = [each["choices"][0] for each in events if each.get("choices")]
    usages = [each["usage"] for each in events if each.get("usage")]
    ends = [each for each in choices if each["finish_reason"]]
    assert len(errors) + len(ends) == 1, lines[-5:]
    text = "".join(each["delta"].get("content") or "" for each in choices)
    usage = usage_of(usages[-1]) if usages and not errors else None
    return "error" if errors else "answered", (text, []), usage


@dataclass(frozen=True)
class World:
    server: Any  # tests/cluster/conftest.py's
    store: RedisServer
    usage_days: deque[str] = field(default_factory=lambda: deque(("400", "401")))  # the first one is configured now

    full_speed: threading.Event = field(default_factory=threading.Event)  # set: Redis is not slowed down any more

    def pids(self, name: str) -> list[int]:
        return [pid for pid, command in self.server.processes().items() if name in command]

    def kill(self, name: str, most: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
        for pid in self.pids(name)[:most]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    def get(self, path: str, key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{self.server.url}{path}", headers=headers, timeout=30.0, trust_env=False)
        return answer.raise_for_status()

    def run_in_ray(self, *command: Any, seconds: float = RECOVERY_S) -> subprocess.CompletedProcess[str]:
        """Run Python as a process that joins Ray: the first argument is the address, the environment has the token."""
        for pid, line in self.server.processes().items():
            if address := re.search(r"--gcs-address=(\S+)", line):
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                break
        environment = dict(each.split("=", 1) for each in variables if each.startswith("RAY_"))
        environment = {
            name: value for name, value in environment.items() if name not in ("RAY_JOB_ID", "RAY_RAYLET_PID")
        }
        first, *rest = command
        words = [sys.executable, *first, address[1], *map(str, rest)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, **environment}
        )

    def state(self) -> str:
        """The server's state as text."""
        try:
            there = f"{len(self.pids(REPLICA))} engines, {len(self.pids(ROUTER))} routers"
            return f"{there}, {self.get('/v1/cluster/status').text}"
        except httpx.HTTPError as error:
            return f"the server returns no status: {error!r}"

    def is_up(self) -> bool:
        """Whether both routers and both engines run and report their status."""
        with suppress(httpx.HTTPError, KeyError, ValueError):
            replicas = self.get("/v1/cluster/status").json()["replicas"]
            return len(replicas) == 2 and len(self.pids(ROUTER)) == 2
        return False

    def idle(self) -> list[str]:
        """Resources that are still held, with their holders. Empty if the books balance."""
        status = self.get("/v1/cluster/status").json()
        held = [f"{each['id']}: {name}" for each in status["replicas"] for name in ("running", "waiting") if each[name]]
        held += [f"{each['name']}: {each['running']} running" for each in status["tenants"] if each["running"]]
        for line in self.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            is_row_metric = name.startswith("holdfast_sequence_rows_taken{")
            if (is_row_metric or (name.startswith("holdfast_cells{") and 'state="held"' in name)) and float(value):
                held.append(line)
        return held


@dataclass(frozen=True)
class Failure:
    """`happen` runs under load; `undo` ends it after `seconds`. `allowed_outcomes` are those besides an answer.

    `counted`: the failure loses no counters, so engines and books agree after it. `empties`: it empties the books.
    """

    name: str
    happen: Callable[[World], None]
    allowed_outcomes: frozenset[str] = frozenset()
    undo: Callable[[World], None] = lambda world: None
    seconds: float = 0.0
    counted: bool = False
    empties: bool = False


def restart(world: World) -> None:
    world.store.start()


def limited(world: World, most: int) -> None:
    with world.store.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", most)


def slow(each_s: float) -> Callable[[World], None]:
    """Keep Redis busy with commands of `each_s` seconds: every answer is late, as over a slow link."""

    def happen(world: World) -> None:
        world.full_speed.clear()

        def sleep() -> None:
            with world.store.client() as client:
                while not world.full_speed.is_set():
                    client.execute_command("DEBUG", "SLEEP", each_s)

        threading.Thread(target=sleep, daemon=True).start()

    return happen


def restore_speed(world: World) -> None:
    world.full_speed.set()


def deploy(world: World, engines: int) -> None:
    """Deploy the application again with `engines` engines."""
    program = Path(__file__).with_name("redeploy.py")
    config = world.server.output.with_name("holdfast.yaml")
    done = world.run_in_ray([str(program)], config, world.server.port, engines, world.usage_days[0])
    assert done.returncode == 0, done.stderr


def until_engines(world: World, number: int) -> None:
    within(lambda: len(world.pids(REPLICA)) == number)


def fewer(world: World) -> None:
    deploy(world, 1)
    until_engines(world, 1)


def update(world: World) -> None:
    """Replace every engine and router by one with another configuration."""
    before = {*world.pids(REPLICA), *world.pids(ROUTER)}
    world.usage_days.rotate()
    deploy(world, 2)
    within(
        lambda: not before & {*world.pids(REPLICA), *world.pids(ROUTER)}, 2 * RECOVERY_S
    )  # Serve replaces four, one by one


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
    Failure("one of two engines stopped by Serve, and back", fewer, undo=lambda world: deploy(world, 2)),
    Failure("engines and routers replaced one after the other", update),
    Failure("the proxy killed", lambda world: world.kill("haproxy", 9), frozenset({"cut", "refused", "503"})),
    Failure("Serve's controller killed", lambda world: world.kill(CONTROLLER, 1), counted=True),
    Failure("Redis killed, and back empty", lambda world: world.store.kill(), frozenset(), restart, 4.0, empties=True),
    Failure(
        "Redis stands still",
        lambda world: world.store.process.send_signal(signal.SIGSTOP),
        frozenset(),
        lambda world: world.store.process.send_signal(signal.SIGCONT),
        4.0,
        counted=True,
    ),
    Failure("Redis takes 0.1 s for an answer", slow(0.1), undo=restore_speed, seconds=8.0, counted=True),
    Failure("Redis takes 1 s for an answer", slow(1.0), undo=restore_speed, seconds=8.0, counted=True),
    Failure(
        "Redis full", lambda world: limited(world, 1), frozenset(), lambda world: limited(world, 0), 4.0, counted=True
    ),
)


class Journal:
    """Prints events, and writes them to `path` as JSON lines with their times; `path` None: only prints."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.faults = 0
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def note(self, kind: str, **fields: Any) -> None:
        fields = {"at": round(time.time(), 1), "s": round(time.monotonic() - self._began, 1), "kind": kind, **fields}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(fields) + "\n")

    def fault(self, text: str, world: World | None = None, **fields: Any) -> None:
        self.faults += 1
        folder = self.path and self.path.with_suffix(f".fault-{self.faults}")
        self.say(f"FAULT {time.strftime('%H:%M:%S')} {text[:2000]}" + (f" (see {folder})" if folder else ""))
        self.note("fault", what=text, **fields)
        if folder and world is not None:
            folder.mkdir(exist_ok=True)
            capture(world, folder)


def capture(world: World, folder: Path) -> None:
    """Write the state of all processes to files in `folder`."""

    def keep(name: str, read: Callable[[], str]) -> None:
        try:
            text = read()
        except Exception as error:
            text = f"not available: {error!r}"
        (folder / name).write_text(text)

    def output(*command: Any) -> str:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    processes = world.server.processes()
    keep("processes", lambda: "\n".join(f"{pid} {command}" for pid, command in processes.items()))
    keep("ps", lambda: output("ps", "axo", "pid,ppid,stat,etimes,time,rss,wchan:20,args"))
    keep("cluster-status", lambda: world.get("/v1/cluster/status").text)
    keep("metrics", lambda: world.get("/metrics").text)
    for pid, command in processes.items():
        if "ray::" in command or "python" in command:
            keep(f"stack-{pid}", lambda pid=pid: output(Path(sys.prefix, "bin", "py-spy"), "dump", "--pid", pid))

    def serve_status() -> str:
        done = world.run_in_ray(["-c", SERVE_STATUS], seconds=60.0)
        return done.stdout + done.stderr

    keep("serve", serve_status)

    def redis_status() -> str:
        with world.store.client(socket_timeout=5.0) as client:
            return json.dumps([client.info(), client.client_list(), client.info("commandstats")], indent=1, default=str)

    keep("redis", redis_status)
    for command in processes.values():
        words = command.split()
        if "/haproxy " in command and "-f" in words:
            configuration = Path(words[words.index("-f") + 1])
            keep("haproxy.cfg", configuration.read_text)
            keep("haproxy", lambda path=configuration: haproxy_status(path))
        for word in words:
            if word.startswith(("--session_dir=", "--session-dir=")) and not (folder / "logs").exists():
                with suppress(OSError, shutil.Error):
                    shutil.copytree(Path(word.partition("=")[2], "logs"), folder / "logs")
    with suppress(OSError):
        shutil.copy(world.server.output, folder / "server-output")


SERVE_STATUS = """
import os, sys, ray
ray.init(address=sys.argv[1], namespace='serve', log_to_driver=False, logging_level='ERROR')
from ray import serve
print(serve.status(), ray.nodes(), flush=True)
os._exit(0)
"""


def haproxy_status(configuration: Path) -> str:
    """The output of HAProxy's stats socket."""
    match = re.search(r"^\s*stats socket (\S+)", configuration.read_text(), re.MULTILINE)
    assert match is not None
    texts = []
    for command in ("show info", "show stat", "show sess", "show servers state"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(match[1])
            connection.sendall(f"{command}\n".encode())
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        texts.append(f"## {command}\n{b''.join(parts).decode()}")
    return "\n".join(texts)


def run_failure(world: World, clients: Clients, failure: Failure, journal: Journal) -> tuple[str, bool]:
    """The failure's line of the table, and whether all outcomes were allowed.

    Raises TimeoutError if the server does not recover within twice the usual time.
    """
    at = time.monotonic()
    failure.happen(world)
    time.sleep(failure.seconds)
    failure.undo(world)
    try:
        within(lambda: recovered(world, clients, at))
    except TimeoutError:
        last = clients.results[-RECOVERED_ANSWERS:]
        state = f"{world.state()}; {clients.sent - len(clients.results)} running, the last results were {last}"
        journal.fault(f"{failure.name}: the server has not recovered after {RECOVERY_S:.0f} s. {state}", world)
        within(lambda: recovered(world, clients, at))
        journal.say(f"recovered after {time.monotonic() - at:.0f} s")
    results = clients.since(at)
    failed = [each for each in results if each.outcome not in ("answered", "limited")]
    last_failure = max([each.ended for each in failed], default=at) - at
    counts = Counter(each.outcome for each in results)
    longest = max(each.ended - max(at, each.at) for each in results if each.outcome == "answered")
    limited = counts.pop("limited", 0)
    others = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common() if outcome != "answered") or "none"
    others += f" ({limited} beyond their limit)" if limited else ""
    line = f"| {failure.name} | {counts['answered']}, longest {longest:.1f} s | {others} | {last_failure:.1f} s |"
    return line, counts.keys() <= {"answered", *failure.allowed_outcomes}


def recovered(world: World, clients: Clients, at: float) -> bool:
    """Whether the server runs and the last requests, all sent after `at`, were answered."""
    last = [each for each in clients.since(at) if each.at > at and each.outcome != "limited"][-RECOVERED_ANSWERS:]
    return len(last) == RECOVERED_ANSWERS and {each.outcome for each in last} == {"answered"} and world.is_up()


def within(condition: Callable[[], bool], seconds: float = RECOVERY_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not recover in time")
        time.sleep(0.2)


def draw_failures(only: str, seconds: float, seed: int) -> Iterator[Failure]:
    """Each failure once; with `seconds`, random failures until that time is over."""
    matching = [each for each in FAILURES if only.lower() in each.name.lower()]
    if not seconds:
        yield from matching
        return
    rng, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.expovariate(1 / 10.0))
        yield rng.choice(matching)


@dataclass
class ChaosRun:
    """Takes a server, its clients and its books through one failure after the other."""

    world: World
    clients: Clients
    books: Books
    journal: Journal
    failures: Counter[str] = field(default_factory=Counter)

    def check(self, after: str, *, counted: bool) -> None:
        """Pause the clients and check the books against their answers, and against the engines if `counted`."""
        with self.clients.at_rest():
            faults: list[str] = ["no check has ended"]

            def balanced() -> bool:
                with suppress(httpx.HTTPError):
                    faults[:] = self.books.faults(list(self.clients.results), counted=counted) + self.world.idle()
                return not faults

            try:
                within(balanced, BOOKS_S)
            except TimeoutError:
                self.journal.fault(f"the books do not balance after {after}: {faults}", self.world)
            counts = self.books.close(list(self.clients.results))
        self.journal.note("books", after=after, counted=counted, faults=faults, **counts)

    def go_through(self, failure: Failure) -> None:
        self.check("a quiet stretch", counted=True)
        self.failures[failure.name] += 1
        if failure.empties:
            self.books.on_emptied(time.monotonic())
        line, allowed = run_failure(self.world, self.clients, failure, self.journal)
        self.journal.say(line if allowed else f"{line} OUTCOME NOT ALLOWED")
        self.journal.note("failure", name=failure.name, line=line, as_it_may=allowed)
        if not allowed:
            self.journal.fault(f"outcome not allowed: {line}", self.world)
        self.check(failure.name, counted=failure.counted)


def run(
    start: Callable[..., Any],
    folder: Path,
    failures: Iterator[Failure],
    journal: Journal,
    pause_s: float = PAUSE_S,
    store: RedisServer | None = None,
) -> None:
    """Run the failures one after the other. Raises TimeoutError if the server does not recover."""
    with ExitStack() as held:
        store = store or RedisServer(folder)
        store.start()
        held.callback(store.kill)
        server = start(folder, SETTINGS.format(url=store.url), "--replicas", "2", "--routers", "2")
        held.callback(end, server)
        world, clients = World(server, store), Clients(server.url, pause_s)
        chaos_run = ChaosRun(world, clients, Books(world.get, ADMIN, OPERATOR, TENANTS), journal)
        journal.say("| what happens | answered | not answered | until then |\n|---|---|---|---|")
        name = "the start"
        with clients.at_work():
            try:
                within(lambda: world.is_up() and len(clients.results) > RECOVERED_ANSWERS)
                chaos_run.check(name, counted=True)
                for failure in failures:
                    name = failure.name
                    chaos_run.go_through(failure)
            except TimeoutError as error:
                journal.fault(f"{name}: {error}", world)
                raise
        chaos_run.check("the last quiet stretch", counted=True)
        assert clients.sent == len(clients.results)
        counts = Counter(each.outcome for each in clients.results)
        journal.say(
            f"{clients.sent} requests, each with one outcome: {dict(counts)}; {chaos_run.failures.total()} failures; "
            f"{chaos_run.books.summary()}; nothing is held"
        )
        journal.note("end", sent=clients.sent, outcomes=counts, failures=chaos_run.failures)
        server.stop(signal.SIGINT)


def table(journal: Path) -> Iterator[str]:
    """The table of a run's journal: each failure's count, its worst figures and all its failed requests."""
    notes = [json.loads(line) for line in journal.read_text().splitlines()]
    lines: dict[str, list[list[str]]] = {}
    for each in notes:
        if each["kind"] == "failure":
            lines.setdefault(each["name"], []).append(each["line"].strip("| ").split(" | ")[1:])
    yield "| what happens | times | answered | not answered | until then, at most |\n|---|---|---|---|---|"
    for name in sorted(lines, key=[each.name for each in FAILURES].index):
        rows, lost = lines[name], Counter[str]()
        for _, others, _ in rows:
            lost.update({what: int(n) for n, what in re.findall(r"(\d+) (\w+)(?:,| \(|$)", others)})
        answered = sum(int(each[0].partition(",")[0]) for each in rows)
        longest, over = (max(float(each[i].split()[-2]) for each in rows) for i in (0, 2))
        failed = ", ".join(f"{n} {what}" for what, n in lost.most_common())
        until = f"{over:.1f} s" if failed else "–"
        yield f"| {name} | {len(rows)} | {answered}, longest {longest:.1f} s | {failed or 'none'} | {until} |"
    checks = [each for each in notes if each["kind"] == "books"]
    sums = {
        name: sum(each.get(name, 0) for each in checks)
        for name in ("requests", "records", "drawn", "computed", "found")
    }
    balanced = sum(not each["faults"] for each in checks)
    counted = sum(each["counted"] for each in checks)
    faults = sum(each["kind"] == "fault" for each in notes)
    yield f"\n{notes[-1]['s']:.0f} s, {faults} faults, " + ", ".join(f"{n} {name}" for name, n in sums.items())
    yield f"the books were checked {len(checks)} times, {counted} with the engines' counters; {balanced} balanced"


def end(server: Any) -> None:
    """Kill the server and all its processes."""
    server.process.kill()
    for pid in server.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="run random failures for this time")
    parser.add_argument("--only", default="", help="run the failures whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="mean seconds between a client's requests")
    parser.add_argument(
        "--journal", type=Path, help="write JSON lines to this file, and the state at each fault beside it"
    )
    parser.add_argument("--table", type=Path, help="print the table of a journal, and nothing else")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(options.table)))
        return
    path = Path(__file__).parents[1] / "tests" / "cluster" / "conftest.py"
    spec = importlib.util.spec_from_file_location("servers", path)
    assert spec is not None
    assert spec.loader is not None
    servers = sys.modules["servers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)
    servers.START_S, servers.STOP_S = START_S, STOP_S
    journal = Journal(options.journal)
    until = time.monotonic() + options.seconds
    failures = draw_failures(options.only, options.seconds, options.seed)
    again = True
    while again:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                run(servers.start, Path(folder), failures, journal, options.pause)
                again = False
            except Exception as error:  # any error: it must not end a run of two hours
                journal.fault(f"the run goes on with a new server after {error!r:.3000}")
                failures = draw_failures(options.only, until - time.monotonic(), options.seed + journal.faults)
                again = until - time.monotonic() > 60.0
    journal.say(f"{journal.faults} faults")
    sys.exit(bool(journal.faults))


if __name__ == "__main__":
    main()
