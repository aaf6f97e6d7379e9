"""Costs around the model: figures come out, bars count, and questions and prompts are split as they should be."""

import json
from dataclasses import replace

import numpy as np
import pytest

from holdfast.loadgen.bench import micro
from holdfast.loadgen.bench.__main__ import BENCHMARKS, main
from holdfast.loadgen.bench.harness import FIGURES, Benchmark, figure
from holdfast.loadgen.bench.prefill_order import PROFILE, Load, loads, play
from holdfast.loadgen.simulator.policies import engine_config
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
    assert "there are attention_cpu" in capsys.readouterr().err


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


# ---- how prefills share a step ----


def test_a_burst_is_answered_in_order():
    burst = Load("burst", np.full(6, 4096), np.zeros(6), np.full(6, 2))
    first = play(burst, engine_config("default", PROFILE, host=False)).first
    assert list(first) == sorted(first)
    assert first.mean() < 0.8 * first.max()  # the others do not wait for the last


def test_loads_are_the_same_each_time():
    for one, other in zip(loads(), loads(), strict=True):
        assert np.array_equal(one.sizes, other.sizes)
        assert np.all(np.diff(one.came) >= 0)


def test_beside_those_that_decode_prompts_add_no_more_to_a_step_than_step_ms():
    """Once the engine has seen what steps take: here, in the first prompts' chunks."""
    load = Load("replies, then prompts", np.full(12, 6000), np.arange(12) * 2.0, np.full(12, 400))
    config = replace(engine_config("default", PROFILE, host=False), step_tokens=2048)
    free, bounded = (play(load, replace(config, step_ms=budget)) for budget in (0, 40))
    plain = np.median(bounded.gaps)
    assert np.percentile(free.gaps, 99) > plain + 0.1
    assert np.percentile(bounded.gaps, 99) < plain + 0.05
    assert bounded.wall < 1.02 * free.wall
