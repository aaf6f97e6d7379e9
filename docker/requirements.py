"""Prints what an image installs before the code is copied, one a line: dependencies, and those of tracing."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["tracing"], sep="\n")
