"""`holdfast bench overload`: goodput and refusals of a real server, by multiples of its capacity.

One server of one replica is started. Its capacity is measured first: what it completes in a second for more clients
than it has rows. Then requests come by a Poisson process, at `loads` times that. Each client waits for `deadline_s`,
give or take a half, and leaves then; it says so in a header (`told`) or not. Both ways take turns at each load.

The clients run on the same machine, so two more times are reported: how long the router alone takes to name its models
meanwhile, and how late the clients' own event loop is, which is in every time that they measure.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from holdfast.loadgen.chat import PATH, ChatClient
from holdfast.loadgen.progress import LoopLag
from holdfast.loadgen.runner import sleep_until
from holdfast.loadgen.serving import serving
from holdfast.loadgen.table import print_table

DEADLINE = "x-stainless-timeout"
CODE = "deadline_unmet"
REFUSALS = (429, 503)  # statuses of requests that were not admitted
LOOK_S = 0.1  # between two requests to the router alone
PATIENCE_S = 120.0  # of clients while the capacity is measured


@dataclass(frozen=True, slots=True)
class Options:
    """`seconds` of each run, after `warm_s` that do not count. Each prompt has `words` of its own."""

    model: str = "pocket"
    loads: tuple[float, ...] = (0.8, 1.0, 2.0, 3.0)
    seconds: float = 40.0
    warm_s: float = 10.0
    deadline_s: float = 6.0
    sequences: int = 8
    tokens: int = 96
    words: int = 150
    seed: int = 0


@dataclass(slots=True)
class Result:
    """How the requests of one run ended; seconds of refusals and of the router alone, and lateness of the clients."""

    ends: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    router_s: list[float] = field(default_factory=list)
    lag: LoopLag = field(default_factory=LoopLag)  # of the clients


class Crowd:
    """Clients of one server."""

    def __init__(self, options: Options, client: ChatClient, model: str) -> None:
        self._options = options
        self._client = client
        self._model = model
        self._draw = random.Random(options.seed)

    async def ask(self, within_s: float | None, told: bool) -> tuple[str, float]:
        """How one request ended (`in time`, `left`, `refused`, `dropped`, else its status), and after how long."""
        draw, options = self._draw, self._options
        text = " ".join(str(draw.randrange(10**4)) for _ in range(options.words))
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.tokens,
            "ignore_eos": True,
        }
        headers = {"cache-control": "no-store"}
        if told and within_s is not None:
            headers[DEADLINE] = f"{within_s:.3f}"
        began = time.perf_counter()
        try:
            async with asyncio.timeout(within_s):
                status, said = await self._client.call("POST", PATH, body, headers)
        except TimeoutError:
            return "left", time.perf_counter() - began
        took = time.perf_counter() - began
        if status == 200:
            return "in time", took
        code = said.get("error", {}).get("code") if isinstance(said, dict) else said
        if code == CODE or status in REFUSALS:
            return ("refused" if took < (within_s or took) / 2 else "dropped"), took
        return f"{status} {code}", took

    async def capacity(self) -> float:
        """Requests a second, with twice as many clients as there are rows, without a pause."""
        options, done = self._options, Counter[bool]()
        begin = time.perf_counter() + options.warm_s
        end = begin + options.seconds / 2

        async def client() -> None:
            while (now := time.perf_counter()) < end:
                how, took = await self.ask(None, told=False)
                if how != "in time":
                    raise OSError(f"a request ended by {how}")
                done[begin <= now + took < end] += 1

        await asyncio.gather(*(client() for _ in range(2 * options.sequences)))
        return done[True] / (end - begin)

    async def run(self, rate: float, told: bool) -> Result:
        """One run at so many requests a second."""
        options, result, draw = self._options, Result(), random.Random(self._options.seed)
        begin = time.perf_counter()
        due, tasks = 0.0, set[asyncio.Task[None]]()

        async def one(at: float, within_s: float) -> None:
            how, took = await self.ask(within_s, told)
            if at < options.warm_s:
                return
            result.ends[how] += 1
            if how == "refused":
                result.refused_s.append(took)

        async def look() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                began = time.perf_counter()
                await self._client.get("/v1/models")
                result.router_s.append(time.perf_counter() - began)

        looks = asyncio.create_task(look())
        async with result.lag.watching():
            while (due := due + draw.expovariate(rate)) < options.warm_s + options.seconds:
                await sleep_until(begin + due)
                within_s = options.deadline_s * draw.uniform(0.5, 1.5)
                task = asyncio.create_task(one(due, within_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(set(tasks))
        looks.cancel()
        return result


async def measure(options: Options, url: str) -> list[tuple[float, bool, Result]]:
    """Every load, told and not, in turns; before them a line with the capacity."""
    async with ChatClient(url, PATIENCE_S) as client:
        model = (await client.get("/v1/models"))["data"][0]["id"]
        crowd = Crowd(options, client, model)
        most = await crowd.capacity()
        print(f"capacity: {most:.2f} requests a second")
        ways = [(load, told) for load in options.loads for told in (True, False)]
        return [(load, told, await crowd.run(load * most, told)) for load, told in ways]


def main(options: Options) -> int:
    """Print the table."""
    engine = {"max_sequences": options.sequences, "session_rows": 0, "threads": 1, "kv_memory": 0.2}
    with serving(options.model, engine) as url:
        rows = asyncio.run(measure(options, url))
    show(options, rows)
    return 0


def show(options: Options, rows: list[tuple[float, bool, Result]]) -> None:
    """Print the table."""
    best = max(result.ends["in time"] for _, _, result in rows)
    title = f"{options.model}, {options.sequences} rows, deadlines of {options.deadline_s:g} s +- half"
    names = ("in time", "refused", "dropped", "left")
    heads = ["load", "told", "in time a second", "of the best", *names, "else"]
    heads += [f"{what} ms p50, p99, longest" for what in ("refusal", "router alone", "clients late")]
    lines = []
    for load, told, result in rows:
        n, good = result.ends.total() or 1, result.ends["in time"]
        other = sum(count for name, count in result.ends.items() if name not in names)
        cells = [f"{load:g}", "yes" if told else "no", f"{good / options.seconds:.2f}", f"{good / best:.0%}"]
        cells += [f"{result.ends[name] / n:.1%}" for name in names]
        lines.append([*cells, str(other), *map(_spread, (result.refused_s, result.router_s, result.lag.ticks))])
    print_table(title, heads, lines, left=0)


def _spread(seconds: list[float]) -> str:
    took = sorted(seconds)
    return ", ".join(f"{took[int(share * (len(took) - 1))] * 1e3:.0f}" for share in (0.5, 0.99, 1.0) if took) or "-"
