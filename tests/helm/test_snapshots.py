"""A change of what the chart renders is seen in a diff."""

from pathlib import Path
from types import ModuleType

import pytest
from helm_chart import load

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def snapshots() -> ModuleType:
    return load(HERE / "snapshots.py")


@pytest.mark.parametrize("name", ["default", "cpu", "one-gpu", "production"])
def test_the_rendered_objects_are_the_reviewed_ones(snapshots: ModuleType, name: str) -> None:
    assert name in snapshots.NAMES
    assert snapshots.snapshot(name) == (HERE / "snapshots" / f"{name}.yaml").read_text(), "`make chart`, and review"


def test_there_is_no_snapshot_of_nothing(snapshots: ModuleType) -> None:
    assert {path.stem for path in (HERE / "snapshots").iterdir()} == set(snapshots.NAMES)
