"""The benchmark of attention on a CPU, over a small store. What it measures is not judged here."""

import json

import pytest

from holdfast.kernels import native
from holdfast.loadgen.bench import attention_cpu


def test_it_prints_and_writes_each_case_in_every_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention_cpu, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(attention_cpu, "_MATRIX", 64)
    out = tmp_path / "timings.json"
    size = ["--layers", "2", "--heads", "2", "--kv-heads", "1", "--dim", "16", "--repeat", "1"]
    try:
        ways = list(dict.fromkeys((native.limit("auto"), "torch")))
        (case,) = (case for case in attention_cpu.CASES if case.name == "1 x 4 at 3000")
        options = [*size, "--only", "1 x 4 at", "--json", str(out)]
        assert attention_cpu.main([*options, "--ways", f"{ways[0]},{ways[0]}/int8"]) == 0
        whole, int8 = json.loads(out.read_text())
        assert attention_cpu.main(options) == 0
        written = json.loads(out.read_text())
        assert [(one["case"], one["way"]) for one in written] == [(case.name, way) for way in ways]
    finally:
        native.limit("auto")
    said = capsys.readouterr().out
    assert "GB/s" in said
    for one in written:
        # Both shares are of the same time: 4 * heads products for each position against 2 * kv_heads values of 2 bytes.
        assert one["bandwidth"] > 0 < one["rate"]
        assert f"{one['milliseconds']:.2f}" in said
    # In int8 16 bytes and 4 of a scale stand for 16 numbers of 2.
    for one, other, bytes_read in ((written[0], written[-1], 1.0), (whole, int8, 20 / 32)):
        read = one["bandwidth"] / one["rate"] * bytes_read
        assert other["bandwidth"] / other["rate"] == pytest.approx(read, rel=1e-6)
