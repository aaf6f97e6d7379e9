"""`holdfast bench compare` as a whole, against servers in this process."""

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from stub_server import DONE, Answer, Asked, Stub, calling, chunk, stub_server, usage

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import compare
from holdfast.loadgen.compare import descriptions_of, measured_of, plan
from holdfast.loadgen.options import Options, parse_server
from holdfast.loadgen.rows import from_json
from holdfast.loadgen.runner import Runner
from holdfast.loadgen.summary import summarize
from holdfast.loadgen.table import brief
from holdfast.loadgen.traces import mooncake
from holdfast.loadgen.workloads.catalog import WORKLOADS
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

SMALL = Sizes(webapp_turns=5, programs=3, burst=3, bursts=2)


def posts(stub: Stub) -> list[bytes]:
    """The bodies that were sent, in their order."""
    return [asked.content for asked in stub.asked if asked.method == "POST"]


def run(tmp_path: Path, *answering: Callable[[Asked], Answer], **options) -> tuple[int, dict, list[Stub]]:
    with ExitStack() as stack:
        stubs = [stack.enter_context(stub_server(one)) for one in answering]
        servers = tuple((f"s{number}", stub.url) for number, stub in enumerate(stubs))
        path = tmp_path / "run.json"
        wanted = {"sizes": SMALL, "repetitions": 1, "warm_up": 0, "pause_s": 0.0, "json_file": path, **options}
        status = compare.main(Options(servers, **wanted))
    return status, json.loads(path.read_text()), stubs


def test_two_runs_of_a_seed_send_the_same_bytes_and_another_seed_other_ones(tmp_path: Path) -> None:
    sent = []
    for seed in (0, 0, 1):
        _, _, (stub,) = run(tmp_path, calling, workloads=("bugfix", "webapp", "repeats"), seed=seed, repetitions=2)
        sent.append(posts(stub))
    assert sent[0] == sent[1]
    assert not set(sent[0]) & set(sent[2])
    novel = sent[0][: -4 * 15]
    assert len(set(novel)) == len(novel)
    repeated = sent[0][-4 * 15 :]
    assert repeated[:15] == repeated[15:30]
    assert not set(repeated[:15]) & set(repeated[30:])


