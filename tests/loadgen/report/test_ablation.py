"""The ablation's table is made of what that benchmark writes."""

import json
from dataclasses import asdict
from pathlib import Path

from holdfast.loadgen.bench.ablation import Comparison
from holdfast.loadgen.report.ablation import HEADS, ablation_grid, read_ablation


def test_what_the_ablation_writes_is_what_the_table_reads(tmp_path: Path) -> None:
    comparison = Comparison("drafts", "long", 72, 31.25, 80.0, 45.0, 99.0, 1.44, 1.2, 1.6, 1.24, 1.3, 0.95)
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps([asdict(comparison)]))
    grid = ablation_grid(read_ablation(path))
    assert grid is not None
    ((name, cells),) = grid.rows
    assert name == "drafts"
    told = dict(zip(HEADS, cells, strict=True))
    assert told["ms p50 on"] == ["31.2"]
    assert told["ms p99 off"] == ["99.0"]
    assert told["p50 off/on"] == ["1.44x", "1.20–1.60"]
    assert told["equal"] == ["95%"]
    assert ablation_grid([]) is None
