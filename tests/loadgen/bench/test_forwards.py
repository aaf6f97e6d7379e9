"""The benchmark of steps, on Pocket and on folders that it cannot measure. What it measures is not judged here."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers as tf

from holdfast.loadgen.bench import forwards
from holdfast.loadgen.bench.gpu.accounting import matrix_sizes
from holdfast.loadgen.inflate.model import inflate
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.model.description import describe, inspect_model


def test_it_prints_and_writes_every_shape(tmp_path, capsys):
    out = tmp_path / "steps.json"
    options = [
        "--model",
        "pocket",
        "--cells",
        "32768",
        "--repeat",
        "1",
        "--threads",
        "1",
        "--only",
        "decode, 300 cached",
    ]
    assert forwards.main([*options, "--scattered", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["dtype"] == "float32"
    assert [step["name"] for step in written["steps"]] == ["decode, 300 cached", "8 decode, 300 cached"]
    for step in written["steps"]:
        assert step["over_chain"] == pytest.approx(step["step_ms"] / step["chain_ms"])
        assert step["over_memory"] == pytest.approx(step["step_ms"] / step["memory_ms"])
    assert "8 decode, 300 cached" in capsys.readouterr().out


def test_a_hybrids_states_are_part_of_what_a_step_moves(tmp_path, capsys):
    shape = {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 14,
        "full_attention_interval": 2,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1536,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = inflate("pocket", str(tmp_path), tmp_path / "model")
    options = ["--cells", "4096", "--repeat", "1", "--threads", "1", "--dtype", "float32"]
    assert forwards.main(["--model", str(model), *options, "--only", "verify 4, 300"]) == 0
    assert "8 verify 4, 300 cached" in capsys.readouterr().out
    described = describe(inspect_model(str(model)).config)
    floors = forwards.Floors(described, torch.float32, "cpu", 4, torch.float32)
    state = 7 * (4 * 32 * 32 + 256 * 3) * 4
    weights = sum(a * b for a, b in matrix_sizes(described)) + 1536 * 256
    moved = floors.step_bytes(forwards.StepShape("", 2, 1, 100))
    assert moved == weights * 4 + 2 * (100 * 7 * 2 * 2 * 256 * 4 + 2 * state)


def test_of_experts_and_windows_a_step_moves_what_it_reads():
    config = tf.Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        moe_intermediate_size=8,
        num_experts=16,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=10,
    )
    floors = forwards.Floors(describe(config), torch.bfloat16, "cpu", 2, torch.int8)
    attention, expert, table, router = (64 + 32) * 32, 3 * 8 * 32, 64 * 32, 16 * 32
    kv = 2 * (16 + 4) * 10
    one = floors.step_bytes(forwards.StepShape("", 1, 1, 1000))
    assert one == 2 * (attention + router + table + 2 * expert) + kv
    many = floors.step_bytes(forwards.StepShape("", 1, 400, 1000))
    assert many == 2 * (attention + router + table + 16 * expert) + kv


class Answering(BaseHTTPRequestHandler):
    """Tells times as llama.cpp does: a millisecond for each token that the prompt before did not begin with."""

    known: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, known = asked["prompt"], Answering.known
        same = next((i for i, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b), len(known))
        new, Answering.known = len(prompt) - same, prompt
        timings = {"prompt_n": new, "prompt_ms": float(new), "predicted_ms": 3.0 * (asked["n_predict"] - 1)}
        body = json.dumps({"timings": timings}).encode() if self.path == "/completion" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Forgetful(forwards.LlamaServer):
    """Of a server that forgets each prompt."""

    def _ask(self, prompt, tokens):
        told = super()._ask(prompt, tokens)
        Answering.known = []
        return told


@pytest.fixture
def peer():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_peers_forward_is_of_the_window_alone_or_of_one_token(peer):
    asked = forwards.LlamaServer("theirs", peer)
    assert asked.milliseconds(forwards.StepShape("verify", 1, 8, 40)) == 8
    assert asked.milliseconds(forwards.StepShape("prefill", 1, 20, 0, drawn=False)) == 20
    assert asked.milliseconds(forwards.StepShape("decode", 1, 1, 40)) == 3
    Answering.known = []
    assert Forgetful("theirs", peer).milliseconds(forwards.StepShape("verify", 1, 8, 40)) is None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        asked = forwards.LlamaServer("theirs", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(UnavailableError, match="tells no time"):
            asked.milliseconds(forwards.StepShape("decode", 1, 1, 40))


def test_peers_are_in_the_rows_of_one_sequence(peer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forwards, "PAUSE_S", 0.0)
    out = tmp_path / "steps.json"
    options = ["--model", "pocket", "--repeat", "1", "--threads", "1", "--only", "decode, 300 cached"]
    assert forwards.main([*options, "--peer", f"theirs={peer}", "--json", str(out)]) == 0
    assert [step["peers_ms"] for step in json.loads(out.read_text())["steps"]] == [{"theirs": 3.0}, {}]
    assert "theirs/ours" in capsys.readouterr().out


def test_a_family_of_others_is_declined(tmp_path, capsys):
    tf.GPTNeoXConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert forwards.main(["--model", str(tmp_path)]) == 2
    assert "does not know" in capsys.readouterr().err


@pytest.mark.parametrize("scattered", [False, True])
def test_a_plan_gives_every_sequence_pages_of_its_own(scattered):
    shape = forwards.StepShape("some", 3, 4, 30)
    plan = forwards.step_plan(shape, 16, 12, scattered)
    pages = np.concatenate([write.pages for write in plan.writes])
    assert len(set(pages.tolist())) == len(pages) == 9
    assert (np.diff(pages) == 1).all() != scattered
    assert [(chunk.start, len(chunk.tokens), chunk.draw.drafts) for chunk in plan.chunks] == [(30, 4, 3)] * 3


def test_a_plan_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="needs 144 cells"):
        forwards.step_plan(forwards.StepShape("some", 3, 4, 30), 16, 8, scattered=False)
