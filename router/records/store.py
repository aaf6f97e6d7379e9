"""Records in Redis: values with a version, a time to live, and an owner whose bytes are bounded.

A record's key is `<kind>/<tenant>/<name>`, and `<kind>/<tenant>` is its owner. In Redis a record is a list:

    value | part | part | ...      every change replaces the value; an append also adds a part

Records are encrypted where a key file is configured. The programs, usage and tenants keep their own structures in Redis
and change them by Lua scripts of their own (`script`).

Every operation raises UnavailableError while Redis does not answer. After one that failed no other one is sent until a
probe in the background succeeds, so a request waits for a lost Redis once at most.
"""

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import NoScriptError, RedisError

from holdfast.replicas.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")
Argument: TypeAlias = str | bytes | float  # of a script

CONNECTIONS = 32
UNBOUNDED = 2**53
ABSENT = "absent"  # the version of a record that is not stored
KEY_BYTES, NONCE_BYTES = 32, 12

# KEYS[1] has the size of each record of an owner by name, and under '' their sum; KEYS[2] has when each expires.
_OWNER = """
local sizes, deadlines = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function size_of(name) return tonumber(redis.call('HGET', sizes, name) or 0) end

local function extend(name, ttl)
  redis.call('ZADD', deadlines, now + ttl, name)
  for i = 1, 2 do
    if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
  end
end

local function forget(name)
  redis.call('HINCRBY', sizes, '', 0 - size_of(name))
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', deadlines, name)
end
"""
# ARGV: name, value, TTL in ms, the owner's limit in bytes, the version that must be stored ('': any), '1' where parts
# are added to the stored ones, and the parts.
_PUT = (
    _OWNER
    + """
local key, name, value, ttl, limit, version = KEYS[3], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local appends, size = ARGV[6] == '1', #value
local stored = version ~= '' and redis.call('LINDEX', key, 0)
if version ~= '' and (stored and redis.sha1hex(stored) or 'absent') ~= version then return {'conflict'} end
for _, each in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now, 'LIMIT', 0, 100)) do forget(each) end
for i = 7, #ARGV do size = size + #ARGV[i] end
if appends then size = size + math.max(size_of(name) - #stored, 0) end
if size_of('') - size_of(name) + size > limit then return {'full'} end
if appends then
  redis.call('LSET', key, 0, value)
else
  redis.call('DEL', key)
  redis.call('RPUSH', key, value)
end
for i = 7, #ARGV do redis.call('RPUSH', key, ARGV[i]) end
redis.call('PEXPIRE', key, ttl)
redis.call('HINCRBY', sizes, '', size - size_of(name))
redis.call('HSET', sizes, name, size)
extend(name, ttl)
return {'stored'}
"""
)
# KEYS from the third on: records. ARGV: their TTL from now on in ms ('': as it is), the index of the last element that
# is read of each, their names.
_READ = (
    _OWNER
    + """
local ttl, found = tonumber(ARGV[1]), {}
for i = 3, #KEYS do
  found[i - 2] = redis.call('LRANGE', KEYS[i], 0, ARGV[2])
  if ttl and #found[i - 2] > 0 then
    redis.call('PEXPIRE', KEYS[i], ttl)
    extend(ARGV[i], ttl)
  end
end
return found
"""
)
_DELETE = _OWNER + "forget(ARGV[1]); return {redis.call('DEL', KEYS[3])}"
# KEYS[3]: the owner, and so the beginning of its records' keys. ARGV: the beginning of names that are kept.
_DELETE_OWNER = (
    _OWNER
    + """
for _, name in ipairs(redis.call('HKEYS', sizes)) do
  if name ~= '' and (ARGV[1] == '' or string.sub(name, 1, #ARGV[1]) ~= ARGV[1]) then
    redis.call('UNLINK', KEYS[3] .. '/' .. name)
    forget(name)
  end
end
return {}
"""
)


