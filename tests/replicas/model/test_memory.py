"""Cells that a GPU has room for, by arithmetic and by a memory that is not there; errors name what to change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.errors import ConfigError, EngineError
from holdfast.replicas.model.startup import MemoryUse, cells_left, measure

GIB = 2**30


class Fake:
    """80 GiB, of which others have 1; a model of 16, a store of 0.25, a step that takes 3 at its peak."""

    def __init__(self, step: float = 3.0) -> None:
        self.step, self.high, self.now = step, 99 * GIB, int(16.25 * GIB)

    def total(self) -> int:
        return 80 * GIB

    def others(self) -> int:
        return GIB

    def taken(self) -> int:
        return self.now

    def reset_peak(self) -> None:
        self.high = self.now

    def peak(self) -> int:
        return self.high

    def largest_step(self) -> None:
        self.high = max(self.high, self.now + int(self.step * GIB))


def test_the_store_gets_what_weights_and_the_largest_step_leave():
    memory = Fake()
    use = measure(memory, GIB // 4, memory.largest_step)
    assert use == MemoryUse(80 * GIB, GIB, 16 * GIB, 3 * GIB)
    cells = cells_left(use, 0.9, GIB, 131072, 16)
    assert cells == int((72 - 1 - 16 - 3 - 1) * GIB / 131072)


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
def test_a_largest_step_without_room_says_which_setting_to_lower(kind):
    def fails() -> None:
        raise kind("a step of 1 chunks failed: CUDA out of memory. Tried to allocate 3.00 GiB")

    with pytest.raises(ConfigError, match="lower step_tokens") as raised:
        measure(Fake(), 0, fails)
    assert raised.value.field == "step_tokens"

    def otherwise() -> None:
        raise kind("an illegal memory access")

    with pytest.raises(kind, match="illegal"):
        measure(Fake(), 0, otherwise)


@pytest.mark.parametrize(
    ("weights", "step", "share", "field"),
    [(90, 1, 0.9, "model"), (75, 1, 0.9, "gpu_memory"), (40, 35, 0.9, "step_tokens"), (40, 1, 0.4, "gpu_memory")],
)
def test_what_does_not_fit_names_what_to_change(weights, step, share, field):
    with pytest.raises(ConfigError) as raised:
        cells_left(MemoryUse(80 * GIB, GIB, weights * GIB, step * GIB), share, GIB, 131072, 16)
    assert raised.value.field == field
    assert field in str(raised.value) or field == "model"


sizes = st.integers(0, 30 * GIB)


@given(sizes, sizes, sizes, st.floats(0.1, 1.0), sizes, st.integers(1, 1 << 20), st.integers(1, 64))
def test_what_is_given_out_fits_and_one_page_more_would_not(others, weights, step, share, reserve, cell, page):
    use = MemoryUse(80 * GIB, others, weights, step)
    room = int(use.total * share) - others - weights - step - reserve
    try:
        cells = cells_left(use, share, reserve, cell, page)
    except ConfigError:
        assert room < cell * page
        return
    assert cells % page == 0
    assert cells * cell <= room < (cells + page) * cell
