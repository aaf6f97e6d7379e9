"""Forwards of engines that bring no server, told in the way of llama.cpp's server: ``/completion`` of token ids.

``python forward_server.py ENGINE FILE.gguf --port 8102``, run by the Python that has the engine's wheel: nothing of
Holdfast is imported here. It serves `bench forwards --peer` and nothing else: one request at a time, greedy, no text.
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
    """Computes a prompt, as far as it does not know it yet, and then one token after the other."""

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """`prompt_n` new tokens in `prompt_ms`; then ``tokens`` - 1 forwards of one in `predicted_ms`."""


class Ik:
    """ik_llama.cpp by its wheel's own calls. It keeps the prompt that it computed last."""

    def __init__(self, model: str) -> None:
        from ik_llama_cpp import IkLlama, _ctypes_api, _internals

        self._calls, self._batches = _ctypes_api, _internals
        # Flash attention as the wheel decides: without AVX-VNNI it leaves it off.
        self._llm = IkLlama(model, n_ctx=CONTEXT, n_threads=len(os.sched_getaffinity(0)), verbose=False)
        self._known: list[int] = []

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        known = len(self._known)
        if self._known != prompt[:known] or known == len(prompt):
            self._llm._context.kv_cache_clear()
            known = 0
        began = time.perf_counter()
        self._decode(self._batches.make_batch_range(prompt[known:], pos_start=known))
        computed = time.perf_counter()
        for place in range(tokens - 1):
            self._decode(self._batches.make_batch_single(prompt[place], len(prompt) + place))
        ended = time.perf_counter()
        self._known = prompt if tokens == 1 else [-1]
        times = {"prompt_ms": (computed - began) * 1e3, "predicted_ms": (ended - computed) * 1e3}
        return {"prompt_n": len(prompt) - known, **times}

    def _decode(self, batch: Any) -> None:
        status = self._llm._context.decode(batch)
        self._calls.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed: {status}")


class OpenVino:
    """OpenVINO GenAI. It keeps nothing: prefixes are shared in blocks there, which a window does not end at."""

    def __init__(self, model: str) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", PERFORMANCE_HINT="LATENCY")

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        import numpy

        settings = self._genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        ids = self._openvino.Tensor(numpy.array([prompt], numpy.int64))
        told = self._pipeline.generate(ids, settings).perf_metrics
        later = told.get_tpot().mean * (tokens - 1) if tokens > 1 else 0.0
        return {"prompt_n": len(prompt), "prompt_ms": told.get_ttft().mean, "predicted_ms": later}


ENGINES: dict[str, Callable[[str], Engine]] = {"ik": Ik, "openvino": OpenVino}


class Forwards(BaseHTTPRequestHandler):
    """Answers with `timings`, as llama.cpp does."""

    engine: ClassVar[Engine]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"timings": self.engine.complete(asked["prompt"], asked["n_predict"])}).encode()
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
    Forwards.engine.complete([random.randrange(3, 256) for _ in range(64)], 4)  # what a first time costs
    server = HTTPServer(("127.0.0.1", options.port), Forwards)
    print(f"forwards of {options.engine} on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
