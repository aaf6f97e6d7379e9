"""The command over Pocket itself: its figures add up, and its ideal is not above what was measured by much."""

import json

import pytest

from holdfast.loadgen.bench import attention_cpu, efficiency


def test_the_times_of_a_turn_add_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention_cpu, "_READ_BYTES", 1 << 22)
    monkeypatch.setattr(attention_cpu, "_MATRIX", 128)
    out = tmp_path / "efficiency.json"
    arguments = ["--model", "pocket", "--dtype", "float32", "--threads", "1", "--turns", "2", "--programs", "1", "2"]
    assert efficiency.main([*arguments, "--tokens", "2000", "--each", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["2 turns, 1 at once", "2 turns, 2 at once"]
    for figures in found.values():
        parts = sum(figures[name] for name in ("ideal_s", *efficiency._PARTS))
        assert parts == pytest.approx(figures["wall_s"])
        assert figures["efficiency"] == pytest.approx(figures["ideal_s"] / figures["wall_s"])
        assert figures["turns"] == 2
        assert figures["as_recorded"] > 0
        assert sum(turn["wall_s"] for turn in figures["of_turns"]) == pytest.approx(figures["wall_s"])
        assert all(turn["busy"] > 0 for turn in figures["of_turns"])
    told = capsys.readouterr().out
    assert told.count("at once") == 2
    assert told.count("  turn ") == 4
