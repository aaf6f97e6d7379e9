"""Compare a server's usage books with its clients' answers and its engines' counters, while failures happen."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import httpx

# for each engine counter, the field of the usage records that adds up to it
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


class RequestEnd(Protocol):
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


def usage_of(usage: dict[str, Any]) -> Usage:
    """The token counts of an OpenAI answer's `usage`."""
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])


class Books:
    """Checks the books. `get` requests a path with a key. Check only while no request is running."""

    def __init__(self, get: Callable[[str, str], httpx.Response], admin: str, operator: str, tenants: Sequence[str]):
        self._get, self._admin, self._operator, self._tenants = get, admin, operator, tenants
        self._places: dict[str, str] = {}
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by request, records not compared yet
        self._sums_by_tenant: dict[str, Counter[str]] = defaultdict(Counter)  # by tenant, the sums of its records
        self._drawn: Counter[str] = Counter()  # sums of the records since the last check
        self._counters: dict[tuple[str, str], float] = {}  # by name and replica, at the last check
        self._now: dict[tuple[str, str], float] = {}
        self._compared = 0  # number of requests compared so far
        self._since = float("-inf")  # the books lack requests that were sent before
        self.totals: Counter[str] = Counter()

    def on_emptied(self, at: float) -> None:
        """Note that Redis loses all its data at `at`."""
        self._since = at
        self._sums_by_tenant.clear()

    def faults(self, requests: Sequence[RequestEnd], *, counted: bool) -> list[str]:
        """All disagreements as sentences. `counted`: also compare the engines' counters with the records."""
        self._read()
        faults = [fault for request in requests[self._compared :] for fault in self._wrong(request)]
        names = {request.name for request in requests[self._compared :]}
        faults += [f"records of an unknown request: {rows}" for name, rows in self._rows.items() if name not in names]
        for tenant in self._tenants:
            answer = self._get(f"/v1/admin/usage?tenant={tenant}", self._admin).json()
            faults += self._sums(tenant, answer)
        self._now = self._engines()
        if counted and self._counters:
            if self._now.keys() != self._counters.keys():
                faults.append(f"the engines have changed: {sorted({replica for _, replica in self._now})}")
            for name, column in COUNTERS.items():
                delta = sum(n - self._counters.get(key, 0.0) for key, n in self._now.items() if key[0] == name)
                if delta != self._drawn[column]:
                    faults.append(f"{name} rose by {delta:.0f}, records have {self._drawn[column]} {column}")
        return faults

    def close(self, requests: Sequence[RequestEnd]) -> dict[str, Any]:
        """End this check; the next one begins here. Returns the counts of this one."""
        new = requests[self._compared :]
        self._compared = len(requests)
        rows = [row for each in self._rows.values() for row in each]
        counts = {"requests": len(new), "records": len(rows), **self._drawn}
        self.totals["requests"] += len(new)
        self.totals["records"] += len(rows)
        self.totals["billed"] += sum(row["units"] > 0 for row in rows)
        self.totals["again"] += sum(row["again"] for row in rows)
        self.totals["gone with Redis"] += sum(
            not self._rows.get(each.name) and each.outcome == "answered" for each in new
        )
        self._rows.clear()
        self._drawn.clear()
        self._counters = self._now
        return counts

    def summary(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in self.totals.items())

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
                    self._sums_by_tenant[tenant].update({name: row[name] for name in SUMMED})
                    self._sums_by_tenant[tenant]["requests"] += 1
                    self._places[tenant] = row["place"]
                if len(rows) < ROWS:
                    break

    def _wrong(self, request: RequestEnd) -> Iterable[str]:
        rows = self._rows.get(request.name, [])
        billed = [row for row in rows if row["outcome"] in ("completed", "cached") and not row["again"]]
        costless = [row for row in rows if row["again"] or row["outcome"] in ("failed", "rejected")]
        if any(row["units"] for row in costless):
            yield f"{request}: records without a charge have units: {costless}"
        if any(row["tenant"] != request.tenant for row in rows):
            yield f"{request}: records of another tenant: {rows}"
        if len(billed) > 1:
            yield f"{request}: billed {len(billed)} times: {rows}"
        if request.outcome in ("answered", "wrong"):
            if len(billed) == 1:
                booked = Usage(billed[0]["input"], billed[0]["cached"], billed[0]["output"])
                if booked != request.usage:
                    yield f"{request}: booked as {booked}"
            elif not billed and request.at > self._since:
                yield f"{request}: not in the books: {rows}"

    def _sums(self, tenant: str, answer: Any) -> Iterable[str]:
        month = datetime.now(UTC).strftime("%Y-%m")
        text = json.dumps(answer)
        for period in periods(answer):
            if period["period"] == month:
                billed = {name: period[name] for name in (*SUMMED, "requests")}
                expected = {name: self._sums_by_tenant[tenant][name] for name in (*SUMMED, "requests")}
                if billed != expected:
                    yield f"{tenant}: sums of the month {billed}, of its records {expected}"
                return
        yield f"{tenant}: no sums of {month} in {text}"

    def _engines(self) -> dict[tuple[str, str], float]:
        counters = {}
        for line in self._get("/metrics", self._operator).text.splitlines():
            name, _, labels = line.partition("{")
            if name in COUNTERS:
                replica = labels.partition('replica="')[2].partition('"')[0]
                counters[name, replica] = float(line.rpartition(" ")[2])
        return counters


def periods(answer: Any) -> Iterable[dict[str, Any]]:
    """All rows of sums in an answer, at any depth."""
    if isinstance(answer, dict):
        if "period" in answer:
            yield answer
        else:
            for each in answer.values():
                yield from periods(each)
    elif isinstance(answer, list):
        for each in answer:
            yield from periods(each)
