"""A rendered text to token ids in full: control tokens of the template as tokens, those of the client as text.

Long texts are tokenized on a thread, so that nobody on the event loop waits for them. Not here: what was tokenized
before and need not be again (`token_cache`).
"""

import asyncio
import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, TypeAlias, TypeVar

import numpy as np

from holdfast.replicas.errors import UnavailableError, too_long
from holdfast.replicas.types import TokenIds, tenant_of

LONG = 1 << 16
"""Characters that take an event loop about as long as a few steps: more are tokenized on a thread."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The tokens a vocabulary has in addition to its BPE pieces, and patterns that find them in a text.

    The library cuts a text at added tokens before anything else, so no BPE merge crosses the beginning of one. `all`
    finds every added token; the ones in `starts` (text to id) begin where a text may be cut in two that are tokenized
    apart. `control` finds the special ones, with the white space they swallow; `control_word` finds their contents
    alone, as they stand inside JSON text. Patterns are None where there is no such token.
    """

    ids: dict[str, int]
    special_ids: frozenset[int]
    starts: dict[str, int]
    all: re.Pattern[str] | None
    control: re.Pattern[str] | None
    control_word: re.Pattern[str] | None

    def start_at(self, text: str, position: int) -> bool:
        """Whether `text` may be cut at `position` because an added token begins there."""
        found = self.all.match(text, position) if self.all else None
        return found is not None and found[0] in self.starts


def read_added_tokens(backend: Any) -> AddedTokens:
    """What the `tokenizers.Tokenizer` `backend` has been given."""
    tokens = sorted(backend.get_added_tokens_decoder().items(), key=lambda item: -len(item[1].content))
    special = [(index, token) for index, token in tokens if token.special and len(token.content) > 1]
    plain_normal = backend.normalizer is None
    return AddedTokens(
        ids={token.content: index for index, token in tokens},
        special_ids=frozenset(index for index, token in tokens if token.special),
        starts={
            token.content: index
            for index, token in tokens
            if not (token.lstrip or token.single_word) and (plain_normal or not token.normalized)
        },
        all=_any_of({token.content for _, token in tokens}),
        control=_with_space([token for _, token in special]),
        control_word=_any_of({token.content for _, token in special}),
    )


def _with_space(tokens: list[Any]) -> re.Pattern[str] | None:
    """The longest of `tokens` (longest first), with the white space that it swallows."""
    if not any(token.lstrip or token.rstrip for token in tokens):
        return _any_of({token.content for token in tokens})
    space = {False: "", True: r"\s*"}
    patterns = [space[token.lstrip] + re.escape(token.content) + space[token.rstrip] for token in tokens]
    return re.compile("|".join(patterns))


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """The longest of `texts`."""
    return re.compile(_spelled(texts)) if texts else None


def _spelled(texts: set[str]) -> str:
    """A pattern for the longest of `texts` that branches where they part.

    Trap: one branch per text tries all of them wherever one might begin. With Gemma's six thousand added tokens that
    is seconds for a text of many lines.
    """
    head = commonprefix(list(texts))  # noqa: RUF071 - of characters, not of paths
    rest: dict[str, set[str]] = {}
    for text in texts:
        rest.setdefault(text[len(head) :][:1], set()).add(text[len(head) :])
    may_end = rest.pop("", None) is not None
    branches = f"(?:{'|'.join(map(_spelled, rest.values()))})" if rest else ""
    return re.escape(head) + branches + ("?" if rest and may_end else "")


