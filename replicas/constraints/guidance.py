"""Matchers over llguidance: `GuidedMatcher` follows a grammar, `CallGuard` holds the calls in free text to one, and
`CallBan` keeps calls out.

llguidance computes masks on demand, keeps a matcher's state in this process, and can go back, which drafts need. Not
here: the text of grammars (`grammar`), and when one is compiled (`compiler`).
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from holdfast.replicas.constraints.grammar import SHOWN, Forms
from holdfast.replicas.constraints.matcher import Bits, Matcher
from holdfast.replicas.text.decode import Pieces

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
except ImportError:  # the engine runs without it, and requests that need it are refused
    AVAILABLE = False
else:
    AVAILABLE = True

# A schema may be hostile, and masks are computed on the engine's thread. With these limits a mask takes a few
# milliseconds, with llguidance's own hundreds. A reply whose grammar needs more fails.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_SENTINEL = "\x02"  # put before a text where tokenizers add a space to the first word
_GRAMMAR = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|( in regex /.*/|: +\(.*\))$")


class GrammarError(Exception):
    """llguidance refuses a grammar. The message is llguidance's, without the text of the grammar."""

    def __init__(self, error: str) -> None:
        first, *lines = error.splitlines() or [""]
        why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        pattern = lines[0].strip()[:SHOWN] if why else ""
        super().__init__(f"the pattern {pattern!r} cannot be read: {why[0]}" if why else _GRAMMAR.sub("", first))


