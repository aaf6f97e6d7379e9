"""What is measured when a model is loaded, over a memory that is not there and graphs that are plain calls."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from on_device import capture
from tiny_decoder import ROOM, TinyEngine, decoder, load

from holdfast.kernels.linear_state import LinearShape, LinearStates
from holdfast.replicas.config import DraftConfig, EngineConfig, ModelShape, WindowShape, split_memory
from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.model import startup
from holdfast.replicas.model.decoder import Decoder
from holdfast.replicas.model.startup import (
    MemoryUse,
    bytes_left,
    fill_memory,
    graph_bytes,
    graph_tokens,
    largest_step,
    measure,
    pages_to_measure,
    plans_to_compare,
)

SMALL = tf.LlamaConfig(hidden_size=64, intermediate_size=128)
LARGE = tf.LlamaConfig(hidden_size=1024, intermediate_size=1024)


@pytest.mark.parametrize(("config", "checkpoint"), [(SMALL, "bfloat16"), (LARGE, "float32"), (LARGE, "float16")])
def test_small_models_and_other_checkpoints_stay_exact_without_a_measurement(config, checkpoint, monkeypatch):
    monkeypatch.setattr(startup, "_seconds", lambda *_: pytest.fail("measured"))
    assert startup.faster_dtype(config, checkpoint) == "float32"


@pytest.mark.parametrize(("slower", "chosen"), [(2.0, "bfloat16"), (1.1, "float32"), (0.5, "float32")])
def test_bfloat16_must_be_clearly_faster(slower, chosen, monkeypatch):
    monkeypatch.setattr(startup, "variant_for", lambda _: "pairs_avx2")
    monkeypatch.setattr(startup, "_seconds", lambda _o, _i, dtype: slower if dtype == torch.float32 else 1.0)
    assert startup.faster_dtype(LARGE, "bfloat16") == chosen


GIB = 2**30


@dataclass
class Memory:
    """A device with a model and what is `filled` besides. A step takes more at its peak."""

    filled: Callable[[], int]
    size: int = 10_000_000
    of_others: int = 500_000
    model: int = 2_000_000
    step: int = 1_000_000
    steps: int = 0
    high: int = 1 << 62

    def total(self) -> int:
        return self.size

    def others(self) -> int:
        return self.of_others

    def taken(self) -> int:
        return self.model + self.filled()

    def reset_peak(self) -> None:
        self.steps, self.high = self.steps + 1, self.taken() + self.step

    def peak(self) -> int:
        return self.high


def test_the_store_gets_what_weights_and_the_largest_step_leave():
    memory, begun = Memory(lambda: GIB // 4, 80 * GIB, GIB, 16 * GIB, 3 * GIB), []
    use = measure(memory, GIB // 4, lambda: begun.append(memory.steps))
    assert begun == [1]
    assert use == MemoryUse(80 * GIB, GIB, 16 * GIB, 3 * GIB)
    assert bytes_left(use, 0.9, GIB, 131072) == (72 - 1 - 16 - 3 - 1) * GIB


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
def test_a_largest_step_without_room_says_which_setting_to_lower(kind):
    def fails() -> None:
        raise kind("a step of 1 chunks failed: CUDA out of memory. Tried to allocate 3.00 GiB")

    with pytest.raises(ConfigError, match="lower step_tokens") as raised:
        measure(Memory(lambda: 0), 0, fails)
    assert raised.value.field == "step_tokens"

    def otherwise() -> None:
        raise kind("an illegal memory access")

    with pytest.raises(kind, match="illegal"):
        measure(Memory(lambda: 0), 0, otherwise)


@pytest.mark.parametrize(
    ("weights", "step", "share", "field"),
    [(90, 1, 0.9, "model"), (75, 1, 0.9, "gpu_memory"), (40, 35, 0.9, "step_tokens"), (40, 1, 0.4, "gpu_memory")],
)
def test_what_does_not_fit_names_what_to_change(weights, step, share, field):
    with pytest.raises(ConfigError) as raised:
        bytes_left(MemoryUse(80 * GIB, GIB, weights * GIB, step * GIB), share, GIB, 131072)
    assert raised.value.field == field
    assert field in str(raised.value) or field == "model"


sizes = st.integers(0, 30 * GIB)


@given(sizes, sizes, sizes, st.floats(0.1, 1.0), sizes, st.integers(1, 1 << 30))
def test_what_is_given_out_fits_and_is_enough_for_the_least(others, weights, step, share, reserve, least):
    use = MemoryUse(80 * GIB, others, weights, step)
    room = int(use.total * share) - others - weights - step - reserve
    try:
        assert bytes_left(use, share, reserve, least) == room >= least
    except ConfigError:
        assert room < least


CONFIG = EngineConfig(
    cells=64, page_size=4, context_length=128, step_tokens=20, max_sequences=6, session_rows=0, device="cpu"
)


LEFT = 9_000_000 - 500_000 - 3_000_000  # of a `Memory`, by weights and the largest step


def test_the_store_is_filled_and_the_configuration_says_so():
    model, kv = decoder(Decoder, pages_to_measure(CONFIG), 4)
    source = Memory(lambda: kv.data.nbytes)
    filled = fill_memory(CONFIG, model, kv, source, ModelShape(128, "float32", 0, 128, 8))
    assert source.steps == 1
    assert filled.cells == kv.cells == LEFT // (4 * kv.cell_bytes) * 4
    assert kv.data.shape[2:4] == (kv.pages + 1, 4)
    assert filled == replace(CONFIG, cells=filled.cells)


def test_states_get_their_share_of_the_memory():
    """In the configuration's proportions, or as many as asked for: together with the store they fill what is left."""
    model, kv = decoder(Decoder, pages_to_measure(CONFIG), 4)
    for asked in (0, 20):
        states = LinearStates(LinearShape(1, 1, 16, 16, 4), 2, 4, 1, torch.float32, "cpu")
        shape = ModelShape(128, "float32", 0, 128, 8, state_bytes=states.slot_bytes)
        config = replace(CONFIG, state_slots=asked)
        source = Memory(lambda beside=4 * shape.state_bytes: kv.data.nbytes + beside)
        filled = fill_memory(config, model, kv, source, shape, states)
        assert states.slots == filled.state_slots == states.recurrent.shape[1]
        expected = split_memory(replace(config, cells=0), shape, kv.cell_bytes, LEFT)
        assert (filled.cells, filled.state_slots, filled.window_cells) == expected
        assert filled.state_slots == asked or not asked
        assert LEFT - 4 * kv.cell_bytes < kv.cells * kv.cell_bytes + states.slots * states.slot_bytes <= LEFT


