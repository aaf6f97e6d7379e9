"""The documentation site builds, with every link of it and every page in its menu."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_it_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "quickstart.html").read_text()
    assert page.count("needs a cluster") > 4  # marks are shown
    assert (tmp_path / "chart.html").exists()
    assert 'href="chart.html' in page


def test_pages_load_nothing_from_elsewhere() -> None:
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    assert theme["font"] is False
    for picture in (ROOT / "docs").rglob("*.svg"):
        assert "url(http" not in picture.read_text(), picture.name
