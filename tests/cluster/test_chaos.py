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

USAGE = Usage(20, 5, 7)
RECORD = {"http_id": "a", "tenant": "acme", "outcome": "completed", "again": False, "units": 2.0}
RECORD |= {"input": 20, "cached": 5, "output": 7, "drawn": 7, "computed": 15, "found": 5, "place": "1-0"}


@pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_FAILURES"), reason="set HOLDFAST_TEST_FAILURES=1")
def test_every_failure_has_allowed_outcomes_and_the_books_balance(start: Callable[..., Any], tmp_path: Path) -> None:
    journal = chaos.Journal(tmp_path / "journal.jsonl")
    chaos.run(start, tmp_path, iter(chaos.FAILURES), journal)
    assert not journal.faults


def test_a_stream_that_changes_its_words_is_no_answer() -> None:
    """A stream with no end or with two raises AssertionError."""
    chunk = 'data: {{"choices":[{{"delta":{{"content":"{}"}},"finish_reason":{}}}]}}'
    counts = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    last = f"data: {json.dumps({'choices': [], 'usage': counts})}"
    whole = [chunk.format("a", "null"), chunk.format("b", '"length"'), last, "data: [DONE]"]
    assert chaos.read_answer(200, True, whole) == ("answered", ("ab", []), USAGE)
    error = 'data: {"error":{"code":"unavailable"}}'
    assert chaos.read_answer(200, True, [whole[0], error]) == (
        "error",
        ("a", []),
        None,
    )
    for cut in (whole[:1], [*whole, error]):
        with pytest.raises(AssertionError):
            chaos.read_answer(200, True, cut)


class FakeServer:
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
        """Books with one check, made before any request."""
        server, now = FakeServer(), self.get
        server.rows, server.sums, server.counters = [], dict.fromkeys(self.sums, 0), dict.fromkeys(self.counters, 0)
        where = {"get": server.get}
        books = Books(lambda path, key: where["get"](path, key), "admin", "watch", ("acme",))
        assert books.faults([], counted=True) == []
        books.close([])
        where["get"] = now
        return books


RESULT = chaos.RequestResult(1.0, 1.0, 0.1, "answered", "a", "acme", USAGE)


def test_balanced_books_have_no_fault() -> None:
    books = FakeServer().books()
    assert books.faults([RESULT], counted=True) == []
    assert books.close([RESULT]) == {"requests": 1, "records": 1, "drawn": 7, "computed": 15, "found": 5}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([], "not in the books"),
        ([RECORD, {**RECORD, "place": "2-0"}], "billed 2 times"),
        ([{**RECORD, "output": 8}], "booked as"),
        ([{**RECORD, "tenant": "beta"}], "records of another tenant"),
        ([RECORD, {**RECORD, "again": True}], "without a charge have units"),
        ([RECORD, {**RECORD, "outcome": "failed"}], "without a charge have units"),
        ([RECORD, {**RECORD, "http_id": "b"}], "records of an unknown request"),
        ([{**RECORD, "drawn": 8}], "rose by 7, records have 8 drawn"),
    ],
)
def test_books_that_do_not_balance_have_a_fault(rows: list[dict[str, Any]], fault: str) -> None:
    server = FakeServer()
    server.rows = rows
    assert any(fault in each for each in server.books().faults([RESULT], counted=True))


def test_wrong_sums_and_new_engines_are_faults() -> None:
    server = FakeServer()
    server.sums["requests"] = 2
    assert any("sums of the month" in each for each in server.books().faults([RESULT], counted=True))
    server = FakeServer()
    server.replica = "r2"
    assert any("the engines have changed" in each for each in server.books().faults([RESULT], counted=True))
    assert server.books().faults([RESULT], counted=False) == []


def test_records_lost_with_redis_are_no_fault() -> None:
    server = FakeServer()
    server.rows, server.sums = [], dict.fromkeys(server.sums, 0)
    books = server.books()
    books.on_emptied(RESULT.at + 0.5)
    assert books.faults([RESULT], counted=False) == []
    later = chaos.RequestResult(2.0, 1.0, 0.1, "answered", "b", "acme", USAGE)
    assert any("not in the books" in each for each in books.faults([RESULT, later], counted=False))
