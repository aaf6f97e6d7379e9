"""Dockerfiles read as far as the tests need: instructions by stage."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docker"


@dataclass(frozen=True)
class Stage:
    """From one FROM to the next. Instructions are pairs of word and argument, continued lines joined."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [argument for each, argument in self.instructions if each == word]

    @property
    def environment(self) -> dict[str, str]:
        return {key: value for each in self.of("ENV") for key, value in re.findall(r"(\w+)=(\S+)", each)}

    @property
    def copied(self) -> list[tuple[list[str], str]]:
        """Sources in the build's folder, and where they go; copies from other stages are left out."""
        words = [each.split() for each in self.of("COPY") if not each.startswith("--from")]
        return [(each[:-1], each[-1]) for each in words]


def pip_installs(stage: Stage) -> list[list[str]]:
    """The arguments of each `pip install` from an index, in order; that of the code itself is left out."""
    commands = [command for each in stage.of("RUN") for command in each.split("&&")]
    words = [shlex.split(command) for command in commands]
    return [each[2:] for each in words if each[:2] == ["pip", "install"] and "." not in each]


def read(variant: str) -> list[Stage]:
    """The stages of `docker/VARIANT.Dockerfile`, with its ARGs put in."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / f"{variant}.Dockerfile").read_text(), flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    values: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, text.splitlines()):
        word, _, argument = line.partition(" ")
        if word == "ARG" and not stages:
            name, _, values[name] = argument.partition("=")
        elif word == "FROM":
            stages.append(Stage(re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], argument)))
        else:
            stages[-1].instructions.append((word, argument))
    return stages


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a top-level `path` out of the build."""
    top = path.partition("/")[0]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    return top not in kept
