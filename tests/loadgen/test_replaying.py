"""Runs that are recorded, traces that are replayed and converted, tools that take time: from the command line."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from stub_server import Asked, calling, stub_server

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import compare
from holdfast.loadgen.compare import replayed
from holdfast.loadgen.options import Options, Replay
from holdfast.loadgen.rows import from_json
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError


def bodies(asked: list[Asked]) -> list[dict]:
    return [one.body for one in asked if one.method == "POST"]


def test_a_recorded_run_is_replayed_as_it_was(tmp_path: Path) -> None:
    trace, out = tmp_path / "run.jsonl", tmp_path / "out.json"
    with stub_server(calling) as stub:
        words = f"bench compare --server a={stub.url} --workload bugfix --repetitions 1 --warm-up 0 --record {trace}"
        assert holdfast(words.split()) == 0
        told = bodies(stub.asked)
        for more, fields in (
            ("", {"max_tokens": 128}),
            ("--recorded-answers --forced-lengths", {"max_tokens": 12, "ignore_eos": True}),
        ):
            stub.asked.clear()
            words = f"bench replay {trace} --server a={stub.url} --warm-up 0 --speed 50 --json {out} {more}"
            assert holdfast(words.split()) == 0
            again = bodies(stub.asked)
            assert [body["messages"] for body in again] == [body["messages"] for body in told]
            assert [body["tools"] for body in again] == [body["tools"] for body in told]
            assert all(body.items() >= fields.items() for body in again)
    content = json.loads(out.read_text())
    rows = from_json(content["rows"])
    assert [(row.workload, row.turn) for row in rows] == [("replay", turn) for turn in range(6)]
    assert all(row.ok and row.fits and row.as_scripted and row.due is not None for row in rows)
    assert content["workloads"]["replay"].startswith("1 programs, 6 requests")


def test_a_trace_is_converted_and_what_was_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log, trace = tmp_path / "log.jsonl", tmp_path / "trace.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    log.write_text(json.dumps({"messages": messages}) + "\n")
    words = f"bench trace-convert {log} {trace} --from"
    assert holdfast([*words.split(), "openai"]) == 0
    assert "1 programs, 1 turns, 1 answers" in capsys.readouterr().out
    assert json.loads(trace.read_text())["messages"] == messages[:1]
    assert holdfast([*words.split(), "csv"]) == 2
    assert "mini-swe-agent" in capsys.readouterr().err


def test_what_cannot_be_recorded_or_replayed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one --server"):
        Options((("a", "http://h"), ("b", "http://h")), record=tmp_path / "x")
    with pytest.raises(ConfigError, match="forcing"):
        replayed(Replay(tmp_path / "x", forcing="no"), 0, 1)


def test_tools_take_their_time_from_the_end_of_an_answer_to_the_next_request(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = Sizes(jobs=3, rate=50.0, prompt_tokens=50)
    with stub_server(calling) as stub:
        options = Options((("a", stub.url),), ("bfcl",), 1, sizes=sizes, warm_up=0, json_file=out, seed=92)
        assert compare.main(options) == 0
    rows = {(row.program, row.turn): row for row in from_json(json.loads(out.read_text())["rows"])}
    (part,) = compare.plan(options)
    assert len(rows) == part.requests > 3
    for program in part.round.programs:
        delays = {round(turn.delay_ms or 0.0, 1) for turn in program.turns}
        mine = [row for (name, _), row in sorted(rows.items()) if name == program.id]
        for before, after in pairwise(mine):
            assert round((after.due - before.ended) * 1e3, 1) in delays
            assert after.due <= after.started


def test_each_tenants_programs_are_sent_with_its_key_and_reported_apart(tmp_path: Path) -> None:
    trace, key, out = tmp_path / "run.jsonl", tmp_path / "key", tmp_path / "out.json"
    key.write_text("hf-noisy\n")
    sizes = Sizes(jobs=1, rate=50.0, quiet=1, noise=2)
    with stub_server(calling) as stub:
        keys = (("noisy", "hf-noisy"),)
        options = Options((("a", stub.url),), ("tenants",), 1, sizes=sizes, warm_up=0, record=trace, tenant_keys=keys)
        assert compare.main(options) == 0
        keys = [asked.headers.get("authorization") for asked in stub.asked if asked.method == "POST"]
        assert sorted(keys, key=str) == ["Bearer hf-noisy"] * 12 + [None] * 6
        stub.asked.clear()
        words = f"bench replay {trace} --server a={stub.url} --warm-up 0 --speed 50 --json {out} --tenant-key-file"
        assert holdfast([*words.split(), f"noisy={key}"]) == 0
        keys = [asked.headers.get("authorization") for asked in stub.asked if asked.method == "POST"]
        assert holdfast([*words.split(), f"loud={key}"]) == 2
    assert sorted(keys, key=str) == ["Bearer hf-noisy"] * 12 + [None] * 6
    content = json.loads(out.read_text())
    assert "hf-noisy" not in out.read_text()
    assert content["planned"] == {"replay noisy": [12], "replay quiet": [6]}
    told = {each["workload"]: (each["programs"], each["requests"]) for each in content["summaries"]}
    assert told == {"replay noisy": (2, 12), "replay quiet": (1, 6)}


def log(path: Path, count: int = 1) -> Path:
    """A log of messages: no times, no lengths, no sampling."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}] * 2
    path.write_text("".join(json.dumps({"id": f"talk {n}", "messages": messages}) + "\n" for n in range(count)))
    return path