class PutResult(Enum):
    """STORED, FULL (the owner's limit is reached), or CONFLICT (another version is stored)."""

    STORED = "stored"
    FULL = "full"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Record:
    """A stored record. Every change of it gives it another `version`."""

    value: bytes
    version: str
    parts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address of Redis. A `password_file` overrides the password in `url`.

    Every key begins with `namespace`. `ca_file` has the certificates that sign a `rediss://` server's; None: the
    system's.
    """

    url: str
    password_file: Path | None = None
    ca_file: Path | None = None
    namespace: str = "holdfast"

    @property
    def tls_options(self) -> dict[str, str]:
        """Arguments of a Redis client besides the URL."""
        return {} if self.ca_file is None else {"ssl_ca_certs": str(self.ca_file)}


class PasswordFile(CredentialProvider):
    """The user of `url` with the password in `path`, which is read for every connection because it may change."""

    def __init__(self, url: str, path: Path) -> None:
        self._user = unquote(urlsplit(url).username or "")
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text().strip()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return await asyncio.to_thread(self.get_credentials)


@dataclass(frozen=True, slots=True)
class RedisInfo:
    """The report of a Redis server: memory in bytes (a limit of 0: none), keys of all databases, evicted keys."""

    memory: int
    memory_limit: int
    clients: int
    keys: int
    evicted: int

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> "RedisInfo":
        """From the reply to `INFO`. A missing field is 0."""
        databases = [row for name, row in reply.items() if name.startswith("db") and isinstance(row, Mapping)]
        return cls(
            memory=int(reply.get("used_memory", 0)),
            memory_limit=int(reply.get("maxmemory", 0)),
            clients=int(reply.get("connected_clients", 0)),
            keys=sum(int(row.get("keys", 0)) for row in databases),
            evicted=int(reply.get("evicted_keys", 0)),
        )


class Encryption:
    """AES-256-GCM. The first key encrypts; all of them decrypt, so a new key is put in front of the old one.

    Raises ConfigError for a file without keys. A key file has one key of 32 bytes in base64 a line.
    """

    def __init__(self, key_file: Path | None = None, keys: Sequence[bytes] = ()) -> None:
        self._keys = [AESGCM(key) for key in (keys if key_file is None else _read_keys(key_file))]

    def encrypt(self, name: str, value: bytes) -> bytes:
        """`value` encrypted. It can be decrypted under the same `name` only."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._keys[0].encrypt(nonce, value, name.encode())

    def decrypt(self, name: str, data: bytes) -> bytes:
        """Raises ValueError for data that none of the keys encrypted under `name`."""
        for key in self._keys:
            try:
                return key.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode())
            except (InvalidTag, ValueError):  # ValueError: shorter than a nonce
                continue
        raise ValueError("not encrypted by any of the keys")


