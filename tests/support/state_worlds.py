"""Steps of linear layers at random, and whether a kernel computes what float64 does."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from paged_world import relative_error

from holdfast.loadgen.bench.kernels.linear_state import Span, StateWorld


@st.composite
def spans(draw: st.DrawFn, window: int, most: int = 34) -> Span:
    """A sequence with so many tokens at most, and as many drafts as a window has."""
    tokens = draw(st.one_of(st.integers(1, 6), st.integers(7, most)))
    held = draw(st.integers(0, min(tokens, window)))
    begins = draw(st.booleans())
    marks = draw(st.sets(st.integers(1, max(1, tokens - held)), max_size=3)) if tokens > held else ()
    applied = 0 if begins else draw(st.integers(0, window))
    return Span(applied, tokens, held, tuple(sorted(marks)), begins, draw(st.booleans()))


def assert_close(
    world: StateWorld,
    call: Callable[..., torch.Tensor],
    tolerance: float,
    states_within: float = 0.0,
    error: Callable[[torch.Tensor, torch.Tensor], float] = relative_error,
) -> None:
    """Outputs and states are those of float64, and what nobody writes stays as it was. NaN stays where it belongs."""
    (out, states), (exact, expected) = world.run(call), world.exact()
    assert out.dtype == world.mixed.dtype
    for found, wanted in ((out, exact), *zip(states.tensors, expected.tensors, strict=True)):
        assert torch.equal(found.isnan(), wanted.isnan())
        within = tolerance if found is out else states_within or tolerance
        assert error(found.nan_to_num(), wanted.nan_to_num()) < within
    for now, before in zip(states.tensors, world.states.tensors, strict=True):
        assert torch.equal(now[0].isnan(), before[0].isnan())
    assert torch.equal(states.conv.nan_to_num(), expected.conv.to(states.conv.dtype).nan_to_num())  # copies, to the bit
