"""Values that user messages and tool results are made of, each drawn from a generator that is passed in."""

from __future__ import annotations

import random
from collections.abc import Callable

from holdfast.loadgen.traces.lengths import WORDS

Value = str | int | float


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_CITIES = _listed("Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Prague Athens Warsaw Boston Chicago Tokyo")
_NOUNS = _listed(
    "user order invoice report ticket task project account message customer product payment image device server "
    "session event file backup note contact booking team role page form menu cart search profile login"
)
_THINGS = _listed("router parser cache client worker queue loader filter helper model view store index handler")
_FOLDERS = _listed("src lib app core utils api models services")
_ENDINGS = _listed("py js ts go")
_COLUMNS = _listed("price amount total weight budget rate distance size")
_CUISINES = _listed("italian french japanese indian mexican thai chinese")


def tag(rng: random.Random) -> str:
    """Six hexadecimal digits."""
    return f"{rng.getrandbits(24):06x}"


def filler(seed: str, count: int) -> str:
    """``count`` common words, about as many tokens for a large vocabulary: the same for the same ``seed``."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _path(rng: random.Random) -> str:
    return f"{rng.choice(_FOLDERS)}/{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}.{rng.choice(_ENDINGS)}"


def _sql(rng: random.Random) -> str:
    table, column = rng.choice(_NOUNS), rng.choice(_COLUMNS)
    return rng.choice(
        (
            f"SELECT {column} FROM {table} LIMIT {rng.randint(1, 99)}",
            f"SELECT count(*) FROM {table}",
            f"SELECT {column} FROM {table} WHERE {column} > {rng.randint(1, 999)}",
        )
    )


def _command(rng: random.Random) -> str:
    return rng.choice(
        (
            f"python {_path(rng)}",
            f"pytest -q {rng.choice(_FOLDERS)}/{rng.choice(_NOUNS)}",
            f"wc -l {_path(rng)}",
            f"cat {_path(rng)}",
        )
    )


KINDS: dict[str, Callable[[random.Random], Value]] = {
    "city": lambda r: r.choice(_CITIES),
    "date": lambda r: f"{r.randint(2025, 2029)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}",
    "clock": lambda r: f"{r.randint(6, 22):02d}:{r.choice((0, 15, 30, 45)):02d}",
    "path": _path,
    "folder": lambda r: f"{r.choice(_FOLDERS)}/{r.choice(_NOUNS)}",
    "noun": lambda r: r.choice(_NOUNS),
    "symbol": lambda r: f"{r.choice(_NOUNS)}_{r.choice(_THINGS)}",
    "topic": lambda r: f"{r.choice(_CITIES)} {r.choice(_NOUNS)} {r.choice(_THINGS)}",
    "column": lambda r: r.choice(_COLUMNS),
    "cuisine": lambda r: r.choice(_CUISINES),
    "sentence": lambda r: f"The {r.choice(_NOUNS)} {r.choice(_THINGS)} is ready",
    "id": lambda r: f"{''.join(r.choices('ABCDEFGHKLMNPRSTUVWX', k=2))}{r.randint(10, 9999)}",
    "sql": _sql,
    "command": _command,
    "days": lambda r: r.randint(2, 9),
    "small": lambda r: r.randint(0, 9),
    "count": lambda r: r.randint(10, 999),
    "share": lambda r: round(r.uniform(0, 100), 1),
    "number": lambda r: r.randint(10, 9999),
    "chart": lambda r: r.choice(("bar", "line", "pie", "scatter")),
    "format": lambda r: r.choice(("csv", "json", "parquet", "xlsx")),
    "weather": lambda r: r.choice(("sunny", "cloudy", "rain", "snow", "windy")),
    "status": lambda r: r.choice(("ok", "queued", "running", "done")),
    "verdict": lambda r: r.choice(("approve", "reject", "comment")),
    "line": lambda r: (
        f"{r.choice(_NOUNS)}_{r.choice(_THINGS)} = {r.choice(_THINGS)}({r.choice(_NOUNS)}, {r.randint(1, 99)})"
    ),
}
"""A function for each kind that draws a value."""

INTEGERS = frozenset(("days", "small", "count", "number"))
