"""What tests of the router share: a Redis of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """It runs as the test begins."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
