"""A rendered text to token ids: control tokens of the template as tokens, those of the client as text.

`TokenCache` knows which part of a prompt is tokenized already, so only its new end is (Stateful Inference, section
3.4). It keeps conversations as a text and its ids: prompts as they were tokenized, and finished turns with their ids
exactly as generated. A new text takes over the longest beginning that it shares with one of them, up to the beginning
of an added token, where no merge can cross.

`LongTexts` tokenizes long texts on a thread, so that the event loop never waits for them.
"""

import asyncio
import json
import math
import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from os.path import commonprefix
from string import printable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from holdfast.replicas.errors import UnavailableError, too_long
from holdfast.replicas.types import TokenIds, common_prefix, tenant_of

LONG = 1 << 16
"""Characters that take an event loop about as long as a few steps: more are tokenized on a thread."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens a vocabulary has in addition to its BPE pieces, and patterns that find them in a text.

    The library cuts a text at added tokens before anything else, so no BPE merge crosses the beginning of one. `all`
    finds every added token. A text may be cut before one in `starts` (text to id), and tokenized in two parts.
    `control` finds the special ones, with the white space they swallow; `control_word` finds their contents alone, as
    they stand inside JSON text. Patterns are None where there is no such token.
    """

    ids: dict[str, int]
    special_ids: frozenset[int]
    starts: dict[str, int]
    all: re.Pattern[str] | None
    control: re.Pattern[str] | None
    control_word: re.Pattern[str] | None

    def start_at(self, text: str, position: int) -> bool:
        """Whether `text` may be cut at `position` because an added token begins there."""
        match = self.all.match(text, position) if self.all else None
        return match is not None and match[0] in self.starts


def read_added_tokens(backend: Any) -> AddedTokens:
    """The added tokens of the `tokenizers.Tokenizer` `backend`."""
    tokens = sorted(backend.get_added_tokens_decoder().items(), key=lambda item: -len(item[1].content))
    special = [token for _, token in tokens if token.special and len(token.content) > 1]
    control_word = control = _longest_of({token.content for token in special})
    if any(token.lstrip or token.rstrip for token in special):
        space = {False: "", True: r"\s*"}
        spaced = [space[token.lstrip] + re.escape(token.content) + space[token.rstrip] for token in special]
        control = "|".join(spaced)
    whole = backend.normalizer is None
    starts = [
        (token.content, index)
        for index, token in tokens
        if not (token.lstrip or token.single_word) and (whole or not token.normalized)
    ]
    every = _longest_of({token.content for _, token in tokens})
    return AddedTokens(
        {token.content: index for index, token in tokens},
        frozenset(index for index, token in tokens if token.special),
        dict(starts),
        *(re.compile(pattern) if pattern else None for pattern in (every, control, control_word)),
    )


def _longest_of(texts: set[str]) -> str:
    """A pattern for the longest of `texts` that branches where they part.

    Trap: one branch per text tries all of them wherever one might begin. With Gemma's six thousand added tokens that
    is seconds for a text of many lines.
    """
    head = commonprefix(list(texts))  # noqa: RUF071 - of characters, not of paths
    rest: dict[str, set[str]] = {}
    for text in texts:
        rest.setdefault(text[len(head) :][:1], set()).add(text[len(head) :])
    may_end = rest.pop("", None) is not None
    branches = f"(?:{'|'.join(map(_longest_of, rest.values()))})" if rest else ""
    return re.escape(head) + branches + ("?" if rest and may_end else "")


class Encoder:
    """`backend` is a `tokenizers.Tokenizer`. For one thread."""

    def __init__(self, backend: Any, added: AddedTokens) -> None:
        self._backend = backend
        self._added = added

    def encode(self, text: str, mark: str = "", at_start: bool = True) -> TokenIds:
        """int32 ids of `text`, no tokens added around it.

        Where it holds `mark`, the text between two control tokens is tokenized apart, with special tokens read as
        text. `at_start`: the prompt begins here (some tokenizers put a space before it).
        """
        if not mark or mark not in text or self._added.control is None:
            return np.array(_ids(self._backend, text), np.int32)
        ids: list[int] = []
        pending = position = 0  # text from `pending` on is not tokenized yet; `position` is the end of a control token
        ends = [match.span() for match in self._added.control.finditer(text)]
        for start, end in [*ends, (len(text), len(text))]:
            if mark in text[position:start]:
                ids += _ids(self._backend, text[pending:position])
                ids += self._literal(text[position:start].replace(mark, ""), at_start and position == 0)
                pending = start
            position = end
        ids += _ids(self._backend, text[pending:])
        return np.array(ids, np.int32)

    def whole(self, text: str) -> TokenIds:
        """int32 ids of plain text with the tokens around it that the model expects; special tokens in it count."""
        return np.array(_ids(self._backend, text, around=True), np.int32)

    def _literal(self, text: str, at_start: bool) -> list[int]:
        """Ids of text in which special tokens mean nothing."""
        backend = self._backend if at_start else self._later
        before = backend.encode_special_tokens
        backend.encode_special_tokens = True
        try:
            return _ids(backend, text)
        finally:
            backend.encode_special_tokens = before

    @cached_property
    def _later(self) -> Any:
        """The tokenizer for text after the first token: it does not put the space of a prompt's beginning again."""
        splitter = self._backend.pre_tokenizer
        if splitter is None or '"first"' not in splitter.__getstate__().decode():
            return self._backend
        settings = json.loads(self._backend.to_str())
        _never_prepend(settings["pre_tokenizer"])
        return type(self._backend).from_str(json.dumps(settings))


