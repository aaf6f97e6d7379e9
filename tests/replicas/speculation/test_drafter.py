"""The drafter as the scheduler uses it: limits, secrets, what it learns, and that its errors cost only drafts.

The memory of earlier turns is bounded, the least recently used goes first, and scopes do not meet.
"""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.replicas.config import DraftConfig
from holdfast.replicas.plan import Sampling, StepCost, step_cost
from holdfast.replicas.programs import Sequence, Status
from holdfast.replicas.requests import Submit
from holdfast.replicas.speculation.drafter import Drafter, StepTimes, TurnMemory
from holdfast.replicas.speculation.ngrams import common_prefix
from holdfast.replicas.stats import EngineStats

DEAR = step_cost((1, 101), (1.0, 101.0))
numbers = count()


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def drafter_of(config: DraftConfig = DraftConfig(), cost: StepCost | None = None) -> Drafter:  # noqa: B008
    return Drafter(config, EngineStats(), cost)


def begin(prompt: list[int], scope: str = "a", room: int = 100) -> Sequence:
    """A sequence that decodes, with room for so many tokens."""
    submit = Submit(f"{next(numbers)}", tokens=ids(prompt), sampling=Sampling(room), scope=scope)
    sequence = Sequence.of(submit, 0, 0.0, frozenset(), 0)
    sequence.move(Status.RUNNING)
    return sequence


def propose(drafter: Drafter, *sequences: Sequence) -> list[list[int]]:
    drafter.prepare(sequences)
    return [drafter.propose(sequence).tolist() for sequence in sequences]


def draw(drafter: Drafter, sequence: Sequence, tokens: list[int], predicted: int | None = None) -> None:
    sequence.append(tuple(tokens), 0.0)
    drafter.learn(sequence, tokens, predicted)


def generate(drafter: Drafter, sequence: Sequence, text: list[int]) -> list[list[int]]:
    """Teacher-forced: `text` is drawn whatever is proposed. The proposals."""
    proposals, done = [], 0
    while done < len(text):
        (draft,) = propose(drafter, sequence)
        proposals.append(draft)
        drawn = text[done : done + common_prefix(draft, text[done:]) + 1]
        draw(drafter, sequence, drawn)
        done += len(drawn)
    return proposals


def remember(drafter: Drafter, scope: str, prompt: list[int], turn: list[int]) -> None:
    sequence = begin(prompt, scope)
    drafter.catch_up([sequence])
    draw(drafter, sequence, turn)
    drafter.close(sequence)
    drafter.catch_up([])


tokens_of = st.lists(st.integers(1, 6), max_size=20)


@given(st.lists(tokens_of, max_size=4), tokens_of, tokens_of, st.integers(0, 20))
def test_proposals_keep_to_the_room_and_are_tokens(
    earlier: list[list[int]], prompt: list[int], text: list[int], room: int
) -> None:
    drafter = drafter_of()
    for turn in earlier:
        remember(drafter, "a", prompt, turn)
    sequence, left = begin(prompt, room=room), room
    for draft in generate(drafter, sequence, text[:room]):
        assert len(draft) < max(left, 1)
        assert len(draft) <= DraftConfig().max_draft
        assert all(token > 0 for token in draft)
        left -= 1
    drafter.close(sequence)


@given(st.lists(tokens_of, max_size=4), tokens_of, tokens_of)
def test_equal_histories_give_equal_drafts(earlier: list[list[int]], prompt: list[int], text: list[int]) -> None:
    def once() -> list[list[int]]:
        drafter = drafter_of()
        for turn in earlier:
            remember(drafter, "a", prompt, turn)
        return generate(drafter, begin(prompt), text)

    assert once() == once()


@given(st.lists(st.integers(1000, 1005), max_size=30), tokens_of, tokens_of)
def test_a_scope_never_sees_another_ones_text(secret: list[int], prompt: list[int], text: list[int]) -> None:
    """One tenant's replies change nothing for another: neither which drafts are proposed nor how many."""
    told, untold = drafter_of(), drafter_of()
    for _ in range(2):
        remember(told, "secret", prompt, [*secret, *text])
    ours = [generate(drafter, begin(prompt, "ours"), text) for drafter in (told, untold)]
    assert ours[0] == ours[1]
    assert not {token for draft in ours[0] for token in draft} & set(secret)


def test_an_earlier_turn_is_found_by_what_came_before_it() -> None:
    drafter = drafter_of()
    remember(drafter, "a", [30, 31, 32], [40, 41, 42])
    assert propose(drafter, begin([50, 31, 32])) == [[40, 41, 42]]


def test_the_longer_match_wins_and_of_equals_the_conversations_own() -> None:
    drafter = drafter_of(DraftConfig(max_draft=1))
    remember(drafter, "a", [30, 31, 32], [40])
    assert propose(drafter, begin([30, 7, 32, 50, 31, 32])) == [[40]]
    assert propose(drafter, begin([31, 32, 50, 31, 32])) == [[50]]


def test_switched_off_it_drafts_and_remembers_nothing() -> None:
    drafter = drafter_of(DraftConfig(enabled=False))
    remember(drafter, "a", [1, 2], [3])
    assert generate(drafter, begin([5, 6, 5]), [6, 5, 6]) == [[], [], []]
    assert drafter.silent
    assert drafter.memory_bytes == 0


def test_where_rows_are_dear_drafts_are_withheld_and_counted() -> None:
    stats = EngineStats()
    drafter = Drafter(DraftConfig(), stats, DEAR)
    assert propose(drafter, begin([*range(5, 40), 5, 6])) == [[]]
    assert stats.drafts_withheld == 16


