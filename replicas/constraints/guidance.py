"""What knows llguidance, beside `trial`: a vocabulary and a grammar in the library's Lark dialect to a matcher.

The library works masks out as they are asked for, keeps its state on this side, and can go back, which drafts need.
Not here: what a grammar says (`grammar`), and when it is compiled (`compiler`).
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from holdfast.replicas.constraints.matcher import Bits
from holdfast.replicas.constraints.trial import Trials
from holdfast.replicas.text.decode import Pieces

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
except ImportError:  # the engine runs without it, and says so to requests that need it
    AVAILABLE = False
else:
    AVAILABLE = True

_SENTINEL = "\x02"  # put before a text where tokenizers add a space to the first word


class Vocabulary:
    """The tokens of `tokenizer` (transformers) as a grammar sees them: the bytes of each, and which spell a text.

    Markers of tool calls are text: the grammar spells them, as the reader of calls does. The `control` ids are none,
    and nothing but the end of a reply may use them. `eos`: ids that end it.
    """

    def __init__(self, tokenizer: Any, control: frozenset[int], eos: frozenset[int]) -> None:
        # A copy of its own: the text side changes settings of the other one while it tokenizes.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        pieces = Pieces(self._backend)
        self.exact = pieces.exact
        self.tokens: list[bytes] = [pieces.of(token) for token in range(len(tokenizer))]
        self.eos = sorted(eos)
        self.control = control | eos
        self._ids = {
            content: token for token, content in enumerate(self.tokens) if content and token not in self.control
        }
        self._longest = max(map(len, self._ids), default=1)
        self.encode = lru_cache(maxsize=4096)(self._encode)  # forced texts come again and again

    def knows(self, text: str) -> bool:
        """Whether `text` is one token."""
        return text.encode() in self._ids

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
            for end in range(min(len(content), at + self._longest), at, -1):
                if (token := self._ids.get(content[at:end])) is not None:
                    break
            else:
                return []
            ids.append(token)
            at = end
        return ids


# A schema may be hostile, and masks are worked out on the engine's thread: with these one takes a few milliseconds,
# where the library's own limits allow hundreds. A reply whose grammar needs more fails.
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_TRIALS = Trials(_LIMITS)
LONGEST_S = 5  # of processor time, that a grammar may take to compile: long ones take two or three
_PLACE = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")


class GrammarError(Exception):
    """A grammar that the library does not take, in its words."""


def complaint(lark: str, seconds: int) -> str:
    """Why the grammar `lark` is not taken, or takes longer than `seconds`; "" where it is. Any thread may ask."""
    found = _TRIALS.complaint(lark, seconds)
    return _reason(found) if found else ""


def _reason(error: str) -> str:
    """The library's error without what it shows of the grammar."""
    first, *lines = error.splitlines()
    first = _PLACE.sub("", first, count=1)
    why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"the pattern {lines[0].strip()!r} cannot be read: {why[0]}" if why else first


class GrammarCompiler:
    """The library's compiler for one vocabulary. Any thread may call it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        wrapper = TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = LLTokenizer(wrapper, eos_token=vocabulary.eos)
        self._letter = list(vocabulary.encode("a"))[:1]
        self._words = (len(vocabulary.tokens) + 31) // 32
        self._limits = LLParserLimits(**_LIMITS)

    def compile(self, lark: str) -> "GuidedMatcher":
        """A matcher at the beginning of the grammar `lark`. Takes milliseconds, seconds for large schemas.

        What was written to take minutes is found out in another process first, which is ended. Raises GrammarError.
        """
        if why := complaint(lark, LONGEST_S):
            raise GrammarError(why)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=self._limits)
        if not matcher.is_error():
            self._warm(matcher)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        return GuidedMatcher(matcher, self._words)

    def _warm(self, matcher: "LLMatcher") -> None:
        """Work out the first masks, which walk the whole vocabulary, before copies of `matcher` need them."""
        matcher.compute_bitmask()
        if matcher.try_consume_tokens(self._letter):
            matcher.compute_bitmask()
            matcher.rollback(1)


_SPARE = 16  # matchers of one grammar that are kept for its next calls
_UNCUT = 4096  # forced texts that are remembered of a grammar
_SHORT = 1024  # tokens of a call whose matcher is: one grows with what it reads


class GuidedMatcher:
    """`constraints.matcher.Matcher` over a matcher of the library.

    Trap: a token that may not follow breaks the library's for good, unless it is asked about first, which takes half as
    long again as to read it. As a rule tokens may follow, so they are read; where one may not, the text is read anew.

    Trap: what the library allocates for a copy and frees with it takes longer than reading a short call, so those that
    are done with are `spared` and used again.
    """

    __slots__ = ("_inner", "_pristine", "_read", "_spare", "_uncut", "words")

    def __init__(self, inner: Any, words: int, pristine: Any = None, uncut: set[bytes] | None = None) -> None:
        self._inner = inner
        self._pristine = pristine if pristine is not None else inner.deep_copy()  # at the grammar's beginning
        self._read: list[int] = []  # since then
        self._uncut = uncut if uncut is not None else set()  # bytes that were forced, and no token with them
        self._spare: list[GuidedMatcher] = []
        self.words = words

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
    def given_up(self) -> bool:
        return False

    def copy(self) -> "GuidedMatcher":
        other = GuidedMatcher(self._inner.deep_copy(), self.words, self._pristine, self._uncut)
        other._read = self._read[:]
        return other

    def another(self) -> "GuidedMatcher":
        """As `copy`, of one at the beginning of its grammar; any thread may ask."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.copy()

    def spared(self, other: "GuidedMatcher") -> None:
        """One that came from `another`, or is a copy of such, is done with: nobody may use it any more."""
        if len(other._read) <= _SHORT and len(self._spare) < _SPARE and not other.failed and other._inner.reset():
            other._read.clear()
            self._spare.append(other)

    def advance(self, tokens: Sequence[int]) -> int:
        stand = self.take(tokens)
        if stand < len(tokens) and not self.finished:
            self._inner.consume_token(tokens[stand])  # what no mask allowed: it has failed, and says so
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
        """To cut forced bytes takes longer than all else: those that made no token of this grammar once are not asked
        about again. As a rule that is one byte with which several tokens begin.
        """
        text = self._inner.compute_ff_bytes()
        if not text or text in self._uncut:
            return []
        tokens = list(self._inner.compute_ff_tokens())
        if not tokens and len(self._uncut) < _UNCUT:
            self._uncut.add(text)
        return tokens

    def fill(self, drafts: Sequence[int], out: Bits) -> None:
        inner, width = self._inner, self.words * 4
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


class _Tokens:
    """A vocabulary in the shape that the library asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.control)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> Sequence[int]:
        if not isinstance(text, str):
            raise TypeError("the tokenizer takes text")  # the library asks whether bytes would do
        return self._encode(text)