class Encoder:
    """`backend` is a `tokenizers.Tokenizer`. For one thread."""

    def __init__(self, backend: Any, added: AddedTokens) -> None:
        self._backend = backend
        self._added = added
        self._inner: Any = None  # for text that does not begin the prompt; made when first needed

    def encode(self, text: str, mark: str = "", at_start: bool = True) -> TokenIds:
        """int32 ids of `text`, no tokens added around it.

        Where it holds `mark`, what stands between two control tokens is tokenized apart, with special tokens read as
        text. `at_start`: the prompt begins here (some tokenizers put a space before it).
        """
        if not mark or mark not in text or self._added.control is None:
            return np.array(_ids(self._backend, text), np.int32)
        ids: list[int] = []
        begun = position = 0  # text from `begun` on is not tokenized yet; `position` is the end of a control token
        ends = [(found.start(), found.end()) for found in self._added.control.finditer(text)]
        for start, end in [*ends, (len(text), len(text))]:
            if mark in text[position:start]:
                ids += _ids(self._backend, text[begun:position])
                ids += self._literal(text[position:start].replace(mark, ""), at_start and position == 0)
                begun = start
            position = end
        ids += _ids(self._backend, text[begun:])
        return np.array(ids, np.int32)

    def whole(self, text: str) -> TokenIds:
        """int32 ids of plain text with the tokens around it that the model expects; special tokens in it count."""
        return np.array(_ids(self._backend, text, around=True), np.int32)

    def _literal(self, text: str, at_start: bool) -> list[int]:
        """Ids of text in which special tokens mean nothing."""
        backend = self._backend if at_start else self._later()
        before = backend.encode_special_tokens
        backend.encode_special_tokens = True
        try:
            return _ids(backend, text)
        finally:
            backend.encode_special_tokens = before

    def _later(self) -> Any:
        """The tokenizer as it treats text after the first token: a space before the prompt is not put again."""
        if self._inner is None:
            self._inner = self._backend
            splitter = self._backend.pre_tokenizer
            if splitter is not None and '"first"' in splitter.__getstate__().decode():
                settings = json.loads(self._backend.to_str())
                _never_prepend(settings["pre_tokenizer"])
                self._inner = type(self._backend).from_str(json.dumps(settings))
        return self._inner


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
        # Not a lock around threads: who is cancelled leaves a thread behind that is not done yet.
        self._thread = ThreadPoolExecutor(1, "long-texts")
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, whose turn is next first
        self._lock = threading.Lock()

    def close(self) -> None:
        """Those that wait for the thread are refused at their turn; what is being tokenized is not waited for."""
        self._closed = True
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[Encoder], Result], length: int, scope: str = "") -> Result:
        """What `work`, on `length` characters of a scope's, makes of the encoder that the thread has.

        Raises UnavailableError once closed, and ContextLengthError for so many characters that no tokenizing could make
        them fit, where the tokenizer neither drops nor squeezes any.
        """
        self._check()
        least = length // self.token_characters if self.token_characters else 0
        if self._context and least > self._context:
            raise too_long(self._context, f"the prompt has more than {least} tokens", "prompt")

        def at_its_turn(encoder: Encoder) -> Result:
            self._check()
            return work(encoder)

        return await asyncio.wrap_future(self._submit(at_its_turn, scope))

    async def beside(self, work: Callable[[], Result], scope: str = "") -> Result:
        """What `work` returns, on the thread. Raises UnavailableError once closed."""
        return await self.run(lambda _: work(), 0, scope)

    def _submit(self, work: Callable[[Encoder], Result], scope: str) -> Future[Result]:
        future = Future[Result]()
        with self._lock:
            self._waiting.setdefault(tenant_of(scope), deque()).append((future, work))
        self._thread.submit(self._next)  # one for each that waits, whichever it is for
        return future

    def _next(self) -> None:
        """Do what the next tenant's first text is to have done; the tenant's next turn is behind the others'."""
        with self._lock:
            tenant, texts = self._waiting.popitem(last=False)
            future, work = texts.popleft()
            if texts:
                self._waiting[tenant] = texts
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(self._encoder))
        except BaseException as error:  # the supervisor of the thread: whoever waits is told
            future.set_exception(error)

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


_SLACK = 4
"""Where a tokenizer rewrites a text first, this much shorter it may become."""
_RUNS = (" ", "\n", "\t", "\x01", "x", "7", ".", "\u0301", "\u200b", "\U0010fffd", "x. 7\n\U0010fffd")
"""What tokenizers drop, or squeeze into one token however much of it there is: if one does, it shows with these."""
_RUN_TOKENS = 8
"""Tokens that a run must have at least: one that is squeezed has one, or two with the space put before it."""


def _most_characters(backend: Any) -> int:
    """No token stands for more characters; 0 where one may stand for any number, or some have none.

    White space may be dropped, a run of what is unknown may be one token, an added token may swallow the space next to
    it, and a text may be cut off.
    """
    if backend.truncation or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    most = _SLACK * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    runs = [(run * most * _RUN_TOKENS)[: most * _RUN_TOKENS] for run in _RUNS]
    found = backend.encode_batch_fast(runs, add_special_tokens=False)
    return most if min(map(len, found)) >= _RUN_TOKENS else 0
