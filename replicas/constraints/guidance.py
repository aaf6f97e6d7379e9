"""Matchers over llguidance: of a reply that follows a grammar, and of free text in which calls do, or have no place.

llguidance works masks out as they are asked for, keeps a matcher's state in this process, and can go back, which drafts
need. Not here: the text of grammars (`grammar`), and when one is compiled (`compiler`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from holdfast.replicas.constraints.grammar import CallForm, Forms
from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.text.decode import Pieces

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
except ImportError:  # the engine runs without it, and says so to requests that need it
    AVAILABLE = False
else:
    AVAILABLE = True

# A schema may be hostile, and masks are worked out on the engine's thread. With these limits a mask takes a few
# milliseconds, with llguidance's own hundreds. A reply whose grammar needs more fails.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_SENTINEL = "\x02"  # put before a text where tokenizers add a space to the first word
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarError(Exception):
    """A grammar that llguidance does not take, in its words but without what it shows of the grammar."""

    def __init__(self, error: str) -> None:
        first, *lines = error.splitlines() or [""]
        why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        pattern = lines[0].strip() if why else ""
        super().__init__(f"the pattern {pattern!r} cannot be read: {why[0]}" if why else _PLACE.sub("", first, count=1))


class Vocabulary:
    """The tokens of `tokenizer` (transformers) as a grammar sees them: the bytes of each, and which spell a text.

    Markers of tool calls are text: the grammar spells them, as the reader of calls does. The `control` ids are none,
    and nothing but the end of a reply may use them. `eos`: ids that end it. llguidance takes it as a tokenizer.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, control: frozenset[int], eos: frozenset[int]) -> None:
        # A copy of its own: the text side changes settings of the other one while it tokenizes.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        pieces = Pieces(self._backend)
        self.exact = pieces.exact
        self.tokens: list[bytes] = [pieces.of(token) for token in range(len(tokenizer))]
        self.words = -(-len(self.tokens) // 32)  # of a mask
        self.eos = sorted(eos)
        self.eos_token_id = self.eos[0] if eos else None
        self.control = control | eos
        self.special_token_ids = sorted(self.control)
        self._ids = {
            content: token for token, content in enumerate(self.tokens) if content and token not in self.control
        }
        self._longest = max(map(len, self._ids), default=1)
        self.encode = lru_cache(maxsize=4096)(self._encode)  # forced texts come again and again

    def __call__(self, text: str) -> Sequence[int]:
        if not isinstance(text, str):
            raise TypeError("the tokenizer takes text")  # llguidance asks whether bytes would do
        return self.encode(text)

    def knows(self, text: str) -> bool:
        """Whether `text` is one token."""
        return text.encode() in self._ids

    def content(self, token: int) -> bytes:
        """Its bytes; none where the vocabulary lacks it, as models may have rows of output without a token."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def known(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` up to the first that the vocabulary lacks, at which llguidance fails."""
        if max(tokens, default=0) < len(self.tokens):
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens) if token >= len(self.tokens))]

    def encode_bytes(self, text: bytes) -> Sequence[int] | None:
        """Tokens that spell `text`; None where there are none, as when it ends inside of a character."""
        try:
            return self.encode(text.decode()) or (None if text else [])
        except UnicodeDecodeError:
            return None

    def compile(self, lark: str) -> "GuidedMatcher":
        """A matcher at the beginning of the grammar `lark`. Any thread may call it.

        Takes milliseconds, seconds for large schemas, and minutes for hostile ones: see `compiler.complaint`. Raises
        GrammarError.
        """
        inner = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=self._limits)
        # The first masks walk the whole vocabulary: they are worked out before copies need them.
        if not inner.is_error():
            inner.compute_bitmask()
            if inner.try_consume_tokens(list(self.encode("a"))[:1]):
                inner.compute_bitmask()
                inner.rollback(1)
        if inner.is_error():
            raise GrammarError(inner.get_error())
        return GuidedMatcher(inner, self.words)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.eos)

    @cached_property
    def _limits(self) -> "LLParserLimits":
        return LLParserLimits(**LIMITS)

    def _encode(self, text: str) -> Sequence[int]:
        """Tokens whose bytes are exactly `text`'s, as the model's tokenizer cuts it wherever that is possible."""
        content = text.encode()
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._spells(ids, content):
            return ids
        ids = self._backend.encode(_SENTINEL + text, add_special_tokens=False).ids
        for start in range(1, len(ids)):
            if self._spells(ids[start:], content):
                return ids[start:]
        return self._greedy(content)

    def _spells(self, ids: Sequence[int], content: bytes) -> bool:
        return not self.control.intersection(ids) and b"".join(self.tokens[token] for token in ids) == content

    def _greedy(self, content: bytes) -> Sequence[int]:
        """The longest token each time; empty where a byte has none."""
        ids: list[int] = []
        at = 0
        while at < len(content):
            ends = range(min(len(content), at + self._longest), at, -1)
            end = next((end for end in ends if content[at:end] in self._ids), None)
            if end is None:
                return []
            ids.append(self._ids[content[at:end]])
            at = end
        return ids


