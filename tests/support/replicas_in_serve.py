"""The `holdfast` command, where `serve` has another class for its replicas.

    python tests/support/replicas_in_serve.py MODULE:CLASS serve ...

MODULE is imported where Ray may be, once its environment is set: in what deploys, and in each replica. What such a
replica is to tell the test of is `note`d: there is a file for it while a server of `noting` runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.cluster import cli, serve
from holdfast.loadgen.serving import serving

NOTES = "REPLICA_NOTES_FILE"  # in the environment


def note(row: Sequence[Any]) -> None:
    """In a replica: a line of JSON."""
    with open(os.environ[NOTES], "a") as notes:
        notes.write(f"{json.dumps(row)}\n")


@contextmanager
def noting(replica: str, engine: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """The address of a server of Pocket with such a replica, and the file of what that notes. Ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        os.environ[NOTES] = str(notes)
        # The server and Ray's workers import the replica's class from this folder or from that of the program.
        folders = Path(__file__).resolve().parent, Path(sys.argv[0]).resolve().parent
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        with serving("pocket", engine, (__file__, replica)) as url:
            yield url, notes


def main(replica: str, *arguments: str) -> int:
    module, _, name = replica.partition(":")
    deploy = serve._deploy

    def deploy_other(*told: Any) -> None:
        from holdfast.cluster import application

        application.EngineReplica = getattr(import_module(module), name)  # type: ignore[misc]
        deploy(*told)

    serve._deploy = deploy_other
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
