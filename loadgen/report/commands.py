"""`holdfast bench report` and `holdfast bench trace`: from the JSON of a comparison to a page, or to a timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.loadgen.report.ablation import read_ablation
from holdfast.loadgen.report.page import read_rows, write_report
from holdfast.loadgen.timeline import trace
from holdfast.replicas.errors import ConfigError


def report(source: Path, target: Path, ablation: Path | None = None) -> int:
    """Write the page of the comparison in ``source``; the exit status. Raises ConfigError."""
    more = {"ablation": read_ablation(ablation)} if ablation else {}
    write_report({**read_run(source), **more}, target)
    return 0


def timeline(source: Path, target: Path) -> int:
    """Write the comparison's Chrome trace events, which ui.perfetto.dev opens; the exit status. Raises ConfigError."""
    events = trace(read_rows(read_run(source)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(events, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}", "trace") from error
    return 0


def read_run(path: Path) -> Mapping[str, Any]:
    """What `holdfast bench compare --json` wrote. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "run") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no comparison", "run")
    return content
