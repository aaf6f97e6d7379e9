"""Whether the other sequences of a step change a sequence's numbers, and what `batch_invariant` costs.

One sequence decodes alone, in batches of 8 and of 64, beside windows of drafts, beside prompts, and beside sequences
with the same beginning. Its prompt comes in one piece and in several, its tokens one by one and as drafts. The log
probabilities of the drawn token and of the most likely ones are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.loadgen.bench.gpu.steps import World, capture, decoding, timed
from holdfast.loadgen.bench.parts import Lines
from holdfast.replicas.plan import Chunk, Draw, RowWrite, Sampling, StepPlan
from holdfast.replicas.types import TokenIds

_MOST_LIKELY = 20
_ASKING = Draw(Sampling(logprobs=_MOST_LIKELY), 0)


@dataclass(frozen=True, slots=True)
class _Beside:
    """Other sequences of a step: how many, their tokens, what they have cached; `alike`: over the first one's pages."""

    rows: int
    window: int
    cached: int
    alike: bool = False


def kept(world: World) -> Lines:
    """The same with the order of sums kept, and the time of steps over that of steps without."""
    sizes = world.sizes
    half = sizes.context // 16 // 2
    shapes = ((1, sizes.short, 0), (sizes.rows, sizes.context, 0), (sizes.rows // 2, sizes.context, half))
    before = [timed(world, decoding(world, rows, cached, 1, common))[0] for rows, cached, common in shapes]
    world.decoder.keep_order(sizes.chunk + sizes.rows, sizes.rows)
    capture(world)
    after = [timed(world, decoding(world, rows, cached, 1, common))[0] for rows, cached, common in shapes]
    for (rows, cached, common), one, other in zip(shapes, before, after, strict=True):
        name = f"decode, {rows} at {cached}" + (f", {16 * common} in common" if common else "")
        yield name, {"device_s": other, "before_s": one, "over_before": other / one}
    yield from found(world)


def found(world: World) -> Lines:
    """For each company: whether the bits were the same (1), and how far log probabilities were apart."""
    sizes = world.sizes
    world.kv.data.normal_()
    few, many, cached = max(sizes.rows // 8, 2) - 1, sizes.rows - 1, sizes.short
    company = {
        f"beside {few}": _Beside(few, 1, cached // 2),
        f"beside {many}": _Beside(many, 1, cached // 2),
        f"beside {few} windows of 6": _Beside(few, 6, cached // 2),
        f"beside {many} windows of 5": _Beside(many, 5, cached // 2),
        f"beside {few} windows of 12": _Beside(few, 12, cached // 2),
        "beside a prompt": _Beside(1, min(300, sizes.chunk), 0),
        "beside a long prompt": _Beside(1, sizes.chunk // 2, 0),
        f"beside {few} with the same beginning": _Beside(few, 1, cached, alike=True),
    }
    token = world.tokens(1, 9)
    alone = _asked(world, token, cached)
    for name, others in company.items():
        yield name, _compared([alone], [_asked(world, token, cached, others)])
    size = min(sizes.chunk // 2, cached)
    prompt = world.tokens(size, 8)
    whole = _prefilled(world, prompt, [size])
    for cuts in ([size // 3, size], [size // 2 + 1, size - 2, size]):
        yield f"a prompt in {len(cuts)} pieces", _compared([whole], [_prefilled(world, prompt, cuts)])
    drawn, single = [int(token[0])], []
    for i in range(5):
        output = _run(world, Chunk(0, cached + i, np.array(drawn[-1:], np.int32), _ASKING))
        drawn.append(output[0][0])
        single.append(output[1][0])
    window = np.array(drawn[:5], np.int32)
    verified = _run(world, Chunk(0, cached, window, Draw(_ASKING.sampling, 0, drafts=4)))
    yield "as drafts", _compared(single[: len(verified[1])], verified[1]) | {"accepted": len(verified[0]) - 1}


Likely = Sequence[float]


def _run(world: World, chunk: Chunk, others: Sequence[Chunk] = ()) -> tuple[list[int], list[Likely]]:
    """The tokens drawn for `chunk`, and log probabilities at each."""
    drawn = world.runner.begin(StepPlan((chunk, *others))).land().drawn[0]
    assert drawn is not None
    return list(drawn.tokens), [[each.logprob, *(value for _, value in each.top)] for each in drawn.logprobs]


def _asked(world: World, token: TokenIds, cached: int, beside: _Beside | None = None) -> Likely:
    """One token of the first sequence in this company; the pages of its context are the store's first."""
    pages = -(-(cached + 1) // 16)
    writes, others = [RowWrite(0, 0, np.arange(pages, dtype=np.int32))], []
    if beside is not None:
        for row in range(1, beside.rows + 1):
            count = -(-(beside.cached + beside.window) // 16)
            first = 0 if beside.alike else (pages + (row - 1) * count) % (world.kv.pages - count)
            numbers = np.arange(first, first + count, dtype=np.int32)
            if beside.alike:  # its last page, which it writes to, is its own
                numbers[-1] = world.kv.pages - row
            writes.append(RowWrite(row, 0, numbers))
            draw = Draw(Sampling(), 0, drafts=beside.window - 1 if beside.window < 16 else 0)
            others.append(Chunk(row, beside.cached, world.tokens(beside.window, row), draw))
    world.runner.begin(StepPlan((), tuple(writes))).land()
    return _run(world, Chunk(0, cached, token, _ASKING), others)[1][0]


def _prefilled(world: World, prompt: TokenIds, cuts: Sequence[int]) -> Likely:
    """What follows a prompt that is computed up to each of `cuts` in turn."""
    pages = np.arange(-(-len(prompt) // 16), dtype=np.int32)
    world.runner.begin(StepPlan((), (RowWrite(0, 0, pages),))).land()
    start = 0
    for end in cuts[:-1]:
        world.runner.begin(StepPlan((Chunk(0, start, prompt[start:end]),))).land()
        start = end
    return _run(world, Chunk(0, start, prompt[start:], _ASKING))[1][0]


def _compared(some: Sequence[Likely], others: Sequence[Likely]) -> dict[str, float]:
    apart = [abs(a - b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True)]
    return {"same_bits": int(max(apart) == 0.0), "most_apart": max(apart)}
