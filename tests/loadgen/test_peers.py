"""Peers: their commands, and groups of servers that are started, compared and ended."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_server import calling, stub_server

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import llama_server, peers, serving
from holdfast.loadgen.options import Peers, Wanted, parse_variant
from holdfast.loadgen.peers import peer_of, ratios
from holdfast.replicas.errors import ConfigError, UnavailableError


def test_the_printed_line_can_be_pasted(capsys: pytest.CaptureFixture) -> None:
    assert holdfast(["bench", "serve-peer", "vllm", "/a model", "--venv", "/v", "--ngram", "--port", "9"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("/v/bin/vllm") :][:3] == ["/v/bin/vllm", "serve", "/a model"]
    assert {"VLLM_TARGET_DEVICE=cpu", "--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(words)
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    assert given.items() >= {"--port": "9", "--tool-call-parser": "hermes", "--max-model-len": "8192"}.items()
    assert "ngram" in given["--speculative-config"]
    more = ["--context", "99", "--tool-parser", "llama3_json"]
    assert holdfast(["bench", "serve-peer", "vllm", "m", *more]) == 0
    changed = capsys.readouterr().out
    assert "--max-model-len 99" in changed
    assert "--tool-call-parser llama3_json" in changed


def test_as_it_comes_a_peer_has_no_drafts_and_on_a_gpu_no_cpu_settings() -> None:
    assert "ngram" not in " ".join(peers.vllm(Wanted("vllm", "m")).words)
    assert "cpu" not in " ".join(peers.vllm(Wanted("vllm", "m", gpu=True)).words).lower()


def test_vllm_gets_intels_openmp_where_it_is_installed(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    assert str(library) not in peers.vllm(Wanted("vllm", "m", venv=tmp_path)).environment.get("LD_PRELOAD", "")
    library.parent.mkdir()
    library.touch()
    assert str(library) in peers.vllm(Wanted("vllm", "m", venv=tmp_path)).environment["LD_PRELOAD"].split(":")
    assert "LD_PRELOAD" not in peers.vllm(Wanted("vllm", "m", venv=tmp_path, gpu=True)).environment


def test_llama_cpp_takes_a_gguf_file_and_its_own_server(capsys: pytest.CaptureFixture) -> None:
    assert holdfast(["bench", "serve-peer", "llama.cpp", "/m/pocket.gguf", "--venv", "/v", "--ngram"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[words.index("/v/bin/python") + 1] == llama_server.__file__
    assert words[words.index("--model") + 1] == "/m/pocket.gguf"
    assert {"--ngram", "--slots"} < set(words)
    assert "--gpu" not in words
    assert "--gpu" in peers.llama_cpp(Wanted("llama.cpp", "m.gguf", gpu=True)).words


def wheel() -> SimpleNamespace:
    """The names of `xllamacpp` that the server is started with; nothing else, so that another name is an error."""
    names = ("model", "cpuparams", "cpuparams_batch", "speculative")
    made = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    made.speculative.ngram_mod = SimpleNamespace()
    return SimpleNamespace(
        CommonParams=lambda: made,
        llama_flash_attn_type=SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_ENABLED="on"),
        common_speculative_type=SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_MOD="mod"),
    )


def test_every_slot_of_llama_cpp_has_the_whole_context_and_every_core() -> None:
    options = ["--model", "m.gguf", "--context", "100", "--slots", "3"]
    plain = llama_server.parameters(wheel(), llama_server.parser().parse_args(options))
    assert (plain.n_parallel, plain.n_ctx) == (3, 300)
    assert plain.cpuparams.n_threads == plain.cpuparams_batch.n_threads == len(os.sched_getaffinity(0))
    assert not hasattr(plain.speculative, "types")
    drafting = llama_server.parameters(wheel(), llama_server.parser().parse_args([*options, "--ngram"]))
    assert drafting.speculative.types == ["mod"]
    assert drafting.speculative.ngram_mod.n_max == llama_server.DRAFTED


def test_its_server_needs_nothing_of_holdfast() -> None:
    asked = [sys.executable, "-I", "-S", llama_server.__file__, "--help"]  # neither packages nor this checkout
    assert "GGUF" in subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def test_what_a_peer_cannot_be_told_is_refused() -> None:
    for why, serve, peer, model, given in (
        ("by itself", peers.llama_cpp, "llama.cpp", "m.gguf", {"tool_parser": "hermes"}),
        ("gguf_file MODEL --out", peers.llama_cpp, "llama.cpp", "/m/pocket", {}),
        ("context", peers.serve, "vllm", "m", {"context": 0}),
        ("unknown peer", peers.serve, "sglang", "m", {}),
        ("installed there", peers.serve, "vllm", "m", {"venv": Path("/nowhere"), "start": True}),
    ):
        with pytest.raises(ConfigError, match=why):
            serve(Wanted(peer, model, **given))


# ---- side by side ----

ANSWERING = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Healthy.asked += 1
        self.send_response(200 if self.path == "/health" and Healthy.asked > 1 else 503)
        self.send_header("content-length", "0")
        self.end_headers()
print("here", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_a_name_says_which_peer_of_which_file_with_what(tmp_path: Path) -> None:
    files = {"gguf": "m.gguf", "gguf_q8_0": "m8.gguf", "venvs": {"llama.cpp": Path("/l"), "vllm": Path("/v")}}
    asked = Peers("/m", tmp_path, **files)
    assert {"/v/bin/vllm", "/m", "7"} < set(peer_of(asked, "vllm", 7).words)
    assert "--speculative-config" not in peer_of(asked, "vllm", 7).words
    assert "--speculative-config" in peer_of(asked, "vllm-ngram", 7).words
    assert {"/l/bin/python", "m.gguf", "--ngram"} < set(peer_of(asked, "llama.cpp-ngram", 7).words)
    assert "m8.gguf" in peer_of(asked, "llama.cpp-q8_0", 7).words
    assert "--ngram" not in peer_of(asked, "llama.cpp-q8_0", 7).words


def test_a_peer_may_be_compared_with_options_of_its_own(tmp_path: Path) -> None:
    variants = dict(parse_variant(text) for text in ("small=vllm --blocks 64", "drafts=vllm-ngram -x 'a b'"))
    asked = Peers("/m", tmp_path, (("holdfast", "small", "drafts"),), variants=variants)
    assert peer_of(asked, "small", 7).words == (*peer_of(asked, "vllm", 7).words, "--blocks", "64")
    assert peer_of(asked, "drafts", 7).words == (*peer_of(asked, "vllm-ngram", 7).words, "-x", "a b")


def test_what_cannot_be_compared_is_refused_before_a_server_starts(tmp_path: Path, capsys) -> None:
    line = ["bench", "peers", "--model", "m", "--folder", str(tmp_path)]
    for more, why in (
        (["--group", "vllm,holdfast"], "begins with Holdfast"),
        (["--group", "holdfast,vlm"], "unknown server 'vlm'"),
        (["--group", "holdfast,vllm,vllm"], "same name"),
        (["--group", "holdfast,llama.cpp"], "GGUF"),
        (["--group", "holdfast,vllm", "--workload", "burts"], "nearest: burst"),
        (["--group", "holdfast,vllm", "--engine", "int8={"], "not NAME=JSON"),
        (["--group", "holdfast,vllm", "--peer", "vllm"], "not NAME=PEER OPTIONS"),
        (["--group", "holdfast,small", "--peer", "small=vlm --blocks 64"], "unknown server 'small'"),
    ):
        assert holdfast([*line, *more]) != 0
        assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_groups_servers_are_compared_and_end_before_the_next_groups_start(tmp_path, monkeypatch, capsys) -> None:
    told: list[str] = []

    @contextmanager
    def started(name: str) -> Iterator[str]:
        told.append(f"{name} starts")
        with stub_server(calling) as stub:
            yield stub.url
        told.append(f"{name} ends")

    monkeypatch.setattr(peers, "serving", lambda model, engine: started(f"{model} {engine}"))
    monkeypatch.setattr(peers, "serving_peer", lambda command, log: started(log.stem))
    line = ["bench", "peers", "--model", "m", "--folder", str(tmp_path), "--pause", "0", "--repetitions", "1"]
    line += ["--workload", "bugfix", "--engine", 'holdfast={"threads": 1}']
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert holdfast([*line, "--group", "holdfast,vllm", "--group", "holdfast,vllm-ngram"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    ours, theirs = "m {'threads': 1}", ("0-vllm", "1-vllm-ngram")
    groups = [(f"{ours} starts", f"{peer} starts", f"{peer} ends", f"{ours} ends") for peer in theirs]
    assert told == [*groups[0], *groups[1]]
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| bugfix | vllm | holdfast | ")
    assert second.startswith("| bugfix | vllm-ngram | holdfast | ")
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "1.json"}


def test_each_ratio_is_over_the_first_server_of_its_run() -> None:
    def summary(server: str, value: float) -> dict:
        names = ("job mean", "latency p50", "latency p99", "ttft p99", "per token p50", "wall")
        told = {name: {"value": value, "low": value / 2, "high": None} for name in names}
        told["latency p50"] = {"value": value, "low": 1.0, "high": 3.0}
        return {"workload": "burst", "server": server, "ratios": told | {"tokens per s": None}}

    groups = (("holdfast", "vllm", 2.0), ("int8", "llama.cpp", 1.5))
    runs = [{"servers": [{"name": a}], "summaries": [summary(a, 1.0), summary(b, value)]} for a, b, value in groups]
    _, _, *lines = ratios(runs)
    assert lines == [
        "| burst | vllm | holdfast | 2.00 | 2.00 (1.00-3.00) | 2.00 | 2.00 | 2.00 | 2.00 | - |",
        "| burst | llama.cpp | int8 | 1.50 | 1.50 (1.00-3.00) | 1.50 | 1.50 | 1.50 | 1.50 | - |",
    ]


def test_a_peer_is_there_when_it_says_so_and_gone_with_the_block(tmp_path: Path) -> None:
    def command(port: int) -> list[str]:
        return [sys.executable, "-c", ANSWERING, str(port)]

    with serving.serving_peer(command, tmp_path / "peer.log") as url:
        assert serving._healthy(url)
    assert not serving._healthy(url)
    assert (tmp_path / "peer.log").read_text().startswith("here")


def test_a_peer_that_ends_at_once_is_told_of_with_its_log(tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "print('no such model')"]
    began = serving.serving_peer(lambda port: ends, tmp_path / "vllm.log")
    with pytest.raises(UnavailableError, match=r"vllm did not start; see .*vllm.log"), began:
        pass
    assert (tmp_path / "vllm.log").read_text() == "no such model\n"