def test_servers_take_turns_and_the_one_that_begins_changes(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(name: str, asked: Asked) -> Answer:
        if asked.method == "POST":
            order.append(name)
        return calling(asked)

    servers = (partial(noting, "a"), partial(noting, "b"))
    run(tmp_path, *servers, workloads=("bugfix",))
    assert order == ["a", "b", "b", "a"] * 3
    order.clear()
    run(tmp_path, *servers, workloads=("burst",))
    assert order == ["a"] * 3 + ["b"] * 6 + ["a"] * 3


def test_a_server_begins_a_pause_after_another_one(tmp_path: Path) -> None:
    _, content, _ = run(tmp_path, calling, calling, workloads=("bugfix",), pause_s=0.1)
    rows = sorted(content["rows"], key=lambda row: row["started"])
    gaps = [b["started"] - a["ended"] for a, b in pairwise(rows) if a["server"] != b["server"]]
    assert len(gaps) == 6
    assert min(gaps) >= 0.1


def test_every_printed_figure_comes_from_the_rows_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, content, _ = run(tmp_path, calling, calling, repetitions=2, workloads=("bugfix", "burst"))
    assert (status, content["complete"], content["options"]["seed"]) == (0, True, 0)
    summaries = summarize(from_json(content["rows"]), 0)
    assert [summary.workload for summary in summaries[::2]] == list(content["workloads"])
    assert content["summaries"] == json.loads(json.dumps([asdict(summary) for summary in summaries]))
    printed = capsys.readouterr().out
    for summary in summaries:
        assert brief(summary.figures["latency p50"].value * 1e3) in printed
        assert summary.agreement is None or summary.agreement.same_answer == summary.agreement.asked
    assert "closed loop" in printed
    assert {row["failure"] for row in content["rows"]} == {""}


def test_histories_differ_where_servers_do_unless_they_are_forced(tmp_path: Path) -> None:
    def mute(asked: Asked) -> Answer:
        said = chunk({"content": "I cannot."}) + usage(9, 0, 3) + DONE
        return Answer.of(said) if asked.method == "POST" else calling(asked)

    same = {}
    for forced in (False, True):
        _, content, stubs = run(tmp_path, calling, mute, workloads=("bugfix",), forced=forced)
        agreement = content["summaries"][1]["agreement"]
        same[forced] = agreement["same_prompt"]
        assert (agreement["asked"], agreement["same_answer"]) == (6, 0)
        assert (posts(stubs[0]) == posts(stubs[1])) == forced
    assert same == {False: 1, True: 6}


def test_a_server_that_fails_in_every_way_is_counted_and_the_run_goes_on(tmp_path: Path, capsys) -> None:
    ways = [
        Answer.of(b"{}", 500),
        Answer(((0.0, chunk({"content": "hel"})),), cut=True),
        Answer.of(b"data: {oops\n\n"),
        Answer(hang=True),
        Answer.of(b'data: {"error": {"message": "no"}}\n\n'),
    ]

    def refusing(asked: Asked) -> Answer:
        return Answer.of(b"{}", 500) if asked.method == "POST" else calling(asked)

    def failing(asked: Asked) -> Answer:
        return ways.pop() if ways and asked.method == "POST" else calling(asked)

    status, content, _ = run(tmp_path, calling, refusing, workloads=("bugfix",))
    assert (status, content["complete"]) == (1, True), "a server answered nothing"
    status, content, _ = run(tmp_path, calling, failing, workloads=("bugfix",), timeout_s=3.0)
    good, bad = content["summaries"]
    assert status == 0
    assert good["failures"] == {}
    assert bad["failures"] == {"http": 1, "cut": 1, "malformed": 1, "timeout": 1, "reported": 1}
    assert bad["requests"] == good["requests"] == 6
    assert bad["ratios"]["wall"] is None
    assert "FAILED: bugfix on s1" in capsys.readouterr().out


def test_interrupting_writes_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def interrupting(asked: Asked) -> Answer:
        if asked.method == "POST" and len(asked.body["messages"]) > 6:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return calling(asked)

    status, content, _ = run(tmp_path, interrupting, workloads=("bugfix",), repetitions=3)
    assert (status, content["complete"]) == (130, False)
    assert 2 <= len(content["rows"]) < 18
    assert "INTERRUPTED" in capsys.readouterr().out
    (summary,) = content["summaries"]
    figures = summary["figures"]
    assert (summary["programs"], figures["wall"], figures["latency p50"] is None) == (0, None, False)
    assert content["planned"] == {"bugfix": [6, 6, 6]}


def test_what_was_measured_is_written_when_an_error_ends_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    keep, kept = Runner.keep, []

    def breaking(*given) -> None:
        if len(kept) == 3:
            raise LookupError("broken")
        kept.append(keep(*given))

    monkeypatch.setattr(Runner, "keep", breaking)
    with pytest.raises(LookupError, match="broken"):
        run(tmp_path, calling, workloads=("bugfix",), record=tmp_path / "trace.jsonl")
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["complete"], len(content["rows"])) == (False, 3)
    assert len(mooncake.read(tmp_path / "trace.jsonl").programs[0].turns) == 3
    assert "INTERRUPTED" in capsys.readouterr().out


@pytest.mark.parametrize("failing", ["summarize", "write_report"])
def test_nothing_that_fails_after_the_run_loses_its_rows(tmp_path: Path, monkeypatch, failing: str) -> None:
    monkeypatch.setattr(compare, failing, Mock(side_effect=LookupError("broken")))
    monkeypatch.setattr(compare, "check_plotting", lambda: None)
    more = {"record": tmp_path / "trace.jsonl", "html_file": tmp_path / "run.html"}
    with pytest.raises(LookupError, match="broken"):
        run(tmp_path, calling, workloads=("bugfix",), **more)
    content = json.loads((tmp_path / "run.json").read_text())
    assert (content["complete"], len(content["rows"])) == (True, 6)


