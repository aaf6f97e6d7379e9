"""What a runner does before it serves, over a memory that is not there and graphs that are plain calls."""

from dataclasses import replace

import pytest
from tiny_decoder import ROOM, TinyEngine, decoder, replayed

from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.runner import fill_memory
from holdfast.replicas.model.startup import graph_bytes, graph_tokens, largest_step, pages_to_measure, plans_to_compare

CONFIG = EngineConfig(
    cells=64, page_size=4, context_length=128, step_tokens=20, max_sequences=6, session_rows=0, device="cpu"
)


class Small:
    """A device of 10 MB; a model of 2, and steps that take 1 more."""

    def __init__(self, kv) -> None:
        self.kv, self.steps = kv, 0

    def total(self) -> int:
        return 10_000_000

    def others(self) -> int:
        return 500_000

    def taken(self) -> int:
        return 2_000_000 + self.kv.data.nbytes

    def reset_peak(self) -> None:
        self.steps += 1

    def peak(self) -> int:
        return 3_000_000 + self.kv.data.nbytes


def test_the_store_is_filled_and_the_configuration_says_so():
    model, kv = decoder(Decoder, pages_to_measure(CONFIG), 4)
    source = Small(kv)
    filled = fill_memory(CONFIG, model, kv, source)
    assert source.steps == 1
    assert filled.cells == kv.cells == (9_000_000 - 500_000 - 3_000_000) // (4 * kv.cell_bytes) * 4
    assert kv.data.shape[2:4] == (kv.pages + 1, 4)
    assert filled == replace(CONFIG, cells=filled.cells)


def test_the_largest_step_is_as_large_as_any():
    plan = largest_step(CONFIG)
    assert sum(len(chunk.tokens) for chunk in plan.chunks) == 20 + 5
    assert len({chunk.row for chunk in plan.chunks}) == 6
    assert max(write.pages.max() for write in plan.writes) < pages_to_measure(CONFIG)
    assert len(largest_step(replace(CONFIG, step_tokens=999)).chunks[0].tokens) == 128


def test_graphs_are_for_steps_that_decode_and_verify_on_a_gpu():
    gpu = replace(CONFIG, device="cuda")
    assert graph_tokens(gpu) == 6 * 17
    assert graph_tokens(replace(gpu, speculation=DraftConfig(enabled=False))) == 6
    assert graph_tokens(replace(gpu, max_sequences=512)) == 256
    for without in (CONFIG, replace(gpu, cuda_graphs=False)):
        assert graph_tokens(without) == graph_bytes(without, 1000) == 0
    assert graph_bytes(gpu, 1000) - graph_bytes(gpu, 0) == 2 * 4 * 102 * 1000


@pytest.mark.parametrize("broken", [False, True])
def test_graphs_are_kept_if_they_compute_what_is_computed_without(broken, caplog):
    tiny = TinyEngine("device")
    assert tiny.runner.capture((lambda call: lambda: None) if broken else replayed, ROOM, lambda line: None)
    config = replace(tiny.config, context_length=42)  # two shapes are too long then
    assert len(plans_to_compare(config)) == 4
    assert tiny.runner.believe(config) is not broken
    assert (tiny.steps.graphs is None) is broken
    assert ("computed something else" in caplog.text) is broken


def test_a_runner_that_is_not_on_a_gpu_has_no_graphs():
    tiny = TinyEngine("plain")
    assert not tiny.runner.capture(replayed, ROOM, lambda line: None)
    assert not tiny.runner.believe(tiny.config)
