"""The page as a whole: one file, complete, with the figures of its rows; and the numbers behind its plots."""

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_rows import row

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen.report.page import DARK_PAGE, LIGHT_PAGE, render
from holdfast.loadgen.rows import from_json, to_json
from holdfast.loadgen.summary import summarize
from holdfast.loadgen.table import PROGRAMS, REQUESTS
from holdfast.loadgen.timeline import Phase
from holdfast.loadgen.workloads.script import Load
from holdfast.replicas.errors import ConfigError

pytest.importorskip("matplotlib")

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from holdfast.loadgen.report import plots


@pytest.fixture(scope="module")
def content() -> dict:
    """The file of a comparison of two servers, one of which reports no stages and fails in a workload."""
    rows = []
    for server, slower, stages in (("a <1>", 1.0, {"queue": 0.1, "prefill": 0.2, "decode": 0.3}), ("b", 2.5, {})):
        for repetition in range(2):
            for turn in range(3):
                latency = slower * (1 + 0.1 * turn + 0.03 * repetition)
                more = {"turn": turn, "repetition": repetition, "workload": "agents", "calls": 1, **stages}
                rows.append(row(server, 10 * turn, latency, **more))
        rows.append(row(server, 99.0, slower, workload="burst", program="q", failure="cut" if server == "b" else ""))
    servers = [{"name": "a <1>", "url": "http://x", "model": "m", "version": "9"}]
    servers.append({"name": "b", "url": "http://y", "model": "m"})
    told = {"complete": True, "written": "2026-01-01", "command": ["holdfast", "bench", "compare"]}
    told |= {"options": {"seed": 7, "repetitions": 2}, "machine": {"cores": 2}, "servers": servers}
    told |= {"workloads": {"agents": "three <agents>"}, "generator": {"cpu_share": 0.5, "cpu_ms_a_request": 1.25}}
    return json.loads(json.dumps({**told, "rows": to_json(rows)}))


