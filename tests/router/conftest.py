"""What tests of the router share: a Redis of their own, and a look at the files that hold long bodies."""

from collections.abc import Callable, Iterator
from contextlib import suppress
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


@pytest.fixture
def bodies_open() -> Callable[[], int]:
    """How many files in memory with a body this process has open."""

    def count() -> int:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(entry.readlink()))
        return sum(link.startswith("/memfd:body") for link in links)

    return count
