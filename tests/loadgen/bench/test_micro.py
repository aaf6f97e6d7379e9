"""Costs around the model: figures come out, bars count, and questions are split as they should be."""

import json

import pytest

from holdfast.loadgen.bench import micro
from holdfast.loadgen.bench.__main__ import BENCHMARKS, main
from holdfast.loadgen.bench.harness import FIGURES, Benchmark, figure
from holdfast.replicas.model import decoder


def test_a_bar_that_is_missed_fails_the_command_and_every_row_is_written(tmp_path, capsys, monkeypatch):
    rows = [figure("free", 5.0, "us"), figure("met", 1.0, "ms", 2.0), figure("missed", 3.0, "ms", 2.0)]
    monkeypatch.setitem(BENCHMARKS, "some", Benchmark("About.", lambda options: iter(rows), FIGURES))
    out = tmp_path / "rows.json"
    assert main(["some", "--json", str(out)]) == 1
    assert json.loads(out.read_text()) == rows
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["name", "free", "met", "missed"]
    rows.pop()
    assert main(["some"]) == 0
    assert main(["some", "--json", str(tmp_path / "none" / "x")]) == 2
    assert main(["magic"]) == main([]) == 2
    assert "there are ablation, attention_cpu" in capsys.readouterr().err


def test_the_pieces_are_measured(monkeypatch):
    for name, value in {"NODES": 4000, "_CROWDS": ((20, 0), (20, 3)), "_STEPS": 5, "_WARM_UP": 2}.items():
        monkeypatch.setattr(micro, name, value)
    rows = [row for part in (micro.tree, micro.scheduling, micro.retention, micro.masks) for row in part()]
    assert len(rows) >= 3 + 4 + 9
    assert all(row["value"] > 0 for row in rows)


def test_the_hosts_part_of_a_step_is_measured_while_drafts_come_true():
    assert micro.host_ms(rows=3, steps=5) > 0


def test_the_cost_of_a_question_is_split_and_compared(monkeypatch):
    for name, value in {"ANSWER": 4, "_FIRST": 0}.items():
        monkeypatch.setattr(micro, name, value)
    attend = vars(decoder)["paged_attention"]
    rows = {row["name"].strip(): row for row in micro.questions((64, 512), repeat=1)}
    short, long = (rows[f"a question at {n} tokens, reading KV apart"]["value"] for n in (64, 512))
    assert rows["512 over 64, reading KV apart"]["value"] == pytest.approx(long / short)
    assert rows["reading KV"]["value"] > 0
    assert rows["512 over 64, all"]["bar"] is None  # reading takes as long as there is to read
    assert vars(decoder)["paged_attention"] is attend
