"""`holdfast serve`: starts a cluster on this machine, and stops it.

A start goes in this order: checks, Redis, Ray, Serve, the application, one real request. A stop goes backwards, and
then ends the processes that are left. `application` says what is deployed.
"""

import asyncio
import logging
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from holdfast.cluster import doctor, environment, haproxy, model_files, processes, serve_private, warmup
from holdfast.cluster.config import Settings, share_threads
from holdfast.cluster.processes import MemoryGuard
from holdfast.cluster.redis import EmbeddedRedis
from holdfast.cluster.tenants import tenants_in
from holdfast.replicas.errors import HoldfastError, UnavailableError
from holdfast.router.records import RedisAddress

Say = Callable[[str], None]
TELL_S = 5.0  # for routers to hear that the server stops
WATCH_S = 2.0  # between two checks that all processes are there
SERVING = "ray::ServeReplica:"  # begins the titles of engines and routers
SERVES = {"controller": "ray::ServeController", "proxy": "ray::HAProxyManager"}  # titles of Serve's own processes
MOST_CONNECTIONS = 16384  # of clients
LONGEST_BASE = 97 - len("/holdfast-________") - len("/") - 56 - len("/admin.sock")


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that serves. `redis` is None if the configuration names another server."""

    url: str
    model: str
    redis: EmbeddedRedis | None


def run(settings: Settings, say: Say) -> None:
    """Serve until a signal asks to stop. Raises ConfigError before anything is started, UnavailableError after.

    The first SIGINT, SIGTERM or SIGHUP stops in order, a second one at once.
    """
    environment.raise_files()
    machine = environment.machine()
    settings = share_threads(settings, machine.cores)
    doctor.check(settings)
    if (tenants_file := _tenants_file(settings)) is not None:
        tenants_in(tenants_file)  # raises for a fault in it before anything is started
    if settings.server.refuse:
        doctor.refuse(settings, doctor.gather())
    processes.adopt_orphans()
    started = time.monotonic()
    signals = Signals()
    running = None
    with signals, ExitStack() as around, ExitStack() as stack:
        around.enter_context(_leave_nothing(say))
        stack.enter_context(MemoryGuard(say))
        try:
            running = _start(settings, stack, signals, say)
            took_s, page, chats = time.monotonic() - started, settings.router.page, warmup.chats(settings)
            as_text = model_files.tools_as_text(settings.engine)
            say(warmup.banner(running.url, running.model, took_s, bool(settings.tenants), page, chats, as_text))
            _watch(running, signals, say)
        except KeyboardInterrupt:
            signals.stopping = True
            drain_s = settings.server.drain_s
            runs = f": running requests have {drain_s:g} s to end" if drain_s and running else ""
            say(f"stopping{runs}; interrupt again to stop at once")
            around.enter_context(_silenced())
            if running:
                _drain(drain_s)
        except BaseException:
            around.enter_context(_silenced())
            raise


class Signals:
    """SIGINT, SIGTERM and SIGHUP while a cluster runs: the first interrupts, a second ends everything on the spot.

    Python drops an exception that is raised in a finalizer or in the callback of a weak reference, where a signal may
    find the main thread. So a signal also sets `requested`, and `check` raises again.
    """

    def __init__(self) -> None:
        self.requested = False
        self.stopping = False
        self.folder: Path | None = None  # removed even on a stop at once
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def install(self) -> None:
        """Install the handlers. Called again after `ray.init`, which installs its own."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            processes.kill_all()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(128 + number)
        self.requested = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal requested a stop and its exception was dropped."""
        if self.requested:
            raise KeyboardInterrupt


def _tenants_file(settings: Settings) -> Path | None:
    return Path(settings.server.tenants_file).resolve() if settings.server.tenants_file else None


def _data_folder(settings: Settings) -> Path | None:
    return Path(settings.redis.folder).resolve() if settings.redis.folder else None


def _start(settings: Settings, stack: ExitStack, signals: Signals, say: Say) -> Running:
    folder = signals.folder = stack.enter_context(_private_folder())
    redis = None
    if not settings.redis.url:
        say("starting Redis")
        redis = stack.enter_context(EmbeddedRedis(folder, settings.redis.memory_mb, _data_folder(settings)))
    internal = environment.internal_ports(random.Random())
    metrics = bool(settings.server.ray_metrics_port)
    proxy = haproxy.write(folder / "haproxy", _limits(settings, environment.machine().files))
    token = folder / serve_private.TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    alone = settings.server.local
    colours = sys.stdout.isatty() and sys.stderr.isatty()
    drain_s = settings.server.drain_s
    environment.apply(serve_private.variables(internal, folder, metrics, drain_s, proxy, alone, colours))
    say("starting Ray")
    stack.enter_context(_ray(settings, folder, signals, say))
    say("starting Ray Serve")
    stack.enter_context(_serve(settings, signals))
    say(f"loading {settings.engine.model} into {settings.replicas.count} replica(s)")
    ca_file = Path(settings.redis.ca_file) if settings.redis.ca_file else None
    line = model_files.ProgressLine(folder / environment.LOADING, say, sys.stdout.isatty())
    _deploy(settings, RedisAddress(redis.url if redis else settings.redis.url, ca_file=ca_file), line)
    url = _url(settings)
    say("sending a first request")
    return Running(url, warmup.first_request(settings, url), redis)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for sockets and logs that only this user may enter; kept when the start fails."""
    # Trap: HAProxy puts sockets below a name of 56 characters, and takes no path of a socket that is longer than 97.
    base = Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=base if len(str(base)) <= LONGEST_BASE else "/tmp"))
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException as error:
        error.add_note(f"Logs are in {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ray(settings: Settings, folder: Path, signals: Signals, say: Say) -> Iterator[None]:
    import ray

    try:
        _init_ray(settings, folder, say)
        signals.install()
        yield
    finally:
        ray.shutdown()


def _init_ray(settings: Settings, folder: Path, say: Say) -> None:
    """Start Ray, with one retry: Ray waits for 30 s, and a busy machine may take longer.

    Raises UnavailableError if the retry fails.
    """
    import ray

    from holdfast.cluster import application

    # What engines and routers ask for; `doctor` has checked that there is so much.
    memory = settings.replicas.count * application.engine_memory(settings)
    memory += settings.server.routers * application.router_memory(settings)
    before = processes.descendants()
    for last in (False, True):
        try:
            serve_private.start(memory, _node_address(settings), folder / "ray", settings.server.ray_metrics_port)
            return
        except Exception as error:  # Ray raises plain ones
            reason = str(error).partition("\n")[0]
            if last:
                raise UnavailableError(f"Ray did not start in two attempts: {reason}") from error
            say(f"Ray did not come up ({reason}); trying once more")
            ray.shutdown()
            processes.kill_but(before)


@contextmanager
def _serve(settings: Settings, signals: Signals) -> Iterator[None]:
    from ray import serve
    from ray.serve.config import HTTPOptions

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options=HTTPOptions(host=settings.server.host, port=settings.server.port),
        logging_config=_quiet(settings),
    )
    signals.install()
    try:
        yield
    finally:
        if not serve_private.dead_process():  # Trap: it would wait for ever for a controller that nobody starts
            with suppress(Exception):  # a supervisor's: `_leave_nothing` ends what is left
                serve.shutdown()


