"""What tokens are, by role and by hint; and what follows for who is evicted: order, shares, learning, letting go."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kv_audit import check_cache, run

from holdfast.replicas.kv.cache import KVCache
from holdfast.replicas.kv.tags import (
    OTHER,
    PLAIN,
    RELEASED,
    SHARED_S,
    SYSTEM,
    TAGS,
    Hint,
    Label,
    Labels,
    labels_of,
)
from holdfast.replicas.types import TokenIds

SIZE = 4
roles = st.lists(st.sampled_from(["system", "user", "assistant", "tool", "odd"]), max_size=6)
said = st.builds(Label, st.sampled_from(["", *TAGS]), st.sampled_from([RELEASED, 1, 20, 100]))
hints = st.lists(
    st.builds(
        Hint,
        st.sampled_from(["messages", "tokens", "reply"]),
        said,
        st.integers(0, 50),
        st.one_of(st.none(), st.integers(0, 60)),
    ),
    max_size=6,
)


def ids(first: int, n: int) -> TokenIds:
    return np.arange(first, first + n, dtype=np.int32)


# ---- which label which token has ----


def naive(who: list[str], starts: list[int], length: int, asked: list[Hint], position: int) -> tuple[str, int]:
    """Tag and tier of one token, by looking at everything."""
    starts = [0, *starts[1:]] if starts else []
    ends = [*starts[1:], length] if starts else []
    tag, tier = ("response", 0) if position >= length else ("", 0)
    for role, begin, end in zip(who, starts, ends, strict=True):
        if begin <= position < end:
            tag = {"system": SYSTEM, "user": "user_query", "tool": "tool_output", "assistant": "response"}.get(role, "")
            tier = 80 if role == "system" else 0
    for hint in asked:
        begin, past = min(hint.start, length), math.inf if hint.end is None else hint.end
        if hint.where == "messages":
            begin = starts[hint.start] if hint.start < len(starts) else length
            past = math.inf if hint.end is None else starts[hint.end] if hint.end < len(starts) else length
        elif hint.where == "reply":
            begin, past = length, math.inf
        else:
            past = past if hint.end is None or past <= length else length
        if begin <= position < past and (position < length or past == math.inf):
            tag, tier = hint.label.tag or tag, hint.label.priority
    return tag, tier


@given(roles, st.data(), hints)
def test_every_token_has_the_label_of_the_last_hint_or_of_its_role(
    who: list[str], data: st.DataObject, asked: list[Hint]
) -> None:
    length = data.draw(st.integers(1, 40))
    starts = sorted(data.draw(st.lists(st.integers(0, length), min_size=len(who), max_size=len(who))))
    found = labels_of(who, starts, length, asked)
    for position in range(length + 3):
        label = found.at(position)
        assert (label.tag, label.priority) == naive(who, starts, length, asked, position), position


@given(roles, st.data(), hints, st.integers(1, 5))
def test_pieces_cover_what_is_saved_and_are_cut_between_pages(
    who: list[str], data: st.DataObject, asked: list[Hint], size: int
) -> None:
    length = data.draw(st.integers(1, 40))
    starts = sorted(data.draw(st.lists(st.integers(0, length), min_size=len(who), max_size=len(who))))
    labels = labels_of(who, starts, length, asked)
    start = data.draw(st.integers(0, length + 4))
    end = data.draw(st.integers(start + 1, start + 50))
    pieces = labels.pieces(start, end, size)
    ends = [piece for piece, _ in pieces]
    assert ends == sorted(set(ends))
    assert ends[-1] == end
    assert all(cut % size == 0 for cut in ends[:-1])
    begun = start
    for cut, label in pieces:
        assert all(labels.at(position, size).alike(label) for position in range(begun, cut))
        begun = cut
    for (_, one), (_, other) in pairwise(pieces):
        assert not one.alike(other), "a node more than is needed"
    assert sum(labels.tokens(end).values()) == end


# ---- what is evicted ----


def only(label: Label) -> Labels:
    return Labels(rest=label)


def system(length: int) -> Labels:
    return labels_of(["system", "user"], [0, length], length + SIZE)


HIGH = Label(priority=100)


def test_a_beginning_is_kept_once_another_program_has_used_it() -> None:
    cache = KVCache(24, SIZE)
    shared, own = ids(0, 16), ids(500, 16)
    run(cache, np.concatenate((own, ids(600, SIZE))), 0.0, labels=system(16), who="r")
    run(cache, np.concatenate((own, ids(600, SIZE), ids(700, 1))), 1.0, labels=system(16), who="r")
    for n, who in enumerate("pq"):
        run(cache, np.concatenate((shared, ids(100 * n + 100, SIZE))), 2.0 + n, labels=system(16), who=who)
    for n in range(8):
        run(cache, ids(1000 + 100 * n, 32), 10.0 + n, who=f"x{n}")
    assert cache.peek("", np.append(shared, 1)) == 16
    assert cache.peek("", np.append(own, 1)) == 0, "its own next turn shows no sharing"
    assert cache.tree.queue.raised == 4


def test_what_stands_above_the_others_lapses_with_time() -> None:
    cache = KVCache(24, SIZE)
    shared = ids(0, 16)
    for n, who in enumerate("pq"):
        run(cache, np.concatenate((shared, ids(100 * n + 100, SIZE))), float(n), labels=system(16), who=who)
    for n in range(8):
        run(cache, ids(1000 + 100 * n, 32), SHARED_S + 10.0 + n, who="x")
    assert cache.peek("", np.append(shared, 1)) == 0
    assert cache.tree.queue.raised == 0


def test_everything_at_the_top_is_nothing_at_the_top() -> None:
    """One who marks all it sends as most worth keeping has what age alone would keep."""
    kept = []
    for label in (HIGH, PLAIN):
        cache = KVCache(24, SIZE)
        for n in range(12):
            run(cache, ids(100 * n, 16), float(n), labels=only(label), who=f"p{n}")
        kept.append([n for n in range(12) if cache.peek("", np.append(ids(100 * n, 16), 9))])
    assert kept[0] == kept[1]


def test_a_tenant_takes_no_more_of_the_others_than_its_share() -> None:
    cache = KVCache(40, SIZE, share=0.5)
    for n in range(20):
        run(cache, ids(100 * n, 16), float(n), "greedy", labels=only(HIGH), who=f"greedy{n}")
    assert cache.tree.queue.raised <= 20
    run(cache, ids(0, 16), 30.0, "modest", labels=only(HIGH), who="modest")
    assert cache.tree.queue.raised <= 20
    for n in range(20, 40):
        run(cache, ids(100 * n, 16), 30.0 + n, "greedy", labels=only(HIGH), who=f"greedy{n}")
        assert cache.tree.queue.raised <= 20
    assert cache.peek("modest", np.append(ids(0, 16), 9)) == 16, "what is the modest one's stays"
    for n in range(10):
        run(cache, ids(100 * n, 16), 100.0 + n, "plain", who=f"plain{n}")
    found = [cache.peek("plain", np.append(ids(100 * n, 16), 9)) for n in range(10)]
    assert sum(found) >= 64, "half of the cells go by age"


def test_a_hint_for_a_part_of_what_is_cached_counts_for_that_part_alone() -> None:
    cache = KVCache(24, SIZE)
    tokens = ids(0, 16)
    run(cache, tokens, 0.0, who="p")
    part = labels_of(["user"], [0], 17, [Hint("tokens", HIGH, SIZE, 2 * SIZE)])
    run(cache, np.append(tokens, 99), 1.0, labels=part, who="p")
    assert cache.tree.queue.raised == 1
    run(cache, ids(1000, 88), 2.0, who="q")
    assert cache.peek("", np.append(tokens, 1)) == 2 * SIZE, "it and what stands before it"


def test_what_an_ended_program_alone_had_goes_first() -> None:
    cache = KVCache(24, SIZE)
    shared = ids(0, 16)
    prompts = {who: np.concatenate((shared, ids(100 * n, 16))) for n, who in enumerate("pq", 1)}
    for n, (who, prompt) in enumerate(prompts.items()):
        run(cache, prompt, float(n), labels=system(16), who=who)
    cache.demote("", prompts["q"], "q")
    check_cache(cache)
    run(cache, ids(1000, 64), 9.0, who="x")
    assert cache.peek("", np.append(prompts["p"], 1)) == 32, "older, and still somebody's"
    assert cache.peek("", np.append(prompts["q"], 1)) == 16, "the system prompt is not its alone"


def test_an_ended_program_lets_nothing_go_that_others_use_or_go_on_from() -> None:
    cache = KVCache(24, SIZE)
    prompt = ids(0, 16)
    run(cache, prompt, 0.0, who="p")
    run(cache, np.concatenate((prompt, ids(50, 8))), 1.0, who="child")
    pin = cache.pin("", np.concatenate((prompt, ids(50, 8))), 2.0)
    cache.demote("", prompt, "p")
    cache.demote("", np.concatenate((prompt, ids(50, 8))), "child")
    check_cache(cache)
    cache.unpin(pin)
    cache.demote("nobody", prompt, "p")
    assert all(node.priority == 0 for node in pin.node.path())


def test_evicted_cells_are_counted_by_tag() -> None:
    evicted: dict[str, int] = {}
    cache = KVCache(8, SIZE, evicted=evicted)
    run(cache, ids(0, 16), 0.0, labels=only(Label("tool_output")), who="p")
    run(cache, ids(100, 16), 1.0, who="q")
    run(cache, ids(200, 32), 2.0, who="r")
    assert evicted == {"tool_output": 16, OTHER: 16}
