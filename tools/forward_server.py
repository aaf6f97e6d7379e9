"""A server for engines that have none, with llama.cpp's ``/completion`` for token ids.

``python forward_server.py ENGINE FILE.gguf --port 8102``. Run it with the Python that has the engine's wheel; it
imports nothing of Holdfast. It serves `bench forwards --peer` alone: one request at a time, greedy, without text.
An engine is ``ik`` (ik_llama.cpp, wheel `ik_llama_cpp_python`) or ``openvino`` (wheel `openvino-genai`).
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar, Protocol

CONTEXT = 4096


class Engine(Protocol):
    """Computes the new part of a prompt, then one token after the other."""

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Returns `prompt_n` new prompt tokens, their `prompt_ms`, and `predicted_ms` of ``tokens`` - 1 forwards."""


class Ik:
    """ik_llama.cpp, called through its wheel. It keeps the last prompt that it computed."""

    def __init__(self, model: str) -> None:
        from ik_llama_cpp import IkLlama, _ctypes_api, _internals

        self._calls, self._batches = _ctypes_api, _internals
        # The wheel decides on flash attention: it is off without AVX-VNNI.
        self._llm = IkLlama(model, n_ctx=CONTEXT, n_threads=len(os.sched_getaffinity(0)), verbose=False)
        self._known: list[int] = []

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        n_known = len(self._known)
        if self._known != prompt[:n_known] or n_known == len(prompt):
            self._llm._context.kv_cache_clear()
            n_known = 0
        start = time.perf_counter()
        self._decode(self._batches.make_batch_range(prompt[n_known:], pos_start=n_known))
        computed = time.perf_counter()
        for index in range(tokens - 1):
            self._decode(self._batches.make_batch_single(prompt[index], len(prompt) + index))
        ended = time.perf_counter()
        self._known = prompt if tokens == 1 else [-1]
        times = {"prompt_ms": (computed - start) * 1e3, "predicted_ms": (ended - computed) * 1e3}
        return {"prompt_n": len(prompt) - n_known, **times}

    def _decode(self, batch: Any) -> None:
        status = self._llm._context.decode(batch)
        self._calls.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed: {status}")


class OpenVino:
    """OpenVINO GenAI. It keeps nothing: it shares prefixes in blocks, and a window need not end at a block."""

    def __init__(self, model: str) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", PERFORMANCE_HINT="LATENCY")

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        import numpy

        settings = self._genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        ids = self._openvino.Tensor(numpy.array([prompt], numpy.int64))
        metrics = self._pipeline.generate(ids, settings).perf_metrics
        later = metrics.get_tpot().mean * (tokens - 1) if tokens > 1 else 0.0
        return {"prompt_n": len(prompt), "prompt_ms": metrics.get_ttft().mean, "predicted_ms": later}


ENGINES: dict[str, Callable[[str], Engine]] = {"ik": Ik, "openvino": OpenVino}


class Forwards(BaseHTTPRequestHandler):
    """Answers requests with `timings`, as llama.cpp does."""

    engine: ClassVar[Engine]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"timings": self.engine.complete(request["prompt"], request["n_predict"])}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> int:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="forward_server", description=__doc__)
    parser.add_argument("engine", choices=tuple(ENGINES))
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--port", type=int, default=8102)
    options = parser.parse_args()
    Forwards.engine = ENGINES[options.engine](options.model)
    Forwards.engine.complete([random.randrange(3, 256) for _ in range(64)], 4)  # warm-up
    server = HTTPServer(("127.0.0.1", options.port), Forwards)
    print(f"forwards of {options.engine} on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
