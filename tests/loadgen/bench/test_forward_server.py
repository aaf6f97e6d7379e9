"""What stands in for a server that an engine does not bring: run by another Python, it needs nothing of Holdfast."""

import subprocess
import sys
import threading
from http.server import HTTPServer

import forward_server

from holdfast.loadgen.bench.forwards import LlamaServer, StepShape


class Counted:
    """Tells as many milliseconds as the tokens it is asked for."""

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        return {"prompt_n": len(prompt), "prompt_ms": 2.0 * len(prompt), "predicted_ms": 5.0 * (tokens - 1)}


def test_the_benchmark_reads_its_times(monkeypatch) -> None:
    monkeypatch.setattr(forward_server.Forwards, "engine", Counted(), raising=False)
    with HTTPServer(("127.0.0.1", 0), forward_server.Forwards) as server:
        threading.Thread(target=server.serve_forever).start()
        asked = LlamaServer("theirs", f"http://127.0.0.1:{server.server_port}")
        assert asked.milliseconds(StepShape("prefill", 1, 20, 0, drawn=False)) == 40
        assert asked.milliseconds(StepShape("decode", 1, 1, 40)) == 5
        assert asked.milliseconds(StepShape("verify", 1, 8, 40)) is None
        server.shutdown()


def test_it_needs_nothing_of_holdfast() -> None:
    asked = [sys.executable, "-I", "-S", forward_server.__file__, "--help"]  # neither packages nor this checkout
    assert "openvino" in subprocess.run(asked, check=True, capture_output=True, text=True).stdout