def test_each_repetition_is_whole_with_what_was_planned_for_it() -> None:
    parts = plan(Options((("a", "http://h"),), workloads=("swe", "tenants", "repeats"), sizes=Sizes(jobs=3)))
    told = measured_of(parts)
    assert len(set(told["swe"])) > 1
    assert told["swe"] == [part.requests for part in parts if part.workload == "swe"]
    assert (told["tenants noisy"], told["tenants quiet"]) == ([3 * 8 * 6] * 3, [3 * 3 * 6] * 3)
    assert told["repeats"] == [15] * 3
    assert "warm-up" not in told
    about = descriptions_of(parts)["swe"]  # what was drawn, of every repetition that differs
    assert about.count("3 programs") == 3
    assert "; then 3 programs" in about


def test_a_schedule_is_kept_while_the_server_is_slow_and_the_delay_is_the_servers(tmp_path: Path) -> None:
    jobs = 64
    all_there = threading.Barrier(jobs)

    def slow(asked: Asked) -> Answer:
        if asked.method == "POST" and len(asked.body["messages"]) == 2:
            all_there.wait(60)  # a generator that waited for answers would never send the last
        return calling(asked)

    _, content, _ = run(tmp_path, slow, workloads=("arrivals",), sizes=Sizes(jobs=jobs, rate=600.0))
    rows = from_json(content["rows"])
    first = [row for row in rows if row.turn == 0]
    assert len(first) == jobs
    assert all(row.ok and row.started >= row.due for row in first)
    assert all(row.latency == row.ended - row.due for row in first)
    assert min(row.ended for row in first) > max(row.due for row in first)
    assert all(row.due is None for row in rows if row.turn > 0)


def test_a_sweep_sends_the_same_programs_at_every_load_and_its_rows_tell_the_load(tmp_path: Path) -> None:
    status, content, (stub,) = run(
        tmp_path,
        calling,
        workloads=("concurrency", "arrivals", "bugfix"),
        sizes=Sizes(jobs=2),
        rates=(20.0, 40.0),
        concurrencies=(1, 3),
        record=tmp_path / "trace.jsonl",
    )
    rows = from_json(content["rows"])
    assert status == 0
    sent_to = Counter((row.workload, row.repetition) for row in rows)
    assert {name: [sent_to[name, 0]] for name, _ in sent_to} == content["planned"]
    assert {row.turns for row in rows} == {6}
    assert all(summary["figures"]["wall"] for summary in content["summaries"])
    told = {(row.workload, row.swept, row.load and row.load.value, row.load and row.load.unit) for row in rows}
    assert told == {
        ("concurrency 1 at once", "concurrency", 1, "at once"),
        ("concurrency 3 at once", "concurrency", 3, "at once"),
        ("arrivals 20 a second", "arrivals", 20.0, "a second"),
        ("arrivals 40 a second", "arrivals", 40.0, "a second"),
        ("bugfix", "", None, None),
    }
    recorded = mooncake.read(tmp_path / "trace.jsonl").programs
    assert len(recorded) == len({(row.workload, row.program) for row in rows})
    assert list(content["workloads"]) == [each["workload"] for each in content["summaries"]]
    first = {
        load: sorted(row.due for row in rows if row.workload == f"arrivals {load} a second" and row.turn == 0)
        for load in (20, 40)
    }
    gaps = [due[1] - due[0] for due in first.values()]
    assert gaps[0] == pytest.approx(2 * gaps[1], abs=1e-5)
    assert len(set(posts(stub))) == len(posts(stub))


