"""Writes the dashboards as JSON: one file each, into the folder that Grafana or the chart takes them from."""

import argparse
from pathlib import Path

from holdfast.cluster.dashboards.grafana import document
from holdfast.cluster.dashboards.listed import BOARDS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast.cluster.dashboards", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (out / f"{board.name}.json").write_text(document(board))


if __name__ == "__main__":
    main()
