"""One replica as an actor: the service, its identity, its health and its metrics.

The only file of this folder that knows prometheus_client. `cluster/engine_replica.py` makes a Serve deployment of it.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import UnavailableError
from holdfast.replicas.events import ProgramEnded, ToolLatencies
from holdfast.replicas.requests import Answer, ChatPrompt, Errored, GenerateRequest, ModelCard, Piece, RawPrompt
from holdfast.replicas.retention.latency import LatencySnapshot
from holdfast.replicas.service import Service
from holdfast.replicas.stats import EngineStats, Occupancy, TextStats

Sample: TypeAlias = tuple[str, str, float]
"""Name, help and value."""


class Replica:
    """One engine per GPU, or per share of the cores. Create it on the event loop that uses it; loads for seconds."""

    def __init__(self, config: EngineConfig, replica_id: str) -> None:
        self._id = replica_id
        self._service = Service.load(config)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(self._service, self._id))

    async def generate(self, request: GenerateRequest) -> Answer | Errored:
        return await self._service.generate(request)

    def stream(self, request: GenerateRequest) -> AsyncGenerator[tuple[Piece, ...], None]:
        return self._service.stream(request)

    async def tokenize(self, prompt: ChatPrompt | RawPrompt) -> list[int]:
        return await self._service.tokenize(prompt)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._service.detokenize(tokens)

    async def card(self) -> ModelCard:
        return replace(self._service.card, replica_id=self._id)

    async def metrics(self) -> str:
        """Prometheus text exposition of the engine, every sample labelled with this replica."""
        return generate_latest(self._registry).decode()

    async def learn(self, latency: LatencySnapshot) -> None:
        """How long tools take, as the cluster knows it now."""
        self._service.notice(ToolLatencies(latency))

    async def end_program(self, scope: str, program_id: str) -> None:
        """A program is over: nothing is kept for it any more. Nothing, where this replica does not know it."""
        self._service.notice(ProgramEnded(scope, program_id))

    def record_routing_stats(self) -> dict[str, float]:
        """Load, polled by Serve for the request router."""
        now = self._service.engine.occupancy()
        return {"running": now.running, "waiting": now.waiting, "cells_free": now.cells_free}

    async def check_health(self) -> None:
        if not self._service.alive:
            raise UnavailableError("the engine thread has died")

    async def shutdown(self) -> None:
        await self._service.close()


class EngineCollector(Collector):
    """The engine's counters and gauges as Prometheus families, read when scraped."""

    def __init__(self, service: Service, replica: str) -> None:
        self._service = service
        self._labels = (service.card.name, replica)

    def collect(self) -> Iterator[Metric]:
        stats, now = self._service.engine.stats, self._service.engine.occupancy()
        for name, help_text, value in (*_engine_counters(stats), *_text_counters(self._service.text_stats)):
            yield self._family(CounterMetricFamily, name, help_text, {"": value})
        for name, help_text, value in _gauges(now):
            yield self._family(GaugeMetricFamily, name, help_text, {"": value})
        drafted = {source.name.lower(): n for source, n in stats.drafts.drafted.items()}
        accepted = {source.name.lower(): n for source, n in stats.drafts.accepted.items()}
        phases = {phase: getattr(stats, f"{phase}_s") for phase in ("schedule", "forward", "sample", "commit")}
        cells = {state: getattr(now, f"cells_{state}") for state in ("free", "tree", "held")}
        for kind, name, help_text, label, values in (
            (CounterMetricFamily, "drafter_tokens", "Drafts verified by where they came from", "source", drafted),
            (CounterMetricFamily, "drafter_tokens_accepted", "Of these, drafts the model drew too", "source", accepted),
            (CounterMetricFamily, "step_seconds", "Time in the parts of a step", "phase", phases),
            (CounterMetricFamily, "engine_requests", "Requests by how they ended", "outcome", stats.ended),
            (GaugeMetricFamily, "cells", "KV cells by state; one cell holds one token", "state", cells),
        ):
            yield self._family(kind, f"holdfast_{name}", help_text, values, label)

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help_text: str,
        values: Mapping[str, float],
        label: str = "",
    ) -> Metric:
        """One family: a sample for each value of `label`, or the one there is."""
        family = kind(name, help_text, labels=("model", "replica", *((label,) if label else ())))
        for key, value in values.items():
            family.add_metric((*self._labels, *((key,) if label else ())), value)
        return family


