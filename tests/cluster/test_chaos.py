"""Each failure of docs/failures.md against a real server under load. About eight minutes:

HOLDFAST_TEST_FAILURES=1 .venv/bin/pytest -s tests/cluster/test_chaos.py
"""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chaos
import httpx
import pytest
from chaos_books import Books, Usage

SAID = Usage(20, 5, 7)
RECORD = {"http_id": "a", "tenant": "acme", "outcome": "completed", "again": False, "units": 2.0}
RECORD |= {"input": 20, "cached": 5, "output": 7, "drawn": 7, "computed": 15, "found": 5, "place": "1-0"}


@pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_FAILURES"), reason="set HOLDFAST_TEST_FAILURES=1")
def test_every_failure_costs_what_it_may_and_the_books_are_even(start: Callable[..., Any], tmp_path: Path) -> None:
    journal = chaos.Journal(tmp_path / "journal.jsonl")
    chaos.run(start, tmp_path, iter(chaos.FAILURES), journal)
    assert not journal.faults


def test_a_stream_that_goes_on_with_other_words_is_seen() -> None:
    """The clients of that run would not take it for an answer."""
    chunk = 'data: {{"choices":[{{"delta":{{"content":"{}"}},"finish_reason":{}}}]}}'
    counts = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    last = f"data: {json.dumps({'choices': [], 'usage': counts})}"
    whole = [chunk.format("a", "null"), chunk.format("b", '"length"'), last, "data: [DONE]"]
    assert chaos.told(200, True, whole) == ("answered", ("ab", []), SAID)
    assert chaos.told(200, True, [whole[0], 'data: {"error":{"code":"unavailable"}}']) == ("error", ("a", []), None)
    for cut in (whole[:1], [*whole, 'data: {"error":{"code":"unavailable"}}']):
        with pytest.raises(AssertionError):
            chaos.told(200, True, cut)


class Told:
    """A server that answers with these records, sums and counters."""

    def __init__(self) -> None:
        self.rows = [RECORD]
        self.sums: dict[str, int] = {"input": 20, "cached": 5, "output": 7, "drawn": 7, "requests": 1}
        self.counters = {"completion_tokens": 7, "prompt_tokens_computed": 15, "prompt_tokens_cached": 5}
        self.replica = "r1"

    def get(self, path: str, key: str) -> httpx.Response:
        if path.startswith("/v1/admin/usage/records"):
            return httpx.Response(200, text="" if "after=" in path else "\n".join(map(json.dumps, self.rows)))
        if path.startswith("/v1/admin/usage"):
            month = datetime.now(UTC).strftime("%Y-%m")
            return httpx.Response(200, json={"data": [{"tenant": "acme", "usage": [{"period": month, **self.sums}]}]})
        lines = [f'holdfast_{name}_total{{replica="{self.replica}"}} {n}' for name, n in self.counters.items()]
        return httpx.Response(200, text="\n".join(lines))

    def books(self) -> Books:
        """They were looked at when nothing had happened yet."""
        told, now = Told(), self.get
        told.rows, told.sums, told.counters = [], dict.fromkeys(self.sums, 0), dict.fromkeys(self.counters, 0)
        where = {"get": told.get}
        books = Books(lambda path, key: where["get"](path, key), "admin", "watch", ("acme",))
        assert books.faults([], counted=True) == []
        books.close([])
        where["get"] = now
        return books


ASKED = chaos.Asked(1.0, 1.0, 0.1, "answered", "a", "acme", SAID)


def test_even_books_have_no_fault() -> None:
    books = Told().books()
    assert books.faults([ASKED], counted=True) == []
    assert books.close([ASKED]) == {"requests": 1, "records": 1, "drawn": 7, "computed": 15, "found": 5}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([], "not in the books"),
        ([RECORD, {**RECORD, "place": "2-0"}], "billed 2 times"),
        ([{**RECORD, "output": 8}], "booked as"),
        ([{**RECORD, "tenant": "beta"}], "somebody else's"),
        ([RECORD, {**RECORD, "again": True}], "costs nothing has units"),
        ([RECORD, {**RECORD, "outcome": "failed"}], "costs nothing has units"),
        ([RECORD, {**RECORD, "http_id": "b"}], "nobody's"),
        ([{**RECORD, "drawn": 8}], "rose by 7, records have 8 drawn"),
    ],
)
def test_uneven_books_are_seen(rows: list[dict[str, Any]], fault: str) -> None:
    told = Told()
    told.rows = rows
    assert any(fault in each for each in told.books().faults([ASKED], counted=True))


def test_sums_that_are_not_those_of_the_records_and_engines_that_died_are_seen() -> None:
    told = Told()
    told.sums["requests"] = 2
    assert any("sums of the month" in each for each in told.books().faults([ASKED], counted=True))
    told = Told()
    told.replica = "r2"
    assert any("other engines" in each for each in told.books().faults([ASKED], counted=True))
    assert told.books().faults([ASKED], counted=False) == []


def test_what_stood_in_a_redis_that_was_emptied_is_not_missed() -> None:
    told = Told()
    told.rows, told.sums = [], dict.fromkeys(told.sums, 0)
    books = told.books()
    books.emptied(ASKED.at + 0.5)
    assert books.faults([ASKED], counted=False) == []
    later = chaos.Asked(2.0, 1.0, 0.1, "answered", "b", "acme", SAID)
    assert any("not in the books" in each for each in books.faults([ASKED, later], counted=False))
