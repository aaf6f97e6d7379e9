"""The attention of a step worked out beside its other inputs, for models that say what their attention looks like."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.attention_plan import plan_arrays, plan_key, plan_over
from holdfast.kernels.attention_work import AttentionWork, Ints, attention_work
from holdfast.kernels.paging import PagedBatch
from holdfast.replicas.model.face import AttentionShape


@dataclass(frozen=True, slots=True)
class WindowWork:
    """What attention with one window does in a step, and the arrays of it that go to the device."""

    window: int
    work: AttentionWork
    arrays: tuple[Ints, Ints, Ints, Ints, Ints]  # narrow, wide, order, merges, positions


def window_works(shape: AttentionShape, pages: PagedBatch) -> list[WindowWork]:
    """The work of a step, for every window that some layer has."""
    works = []
    for window in shape.windows:
        work = attention_work(pages, shape.group, shape.kv_heads, window)
        works.append(WindowWork(window, work, plan_arrays(work, pages)))
    return works


def put_plans(pages: PagedBatch, shape: AttentionShape, works: Sequence[WindowWork], views: Sequence[Tensor]) -> None:
    """Give a batch its plans. `views`: the arrays of all `works` one after the other, on the device."""
    at = 0
    for each in works:
        plan = plan_over(each.work, views[at : at + len(each.arrays)], shape.heads, shape.head_dim)
        pages.plans[plan_key(each.window)] = plan
        at += len(each.arrays)
