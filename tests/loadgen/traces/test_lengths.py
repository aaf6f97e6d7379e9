"""Prompts drawn for lengths share what the recording shared, and are as long as they were."""

from itertools import takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_samples import user

from holdfast.loadgen.program import Output, Program, Sized, Turn
from holdfast.loadgen.traces.lengths import Wording, worded
from holdfast.replicas.errors import ConfigError

FEW = settings(max_examples=40, suppress_health_check=list(HealthCheck))
BLOCKS = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def shared(left: list[str], right: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@FEW
@given(left=BLOCKS, right=BLOCKS, more=st.integers(0, 20), seed=st.integers(0, 3))
def test_prompts_share_their_common_blocks_and_nothing_long_beyond(
    left: tuple[int, ...], right: tuple[int, ...], more: int, seed: int
) -> None:
    wording = Wording(seed, block=64)
    one, two = (wording.text(Sized(64 * len(blocks) + more + 1, blocks), f"{blocks}") for blocks in (left, right))
    common = shared([str(block) for block in left], [str(block) for block in right])
    words = shared(one.split(), two.split())
    assert words >= min(64 * common, len(one.split()), len(two.split()))
    if left != right:
        assert words < 64 * common + 40  # two words in a hundred fall together


@FEW
@given(tokens=st.integers(0, 3000), blocks=st.none() | BLOCKS, scale=st.sampled_from([0.01, 0.5, 1]))
def test_a_prompt_has_the_recorded_length(tokens: int, blocks: tuple[int, ...] | None, scale: float) -> None:
    text = Wording(scale=scale).text(Sized(tokens, blocks), "a")
    assert len(text.split()) == max(1, round(tokens * scale))


def test_a_worded_program_is_one_of_messages_and_the_same_every_time() -> None:
    sized = Turn(Sized(9, (1,)), at_ms=4, delay_ms=2, output=Output(tokens=10))
    program = Program("p", (sized, Turn((user("a"),)), Turn(Sized(9))))
    wording = Wording(block=4, scale=0.5)
    done = worded(program, wording)
    first, kept, last = done.turns
    assert isinstance(first.prompt, tuple)
    assert isinstance(last.prompt, tuple)
    assert first.prompt[0]["role"] == "user"
    assert first.prompt[0]["content"] != last.prompt[0]["content"]
    assert (first.at_ms, first.delay_ms, first.output.tokens) == (4, 2, 5)
    assert kept == program.turns[1]
    assert done == worded(program, wording)
    assert done != worded(program, Wording(seed=1, block=4, scale=0.5))


def test_no_repetition_begins_a_prompt_as_another_does() -> None:
    parts = [{"type": "text", "text": "in parts"}]
    whole = Turn(({"role": "user", "content": parts},), whole=True)
    text = Program("p", (Turn((user("a"), user("b"))), Turn((user("c"),)), whole))
    sized = Program("q", (Turn(Sized(9, (1,))),))
    assert worded(text, Wording(block=4)) == text
    (first, later, anew), (other, _, _) = (worded(text, Wording(1, repetition)).turns for repetition in (1, 2))
    assert first.prompt == (user("Session 1/1. a"), user("b"))
    assert other.prompt == (user("Session 1/2. a"), user("b"))
    assert later == text.turns[1]
    assert anew.prompt[0]["content"] == [{"type": "text", "text": "Session 1/1. "}, *parts]
    drawn = [worded(sized, Wording(1, repetition, block=4)).turns[0].prompt[0]["content"] for repetition in range(3)]
    assert len({told.split()[0] for told in drawn}) > 1
    assert len(set(drawn)) == 3


def test_a_scale_is_above_zero() -> None:
    for scale in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="scale"):
            Wording(scale=scale)
