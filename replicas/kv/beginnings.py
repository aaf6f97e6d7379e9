"""What prompts begin with, under the digests that routers know it by, and how much of it the cache has now.

A router sees messages and no tokens, so it sends with a program's first turn a digest of what other programs may begin
with as well: tools and system messages. Here that gets its tokens: what all prompts with one digest begin with. Where
the beginning ends shows with the first two prompts that part.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.types import TokenIds, common_prefix

MOST = 64  # digests, those asked for last
LOOK_S = 0.5  # between two looks into the cache
WHOLE = 0.5  # a beginning of which the cache has less is not told


@dataclass(frozen=True, slots=True)
class _Beginning:
    """`tokens` are those that its prompts share, and one more, for a cache never shows a prompt's last token.

    `ends`: two of its prompts parted behind these tokens. Before that they are one prompt, to its end.
    """

    scope: str
    tokens: TokenIds
    ends: bool = False

    def shared_with(self, tokens: TokenIds) -> "_Beginning":
        """What is left of it after another prompt."""
        n = common_prefix(self.tokens, tokens)
        return _Beginning(self.scope, self.tokens[: n + 1], self.ends or n < min(len(self.tokens), len(tokens)))


class Beginnings:
    """Used by the engine's thread; `held` may be read by any: it is replaced, never changed.

    `held`: how many tokens of each beginning the cache has, by digest; 0: some, of a beginning whose end is not known.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[str, _Beginning] = OrderedDict()
        self._looked = float("-inf")
        self._skipped = False
        self.held: Mapping[str, int] = {}

    @property
    def due(self) -> float | None:
        """When the next look is due, though no step is; None: nothing has changed since the last look."""
        return self._looked + LOOK_S if self._skipped and self._known else None

    def seen(self, scope: str, digest: str, tokens: TokenIds) -> None:
        """A prompt in this scope of the cache begins with what has this digest."""
        known = self._known.pop(digest, None)
        same = known is not None and known.scope == scope
        self._known[digest] = known.shared_with(tokens) if known is not None and same else _Beginning(scope, tokens)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def look(self, cache: KVCache, now: float) -> None:
        """Find out what of them the cache has, if the last look is too long ago."""
        self._skipped = now - self._looked < LOOK_S
        if self._skipped:
            return
        self._looked = now
        held: dict[str, int] = {}
        for digest, each in self._known.items():
            n = cache.peek(each.scope, each.tokens)
            if n and n >= WHOLE * (len(each.tokens) - 1):
                held[digest] = n if each.ends else 0
        self.held = held
