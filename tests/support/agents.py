"""Agents on the place of clients: turn after turn at the entries of several machines, and what became of each."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import httpx
from machines import CLONE_NEWNET, KEY, libc

AGENTS = 8
PATIENCE_S = 12.0  # an agent that hears nothing for so long calls it silence


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent, how long it took, at which entry, and what it ended in."""

    at: float
    seconds: float
    entry: str
    program: int
    outcome: str  # answered, error (an error event), 503, cut (the connection ended), refused, silence, or a status
    replica: str = ""


class Agents:
    """So many agents, half of which stream. One whose entry is lost goes on with the next."""

    def __init__(self, space: str, entries: Sequence[str], count: int = AGENTS) -> None:
        self._space = space
        self._entries = entries
        self._over = threading.Event()
        self.asked: list[Asked] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]

    @contextmanager
    def at_work(self) -> Iterator[Agents]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def since(self, at: float) -> list[Asked]:
        """Requests that had not ended then."""
        return [each for each in list(self.asked) if each.at + each.seconds > at]

    def _run(self, number: int) -> None:
        with open(f"/var/run/netns/{self._space}") as there:
            assert libc.setns(there.fileno(), CLONE_NEWNET) == 0
        entry, turn = number % len(self._entries), 0
        with httpx.Client(timeout=httpx.Timeout(PATIENCE_S, connect=2.0), trust_env=False) as http:
            while not self._over.is_set():
                turn += 1
                asked = self._ask(http, self._entries[entry], number, turn)
                self.asked.append(asked)
                if asked.outcome != "answered":
                    entry = (entry + 1) % len(self._entries)
                    self._over.wait(0.2)

    def _ask(self, http: httpx.Client, entry: str, number: int, turn: int) -> Asked:
        messages = [{"role": "user", "content": f"Agent {number}, step {turn}: what is next?"}]
        body = {"model": "pocket", "messages": messages, "max_tokens": 48, "program_id": f"agent-{number}"}
        body |= {"stream": number % 2 == 0}
        headers = {"Authorization": f"Bearer {KEY}", "Cache-Control": "no-cache"}
        began, outcome, replica = time.monotonic(), "cut", ""
        try:
            with http.stream("POST", f"{entry}/v1/chat/completions", json=body, headers=headers) as answer:
                replica = answer.headers.get("x-holdfast-replica", "")
                text = answer.read().decode()
            outcome = ended_in(answer.status_code, body["stream"] is True, text)
        except httpx.ConnectError:
            outcome = "refused"
        except httpx.ConnectTimeout:
            outcome = "no connection"
        except httpx.TimeoutException:
            outcome = "silence"
        except httpx.TransportError:
            outcome = "cut"
        return Asked(began, time.monotonic() - began, entry, number, outcome, replica)


def ended_in(status: int, stream: bool, text: str) -> str:
    """What an answer says of its end; raises AssertionError where a stream says two things, or none."""
    if status != 200:
        return str(status)
    if not stream:
        return "answered" if json.loads(text)["choices"][0]["finish_reason"] else "unfinished"
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    errors = [each for each in events if "error" in each[:12]]
    ends = [each for each in events if each != "[DONE]" and '"finish_reason":"' in each]
    assert len(errors) + len(ends) == 1, text[-2000:]
    return "error" if errors else "answered"


def told(asked: Sequence[Asked], at: float) -> str:
    """One line: what ended in what, and how long the longest of each took, of what had not ended at `at`."""
    counts = Counter(each.outcome for each in asked)
    longest = {
        outcome: max(e.at + e.seconds - max(at, e.at) for e in asked if e.outcome == outcome) for outcome in counts
    }
    return ", ".join(f"{n} {outcome} (<= {longest[outcome]:.1f} s)" for outcome, n in counts.most_common())


def homes(asked: Sequence[Asked]) -> dict[int, list[str]]:
    """The replicas that answered each program, one after the other."""
    found: dict[int, list[str]] = {}
    for each in sorted(asked, key=lambda each: each.at):
        if each.outcome == "answered":
            found.setdefault(each.program, []).append(each.replica)
    return {program: [replica for replica, _ in groupby(replicas)] for program, replicas in found.items()}


def write(path: Path, asked: Sequence[Asked]) -> None:
    path.write_text("".join(json.dumps(each.__dict__) + "\n" for each in asked))
