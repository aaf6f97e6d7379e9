"""Tokenizing long texts beside the event loop, so that nobody else waits for them.

One text at a time, in the order they came, with a tokenizer of its own: one that reads special tokens as text for a
moment must not be used by two threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.replicas.errors import ContextLengthError, UnavailableError
from holdfast.replicas.text.added import AddedTokens
from holdfast.replicas.text.encoder import Encoder

LONG = 1 << 16
"""Characters that take an event loop about as long as a few steps: more are tokenized on a thread."""
_SLACK = 4
"""Where a tokenizer rewrites a text first, this much shorter it may become."""
_RUNS = (" ", "\n", "\t", "\x01", "x", "7", ".", "\u0301", "\u200b", "\U0010fffd", "x. 7\n\U0010fffd")
"""What tokenizers drop, or squeeze into one token however much of it there is: if one does, it shows with these."""
_RUN_TOKENS = 8
"""Tokens that a run must have at least: one that is squeezed has one, or two with the space put before it."""

Result = TypeVar("Result")


class LongTexts:
    """`backend` is a `tokenizers.Tokenizer`. `context`: tokens that a prompt may have; 0: any number."""

    def __init__(self, backend: Any, added: AddedTokens, context: int) -> None:
        # Now, not for the first long text: with 150,000 tokens this takes most of a second and holds the GIL.
        backend = type(backend).from_str(backend.to_str())
        self._encoder = Encoder(backend, added)
        self._reach = _reach(backend)
        self._context = context
        self._closed = False
        # Not a lock around threads: who is cancelled leaves a thread behind that is not done yet.
        self._thread = ThreadPoolExecutor(1, "long-texts")

    def close(self) -> None:
        """Those that wait for the thread are refused at their turn; what is being tokenized is not waited for."""
        self._closed = True
        self._thread.shutdown(wait=False)

    async def run(self, work: Callable[[Encoder], Result], length: int) -> Result:
        """What `work`, on `length` characters, makes of the encoder that the thread has.

        Raises UnavailableError once closed, and ContextLengthError for so many characters that no tokenizing could make
        them fit, where the tokenizer neither drops nor squeezes any.
        """
        self._check()
        least = length // self._reach if self._reach else 0
        if self._context and least > self._context:
            raise ContextLengthError(
                f"the prompt has more than {least} tokens; the context has room for {self._context}", "prompt"
            )

        def at_its_turn() -> Result:
            self._check()
            return work(self._encoder)

        return await asyncio.get_running_loop().run_in_executor(self._thread, at_its_turn)

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


def _reach(backend: Any) -> int:
    """No token stands for more characters; 0 where one may stand for any number, or some have none.

    White space may be dropped, a run of what is unknown may be one token, an added token may swallow the space beside
    it, and a text may be cut off.
    """
    if backend.truncation or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    reach = _SLACK * max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    runs = [(run * reach * _RUN_TOKENS)[: reach * _RUN_TOKENS] for run in _RUNS]
    found = backend.encode_batch_fast(runs, add_special_tokens=False)
    return reach if min(map(len, found)) >= _RUN_TOKENS else 0
