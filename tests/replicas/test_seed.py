"""The vectorised hash against FNV-1a as it is defined."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas import plan as seed_file
from holdfast.replicas.plan import prompt_seed


def fnv1a(message: bytes) -> int:
    state = 0xCBF29CE484222325
    for byte in message:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_equals_the_definition(tokens):
    assert prompt_seed(np.array(tokens, dtype=np.int32)) == fnv1a(np.array(tokens, dtype="<u4").tobytes())


def test_equals_the_definition_over_several_blocks():
    tokens = np.random.default_rng(0).integers(0, 150_000, 2 * seed_file._BLOCK // 4 + 77).astype(np.int32)
    assert prompt_seed(tokens) == fnv1a(tokens.astype("<u4").tobytes())


def test_a_published_value():
    # FNV-1a 64 of the four bytes "foob", from the authors' test vectors.
    assert prompt_seed(np.frombuffer(b"foob", dtype="<i4")) == 0xDD120E790C2512AF