def _ids(backend: Any, text: str, around: bool = False) -> list[int]:
    """Ids of `text`; `around`: with the tokens around it that the model expects."""
    # Trap: `encode` holds the GIL until it is done, so that on a thread too it stops the event loop. A batch lets it
    # go; the fast one looks for no offsets, which took as long as the ids and were thrown away with the GIL held.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=around)[0].ids
    return ids


def _never_prepend(settings: dict[str, Any]) -> None:
    if settings.get("prepend_scheme") == "first":
        settings["prepend_scheme"] = "never"
    for part in settings.get("pretokenizers", ()):
        _never_prepend(part)


# ---- conversations that are tokenized already ----

_SHARE = 0.5
"""The share of all characters that one tenant may have. Others keep the rest, whatever it does."""
_OVERHEAD = 256
"""Memory of an entry beside its text, counted in characters."""
_TAIL = 32
"""Characters: when a text grows, its last tokens may change, but none further back than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A text of a program and its ids. It may be cut before character `chars[i]`, which is token `tokens[i]`.

    `mark` as in `Rendered`: the same text has other ids under another one. `program` is empty where it is not known.
    """

    text: str
    ids: TokenIds
    chars: list[int]
    tokens: list[int]
    mark: str = ""
    scope: str = ""
    program: str = ""

    @property
    def size(self) -> int:
        return len(self.text) + _OVERHEAD

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.scope, self.mark, self.text, self.program


_NOTHING = Entry("", np.zeros(0, np.int32), [], [])
_KEY = attrgetter("key")


@dataclass(frozen=True, slots=True)
class PendingText:
    """A text whose first `char` characters are the first `token` ids of `base`; the rest is to be tokenized."""

    text: str
    mark: str
    scope: str
    program: str
    base: Entry
    char: int
    token: int


