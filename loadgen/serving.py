"""Starts servers on this machine for a benchmark, on free ports: `holdfast serve` and peers."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from holdfast.loadgen.client import Client
from holdfast.replicas.errors import UnavailableError

HOLDFAST = ("-m", "holdfast.cluster.cli")
_LOOK_S = 0.2  # between two checks whether a peer is ready
_END_S = 30.0  # for a peer to end


@contextmanager
def serving(
    model: str,
    engine: Mapping[str, Any],
    program: Sequence[str | Path] = HOLDFAST,
    tenants: Sequence[Mapping[str, Any]] = (),
) -> Iterator[str]:
    """The address of a new server of one replica with this `engine` section and these `tenants`; without: no keys.

    The server ends with the block. `program`: the `holdfast` command, as arguments of Python. Raises UnavailableError
    where the server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        sections = {"engine": engine, "tenants": [*tenants]}
        settings.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
        port = _free_port()
        command = [sys.executable, *map(str, program), "serve", "--config", str(settings)]
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


@contextmanager
def serving_peer(command: Callable[[int], Sequence[str]], log: Path) -> Iterator[str]:
    """The address of a new peer, started by the words of the ``command`` for a port; its output goes to ``log``.

    The peer ends with the block. Raises UnavailableError where it ends before it is ready.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as output:
        peer = subprocess.Popen(command(port), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not _healthy(url):
                if peer.poll() is not None:
                    raise UnavailableError(f"{log.stem} did not start; see {log}")
                time.sleep(_LOOK_S)
            yield url
        finally:
            peer.terminate()
            try:
                peer.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(peer.pid, signal.SIGKILL)
                peer.wait()


def _healthy(url: str) -> bool:
    try:
        with Client(url, timeout_s=10) as client:
            return client.status("/health") == 200
    except (OSError, HTTPException):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