class Vocabulary:
    """The tokens of `tokenizer` (transformers) as a grammar sees them: the bytes of each, and which spell a text.

    Markers of tool calls are text: the grammar spells them, as the reader of calls does. The `control` ids have no
    text, and only the end of a reply may use them. The `eos` ids end it. llguidance takes this as its tokenizer.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, control: frozenset[int], eos: frozenset[int]) -> None:
        # A copy: the text side changes settings of the other one while it tokenizes.
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
        """The bytes of a token; none for a row of the model's output that has no token."""
        return self.tokens[token] if token < len(self.tokens) else b""

    def known(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` up to the first one that the vocabulary lacks, at which llguidance fails."""
        if max(tokens, default=0) < len(self.tokens):
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens) if token >= len(self.tokens))]

    def encode_bytes(self, text: bytes) -> Sequence[int] | None:
        """Tokens that spell `text`; None if there are none, for example inside of a character."""
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
        unforced = inner.deep_copy()
        # The first masks walk the whole vocabulary: they are computed before copies need them.
        if not inner.is_error():
            inner.compute_bitmask()
            if inner.try_consume_tokens(list(self.encode("a"))[:1]):
                inner.compute_bitmask()
                inner.rollback(1)
        if inner.is_error():
            raise GrammarError(inner.get_error())
        while tokens := unforced.compute_ff_tokens():
            unforced.consume_tokens(tokens)
        return GuidedMatcher(_Compiled(self, inner.deep_copy(), unforced), inner)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.eos)

    @cached_property
    def _limits(self) -> "LLParserLimits":
        return LLParserLimits(**LIMITS)

    def _encode(self, text: str) -> Sequence[int]:
        """Tokens whose bytes are exactly those of `text`, cut as the model's tokenizer does where possible."""
        content = text.encode()
        for before in ("", _SENTINEL):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            for start in range(len(before), max(len(ids), 1) if before else 1):
                if self._spells(ids[start:], content):
                    return ids[start:]
        return self._greedy(content)

    def _spells(self, ids: Sequence[int], content: bytes) -> bool:
        return not self.control.intersection(ids) and b"".join(self.tokens[token] for token in ids) == content

    def _greedy(self, content: bytes) -> Sequence[int]:
        """The longest token each time; empty if a byte has none."""
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


_UNCUT = 4096  # forced texts that are remembered of a grammar
_REFUEL = 256  # tokens that are read between masks; each takes about 8 of the lexer's fuel, long ones some tens


@dataclass(slots=True, eq=False)
class _Compiled:
    """The state that all matchers of one grammar share.

    Trap: llguidance's copies share one lexer, with its states, its fuel and its errors. Only a mask refills the fuel,
    and a call in free text is read without masks. llguidance has no need of the lexer for a mask of a forced token or
    for a mask that it has made before, so a mask of a copy of `unforced` is made: it stands behind the tokens with
    which all begin, and never had one.
    """

    vocabulary: Vocabulary
    beginning: Any
    unforced: Any
    uncut: set[bytes] = field(default_factory=set)  # forced bytes with which no token begins
    unfuelled: int = 0  # tokens that were read since the last refill

    def refuel(self) -> Any:
        """Refill the lexer's fuel. Returns a matcher; an error in it is an error of the lexer, and so of them all."""
        self.unfuelled = 0
        matcher = self.unforced.deep_copy()
        matcher.compute_bitmask()
        return matcher


class GuidedMatcher(Matcher):
    """A reply that follows a grammar from its first token on.

    Trap: a token that may not follow breaks llguidance's matcher for good, unless it is asked about first, which takes
    half as long again as to read it. Most tokens may follow, so they are read at once; after a refusal everything is
    read anew.
    """

    __slots__ = ("_compiled", "_inner", "_read", "_words")

    def __init__(self, compiled: _Compiled, inner: Any, read: Sequence[int] = ()) -> None:
        self._compiled, self._words = compiled, compiled.vocabulary.words
        self._inner = inner
        self._read = list(read)  # since the beginning

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

    @property
    def used_up(self) -> bool:
        """The lexer has reached a limit, with this reply or another one: the grammar has to be compiled again."""
        return bool(self._compiled.refuel().is_error())

    def copy(self) -> "GuidedMatcher":
        return GuidedMatcher(self._compiled, self._inner.deep_copy(), self._read)

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self.take(tokens)
        if stand < len(tokens) and not self.finished:
            self._inner.consume_token(tokens[stand])  # no mask allowed it: from here on the matcher has failed
        return stand if self.finished and not self.failed else len(tokens)

    def take(self, tokens: Sequence[int]) -> int:
        """Advance by those of `tokens` that may follow; returns their number."""
        if self._inner.is_error():
            return 0
        taken, compiled = len(tokens), self._compiled
        compiled.unfuelled += taken
        if compiled.unfuelled > _REFUEL:
            compiled.refuel()
        if taken > _REFUEL or not self._inner.consume_tokens(tokens):
            taken = self._read_anew(compiled.vocabulary.known(tokens))
        self._read += tokens[:taken]
        return taken

    def _read_anew(self, tokens: Sequence[int]) -> int:
        """Read everything from the beginning, up to those of `tokens` that may follow; returns their number."""
        self._inner, taken, everything = self._compiled.refuel(), 0, [*self._read, *tokens]
        if self._inner.is_error():
            return 0
        self._inner = self._compiled.beginning.deep_copy()
        for at in range(0, len(everything), _REFUEL):
            self._compiled.refuel()
            piece = everything[at : at + _REFUEL]
            taken += (more := int(self._inner.try_consume_tokens(piece)))
            if more < len(piece):
                break
        return max(taken - len(self._read), 0)

    def completes(self, tokens: Sequence[int]) -> bool:
        """Whether the reply may end behind `tokens`, which may follow."""
        taken = int(self._inner.try_consume_tokens(tokens))
        complete = self.complete
        if taken:
            self._inner.rollback(taken)
        return complete

    def accepts(self, tokens: Sequence[int]) -> int:
        tokens = self._compiled.vocabulary.known(tokens)
        if len(tokens) > _REFUEL:
            return self.copy().take(tokens)
        self._compiled.unfuelled += len(tokens)
        return int(self._inner.validate_tokens(tokens))

    def forced(self) -> list[int]:
        """Cutting forced bytes into tokens takes longer than everything else. Bytes that once made no token of this
        grammar are not asked about again; as a rule that is one byte with which several tokens begin.
        """
        text, uncut = self._inner.compute_ff_bytes(), self._compiled.uncut
        if not text or text in uncut:
            return []
        tokens = list(self._inner.compute_ff_tokens())
        if not tokens and len(uncut) < _UNCUT:
            uncut.add(text)
        return tokens

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        inner, width, self._compiled.unfuelled = self._inner, self._words * 4, 0
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


class CallWatch:
    """How calls begin, for one model. `suspects`: the tokens in which an opener may begin."""

    def __init__(self, forms: Forms, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.bare = vocabulary, forms.bare
        self.begun = forms.begun.encode()  # the beginning of an opener, at the end of the prompt
        self.openers = tuple({form.opener.encode() for form in forms.triggered})
        self._frame = re.compile(self.bare.frame.encode()) if self.bare is not None else None
        firsts = {opener[:1] for opener in self.openers}
        self.suspects = frozenset(
            token
            for token, content in enumerate(vocabulary.tokens)
            if any(first in content for first in firsts) and begins(content, self.openers)
        )
        self._completing: dict[bytes, Sequence[int]] = {}

    def opened(self, text: bytes) -> int:
        """Where the first opener in `text` begins; -1 if there is none."""
        return min((place for opener in self.openers if (place := text.find(opener)) >= 0), default=-1)

    def completing(self, before: bytes) -> Sequence[int]:
        """The tokens that complete an opener behind `before`, the beginning of one."""
        if before not in self._completing:
            self._completing[before] = self.tokens_where(lambda content: self.opened(before + content) >= 0)
        return self._completing[before]

    def tokens_where(self, holds: Callable[[bytes], bool]) -> Sequence[int]:
        return [token for token, content in enumerate(self.vocabulary.tokens) if holds(content)]

    def bare_call(self, text: bytes, names: frozenset[str]) -> tuple[str, int] | None:
        """The name of a bare call of one of `names`, and where its arguments begin. None: `text` is not there yet."""
        match = self._frame.match(text) if self._frame is not None else None
        name = match[1].decode(errors="replace") if match is not None else ""
        return (name, match.end()) if match is not None and name in names else None

    def may_be_bare(self, text: bytes) -> bool:
        """Whether a reply that has come to `text` may still be a bare call."""
        begins = self.bare.begins.encode() if self.bare is not None else b""
        return not text or (text.startswith(begins) and len(text) < _LONGEST_BEGINNING)


def begins(text: bytes, openers: Sequence[bytes]) -> bool:
    """Whether `text` has one of `openers` in it, or ends with the beginning of one."""
    return any(opener in text for opener in openers) or bool(beginning(text, openers))


def beginning(text: bytes, openers: Sequence[bytes]) -> bytes:
    """The longest end of `text` that is the beginning of one of `openers`, and not all of it."""
    longest = max(map(len, openers), default=1) - 1
    ends = (text[-length:] for length in range(min(longest, len(text)), 0, -1))
    return next((end for end in ends if any(each.startswith(end) and end != each for each in openers)), b"")


class _FreeText(Matcher):
    """Free text. A token that is refused is drawn again, under a mask.

    While nothing of a call has begun it only looks for openers, a set look-up for most tokens. Nothing is masked, and
    steps overlap and draft as if there were no matcher. A bare call has no opener: it begins where the text has spelled
    a declared name and the key of its arguments. Up to there it may be an answer in JSON.
    """

    __slots__ = ("_names", "_refused", "_start", "_tail", "_watch")

    def __init__(self, watch: CallWatch, names: frozenset[str]) -> None:
        self._watch = watch
        self._names = names  # of the declared tools
        self._refused = False
        self._tail = watch.begun  # the text's last bytes, if an opener may go on from them
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
        ahead = self.copy() if drafts else self
        for row in range(len(drafts) + 1):
            out[row] = -1
            if ahead._refused:
                ahead._mask(out[row : row + 1])
            if row < len(drafts) and not ahead.advance(drafts[row : row + 1]):
                out[row + 1 :] = -1
                return

    def copy(self) -> "_FreeText":
        return copy.copy(self)

    def _mask(self, out: Bits) -> None:
        """The mask [1, words] of the token that is drawn in place of a refused one; all of its bits are set."""
        raise NotImplementedError

    def _is_plain(self, tokens: Sequence[int]) -> bool:
        """Nothing of a call begins in `tokens`."""
        return self._start is None and not self._tail and self._watch.suspects.isdisjoint(tokens)

    def _bare_text(self, content: bytes) -> bytes:
        """The reply up to `content`, while it may be a bare call."""
        return ((self._start or b"") + content).lstrip(_BETWEEN)

    def _bare_call(self, content: bytes) -> tuple[str, int] | None:
        """The bare call that has come to its arguments with `content`."""
        return None if self._start is None else self._watch.bare_call(self._bare_text(content), self._names)

    def _go_on(self, content: bytes) -> None:
        """Take in a piece of text that neither completes an opener nor begins a bare call."""
        self._tail = beginning(self._tail + content, self._watch.openers)
        if self._start is not None:
            text = self._bare_text(content)
            self._start = text if self._watch.may_be_bare(text) else None


class CallGuard(_FreeText):
    """Free text in which calls are whole: they follow `calls`, a matcher of nothing but calls.

        text ... opener | name, arguments, markup | text ... opener | ...
        watched           follows the grammar       watched

    Inside a call tokens are drawn freely as well. One that the grammar refuses is drawn again, and from then on tokens
    are drawn under masks until the call has closed. So a model that writes whole calls pays only for reading them, and
    its text is unchanged.

    A grammar that grows beyond its limits is given up, and the reply goes on without it; if it `must` be followed, the
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
        self.calls, self.loose = calls, loose
        self._must, self._over = must, over
        self._inner: GuidedMatcher | None = None  # of the call that has begun
        self._failed = False
        self._forced: list[int] = []

    @property
    def bare(self) -> bool:
        """Calls may have no opener: such a call is only recognised at its arguments."""
        return self._watch.bare is not None

    @property
    def failed(self) -> bool:
        return self._failed and self._must

    @property
    def given_up(self) -> bool:
        return self._failed and not self._must

    @property
    def used_up(self) -> bool:
        return self.calls.used_up

    def copy(self) -> "CallGuard":
        other = copy.copy(self)
        other._inner = self._inner and self._inner.copy()
        return other

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self._read(tokens)
        # Now, while the grammar is at hand: before the next step it takes several times as long.
        self._forced = self._inner.forced() if self._inner is not None else []
        return stand

    def accepts(self, tokens: Sequence[int]) -> int:
        if self._inner is not None:  # asking a matcher takes a fraction of what a copy's steps take
            stand = self._inner.accepts(tokens)
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
        taken = inner.take(tokens)
        if taken:
            self._settle(inner)
        elif inner.failed or inner.complete:
            self._leave(inner)
        else:
            self._refused = True
        return taken

    def _look(self, content: bytes) -> bool:
        """Take in a piece of free text, in which a call may begin; False if it goes on as no call does."""
        before, watch = self._tail, self._watch
        if (call := self._bare_call(content)) is not None and watch.bare is not None:
            name, end = call
            text, before = self._bare_text(content), self._bare_text(b"")
            begun, rest = watch.bare.until_arguments(name).encode(), text[end:]
            if not rest and text[end - 1 : end] != b" ":  # the space may still come
                begun = begun.rstrip()
            return self._begin(begun + rest, before)
        text = before + content
        if (place := watch.opened(text)) >= 0:
            return self._begin(text[place:], before[place:])
        self._go_on(content)
        return True

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
        ids, inner = self._watch.vocabulary.encode_bytes(text), self.calls.copy()
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
        self._inner, self._refused = None, False
        self._start = b"" if bare is not None and not bare.head else None


class CallBan(_FreeText):
    """Free text in which no call begins.

    The token that would complete an opener is drawn again. So is the one with which a reply without an opener would
    come to the arguments of a declared tool.
    """

    __slots__ = ()

    def advance(self, tokens: Sequence[int]) -> int:
        if self._is_plain(tokens):
            self._refused = self._refused and not tokens
            return len(tokens)
        for stand, token in enumerate(tokens):
            content = self._watch.vocabulary.content(token)
            self._refused = self._watch.opened(self._tail + content) >= 0 or self._bare_call(content) is not None
            if self._refused:
                return stand
            self._go_on(content)
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def _mask(self, out: Bits) -> None:
        bare = [] if self._start is None else self._watch.tokens_where(lambda content: bool(self._bare_call(content)))
        at = np.array([*self._watch.completing(self._tail), *bare], np.int64)
        np.bitwise_and.at(out[0].view(np.uint32), at // 32, ~(np.uint32(1) << (at % 32).astype(np.uint32)))
