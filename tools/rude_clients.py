"""Latency of polite clients while rude clients attack the same server.

    python tools/rude_clients.py [--seconds 12] [--rounds 3]
    python tools/rude_clients.py --at URL POLITE_KEY LIMITED_KEY

The rude clients all run at once. 20 trickle headers and 20 trickle a body, a byte every half second. 4,096 connect,
send nothing, and connect again when the server closes the connection. A tenant near its limits sends two bodies of
32 MiB a second.

Four polite clients send one request after the other. A round has three phases of SECONDS each: polite clients alone;
with the rude ones at another server, which discards its input (their cost to the machine); with both at one server.

The rude clients and the other server run in processes of their own, at low priority. The output is one JSON object with
the medians of the rounds' ratios to the first phase. Without `--at` the program starts a server: one replica of the
pocket model with one thread.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from holdfast.loadgen.serving import serving
from holdfast.router.tenants import hash_key

TRICKLING, IDLE, POLITE = 20, 4096, 4
ADDRESSES = 8  # source addresses of the idle clients: one address alone would meet the limit
BODY = 32 * 2**20
BODIES_S = 0.5  # between two bodies
WARM_S = 3.0  # before a phase is measured
DISCARD_S = 3.0  # the discarding server closes a connection after this time
PATIENT_S = 180.0  # a limit for work that takes seconds on an idle machine
ENGINE = {"threads": 1, "kv_memory": 0.1}
TENANTS = (
    {"name": "polite", "key_hashes": [hash_key("polite")], "operator": True},
    {
        "name": "limited",
        "key_hashes": [hash_key("limited")],
        "limits": {"requests_per_minute": 60, "max_concurrent": 2},
    },
)


def head(path: str, key: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


class Rude:
    """Rude clients that run until they are cancelled; `seen` counts the answers."""

    def __init__(self, url: str, key: str, n_idle: int) -> None:
        self.n_idle = n_idle
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self.key = key
        self.seen: Counter[str] = Counter()
        self.sending: set[asyncio.Future[None]] = set()

    @property
    def complete(self) -> bool:
        """Whether all idle clients have connected, and a client of each kind has had an answer."""
        kinds = {name.partition(":")[0] for name in self.seen if ":" in name}
        return self.seen["idle connected"] >= self.n_idle and kinds >= {"headers", "body", "idle", "32 MiB"}

    async def run(self) -> None:
        each = [self.trickle(head("/v1/chat/completions", self.key, 100), "headers") for _ in range(TRICKLING)]
        each += [self.trickle(b"x" * 10_000, "body") for _ in range(TRICKLING)]
        each += [self.idle(f"127.0.1.{1 + i % ADDRESSES}") for i in range(self.n_idle)]
        await asyncio.gather(*each, self.bodies())

    async def trickle(self, data: bytes, kind: str) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await self._connect("127.0.0.8")
                if kind == "body":
                    writer.write(head("/v1/chat/completions", self.key, len(data)))
                answer = asyncio.ensure_future(reader.read(65536))
                for byte in data:
                    writer.write(bytes([byte]))
                    done, _ = await asyncio.wait({answer}, timeout=0.5)
                    if done:
                        break
                await self._count_answer(kind, answer)
                writer.close()
            await asyncio.sleep(0.5)

    async def idle(self, source: str) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await self._connect(source)
                self.seen["idle connected"] += 1
                await self._count_answer("idle", asyncio.ensure_future(reader.read(65536)))
                writer.close()
            await asyncio.sleep(0.5)

    async def bodies(self) -> None:
        body = json.dumps({"model": "pocket", "messages": [{"role": "user", "content": "x" * (BODY - 200)}]}).encode()
        while True:
            self.sending.add(asyncio.ensure_future(self.body(body)))
            await asyncio.sleep(BODIES_S)

    async def body(self, body: bytes) -> None:
        with suppress(OSError):
            reader, writer = await self._connect("127.0.0.10")
            answer = asyncio.ensure_future(reader.read(65536))
            writer.write(head("/v1/chat/completions", self.key, len(body)))
            for at in range(0, len(body), 2**18):
                writer.write(body[at : at + 2**18])
                await writer.drain()
            await self._count_answer("32 MiB", answer)
            writer.close()

    async def _connect(self, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, local_addr=(source, 0))

    async def _count_answer(self, kind: str, answer: "asyncio.Future[bytes]") -> None:
        line = (await answer).split(b"\r\n")[0].decode()
        self.seen[f"{kind}: {line.partition(' ')[2] or 'closed'}"] += 1


async def rude(url: str, key: str, n_idle: int) -> None:
    """Run until standard input ends and every kind has had an answer, then print the answers."""
    raise_file_limit()
    clients = Rude(url, key, n_idle)
    running = asyncio.ensure_future(clients.run())
    await asyncio.to_thread(sys.stdin.read)
    deadline = time.monotonic() + PATIENT_S
    while not clients.complete and time.monotonic() < deadline:  # noqa: ASYNC110 (clients signal nothing)
        await asyncio.sleep(0.1)
    running.cancel()
    print(json.dumps(clients.seen), flush=True)


async def discard() -> None:
    """Run a server that discards its input until standard input ends; prints its port."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(DISCARD_S):
                headers = await reader.readuntil(b"\r\n\r\n")
                left = int(headers.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                while left:
                    left -= len(await reader.readexactly(min(left, 2**18)))
        with suppress(OSError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

    raise_file_limit()
    server = await asyncio.start_server(one, "127.0.0.1", 0, limit=2**19, backlog=IDLE)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def polite(url: str, key: str, seconds: float) -> list[float]:
    """Seconds of each request, sorted. Raises if a request fails."""
    times: list[float] = []
    measure_from = time.monotonic() + WARM_S
    until = measure_from + seconds

    async def one(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            body: dict[str, Any] = {"model": "pocket", "max_tokens": 8, "program_id": f"polite-{number}"}
            body["messages"] = [{"role": "user", "content": f"What is the weather in {number} at {turn}?"}]
            start = time.monotonic()
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            if start >= measure_from:
                times.append(time.monotonic() - start)
            await asyncio.sleep(0.05)

    headers = {"Authorization": f"Bearer {key}", "Cache-Control": "no-store"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(POLITE)))
    return sorted(times)


def latencies_ms(times: list[float]) -> dict[str, float]:
    """Number of requests and their latencies in milliseconds."""
    return {
        "requests": len(times),
        "p50": round(1e3 * times[len(times) // 2], 1),
        "p99": round(1e3 * times[int(len(times) * 0.99)], 1),
        "longest": round(1e3 * times[-1], 1),
    }


def beside(
    url: str, key: str, limited: str, seconds: float, n_idle: int = IDLE, elsewhere: str = ""
) -> tuple[dict[str, float], Counter[str]]:
    """Latencies of polite requests and the rude clients' answers. The rude ones may attack `elsewhere`."""
    with other("rude", elsewhere or url, limited, str(n_idle)) as process:
        times = asyncio.run(polite(url, key, seconds))
        return latencies_ms(times), Counter(json.loads(process.communicate("")[0]))


def measure(url: str, key: str, limited: str, seconds: float, rounds: int = 1) -> dict[str, Any]:
    phases: dict[str, list[dict[str, float]]] = {"alone": [], "elsewhere": [], "beside": []}
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        phases["alone"].append(latencies_ms(asyncio.run(polite(url, key, seconds))))
        with other("nowhere") as server:
            assert server.stdout is not None  # a pipe
            port = int(server.stdout.readline())
            phases["elsewhere"].append(beside(url, key, limited, seconds, elsewhere=f"http://127.0.0.1:{port}")[0])
            server.communicate("")
        latencies, answers = beside(url, key, limited, seconds)
        phases["beside"].append(latencies)
        seen.update(answers)
    ratios = {
        f"p99 {phase}": round(statistics.median(map(ratio, phases[phase], phases["alone"])), 2)
        for phase in ("elsewhere", "beside")
    }
    return {**phases, "rude": seen, "ratios": ratios}


def ratio(one: dict[str, float], other: dict[str, float]) -> float:
    return one["p99"] / other["p99"]


@contextmanager
def other(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this file in a process of its own at the lowest priority, so that it leaves the server its cores."""
    command = ["nice", "-n", "19", sys.executable, __file__, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        with suppress(OSError):  # Linux may share cores among sessions: lower this session as well
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
        yield process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", nargs=3, metavar=("URL", "POLITE_KEY", "LIMITED_KEY"), help="use a running server")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as own:
        at = options.at or (own.enter_context(serving("pocket", ENGINE, tenants=TENANTS)), "polite", "limited")
        print(json.dumps(measure(*at, options.seconds, options.rounds), indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rude"]:
        asyncio.run(rude(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    elif sys.argv[1:2] == ["nowhere"]:
        asyncio.run(discard())
    else:
        main()
