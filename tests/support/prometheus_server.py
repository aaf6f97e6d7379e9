"""A real Prometheus for tests: found on this machine, run in a folder of the test's own, asked by its HTTP API."""

import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

UNPACKED = Path(__file__).parents[2] / ".venv" / "prometheus" / "usr" / "bin"  # where `.ci/run` puts Debian's package
EXPECTED = "HOLDFAST_TEST_PROMETHEUS"  # in the environment: that it is not there is a failure


def found(name: str) -> str:
    """The path of `prometheus` or `promtool`; the test is skipped where it is not installed."""
    path = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if path is None and os.environ.get(EXPECTED):
        pytest.fail(f"{name} is not installed")
    if path is None:
        pytest.skip(f"{name} is not installed; Debian and Ubuntu have it in the package `prometheus`")
    return path


class Prometheus:
    """Runs with `config` (of `prometheus.yml`) until it is stopped."""

    def __init__(self, folder: Path, config: dict[str, Any], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.output = folder / "output.txt"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            found("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder}/data",
        ]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self._http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    @property
    def ready(self) -> bool:
        assert self._process.poll() is None, self.output.read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of the API; fails with what Prometheus says where it refuses."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """What an expression is now: a number a series, those that are none left out."""
        rows = self.ask("query", query=expression)["result"]
        return [value for row in rows if not math.isnan(value := float(row["value"][1]))]

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(60.0)