def _engine_counters(stats: EngineStats) -> tuple[Sample, ...]:
    return (
        ("holdfast_prompt_tokens_computed", "Prompt tokens run through the model", stats.prompt_computed),
        ("holdfast_prompt_tokens_cached", "Prompt tokens found in the KV cache", stats.prompt_cached),
        ("holdfast_prompt_tokens_grouped", "Prompt tokens a leader computed for others", stats.prompt_grouped),
        ("holdfast_turns_continued", "Turns that took over the row of the one before", stats.turns_continued),
        ("holdfast_tokens_continued", "Cached tokens of these turns", stats.tokens_continued),
        ("holdfast_tokens_rewritten", "Computed tokens that a rewritten history lost", stats.tokens_rewritten),
        ("holdfast_completion_tokens", "Tokens drawn", stats.completion),
        ("holdfast_prompt_seeds", "Sampled requests seeded by their prompt", stats.prompt_seeds),
        ("holdfast_draft_tokens", "Tokens drafted by speculation", stats.drafted),
        ("holdfast_draft_tokens_accepted", "Drafted tokens that the model drew too", stats.accepted),
        ("holdfast_draft_tokens_withheld", "Drafts not verified, for it would not pay", stats.drafts.withheld),
        ("holdfast_preemptions", "Sequences sent back to the queue for lack of cells", stats.preemptions),
        ("holdfast_tokens_recomputed", "Tokens computed again after a preemption", stats.tokens_recomputed),
        ("holdfast_prefill_chunks_deferred", "Prefill chunks put off at the high-water mark", stats.chunks_deferred),
        ("holdfast_pins", "Turns whose cells were kept for their program's next one", stats.pins),
        ("holdfast_pin_hits", "Follow-up turns that came while their program's cells were kept", stats.pin_hits),
        ("holdfast_pin_misses", "Follow-up turns that came when they were not", stats.pin_misses),
        ("holdfast_pins_expired", "Pins dropped at their deadline", stats.pins_expired),
        ("holdfast_pins_given_way", "Pins dropped for others that needed the cells", stats.pins_given_way),
        ("holdfast_pins_refused", "Pins dropped beyond the share that may be kept", stats.pins_refused),
        ("holdfast_host_pages_out", "Evicted pages copied to host memory", stats.pages_out),
        ("holdfast_host_pages_in", "Pages copied back from host memory", stats.pages_in),
        ("holdfast_tokens_reloaded", "Tokens that came back instead of being computed", stats.tokens_reloaded),
        ("holdfast_host_moves_failed", "Steps whose copies from or to the host failed", stats.failed_moves),
        ("holdfast_engine_steps", "Steps run", stats.steps),
        ("holdfast_engine_steps_failed", "Steps that failed", stats.failed_steps),
    )


def _text_counters(stats: TextStats) -> tuple[Sample, ...]:
    return (
        ("holdfast_render_cache_hits", "Prompts whose rendering was known", stats.render_hits),
        ("holdfast_render_cache_misses", "Prompts rendered", stats.render_misses),
        ("holdfast_prompt_characters_reused", "Characters whose tokens were known", stats.characters_reused),
        ("holdfast_prompt_characters_tokenized", "Characters tokenized", stats.characters_tokenized),
        ("holdfast_replies_stopped", "Replies ended where their tool calls did", stats.stopped),
        ("holdfast_replies_rewritten", "Replies whose undeclared call was written again", stats.rewritten),
    )


def _gauges(now: Occupancy) -> tuple[Sample, ...]:
    return (
        ("holdfast_sequences_running", "Sequences in the batch", now.running),
        ("holdfast_sequences_waiting", "Requests waiting for a place in the batch", now.waiting),
        ("holdfast_sequence_rows_taken", "Rows of the sequence pool in use", now.rows_taken),
        ("holdfast_sequence_rows_parked", "Rows kept for programs between turns", now.rows_parked),
        ("holdfast_programs_pinned", "Programs whose cells are kept between turns", now.pins),
        ("holdfast_cells_pinned", "KV cells that they keep", now.cells_pinned),
        ("holdfast_sessions", "Sessions that clients have open", now.sessions),
        ("holdfast_cell_capacity", "KV cells there are", now.cells_total),
        ("holdfast_host_cells", "KV cells in host memory", now.cells_host),
        ("holdfast_reload_cells_per_second", "How fast cells came back from the host lately", now.reload_cells_per_s),
    )
