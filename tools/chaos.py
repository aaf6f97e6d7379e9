"""Failures under load: a real server, clients that know what each answer must be, and one failure after the other.

    python tools/chaos.py                    # each failure once: the table of docs/failures.md
    python tools/chaos.py --seconds 7200     # failures drawn by chance, for two hours
    python tools/chaos.py --only "Redis"     # those whose name has this in it
    python tools/chaos.py --table FILE       # of a long run's journal (--journal FILE), each failure's worst

Two routers, two engines with the shipped model, Redis in a process of its own. The clients, half of which stream, are
of three tenants, one of them limited. They send prompts whose answers were asked for before anything failed, at
temperature 1, past the response cache; two are agents, whose programs wait for a tool between two turns. So a stream
that goes on elsewhere with other words, or with a word too many, counts as wrong. After each failure all must be well
again: both engines there, and answers one after the other. Then the clients rest, and the books must be even: every
request one outcome, every answer billed once and with the tokens that its client was told, no cell and no row held,
nothing running in any engine or in any tenant's count, and what was booked since the last look the engines' counters to
the token, wherever nothing died in between that took its counts along.

Prints a line for each failure. A fault is written down, with what all processes were doing, and the run goes on; where
nothing comes right again, with a new server. The exit status is 1 if there was one.
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
PAUSE_S = 1.0  # on average, between a client's requests; an agent's are its tool's, so failures find programs in them
PATIENCE_S = 90.0  # a client that hears nothing for longer calls it silence; more than `placement.no_replica_s`
SETTLED = 24  # so many answers in a row, with both engines there: it is over
WITHIN_S = 240.0
EVEN_S = 120.0  # the first look after a failure may have to wait for what answers it, too
START_S, STOP_S = 600.0, 300.0  # of a server beside other load: how long that takes is no fault here
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
class Asked:
    """One request: when it was sent, how long it took, the longest pause in it, and what it ended in."""

    at: float
    seconds: float
    pause: float
    outcome: str  # answered, wrong, error (an error event), cut, refused, limited, silence, or a status
    name: str = ""  # its `x-request-id`
    tenant: str = ""
    usage: Usage | None = None  # as its client was told

    @property
    def ended(self) -> float:
        return self.at + self.seconds


class Clients:
    """They ask until they are told to stop, with pauses of `pause_s` on average; one that was not answered waits."""

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        self.asked: list[Asked] = []
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
                self._answers["agent", i] = [said for _, said in self._program(http, "acme", i)]
        assert all(asked.outcome == "answered" for asked in self.asked), self.asked

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
        """Nobody sends anything, and all has ended that was sent."""
        with self._lock:
            self._go.clear()
        try:
            within(lambda: self.sent == len(self.asked), PATIENCE_S + 30.0)
            yield
        finally:
            self._go.set()

    def since(self, at: float) -> list[Asked]:
        """Requests that had not ended then, in the order of their ends."""
        return [each for each in list(self.asked) if each.ended > at]

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        tenant = TENANTS[number % len(TENANTS)]
        with self._http() as http:
            while not self._over.is_set():
                if number < CLIENTS:
                    prompt = chance.randrange(PROMPTS)
                    right = self._answers["plain", prompt]
                    turns = iter([self._turn(http, tenant, story(prompt), stream=number % 2 == 0, right=right[0])])
                else:
                    right = self._answers["agent", number - CLIENTS]
                    turns = self._program(http, TENANTS[number - CLIENTS], number - CLIENTS, right)
                for asked, _ in turns:
                    if asked.outcome == "limited":
                        self._over.wait(2.0)
                    elif asked.outcome != "answered":
                        self._over.wait(0.2)
                    elif self._pause_s:
                        self._over.wait(min(chance.expovariate(1 / self._pause_s), 5 * self._pause_s))

    def _program(
        self, http: httpx.Client, tenant: str, number: int, right: Sequence[Any] = ()
    ) -> Iterator[tuple[Asked, Any]]:
        """A turn that calls a tool, and one with its result; the tool takes as long as the caller does. No second turn
        where the first was not answered.
        """
        program = f"agent-{self._mark}-{next(self._number)}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Look something up, number {number}."}]
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 48, "program_id": program}
        call = {"tool_choice": "required", "parallel_tool_calls": False}
        asked, said = self._turn(http, tenant, body | call, stream=False, right=right[0] if right else None)
        yield asked, said
        if asked.outcome != "answered":
            return
        calls = [{"id": "call_1", "type": "function", "function": said[1][0]}]
        messages.append({"role": "assistant", "content": said[0], "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": f"It is {number}."})
        last = body | {"tool_choice": "none", "ignore_eos": True, "program_end": True}
        yield self._turn(http, tenant, last, stream=True, right=right[1] if right else None)

    def _turn(
        self, http: httpx.Client, tenant: str, body: dict[str, Any], *, stream: bool, right: Any = None
    ) -> tuple[Asked, Any]:
        """Ask and note it. The second is what was said: a text and calls."""
        while True:
            self._go.wait()
            with self._lock:
                if self._go.is_set():  # and the rest has not begun meanwhile
                    self.sent += 1
                    break
        asked, said = self._ask(http, tenant, body, stream=stream)
        if asked.outcome == "answered" and right is not None and said != right:
            asked = replace(asked, outcome="wrong")
        self.asked.append(asked)
        return asked, said

    def _ask(self, http: httpx.Client, tenant: str, body: dict[str, Any], *, stream: bool) -> tuple[Asked, Any]:
        name = f"chaos-{self._mark}-{next(self._number)}"
        body = {"model": "pocket", "temperature": 1.0, "stream": stream, "program_id": name} | body
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        headers = {**FRESH, "x-request-id": name, "authorization": f"Bearer {tenant}"}
        began = last = time.monotonic()
        pause, lines, outcome, said, usage = 0.0, [], "cut", None, None
        try:
            with http.stream("POST", f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
                for line in answer.iter_lines():
                    now = time.monotonic()
                    pause, last = max(pause, now - last), now
                    lines.append(line)
            outcome, said, usage = told(answer.status_code, stream, lines)
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.TimeoutException:
            outcome = "silence"
        except httpx.TransportError:
            outcome = "cut"
        if outcome == "429" and tenant == LIMITED:
            outcome = "limited"
        return Asked(began, time.monotonic() - began, pause, outcome, name, tenant, usage), said

    @staticmethod
    def _http() -> httpx.Client:
        return httpx.Client(timeout=PATIENCE_S, trust_env=False)


def story(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell story number {number}."}]
    return {"messages": messages, "max_tokens": 96, "ignore_eos": True, "program_end": True}


def told(status: int, stream: bool, lines: Sequence[str]) -> tuple[str, Any, Usage | None]:
    """What an answer ends in, what it says (a text and calls), and its usage. Raises AssertionError for a stream that
    ends in no way, or in two.
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
    usage_days: deque[str] = field(default_factory=lambda: deque(("400", "401")))  # the first is set

    hurried: threading.Event = field(default_factory=threading.Event)  # Redis is to be as fast as it can

    def pids(self, name: str) -> list[int]:
        return [pid for pid, command in self.server.processes().items() if name in command]

    def kill(self, name: str, most: int, how: signal.Signals = signal.SIGKILL) -> None:
        for pid in self.pids(name)[:most]:
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def get(self, path: str, key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{self.server.url}{path}", headers=headers, timeout=30.0, trust_env=False)
        return answer.raise_for_status()

    def beside(self, *command: Any, seconds: float = WITHIN_S) -> subprocess.CompletedProcess[str]:
        """Run Python with what is needed to join Ray: its address comes first, its token by the environment."""
        for pid, line in self.server.processes().items():
            if address := re.search(r"--gcs-address=(\S+)", line):
                given = Path(f"/proc/{pid}/environ").read_text().split("\0")
                break
        told = dict(each.split("=", 1) for each in given if each.startswith("RAY_"))
        told = {name: value for name, value in told.items() if name not in ("RAY_JOB_ID", "RAY_RAYLET_PID")}
        first, *rest = command
        words = [sys.executable, *first, address[1], *map(str, rest)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, **told}
        )

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
    """`happen` is done under load, and undone by `mend` after `seconds`. `may`: how requests may end besides.

    `counted`: nothing dies of it that takes counts along, so engines and books agree over it. `empties`: no books are
    left.
    """

    name: str
    happen: Callable[[World], None]
    may: frozenset[str] = frozenset()
    mend: Callable[[World], None] = lambda world: None
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
    """Redis is always at work on something that takes so long, so every answer waits for that, as over a slow link."""

    def happen(world: World) -> None:
        world.hurried.clear()

        def sleep() -> None:
            with world.store.client() as client:
                while not world.hurried.is_set():
                    client.execute_command("DEBUG", "SLEEP", each_s)

        threading.Thread(target=sleep, daemon=True).start()

    return happen


