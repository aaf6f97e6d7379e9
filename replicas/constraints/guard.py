"""Calls that are whole in a text that is free: a matcher that asks nothing until a call begins.

    text ... opener | name, arguments, markup | text ... opener | ...
    waits             follows the grammar       waits

While it waits it only looks for the opener of a call, a set look-up for most tokens: nothing is masked, and steps
overlap and draft as if it were not there. Inside of a call tokens are drawn freely as well, and what the grammar does
not let stand is drawn again, from then on under masks until the call has closed. So a model that writes whole calls
pays for reading them, and what it writes is what it would have written.

A bare call has no opener: it begins where the text has spelled a declared name and the key of its arguments. Up to
there it may be an answer in JSON.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.replicas.constraints.grammar import CallForm, Forms
from holdfast.replicas.constraints.guidance import GuidedMatcher, Vocabulary
from holdfast.replicas.constraints.matcher import Bits, Matcher

_BETWEEN = b" \t\r\n;,"  # what may stand before a bare call
_LONGEST_BEGINNING = 256  # bytes in which a bare call has come to its arguments, or is none


@dataclass(frozen=True, slots=True, eq=False)
class CallWatch:
    """How calls begin, for one model. `suspects`: the tokens with which an opener may begin or end. `begun`: the
    beginning of an opener that stands in the prompt.
    """

    vocabulary: Vocabulary
    openers: tuple[bytes, ...]
    suspects: frozenset[int]
    bare: CallForm | None
    frame: re.Pattern[bytes] | None  # of a bare call up to its arguments
    begun: bytes = b""
    _openers: dict[bytes, Sequence[int]] = field(default_factory=dict)  # by the text before them

    @property
    def n_known(self) -> int:
        """How many tokens the vocabulary has."""
        return len(self.vocabulary.tokens)

    @classmethod
    def of(cls, forms: Forms, vocabulary: Vocabulary) -> "CallWatch":
        openers = tuple({form.opener.encode() for form in forms.triggered})
        beginnings = tuple({opener[:1] for opener in openers})
        suspects = {
            token
            for token, content in enumerate(vocabulary.tokens)
            if any(first in content for first in beginnings) and begins(content, openers)
        }
        frame = re.compile(forms.bare.frame.encode()) if forms.bare is not None else None
        return cls(vocabulary, openers, frozenset(suspects), forms.bare, frame, forms.begun.encode())

    def known(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` up to the first that the vocabulary lacks, at which the library fails."""
        return tokens[: next((i for i, token in enumerate(tokens) if token >= self.n_known), len(tokens))]

    def content(self, token: int) -> bytes:
        """Its bytes; none where the vocabulary lacks it."""
        return self.vocabulary.tokens[token] if token < self.n_known else b""

    def opened(self, text: bytes) -> int:
        """Where the first opener in `text` begins; -1 where there is none."""
        return min((place for opener in self.openers if (place := text.find(opener)) >= 0), default=-1)

    def completing(self, before: bytes) -> Sequence[int]:
        """The tokens with which an opener is complete behind `before`, the beginning of one."""
        if (found := self._openers.get(before)) is None:
            tokens = enumerate(self.vocabulary.tokens)
            found = self._openers[before] = [token for token, content in tokens if self.opened(before + content) >= 0]
        return found

    def names(self, text: bytes, declared: frozenset[str]) -> bool:
        """Whether `text` comes to the arguments of a bare call of one of `declared`."""
        found = self.frame.match(text) if self.frame is not None else None
        return found is not None and found[1].decode(errors="replace") in declared

    def encode(self, text: bytes) -> Sequence[int] | None:
        """Tokens that spell `text`; None where it ends inside of a character."""
        try:
            ids = self.vocabulary.encode(text.decode())
        except UnicodeDecodeError:
            return None
        return ids if ids or not text else None


def begins(text: bytes, openers: Sequence[bytes]) -> bool:
    """Whether `text` has one of `openers` in it, or ends with the beginning of one."""
    return any(opener in text for opener in openers) or bool(beginning(text, openers))


