"""A service on the event loop of a test, and tools to declare to it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from holdfast.replicas import service
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.service import Service


@lru_cache(maxsize=4)
def _loaded(config: EngineConfig) -> LoadedRunner:
    return load_runner(config)


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[Service]:
    """Closed at the end, whatever happens. The model is loaded once for services of one configuration.

    Only one of these may run at a time: they write to the same KV.
    """
    with patch.object(service, "load_runner", lambda config, tell: _loaded(config)):
        served = Service.load(config)
    try:
        yield served
    finally:
        await served.close()


def tool(name: str, description: str = "", **properties: Mapping[str, Any]) -> dict[str, Any]:
    """A function that requires all of its parameters."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name} | ({"description": description} if description else {}) | {"parameters": schema}
    return {"type": "function", "function": function}
