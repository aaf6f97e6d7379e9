"""What a runner on a GPU does before it serves: the largest step to measure memory with, and graphs that are believed.

A graph is believed once its replay draws what the forward without it draws; until then, and where it does not, steps
run without. Nothing here knows requests; loading is `runner`'s matter.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import EngineError
from holdfast.replicas.events import Sampling
from holdfast.replicas.scheduling.plan import Chunk, Draw, RowWrite, StepOutput, StepPlan

Run: TypeAlias = Callable[[StepPlan], StepOutput]

log = logging.getLogger(__name__)

_GRAPH_TOKENS = 256  # more in one step is no decoding; such steps are worth a launch
_PARTIALS = 256 << 20  # bytes for partial results of split sequences
_LAUNCHES = 256 << 20  # bytes for the graphs themselves, and what their forwards compute with
_CLOSE = 0.25  # how far log probabilities of the same tokens may lie apart, by what 16 bits round


def graph_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step that is to run in a graph; 0: none."""
    if not config.cuda_graphs or config.device == "cpu":
        return 0
    drafts = config.speculation.max_draft if config.speculation.enabled else 0
    return min(_GRAPH_TOKENS, config.max_sequences * (1 + drafts))


def graph_bytes(config: EngineConfig, vocabulary: int) -> int:
    """Memory to keep for graphs."""
    tokens = graph_tokens(config)
    return _PARTIALS + _LAUNCHES + 2 * 4 * tokens * vocabulary if tokens else 0


def pages_to_measure(config: EngineConfig) -> int:
    """Pages of the store that the largest step runs over."""
    return -(-_prefilled(config) // config.page_size) + 1


def largest_step(config: EngineConfig) -> StepPlan:
    """A step that takes as much memory as any: all the tokens of a prefill, and every other row draws, filtered."""
    size = _prefilled(config)
    pages = np.arange(pages_to_measure(config), dtype=np.int32)
    draw = Draw(Sampling(temperature=1.0, top_p=0.9), 0)
    others = range(1, config.max_sequences)
    writes = (RowWrite(0, 0, pages[:-1]), *(RowWrite(row, 0, pages[-1:]) for row in others))
    prefill = Chunk(0, 0, np.ones(size, np.int32), draw)
    return StepPlan((prefill, *(Chunk(row, 0, np.ones(1, np.int32), draw) for row in others)), writes)


def _prefilled(config: EngineConfig) -> int:
    return min(config.step_tokens, config.context_length)


def agree(replayed: Run, launched: Run, config: EngineConfig) -> bool:
    """Whether steps draw the same in graphs and without; where not, the log says so."""
    for plan in plans_to_compare(config):
        try:
            alike = _alike(replayed(plan), launched(plan))
        except EngineError:
            log.exception("steps run without CUDA graphs: one failed")
            return False
        if not alike:
            log.error("steps run without CUDA graphs: one computed something else")
            return False
    return True


def plans_to_compare(config: EngineConfig) -> list[StepPlan]:
    """Steps of single tokens and of windows, each after one that computes their contexts, as far as there is room."""
    plans = []
    for sequences, window, context in ((1, 1, 40), (2, 1, 300), (1, 5, 40), (3, 9, 20)):
        end = context + window
        pages = -(-end // config.page_size)
        if end > config.context_length or sequences * pages * config.page_size > config.cells:
            continue
        if sequences > config.max_sequences:
            continue
        numbers = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
        writes = tuple(RowWrite(row, 0, numbers[row]) for row in range(sequences))
        tokens = np.arange(1, window + 1, dtype=np.int32)
        draw = Draw(Sampling(logprobs=0), 0, drafts=window - 1)
        before = np.arange(1, context + 1, dtype=np.int32)
        plans.append(StepPlan(tuple(Chunk(row, 0, (before + row) % 50) for row in range(sequences)), writes))
        plans.append(StepPlan(tuple(Chunk(row, context, tokens, draw) for row in range(sequences))))
    return plans


def _alike(a: StepOutput, b: StepOutput) -> bool:
    """The same tokens, or others nearly as likely: what was drawn first is compared, by its log probability."""
    for one, other in zip(a.drawn, b.drawn, strict=True):
        if one is None or other is None:  # a chunk that draws nothing
            continue
        difference = abs(one.logprobs[0].logprob - other.logprobs[0].logprob)
        if not difference <= _CLOSE:  # nor a NaN
            return False
    return True
