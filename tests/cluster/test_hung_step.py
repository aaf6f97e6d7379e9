"""A step of a real engine that never ends: its requests are answered elsewhere, and Serve replaces it. About a minute:

    HOLDFAST_TEST_MACHINES=1 .venv/bin/pytest tests/cluster/test_hung_step.py

The engine's thread is stopped as a debugger stops it, alone and while it holds no lock of the interpreter: so a step on
a device that hangs looks from the rest of the process, which goes on.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from holdfast.loadgen.inflate.model import inflate

SETTINGS = """
engine: {threads: 1, kv_memory: 0.5, hung_s: 5, speculation: {enabled: false}}
"""
# Of a larger model than Pocket: its answers last until they have been seen on both engines.
SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1536,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_CONT = 0x4206, 0x4207, 7
ANY_THREAD = 0x40000000  # __WALL
PY_SPY = Path(sys.executable).with_name("py-spy")
PATIENT = 300.0
libc = ctypes.CDLL(None, use_errno=True)


def traced(request: int, thread: int) -> None:
    if libc.ptrace(request, thread, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), "ptrace")


def may_trace() -> bool:
    """Whether another process of ours can be stopped here, and looked into."""
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            traced(PTRACE_SEIZE, other.pid)
            return PY_SPY.exists()
        except (OSError, AttributeError):
            return False
        finally:
            other.kill()
            with suppress(ChildProcessError):
                os.waitpid(other.pid, ANY_THREAD)


def engine_thread(pid: int) -> dict[str, Any]:
    said = subprocess.run(
        [PY_SPY, "dump", "--nonblocking", "--json", "--pid", str(pid)], capture_output=True, check=True
    )
    return next(each for each in json.loads(said.stdout) if each["thread_name"] == "engine")


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """The engine's thread of a process stands still, wherever it is, without the interpreter's lock."""
    thread = int(engine_thread(pid)["os_thread_id"])
    traced(PTRACE_SEIZE, thread)
    try:
        while True:
            traced(PTRACE_INTERRUPT, thread)
            os.waitpid(thread, ANY_THREAD)
            if not engine_thread(pid)["owns_gil"]:
                break
            traced(PTRACE_CONT, thread)
        yield
    finally:  # a process does not end before who traces a thread of it has heard of that
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(thread, ANY_THREAD)


@pytest.mark.skipif(not os.environ.get("HOLDFAST_TEST_MACHINES"), reason="set HOLDFAST_TEST_MACHINES=1")
@pytest.mark.skipif(sys.platform != "linux", reason="stops a thread by ptrace")
def test_a_step_that_never_ends_costs_its_requests_one_move(
    start: Callable[..., Any], eventually: Callable[..., None], tmp_path: Path
) -> None:
    if not may_trace():
        pytest.skip("other processes cannot be traced here")
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    model = inflate("pocket", str(shape), tmp_path / "large", dtype=torch.float32)
    server = start(tmp_path, SETTINGS, "--replicas", "2", "--model", str(model))

    def running() -> dict[str, float]:
        """Sequences of each engine."""
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENT, trust_env=False).text
        found = re.findall(r'^holdfast_sequences_running\{[^}]*replica="(\w+)"[^}]*\} (\S+)$', text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def turn(i: int, tokens: int) -> str:
        body = {"model": "large", "max_tokens": tokens, "ignore_eos": True, "program_id": f"program-{i}"}
        body["messages"] = [{"role": "user", "content": f"a long answer, number {i} of {tokens} tokens"}]
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENT, trust_env=False)
        assert response.status_code == 200, response.text
        return str(response.headers["x-holdfast-replica"])

    def engines() -> list[int]:
        found: list[int] = server.pids("ServeReplica:holdfast:replicas")
        return found

    try:
        eventually(lambda: len(running()) == 2, PATIENT)
        with ThreadPoolExecutor(6) as pool:
            turns = [pool.submit(turn, i, 2000) for i in range(6)]
            eventually(lambda: sum(running().values()) == 6 and min(running().values()) > 0, PATIENT)
            before, victim = set(running()), engines()[0]
            with hung(victim):
                began = time.monotonic()
                eventually(lambda: max(running().values()) == 6, PATIENT)
                moved_s = time.monotonic() - began
                assert victim in engines(), "nobody waits for Serve to replace it"
                homes = [each.result() for each in turns]
                assert len(before - set(homes)) == 1, "what one of them had went elsewhere"
                assert [turn(i, 8) for i in range(6)] == homes
        eventually(lambda: victim not in engines() and len(running()) == 2, PATIENT)
        replaced_s = time.monotonic() - began
        print(f"6 answers, 6 turns; on the other engine after {moved_s:.1f} s, two engines after {replaced_s:.1f} s")
        server.stop(signal.SIGINT)
    finally:
        server.process.kill()