class TokenCache:
    """Conversations of `tokenizer` (a transformers tokenizer), at most `characters` of them.

    Each belongs to a program of a scope: a tenant, or a part of one. Scopes share nothing. A full cache drops the least
    recently used conversation: the tenant's own if it has more than half of all characters, else any tenant's.
    """

    def __init__(self, tokenizer: Any, characters: float = math.inf) -> None:
        self.added: AddedTokens = read_added_tokens(tokenizer.backend_tokenizer)
        self.encoder = Encoder(tokenizer.backend_tokenizer, self.added)
        starts = list(self.added.starts.values())
        self._starts = np.zeros(max(starts, default=-1) + 2, np.bool_)  # by id; the last stands for all above, too
        self._starts[starts] = True
        self._limit = characters
        self._sizes: dict[str, int] = {}  # by tenant
        self._used: OrderedDict[Entry, None] = OrderedDict()  # the most recently used at the end
        self._sorted: list[Entry] = []  # by key: the entry that shares most with a text stands next to its place
        self._latest: dict[tuple[str, str], Entry] = {}  # by scope and program
        self._unsure = lru_cache(256)(self._unsure_of)  # templates have few endings
        self.reused = 0  # characters taken from entries
        self.tokenized = 0  # characters tokenized

    def encode(self, text: str, mark: str = "", scope: str = "", program: str = "") -> TokenIds:
        """int32 ids of a rendered text, no tokens added around it; `mark` as in `Rendered`."""
        pending = self.begin(text, mark, scope, program)
        return self.end(pending, self.tokenize(pending, self.encoder))

    def begin(self, text: str, mark: str = "", scope: str = "", program: str = "") -> PendingText:
        """Find the known beginning of a text. `tokenize` and `end` follow; other texts may be encoded in between.

        The part shared with the program's latest turn keeps that turn's ids, even if another entry shares more.
        """
        base, char, token = _NOTHING, 0, 0
        latest = self._latest.get((scope, program)) if program else None
        if latest is not None and latest.mark == mark:
            base, (char, token) = latest, self._cut(latest, text)
        own = base.ids[:token]
        for entry in self._nearest(text, mark, scope, program):
            cut = self._cut(entry, text)
            if cut[0] > char and np.array_equal(entry.ids[: len(own)], own):
                base, (char, token) = entry, cut
        if char:
            self._used.move_to_end(base)
        return PendingText(text, mark, scope, program, base, char, token)

    def tokenize(self, pending: PendingText, encoder: Encoder) -> Entry:
        """Tokenize the rest. Only the encoder changes, so another thread may do this with its own encoder."""
        ids = pending.base.ids[: pending.token]
        if pending.char < len(pending.text):
            ids = np.concatenate((ids, encoder.encode(pending.text[pending.char :], pending.mark, not pending.char)))
        return self._entry(pending, ids)

    def end(self, pending: PendingText, entry: Entry) -> TokenIds:
        """Keep the text. Returns the ids of all of it."""
        self.reused += pending.char
        self.tokenized += len(pending.text) - pending.char
        self._keep(pending.base, entry)
        return entry.ids

    def remember(self, text: str, ids: TokenIds, mark: str = "", scope: str = "", program: str = "") -> None:
        """A finished turn: from now on `text` stands for `ids`, also as the beginning of a longer text."""
        ids = np.asarray(ids, np.int32)
        pending = self.begin(text, mark, scope, program)
        if not np.array_equal(pending.base.ids[: pending.token], ids[: pending.token]):
            pending = PendingText(text, mark, scope, program, _NOTHING, 0, 0)
        self._keep(pending.base, self._entry(pending, ids))

    def unsure(self, text: str) -> int:
        """How many of a text's last tokens may change once a character follows it."""
        return self._unsure(text[-_TAIL:])

    def _unsure_of(self, tail: str) -> int:
        ids = self.encoder.encode(tail)
        return max(len(ids) - common_prefix(ids, self.encoder.encode(tail + char)) for char in printable)

    def _nearest(self, text: str, mark: str, scope: str, program: str) -> list[Entry]:
        """Entries of this scope and mark; one of them shares more of `text` than any other entry."""
        place = bisect_left(self._sorted, (scope, mark, text, program), key=_KEY)
        neighbours = self._sorted[max(0, place - 1) : place + 1]
        entries = [entry for entry in neighbours if (entry.scope, entry.mark) == (scope, mark)]
        # An entry that the text contains as a whole may share as much as these, which continue differently.
        whole = text[: max((common_start(entry.text, text) for entry in entries), default=0)]
        place = bisect_left(self._sorted, (scope, mark, whole, ""), key=_KEY)
        return entries + [entry for entry in self._sorted[place : place + 1] if entry.key[:3] == (scope, mark, whole)]

    def _cut(self, entry: Entry, text: str) -> tuple[int, int]:
        """The character and the token up to which `entry` can stand for the beginning of `text`."""
        shared = common_start(entry.text, text)
        if shared == len(entry.text) and (shared == len(text) or self.added.start_at(text, shared)):
            return shared, len(entry.ids)
        for index in range(bisect_right(entry.chars, shared) - 1, -1, -1):
            if self.added.start_at(text, entry.chars[index]):
                return entry.chars[index], entry.tokens[index]
        return 0, 0

    def _entry(self, pending: PendingText, ids: TokenIds) -> Entry:
        """The text of `pending` with its `ids`. It may be cut at added tokens that are in both text and ids."""
        base, char, token = pending.base, pending.char, pending.token
        known = bisect_left(base.chars, char)
        chars, tokens = base.chars[:known], base.tokens[:known]
        if self.added.all is not None:
            matches = (match for match in self.added.all.finditer(pending.text, char) if match[0] in self.added.starts)
            places = token + np.flatnonzero(self._starts.take(ids[token:], mode="clip"))
            for place, match in zip(places.tolist(), matches, strict=False):
                if ids[place] != self.added.starts[match[0]]:
                    break
                chars.append(match.start())
                tokens.append(place)
        return Entry(pending.text, ids, chars, tokens, pending.mark, pending.scope, pending.program)

    def _keep(self, base: Entry, entry: Entry) -> None:
        """Keep an entry instead of those of its program that it contains."""
        most = self._limit * _SHARE
        if entry.size > most:
            return
        place = bisect_left(self._sorted, entry.key, key=_KEY)
        for old in (base, self._latest.get((entry.scope, entry.program)), *self._sorted[place : place + 1]):
            if old is None or old not in self._used or not entry.text.startswith(old.text):
                continue
            if (old.program, old.mark, old.scope) == (entry.program, entry.mark, entry.scope):
                self._drop(old)
        self._sorted.insert(bisect_left(self._sorted, entry.key, key=_KEY), entry)
        self._used[entry] = None
        if entry.program:
            self._latest[entry.scope, entry.program] = entry
        tenant = tenant_of(entry.scope)
        self._sizes[tenant] = self._sizes.get(tenant, 0) + entry.size
        while self._sizes[tenant] > most:
            self._drop(next(each for each in self._used if tenant_of(each.scope) == tenant))
        while sum(self._sizes.values()) > self._limit:
            self._drop(next(iter(self._used)))

    def _drop(self, entry: Entry) -> None:
        del self._used[entry]
        del self._sorted[bisect_left(self._sorted, entry.key, key=_KEY)]
        if self._latest.get((entry.scope, entry.program)) is entry:
            del self._latest[entry.scope, entry.program]
        tenant = tenant_of(entry.scope)
        self._sizes[tenant] -= entry.size
        if not self._sizes[tenant]:
            del self._sizes[tenant]