class Page(HTMLParser):
    """Text of table cells, addresses that the page would load, and its pictures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.feed(page)
        self.pictures = [part[: part.index("</svg>") + 6] for part in page.split("<figure>")[1:]]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attributes if name in ("src", "href") or tag == "link"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def page(content: dict) -> Page:
    return Page(render(content))


def test_every_figure_of_the_tables_is_one_of_the_rows(content: dict, page: Page) -> None:
    shown = set(page.texts)
    for summary in summarize(from_json(content["rows"]), 7):
        if summary.workload == "agents":
            cells = [column.of(summary) for column in (*REQUESTS, *PROGRAMS)]
            if summary.agreement is not None:
                cells += [column.over(summary) for column in (*REQUESTS, *PROGRAMS)]
            assert {line for cell in cells for line in cell.split("\n") if line} <= shown
    assert "2.50x" in shown
    assert "1 failed (cut)" in " ".join(shown)


def test_the_page_needs_no_other_file_and_names_are_text(page: Page) -> None:
    assert [address for address in page.loads if not address.startswith("#")] == []
    assert len(page.pictures) == 1 + 3 + 2  # overview, agents, and burst, where every program has one turn
    for picture in page.pictures:
        ElementTree.fromstring(picture)
        assert "currentColor" in picture
        assert plots.INK not in picture
    words = "".join(page.pictures)
    for name in ("queue", "prefill", "decode", "until first token", "failed", "a &lt;1&gt;"):
        assert name in words
    assert {"three <agents>", "http://x, model m, version 9", "http://y, model m"} <= set(page.texts)


def test_a_distribution_over_three_decades_is_labelled_in_plain_numbers(content: dict) -> None:
    rows = [row(latency=10.0**-power) for power in range(4)]
    shown = Page(render({**content, "rows": to_json(rows)}))
    assert "0.01" in shown.texts
    assert not any("math" in text for text in shown.texts)


def test_a_server_without_a_figure_at_any_load_is_left_out_of_its_curves(content: dict) -> None:
    rows = [
        row(server, workload=f"burst {load} at once", swept="burst", load=Load(load, "at once"), **more)
        for server, more in (("whole", {}), ("uncounted", {"output_tokens": 0}), ("failing", {"failure": "http"}))
        for load in (1, 2)
    ]
    assert "burst against load" in render({**content, "rows": to_json(rows)})


def test_a_repetition_that_was_planned_longer_has_no_wall(content: dict) -> None:
    rows = [row(latency=7.25)]
    assert "7.25" in Page(render({**content, "rows": to_json(rows), "planned": {"w": [1]}})).texts
    assert "7.25" not in Page(render({**content, "rows": to_json(rows), "planned": {"w": [2]}})).texts
    with pytest.raises(ConfigError, match="planned"):
        render({**content, "planned": {"w": 2}})


def test_one_server_alone_has_no_ratios(content: dict) -> None:
    alone = {**content, "rows": [each for each in content["rows"] if each["server"] == "b"], "complete": False}
    shown = Page(render(alone))
    assert len(shown.pictures) == 3 + 2
    assert any("interrupted" in text for text in shown.texts)


@pytest.mark.parametrize(
    ("low", "high"), [(0.9, 1.1), (0.3, 3.0), (0.01, 8.0), (1e-3, 500.0), (0.5, 60.0), (1e-5, 1e4)]
)
def test_ticks_of_the_overview_stand_side_by_side(low: float, high: float) -> None:
    """Drawn, and measured: no label touches the next one."""
    with rc_context(plots.STYLE):
        figure = Figure((plots.WIDTH, 2), layout="constrained")
        panels = figure.subplots(1, len(plots.RATIOS), sharex=True, sharey=True)
        for axes in panels:
            axes.plot([low, high], [0, 1])
        panels[0].set_yticks([0, 1], ["concurrency-of-many", "burst"])
        plots.ratio_axis(panels[0])
        FigureCanvasAgg(figure).draw()
        for axes in panels:
            boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
            assert len(boxes) >= 2
            assert all(left.x1 + 4 < right.x0 for left, right in pairwise(boxes))
        assert "1×" in [label.get_text() for label in panels[0].get_xticklabels()]


def test_plots_count_turns_from_one_and_leave_out_failures() -> None:
    rows = [row(latency=latency, turn=turn) for turn in (0, 1) for latency in (1.0, 2.0, 3.0)]
    rows += [row(latency=99.0, turn=1, failure="timeout"), row(first_token=None, turn=2)]
    assert plots.by_turn(rows, lambda row: row.latency) == {
        1: pytest.approx((1.2, 2.0, 2.8)), 2: pytest.approx((1.2, 2.0, 2.8)), 3: (1.0, 1.0, 1.0)
    }  # fmt: skip
    assert list(plots.by_turn(rows, lambda row: row.ttft)) == [1, 2]
    assert plots.cumulative(rows[:4], lambda row: row.latency) == ([1.0, 1.0, 2.0, 3.0], [0.25, 0.5, 0.75, 1.0])


def test_a_chart_begins_at_its_repetition_and_leaves_out_the_time_between_waves() -> None:
    rows = [row(started=50.0, program="p"), row(started=80.0, program="q", wave=1, turn=1)]
    (name, spans), (later, others) = plots.lanes(rows, 9)
    assert [(span.phase, span.begin, span.end) for span in spans] == [(Phase.WAIT, 0.0, 0.5), (Phase.DECODE, 0.5, 1.0)]
    assert (name, later, others[0].begin) == ("p", "q", 1.0)
    assert [program for program, _ in plots.lanes(rows, 1)] == ["p"]


@pytest.mark.parametrize("ground", [LIGHT_PAGE, DARK_PAGE])
def test_every_colour_stands_out_from_either_page(ground: str) -> None:
    """At least 3, the least contrast of a graphical object (WCAG 2.2, success criterion 1.4.11)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in (*plots.SERVERS, *plots.PHASES.values()):
        dark, light = sorted((luminance(colour), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 3.0, colour
    assert set(plots.PHASES) == set(Phase)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"rows": []}', '{"rows": [{"server": "a"}]}'])
@pytest.mark.parametrize("command", ["report", "trace"])
def test_another_file_is_refused_without_a_traceback(tmp_path: Path, capsys, command: str, text: str) -> None:
    source, target = tmp_path / "run.json", tmp_path / "made"
    source.write_text(text)
    assert holdfast(["bench", command, str(source), str(target)]) != 0
    assert "Traceback" not in capsys.readouterr().err
    assert not target.exists()


def test_the_commands_write_a_timeline_and_a_page(tmp_path: Path, content: dict) -> None:
    source = tmp_path / "run.json"
    source.write_text(json.dumps({"rows": to_json([row(), row(started=1.0, turn=1)])}))
    assert holdfast(["bench", "trace", str(source), str(tmp_path / "new" / "trace.json")]) == 0
    names = [event["name"] for event in json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]]
    assert names.count("decode") == 2
    assert holdfast(["bench", "report", str(source), str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
