"""The benchmark of attention on a CPU, over a small store. What it measures is not judged here."""

import json

import pytest

from holdfast.kernels import attention_c
from holdfast.loadgen.bench import attention_cpu


def test_it_prints_and_writes_each_case_in_every_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention_cpu, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(attention_cpu, "_MATRIX", 64)
    out = tmp_path / "timings.json"
    size = ["--layers", "2", "--heads", "2", "--kv-heads", "1", "--dim", "16", "--repeat", "1"]
    try:
        assert attention_cpu.main([*size, "--only", "1 x 4 at", "--json", str(out)]) == 0
        (case,) = (case for case in attention_cpu.CASES if case.name == "1 x 4 at 3000")
        written = json.loads(out.read_text())
        ways = dict.fromkeys((attention_c.available()[0], "torch"))
        assert [(one["case"], one["way"]) for one in written] == [(case.name, way) for way in ways]
    finally:
        attention_c.use()
    said = capsys.readouterr().out
    assert "GB/s" in said
    for one in written:
        # Both shares are of the same time: 4 * heads products for each position against 2 * kv_heads values of 2 bytes.
        assert one["bandwidth"] > 0 < one["rate"]
        assert f"{one['milliseconds']:.2f}" in said
    assert written[0]["bandwidth"] / written[0]["rate"] == pytest.approx(
        written[-1]["bandwidth"] / written[-1]["rate"], rel=1e-6
    )
