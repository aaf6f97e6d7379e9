"""The chart's README, made from README.md.in and the comments of values.yaml.

A comment that begins with `# --` describes the key below it. Every value that is not a group of others has a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHART = Path(__file__).parents[1] / "holdfast"
MARK = "# --"


@dataclass(frozen=True, slots=True)
class Row:
    """One value. `default` is as it stands in the file; empty for a group of values."""

    key: str
    default: str
    description: str


def rows(text: str) -> Iterator[Row]:
    """The rows of a values file, in its order."""
    lines = text.splitlines()

    def walk(node: yaml.MappingNode, path: str) -> Iterator[Row]:
        for key, value in node.value:
            name = f"{path}{key.value}"
            description = comment_above(lines, key.start_mark.line)
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                if description:
                    yield Row(name, "", description)
                yield from walk(value, f"{name}.")
            else:
                default = " ".join(text[value.start_mark.index : value.end_mark.index].split())
                yield Row(name, default, description)

    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, "")


def comment_above(lines: list[str], line: int) -> str:
    """The description in the comment that ends right above `line`; empty where there is none."""
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    block = [each.strip().removeprefix("#").strip() for each in lines[first:line]]
    if not block or not block[0].startswith("--"):
        return ""
    return " ".join(block).removeprefix("--").strip()


def table(text: str) -> str:
    """The rows as Markdown."""
    made = ["| key | default | what |", "|---|---|---|"]
    for row in rows(text):
        default = f"`{row.default}`" if row.default else ""
        made.append(f"| `{row.key}` | {default} | {row.description} |".replace("\\", "\\\\"))
    return "\n".join(made)


def readme(chart: Path = CHART) -> str:
    """The whole text of README.md."""
    values = (chart / "values.yaml").read_text()
    return (chart / "README.md.in").read_text().replace("{{ values }}", table(values))