def test_what_a_trace_does_not_say_is_said_and_what_it_says_is_sent(tmp_path: Path, capsys) -> None:
    hot = tmp_path / "hot.jsonl"
    hot.write_text('{"text_input": "hi", "extra": {"temperature": 0.7, "max_completion_tokens": 5}}\n')
    with stub_server(calling) as stub:
        words = f"--server a={stub.url} --warm-up 0"
        assert holdfast(f"bench replay {log(tmp_path / 'log.jsonl')} --format openai {words}".split()) == 0
        assert holdfast(f"bench replay {hot} {words}".split()) == 0
        first, second, warm = bodies(stub.asked)
    assert [(body["temperature"], body["max_tokens"]) for body in (first, second)] == [(0, 128)] * 2
    assert (warm["temperature"], warm["max_completion_tokens"], "max_tokens" in warm) == (0.7, 5, False)
    assert "temperature 0 and max_tokens 128 where the trace has none; histories are of log.jsonl at 1 times" in (
        capsys.readouterr().out.replace("\n", " ")
    )


def test_lengths_are_forced_where_the_trace_has_them_or_as_asked_for(tmp_path: Path, capsys) -> None:
    with stub_server(calling) as stub:
        words = f"bench replay {log(tmp_path / 'log.jsonl')} --format openai --server a={stub.url} --warm-up 0"
        words += " --forced-lengths"
        assert holdfast(words.split()) == 2
        assert "the trace has no length of the answer" in capsys.readouterr().err
        assert not stub.asked
        assert holdfast(f"{words} --max-tokens 7".split()) == 0
        assert [(body["max_tokens"], body["ignore_eos"]) for body in bodies(stub.asked)] == [(7, True)] * 2


def test_no_repetition_finds_the_one_before_it_cached(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"input_length": 30, "output_length": 5, "hash_ids": [1]}\n')
    with stub_server(calling) as stub:
        for trace, more in ((lengths, ""), (log(tmp_path / "log.jsonl"), "--format openai")):
            stub.asked.clear()
            words = f"bench replay {trace} --server a={stub.url} --warm-up 0 --repetitions 3 {more}"
            assert holdfast(words.split()) == 0
            asked = [one for one in stub.asked if one.method == "POST"]
            firsts = [one.body["messages"][0]["content"] for one in asked if len(one.body["messages"]) == 1]
            assert len(firsts) == len(set(firsts)) == 3
            assert len({one.headers["x-session-id"] for one in asked}) == 3
            for one in asked:  # all turns of a repetition are of one conversation
                assert one.body["messages"][0]["content"] in firsts


def test_programs_without_times_arrive_at_a_rate(tmp_path: Path) -> None:
    trace = log(tmp_path / "log.jsonl", count=3)
    made = [replayed(Replay(trace, "openai", rate=2.0, speed=speed), 0, 2) for speed in (1, 1, 5)]
    moments = [[moment for part in parts for moment in part.round.due] for parts in made]
    assert moments[0] == moments[1] == pytest.approx(moments[2])
    assert len(set(moments[0])) == 6
    assert moments[0][:3] == sorted(moments[0][:3])
    assert "all at once" in replayed(Replay(trace, "openai"), 0, 1)[0].description
    with pytest.raises(ConfigError, match="rate must"):
        replayed(Replay(trace, "openai", rate=float("nan")), 0, 1)
    trace.write_text('{"text_input": "hi", "timestamp": 3}\n')
    with pytest.raises(ConfigError, match="the trace says when"):
        replayed(Replay(trace, rate=1.0), 0, 1)


@pytest.mark.parametrize(
    "wrong",
    ['"messages": [{"role": "user", "content": "\\ud83d"}]', f'"text_input": "a", "extra": {{"seed": {10**30}}}'],
)
def test_what_no_request_can_hold_is_refused_before_anything_is_sent(tmp_path: Path, wrong: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"session_id": "s", {wrong}}}\n')
    with pytest.raises(ConfigError, match="program 's', turn 0: cannot be sent"):
        replayed(Replay(trace), 0, 1)
