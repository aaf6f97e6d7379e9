"""The benchmark of a GPU, over models of a few numbers: that it runs, and what it writes down."""

import json

import pytest
import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.gpu.__main__ import main
from holdfast.loadgen.bench.gpu.steps import World, small_steps
from holdfast.replicas.model import startup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes there, and is run by hand")


def test_single_steps_run_and_are_written_down(tmp_path, capsys, monkeypatch):
    plans = startup.plans_to_compare
    monkeypatch.setattr(startup, "plans_to_compare", lambda config: plans(config)[:2])
    file = tmp_path / "gpu.json"
    assert main(["--json", str(file), "--only", "steps"]) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == {}
    assert found["left_out"] == []
    parts = ["products", "decode, launched", "verify, launched", "graphs", "decode", "verify", "prefill"]
    assert list(found["parts"]) == [*parts, "host tier", "host", "invariance", "invariance, kept"]
    assert all(found["parts"].values())
    assert found["parts"]["graphs"]["graphs"]["same_draws"] == 1
    assert [moved["same_bits"] for moved in found["parts"]["host tier"].values()] == [1]
    assert 0 < found["shares"]["prefill: prefill 16"] < 1
    replayed = {part: {line.get("replayed") for line in lines.values()} for part, lines in found["parts"].items()}
    assert replayed["decode, launched"] == replayed["verify, launched"] == {0.0}
    assert found["parts"]["prefill"]["prefill 16"]["replayed"] == 0.0
    kept = found["parts"]["invariance, kept"]
    assert {line["same_bits"] for line in kept.values() if "same_bits" in line} <= {0, 1}  # the interpreter's sums vary
    assert kept["as drafts"]["accepted"] == 4
    assert replayed["decode"] == replayed["host"] == {1.0}
    assert replayed["verify"] == {0.5}  # in a graph for one token, a window of 8 is too long for one of these
    host = found["parts"]["host"]["a step of 2 sequences"]
    assert host["not_hidden_s"] == pytest.approx(host["wall_s"] - host["device_s"] + host["prepare_s"])
    assert {"python", "torch", "triton", "transformers"} <= set(found["versions"])
    assert found["machine"]["cores"] >= 1
    assert set(found["ceilings"]) == {"bandwidth", "rate", "empty_s"}
    assert "the figures say nothing" in capsys.readouterr().out


def test_the_model_has_the_bytes_that_are_counted():
    world = World(small_steps(), Ceilings(1e10, 1e10))
    first, second = (block.op for block in world.decoder.blocks)
    read = [first.qkv, first.out, second.down]
    inner = world.shape.hidden * world.shape.blocks[1].op.inner * 2 * 4
    head = world.shape.hidden * world.shape.vocabulary * 4
    assert world.bounds.weight_bytes == sum(matrix.plain.nbytes for matrix in read) + inner + head
