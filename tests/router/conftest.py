"""Redis servers and records of a test's own, and the event loop of tests that are coroutines."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer, shared_records

from holdfast.router.records.store import Records


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """It is up when the test begins. The test may kill it."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[Records]:
    """Records of the test's own server."""
    records = server.records()
    yield records
    await records.close()


@pytest.fixture
async def records() -> AsyncIterator[Records]:
    """Records in a namespace of the test's own, of a server that many tests share."""
    records = shared_records()
    yield records
    await records.disconnect()
