"""The books of a server under failures, held against what its clients were told and what its engines counted."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import httpx

# of the engines' counters, the field of a record whose sum it is
COUNTERS = {
    "holdfast_completion_tokens_total": "drawn",
    "holdfast_prompt_tokens_computed_total": "computed",
    "holdfast_prompt_tokens_cached_total": "found",
}
SUMMED = ("input", "cached", "output", "drawn")
ROWS = 10000


class Usage(NamedTuple):
    """Tokens of one answer."""

    input: int
    cached: int
    output: int


class Ended(Protocol):
    """A request as its client saw it."""

    @property
    def at(self) -> float: ...
    @property
    def outcome(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def usage(self) -> Usage | None: ...


def usage_of(told: dict[str, Any]) -> Usage:
    """Of an OpenAI answer's `usage`."""
    return Usage(told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"], told["completion_tokens"])


class Books:
    """`get` asks the server for a path with a key. Look while nothing is under way."""

    def __init__(self, get: Callable[[str, str], httpx.Response], admin: str, operator: str, tenants: Sequence[str]):
        self._get, self._admin, self._operator, self._tenants = get, admin, operator, tenants
        self._places: dict[str, str] = {}
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by request, of those not yet compared
        self._stood: dict[str, Counter[str]] = defaultdict(Counter)  # by tenant, what its records sum up to
        self._drawn: Counter[str] = Counter()  # of the records since the last look
        self._counters: dict[tuple[str, str], float] = {}  # by name and replica, at the last look
        self._now: dict[tuple[str, str], float] = {}
        self._looked = 0  # requests that were compared
        self._since = float("-inf")  # what was asked for before is in no books
        self.told: Counter[str] = Counter()

    def emptied(self, at: float) -> None:
        """Redis loses everything now."""
        self._since = at
        self._stood.clear()

    def faults(self, asked: Sequence[Ended], *, counted: bool) -> list[str]:
        """What does not agree, in words; the engines with the records since the last look only where `counted`."""
        self._read()
        found = [fault for each in asked[self._looked :] for fault in self._wrong(each)]
        names = {each.name for each in asked[self._looked :]}
        found += [f"a record of nobody's: {rows}" for name, rows in self._rows.items() if name not in names]
        for tenant in self._tenants:
            answer = self._get(f"/v1/admin/usage?tenant={tenant}", self._admin).json()
            found += self._sums(tenant, answer)
        self._now = self._engines()
        if counted and self._counters:
            if self._now.keys() != self._counters.keys():
                found.append(f"other engines than before: {sorted({replica for _, replica in self._now})}")
            for name, column in COUNTERS.items():
                delta = sum(n - self._counters.get(key, 0.0) for key, n in self._now.items() if key[0] == name)
                if delta != self._drawn[column]:
                    found.append(f"{name} rose by {delta:.0f}, records have {self._drawn[column]} {column}")
        return found

    def close(self, asked: Sequence[Ended]) -> dict[str, Any]:
        """The look is over: the next one begins here. Returns what was seen."""
        ended = asked[self._looked :]
        self._looked = len(asked)
        rows = [row for each in self._rows.values() for row in each]
        told = {"requests": len(ended), "records": len(rows), **self._drawn}
        self.told["requests"] += len(ended)
        self.told["records"] += len(rows)
        self.told["billed"] += sum(row["units"] > 0 for row in rows)
        self.told["again"] += sum(row["again"] for row in rows)
        self.told["gone with Redis"] += sum(
            not self._rows.get(each.name) and each.outcome == "answered" for each in ended
        )
        self._rows.clear()
        self._drawn.clear()
        self._counters = self._now
        return told

    def summary(self) -> str:
        return ", ".join(f"{n} {what}" for what, n in self.told.items())

    # ---- parts ----

    def _read(self) -> None:
        for tenant in self._tenants:
            while True:
                after = f"&after={self._places[tenant]}/{tenant}" if tenant in self._places else ""
                answer = self._get(f"/v1/admin/usage/records?tenant={tenant}&limit={ROWS}{after}", self._admin)
                rows = [json.loads(line) for line in answer.text.splitlines() if line]
                for row in rows:
                    self._rows[row["http_id"]].append(row)
                    self._drawn.update({column: row[column] for column in COUNTERS.values()})
                    self._stood[tenant].update({name: row[name] for name in SUMMED})
                    self._stood[tenant]["requests"] += 1
                    self._places[tenant] = row["place"]
                if len(rows) < ROWS:
                    break

    def _wrong(self, each: Ended) -> Iterable[str]:
        rows = self._rows.get(each.name, [])
        billed = [row for row in rows if row["outcome"] in ("completed", "cached") and not row["again"]]
        costless = [row for row in rows if row["again"] or row["outcome"] in ("failed", "rejected")]
        if any(row["units"] for row in costless):
            yield f"{each}: what costs nothing has units: {costless}"
        if any(row["tenant"] != each.tenant for row in rows):
            yield f"{each}: somebody else's: {rows}"
        if len(billed) > 1:
            yield f"{each}: billed {len(billed)} times: {rows}"
        if each.outcome in ("answered", "wrong"):
            if len(billed) == 1:
                booked = Usage(billed[0]["input"], billed[0]["cached"], billed[0]["output"])
                if booked != each.usage:
                    yield f"{each}: booked as {booked}"
            elif not billed and each.at > self._since:
                yield f"{each}: not in the books: {rows}"

    def _sums(self, tenant: str, answer: Any) -> Iterable[str]:
        month = datetime.now(UTC).strftime("%Y-%m")
        text = json.dumps(answer)
        for period in periods(answer):
            if period["period"] == month:
                told = {name: period[name] for name in (*SUMMED, "requests")}
                stood = {name: self._stood[tenant][name] for name in (*SUMMED, "requests")}
                if told != stood:
                    yield f"{tenant}: sums of the month {told}, of its records {stood}"
                return
        yield f"{tenant}: no sums of {month} in {text}"

    def _engines(self) -> dict[tuple[str, str], float]:
        found = {}
        for line in self._get("/metrics", self._operator).text.splitlines():
            name, _, labels = line.partition("{")
            if name in COUNTERS:
                replica = labels.partition('replica="')[2].partition('"')[0]
                found[name, replica] = float(line.rpartition(" ")[2])
        return found


def periods(answer: Any) -> Iterable[dict[str, Any]]:
    """All rows of sums in an answer, wherever they stand."""
    if isinstance(answer, dict):
        if "period" in answer:
            yield answer
        else:
            for each in answer.values():
                yield from periods(each)
    elif isinstance(answer, list):
        for each in answer:
            yield from periods(each)