def hurry(world: World) -> None:
    world.hurried.set()


def deploy(world: World, engines: int) -> None:
    """Tell Serve how it is to be from now on."""
    program = Path(__file__).with_name("redeploy.py")
    config = world.server.output.with_name("holdfast.yaml")
    done = world.beside([str(program)], config, world.server.port, engines, world.usage_days[0])
    assert done.returncode == 0, done.stderr


def until_engines(world: World, number: int) -> None:
    within(lambda: len(world.pids(REPLICA)) == number)


def fewer(world: World) -> None:
    deploy(world, 1)
    until_engines(world, 1)


def update(world: World) -> None:
    """Every engine and router is replaced by one that is configured otherwise."""
    before = {*world.pids(REPLICA), *world.pids(ROUTER)}
    world.usage_days.rotate()
    deploy(world, 2)
    within(lambda: not before & {*world.pids(REPLICA), *world.pids(ROUTER)}, 2 * WITHIN_S)  # four, one by one


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
    Failure("one of two engines stopped by Serve, and back", fewer, mend=lambda world: deploy(world, 2)),
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
    Failure("Redis takes 0.1 s for an answer", slow(0.1), mend=hurry, seconds=8.0, counted=True),
    Failure("Redis takes 1 s for an answer", slow(1.0), mend=hurry, seconds=8.0, counted=True),
    Failure(
        "Redis full", lambda world: limited(world, 1), frozenset(), lambda world: limited(world, 0), 4.0, counted=True
    ),
)