def _quiet(settings: Settings) -> dict[str, Any]:
    """Serve's logging: nothing for each request."""
    encoding = "JSON" if settings.logging.format == "json" else "TEXT"
    return {"encoding": encoding, "log_level": "WARNING", "enable_access_log": False}


@contextmanager
def _silenced() -> Iterator[None]:
    """Hide the output of Ray and Serve, which report each process that is stopped as lost."""
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _deploy(settings: Settings, redis: RedisAddress, line: model_files.ProgressLine) -> None:
    """Deploy the application, and show progress on `line` until every replica answers. Raises UnavailableError."""
    import ray
    from ray import serve

    from holdfast.cluster import application

    gpus = ray.cluster_resources().get("GPU", 0.0) if settings.engine.device != "cpu" else 0.0
    share = min(1.0, gpus / settings.replicas.count)
    built = application.build(settings, redis, share, tenants_file=_tenants_file(settings))
    # Trap: the options of Serve's start apply to its controller and proxies, not to replicas.
    target = serve.RunTarget(built, name=application.APPLICATION, logging_config=_quiet(settings))
    serve.run_many([target], wait_for_applications_running=False)
    deadline = time.monotonic() + settings.server.ready_timeout_s
    reported = 0
    while time.monotonic() < deadline:
        overview = serve.status().applications.get(application.APPLICATION)
        state = overview.status.value if overview else "DEPLOYING"
        if state == "RUNNING":
            line.clear()
            return
        line.update()
        if (up := _replicas_up(overview)) > reported:
            reported = up
            line.say(f"{up} of {settings.replicas.count} replica(s) up")
        if state in ("DEPLOY_FAILED", "UNHEALTHY") and overview is not None:
            line.clear()
            raise UnavailableError(f"the application did not start: {_reason(overview)}")
        time.sleep(0.1)
    raise UnavailableError(f"the application did not start within {settings.server.ready_timeout_s:g} s")


def _replicas_up(overview: Any) -> int:
    """Engines that are running; `overview` None: nothing is known yet."""
    from holdfast.cluster.application import REPLICAS

    deployment = overview.deployments.get(REPLICAS) if overview else None
    return int(deployment.replica_states.get("RUNNING", 0)) if deployment else 0


