"""A server of this machine's own for a benchmark: `holdfast serve` on a free port, with settings of the benchmark."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.replicas.errors import UnavailableError


@contextmanager
def serving(model: str, engine: Mapping[str, Any]) -> Iterator[str]:
    """The address of a server of one replica whose configuration's `engine` section is this; it ends with the block.

    Raises UnavailableError where it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(json.dumps({"engine": engine}), encoding="utf-8")  # JSON is YAML
        port = _free_port()
        command = [sys.executable, "-m", "holdfast.cluster.cli", "serve", "--config", str(settings)]
        command += ["--port", str(port), "--model", model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                if not any(line.startswith("Holdfast serves") for line in server.stdout):
                    raise UnavailableError("the server did not start")
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()
                server.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
