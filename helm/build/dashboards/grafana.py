"""Grafana's JSON of a dashboard, by Grafana's own builders. The one file that needs `grafana-foundation-sdk`."""

import json
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as shapes
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from helm.build.dashboards.board import Board, Kind, Panel, Variable

TAG = "holdfast"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

AnyPanel: TypeAlias = timeseries.Panel | stat.Panel


def document(board: Board) -> str:
    """The JSON text of one dashboard."""
    return json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(board: Board) -> grafana.Dashboard:
    made = (
        grafana.Dashboard(board.title)
        .uid(f"holdfast-{board.name}")
        .description(board.description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            grafana.DashboardLink("Holdfast")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    number = 0
    for row in board.rows:
        number += 1
        made = made.with_row(grafana.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel).id(number))
    return made


def _variable(variable: Variable) -> grafana.QueryVariable:
    """All values at first. "All" is a regular expression, so that a label that is missing there fits, too."""
    return (
        grafana.QueryVariable(variable.name)
        .label(variable.title)
        .query(f"label_values({variable.metric}, {variable.label})")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .hide(VariableHide.DONT_HIDE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> AnyPanel:
    made: AnyPanel = _number(panel) if panel.kind is Kind.NUMBER else _graph(panel)
    made = (
        made.title(panel.title)
        .description(panel.description)
        .unit(panel.unit.value)
        .datasource(SOURCE)
        .span(panel.width)
        .height(panel.height)
    )
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expression).datasource(SOURCE).range()
        made = made.with_target(target.legend_format(query.legend) if query.legend else target)
    return made


def _number(panel: Panel) -> stat.Panel:
    last = shapes.ReduceDataOptions().calcs(["lastNotNull"])
    # Explicit: without thresholds Grafana shows everything from 80 on in red.
    steps = [Threshold(value=None, color="green")]
    if panel.bad is not None:
        steps.append(Threshold(value=panel.bad, color="red"))
    thresholds = grafana.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
    made = stat.Panel().reduce_options(last).graph_mode(BigValueGraphMode.AREA)
    return made.thresholds(thresholds).no_value("-")


def _graph(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .line_width(1)
        .show_points(VisibilityMode.NEVER)
        .legend(
            shapes.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(shapes.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.kind is Kind.STACKED:
        return made.stacking(shapes.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40).min(0)
    return made.fill_opacity(8)
