"""The benchmarks of kernels on a CPU, over small sizes: every case has a row, and no work is forgotten."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels import native
from holdfast.kernels.linear_state import LinearShape
from holdfast.loadgen.bench import cpu
from holdfast.loadgen.bench.__main__ import main
from holdfast.loadgen.bench.cpu import CASES, ExpertShape
from holdfast.loadgen.inflate.shapes import SHAPES
from holdfast.replicas.kv.tensors import CellShape


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a benchmark over small sizes; its rows."""
    small = {"READ_BYTES": 1 << 20, "MATRIX": 64, "MODEL": CellShape(2, 1, 16), "EXPERT_BYTES": 5 * 64 * 32 * 6}
    small |= {"STATE_CASES": ((2, 1), (1, 8)), "STATES_BYTES": 1 << 14}
    small |= {"EXPERT_SHAPES": {"tiny": ExpertShape(64, 32, 8, 2, "silu"), "other": ExpertShape(8, 8, 4, 2, "silu")}}
    small |= {"LINEAR_SHAPES": {"tiny": LinearShape(1, 2, 16, 16, 4), "other": LinearShape(1, 1, 16, 16, 4)}}
    for name, value in small.items():
        monkeypatch.setattr(cpu, name, value)
    out = tmp_path / "rows.json"

    def command(text: str):
        assert main([*text.split(), "--json", str(out)]) == 0
        return json.loads(out.read_text())

    return command


def test_attention_is_a_share_of_the_machines_limits_in_every_way(run, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "CASES", (cpu.Case(1, 4, 300),))
    fastest = native.limit("auto")
    whole, int8, torchs = run(f"attention_cpu --repeat 1 --ways {fastest},{fastest}/int8,torch")
    assert "GB/s" in capsys.readouterr().out
    assert [row["way"] for row in (whole, int8, torchs)] == [fastest, f"{fastest}/int8", "torch"]
    # Both shares are of the same time. In int8 16 bytes and 4 of a scale stand for 16 numbers of 2.
    for row, read in ((torchs, 1.0), (int8, 20 / 32)):
        expected = whole["bandwidth"] / whole["rate"] * read
        assert row["bandwidth"] / row["rate"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_experts_are_beside_reading_them_and_a_dense_layer(run, capsys, dtype):
    (row,) = run(f"experts_cpu --only tiny --repeat 1 --dtype {dtype}")
    assert (row["shape"], row["experts"]) == ("tiny", 5)
    assert min(row[name] for name in ("token", "read", "tokens", "dense")) > 0
    assert f"{row['token']:9.2f} {row['read']:9.2f} {row['over_read']:9.2f}" in capsys.readouterr().out


def test_linear_states_are_beside_torch(run):
    decode, prompt = run("linear_state_cpu --only tiny --repeat 1")
    assert (decode["case"], prompt["case"]) == ("2 x 1", "1 x 8")
    assert decode["bandwidth"] > 0 < decode["torch_milliseconds"]
    assert "bandwidth" not in prompt


def test_a_layer_costs_something_at_any_number_of_rows(run):
    rows = run("dispatch --repeat 5")
    assert [row["rows"] for row in rows] == [1, 8]
    assert all(row["layer_ms"] > 0 for row in rows)


def test_the_sharing_of_a_shapes_work_is_printed(run):
    rows = {row["work"]: row for row in run("sharing --shape qwen3-0.6b")}
    assert (rows["attention's output"]["2"], rows["attention's output"]["64"]) == (1.0, 0.25)
    assert set(rows) >= {case.name for case in CASES}


@given(tasks=st.lists(st.floats(1, 100), min_size=1, max_size=200), threads=st.integers(1, 64))
def test_threads_that_draw_tasks_end_together_but_for_the_longest(tasks, threads):
    share = cpu.shared(tasks, threads)
    assert share == pytest.approx(1) if threads == 1 else 1 / threads - 1e-9 <= share <= 1 + 1e-9
    assert sum(tasks) / threads / share <= sum(tasks) / threads + max(tasks) + 1e-6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tasks_of_attention_are_all_of_its_work(case):
    shape = SHAPES["llama-3.1-8b"]
    blocks = -(-case.tokens // (128 // shape.group))
    least = case.sequences * shape.kv_heads * case.cached * (16 * blocks + case.tokens * shape.group)
    for threads in (1, 2, 16, 64):
        assert least < sum(cpu.attention_tasks(shape, case, threads)) < 1.2 * least
