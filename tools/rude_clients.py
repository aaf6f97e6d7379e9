"""Rude clients against a running server, and how long polite ones wait meanwhile.

    python tools/rude_clients.py [--seconds 12] [--rounds 3]
    python tools/rude_clients.py --at URL POLITE_KEY LIMITED_KEY

Rude, all at once: 20 clients that trickle headers and 20 that trickle a body, a byte every half second; 4,096 that
connect, say nothing and connect again when they are thrown out; a tenant near its limits that sends two bodies of
32 MiB a second. Polite: four clients, one request after the other. They are timed in rounds, SECONDS each: alone, while
the rude ones do the same to a server that throws away what it gets (what they cost the machine by themselves), and
beside them. The rude ones and that server run in processes of their own, at low priority. Prints one JSON object, with
the median of the rounds' ratios to alone. Without `--at` the server is one of its own: one replica of the pocket model,
whose engine has one thread.
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
ADDRESSES = 8  # that the idle ones come from: one would not be let in as often
BODY = 32 * 2**20
BODIES_S = 0.5  # between two of them
WARM_S = 3.0  # before a phase counts
NOWHERE_S = 3.0  # after which the server that throws away what it gets ends a connection
PATIENT_S = 180.0  # for what takes seconds on a machine that is free
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
    """Goes on until it is cancelled; `seen` counts what they were told."""

    def __init__(self, url: str, key: str, n_idle: int) -> None:
        self.n_idle = n_idle
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self.key = key
        self.seen: Counter[str] = Counter()
        self.sending: set[asyncio.Future[None]] = set()

    @property
    def complete(self) -> bool:
        """Whether all idle ones have been in, and of each kind one was told something."""
        told = {name.partition(":")[0] for name in self.seen if ":" in name}
        return self.seen["idle connected"] >= self.n_idle and told >= {"headers", "body", "idle", "32 MiB"}

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
                answered = asyncio.ensure_future(reader.read(65536))
                for byte in data:
                    writer.write(bytes([byte]))
                    done, _ = await asyncio.wait({answered}, timeout=0.5)
                    if done:
                        break
                await self._told(kind, answered)
                writer.close()
            await asyncio.sleep(0.5)

    async def idle(self, source: str) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await self._connect(source)
                self.seen["idle connected"] += 1
                await self._told("idle", asyncio.ensure_future(reader.read(65536)))
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
            answered = asyncio.ensure_future(reader.read(65536))
            writer.write(head("/v1/chat/completions", self.key, len(body)))
            for at in range(0, len(body), 2**18):
                writer.write(body[at : at + 2**18])
                await writer.drain()
            await self._told("32 MiB", answered)
            writer.close()

    async def _connect(self, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, local_addr=(source, 0))

    async def _told(self, kind: str, answered: "asyncio.Future[bytes]") -> None:
        line = (await answered).split(b"\r\n")[0].decode()
        self.seen[f"{kind}: {line.partition(' ')[2] or 'closed'}"] += 1


async def rude(url: str, key: str, n_idle: int) -> None:
    """Until standard input ends and every kind was told something; then print what."""
    most_files()
    clients = Rude(url, key, n_idle)
    running = asyncio.ensure_future(clients.run())
    await asyncio.to_thread(sys.stdin.read)
    deadline = time.monotonic() + PATIENT_S
    while not clients.complete and time.monotonic() < deadline:  # noqa: ASYNC110 (clients tell of nothing)
        await asyncio.sleep(0.1)
    running.cancel()
    print(json.dumps(clients.seen), flush=True)


async def nowhere() -> None:
    """A server that throws away what it gets, until standard input ends; prints its port."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(NOWHERE_S):
                headers = await reader.readuntil(b"\r\n\r\n")
                left = int(headers.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                while left:
                    left -= len(await reader.readexactly(min(left, 2**18)))
        with suppress(OSError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

    most_files()
    server = await asyncio.start_server(one, "127.0.0.1", 0, limit=2**19, backlog=IDLE)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def most_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def polite(url: str, key: str, seconds: float) -> list[float]:
    """How long each request took, in seconds. Raises where one is not answered."""
    took: list[float] = []
    counting = time.monotonic() + WARM_S
    until = counting + seconds

    async def one(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            body: dict[str, Any] = {"model": "pocket", "max_tokens": 8, "program_id": f"polite-{number}"}
            body["messages"] = [{"role": "user", "content": f"What is the weather in {number} at {turn}?"}]
            began = time.monotonic()
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            if began >= counting:
                took.append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    headers = {"Authorization": f"Bearer {key}", "Cache-Control": "no-store"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(POLITE)))
    return sorted(took)


def told(took: list[float]) -> dict[str, float]:
    """Milliseconds."""
    return {
        "requests": len(took),
        "p50": round(1e3 * took[len(took) // 2], 1),
        "p99": round(1e3 * took[int(len(took) * 0.99)], 1),
        "longest": round(1e3 * took[-1], 1),
    }


def beside(
    url: str, key: str, limited: str, seconds: float, n_idle: int = IDLE, elsewhere: str = ""
) -> tuple[dict[str, float], Counter[str]]:
    """How long polite requests take beside the rude ones, who may be `elsewhere`, and what those were told."""
    with other("rude", elsewhere or url, limited, str(n_idle)) as process:
        took = asyncio.run(polite(url, key, seconds))
        return told(took), Counter(json.loads(process.communicate("")[0]))


def measure(url: str, key: str, limited: str, seconds: float, rounds: int = 1) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"alone": [], "elsewhere": [], "beside": []}
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        found["alone"].append(told(asyncio.run(polite(url, key, seconds))))
        with other("nowhere") as server:
            assert server.stdout is not None  # a pipe
            port = int(server.stdout.readline())
            found["elsewhere"].append(beside(url, key, limited, seconds, elsewhere=f"http://127.0.0.1:{port}")[0])
            server.communicate("")
        took, answers = beside(url, key, limited, seconds)
        found["beside"].append(took)
        seen.update(answers)
    ratios = {
        f"p99 {phase}": round(statistics.median(map(ratio, found[phase], found["alone"])), 2)
        for phase in ("elsewhere", "beside")
    }
    return {**found, "rude": seen, "ratios": ratios}


def ratio(one: dict[str, float], other: dict[str, float]) -> float:
    return one["p99"] / other["p99"]


@contextmanager
def other(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """This file in a process of its own, at the lowest priority: elsewhere it would not take the server's cores."""
    command = ["nice", "-n", "19", sys.executable, __file__, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        with suppress(OSError):  # where Linux shares cores out among sessions, theirs is to have the least, too
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
        yield process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", nargs=3, metavar=("URL", "POLITE_KEY", "LIMITED_KEY"), help="a server that runs")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as own:
        at = options.at or (own.enter_context(serving("pocket", ENGINE, tenants=TENANTS)), "polite", "limited")
        print(json.dumps(measure(*at, options.seconds, options.rounds), indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rude"]:
        asyncio.run(rude(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    elif sys.argv[1:2] == ["nowhere"]:
        asyncio.run(nowhere())
    else:
        main()