def _reason(overview: Any) -> str:
    """The last line of the error: the exception itself and not its traceback."""
    messages = [overview.message, *(deployment.message for deployment in overview.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return str((errors or lines or ["no reason given"])[-1])


def _watch(running: Running, signals: Signals, say: Say) -> NoReturn:
    """Report deaths and recoveries and restart Redis, until a signal requests a stop.

    Raises UnavailableError if an engine or a router has died and Ray cannot restart it.
    """
    up, serves, redis_there, lost = _up(), _serves(), True, ""
    whole = len(processes.titled(SERVING))
    while True:
        signals.check()
        time.sleep(WATCH_S)
        if running.redis is not None:
            redis_there = _look_after(running.redis, redis_there, say)
        before_lost, lost = lost, serve_private.dead_process()
        if lost:
            if len(processes.titled(SERVING)) < whole:
                raise UnavailableError(f"Ray's {lost} has died, and so has an engine or a router; restart the server")
            if not before_lost:
                say(f"Ray's {lost} has died: the server goes on serving until an engine or a router dies")
            continue
        before, up = up, _up() or up
        for line in changes(before, up):
            say(line)
        earlier, serves = serves, _serves()
        for line in replaced(earlier, serves):
            say(line)


def _look_after(redis: EmbeddedRedis, was_there: bool, say: Say) -> bool:
    """Restart Redis if it has ended. True if it runs. A failed restart is reported once."""
    if redis.alive:
        return True
    if was_there:
        say("the embedded Redis has ended: starting it again; routers work from memory meanwhile")
    try:
        redis.start()
    except HoldfastError as error:
        if was_there:
            say(f"{error.message}; trying again")
        return False
    say("the embedded Redis serves again")
    return True


def changes(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[str]:
    """Messages about deployments that have fewer or more processes than before."""
    for name, n in now.items():
        was = before.get(name, n)
        if n < was:
            yield f"{was - n} of {was} process(es) of '{name}' died or hang; Serve starts others"
        elif n > was:
            yield f"{n - was} process(es) of '{name}' serve again: {n} in all"


def replaced(before: Mapping[str, Set[int]], now: Mapping[str, Set[int]]) -> Iterator[str]:
    """Messages about Serve's own processes, by process id: one may die and be replaced between two checks."""
    for name, pids in now.items():
        if before.get(name, pids) - pids:
            yield f"Serve's {name} died; it is started again"
        if pids - before.get(name, pids):
            yield f"Serve's {name} is there again"


def _serves() -> Mapping[str, Set[int]]:
    """Serve's own processes."""
    return {name: processes.titled(title) for name, title in SERVES.items()}


def _up() -> Mapping[str, int]:
    """Running replicas by deployment; empty where Serve's controller does not answer: it comes back by itself."""
    from holdfast.cluster.application import APPLICATION

    return serve_private.replicas_up(APPLICATION)


def _drain(drain_s: float) -> None:
    """Refuse new requests and wait for running ones; after `drain_s` they end with an error.

    Serve's own shutdown cuts off what is left.
    """
    from ray import serve

    from holdfast.cluster.application import APPLICATION, ENDING_S

    with suppress(Exception):  # a supervisor's, as for what follows
        asyncio.run(_tell_routers(drain_s))
    deadline = time.monotonic() + drain_s + ENDING_S  # the routers' time began when they were told
    with suppress(Exception):
        serve_private.delete(APPLICATION)
        while time.monotonic() < deadline and APPLICATION in serve.status().applications:
            time.sleep(0.1)


async def _tell_routers(drain_s: float) -> None:
    """Tell the routers to drain. Trap: with these settings of Serve a handle needs an event loop."""
    from ray import serve

    from holdfast.cluster.application import APPLICATION, ROUTER
    from holdfast.router.dispatch.serve_private import answers_of_each

    routers = serve.get_deployment_handle(ROUTER, APPLICATION)
    await answers_of_each(routers.broadcast("drain", drain_s), TELL_S)


@contextmanager
def _leave_nothing(say: Say) -> Iterator[None]:
    try:
        yield
    finally:
        processes.stop_all()
        say("stopped")


def _limits(settings: Settings, files: int) -> haproxy.Limits:
    """The proxy's limits for clients; it may have `files` files open."""
    server = settings.server
    # Trap: HAProxy does not start with more connections than files. Each connection takes one file on either side.
    connections = max(64, min(MOST_CONNECTIONS, (files - 512) // 2))
    router = settings.router
    return haproxy.Limits(
        router.stall_s, server.idle_s, router.body_timeout_s, router.max_body_bytes, connections, environment.LOOPBACK
    )


def _node_address(settings: Settings) -> str:
    """The address of Ray's node: loopback, unless Serve's servers listen on one other address only.

    Trap: routers listen on the address of the HTTP options, and the proxy looks for them at the node's address.
    """
    host = settings.server.host
    return environment.LOOPBACK if settings.server.local or host == "0.0.0.0" else host


def _url(settings: Settings) -> str:
    host = settings.server.host
    return f"http://{environment.LOOPBACK if host == '0.0.0.0' else host}:{settings.server.port}"
