"""The schemas in `crds/` are what the published definitions say."""

from pathlib import Path

import pytest
from helm_chart import ROOT, load
from kubernetes_schemas import CRDS

HERE = Path(__file__).parent
PUBLISHED = ROOT.parent / "shared" / "crds"


def test_every_kind_has_a_schema() -> None:
    kinds = set(load(HERE / "trim_crds.py").KINDS.values())
    assert kinds == {path.stem for path in CRDS.glob("*.json")}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published definitions are not part of the repository")
def test_they_are_current() -> None:
    script = load(HERE / "trim_crds.py")
    for source, kind in script.KINDS.items():
        assert script.schema_of(PUBLISHED / source) == (CRDS / f"{kind}.json").read_text(), kind


def test_repeated_parts_are_written_once_and_mean_the_same() -> None:
    script = load(HERE / "trim_crds.py")
    part = {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(20)}}
    made = script.shared({"type": "object", "properties": {"a": part, "b": part, "c": {"type": "string"}}})
    (name,) = made["definitions"]
    assert made["properties"]["a"] == made["properties"]["b"] == {"$ref": f"#/definitions/{name}"}
    assert made["definitions"][name] == part
    assert made["properties"]["c"] == {"type": "string"}