class Journal:
    """What happened, on standard output, and in `path` with its time as JSON lines; `path` None: nowhere else."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.faults = 0
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def note(self, kind: str, **told: Any) -> None:
        told = {"at": round(time.time(), 1), "s": round(time.monotonic() - self._began, 1), "kind": kind, **told}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(told) + "\n")

    def fault(self, what: str, world: World | None = None, **told: Any) -> None:
        self.faults += 1
        kept = self.path and self.path.with_suffix(f".fault-{self.faults}")
        self.say(f"FAULT {time.strftime('%H:%M:%S')} {what[:2000]}" + (f" (see {kept})" if kept else ""))
        self.note("fault", what=what, **told)
        if kept and world is not None:
            kept.mkdir(exist_ok=True)
            capture(world, kept)


def capture(world: World, folder: Path) -> None:
    """Write down what everybody is doing, into files."""

    def keep(name: str, what: Callable[[], str]) -> None:
        try:
            text = what()
        except Exception as error:
            text = f"not to be had: {error!r}"
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

    def serve_said() -> str:
        done = world.beside(["-c", SERVE_STATUS], seconds=60.0)
        return done.stdout + done.stderr

    keep("serve", serve_said)

    def redis_said() -> str:
        with world.store.client(socket_timeout=5.0) as client:
            return json.dumps([client.info(), client.client_list(), client.info("commandstats")], indent=1, default=str)

    keep("redis", redis_said)
    for command in processes.values():
        words = command.split()
        if "/haproxy " in command and "-f" in words:
            configuration = Path(words[words.index("-f") + 1])
            keep("haproxy.cfg", configuration.read_text)
            keep("haproxy", lambda path=configuration: haproxy_said(path))
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


def haproxy_said(configuration: Path) -> str:
    """What its stats socket tells."""
    found = re.search(r"^\s*stats socket (\S+)", configuration.read_text(), re.MULTILINE)
    assert found is not None
    texts = []
    for command in ("show info", "show stat", "show sess", "show servers state"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(found[1])
            connection.sendall(f"{command}\n".encode())
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        texts.append(f"## {command}\n{b''.join(parts).decode()}")
    return "\n".join(texts)


def survive(world: World, clients: Clients, failure: Failure, journal: Journal) -> tuple[str, bool]:
    """The failure's line of the table, and whether requests ended as they may. Raises TimeoutError where it does not
    come right again, not in twice the time either.
    """
    at = time.monotonic()
    failure.happen(world)
    time.sleep(failure.seconds)
    failure.mend(world)
    try:
        within(lambda: settled(world, clients, at))
    except TimeoutError:
        state = f"{clients.sent - len(clients.asked)} under way, the last ended in {clients.asked[-SETTLED:]}"
        journal.fault(f"{failure.name}: not well again after {WITHIN_S:.0f} s. {world.said()}; {state}", world)
        within(lambda: settled(world, clients, at))
        journal.say(f"well again after {time.monotonic() - at:.0f} s")
    asked = clients.since(at)
    bad = [each for each in asked if each.outcome not in ("answered", "limited")]
    over = max([each.ended for each in bad], default=at) - at
    counts = Counter(each.outcome for each in asked)
    longest = max(each.ended - max(at, each.at) for each in asked if each.outcome == "answered")
    limited = counts.pop("limited", 0)
    others = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common() if outcome != "answered") or "none"
    others += f" ({limited} beyond their limit)" if limited else ""
    line = f"| {failure.name} | {counts['answered']}, longest {longest:.1f} s | {others} | {over:.1f} s |"
    return line, counts.keys() <= {"answered", *failure.may}


def settled(world: World, clients: Clients, at: float) -> bool:
    """All is well, and has been for the last answers, which were asked for since."""
    last = [each for each in clients.since(at) if each.at > at and each.outcome != "limited"][-SETTLED:]
    return len(last) == SETTLED and {each.outcome for each in last} == {"answered"} and world.whole()


def within(condition: Callable[[], bool], seconds: float = WITHIN_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come right again")
        time.sleep(0.2)


def chosen(only: str, seconds: float, seed: int) -> Iterator[Failure]:
    """Each once; with `seconds` by chance, until those are over."""
    some = [each for each in FAILURES if only.lower() in each.name.lower()]
    if not seconds:
        yield from some
        return
    chance, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(chance.expovariate(1 / 10.0))
        yield chance.choice(some)


@dataclass
class Course:
    """A server, its clients and its books through one failure after the other."""

    world: World
    clients: Clients
    books: Books
    journal: Journal
    failures: Counter[str] = field(default_factory=Counter)

    def look(self, after: str, *, counted: bool) -> None:
        """Let the clients rest, and hold the books against what they saw, and against the engines if `counted`."""
        with self.clients.at_rest():
            faults: list[str] = ["nobody looked"]

            def even() -> bool:
                with suppress(httpx.HTTPError):
                    faults[:] = self.books.faults(list(self.clients.asked), counted=counted) + self.world.idle()
                return not faults

            try:
                within(even, EVEN_S)
            except TimeoutError:
                self.journal.fault(f"the books are not even after {after}: {faults}", self.world)
            told = self.books.close(list(self.clients.asked))
        self.journal.note("books", after=after, counted=counted, faults=faults, **told)

    def go_through(self, failure: Failure) -> None:
        self.look("a quiet stretch", counted=True)
        self.failures[failure.name] += 1
        if failure.empties:
            self.books.emptied(time.monotonic())
        line, as_it_may = survive(self.world, self.clients, failure, self.journal)
        self.journal.say(line if as_it_may else f"{line} NOT AS IT MAY BE")
        self.journal.note("failure", name=failure.name, line=line, as_it_may=as_it_may)
        if not as_it_may:
            self.journal.fault(f"not as it may be: {line}", self.world)
        self.look(failure.name, counted=failure.counted)


def run(
    start: Callable[..., Any],
    folder: Path,
    failures: Iterator[Failure],
    journal: Journal,
    pause_s: float = PAUSE_S,
    store: RedisServer | None = None,
) -> None:
    """Let them happen, one after the other. Raises TimeoutError where it does not come right again."""
    with ExitStack() as held:
        store = store or RedisServer(folder)
        store.start()
        held.callback(store.kill)
        server = start(folder, SETTINGS.format(url=store.url), "--replicas", "2", "--routers", "2")
        held.callback(end, server)
        world, clients = World(server, store), Clients(server.url, pause_s)
        course = Course(world, clients, Books(world.get, ADMIN, OPERATOR, TENANTS), journal)
        journal.say("| what happens | answered | not answered | until then |\n|---|---|---|---|")
        name = "the start"
        with clients.at_work():
            try:
                within(lambda: world.whole() and len(clients.asked) > SETTLED)
                course.look(name, counted=True)
                for failure in failures:
                    name = failure.name
                    course.go_through(failure)
            except TimeoutError as error:
                journal.fault(f"{name}: {error}", world)
                raise
        course.look("the last quiet stretch", counted=True)
        assert clients.sent == len(clients.asked)
        counts = Counter(each.outcome for each in clients.asked)
        journal.say(
            f"{clients.sent} requests, each with one outcome: {dict(counts)}; {course.failures.total()} failures; "
            f"{course.books.summary()}; nothing is held"
        )
        journal.note("end", sent=clients.sent, outcomes=counts, failures=course.failures)
        server.stop(signal.SIGINT)


def table(journal: Path) -> Iterator[str]:
    """Of a run's journal: how often each failure came, the worst of it, and what was not answered in all of them."""
    notes = [json.loads(line) for line in journal.read_text().splitlines()]
    lines: dict[str, list[list[str]]] = {}
    for each in notes:
        if each["kind"] == "failure":
            lines.setdefault(each["name"], []).append(each["line"].strip("| ").split(" | ")[1:])
    yield "| what happens | times | answered | not answered | until then, at most |\n|---|---|---|---|---|"
    for name in sorted(lines, key=[each.name for each in FAILURES].index):
        found, lost = lines[name], Counter[str]()
        for _, others, _ in found:
            lost.update({what: int(n) for n, what in re.findall(r"(\d+) (\w+)(?:,| \(|$)", others)})
        answered = sum(int(each[0].partition(",")[0]) for each in found)
        longest, over = (max(float(each[i].split()[-2]) for each in found) for i in (0, 2))
        told = ", ".join(f"{n} {what}" for what, n in lost.most_common())
        until = f"{over:.1f} s" if told else "–"
        yield f"| {name} | {len(found)} | {answered}, longest {longest:.1f} s | {told or 'none'} | {until} |"
    looks = [each for each in notes if each["kind"] == "books"]
    sums = {
        name: sum(each.get(name, 0) for each in looks) for name in ("requests", "records", "drawn", "computed", "found")
    }
    even = sum(not each["faults"] for each in looks)
    counted = sum(each["counted"] for each in looks)
    faults = sum(each["kind"] == "fault" for each in notes)
    yield f"\n{notes[-1]['s']:.0f} s, {faults} faults, " + ", ".join(f"{n} {name}" for name, n in sums.items())
    yield f"the books were looked at {len(looks)} times, {counted} with the engines' counters; even were {even}"


def end(server: Any) -> None:
    """What is left of it goes, too."""
    server.process.kill()
    for pid in server.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for so long, with failures drawn by chance")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds between a client's requests, on average")
    parser.add_argument("--journal", type=Path, help="a file for JSON lines; beside it what is kept of faults")
    parser.add_argument("--table", type=Path, help="print what such a file tells, and nothing else")
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
    failures = chosen(options.only, options.seconds, options.seed)
    again = True
    while again:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                run(servers.start, Path(folder), failures, journal, options.pause)
                again = False
            except Exception as error:  # whatever it was: two hours are not to end by it
                journal.fault(f"it goes on with a new server, for: {error!r:.3000}")
                failures = chosen(options.only, until - time.monotonic(), options.seed + journal.faults)
                again = until - time.monotonic() > 60.0
    journal.say(f"{journal.faults} faults")
    sys.exit(bool(journal.faults))


if __name__ == "__main__":
    main()
