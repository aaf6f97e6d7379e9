"""The page as a whole: one file, complete, with the figures of its rows."""

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_rows import row

from holdfast.loadgen.report.page import render, write_report
from holdfast.loadgen.rows import from_json, to_json
from holdfast.loadgen.summary import summarize
from holdfast.loadgen.table import PROGRAMS, REQUESTS
from holdfast.loadgen.workloads.script import Load
from holdfast.replicas.errors import ConfigError

pytest.importorskip("matplotlib")


def comparison() -> dict:
    rows = []
    for server, slower, told in (("a <1>", 1.0, {"queue": 0.1, "prefill": 0.2, "decode": 0.3}), ("b", 2.5, {})):
        for repetition in range(2):
            for turn in range(3):
                latency = slower * (1 + 0.1 * turn + 0.03 * repetition)
                rows.append(
                    row(
                        server, 10 * turn, latency, turn=turn, repetition=repetition, workload="agents", calls=1, **told
                    )
                )
        rows.append(row(server, 99.0, slower, workload="burst", program="q", failure="cut" if server == "b" else ""))
    return {
        "complete": True,
        "written": "2026-01-01",
        "command": ["holdfast", "bench", "compare"],
        "options": {"seed": 7, "repetitions": 2},
        "servers": [
            {"name": "a <1>", "url": "http://x", "model": "m", "version": "9"},
            {"name": "b", "url": "http://y", "model": "m"},
        ],
        "workloads": {"agents": "three <agents>"},
        "generator": {"cpu_share": 0.5, "cpu_ms_a_request": 1.25},
        "machine": {"cores": 2},
        "rows": to_json(rows),
    }


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
def content() -> dict:
    return json.loads(json.dumps(comparison()))


@pytest.fixture(scope="module")
def page(content: dict) -> Page:
    return Page(render(content))


def test_every_figure_of_the_tables_is_one_of_the_rows(content: dict, page: Page) -> None:
    shown = set(page.texts)
    for summary in summarize(from_json(content["rows"]), 7):
        cells = REQUESTS.figures(summary) + PROGRAMS.figures(summary)
        if summary.agreement is not None:
            cells += REQUESTS.ratios(summary) + PROGRAMS.ratios(summary)
        if summary.workload == "agents":
            assert {line for cell in cells for line in cell.split("\n") if line} <= shown
    assert "2.50x" in shown
    assert "1 failed (cut)" in " ".join(shown)


def test_the_page_needs_no_other_file_and_its_pictures_are_whole(page: Page) -> None:
    assert [address for address in page.loads if not address.startswith("#")] == []
    assert len(page.pictures) == 1 + 3 + 2  # overview, agents, and burst, where every program has one turn
    for picture in page.pictures:
        ElementTree.fromstring(picture)
        assert "currentColor" in picture
        assert "#010203" not in picture
    words = "".join(page.pictures)
    for told in ("queue", "prefill", "decode", "until first token", "failed", "a &lt;1&gt;"):
        assert told in words


def test_what_servers_and_workloads_are_called_is_text(page: Page) -> None:
    assert "three <agents>" in page.texts
    assert any("a <1>" in text for text in page.texts)
    assert "http://x, model m, version 9" in page.texts
    assert "http://y, model m" in page.texts


def test_a_distribution_over_three_decades_is_labelled_in_plain_numbers(content: dict) -> None:
    rows = [row(latency=10.0**-power) for power in range(4)]
    shown = Page(render({**content, "rows": to_json(rows)}))
    assert "0.01" in shown.texts
    assert not any("math" in text for text in shown.texts)


@pytest.mark.parametrize("lacking", [{"output_tokens": 0}, {"failure": "http"}])
def test_a_server_without_a_figure_at_any_load_is_left_out_of_its_curves(content: dict, lacking: dict) -> None:
    rows = [
        row(server, workload=f"burst {load} at once", swept="burst", load=Load(load, "at once"), **more)
        for server, more in (("whole", {}), ("lacking", lacking))
        for load in (1, 2)
    ]
    shown = render({**content, "rows": to_json(rows)})
    assert "burst against load" in shown


def test_a_repetition_that_was_planned_longer_has_no_wall(content: dict) -> None:
    rows = [row(latency=7.25)]
    assert "7.25" in Page(render({**content, "rows": to_json(rows), "planned": {"w": [1]}})).texts
    shown = Page(render({**content, "rows": to_json(rows), "planned": {"w": [2]}}))
    assert "7.25" not in shown.texts
    with pytest.raises(ConfigError, match="planned"):
        render({**content, "planned": {"w": 2}})


def test_one_server_alone_has_no_ratios(content: dict, tmp_path: Path) -> None:
    alone = {**content, "rows": [told for told in content["rows"] if told["server"] == "b"], "complete": False}
    write_report(alone, tmp_path / "new" / "page.html")
    shown = Page((tmp_path / "new" / "page.html").read_text())
    assert len(shown.pictures) == 3 + 2
    assert any("interrupted" in text for text in shown.texts)


@pytest.mark.parametrize("wrong", [{}, {"rows": []}, {"rows": [{"server": "a"}]}, [1]])
def test_what_is_no_comparison_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="rows"):
        render(wrong)


@pytest.mark.parametrize(
    ("low", "high"), [(0.9, 1.1), (0.3, 3.0), (0.01, 8.0), (1e-3, 500.0), (0.5, 60.0), (1e-5, 1e4)]
)
def test_ticks_of_the_overview_stand_side_by_side(low: float, high: float) -> None:
    """Drawn, and measured: no label touches the next one."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from holdfast.loadgen.report import plots
    from holdfast.loadgen.report.style import STYLE, WIDTH

    with rc_context(STYLE):
        figure = Figure((WIDTH, 2), layout="constrained")
        panels = figure.subplots(1, len(plots.RATIOS), sharex=True, sharey=True)
        for axes in panels:
            axes.plot([low, high], [0, 1])
        panels[0].set_yticks([0, 1], ["concurrency-of-many", "burst"])
        plots._ratio_axis(panels[0])
        FigureCanvasAgg(figure).draw()
        for axes in panels:
            boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
            assert len(boxes) >= 2
            assert all(left.x1 + 4 < right.x0 for left, right in pairwise(boxes))
        assert "1×" in [label.get_text() for label in panels[0].get_xticklabels()]
