"""`install.py`: what it says while pip works, and what is left of pip's words."""

import io
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

SCRIPT = Path(__file__).parent.parent / "install.py"
SAID = """\
Looking in indexes: https://pypi.org/simple
Obtaining file:///work
  Installing build dependencies: started
  Preparing editable metadata (pyproject.toml): started
Collecting torch>=2.11 (from holdfast==0.1.0)
  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)
Collecting numpy (from holdfast==0.1.0)
  Using cached numpy-2.4.0-cp311-cp311-linux_x86_64.whl (16.8 MB)
Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (888.1 MB)
Building wheels for collected packages: holdfast
  Building editable for holdfast (pyproject.toml): started
Installing collected packages: numpy, torch, holdfast
Successfully installed holdfast-0.1.0 numpy-2.4.0 torch-2.11.0
"""


INSTALL = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_what_pip_says_becomes_how_far_it_is() -> None:
    progress = INSTALL.Progress(here=3)
    told = [progress.told(here=3, seconds=65.4) for line in SAID.splitlines() if progress.take(line)]
    assert told == [
        "[1:05] 1 packages found, 0 MB · downloading torch (29 kB)",
        "[1:05] 2 packages found, 888 MB · downloading torch (888.1 MB)",
        "[1:05] 2 packages found, 888 MB · building the C kernels",
        "[1:05] 0 of 3 packages · unpacking 3 packages",
    ]
    assert progress.told(here=5, seconds=0).startswith("[0:00] 2 of 3 packages")


def run(script: str) -> tuple[int, str]:
    out = io.StringIO()
    return INSTALL.run([sys.executable, "-c", script], out), out.getvalue()


def test_pip_is_not_heard_where_all_is_well() -> None:
    status, told = run(f"print({SAID!r})")
    assert status == 0
    assert told.splitlines()[-1].startswith("installed in ")
    assert "unpacking 3 packages" in told
    assert "Successfully" not in told


def test_where_it_fails_the_end_of_what_it_said_is_shown() -> None:
    script = "print('\\n'.join(map(str, range(100)))); print('ERROR: no space', end=''); raise SystemExit(3)"
    status, told = run(script)
    assert status == 3
    lines = told.splitlines()
    assert lines[-2:] == ["99", "ERROR: no space"]
    assert "pip failed after" in told
    assert "10" not in lines


def test_make_installs_by_it() -> None:
    assert "$(BIN)/python install.py" in (SCRIPT.parent / "Makefile").read_text()
