"""Writes the rules as Prometheus reads them, into the folder that it or the chart takes them from."""

import argparse
from pathlib import Path

from holdfast.cluster.rules.files import files


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m holdfast.cluster.rules", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (out / name).write_text(text)


if __name__ == "__main__":
    main()
