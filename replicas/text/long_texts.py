"""Tokenizing long texts beside the event loop, so that nobody else waits for them.

One text at a time, in the order they came, with a tokenizer of its own: one that reads special tokens as text for a
moment must not be used by two threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from holdfast.replicas.errors import ContextLengthError
from holdfast.replicas.text.added import AddedTokens
from holdfast.replicas.text.encoder import Encoder

LONG = 1 << 16
"""Characters that take an event loop about as long as a few steps: more are tokenized on a thread."""
_SLACK = 4
"""Where a tokenizer rewrites a text first, this much shorter it may become."""

Result = TypeVar("Result")


class LongTexts:
    """`backend` is a `tokenizers.Tokenizer`. `context`: tokens that a prompt may have; 0: any number."""

    def __init__(self, backend: Any, added: AddedTokens, context: int) -> None:
        self._backend = backend
        self._added = added
        self._context = context
        # Not a lock around threads: who is cancelled leaves a thread behind that is not done yet.
        self._thread = ThreadPoolExecutor(1, "long-texts")

    def close(self) -> None:
        """Forget what nobody has begun to tokenize."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[Encoder], Result], length: int) -> Result:
        """What `work`, on `length` characters, makes of the encoder that the thread has.

        Raises ContextLengthError for so many characters that no tokenizing could make them fit.
        """
        self._check(length)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._encoder))

    def _check(self, length: int) -> None:
        least = length // (self._longest * _SLACK)
        if self._context and least > self._context:
            raise ContextLengthError(
                f"the prompt has more than {least} tokens; the context has room for {self._context}", "prompt"
            )

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(type(self._backend).from_str(self._backend.to_str()), self._added)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
