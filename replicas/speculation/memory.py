"""What the model said in a tenant's earlier turns: one bounded index for each scope. No scope sees another's text."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.replicas.speculation.ngrams import GAP, NGramIndex
from holdfast.replicas.tokens import TokenIds


class TurnMemory:
    """Turns by scope, the latest used scope last.

    A scope beyond its share forgets the older half of its tokens; all together beyond theirs, the least recently
    used scopes go whole. So a token is indexed a few times in its life, and only when a turn ends.
    """

    __slots__ = ("_nbytes", "_scope_bytes", "_scopes", "_total_bytes")

    def __init__(self, total_bytes: int, scope_bytes: int) -> None:
        self._total_bytes, self._scope_bytes = total_bytes, min(scope_bytes, total_bytes)
        self._scopes: OrderedDict[str, NGramIndex] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, at most `total_bytes`."""
        return self._nbytes

    def find(self, scope: str) -> NGramIndex | None:
        """The scope's turns, or None before its first."""
        return self._scopes.get(scope)

    def add(self, scope: str, turn: TokenIds) -> None:
        """Remember a turn, which ends with a gap."""
        index = self._scopes.pop(scope, None)
        if index is None:
            index = NGramIndex(turn)
        else:
            self._nbytes -= index.nbytes
            index.extend(turn.tolist())
        index.extend((GAP,))
        if index.crowded:
            index = NGramIndex(index.tokens(), capacity=2 * len(index))
        while index.nbytes > self._scope_bytes and len(index) > 1:
            index = NGramIndex(index.tokens(len(index) - len(index) // 2))
        if index.nbytes > self._scope_bytes:  # too small a share for anything
            return
        self._scopes[scope] = index
        self._nbytes += index.nbytes
        while self._nbytes > self._total_bytes:
            _, oldest = self._scopes.popitem(last=False)
            self._nbytes -= oldest.nbytes
