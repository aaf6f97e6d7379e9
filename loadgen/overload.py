"""`holdfast bench overload`: goodput and refusals of a real server, by multiples of its capacity.

One server of one replica is started. Its capacity is the number of requests a second that it completes for more
clients than rows. Then requests arrive by a Poisson process at `loads` times that rate. Each client waits for
`deadline_s`, plus or minus a half, then leaves. It sends its deadline in a header (`told`) or does not; both ways take
turns at each load.

The clients run on the same machine, so two more times are reported: the time of the router alone to list its models,
and the lateness of the clients' own event loop, which is part of every time that they measure.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from holdfast.loadgen.chat import PATH, ChatClient
from holdfast.loadgen.options import Overload
from holdfast.loadgen.progress import LoopLag
from holdfast.loadgen.runner import start_each
from holdfast.loadgen.serving import serving
from holdfast.loadgen.table import print_table

DEADLINE = "x-stainless-timeout"
CODE = "deadline_unmet"
REFUSALS = (429, 503)  # statuses of requests that were not admitted
LOOK_S = 0.1  # between two requests to the router alone
PATIENCE_S = 120.0  # of clients while the capacity is measured
ENDS = ("in time", "refused", "dropped", "left")


@dataclass(slots=True)
class Result:
    """The ends of one run's requests; seconds of refusals and of the router alone, and lateness of the clients."""

    load: float
    send_deadline: bool
    ends: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    router_s: list[float] = field(default_factory=list)
    lag: LoopLag = field(default_factory=LoopLag)  # of the clients


class Crowd:
    """Clients of one server."""

    def __init__(self, options: Overload, client: ChatClient, model: str) -> None:
        self._options, self._client, self._model = options, client, model
        self._draw = random.Random(options.seed)

    async def ask(self, within_s: float | None, send_deadline: bool) -> tuple[str, float]:
        """The outcome of one request (one of `ENDS`, else its status), and its seconds."""
        text = " ".join(str(self._draw.randrange(10**4)) for _ in range(self._options.words))
        messages = [{"role": "user", "content": text}]
        body = {"model": self._model, "messages": messages, "max_tokens": self._options.tokens, "ignore_eos": True}
        headers = {"cache-control": "no-store"}
        if send_deadline and within_s is not None:
            headers[DEADLINE] = f"{within_s:.3f}"
        start = time.perf_counter()
        try:
            async with asyncio.timeout(within_s):
                status, reply = await self._client.call("POST", PATH, body, headers)
        except TimeoutError:
            return "left", time.perf_counter() - start
        seconds = time.perf_counter() - start
        if status == 200:
            return "in time", seconds
        code = reply.get("error", {}).get("code") if isinstance(reply, dict) else reply
        if code == CODE or status in REFUSALS:
            return ("refused" if seconds < (within_s or seconds) / 2 else "dropped"), seconds
        return f"{status} {code}", seconds

    async def capacity(self) -> float:
        """Requests a second, with twice as many clients as there are rows, without a pause."""
        options, completed = self._options, 0
        begin = time.perf_counter() + options.warm_s
        end = begin + options.seconds / 2

        async def client() -> None:
            nonlocal completed
            while (now := time.perf_counter()) < end:
                outcome, seconds = await self.ask(None, send_deadline=False)
                if outcome != "in time":
                    raise OSError(f"a request ended by {outcome}")
                completed += begin <= now + seconds < end

        await asyncio.gather(*(client() for _ in range(2 * options.sequences)))
        return completed / (end - begin)

    async def run(self, load: float, most: float, send_deadline: bool) -> Result:
        """One run at `load` times `most` requests a second."""
        options, result, draw = self._options, Result(load, send_deadline), random.Random(self._options.seed)
        arrival_s, arrivals_s, patience = 0.0, [], []
        while (arrival_s := arrival_s + draw.expovariate(load * most)) < options.warm_s + options.seconds:
            arrivals_s.append(arrival_s)
            patience.append(options.deadline_s * draw.uniform(0.5, 1.5))

        async def one(at: float, within_s: float) -> None:
            outcome, seconds = await self.ask(within_s, send_deadline)
            if at >= options.warm_s:
                result.ends[outcome] += 1
                if outcome == "refused":
                    result.refused_s.append(seconds)

        async def look() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                start = time.perf_counter()
                await self._client.get("/v1/models")
                result.router_s.append(time.perf_counter() - start)

        looks, begin = asyncio.create_task(look()), time.perf_counter()
        async with result.lag.watching():
            clients = [partial(one, at, within_s) for at, within_s in zip(arrivals_s, patience, strict=True)]
            await start_each([begin + at for at in arrivals_s], clients, lead=0.0)
        looks.cancel()
        return result


async def measure(options: Overload, url: str) -> list[Result]:
    """Every load with and without deadlines, in turns. Prints the capacity first."""
    async with ChatClient(url, PATIENCE_S) as client:
        crowd = Crowd(options, client, await client.model())
        most = await crowd.capacity()
        print(f"capacity: {most:.2f} requests a second")
        return [await crowd.run(load, most, send_deadline) for load in options.loads for send_deadline in (True, False)]


def main(options: Overload) -> int:
    """Measure and print the table."""
    engine = {"max_sequences": options.sequences, "session_rows": 0, "threads": 1, "kv_memory": 0.2}
    with serving(options.model, engine) as url:
        show(options, asyncio.run(measure(options, url)))
    return 0


def show(options: Overload, results: list[Result]) -> None:
    """Print the table."""
    best = max(result.ends["in time"] for result in results)
    heads = ["load", "told", "in time a second", "of the best", *ENDS, "else"]
    heads += [f"{name} ms p50, p99, longest" for name in ("refusal", "router alone", "clients late")]
    lines = []
    for result in results:
        n, n_in_time = result.ends.total() or 1, result.ends["in time"]
        n_other = result.ends.total() - sum(result.ends[name] for name in ENDS)
        cells = [f"{result.load:g}", "yes" if result.send_deadline else "no", f"{n_in_time / options.seconds:.2f}"]
        cells += [f"{n_in_time / best:.0%}", *(f"{result.ends[name] / n:.1%}" for name in ENDS), str(n_other)]
        lines.append([*cells, *map(_spread, (result.refused_s, result.router_s, result.lag.ticks))])
    title = f"{options.model}, {options.sequences} rows, deadlines of {options.deadline_s:g} s +- half"
    print_table(title, heads, lines, left=0)


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    if not ordered:
        return "-"
    return ", ".join(f"{ordered[int(share * (len(ordered) - 1))] * 1e3:.0f}" for share in (0.5, 0.99, 1.0))
