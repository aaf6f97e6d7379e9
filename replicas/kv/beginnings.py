"""What prompts begin with, under the digests that routers know it by, and how much of it the cache has now.

A router sees messages and no tokens, so it sends with a program's first turn a digest of what other programs may begin
with as well: tools and system messages. Here that gets its tokens: what all prompts with one digest begin with.
"""

from collections import OrderedDict
from collections.abc import Mapping

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.types import TokenIds, common_prefix

MOST = 64  # digests, those asked for last
LOOK_S = 0.5  # between two looks into the cache
WHOLE = 0.5  # a beginning of which the cache has less is not told


class Beginnings:
    """Used by the engine's thread; `held` may be read by any: it is replaced, never changed."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[str, TokenIds]] = OrderedDict()
        self._looked = float("-inf")
        self.held: Mapping[str, int] = {}

    def seen(self, scope: str, digest: str, tokens: TokenIds) -> None:
        """A prompt in this scope of the cache begins with what has this digest."""
        known = self._known.pop(digest, None)
        if known is not None and known[0] == scope:
            tokens = known[1][: common_prefix(known[1], tokens) + 1]  # a cache never shows a prompt's last token
        self._known[digest] = scope, tokens
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def look(self, cache: KVCache, now: float) -> None:
        """Find out what of them the cache has, if the last look is too long ago."""
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        found = {digest: cache.peek(scope, tokens) for digest, (scope, tokens) in self._known.items()}
        self.held = {digest: n for digest, n in found.items() if n and n >= WHOLE * (len(self._known[digest][1]) - 1)}
