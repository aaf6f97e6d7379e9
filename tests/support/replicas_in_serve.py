"""The `holdfast` command, where `serve` has another class for its replicas.

    python tests/support/replicas_in_serve.py MODULE:CLASS serve ...

MODULE is imported where Ray may be, once its environment is set: in what deploys, and in each replica.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from holdfast.cluster import cli, serve


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
