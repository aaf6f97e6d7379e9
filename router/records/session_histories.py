"""Histories of sessions beside their replicas: enough to compute a session again elsewhere.

A record's value says where the session lives, whether its history is kept, and how many tokens it has. Its parts are
the history: an operation appends one, and a move puts one in the place of them all. Of several routers that change a
record, each by the version that it has seen, one does. What a tenant's records take is bounded. A history that has no
room is given up, and its record says so. Records expire when sessions do that are not used.
"""

import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson
from pydantic import TypeAdapter

from holdfast.replicas.requests import LOGGED_OPERATIONS, TOKEN, History, OpRecord, Question
from holdfast.router.config import RouterConfig
from holdfast.router.records.store import ABSENT, UNBOUNDED, PutResult, Record, Records

_QUESTIONS = TypeAdapter(tuple[Question, ...])


@dataclass(frozen=True, slots=True)
class Home:
    """A session's replica. `life` changes with every move."""

    life: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's record without its history. `kept`: its history is in it, of `tokens`."""

    home: Home
    kept: bool
    tokens: int
    version: str

    @property
    def next_life(self) -> str:
        """The session's life after a move from here: the same whichever router moves it."""
        return sha256(self.version.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A whole record. `history` begins at the first token."""

    record: SessionRecord
    history: History
    questions: tuple[Question, ...]


class SessionHistories:
    """By tenant and session. Every method raises UnavailableError while Redis is away."""

    def __init__(self, records: Records, config: RouterConfig) -> None:
        self._records = records
        self._limit = config.session_tenant_bytes

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._limit > 0

    @property
    def degraded(self) -> bool:
        return self._records.degraded

    async def look(self, tenant: str, session_id: str) -> SessionRecord | None:
        """The record without its history; None where there is none."""
        return _session_record(await self._records.get(_key(tenant, session_id))) if self.on else None

    async def read(self, tenant: str, session_id: str) -> SavedSession | None:
        """The whole record; None where there is none, or it cannot be read."""
        stored = await self._records.read(_key(tenant, session_id)) if self.on else None
        record = _session_record(stored)
        if stored is None or record is None:
            return None
        try:
            return _saved(record, stored.parts)
        except (ValueError, TypeError, KeyError):  # another version's
            return None

    async def put(
        self,
        tenant: str,
        session_id: str,
        home: Home,
        history: History,
        questions: tuple[Question, ...],
        replaced: SessionRecord | None,
    ) -> PutResult:
        """Store a whole history in the place of the record `replaced`; None: there must be none."""
        value, part = _value(home, True, history.end), _part(history, questions)
        version = ABSENT if replaced is None else replaced.version
        key = _key(tenant, session_id)
        return await self._records.put(key, value, history.idle_s, self._limit, version, (part,))

    async def append(self, tenant: str, session_id: str, record: SessionRecord, history: History) -> PutResult:
        """Add the history that follows the record's. This renews the record's TTL, also where nothing follows."""
        key = _key(tenant, session_id)
        if not (record.kept and history.tokens):
            await self._records.get(key, history.idle_s)
            return PutResult.STORED
        value = _value(record.home, True, history.end)
        part = _part(history, ())
        return await self._records.append(key, value, part, history.idle_s, self._limit, record.version)

    async def give_up(
        self, tenant: str, session_id: str, home: Home, idle_s: float, replaced: SessionRecord | None
    ) -> PutResult:
        """Keep only where the session lives, and no history any more."""
        version = ABSENT if replaced is None else replaced.version
        return await self._records.put(_key(tenant, session_id), _value(home, False, 0), idle_s, UNBOUNDED, version)

    async def drop(self, tenant: str, session_id: str) -> None:
        if self.on:
            await self._records.delete(_key(tenant, session_id))


def _value(home: Home, kept: bool, tokens: int) -> bytes:
    """With a random word, so that no two versions are equal."""
    return orjson.dumps([home.life, home.replica_id, kept, tokens, secrets.token_hex(8)])


def _session_record(record: Record | None) -> SessionRecord | None:
    if record is None:
        return None
    try:
        life, replica_id, kept, tokens, _ = orjson.loads(record.value)
    except ValueError:
        return None
    return SessionRecord(Home(life, replica_id), kept, tokens, record.version)


def _part(history: History, questions: tuple[Question, ...]) -> bytes:
    """A line of JSON and the token ids."""
    head: dict[str, Any] = {"appends": history.appends}
    if history.done:
        head["done"] = [[each.name, each.content, each.end] for each in history.done]
    if questions:
        head["questions"] = questions
    return orjson.dumps(head, default=list, option=orjson.OPT_NON_STR_KEYS) + b"\n" + history.tokens


def _saved(record: SessionRecord, parts: tuple[bytes, ...]) -> SavedSession:
    tokens, appends = bytearray(), 0
    operations: list[OpRecord] = []
    questions: tuple[Question, ...] = ()
    for part in parts:
        line, _, added = part.partition(b"\n")
        head = orjson.loads(line)
        tokens += added
        appends = head["appends"]
        operations += [OpRecord(*each) for each in head.get("done", ())]
        questions += _QUESTIONS.validate_python(head.get("questions", ()))
    if len(tokens) != record.tokens * TOKEN:
        raise ValueError("a part is missing")
    history = History(record.home.life, 0, bytes(tokens), appends, tuple(operations[-LOGGED_OPERATIONS:]))
    return SavedSession(record, history, questions)


def _key(tenant: str, session_id: str) -> str:
    return f"sessions/{tenant}/{session_id}"
