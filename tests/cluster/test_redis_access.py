"""Redis behind a user of its own, as `docs/deploy.md` makes one, and behind TLS with an authority of one's own."""

import asyncio
import contextlib
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError
from redis_server import RedisServer
from refused import refused

from holdfast.cluster.config import RedisConfig
from holdfast.cluster.redis import ping
from holdfast.replicas.errors import ConfigError
from holdfast.router.records.store import PutResult, Records, RedisAddress

PATIENT = 60.0  # seconds a slow machine may take


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    with RedisServer(tmp_path) as server:
        yield server


def store_at(address: RedisAddress, retry_s: float = 0.01) -> Records:
    return Records(address, PATIENT, retry_s)


async def used(store: Records) -> None:
    """Everything that a store is used for works."""
    assert await store.put("k/t/a", b"1", 60.0) is PutResult.STORED
    record = await store.get("k/t/a", 90.0)
    assert record is not None
    assert await store.append("k/t/a", b"2", b"part", 60.0, 100, record.version) is PutResult.STORED
    assert await store.info() is not None
    assert await store.script("return redis.call('HGETALL', KEYS[1])", ["h"], []) == []
    assert await store.delete("k/t/a")
    await store.delete_owner("k/t")
    assert not store.degraded


def test_the_user_that_the_docs_make_may_do_what_we_need_and_nothing_else(server: Any) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    [line] = re.findall(r"^ACL SETUSER holdfast .*$", docs, re.MULTILINE)

    async def scenario() -> None:
        open_to_all = store_at(RedisAddress(server.url))
        await open_to_all._redis.execute_command(*line.replace("PASSWORD", "p@ss").split())
        await open_to_all._redis.set("others", b"1")
        store = store_at(RedisAddress(server.url.replace("unix://", "unix://holdfast:p%40ss@")))
        await used(store)
        for command in (("GET", "others"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
            with pytest.raises(NoPermissionError):
                await store._redis.execute_command(*command)
        await store.close()
        await open_to_all.close()

    asyncio.run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates by openssl")
def test_tls_with_an_authority_of_ones_own(server: Any, tmp_path: Path) -> None:
    """The embedded binary has no TLS, so a relay ends it before the server."""
    make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "ca"]
    subprocess.run(["openssl", *make.split(), *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca", tmp_path / "key")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_unix_connection(server.socket)
        await asyncio.gather(pipe(reader, behind[1]), pipe(behind[0], writer))

    async def scenario() -> None:
        async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as listening:
            url = f"rediss://localhost:{listening.sockets[0].getsockname()[1]}"
            store = store_at(RedisAddress(url, ca_file=tmp_path / "ca"))
            await used(store)
            await asyncio.to_thread(ping, url, PATIENT, str(tmp_path / "ca"))
            with pytest.raises(ConfigError, match="certificate verify failed"):
                await asyncio.to_thread(ping, url, PATIENT)
            await store.close()
            stranger = store_at(RedisAddress(url), retry_s=60.0)
            assert await stranger.try_script("return {1}", [], []) is None
            assert stranger.degraded
            await stranger.close()

    asyncio.run(scenario())


def test_a_file_of_certificates_that_is_none_is_named(tmp_path: Path) -> None:
    with refused("redis.ca_file"):
        ping("rediss://127.0.0.1:1", 0.1, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="rediss://"):
        RedisConfig(url="redis://h", ca_file="ca")
