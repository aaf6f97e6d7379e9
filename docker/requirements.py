"""Prints the project's dependencies, one a line, so that an image can install them before the code is copied."""

import tomllib
from pathlib import Path

print(*tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"], sep="\n")