def test_windows_get_their_share_of_the_memory():
    _, whole = decoder(Decoder, 1, 4)
    model, kv = load(Decoder, 6, pages_to_measure(CONFIG), 4)
    window = WindowShape(7, kv.window.shape.values, kv.window.shape.head_dim)
    shape = ModelShape(128, "float32", kv.shape.values, 128, kv.shape.head_dim, window=window)
    source = Memory(lambda beside=kv.window.data.nbytes: kv.data.nbytes + beside)
    filled = fill_memory(CONFIG, model, kv, source, shape)
    assert (filled.cells, filled.window_cells) == (kv.cells, kv.window.cells)
    used = kv.cells * kv.cell_bytes + kv.window.cells * kv.window.cell_bytes
    assert LEFT - 8 * kv.cell_bytes < used <= LEFT
    assert kv.window.cells < kv.cells / 2
    assert kv.cells > 1.5 * LEFT / whole.cell_bytes


def test_states_that_leave_no_room_for_the_store_are_refused():
    model, kv = decoder(Decoder, pages_to_measure(CONFIG), 4)
    states = LinearStates(LinearShape(1, 1, 16, 16, 4), 2, 4, 1, torch.float32, "cpu")
    shape = ModelShape(128, "float32", 0, 128, 8, state_bytes=states.slot_bytes)
    source = Memory(lambda: kv.data.nbytes + 4 * shape.state_bytes)
    with pytest.raises(ConfigError) as raised:
        fill_memory(replace(CONFIG, state_slots=10**6), model, kv, source, shape, states)
    assert raised.value.field == "state_slots"


def test_the_largest_step_is_as_large_as_any():
    plan = largest_step(CONFIG)
    assert sum(len(chunk.tokens) for chunk in plan.chunks) == 20 + 5
    assert len({chunk.row for chunk in plan.chunks}) == 6
    assert max(write.pages.max() for write in plan.writes) < pages_to_measure(CONFIG)
    assert len(largest_step(replace(CONFIG, step_tokens=999)).chunks[0].tokens) == 128


def test_graphs_are_for_steps_that_decode_and_verify_on_a_gpu():
    gpu = replace(CONFIG, device="cuda")
    prompt = min(gpu.step_tokens, gpu.context_length)
    assert graph_tokens(gpu) == 6 * 17 + prompt
    assert graph_tokens(replace(gpu, speculation=DraftConfig(enabled=False))) == 6 + prompt
    assert graph_tokens(replace(gpu, max_sequences=512)) == 1024
    for config in (CONFIG, replace(gpu, without=("cuda_graphs",))):
        assert graph_tokens(config) == graph_bytes(config, 1000, 4) == 0
    assert graph_bytes(gpu, 1000, 4) - graph_bytes(gpu, 0, 4) == 2 * 4 * (102 + prompt) * 1000
    wide = replace(gpu, max_sequences=512)
    assert graph_bytes(wide, 1000, 2) - graph_bytes(wide, 0, 2) == 2 * 2 * 256 * 1000


@pytest.mark.parametrize("broken", [False, True])
def test_graphs_are_kept_if_they_compute_what_is_computed_without(broken, caplog):
    tiny = TinyEngine("device")
    room = replace(ROOM, tokens=2)  # longer steps are compared without one
    assert tiny.runner.capture((lambda call: lambda: None) if broken else capture(), room, lambda line: None)
    config = replace(tiny.config, context_length=42, cells=48)  # the other shapes are too long then, or too many
    assert len(plans_to_compare(config)) == 2
    assert startup.check_graphs(tiny.runner, config) is not broken
    assert (tiny.runner.graphs is None) is broken
    assert ("computed something else" in caplog.text) is broken
