"""A Redis server for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """It is up when the test begins."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
