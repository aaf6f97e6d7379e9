"""The benchmark of linear layers on a CPU, over small states. What it measures is not judged here."""

import json

from holdfast.kernels.linear_state import LinearShape
from holdfast.loadgen.bench import linear_state_cpu


def test_it_prints_and_writes_each_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        linear_state_cpu, "SHAPES", {"tiny": LinearShape(1, 2, 16, 16, 4), "other": LinearShape(1, 1, 16, 16, 4)}
    )
    monkeypatch.setattr(linear_state_cpu, "CASES", ((2, 1), (1, 8)))
    monkeypatch.setattr(linear_state_cpu, "_STATES_BYTES", 1 << 14)
    out = tmp_path / "timings.json"
    assert linear_state_cpu.main(["--only", "tiny", "--repeat", "1", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [(one["shape"], one["case"]) for one in written] == [("tiny", "2 x 1"), ("tiny", "1 x 8")]
    said = capsys.readouterr().out
    for one in written:
        assert f"{one['milliseconds']:.3f} {one['torch_milliseconds']:18.3f}" in said
    assert written[0]["bandwidth"] > 0