class RedisClient:
    """Scripts and messages in one namespace, behind a circuit breaker. `close` it at the end."""

    def __init__(
        self,
        address: RedisAddress,
        timeout_s: float = 1.0,
        retry_s: float = 1.0,
        observe: Callable[[float, bool], None] | None = None,
    ) -> None:
        """An operation may take `timeout_s`; a lost Redis is probed every `retry_s`. `observe` gets the duration of
        each operation in seconds and whether Redis answered.
        """
        self._address = address
        self._prefix = f"{address.namespace}/"
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._observe = observe
        self._probe: asyncio.Task[None] | None = None
        self._redis: Any = self._connect()  # redis-py types its commands as maybe synchronous

    @property
    def degraded(self) -> bool:
        """Whether Redis is away."""
        return self._probe is not None

    async def script(self, source: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Any]:
        """The array that a Lua script returns. It runs as one operation.

        Raises UnavailableError where Redis is away or too slow; the script may have run all the same.
        """
        result = await self.try_script(source, keys, arguments)
        if result is None:
            raise UnavailableError("Redis does not answer; retry")
        return result

    async def try_script(self, source: str, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Any] | None:
        """As `script`; None where that raises."""
        names = [self._prefix + key for key in keys]

        async def work() -> list[Any]:
            try:
                return list(await self._redis.evalsha(_digest(source), len(names), *names, *arguments))
            except NoScriptError:  # the server has been restarted, or never had it
                return list(await self._redis.eval(source, len(names), *names, *arguments))

        return await self._guarded(work)

    async def publish(self, channel: str, message: bytes) -> None:
        """Send `message` to the current listeners; to nobody while Redis is away."""

        async def work() -> bool:
            await self._redis.publish(self._prefix + channel, message)
            return True

        await self._guarded(work)

    async def listen(self, channel: str, quiet_s: float) -> AsyncGenerator[bytes, None]:
        """The messages of a channel from now on; b"" first, once the subscription stands.

        Ends where Redis is lost, and where nothing came for `quiet_s`: a connection may be cut without a sign.
        """
        pubsub = self._redis.pubsub()
        try:
            async with asyncio.timeout(self._timeout_s):
                await pubsub.subscribe(self._prefix + channel)
            while (message := await pubsub.get_message(timeout=quiet_s)) is not None:
                yield b"" if message["type"] == "subscribe" else bytes(message["data"])
        except (RedisError, OSError) as error:
            log.debug("a channel of Redis is lost: %s", error)
        finally:
            await pubsub.aclose()

    async def info(self) -> RedisInfo | None:
        """The server's report; None if it does not answer."""

        async def work() -> RedisInfo:
            return RedisInfo.of(await self._redis.info())

        return await self._attempt(work)

    # ---- the connection ----

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    def _connect(self) -> Any:
        address = self._address
        pool = BlockingConnectionPool.from_url(
            address.url,
            max_connections=CONNECTIONS,
            # `_attempt` bounds the whole of an operation. Trap: with a limit of its own the client makes a task of
            # every command that it sends, and by default it has some.
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
            **address.tls_options,
        )
        if address.password_file is not None:
            # Trap: the client refuses a user or password in the URL beside a provider.
            for name in ("username", "password"):
                pool.connection_kwargs.pop(name, None)
            pool.connection_kwargs["credential_provider"] = PasswordFile(address.url, address.password_file)
        return Redis.from_pool(pool)

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of `work`; None where Redis is away."""
        if self._probe is not None:
            return None
        result = await self._attempt(work)
        if result is None and self._probe is None:
            log.warning("Redis does not answer")
            self._probe = asyncio.get_running_loop().create_task(self._wait_for_redis())
        return result

    async def _attempt(self, work: Callable[[], Awaitable[T]]) -> T | None:
        start, result = time.monotonic(), None
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await work()
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("Redis operation failed: %s", error)
        if task and task.cancelling() > cancelled:  # Trap: redis-py may swallow a cancellation and answer all the same
            raise asyncio.CancelledError
        if self._observe is not None:
            self._observe(time.monotonic() - start, result is not None)
        return result

    async def _wait_for_redis(self) -> None:
        while True:
            try:
                if await self._attempt(self._redis.ping) is not None:
                    break
            except Exception:  # the supervisor of the probe: without it Redis would count as away for good
                log.exception("Redis could not be probed")
            await asyncio.sleep(self._retry_s)
        log.warning("Redis answers again")
        self._probe = None


class Records(RedisClient):
    """The records of one namespace, encrypted with the keys in `key_file` where one is named.

    Raises ConfigError for a file without keys.
    """

    def __init__(
        self,
        address: RedisAddress,
        timeout_s: float = 1.0,
        retry_s: float = 1.0,
        observe: Callable[[float, bool], None] | None = None,
        key_file: str = "",
    ) -> None:
        super().__init__(address, timeout_s, retry_s, observe)
        self._encryption = Encryption(Path(key_file)) if key_file else None

    async def get(self, key: str, ttl_s: float | None = None) -> Record | None:
        """The record without its parts. With `ttl_s` it expires so long from now. None: absent, or unreadable because
        another key encrypted it.
        """
        (record,) = await self._read([key], ttl_s, 0)
        return record

    async def get_all(self, keys: Sequence[str], ttl_s: float | None = None) -> list[Record | None]:
        """As `get`, of several records of one owner."""
        return await self._read(keys, ttl_s, 0) if keys else []

    async def read(self, key: str) -> Record | None:
        """The record with its parts."""
        (record,) = await self._read([key], None, -1)
        return record

    async def put(
        self,
        key: str,
        value: bytes,
        ttl_s: float,
        limit: int = UNBOUNDED,
        version: str = "",
        parts: Sequence[bytes] = (),
    ) -> PutResult:
        """Replace the record by `value` and `parts`. Fails if its owner's records would exceed `limit` bytes, or if the
        stored version is not `version`. `ABSENT`: there must be none; "": any may be.
        """
        return await self._put(key, value, ttl_s, limit, version, parts, appends=False)

    async def append(self, key: str, value: bytes, part: bytes, ttl_s: float, limit: int, version: str) -> PutResult:
        """Replace the value of the record that has this version, and add a part. It costs what it adds."""
        return await self._put(key, value, ttl_s, limit, version, (part,), appends=True)

    async def delete(self, key: str) -> bool:
        """Whether there was such a record."""
        (deleted,) = await self.script(_DELETE, [*_owner_keys(key), _stored_at(key)], [_name(key)])
        return bool(deleted)

    async def delete_owner(self, owner: str, keep: str = "") -> None:
        """Delete all records of `owner`, except those whose names begin with `keep` (all go where it is "")."""
        await self.script(_DELETE_OWNER, [*_owner_keys(f"{owner}/"), _stored_at(owner)], [keep])

    async def _read(self, keys: Sequence[str], ttl_s: float | None, last: int) -> list[Record | None]:
        ttl: Argument = "" if ttl_s is None else _milliseconds(ttl_s)
        arguments: list[Argument] = [ttl, last, *map(_name, keys)]
        rows = await self.script(_READ, [*_owner_keys(keys[0]), *map(_stored_at, keys)], arguments)
        return [self._record(key, row) for key, row in zip(keys, rows, strict=True)]

    async def _put(
        self, key: str, value: bytes, ttl_s: float, limit: int, version: str, parts: Sequence[bytes], *, appends: bool
    ) -> PutResult:
        value, *stored_parts = (self._encrypted(key, each) for each in (value, *parts))
        rule: list[Argument] = [_milliseconds(ttl_s), limit, version, int(appends)]
        keys = [*_owner_keys(key), _stored_at(key)]
        (result,) = await self.script(_PUT, keys, [_name(key), value, *rule, *stored_parts])
        return PutResult(result.decode())

    def _record(self, key: str, row: Sequence[bytes]) -> Record | None:
        if not row:
            return None
        try:
            value, *parts = row if self._encryption is None else [self._encryption.decrypt(key, each) for each in row]
        except ValueError:
            return None
        return Record(value, hashlib.sha1(row[0]).hexdigest(), tuple(parts))

    def _encrypted(self, key: str, value: bytes) -> bytes:
        return value if self._encryption is None else self._encryption.encrypt(key, value)


def _stored_at(key: str) -> str:
    """Release 0.1 had values of another form at `<kind>/<tenant>/<name>`."""
    return f"records/{key}"


def _name(key: str) -> str:
    return key.split("/", 2)[2]


def _owner_keys(key: str) -> list[str]:
    kind, tenant, _ = key.split("/", 2)
    return [f"owners/{kind}/{tenant}/sizes", f"owners/{kind}/{tenant}/deadlines"]


@cache
def _digest(source: str) -> str:
    """The name that Redis gives a script."""
    return hashlib.sha1(source.encode()).hexdigest()


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _read_keys(path: Path) -> list[bytes]:
    try:
        keys = [base64.b64decode(line, validate=True) for line in path.read_text().split()]
    except (OSError, binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read keys from {path}: {error}", "router.cache_key_file") from error
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(f"{path} must have keys of {KEY_BYTES} bytes in base64, one a line", "router.cache_key_file")
    return keys
