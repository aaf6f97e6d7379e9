"""Groups of servers that are started, compared and ended, and the table of what came of them."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stub_server import DONE, Answer, Asked, chunk, models, stub_server, usage

from holdfast.cluster.cli import main as holdfast
from holdfast.loadgen import serving, side_by_side
from holdfast.loadgen.peers import Peer
from holdfast.loadgen.side_by_side import ratios
from holdfast.replicas.errors import UnavailableError

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
    asked = side_by_side.Plan("/m", tmp_path, **files)
    assert {"/v/bin/vllm", "/m", "7"} < set(asked.peer("vllm", 7).words)
    assert "--speculative-config" not in asked.peer("vllm", 7).words
    assert "--speculative-config" in asked.peer("vllm-ngram", 7).words
    assert {"/l/bin/python", "m.gguf", "--ngram"} < set(asked.peer("llama.cpp-ngram", 7).words)
    assert "m8.gguf" in asked.peer("llama.cpp-q8_0", 7).words
    assert "--ngram" not in asked.peer("llama.cpp-q8_0", 7).words


def test_a_peer_may_be_compared_with_options_of_its_own(tmp_path: Path) -> None:
    variants = dict(
        side_by_side.parse_variant(text) for text in ("small=vllm --blocks 64", "drafts=vllm-ngram -x 'a b'")
    )
    asked = side_by_side.Plan("/m", tmp_path, (("holdfast", "small", "drafts"),), variants=variants)
    assert asked.peer("small", 7).words == (*asked.peer("vllm", 7).words, "--blocks", "64")
    assert asked.peer("drafts", 7).words == (*asked.peer("vllm-ngram", 7).words, "-x", "a b")


def test_what_cannot_be_compared_is_refused_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
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


def test_a_groups_servers_are_compared_and_end_before_the_next_groups_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    told: list[str] = []

    @contextmanager
    def started(name: str) -> Iterator[str]:
        told.append(f"{name} starts")
        with stub_server(model) as stub:
            yield stub.url
        told.append(f"{name} ends")

    monkeypatch.setattr(side_by_side, "serving", lambda model, engine: started(f"{model} {engine}"))
    monkeypatch.setattr(side_by_side, "serving_peer", lambda command, log: started(log.stem))
    line = ["bench", "peers", "--model", "m", "--folder", str(tmp_path), "--pause", "0", "--repetitions", "1"]
    line += ["--workload", "bugfix", "--engine", 'holdfast={"threads": 1}']
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert holdfast([*line, "--group", "holdfast,vllm", "--group", "holdfast,vllm-ngram"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    ours = "m {'threads': 1}"
    of_groups = [
        [f"{ours} starts", f"{peer} starts", f"{peer} ends", f"{ours} ends"] for peer in ("0-vllm", "1-vllm-ngram")
    ]
    assert told == [*of_groups[0], *of_groups[1]]
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("| bugfix | vllm | holdfast | ")
    assert second.startswith("| bugfix | vllm-ngram | holdfast | ")
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "1.json"}


def model(asked: Asked) -> Answer:
    """Says a word to everybody."""
    if asked.method == "GET":
        return models() if asked.path == "/v1/models" else Answer.of(b"{}", 404)
    return Answer.of(chunk({"content": "yes"}) + usage(9, 0, 1) + DONE)


def test_each_ratio_is_over_the_first_server_of_its_run() -> None:
    def summary(server: str, value: float) -> dict:
        names = ("job mean", "latency p50", "latency p99", "ttft p99", "per token p50", "wall")
        told = {name: {"value": value, "low": value / 2, "high": None} for name in names}
        told["latency p50"] = {"value": value, "low": 1.0, "high": 3.0}
        return {"workload": "burst", "server": server, "ratios": told | {"tokens per s": None}}

    runs = [
        {"servers": [{"name": first}], "summaries": [summary(first, 1.0), summary(peer, value)]}
        for first, peer, value in (("holdfast", "vllm", 2.0), ("int8", "llama.cpp", 1.5))
    ]
    _, _, *lines = ratios(runs)
    assert lines == [
        "| burst | vllm | holdfast | 2.00 | 2.00 (1.00-3.00) | 2.00 | 2.00 | 2.00 | 2.00 | - |",
        "| burst | llama.cpp | int8 | 1.50 | 1.50 (1.00-3.00) | 1.50 | 1.50 | 1.50 | 1.50 | - |",
    ]


def test_a_peer_is_there_when_it_says_so_and_gone_with_the_block(tmp_path: Path) -> None:
    def command(port: int) -> Peer:
        return Peer((sys.executable, "-c", ANSWERING, str(port)))

    with serving.serving_peer(command, tmp_path / "peer.log") as url:
        assert serving._healthy(url)
    assert not serving._healthy(url)
    assert (tmp_path / "peer.log").read_text().startswith("here")


def test_a_peer_that_ends_at_once_is_told_of_with_its_log(tmp_path: Path) -> None:
    ends = Peer((sys.executable, "-c", "print('no such model')"))
    began = serving.serving_peer(lambda port: ends, tmp_path / "vllm.log")
    with pytest.raises(UnavailableError, match=r"vllm did not start; see .*vllm.log"), began:
        pass
    assert (tmp_path / "vllm.log").read_text() == "no such model\n"
