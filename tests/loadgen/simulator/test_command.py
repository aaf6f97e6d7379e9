"""`holdfast simulate`, from its arguments to its files."""

import json
from pathlib import Path

import pytest

from holdfast.cluster.cli import MISUSE, main
from holdfast.loadgen.simulator.comparison import Row, summarize

SMALL = ["simulate", "--programs", "3", "--rates", "0.5", "--workload", "bfcl", "--cells", "40000", "--scale", "0.2"]


def test_the_same_arguments_write_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SMALL, "--policy", "request", "--policy", "continuum", "--seeds", "2", "--host-tier", "both"]
    files = [tmp_path / "one.json", tmp_path / "folder" / "two.json"]
    for file in files:
        assert main([*asked, "--json", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    told = json.loads(files[0].read_text())
    assert len(told["rows"]) == 2 * 2 * 2
    assert {row["programs"] for row in told["rows"]} == {3}
    assert told["options"]["machine"]["cells"] == 40000
    assert "continuum" in capsys.readouterr().out


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = [*SMALL[:3], "--rates", "0.2,0.5", *SMALL[5:], "--policy", "request", "--policy", "plas", "--seeds", "2"]
    assert main([*asked, "--pictures", str(tmp_path)]) == 0
    assert main([*asked, "--rates", "0.5", "--turns-times", "1,2", "--pictures", str(tmp_path)]) == 0
    assert main([*asked, "--rates", "0.5", "--host-tier", "on", "--pictures", str(tmp_path)]) == 0  # one load: bars
    assert {file.name for file in tmp_path.iterdir()} == {f"bfcl-8b-a100{kind}.svg" for kind in ("", "-turns", "-host")}
    assert "currentColor" not in (tmp_path / "bfcl-8b-a100.svg").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--workload", "poetry"],
        ["--profile", "8b-abacus"],
        ["--profile", "38m-cpu", "--host-tier", "on"],
        ["--policy", "whim"],
        ["--rates", "0"],
        ["--seeds", "0"],
        ["--replicas", "0"],
        ["--cells", "100"],
    ],
)
def test_wrong_arguments_are_told(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *wrong]) == MISUSE
    assert capsys.readouterr().err.startswith("holdfast: ")


def test_ratios_are_of_the_same_seeds() -> None:
    def row(policy: str, seed: int, mean_s: float, rate: float) -> Row:
        return Row("case", policy, seed, 1, 1, mean_s, mean_s, mean_s, mean_s, rate, 0.0, 0.0, 0.0, {})

    rows = [row("a", 0, 8.0, 1.0), row("b", 0, 2.0, 2.0), row("a", 1, 4.0, 1.0), row("b", 1, 1.0, 2.0)]
    first, second = summarize(rows)
    assert first.faster is not None
    assert first.faster.value == 1.0
    assert second.faster is not None
    assert second.more is not None
    assert (second.faster.value, second.faster.low, second.faster.high) == (4.0, 4.0, 4.0)
    assert second.more.value == 2.0
    assert first.figures["mean_s"].value == 6.0
