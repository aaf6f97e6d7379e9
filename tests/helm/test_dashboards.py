"""Dashboards against the metrics there are and their files, and as a person sees them: where panels lie, legends."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helm.build.dashboards import BOARDS
from helm.build.dashboards.board import WIDTH, Board, Kind, Panel
from holdfast.replicas import metrics as replica
from holdfast.router import metric_list as router

FOLDER = Path(__file__).parents[2] / "helm" / "holdfast" / "files" / "dashboards"
METRICS = {each.name: each for each in replica.ALL} | {each.name: each for each in router.ALL}
PANELS = [(board, panel) for board in BOARDS for row in board.rows for panel in row.panels]
EACH_PANEL = pytest.mark.parametrize(("board", "panel"), PANELS, ids=[f"{b.name}: {p.title}" for b, p in PANELS])


def document(board: Board) -> dict[str, Any]:
    return json.loads((FOLDER / f"{board.name}.json").read_text())  # type: ignore[no-any-return]


def test_the_files_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from helm.build.dashboards.grafana import document as made

    there = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert there == {board.name: made(board) for board in BOARDS}, "run `make chart`"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_grafanas_schema_reads_them_and_loses_nothing(board: Board) -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    read = models.Dashboard.from_json(document(board))
    assert json.loads(json.dumps(read, cls=JSONEncoder)) == document(board)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_fill_rows_and_lie_over_no_other(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    panels = document(board)["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= WIDTH
        taken |= cells
    assert len(taken) == WIDTH * (max(y for _, y in taken) + 1), "and leave no hole"
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert all(one["gridPos"]["y"] <= two["gridPos"]["y"] for one, two in pairwise(panels))


@EACH_PANEL
def test_a_panel_asks_for_metrics_and_labels_that_exist(board: Board, panel: Panel) -> None:
    for query in panel.queries:
        for name, labels in re.findall(r"(holdfast_\w+)\{([^}]*)\}", query.expression):
            metric = METRICS[re.sub(r"_(bucket|sum|count)$", "", name)]
            owner = {"model", "replica"} if metric in set(replica.ALL) else {"router"}
            known = {"job", *owner, *metric.labels}
            assert set(re.findall(r"(\w+)=~", labels)) <= known, query.expression
            assert set(re.findall(r"\$(\w+)", labels)) <= {each.name for each in board.variables}


@EACH_PANEL
def test_a_panel_can_be_read(board: Board, panel: Panel) -> None:
    assert panel.description.endswith(".")
    assert len(panel.queries) <= 8
    legends = [query.legend for query in panel.queries]
    assert len(set(legends)) == len(legends)
    if panel.kind is Kind.NUMBER:
        assert len(panel.queries) == 1
        return
    for query in panel.queries:
        grouped = re.search(r"by \(([^)]*)\)", query.expression)
        by = set(grouped.group(1).split(", ")) - {"le"} if grouped else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) == by, "a legend tells its lines apart"
        assert query.legend


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, panel in PANELS
        for query in panel.queries
        for name in re.findall(r"holdfast_\w+", query.expression)
    }
    assert METRICS.keys() == shown


def test_boards_are_told_apart_and_link_to_each_other() -> None:
    documents = [document(board) for board in BOARDS]
    assert len({each["uid"] for each in documents}) == len(BOARDS)
    assert all(each["tags"] == ["holdfast"] == each["links"][0]["tags"] for each in documents)
