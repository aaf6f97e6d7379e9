"""What programs had computed when their last turn ended, to see how much of it their next prompt drops.

Some chat templates rewrite what was said: they drop old reasoning, or move the system prompt. Everything behind the
first changed token is computed again, and no cache can help; here it is counted.
"""

from collections import OrderedDict

from holdfast.replicas.kv.radix import common_prefix
from holdfast.replicas.sequences.parking import Owner
from holdfast.replicas.tokens import TokenIds


class Histories:
    """The tokens of each program's last turn, `capacity` tokens at most; the least recently seen program goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens: OrderedDict[Owner, TokenIds] = OrderedDict()
        self._held = 0

    @property
    def held(self) -> int:
        """Tokens remembered."""
        return self._held

    def remember(self, owner: Owner, tokens: TokenIds) -> None:
        """`owner` ended a turn with these tokens computed."""
        self._held -= len(self._tokens.pop(owner, ()))
        self._tokens[owner] = tokens.copy()
        self._held += len(tokens)
        while self._held > self._capacity:
            self._held -= len(self._tokens.popitem(last=False)[1])

    def rewritten(self, owner: Owner, prompt: TokenIds, n_cached: int) -> int:
        """Computed tokens behind the place where `prompt` leaves what `owner` had; 0 where it does not leave it.

        Where more is cached than the two have in common, the prompt goes on from something else that the program
        had computed, and nothing was rewritten.
        """
        before = self._tokens.get(owner)
        if before is None or n_cached >= min(len(before), len(prompt)):
            return 0
        common = common_prefix(before, prompt)
        leaves = common < min(len(before), len(prompt)) and n_cached <= common
        return len(before) - common if leaves else 0
