"""One engine as Serve deploys it: `replicas.actor` behind a class that only its own process has to load.

The process that builds the application and the one with the router import this file; torch and transformers, which
take seconds to import, come in with the constructor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from ray import serve

from holdfast.cluster.tool_watch import ToolWatch
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, ModelCard, RawPrompt
from holdfast.router.backend import Batch, Routed
from holdfast.router.config import RouterConfig

if TYPE_CHECKING:
    from holdfast.replicas.actor import Replica


class EngineReplica:
    """A replica that says with each answer which one it is. Serve awaits the constructor on the loop it uses."""

    async def __init__(self, config: EngineConfig, redis_url: str, router: RouterConfig) -> None:  # type: ignore[misc]
        from holdfast.replicas.actor import Replica

        self._id = serve.get_replica_context().replica_id.unique_id
        self._replica: Replica = Replica(config, self._id)
        self._tools = ToolWatch(redis_url, router, self._replica.learn)

    async def generate(self, request: GenerateRequest) -> Routed:
        return Routed(self._id, await self._replica.generate(request))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Batch]:
        async with aclosing(self._replica.stream(request)) as batches:
            async for pieces in batches:
                yield Batch(self._id, pieces)

    async def end_program(self, scope: str, program_id: str) -> None:
        await self._replica.end_program(scope, program_id)

    async def tokenize(self, prompt: ChatPrompt | RawPrompt) -> Sequence[int]:
        return await self._replica.tokenize(prompt)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._replica.detokenize(tokens)

    async def card(self) -> ModelCard:
        return await self._replica.card()

    async def metrics(self) -> str:
        return await self._replica.metrics()

    def record_routing_stats(self) -> dict[str, float]:
        return self._replica.record_routing_stats()

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def __del__(self) -> None:  # Serve awaits it once requests have drained
        await self._tools.close()
        await self._replica.shutdown()
