"""How every picture looks: text stays text, the ground is transparent; one picture does for light and dark pages."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.loadgen.report.palette import SERVERS

INK = "#010203"  # stands for the page's own colour until the picture is text
WIDTH = 9.6  # inches; a picture is scaled to the page
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names are no formulas
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.16,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
    "legend.frameon": False,
}
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def colour(place: int) -> str:
    """Of the server, or policy, at this place."""
    return SERVERS[place % len(SERVERS)]


def legend(figure: Figure, axes: Axes) -> None:
    """One legend above all panels, from the first of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6)


def svg(figure: Figure, ink: str = "currentColor") -> str:
    """The picture; `ink` is the colour of its text: the page's own, where the picture is a part of it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, ink)
