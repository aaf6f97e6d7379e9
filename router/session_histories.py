"""What is kept of a session beside its replica, in the store: enough to compute it again elsewhere.

    record    head | part | part | ...
    head      where the session lives: its life, its replica, and whether its history is what follows
    part      length | what was added: token ids, operations by name, questions that stand | tokens by now, a number

A record begins as one part, an operation adds one, and a move puts one in the place of them all. The head and the
number at the end, which no two parts share, tell a record from what stood there before: of several routers that change
it, each by what it has seen, one does. What a tenant's records take is bounded; a history that has no room is given up,
and its head says so. They expire as sessions do that nobody uses.
"""

import secrets
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import LOGGED_OPERATIONS, TOKEN, ChatPrompt, History, OpRecord, Question, RawPrompt
from holdfast.router.config import RouterConfig
from holdfast.router.seal import Seal
from holdfast.router.store import Ends, Put, Store

HEAD = 256  # bytes that no head exceeds
LENGTH = struct.Struct("<I")
MARK = struct.Struct("<I8s")  # tokens by now, and a random number
KEPT, GIVEN_UP = "kept", "given-up"
UNBOUNDED = 2**53


@dataclass(frozen=True, slots=True)
class Home:
    """Where a session lives: `life` changes with every move."""

    life: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Record:
    """A session's record as it was seen; `kept`: its history is in it, of `tokens`."""

    home: Home
    kept: bool
    tokens: int
    ends: Ends

    @property
    def next_life(self) -> str:
        """That of the session after a move from here: the same, whoever moves it."""
        return sha256(self.ends.head + self.ends.tail).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Kept:
    """A whole record. `history` begins at the first token."""

    record: Record
    history: History
    questions: tuple[Question, ...]


class SessionHistories:
    """By tenant and session. `Seal`ed where the configuration names a key file, as all that is stored of answers is."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        self._store = store
        self._most = config.session_tenant_bytes
        self._seal = Seal(Path(config.cache_key_file)) if config.cache_key_file else None

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._most > 0

    @property
    def away(self) -> bool:
        """Whether what all routers have to see cannot be reached."""
        return self._store.degraded

    async def look(self, tenant: str, session_id: str) -> Record | None:
        """The record, but for what it holds. None where there is none, or it cannot be reached."""
        ends = await self._store.ends(_key(tenant, session_id), HEAD, MARK.size) if self.on else None
        return None if ends is None else _record(ends)

    async def read(self, tenant: str, session_id: str) -> Kept | None:
        """All of it. None where there is none, or it cannot be read."""
        key = _key(tenant, session_id)
        value = await self._store.get(key) if self.on else None
        record = None if value is None else _record(Ends(value[:HEAD], value[-MARK.size :]))
        if value is None or record is None:
            return None
        try:
            return self._parsed(key, record, value)
        except (ValueError, TypeError, KeyError, struct.error):  # another version's, or with another key
            return None

    async def put(
        self,
        tenant: str,
        session_id: str,
        home: Home,
        history: History,
        questions: tuple[Question, ...],
        at: Record | None,
    ) -> Put:
        """The whole of a history comes in the place of the record `at`; None: there is none."""
        head = _head(home, KEPT)
        part = self._part(_key(tenant, session_id), home.life, history, questions)
        return await self._grow(tenant, session_id, head + part, history.idle_s, at, anew=True)

    async def add(self, tenant: str, session_id: str, record: Record, history: History) -> Put:
        """What comes behind the record; it lives on, also where that is nothing."""
        part = b""
        if history.tokens and record.kept:
            part = self._part(_key(tenant, session_id), record.home.life, history, ())
        return await self._grow(tenant, session_id, part, history.idle_s, record)

    async def give_up(self, tenant: str, session_id: str, home: Home, idle_s: float, at: Record | None) -> Put:
        """The history is not kept any more: only where the session lives."""
        value = _head(home, GIVEN_UP) + MARK.pack(0, secrets.token_bytes(8))
        key, owner = _key(tenant, session_id), _owner(tenant)
        ends = None if at is None else at.ends
        return await self._store.grow(key, value, idle_s, owner, UNBOUNDED, ends, anew=True)

    async def drop(self, tenant: str, session_id: str) -> None:
        if self.on:
            await self._store.delete(_key(tenant, session_id), _owner(tenant))

    async def _grow(
        self, tenant: str, session_id: str, more: bytes, idle_s: float, at: Record | None, *, anew: bool = False
    ) -> Put:
        key, ends = _key(tenant, session_id), None if at is None else at.ends
        return await self._store.grow(key, more, idle_s, _owner(tenant), self._most, ends, anew=anew)

    # ---- parts ----

    def _part(self, key: str, life: str, history: History, questions: tuple[Question, ...]) -> bytes:
        told: dict[str, Any] = {"appends": history.appends}
        if history.done:
            told["done"] = [[each.name, each.content, each.end] for each in history.done]
        if questions:
            told["questions"] = questions
        body = orjson.dumps(told, default=list, option=orjson.OPT_NON_STR_KEYS) + b"\n" + history.tokens
        if self._seal is not None:
            body = self._seal.close(f"{key}/{life}/{history.start}", body)
        return LENGTH.pack(len(body)) + body + MARK.pack(history.end, secrets.token_bytes(8))

    def _parsed(self, key: str, record: Record, value: bytes) -> Kept:
        tokens, appends = bytearray(), 0
        done: list[OpRecord] = []
        questions: tuple[Question, ...] = ()
        at = len(record.ends.head)
        while record.kept and at < len(value):
            (length,) = LENGTH.unpack_from(value, at)
            body = value[at + LENGTH.size : at + LENGTH.size + length]
            at += LENGTH.size + length
            (end, _), at = MARK.unpack_from(value, at), at + MARK.size
            if self._seal is not None:
                body = self._seal.open(f"{key}/{record.home.life}/{len(tokens) // TOKEN}", body)
            head, _, added = body.partition(b"\n")
            told = orjson.loads(head)
            tokens += added
            appends = told["appends"]
            done += [OpRecord(*each) for each in told.get("done", ())]
            questions += tuple(map(_question, told.get("questions", ())))
            if len(tokens) != end * TOKEN:
                raise ValueError("a part is missing")
        history = History(record.home.life, 0, bytes(tokens), appends, tuple(done[-LOGGED_OPERATIONS:]))
        return Kept(record, history, questions)


def _record(ends: Ends) -> Record | None:
    try:
        line = ends.head[: ends.head.index(b"\n") + 1]
        life, replica_id, state = line.decode().split()
        tokens, _ = MARK.unpack(ends.tail)
        return Record(Home(life, replica_id), state == KEPT, tokens, Ends(line, ends.tail))
    except (ValueError, struct.error):
        return None


def _head(home: Home, state: str) -> bytes:
    return f"{home.life} {home.replica_id} {state}\n".encode()


def _question(told: dict[str, Any]) -> Question:
    prompt, sampling = told["prompt"], told["sampling"]
    chosen = Sampling(
        **{
            **sampling,
            "logit_bias": {int(token): bias for token, bias in sampling["logit_bias"].items()},
            "stop_token_ids": frozenset(sampling["stop_token_ids"]),
            "ends": frozenset(sampling["ends"]),
        }
    )
    asked = ChatPrompt(**prompt) if "messages" in prompt else RawPrompt(**prompt)
    return Question(told["question_id"], asked, chosen, tuple(told["stop"]))


def _key(tenant: str, session_id: str) -> str:
    return f"sessions/{tenant}/{session_id}"


def _owner(tenant: str) -> str:
    return f"sessions/{tenant}"
