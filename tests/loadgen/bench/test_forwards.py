"""The benchmarks of steps and turns, on Pocket and on folders that they cannot measure."""

import json
import subprocess
import sys
import threading
from http.server import HTTPServer
from pathlib import Path

import forward_server
import numpy as np
import pytest
import torch
import transformers as tf

from holdfast.loadgen.bench import cpu, efficiency, forwards
from holdfast.loadgen.bench.__main__ import main
from holdfast.loadgen.bench.forwards import Floors, LlamaServer, StepShape, step_plan
from holdfast.loadgen.bench.gpu.accounting import matrix_sizes
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.model.description import describe


class Counted:
    """Reports as many milliseconds as it gets tokens."""

    def complete(self, prompt: list[int], tokens: int) -> dict[str, float]:
        return {"prompt_n": len(prompt), "prompt_ms": 2.0 * len(prompt), "predicted_ms": 5.0 * (tokens - 1)}


@pytest.fixture
def peer(monkeypatch):
    """The server of tools/, which stands in for llama.cpp; it keeps no context."""
    monkeypatch.setattr(forward_server.Forwards, "engine", Counted(), raising=False)
    with HTTPServer(("127.0.0.1", 0), forward_server.Forwards) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_shape_has_a_row_beside_its_floors_and_peers(peer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(forwards, "PAUSE_S", 0.0)
    out = tmp_path / "steps.json"
    command = ["forwards", "--model", "pocket", "--repeat", "1", "--threads", "1", "--beside", "float32/int8"]
    assert main([*command, "--only", "decode, 300 cached", "--peer", f"theirs={peer}", "--json", str(out)]) == 0
    one, eight = json.loads(out.read_text())
    assert (one["name"], eight["name"]) == ("decode, 300 cached", "8 decode, 300 cached")
    for row in (one, eight):
        assert row["over_chain"] == pytest.approx(row["step_ms"] / row["chain_ms"])
        assert row["over_memory"] == pytest.approx(row["step_ms"] / row["memory_ms"])
        assert row["beside_ms"] > 0
    assert (one["theirs"], one["theirs/ours"]) == (5.0, pytest.approx(5.0 / one["step_ms"]))
    assert "theirs" not in eight  # of one sequence alone
    assert "theirs/ours" in capsys.readouterr().out


def test_a_peers_forward_is_of_the_window_alone_or_of_one_token(peer):
    server = LlamaServer("theirs", peer)
    assert server.milliseconds(StepShape("prefill", 1, 20, 0, drawn=False)) == 40
    assert server.milliseconds(StepShape("decode", 1, 1, 40)) == 5
    assert server.milliseconds(StepShape("verify", 1, 8, 40)) is None, "it computed the context as well"
    with pytest.raises(UnavailableError, match="reports no time"):
        LlamaServer("theirs", peer.replace("http://", "http://no.")).milliseconds(StepShape("decode", 1, 1, 40))


def test_the_server_of_a_peer_needs_nothing_of_holdfast():
    command = [sys.executable, "-I", "-S", forward_server.__file__, "--help"]  # neither packages nor this checkout
    assert "openvino" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_hybrids_states_are_part_of_what_a_step_moves():
    heads = {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes = {"hidden_size": 256, "num_hidden_layers": 14, "full_attention_interval": 2, "vocab_size": 1536}
    shape = describe(tf.Qwen3_5TextConfig(**sizes, **heads))
    floors = Floors(shape, torch.float32, "cpu", 4, torch.float32)
    state = 7 * (4 * 32 * 32 + 256 * 3) * 4
    weights = sum(a * b for a, b in matrix_sizes(shape)) + 1536 * 256
    moved = floors.step_bytes(StepShape("", 2, 1, 100))
    assert moved == weights * 4 + 2 * (100 * 7 * 2 * 2 * 256 * 4 + 2 * state)


def test_of_experts_and_windows_a_step_moves_what_it_reads():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    experts = {"moe_intermediate_size": 8, "num_experts": 16, "num_experts_per_tok": 2}
    config = tf.Qwen3MoeConfig(**sizes, **heads, **experts, use_sliding_window=True, sliding_window=10)
    floors = Floors(describe(config), torch.bfloat16, "cpu", 2, torch.int8)
    attention, expert, table, router = (64 + 32) * 32, 3 * 8 * 32, 64 * 32, 16 * 32
    kv = 2 * (16 + 4) * 10
    for tokens, experts in ((1, 2), (400, 16)):
        moved = floors.step_bytes(StepShape("", 1, tokens, 1000))
        assert moved == 2 * (attention + router + table + experts * expert) + kv


def test_a_family_of_others_is_declined(tmp_path, capsys):
    tf.GPTNeoXConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    for name in ("forwards", "efficiency"):
        assert main([name, "--model", str(tmp_path)]) == 2
        assert "does not know" in capsys.readouterr().err


def test_a_plan_gives_every_sequence_pages_of_its_own_or_is_refused():
    shape = StepShape("some", 3, 4, 30)
    plan = step_plan(shape, 16, 12)
    assert len(set(np.concatenate([write.pages for write in plan.writes]).tolist())) == 9
    assert [(chunk.start, len(chunk.tokens), chunk.draw.drafts) for chunk in plan.chunks] == [(30, 4, 3)] * 3
    with pytest.raises(ConfigError, match="needs 144 cells"):
        step_plan(shape, 16, 8)


def test_the_times_of_a_turn_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"READ_BYTES": 1 << 22, "MATRIX": 128}.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(efficiency, "TOKENS", 2000)
    out = tmp_path / "efficiency.json"
    command = "efficiency --model pocket --dtype float32 --threads 1 --turns 2 --programs 1 2 --each --json"
    assert main([*command.split(), str(out)]) == 0
    rows = json.loads(out.read_text())
    names = [name for n in (1, 2) for name in (f"2 turns, {n} at once", "  turn 0", "  turn 1")]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert sum(row[part.removesuffix("_s")] for part in efficiency.PARTS) == pytest.approx(1)
        assert row["efficiency"] == pytest.approx(row["ideal"])
    for whole, *turns in (rows[:3], rows[3:]):
        assert whole["turns"] == 2
        assert whole["as_recorded"] > 0
        assert sum(turn["wall_s"] for turn in turns) == pytest.approx(whole["wall_s"])
        assert all(turn["busy"] > 0 for turn in turns)