def common_start(one: str, other: str) -> int:
    """How many characters two texts have in common from their beginning."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- long texts ----

_Job: TypeAlias = tuple[Future[Any], Callable[[Encoder], Any]]


class LongTexts:
    """A thread that tokenizes long texts, one at a time. Tenants take turns; the texts of each keep their order.

    It has a tokenizer of its own: one that reads special tokens as text for a moment must not be used by two threads.
    `backend` is a `tokenizers.Tokenizer`. `context`: tokens that a prompt may have; 0: any number.
    """

    def __init__(self, backend: Any, added: AddedTokens, context: int) -> None:
        # Now, not for the first long text: with 150,000 tokens this takes most of a second and holds the GIL.
        backend = type(backend).from_str(backend.to_str())
        self._encoder = Encoder(backend, added)
        self.token_characters = _most_characters(backend)
        self._context = context
        self._closed = False
        # Not a lock around threads: a cancelled caller leaves a thread behind that is not done yet.
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, the next one's turn first
        self._lock = threading.Lock()

    def close(self) -> None:
        """Refuse waiting jobs at their turn. Does not wait for the running job."""
        self._closed = True
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[Encoder], Result], length: int, scope: str = "") -> Result:
        """The result of `work` with the thread's encoder, on `length` characters of a scope.

        Raises UnavailableError once closed, and ContextLengthError at once for so many characters that they cannot fit,
        if the tokenizer neither drops nor squeezes any.
        """
        self._check()
        least = length // self.token_characters if self.token_characters else 0
        if self._context and least > self._context:
            raise too_long(self._context, f"the prompt has more than {least} tokens", "prompt")
        future = Future[Result]()
        with self._lock:
            self._waiting.setdefault(tenant_of(scope), deque()).append((future, work))
        self._thread.submit(self._next)  # one for each job, whichever it runs
        return await asyncio.wrap_future(future)

    def _next(self) -> None:
        """Run the first job of the next tenant, and put that tenant behind the others."""
        with self._lock:
            tenant, jobs = self._waiting.popitem(last=False)
            future, work = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._check()
            future.set_result(work(self._encoder))
        except BaseException as error:  # the supervisor of the thread: the caller gets the error
            future.set_exception(error)

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


_SLACK = 4
"""A tokenizer that first rewrites a text may make it this much shorter."""
_RUNS = (" ", "\n", "\t", "\x01", "x", "7", ".", "\u0301", "\u200b", "\U0010fffd", "x. 7\n\U0010fffd")
"""Characters that tokenizers drop, or squeeze into one token however many: tokenizing runs of them shows it."""
_RUN_TOKENS = 8
"""Tokens that a run must have at least: a squeezed one has one, or two with the space put before it."""


def _most_characters(backend: Any) -> int:
    """The most characters of one token; 0 if a token may stand for any number, or characters have no token.

    White space may be dropped, a run of unknown characters may be one token, an added token may swallow the space next
    to it, and a text may be cut off.
    """
    if backend.truncation or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    most = _SLACK * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    runs = [(run * most * _RUN_TOKENS)[: most * _RUN_TOKENS] for run in _RUNS]
    encodings = backend.encode_batch_fast(runs, add_special_tokens=False)
    return most if min(map(len, encodings)) >= _RUN_TOKENS else 0
