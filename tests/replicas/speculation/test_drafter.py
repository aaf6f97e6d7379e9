"""The drafter as the scheduler sees it: its limits, its switches, its secrets, and what it learns.

The memory of earlier turns is bounded, the oldest goes first, and scopes do not meet.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.speculation.drafter import Drafter, DraftState, TurnMemory
from holdfast.replicas.speculation.gate import VerificationCost
from holdfast.replicas.speculation.ngrams import GAP, common_prefix
from holdfast.replicas.speculation.skeletons import Skeleton, SkeletonSet

ALL = DraftConfig(memory_context=2)
OPEN, NAME, END, QUOTE = 1, 2, 3, 4
TOOLS = SkeletonSet([Skeleton(((OPEN, NAME, 10, 20), (QUOTE, 21), (END,)))], closers=[QUOTE])


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def generate(drafter: Drafter, state: DraftState, text: list[int], limit: int = 16) -> list[list[int]]:
    """Teacher-forced: `text` is drawn whatever is proposed. The proposals."""
    proposals, done = [], 0
    while done < len(text):
        draft = drafter.propose(state, limit).tolist()
        proposals.append(draft)
        drawn = text[done : done + common_prefix(draft, text[done:]) + 1]
        drafter.learn(state, drawn)
        done += len(drawn)
    return proposals


def remember(drafter: Drafter, scope: str, prompt: list[int], turn: list[int]) -> None:
    state = drafter.open(scope, ids(prompt))
    drafter.learn(state, turn)
    drafter.close(state, len(prompt))


tokens_of = st.lists(st.integers(1, 6), max_size=20)


@settings(deadline=None)
@given(st.lists(tokens_of, max_size=4), tokens_of, tokens_of, st.integers(0, 20))
def test_proposals_keep_to_the_limit_and_are_tokens(
    earlier: list[list[int]], prompt: list[int], text: list[int], limit: int
) -> None:
    drafter = Drafter(ALL)
    for turn in earlier:
        remember(drafter, "a", prompt, turn)
    state = drafter.open("a", ids(prompt), TOOLS)
    for draft in generate(drafter, state, text, limit):
        assert len(draft) <= min(limit, ALL.max_draft)
        assert all(token > 0 for token in draft)
    drafter.close(state, len(prompt))


@settings(deadline=None)
@given(st.lists(tokens_of, max_size=4), tokens_of, tokens_of)
def test_equal_histories_give_equal_drafts(earlier: list[list[int]], prompt: list[int], text: list[int]) -> None:
    def once() -> list[list[int]]:
        drafter = Drafter(ALL)
        for turn in earlier:
            remember(drafter, "a", prompt, turn)
        return generate(drafter, drafter.open("a", ids(prompt), TOOLS), text)

    assert once() == once()


@settings(deadline=None)
@given(st.lists(st.integers(1000, 1005), max_size=30), tokens_of, tokens_of)
def test_a_scope_never_sees_another_ones_text(secret: list[int], prompt: list[int], text: list[int]) -> None:
    """What one tenant said changes nothing for another, neither what is proposed nor how much."""
    told, untold = Drafter(ALL), Drafter(ALL)
    for _ in range(2):
        remember(told, "secret", prompt, [*secret, *text])
    ours = [generate(drafter, drafter.open("ours", ids(prompt), TOOLS), text) for drafter in (told, untold)]
    assert ours[0] == ours[1]
    assert not {token for draft in ours[0] for token in draft} & set(secret)


def test_the_sequence_itself_is_continued() -> None:
    drafter = Drafter(ALL)
    state = drafter.open("a", ids([5, 6, 7, 8, 9, 5, 6]))
    assert drafter.propose(state, 3).tolist() == [7, 8, 9]
    drafter.learn(state, [7, 8])
    assert drafter.propose(state, 3).tolist() == [9, 5, 6]


def test_an_earlier_turn_is_found_by_what_came_before_it() -> None:
    drafter = Drafter(ALL)
    remember(drafter, "a", [30, 31, 32], [40, 41, 42])
    state = drafter.open("a", ids([50, 31, 32]))
    assert drafter.propose(state, 16).tolist() == [40, 41, 42]


def test_the_longer_match_wins_and_of_equals_the_conversations_own() -> None:
    drafter = Drafter(ALL)
    remember(drafter, "a", [30, 31, 32], [40])
    assert drafter.propose(drafter.open("a", ids([30, 7, 32, 50, 31, 32])), 1).tolist() == [40]
    assert drafter.propose(drafter.open("a", ids([31, 32, 50, 31, 32])), 1).tolist() == [50]


def test_a_declared_call_is_drafted_before_anyone_made_it() -> None:
    drafter = Drafter(ALL)
    state = drafter.open("a", ids([20, 60, 61, QUOTE, 99]), TOOLS)
    drafter.learn(state, [OPEN, NAME])
    assert drafter.propose(state, 16).tolist() == [10, 20, 60, 61, QUOTE, 21]


def test_a_value_comes_from_the_conversation_rather_than_from_an_earlier_one() -> None:
    drafter = Drafter(replace(ALL, own_value_length=2))
    remember(drafter, "a", [8], [OPEN, NAME, 10, 20, 70, QUOTE])
    state = drafter.open("a", ids([9, 10, 20, 60, QUOTE, 99]), TOOLS)
    drafter.learn(state, [OPEN, NAME])
    assert drafter.propose(state, 4).tolist() == [10, 20, 60, QUOTE]


@pytest.mark.parametrize("source", ["prompt_lookup", "memory", "skeleton"])
def test_each_source_has_a_switch(source: str) -> None:
    only = replace(ALL, **{name: name == source for name in ("prompt_lookup", "memory", "skeleton")})
    drafter = Drafter(only)
    remember(drafter, "a", [30, 31], [40])
    cases = {
        "prompt_lookup": drafter.open("a", ids([50, 51, 52, 50, 51])),
        "memory": drafter.open("a", ids([30, 31])),
        "skeleton": drafter.open("a", ids([99]), TOOLS),
    }
    drafter.learn(cases["skeleton"], [OPEN, NAME])
    drafted = {name for name, state in cases.items() if len(drafter.propose(state, 4))}
    assert drafted == {source}


def test_switched_off_it_drafts_and_remembers_nothing() -> None:
    drafter = Drafter(replace(ALL, enabled=False))
    remember(drafter, "a", [1, 2], [3])
    state = drafter.open("a", ids([5, 6, 5]), TOOLS)
    assert generate(drafter, state, [6, 5, 6]) == [[], [], []]
    drafter.close(state, 3)
    assert drafter.memory_bytes == 0


def test_load_and_cost_shorten_drafts() -> None:
    drafter = Drafter(ALL)
    state = drafter.open("a", ids([*range(5, 40), 5, 6]))
    alone = len(drafter.propose(state, 16))
    assert alone == 16
    assert len(drafter.propose(state, 16, decoding=ALL.verify_rows // 4)) == 3
    drafter = Drafter(ALL, VerificationCost((1, 101), (1.0, 101.0)))
    assert len(drafter.propose(state, 16)) == 0
    drafter = Drafter(replace(ALL, cost_gate=False), VerificationCost((1, 101), (1.0, 101.0)))
    assert len(drafter.propose(state, 16)) == 16


@settings(deadline=None)
@given(st.lists(tokens_of, min_size=1, max_size=4), tokens_of)
def test_where_rows_cost_nothing_sequences_of_one_step_draft_what_they_would_alone(
    prompts: list[list[int]], text: list[int]
) -> None:
    free = VerificationCost((1, 300), (1.0, 1.0))
    together, alone = Drafter(ALL, free), Drafter(ALL)
    ours = [together.open("a", ids([*prompt, *text])) for prompt in prompts]
    others = [alone.open("a", ids([*prompt, *text])) for prompt in prompts]
    drafts = together.propose_all([(state, 16) for state in ours])
    for draft, state in zip(drafts, others, strict=True):
        full = alone.propose(state, 16).tolist()
        assert draft.tolist() == full[: len(draft)]
        assert len(draft) >= min(len(full), 6)  # later ones are hardly ever right


def test_every_so_often_a_step_drafts_to_learn_what_it_costs() -> None:
    dear = VerificationCost((1, 101), (1.0, 101.0))
    drafter = Drafter(replace(ALL, explore_every=8), dear)
    state = drafter.open("a", ids([*range(5, 40), 5, 6]))
    assert [len(drafter.propose(state, 16)) for _ in range(16)] == [0] * 7 + [1] + [0] * 7 + [1]


def test_steps_that_turn_out_cheap_bring_drafts_back() -> None:
    drafter = Drafter(ALL, VerificationCost((1, 4, 16), (1.0, 8.0, 40.0)))
    state = drafter.open("a", ids([*range(5, 40), 5, 6]))
    assert len(drafter.propose(state, 16)) == 0
    for _ in range(200):
        for rows in (1, 2, 4, 8, 16):
            drafter.measured(rows, 1.0)
    assert len(drafter.propose(state, 16)) >= 6  # later ones are hardly ever right


def test_a_sequence_that_fails_drafts_little_and_recovers() -> None:
    drafter = Drafter(ALL)
    phrase = list(range(100, 140))
    state = drafter.open("a", ids(phrase))
    for i in range(40):
        drafter.learn(state, [5])
        draft = drafter.propose(state, 16)
        drafter.learn(state, range(300 + 10 * i, 310 + 10 * i))  # never what followed a 5 before
    assert len(draft) == ALL.floor
    drafter.learn(state, [100])
    for token in phrase[1:24]:
        drafter.propose(state, 16)
        drafter.learn(state, [token])
    assert len(drafter.propose(state, 16)) == 16


@pytest.mark.parametrize(
    ("verified", "counted", "right"),
    [(None, 4, 2), ([7, 8, 9, 5], 4, 2), ([7], 1, 1), ([], 0, 0), ([3, 4], 0, 0), ([7, 4], 1, 1)],
)
def test_only_drafts_that_were_verified_are_counted(verified: list[int] | None, counted: int, right: int) -> None:
    """Others may have been cut off on their way into the step, or replaced."""
    drafter = Drafter(ALL)
    state = drafter.open("a", ids([5, 6, 7, 8, 9, 5, 6]))
    assert drafter.propose(state, 4).tolist() == [7, 8, 9, 5]
    drafter.learn(state, [7, 8, 1], verified)
    assert sum(drafter.counts.drafted.values()) == counted
    assert sum(drafter.counts.accepted.values()) == right


def test_sources_that_the_gate_turned_off_are_still_watched() -> None:
    drafter = Drafter(ALL, VerificationCost((1, 101), (1.0, 11.0)))
    state = drafter.open("a", ids([*range(100, 180), *range(20, 99), 100]))
    state.acceptance.value = 0.0
    drafter._kind("a", 0, 1).value = 0.0
    assert len(drafter.propose(state, 16)) == 0
    for token in range(101, 150):
        drafter.learn(state, [token])
        proposed = drafter.propose(state, 16)
    assert len(proposed) == 16


def test_what_it_remembers_is_bounded() -> None:
    drafter = Drafter(replace(ALL, memory_bytes=200_000, scope_bytes=50_000))
    for i in range(60):
        remember(drafter, f"tenant {i % 7}", [1, 2], list(range(i, i + 400)))
        assert 0 < drafter.memory_bytes <= 200_000


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 600)), max_size=25))
def test_bytes_stay_within_both_bounds(turns: list[tuple[str, int]]) -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope, length in turns:
        memory.add(scope, ids(list(range(length))))
        indices = [index for index in map(memory.find, "abc") if index]
        assert memory.nbytes == sum(index.nbytes for index in indices) <= 60_000
        assert all(index.nbytes <= 40_000 for index in indices)


def test_a_scope_keeps_its_latest_turns_each_behind_a_gap() -> None:
    memory = TurnMemory(total_bytes=1 << 20, scope_bytes=40_000)
    for start in range(0, 10_000, 100):
        memory.add("a", ids(list(range(start, start + 100))))
    index = memory.find("a")
    assert index is not None
    kept = index.tokens().tolist()
    assert kept[-101:] == [*range(9900, 10_000), GAP]
    assert 0 not in kept
    assert kept.count(GAP) >= len(kept) // 101


def test_the_scope_used_least_recently_goes_first() -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope in "aba":
        memory.add(scope, ids(list(range(300))))
    memory.add("c", ids(list(range(900))))
    assert memory.find("b") is None
    assert memory.find("c") is not None


def test_a_share_too_small_for_anything_holds_nothing() -> None:
    memory = TurnMemory(total_bytes=100, scope_bytes=100)
    memory.add("a", ids([1, 2, 3]))
    assert memory.find("a") is None
    assert memory.nbytes == 0
