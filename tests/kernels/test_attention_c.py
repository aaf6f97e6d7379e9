"""The C kernel against the reference at every level, over random mixes of chunks; how work is cut, and the build.

A level that this processor lacks is tested as the same source compiled for AVX2, its vectors in halves and the product
of pairs computed; that takes the compiler, which the development install brings.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from c_kernels import ABLE, ROOT, levels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_world import PagedWorld, relative_error

from holdfast.kernels import attention
from holdfast.kernels.attention import (
    _READING,
    _TASKS,
    COUNT,
    FIRST,
    HIGH,
    LOW,
    PART,
    SLOT,
    START,
    TASKS,
    attend_torch,
    paged_attention,
)
from holdfast.kernels.kv import in_numbers

pytestmark = pytest.mark.skipif(not ABLE, reason="the kernel is for x86-64 with AVX2, on Linux")


level = levels("attention", attention, attention.FUNCTIONS)
span = st.tuples(
    st.one_of(st.integers(0, 300), st.integers(500, 1500)),
    st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 90)),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=st.lists(span, min_size=1, max_size=4),
    page_size=st.sampled_from([1, 8, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 12]),
    dim=st.sampled_from([16, 32, 33, 40, 64, 72, 80, 96, 120, 128, 256, 512]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    scattered=st.sampled_from([0, 0.1, 1]),
    heads_first=st.booleans(),
    int8=st.booleans(),
    window=st.sampled_from([None, None, 1, 7, 64, 700]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    sink=st.sampled_from([None, None, 1.0, 60.0]),
)
def test_every_level_is_the_reference(level, window, softcap, sink, **shape):
    """Cells that no sequence has written are NaN in `PagedWorld`: one that was read would show."""
    world = PagedWorld(**shape)
    sinks = world.sinks(sink)
    assert attention.takes(world.q, world.kv, world.batch)
    exact, ours = world.reference(window, softcap, sinks=sinks), world.attend(window, softcap, sinks)
    # In bfloat16 weights are rounded: of many thousand numbers one may be further off than all of them together.
    each, together = (2e-5, 2e-5) if shape["dtype"] == torch.float32 else (8e-2, 1e-2)
    torch.testing.assert_close(ours, exact, atol=each, rtol=each)
    assert relative_error(ours, exact) < together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 8, 60])
def test_as_near_to_float64_as_torch(level, dtype, length):
    world = PagedWorld([(1000, length), (30, length)], 16, 2, 2, 64, dtype, 3)
    exact = world.reference(dtype=torch.float64)
    ours, torchs = world.attend(), attend_torch(world.q, world.kv, 1, world.batch, 0.3, None)
    # Torch rounds weights to bfloat16 and orders float32 sums differently from one processor to another.
    allowed = 2e-3 if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps
    assert relative_error(ours, exact) <= max(relative_error(torchs, exact) * 1.2, allowed)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_depend_on_neither_threads_nor_neighbours_nor_pages(level, dtype, int8):
    spans = [(2900, 1), (700, 5), (0, 130), (1300, 64)]
    together = PagedWorld(spans, 16, 2, 2, 64, dtype, 1, int8=int8)
    scattered = PagedWorld(spans, 16, 2, 2, 64, dtype, 1, scattered=1, int8=int8)
    _copy_cells(together, scattered)
    scattered.q = together.q
    attended = together.attend()
    assert torch.equal(scattered.attend(), attended)
    for count in (1, 2, 7, 64):
        torch.set_num_threads(count)
        assert torch.equal(together.attend(), attended)
    first = 0
    for chunk, (start, length) in enumerate(spans):
        alone = PagedWorld([(start, length)], 16, 2, 2, 64, dtype, 1, int8=int8)
        _copy_cells(together, alone, chunk)
        alone.q = together.q[first : first + length]
        assert torch.equal(alone.attend(), attended[first : first + length])
        first += length


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.one_of(st.integers(0, 120), st.integers(300, 1300)),
    pieces=st.lists(st.one_of(st.integers(1, 6), st.integers(1, 70)), min_size=1, max_size=5),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    dim=st.sampled_from([32, 40, 64, 128, 256, 512]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, None, 7, 300]),
    softcap=st.sampled_from([None, None, 20.0]),
    sink=st.sampled_from([None, 3.0]),
    int8=st.booleans(),
    threads=st.sampled_from([1, 1, 4]),
)
def test_a_token_comes_to_the_same_bits_however_its_prompt_is_cut(
    level, start, pieces, group, dim, dtype, window, softcap, sink, int8, threads
):
    """A chunk in one piece, in several, and token by token: by either routine, in one task or in one for each part."""
    world = PagedWorld([(start, sum(pieces))], 16, 2, group, dim, dtype, 3, scattered=0.2, int8=int8)
    sinks = world.sinks(sink)
    whole, cut, single = world.attend(window, softcap, sinks), torch.empty_like(world.q), torch.empty_like(world.q)
    torch.set_num_threads(threads)
    for target, lengths in ((cut, pieces), (single, [1] * sum(pieces))):
        at = 0
        for length in lengths:
            some = slice(at, at + length)
            cells = world.batch.cells[some]
            batch = replace(world.batch, starts=[start + at], lengths=[length], cells=cells, plans={})
            target[some] = paged_attention(world.q[some], world.kv, 1, batch, 0.3, window, softcap, sinks)
            at += length
    assert torch.equal(whole, cut)
    assert torch.equal(whole, single)


def _copy_cells(source: PagedWorld, target: PagedWorld, only: int | None = None) -> None:
    """The keys and values of every sequence, or of one, to where they lie in another store."""
    for chunk in range(len(source.batch.starts)) if only is None else [only]:
        end = source.batch.starts[chunk] + source.batch.lengths[chunk]
        cells = source.batch.cells_of(chunk, 0, end)
        there = target.batch.cells_of(chunk if only is None else 0, 0, end)
        target.kv.flatten(2, 3)  # raises where it would have to copy
        size = target.kv.shape[3]
        target.kv[:, :, there // size, there % size] = source.kv[:, :, cells // size, cells % size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_store_in_int8_is_that_of_the_numbers_it_stands_for(level, dtype):
    """To the last bit: a store in `dtype` that has what `in_numbers` makes of the bytes."""
    world = PagedWorld([(500, 1), (90, 40)], 16, 2, 3, 48, dtype, 3, int8=True)
    attended = world.attend()
    world.kv = in_numbers(world.kv, dtype)
    world.batch.plans.clear()
    assert torch.equal(attended, world.attend())


def test_a_query_that_is_no_number_says_so_and_spoils_no_other(level):
    world = PagedWorld([(300, 1), (20, 30)], 16, 1, 2, 64, torch.float32, 2)
    world.q[0, 0] = torch.nan
    world.q[9, 1] = torch.nan
    broken = world.attend().isnan().all(-1).nonzero().tolist()
    assert broken == [[0, 0], [9, 1]]


@settings(max_examples=100, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=5),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 16),
    window=st.sampled_from([0, 0, 1, 500, 4000]),
    threads=st.integers(1, 64),
)
def test_every_token_meets_every_position_once_and_no_task_is_long(spans, group, kv_heads, window, threads):
    """For any number of threads. What one of them may still do when all others are done is a part, or less than a fair
    share: it does not grow with contexts.
    """
    world = PagedWorld([(1, 1)], 16, 1, 1, 16, torch.float32, 0).batch
    world.starts, world.lengths, world.rows = [s for s, _ in spans], [n for _, n in spans], range(len(spans))
    table, partials = attention.cut(world, group, kv_heads, window, threads)
    position = np.concatenate([np.arange(s, s + n) for s, n in spans])
    met = np.zeros(len(position), int)
    slots, work, longest = 0, 0, 0
    for each in table:
        count, first = each[COUNT], each[FIRST]
        assert count * group <= max(attention.MAX_ROWS, group)
        assert list(position[first : first + count]) == list(range(each[START], each[START] + count))
        parts = -(-each[HIGH] // PART) - each[LOW] // PART
        assert each[TASKS] == (1 if each[SLOT] < 0 else parts)
        low = max(0, each[START] - window + 1) if window else 0
        assert each[LOW] == low - low % 2
        assert each[HIGH] == each[START] + count
        met[first : first + count] += 1
        slots += each[TASKS] * count if each[SLOT] >= 0 else 0
        positions, rows = each[HIGH] - each[LOW], _READING + count * group
        work += positions * rows * kv_heads
        longest = max(longest, (positions if each[SLOT] < 0 else min(positions, PART)) * rows)
    assert (met == 1).all()
    assert slots == partials
    assert longest <= max(work / threads / _TASKS, PART * (_READING + max(attention.MAX_ROWS, group))) or threads == 1


def test_positions_and_layers_outside_are_refused(level):
    world = PagedWorld([(40, 3)], 16, 1, 2, 64, torch.float32, 2)
    with pytest.raises(IndexError, match="layer 2 of 2"):
        paged_attention(world.q, world.kv, 2, world.batch, 1.0)
    world.batch.starts = [4000]
    with pytest.raises(IndexError, match="position 4002 lies outside"):
        world.attend()


@pytest.mark.parametrize("broken", ["half", "a large head", "a page of its own"])
def test_other_dtypes_heads_and_strides_go_through_torch(level, broken):
    world = PagedWorld([(40, 3)], 16, 1, 2, 520 if broken == "a large head" else 64, torch.float32, 2)
    if broken == "half":
        world.q, world.kv = (each.half() for each in (world.q, world.kv))
    if broken == "a page of its own":  # room between the pages
        world.kv = torch.cat((world.kv, world.kv), dim=3)[:, :, :, :16]
    assert not attention.takes(world.q, world.kv, world.batch)
    tolerance = 1e-2 if broken == "half" else 1e-5
    torch.testing.assert_close(world.attend(), world.reference(), atol=tolerance, rtol=tolerance)


def test_a_build_that_fails_is_a_warning(tmp_path):
    """In a copy, where the compiler's name is that of something else. One that succeeds: tests/test_packaging.py."""
    (tmp_path / "kernels").mkdir()
    for source in (ROOT / "kernels").glob("*.[ch]"):
        shutil.copy(source, tmp_path / "kernels")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    (tmp_path / "ziglang" / "__main__.py").write_text("raise SystemExit('error: no such processor')")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "attention runs in torch" in done.stderr
    assert "no such processor" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(not os.environ.get("CI"), reason="a checkout may do without the library; a run of everything not")
def test_the_install_has_built_the_library():
    assert attention.LIBRARY.missing == ""