_SPARE = 16  # matchers of one grammar that are kept for its next calls
_UNCUT = 4096  # forced texts that are remembered of a grammar
_SHORT = 1024  # tokens of a call whose matcher is kept: a matcher grows with what it reads


class GuidedMatcher(Matcher):
    """A reply that follows a grammar from its first token on.

    Trap: a token that may not follow breaks llguidance's matcher for good, unless it is asked about first, which takes
    half as long again as to read it. As a rule tokens may follow, so they are read; where one may not, everything is
    read anew.

    Trap: what llguidance allocates for a copy and frees with it takes longer than to read a short call. So matchers of
    calls are put back and used again.
    """

    __slots__ = ("_inner", "_pristine", "_read", "_spare", "_uncut", "_words")

    def __init__(self, inner: Any, words: int, pristine: Any = None, uncut: set[bytes] | None = None) -> None:
        self._inner = inner
        self._pristine = pristine if pristine is not None else inner.deep_copy()  # at the grammar's beginning
        self._read: list[int] = []  # since then
        self._uncut = uncut if uncut is not None else set()  # bytes that were forced, and no token with them
        self._spare: list[GuidedMatcher] = []
        self._words = words

    @property
    def words(self) -> int:
        return self._words

    @property
    def binding(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        """The reply may end here."""
        return bool(self._inner.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_stopped())

    @property
    def failed(self) -> bool:
        return bool(self._inner.is_error())

    def copy(self) -> "GuidedMatcher":
        other = GuidedMatcher(self._inner.deep_copy(), self._words, self._pristine, self._uncut)
        other._read = self._read[:]
        return other

    def checkout(self) -> "GuidedMatcher":
        """A copy of a matcher at the beginning of its grammar, or one that was put back. Any thread may call it."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.copy()

    def put_back(self, other: "GuidedMatcher") -> None:
        """Take back a matcher from `checkout`, or a copy of one. Nobody may use it any more."""
        if len(other._read) <= _SHORT and len(self._spare) < _SPARE and not other.failed and other._inner.reset():
            other._read.clear()
            self._spare.append(other)

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self.take(tokens)
        if stand < len(tokens) and not self.finished:
            self._inner.consume_token(tokens[stand])  # no mask allowed it: from here on the matcher has failed
        return stand if self.finished and not self.failed else len(tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Advance by those of `tokens` that may follow; how many these are."""
        if self._inner.is_error():
            return 0
        taken = len(tokens)
        if not self._inner.consume_tokens(tokens):
            self._inner = self._pristine.deep_copy()
            self._inner.consume_tokens(self._read)
            taken = int(self._inner.try_consume_tokens(tokens))
        self._read += tokens[:taken]
        return taken

    def completes(self, tokens: Sequence[int]) -> bool:
        """Whether the reply may end behind `tokens`, which may follow."""
        taken = int(self._inner.try_consume_tokens(tokens))
        complete = self.complete
        if taken:
            self._inner.rollback(taken)
        return complete

    def accepts(self, tokens: Sequence[int]) -> int:
        return int(self._inner.validate_tokens(tokens))

    def forced(self) -> list[int]:
        """Cutting forced bytes into tokens takes longer than everything else. Bytes that once made no token of this
        grammar are not asked about again; as a rule that is one byte with which several tokens begin.
        """
        text = self._inner.compute_ff_bytes()
        if not text or text in self._uncut:
            return []
        tokens = list(self._inner.compute_ff_tokens())
        if not tokens and len(self._uncut) < _UNCUT:
            self._uncut.add(text)
        return tokens

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        inner, width = self._inner, self._words * 4
        place, stride = out.ctypes.data, out.strides[0]
        taken = 0
        for row in range(len(drafts) + 1):
            inner.unsafe_compute_mask_ptr(place + row * stride, width)  # of a failed matcher: the end alone
            if row < len(drafts) and not inner.try_consume_tokens([drafts[row]]):
                out[row + 1 :] = -1
                break
            taken += row < len(drafts)
        if taken:
            inner.rollback(taken)


# ---- free text ----

_BETWEEN = b" \t\r\n;,"  # what may stand before a bare call
_LONGEST_BEGINNING = 256  # bytes within which a bare call comes to its arguments


@dataclass(frozen=True, slots=True, eq=False)
class CallWatch:
    """How calls begin, for one model.

    `suspects`: the tokens in which an opener may begin. `frame`: a bare call, up to its arguments. `begun`: the
    beginning of an opener that stands in the prompt.
    """

    vocabulary: Vocabulary
    openers: tuple[bytes, ...]
    suspects: frozenset[int]
    bare: CallForm | None
    frame: re.Pattern[bytes] | None
    begun: bytes = b""
    _completing: dict[bytes, Sequence[int]] = field(default_factory=dict)  # by the text before them

    @classmethod
    def of(cls, forms: Forms, vocabulary: Vocabulary) -> "CallWatch":
        openers = tuple({form.opener.encode() for form in forms.triggered})
        firsts = {opener[:1] for opener in openers}
        suspects = frozenset(
            token
            for token, content in enumerate(vocabulary.tokens)
            if any(first in content for first in firsts) and begins(content, openers)
        )
        frame = re.compile(forms.bare.frame.encode()) if forms.bare is not None else None
        return cls(vocabulary, openers, suspects, forms.bare, frame, forms.begun.encode())

    def opened(self, text: bytes) -> int:
        """Where the first opener in `text` begins; -1 where there is none."""
        return min((place for opener in self.openers if (place := text.find(opener)) >= 0), default=-1)

    def completing(self, before: bytes) -> Sequence[int]:
        """The tokens with which an opener is complete behind `before`, the beginning of one."""
        if (found := self._completing.get(before)) is None:
            tokens = enumerate(self.vocabulary.tokens)
            found = [token for token, content in tokens if self.opened(before + content) >= 0]
            self._completing[before] = found
        return found

    def bare_call(self, text: bytes, names: frozenset[str]) -> tuple[str, int] | None:
        """The name of a bare call of one of `names`, and where its arguments begin. None: `text` is not there yet."""
        found = self.frame.match(text) if self.frame is not None else None
        name = found[1].decode(errors="replace") if found is not None else ""
        return (name, found.end()) if found is not None and name in names else None

    def may_be_bare(self, text: bytes) -> bool:
        """Whether a reply that has come to `text` may still be a bare call."""
        begins = self.bare.begins.encode() if self.bare is not None else b""
        return not text or (text.startswith(begins) and len(text) < _LONGEST_BEGINNING)


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


class _FreeText(Matcher):
    """Free text, whose next token is drawn under a mask once one was refused.

    While nothing of a call has begun it only looks for openers, a set look-up for most tokens. Nothing is masked, and
    steps overlap and draft as if there were no matcher. A bare call has no opener. It begins where the text has spelled
    a declared name and the key of its arguments; up to there it may be an answer in JSON.
    """

    __slots__ = ("_names", "_refused", "_start", "_tail", "_watch")

    def __init__(self, watch: CallWatch, names: frozenset[str]) -> None:
        self._watch = watch
        self._names = names  # of the declared tools
        self._refused = False
        self._tail = watch.begun  # the text's last bytes, where an opener may go on from them
        self._start: bytes | None = b"" if watch.bare is not None and names else None  # the text, if it may be bare

    @property
    def words(self) -> int:
        return self._watch.vocabulary.words

    @property
    def binding(self) -> bool:
        return self._refused

    def accepts(self, tokens: Sequence[int]) -> int:
        return self.copy().advance(tokens)

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        ahead: _FreeText = self.copy() if drafts else self  # type: ignore[assignment]
        for row in range(len(drafts) + 1):
            out[row] = -1
            if ahead._refused:
                ahead._mask(out[row : row + 1])
            if row < len(drafts) and not ahead.advance(drafts[row : row + 1]):
                out[row + 1 :] = -1
                return

    def _mask(self, out: Bits) -> None:
        """The mask [1, words] of the token that is drawn in place of a refused one; all of its bits are set."""
        raise NotImplementedError

    def _is_plain(self, tokens: Sequence[int]) -> bool:
        """Nothing of a call begins in `tokens`."""
        return self._start is None and not self._tail and self._watch.suspects.isdisjoint(tokens)

    def _bare_text(self, content: bytes) -> bytes:
        """The reply up to `content`, while it may be a bare call."""
        return ((self._start or b"") + content).lstrip(_BETWEEN)


class CallGuard(_FreeText):
    """Free text in which calls are whole: they follow `calls`, a matcher of nothing but calls.

        text ... opener | name, arguments, markup | text ... opener | ...
        watched           follows the grammar       watched

    Inside of a call tokens are drawn freely as well. One that the grammar refuses is drawn again, and from then on
    tokens are drawn under masks until the call has closed. So a model that writes whole calls pays for reading them,
    and writes what it would have written.

    A grammar that grows beyond its limits is given up, and the reply goes on without; where it `must` be followed, the
    guard has failed. `over`: calls end as soon as they may (`Forms.over_when_complete`). `loose`: some tool is not held
    to all of its schema.
    """

    __slots__ = ("_failed", "_forced", "_inner", "_must", "_over", "calls", "loose")

    def __init__(
        self,
        calls: GuidedMatcher,
        watch: CallWatch,
        names: frozenset[str],
        must: bool,
        over: bool = False,
        loose: bool = False,
    ) -> None:
        super().__init__(watch, names)
        self.calls = calls
        self.loose = loose
        self._over = over
        self._must = must
        self._inner: GuidedMatcher | None = None  # of the call that has begun
        self._failed = False
        self._forced: list[int] = []

    @property
    def bare(self) -> bool:
        """Calls may have no opener: then one is known for a call only with its arguments."""
        return self._watch.bare is not None

    @property
    def failed(self) -> bool:
        return self._failed and self._must

    @property
    def given_up(self) -> bool:
        return self._failed and not self._must

    def copy(self) -> "CallGuard":
        other = CallGuard(self.calls, self._watch, self._names, self._must, self._over, self.loose)
        other._refused, other._tail, other._start = self._refused, self._tail, self._start
        other._inner = self._inner and self._inner.copy()
        other._failed, other._forced = self._failed, self._forced
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self._read(tokens)
        # Now, while the grammar is at hand: before the next step it takes several times as long.
        self._forced = self._inner.forced() if self._inner is not None else []
        return stand

    def accepts(self, tokens: Sequence[int]) -> int:
        if self._inner is not None:  # asking a matcher takes a fraction of what a copy's steps take
            stand = self._inner.accepts(self._watch.vocabulary.known(tokens))
            if stand == len(tokens) or not (self._inner.failed or self._inner.completes(tokens[:stand])):
                return stand
        elif self._failed or self._is_plain(tokens):
            return len(tokens)
        return super().accepts(tokens)

    def forced(self) -> list[int]:
        return self._forced

    def _mask(self, out: Bits) -> None:
        if self._inner is not None:
            self._inner.fill((), out)

    def _read(self, tokens: Sequence[int]) -> int:
        stand = 0
        while stand < len(tokens):
            rest = tokens[stand:] if stand else tokens
            if self._inner is not None:
                taken = self._follow(self._inner, rest)
                if not taken and self._inner is not None:
                    return stand
                stand += taken
            elif self._failed or self._is_plain(rest):
                break
            elif self._look(self._watch.vocabulary.content(rest[0])):
                stand += 1
            else:
                return stand
        return len(tokens)

    def _follow(self, inner: GuidedMatcher, tokens: Sequence[int]) -> int:
        """How many of `tokens` the call goes on with. None: its first one is refused, or the text is free again."""
        if self._refused:  # under masks one by one: none binds any more behind the token that completes the call
            tokens = tokens[:1]
        taken = inner.take(self._watch.vocabulary.known(tokens))
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
        if self._start is not None and (stands := self._look_for_bare(content)) is not None:
            return stands
        place = self._watch.opened(text)
        if place < 0:
            self._tail = beginning(text, self._watch.openers)
            return True
        return self._begin(text[place:], before[place:])

    def _look_for_bare(self, content: bytes) -> bool | None:
        """Once the text has come to the arguments of a bare call, whether they may begin so; None before."""
        before, text = self._bare_text(b""), self._bare_text(content)
        self._start = text if self._watch.may_be_bare(text) else None
        found = self._watch.bare_call(text, self._names)
        if found is None or self._watch.bare is None:
            return None
        name, end = found
        begun, rest = self._watch.bare.until_arguments(name).encode(), text[end:]
        if not rest and text[end - 1 : end] != b" ":  # the space may still come
            begun = begun.rstrip()
        return self._begin(begun + rest, before)

    def _begin(self, text: bytes, before: bytes) -> bool:
        """Whether a call may begin with `text`. If it may not, the call is followed from `before` on."""
        if self._open(text):
            return True
        if self._open(before):
            self._refused = True
            return False
        self._failed, self._tail, self._start = True, b"", None  # it cannot be followed at all
        return True

    def _open(self, text: bytes) -> bool:
        """Whether a call may begin with `text`; from here on it is followed."""
        ids, inner = self._watch.vocabulary.encode_bytes(text), self.calls.checkout()
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
        self.calls.put_back(inner)
        self._inner, self._refused = None, False
        self._start = b"" if bare is not None and not bare.head else None


class CallBan(_FreeText):
    """Free text in which no call begins.

    The token that would complete an opener is drawn again. So is the one with which a reply without an opener would
    come to the arguments of a declared tool.
    """

    __slots__ = ()

    def copy(self) -> "CallBan":
        other = CallBan(self._watch, self._names)
        other._refused, other._tail, other._start = self._refused, self._tail, self._start
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        if self._is_plain(tokens):
            self._refused = self._refused and not tokens
            return len(tokens)
        for stand, token in enumerate(tokens):
            content = self._watch.vocabulary.content(token)
            if self._watch.opened(self._tail + content) >= 0 or self._is_bare_call(content):
                self._refused = True
                return stand
            self._refused = False
            self._tail = beginning(self._tail + content, self._watch.openers)
            if self._start is not None:
                text = self._bare_text(content)
                self._start = text if self._watch.may_be_bare(text) else None
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def _is_bare_call(self, content: bytes) -> bool:
        return self._start is not None and self._watch.bare_call(self._bare_text(content), self._names) is not None

    def _mask(self, out: Bits) -> None:
        tokens = [*self._watch.completing(self._tail)]
        if self._start is not None:
            known = enumerate(self._watch.vocabulary.tokens)
            tokens += (token for token, content in known if self._is_bare_call(content))
        at = np.array(tokens, np.int64)
        np.bitwise_and.at(out[0].view(np.uint32), at // 32, ~(np.uint32(1) << (at % 32).astype(np.uint32)))
