"""The benchmark of experts on a CPU, over a small layer. What it measures is not judged here."""

import json

import pytest

from holdfast.loadgen.bench import experts_cpu
from holdfast.loadgen.bench.experts_cpu import Shape


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_it_prints_and_writes_each_shape(dtype, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        experts_cpu, "SHAPES", {"tiny": Shape(64, 32, 8, 2, "silu"), "other": Shape(8, 8, 4, 2, "silu")}
    )
    monkeypatch.setattr(experts_cpu, "_WEIGHTS", 5 * 64 * 32 * 6)
    out = tmp_path / "timings.json"
    assert experts_cpu.main(["--only", "tiny", "--repeat", "1", "--dtype", dtype, "--json", str(out)]) == 0
    (one,) = json.loads(out.read_text())
    assert (one["shape"], one["experts"]) == ("tiny", 5)
    assert min(one["token"], one["read"], one["tokens"], one["dense"]) > 0
    assert f"{one['token']:9.2f} {one['read']:9.2f} {one['over_read']:9.2f}" in capsys.readouterr().out
