"""Whether a request can be served at all: pure checks of its tokens and numbers against the configuration."""

import math

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ContextLengthError, InvalidRequestError, OverloadedError
from holdfast.replicas.events import Submit

MOST_TOP_K = 2**31 - 1  # what the sampler's arrays hold


def check_submit(submit: Submit, config: EngineConfig, vocabulary: int | None) -> None:
    """Raise InvalidRequestError, or ContextLengthError, for a request that could never be served."""
    n_prompt, max_tokens = len(submit.tokens), submit.sampling.max_tokens
    context, page = config.context_length, config.page_size
    if n_prompt == 0:
        raise InvalidRequestError("the prompt is empty", "prompt")
    if max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must not be negative: {max_tokens}", "max_tokens")
    if submit.sampling.top_k > MOST_TOP_K:
        raise InvalidRequestError(f"top_k must be at most {MOST_TOP_K}: {submit.sampling.top_k}", "top_k")
    if not 0 < submit.weight < math.inf:
        raise InvalidRequestError(f"weight must be positive: {submit.weight}", "weight")
    if n_prompt + min(max_tokens, 1) > context:
        new = ", one of them new" if max_tokens else ""
        raise ContextLengthError(f"the prompt has {n_prompt} tokens; the context has room for {context}{new}", "prompt")
    if n_prompt + max_tokens > context:
        raise ContextLengthError(
            f"{n_prompt} prompt tokens and max_tokens {max_tokens} exceed the context of {context}", "max_tokens"
        )
    # One page more: the end of a cached prefix may be copied into a page of its own.
    if -(-(n_prompt + max_tokens) // page) + 1 > config.cells // page:
        raise ContextLengthError(
            f"{n_prompt} prompt tokens and max_tokens {max_tokens} exceed the cache of {config.cells} cells",
            "max_tokens",
        )
    if vocabulary is not None and not (int(submit.tokens.min()) >= 0 and int(submit.tokens.max()) < vocabulary):
        raise InvalidRequestError(f"token ids must be in [0, {vocabulary})", "prompt")


def to_be_kept(submit: Submit, n_history: int) -> int:
    """Cells that a session's operation may add to those of its history; `submit` has all the tokens, history first."""
    return len(submit.tokens) - n_history + submit.sampling.max_tokens if submit.keep else 0


def check_room(submit: Submit, n_history: int, room: int) -> None:
    """Raise OverloadedError for a session's operation that may leave more cells to be kept than the `room` there is."""
    more, room = to_be_kept(submit, n_history), max(room, 0)
    if more > room:
        raise OverloadedError(f"the open sessions have room for {room} more cells, not {more}", "session_id")