def beginning(text: bytes, openers: Sequence[bytes]) -> bytes:
    """The longest end of `text` that one of `openers` goes on from."""
    longest = max(map(len, openers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(opener.startswith(end) and end != opener for opener in openers):
            return end
    return b""


class CallGuard:
    """`constraints.matcher.Matcher` of a text in which calls follow `calls`, a matcher of nothing but calls.

    `names`: the declared tools. A grammar that grows beyond its limits is given up, and the reply goes on without;
    where it `must` be followed, the guard has failed. `over`: calls that may end are over (`Forms.over_when_complete`).
    `loose`: it does not hold every tool to its schema.
    """

    __slots__ = (
        *("_failed", "_forced", "_inner", "_must", "_names", "_over", "_refused", "_start", "_tail", "_watch"),
        *("calls", "loose"),
    )

    def __init__(
        self,
        calls: GuidedMatcher,
        watch: CallWatch,
        names: frozenset[str],
        must: bool,
        over: bool = False,
        loose: bool = False,
    ) -> None:
        self.calls = calls
        self.loose = loose
        self._over = over
        self._watch = watch
        self._names = names
        self._must = must
        self._inner: GuidedMatcher | None = None  # of the call that has begun
        self._refused = False  # a token of this call
        self._failed = False
        self._forced: list[int] = []
        self._tail = watch.begun  # of the text: the beginning of an opener
        self._start: bytes | None = b"" if watch.bare is not None else None  # the text, while a bare call may begin

    @property
    def bare(self) -> bool:
        """Whether calls may have no opener: then one is known for a call only with its arguments."""
        return self._watch.bare is not None

    @property
    def words(self) -> int:
        return self.calls.words

    @property
    def binding(self) -> bool:
        return self._refused

    @property
    def finished(self) -> bool:
        return False

    @property
    def failed(self) -> bool:
        return self._failed and self._must

    @property
    def given_up(self) -> bool:
        return self._failed and not self._must

    def copy(self) -> "CallGuard":
        other = CallGuard(self.calls, self._watch, self._names, self._must, self._over, self.loose)
        other._inner = self._inner and self._inner.copy()
        other._refused, other._failed, other._forced = self._refused, self._failed, self._forced
        other._tail, other._start = self._tail, self._start
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self._read(tokens)
        # Now, while the grammar is at hand: before the next step it takes several times as long.
        self._forced = self._inner.forced() if self._inner is not None else []
        return stand

    def _read(self, tokens: Sequence[int]) -> int:
        stand = 0
        while stand < len(tokens):
            rest = tokens[stand:] if stand else tokens
            if self._inner is not None:
                taken = self._follow(self._inner, rest)
                if not taken and self._inner is not None:
                    return stand
                stand += taken
            elif self._nothing_begins(rest):
                break
            elif self._look(self._watch.content(rest[0])):
                stand += 1
            else:
                return stand
        return len(tokens)

    def accepts(self, tokens: Sequence[int]) -> int:
        if self._inner is not None:  # asking a matcher takes a fraction of what a copy's steps take
            stand = self._inner.accepts(self._watch.known(tokens))
            if stand == len(tokens) or not (self._inner.failed or self._inner.completes(tokens[:stand])):
                return stand
        elif self._nothing_begins(tokens):
            return len(tokens)
        return self.copy().advance(tokens)

    def forced(self) -> list[int]:
        return self._forced

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        ahead = self.copy() if drafts else self
        for row in range(len(drafts) + 1):
            if ahead._refused and ahead._inner is not None:
                ahead._inner.fill((), out[row : row + 1])
            else:
                out[row] = -1
            if row < len(drafts) and not ahead.advance(drafts[row : row + 1]):
                out[row + 1 :] = -1
                return

    def _nothing_begins(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` of the free text have nothing in them that a call may begin with."""
        if self._failed:
            return True
        return self._start is None and not self._tail and self._watch.suspects.isdisjoint(tokens)

    def _follow(self, inner: GuidedMatcher, tokens: Sequence[int]) -> int:
        """How many of `tokens` the call goes on with. None: its first one is refused, or the text is free again."""
        if self._refused:  # under masks one by one: none binds any more behind the token that completes the call
            tokens = tokens[:1]
        if max(tokens) >= self._watch.n_known:  # an output layer may have rows without a token
            tokens = self._watch.known(tokens)
        taken = inner.take(tokens)
        if taken:
            self._settle(inner)
        elif inner.failed or inner.complete:
            self._leave(inner)
        else:
            self._refused = True
        return taken

    def _look(self, content: bytes) -> bool:
        """Take in a piece of free text, in which a call may begin; False where it goes on as no call does."""
        before, text = self._tail, self._tail + content
        if self._start is not None and (stands := self._bare(content)) is not None:
            return stands
        place = self._watch.opened(text)
        if place < 0:
            self._tail = beginning(text, self._watch.openers)
            return True
        return self._begin(text[place:], before[place:])

    def _bare(self, content: bytes) -> bool | None:
        """Once the text has come to the arguments of a bare call, whether they may begin so; None before."""
        form, frame = self._watch.bare, self._watch.frame
        assert form is not None
        assert frame is not None
        before = (self._start or b"").lstrip(_BETWEEN)
        text = (before + content).lstrip(_BETWEEN)
        self._start = text if _may_begin(text, form) else None
        found = frame.match(text)
        if found is None or (name := found[1].decode(errors="replace")) not in self._names:
            return None
        begun, rest = form.until_arguments(name).encode(), text[found.end() :]
        if not rest and not found[0].endswith(b" "):  # it may still come
            begun = begun.rstrip()
        return self._begin(begun + rest, before)

    def _begin(self, text: bytes, before: bytes) -> bool:
        """Whether a call may begin with `text`. It began with `before`, from where it is followed if it may not."""
        if self._open(text):
            return True
        if self._open(before):
            self._refused = True
            return False
        self._failed, self._tail, self._start = True, b"", None  # it cannot be followed at all
        return True

    def _open(self, text: bytes) -> bool:
        """Whether a call may begin with `text`; from here on it is followed."""
        ids, inner = self._watch.encode(text), self.calls.another()
        if ids is None or inner.take(ids) < len(ids):
            return False
        self._inner, self._tail, self._start = inner, b"", None
        self._settle(inner)
        return True

    def _settle(self, inner: GuidedMatcher) -> None:
        """The call has come further."""
        if (self._over and inner.complete) or inner.finished:  # or it has failed
            self._leave(inner)
        elif self._refused:
            self._refused = not inner.complete

    def _leave(self, inner: GuidedMatcher) -> None:
        """The calls are over, or cannot be followed any more: the text is free again."""
        bare = self._watch.bare
        self._failed = self._failed or inner.failed
        self.calls.spared(inner)
        self._inner, self._refused = None, False
        self._start = b"" if bare is not None and not bare.head else None


def _may_begin(text: bytes, form: CallForm) -> bool:
    """Whether a reply that has come to `text` may still be a bare call."""
    return not text or (text.startswith(form.begins.encode()) and len(text) < _LONGEST_BEGINNING)


class CallBan(Matcher):
    """A matcher of a text in which no call begins. All else is free.

    The token with which an opener would be complete is drawn again. Where calls need no opener it is the one with which
    the reply would come to the arguments of a tool that is among `names`.
    """

    __slots__ = ("_names", "_refused", "_start", "_tail", "_watch")

    def __init__(self, watch: CallWatch, names: frozenset[str]) -> None:
        self._watch = watch
        self._names = names
        self._refused = False
        self._tail = watch.begun
        self._start: bytes | None = b"" if watch.bare is not None and names else None

    @property
    def words(self) -> int:
        return -(-self._watch.n_known // 32)

    @property
    def binding(self) -> bool:
        return self._refused

    def copy(self) -> "CallBan":
        other = CallBan(self._watch, self._names)
        other._refused, other._tail, other._start = self._refused, self._tail, self._start
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        if self._start is None and not self._tail and self._watch.suspects.isdisjoint(tokens):
            self._refused = self._refused and not tokens
            return len(tokens)
        for stand, token in enumerate(tokens):
            content = self._watch.content(token)
            if self._begins(content):
                self._refused = True
                return stand
            self._refused = False
            self._tail = beginning(self._tail + content, self._watch.openers)
            if self._start is not None and self._watch.bare is not None:
                text = self._text(content)
                self._start = text if _may_begin(text, self._watch.bare) else None
        return len(tokens)

    def accepts(self, tokens: Sequence[int]) -> int:
        return self.copy().advance(tokens)

    def forced(self) -> list[int]:
        return []

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        ahead = self.copy() if drafts else self
        for row in range(len(drafts) + 1):
            out[row] = -1
            if ahead._refused:
                ahead._forbid(out[row])
            if row < len(drafts) and not ahead.advance(drafts[row : row + 1]):
                out[row + 1 :] = -1
                return

    def _begins(self, content: bytes) -> bool:
        """Whether a call would begin with `content`, the next of the text."""
        if self._watch.opened(self._tail + content) >= 0:
            return True
        return self._start is not None and self._watch.names(self._text(content), self._names)

    def _text(self, content: bytes) -> bytes:
        """The reply up to `content`, where it may be a bare call."""
        return ((self._start or b"") + content).lstrip(_BETWEEN)

    def _forbid(self, row: Bits) -> None:
        """Take from the mask the tokens that must not come next."""
        tokens = [*self._watch.completing(self._tail)]
        if self._start is not None:
            known = enumerate(self._watch.vocabulary.tokens)
            tokens += (token for token, content in known if self._watch.names(self._text(content), self._names))
        at = np.array(tokens, np.int64)
        np.bitwise_and.at(row.view(np.uint32), at // 32, ~(np.uint32(1) << (at % 32).astype(np.uint32)))
