"""What prompts begin with gets its tokens from the prompts, and is told only while the cache has it."""

import numpy as np

from holdfast.replicas.kv.beginnings import LOOK_S, Beginnings
from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.types import TokenIds


def tokens(*numbers: int) -> TokenIds:
    return np.array(numbers, dtype=np.int32)


def serve(cache: KVCache, prompt: TokenIds, scope: str = "t") -> None:
    """Compute a prompt and leave it in the cache."""
    holding = cache.acquire(scope, prompt, 0.0).holding
    assert cache.grow(holding, len(prompt)) is not None
    cache.finish(holding, prompt, len(prompt), 0.0)


SHARED = tokens(*range(1, 21))


def test_two_prompts_say_what_they_share() -> None:
    cache, made = KVCache(64, 4), Beginnings()
    for tail in (range(100, 110), range(200, 215)):
        prompt = tokens(*SHARED, *tail)
        made.seen("t", "d", prompt)
        serve(cache, prompt)
    made.look(cache, 0.0)
    assert made.held == {"d": len(SHARED)}


def test_one_prompt_alone_is_its_own_beginning_and_a_scope_sees_its_own() -> None:
    cache, made = KVCache(64, 4), Beginnings()
    made.seen("t", "d", SHARED)
    made.seen("other", "e", SHARED)
    serve(cache, SHARED)
    made.look(cache, 0.0)
    assert made.held == {"d": len(SHARED) - 1}  # a cache never shows a prompt's last token


def test_what_was_evicted_is_told_no_more() -> None:
    cache, made = KVCache(16, 4), Beginnings()
    made.seen("t", "d", SHARED)
    serve(cache, SHARED)
    made.look(cache, 0.0)
    serve(cache, tokens(*range(1000, 1060)))
    made.look(cache, LOOK_S / 2)
    assert made.held, "it is looked at now and then"
    made.look(cache, LOOK_S)
    assert made.held == {}


def test_those_asked_for_last_are_kept() -> None:
    cache, made = KVCache(64, 4), Beginnings(most=2)
    serve(cache, SHARED)
    for digest in ("a", "b", "a", "c"):
        made.seen("t", digest, SHARED)
    made.look(cache, 0.0)
    assert set(made.held) == {"a", "c"}
