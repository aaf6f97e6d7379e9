"""What no setting may be: it is refused by name where it is set, not by what it does later."""

import math
import re
from dataclasses import replace

import pytest

from holdfast.replicas.config import (
    DraftConfig,
    EngineConfig,
    Hardware,
    ModelShape,
    RetentionConfig,
    WindowShape,
    least_window_cells,
    resolve,
)
from holdfast.replicas.errors import ConfigError
from holdfast.replicas.retention.policy import retention_policy
from holdfast.replicas.scheduling.queue import RequestOrder, request_order

KINDS = (EngineConfig, RetentionConfig, DraftConfig)
NUMBERS = [
    (kind, name, type(getattr(kind(), name)))
    for kind in KINDS
    for name in kind.__dataclass_fields__
    if type(getattr(kind(), name)) in (int, float)
]


def assert_refused(kind: type, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as refused:
        kind(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize(("kind", "name", "number"), NUMBERS)
def test_no_number_is_negative_or_none_at_all(kind, name, number):
    assert_refused(kind, name, number(-1))
    assert_refused(kind, name, math.nan)


REFUSED: list[tuple[type, str, object]] = [
    *((EngineConfig, name, 0.0) for name in ("queue_timeout_s", "session_idle_s", "kv_memory")),
    *((EngineConfig, name, math.inf) for name in ("kv_memory", "host_memory")),
    *((EngineConfig, name, 0) for name in ("page_size", "max_sequences", "max_waiting", "step_tokens")),
    *((DraftConfig, name, 0) for name in ("max_draft", "memory_bytes")),
    *((EngineConfig, name, "foo") for name in ("order", "device", "dtype", "kv_dtype", "decoder")),
    *((EngineConfig, name, "foo") for name in ("tools_guarantee", "overlap_steps")),
    (EngineConfig, "admission_ceiling", 1.01),
    (RetentionConfig, "share", 1.01),
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_value_out_of_its_range_is_refused(kind, name, value):
    assert_refused(kind, name, value)


@pytest.mark.parametrize("name", ["foo", "", "foo:", ":Foo", "foo:Foo.bar", "foo bar:Foo", "1:Foo", "a/b.py:Foo"])
def test_a_policy_is_one_of_those_there_are_or_a_class_of_a_module(name):
    assert_refused(RetentionConfig, "policy", name)
    assert_refused(EngineConfig, "order", name)
    assert RetentionConfig("foo.bar:Foo").policy == EngineConfig(order="foo.bar:Foo").order == "foo.bar:Foo"


def test_the_old_name_of_the_default_policy_is_refused_with_the_new_one():
    with pytest.raises(ConfigError, match="not 'gittins'; it is called expected_waste now"):
        RetentionConfig("gittins")


class Half:
    """A retention policy, but for one method."""

    yielding = False

    def ttl(self, pause, latency, conditions):
        return 1.0

    def away(self, pause, latency, conditions):
        return math.inf


class Whole(Half):
    """A whole one, though it does not inherit from the interface."""

    def first_within(self, pause, conditions, *, lost):
        return 0.0


class Abstract(RequestOrder):
    """An order without its key."""


class Asks(RequestOrder):
    def __init__(self, levels):
        self.levels = levels

    def key(self, sequence):
        return (sequence.arrived,)


@pytest.mark.parametrize(
    ("make", "name", "field", "why"),
    [
        (request_order, "no.such.module:Class", "order", "No module named 'no'"),
        (request_order, f"{__name__}:Missing", "order", "Missing"),
        (request_order, f"{__name__}:Abstract", "order", "abstract"),
        (request_order, f"{__name__}:Asks", "order", "levels"),
        (request_order, f"{__name__}:Whole", "order", "it has no settled, changes, key"),
        (retention_policy, f"{__name__}:Half", "retention.policy", "it has no first_within"),
        (retention_policy, "broken_policy:Class", "retention.policy", "SyntaxError"),
    ],
)
def test_a_class_that_cannot_be_a_policy_is_refused_by_the_name_of_its_field(
    make, name, field, why, tmp_path, monkeypatch
):
    (tmp_path / "broken_policy.py").write_text("class Class(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        make(name)
    assert refused.value.field == field
    assert name in refused.value.message


def test_a_class_with_all_methods_is_a_policy_without_inheriting():
    assert retention_policy(f"{__name__}:Whole").ttl(None, None, None) == 1.0


SHAPE = ModelShape(2048, "bfloat16", 1024, 2048, 64)


@pytest.mark.parametrize(
    ("field", "dtype", "device", "advice"),
    [
        ("dtype", "int8", "cuda", "device to cpu"),
        ("kv_dtype", "int8", "cuda", "device to cpu"),
        ("kv_dtype", "fp8", "cpu", "engine.kv_dtype to auto, or engine.device to cuda"),
    ],
)
def test_a_dtype_is_refused_on_the_other_device(field, dtype, device, advice):
    """Whether the configuration names the device or the machine decides."""
    for refused in (
        lambda: EngineConfig(**{field: dtype}, device=device),
        lambda: resolve(EngineConfig(**{field: dtype}), Hardware(device == "cuda", 2), SHAPE),
    ):
        with pytest.raises(ConfigError, match=re.escape(advice)) as raised:
            refused()
        assert raised.value.field == field


def test_cells_of_int8_products_are_what_the_cpu_computes_in():
    cells = {}
    for kept in ("float32", "bfloat16"):
        resolved = resolve(EngineConfig(dtype="int8", device="cpu"), Hardware(True, 2, cpu_dtype=kept), SHAPE)
        assert resolved.dtype == "int8"
        cells[kept] = resolved.cells
    assert cells["bfloat16"] == 2 * cells["float32"] == 2**30 // 1024 // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cells_in_int8_have_bytes_and_scales(dtype):
    config = EngineConfig(kv_dtype="int8", device="cpu", host_memory=1.0, dtype=dtype)
    resolved = resolve(config, Hardware(True, 2), SHAPE)
    assert (resolved.dtype, resolved.kv_dtype) == (dtype, "int8")
    assert resolved.cells == resolved.host_cells == 2**30 // (1024 + 16 * 4) // 16 * 16


def test_cells_in_fp8_have_bytes():
    shape = replace(SHAPE, window=WindowShape(128, 512, 64))
    halved = [resolve(EngineConfig(kv_dtype=kv), Hardware(True, 2), shape) for kv in ("fp8", "auto")]
    assert 1024 * halved[0].cells + 512 * halved[0].window_cells == pytest.approx(2**30, rel=1e-4)
    assert halved[0].cells == pytest.approx(2 * halved[1].cells, rel=0.01)


@pytest.mark.parametrize("cpu", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuda", [False, True])
def test_auto_is_never_int8(cpu, cuda):
    for checkpoint in ("float32", "bfloat16", "float16"):
        resolved = resolve(EngineConfig(), Hardware(cuda, 2, cpu), replace(SHAPE, checkpoint_dtype=checkpoint))
        assert resolved.dtype == (checkpoint if cuda else cpu)
        assert resolved.kv_dtype == "auto"


@pytest.mark.parametrize(("device", "asked", "found"), [("cpu", 0, 200), ("cuda", 0, 50), ("cpu", 35.5, 35.5)])
def test_a_step_beside_sequences_that_decode_is_bounded_by_what_the_device_is(device, asked, found):
    config = EngineConfig(device=device, step_ms=asked)
    assert resolve(config, Hardware(device == "cuda", 2), SHAPE).step_ms == found


STATEFUL = replace(SHAPE, state_bytes=1 << 20)
WINDOWED = replace(SHAPE, window=WindowShape(512, 2048, 64))
LEAST_WINDOW = least_window_cells(512, 16)


def test_states_and_cells_share_the_memory() -> None:
    found = resolve(EngineConfig(device="cpu", kv_memory=0.25), Hardware(False, 2), STATEFUL)
    used = found.cells * STATEFUL.cell_bytes(4) + found.state_slots * STATEFUL.state_bytes
    assert 0.99 * 2**28 < used <= 2**28
    assert found.host_slots == 0


def test_a_model_with_states_gets_a_tier_in_host_memory_on_a_gpu() -> None:
    machine = Hardware(True, 2, free_memory=8 << 30)
    found = resolve(EngineConfig(), machine, STATEFUL)
    used = found.host_cells * STATEFUL.cell_bytes(2) + found.host_slots * STATEFUL.state_bytes
    assert 0.99 * 2**31 < used < 1.01 * 2**31
    for other in (resolve(EngineConfig(device="cpu"), machine, STATEFUL), resolve(EngineConfig(), machine, SHAPE)):
        assert other.host_cells == 0


@pytest.mark.parametrize(
    ("shape", "field", "value"), [(STATEFUL, "state_slots", 2), (WINDOWED, "window_cells", LEAST_WINDOW - 16)]
)
def test_too_little_for_two_sequences_is_refused(shape, field, value) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(EngineConfig(**{field: value}), Hardware(False, 2), shape)
    assert raised.value.field == field


def test_windows_and_cells_share_the_memory() -> None:
    found = resolve(EngineConfig(kv_memory=1.0), Hardware(False, 2), WINDOWED)
    window = WINDOWED.window
    assert window is not None
    used = found.cells * WINDOWED.cell_bytes(4) + found.window_cells * window.cell_bytes(4)
    assert 0.999 * 2**30 < used <= 2**30 + 16 * window.cell_bytes(4)
    assert found.window_cells == pytest.approx(found.cells / 16, rel=0.01)  # a window for every 8,192 cells
    asked = resolve(EngineConfig(cells=4096, window_cells=2048), Hardware(False, 2), WINDOWED)
    assert (asked.cells, asked.window_cells) == (4096, 2048)
    assert resolve(EngineConfig(window_cells=2048), Hardware(False, 2), SHAPE).window_cells == 0


def test_windows_have_room_for_two_sequences_at_least() -> None:
    asked = resolve(EngineConfig(window_cells=LEAST_WINDOW), Hardware(False, 2), WINDOWED)
    assert asked.window_cells == LEAST_WINDOW
    small = resolve(EngineConfig(cells=1024), Hardware(False, 2), WINDOWED)
    assert small.window_cells == max(LEAST_WINDOW, 1024)
