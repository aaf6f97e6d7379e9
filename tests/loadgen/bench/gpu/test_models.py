"""The benchmark of the models that agents run, over models of a few numbers: that it runs, and what it counts."""

import json
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.ceilings import Ceilings
from holdfast.loadgen.bench.gpu import models
from holdfast.loadgen.bench.parts import Report
from holdfast.replicas.model import startup

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes there, and is run by hand")
CEILINGS = Ceilings(1e10, 1e10)


def numbers(matrix):
    """Bytes of a matrix without its scales."""
    if matrix.plain is not None:
        return matrix.plain.nbytes
    outputs, inputs = getattr(matrix, "_both", matrix).shape
    return outputs * inputs


def test_steps_and_turns_of_a_hybrid_with_experts_are_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "plans_to_compare", lambda config: [])  # test_main has some
    sizes = replace(models.small_models(), rows=(1,), turns=1, chunk=12, graph_tokens=1)
    report = Report(tmp_path / "models.json", 600.0)
    models.run(report, replace(sizes, shapes={"qwen3.6-35b-a3b": sizes.shapes["qwen3.6-35b-a3b"]}), CEILINGS)
    found = json.loads((tmp_path / "models.json").read_text())
    assert found["failed"] == {}
    lines = found["parts"]["qwen3.6-35b-a3b"]
    assert lines["decode, 1 at 20, launched"]["replayed"] == 0
    assert lines["decode, 1 at 20, in graphs"]["replayed"] == 1
    assert lines["turns alone"]["completion"] == 2


@pytest.mark.parametrize("name", list(models.NUMBERS))
def test_the_bytes_that_are_counted_are_those_of_the_weights(name):
    """Of experts the part that tokens choose; of windows what they see."""
    sizes = models.small_models()
    world = models.world_of(name, sizes.shapes[name], sizes, CEILINGS)
    bounds = models.bounds_of(world, CEILINGS)
    weights = sum(numbers(matrix) for matrix in world.decoder.matrices)
    assert weights <= bounds.read <= weights * 1.2  # norms, routers and convolutions are small
    more = bounds.step_bytes(1, 40) - bounds.step_bytes(1, 20)
    seen = [min(40, op.window or 40) - min(20, op.window or 20) for op in world.shape.attentions]
    cells = [2 * op.kv_heads * op.head_dim * 4 * n for op, n in zip(world.shape.attentions, seen, strict=True)]
    assert more == sum(cells)
    chosen = bounds.step_bytes(1, 20) - replace(bounds, experts_read=0).step_bytes(1, 20)
    assert chosen == (bounds.experts_read / 2 if bounds.experts_read else 0)  # two of four
