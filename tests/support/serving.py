"""A service on the event loop of a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.service import Service


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[Service]:
    """Closed at the end, whatever happens."""
    service = Service.load(config)
    try:
        yield service
    finally:
        await service.close()
