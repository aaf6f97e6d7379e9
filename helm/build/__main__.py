"""Writes the files of the chart and its docs that are made from the code: `python -m helm.build`."""

from helm.build import metrics_page, readme, rules, schema
from helm.build.dashboards import BOARDS
from helm.build.dashboards.grafana import document
from helm.build.readme import CHART


def main() -> None:
    files = {CHART / "files" / "rules" / name: text for name, text in rules.files().items()}
    files |= {CHART / "files" / "dashboards" / f"{board.name}.json": document(board) for board in BOARDS}
    files |= {schema.FILE: schema.schema(), CHART / "README.md": readme.readme()}
    files[metrics_page.FILE] = metrics_page.rewritten(metrics_page.FILE.read_text())
    for file, text in files.items():
        file.write_text(text)


if __name__ == "__main__":
    main()