@given(st.lists(tokens_of, min_size=1, max_size=4), tokens_of)
def test_where_rows_cost_nothing_sequences_of_one_step_draft_what_they_would_alone(
    prompts: list[list[int]], text: list[int]
) -> None:
    together = propose(drafter_of(), *(begin([*prompt, *text]) for prompt in prompts))
    alone = [propose(drafter_of(), begin([*prompt, *text]))[0] for prompt in prompts]
    for draft, full in zip(together, alone, strict=True):
        assert draft == full[: len(draft)]
        assert len(draft) >= min(len(full), 4)  # the later ones are seldom right


def test_steps_that_take_longer_than_measured_bring_drafts_back() -> None:
    drafter, sequence = drafter_of(cost=DEAR), begin([*range(5, 40), 5, 6])
    assert propose(drafter, sequence) == [[]]
    for _ in range(100):
        drafter.measured(1, 100.0, sequences=1)  # contexts have grown: each step takes as much longer
    assert len(propose(drafter, sequence)[0]) >= 5


@pytest.mark.parametrize("at_load", [(60, 60, 66, 72), (14, 40, 200, 400), (28, 34, 94, 180)])
def test_costs_that_were_measured_beside_other_programs_become_those_of_steps(at_load: tuple[float, ...]) -> None:
    rows, real = (1, 16, 64, 128), (14.0, 17.0, 47.0, 90.0)
    believed, true = (np.array(step_cost(rows, each)) for each in (at_load, real))
    times, draw = StepTimes(believed), np.random.default_rng(0)
    for _ in range(600):
        width = int(draw.integers(8, 65))
        times.add(width, float(true[width] + 10.0) * draw.lognormal(0.0, 0.05), sequences=8)  # long contexts: 10 more
    learned = believed + times.extra_s(8)
    proportions = learned[[32, 64]] / learned[8]
    assert proportions == pytest.approx((true[[32, 64]] + 10.0) / (true[8] + 10.0), rel=0.25)
    assert times.extra_s(1) == 0.0  # nothing is known of steps with one sequence


def test_a_sequence_that_fails_drafts_little_and_recovers() -> None:
    drafter, phrase = drafter_of(), list(range(100, 140))
    sequence = begin(phrase, room=1000)
    assert len(propose(drafter, begin([*phrase, 100]))[0]) > 2
    for i in range(40):
        draw(drafter, sequence, [100])
        (draft,) = propose(drafter, sequence)
        draw(drafter, sequence, list(range(300 + 10 * i, 310 + 10 * i)))  # never the continuation of before
    assert len(draft) <= 2
    draw(drafter, sequence, [100])
    for token in phrase[1:24]:
        propose(drafter, sequence)
        draw(drafter, sequence, [token])
    assert len(propose(drafter, sequence)[0]) >= 15


def test_the_models_prediction_is_a_draft_like_others() -> None:
    """It stands alone where nothing matches, confirms a match that begins with it, and holds for one step."""
    drafter, sequence = drafter_of(), begin(list(range(5, 20)))
    assert propose(drafter, sequence) == [[]]
    draw(drafter, sequence, [50], predicted=51)
    assert propose(drafter, sequence) == [[51]]
    draw(drafter, sequence, [5], predicted=6)
    whole = propose(drafter, sequence)[0]
    assert whole[:3] == [6, 7, 8]
    draw(drafter, sequence, [60])
    assert propose(drafter, sequence) == [[]]
    assert propose(drafter_of(DraftConfig(enabled=False)), sequence) == [[]]


@pytest.mark.parametrize("right", ["prediction", "match"])
def test_of_a_match_and_a_prediction_the_one_that_was_right_counts(right: str) -> None:
    drafter, phrase = drafter_of(), list(range(100, 110))
    sequence = begin(phrase * 3, room=1000)
    propose(drafter, sequence)
    for i in range(40):
        token, other = phrase[i % 10], 200 + i
        following = phrase[(i + 1) % 10]
        if right == "match":
            draw(drafter, sequence, [token], predicted=other)
            expected = following
        else:  # each phrase token is followed by something else than before, which the model predicts
            draw(drafter, sequence, [other], predicted=token)
            propose(drafter, sequence)
            draw(drafter, sequence, [token], predicted=other + 1)
            expected = other + 1
        (draft,) = propose(drafter, sequence)
    assert draft[0] == expected


def test_a_token_in_flight_means_no_drafts() -> None:
    drafter, sequence = drafter_of(), begin([5, 6, 7, 5, 6])
    assert propose(drafter, sequence)[0]
    assert not drafter.silent
    sequence.awaited = 0
    assert propose(drafter, sequence) == [[]]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 600)), max_size=25))
def test_bytes_stay_within_both_bounds(turns: list[tuple[str, int]]) -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope, length in turns:
        memory.add(scope, ids(list(range(length))))
        indices = [index for index in map(memory.find, "abc") if index]
        assert memory.nbytes == sum(index.nbytes for index in indices) <= 60_000
        assert all(index.nbytes <= 40_000 for index in indices)


def test_the_scope_used_least_recently_goes_first() -> None:
    memory = TurnMemory(total_bytes=60_000, scope_bytes=40_000)
    for scope in "aba":
        memory.add(scope, ids(list(range(300))))
    memory.add("c", ids(list(range(900))))
    assert memory.find("b") is None
    assert memory.find("c") is not None
