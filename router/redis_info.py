"""What a Redis server says of itself, as far as an operator asks. Pure: reading it is `store`'s."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RedisInfo:
    """Memory in bytes, its limit 0 where there is none; `keys` of all databases, `evicted` since the server's start."""

    memory: int
    memory_limit: int
    clients: int
    keys: int
    evicted: int

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "RedisInfo":
        """From the answer to `INFO`. Servers that leave something out have 0 of it."""
        databases = [row for name, row in told.items() if name.startswith("db") and isinstance(row, Mapping)]
        return cls(
            memory=int(told.get("used_memory", 0)),
            memory_limit=int(told.get("maxmemory", 0)),
            clients=int(told.get("connected_clients", 0)),
            keys=sum(int(row.get("keys", 0)) for row in databases),
            evicted=int(told.get("evicted_keys", 0)),
        )
