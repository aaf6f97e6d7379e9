"""The rendered objects as they are kept for reviews, one file of YAML for each values file.

`python tests/helm/snapshots.py` writes them anew.
"""

import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parent.parent / "support"))
from helm_chart import VALUES, render

FOLDER = Path(__file__).parent / "snapshots"
NAMES = ("default", *VALUES)


class Dumper(yaml.SafeDumper):
    """Text of several lines as a block, so that a change of one line is a change of one line."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    clean = "\n".join(line.rstrip() for line in text.split("\n"))
    return dumper.represent_scalar("tag:yaml.org,2002:str", clean, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def snapshot(name: str) -> str:
    """All objects, by kind and name. The scripts in ConfigMaps are files of their own and left out."""
    objects = [dict(each) for each in render("" if name == "default" else name)]
    for each in objects:
        if each["kind"] == "ConfigMap":
            each["data"] = {key: "..." if key.endswith(".py") else text for key, text in each["data"].items()}
    return "".join(f"---\n{yaml.dump(each, Dumper=Dumper, sort_keys=False, width=1000)}" for each in objects)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in NAMES:
        (FOLDER / f"{each}.yaml").write_text(snapshot(each))