def test_a_page_is_written_beside_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "run.html"
    _, content, _ = run(tmp_path, calling, workloads=("concurrency",), concurrencies=(1, 2), html_file=page)
    assert content["options"]["html_file"] == str(page)
    text = page.read_text()
    assert "concurrency against load" in text
    assert "concurrency 2 at once" in text
    assert holdfast(["bench", "report", str(tmp_path / "run.json"), str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == text


def test_the_warm_up_is_not_measured_and_cached_first_prompts_are_reported(tmp_path: Path, capsys) -> None:
    def seen_before(asked: Asked) -> Answer:
        said = Answer.of(chunk({"content": "x"}) + usage(90, 80, 3) + DONE)
        return said if asked.method == "POST" else calling(asked)

    _, content, (stub,) = run(tmp_path, seen_before, workloads=("bugfix",), warm_up=2)
    assert len(content["rows"]) == 6
    assert len(posts(stub)) == 18
    assert "use another --seed" in capsys.readouterr().out


def test_what_cannot_be_asked_for_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    assert parse_server("a=http://h:1/v1/") == ("a", "http://h:1")
    for wrong in ("http://h:1", "=http://h", "a=h:1"):
        with pytest.raises(ConfigError, match="NAME=URL"):
            parse_server(wrong)
    one = (("a", "http://h"),)
    for message, options in (
        ("at least one --server", {"servers": ()}),
        ("same name", {"servers": one * 2}),
        ("webapp", {"workloads": ("webap",)}),
        ("repetitions must", {"repetitions": 0}),
        ("--rates goes with --workload arrivals, swe", {"rates": (1.0,)}),
        ("--concurrencies goes with", {"workloads": ("bugfix",), "concurrencies": (1,)}),
        ("more than 0", {"concurrencies": (1, 0)}),
        ("a number more than 0", {"workloads": ("swe",), "rates": (float("nan"),)}),
        ("rates has 2 twice", {"workloads": ("swe",), "rates": (2.0, 1.0, 2.0)}),
        ("concurrencies has 4 twice", {"concurrencies": (4, 4)}),
        ("workload has bugfix twice", {"workloads": ("bugfix", "bugfix")}),
        ("seed must", {"seed": -1}),
        ("max-tokens must", {"max_tokens": -3}),
        ("warm-up must", {"warm_up": -2}),
        ("timeout must", {"timeout_s": 0.0}),
        ("pause must", {"pause_s": float("inf")}),
    ):
        with pytest.raises(ConfigError, match=message):
            Options(**{"servers": one} | options)
    for workloads, known in ((("tenants",), "noisy, quiet-0, quiet-1, quiet-2"), (("bugfix",), "none")):
        with pytest.raises(ConfigError, match=f"no tenant 'loud' is sent; known: {known}"):
            compare.main(Options(one, workloads, tenant_keys=(("loud", "key"),)))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        compare.main(Options(one, ("bugfix",), json_file=tmp_path / "file" / "out.json"))


def test_the_help_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        holdfast(["bench", "compare", "--help"])
    named = capsys.readouterr().out.rpartition("  --workload WORKLOAD")[2].partition("  --forced")[0]
    assert {*WORKLOADS} <= set(re.findall(r"\w+", named))


def test_the_command_takes_it_all(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    key, path = tmp_path / "key", tmp_path / "out.json"
    key.write_text("secret\n")
    with stub_server(calling) as stub:
        words = f"bench compare --server a={stub.url}/v1 --workload bugfix --repetitions 1 --json {path} --seed 3"
        assert holdfast([*words.split(), "--api-key-file", str(key)]) == 0
    assert {asked.headers["authorization"] for asked in stub.asked} == {"Bearer secret"}
    assert "secret" not in path.read_text()
    assert holdfast(["bench", "compare", "--server", "a=http://127.0.0.1:1", "--workload", "bugfix"]) == 2
    assert "127.0.0.1:1/v1/models" in capsys.readouterr().err
    for wrong in ("--rates 1,x", "--concurrencies 1.5", "--concurrencies inf", "--concurrencies nan"):
        with pytest.raises(SystemExit):
            holdfast(["bench", "compare", *wrong.split()])
        assert "numbers" in capsys.readouterr().err
