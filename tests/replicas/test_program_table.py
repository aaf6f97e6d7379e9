"""The table of programs: what it forgets and when, and how much of a turn the next prompt drops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas.plan import Sampling
from holdfast.replicas.programs import Kind, Program, ProgramKey, Programs, Sequence
from holdfast.replicas.requests import PartialPrefill, SessionTurn, Submit
from holdfast.replicas.stats import EngineStats
from holdfast.replicas.types import NO_TOKENS

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.asarray(ids, np.int32))


def request(name: str = "", **more: object) -> Submit:
    return Submit("r", tokens=NO_TOKENS, sampling=Sampling(0), program_id=name, **more)


@given(tokens, tokens, st.integers(0, 12))
def test_rewritten_tokens_lie_behind_the_first_changed_token(before, prompt, n_cached):
    program = Program(ProgramKey("", "p"), computed=before)
    common = next(
        (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt))
    )
    changed = common < len(before) and common < len(prompt)
    assert program.rewritten(prompt, n_cached) == (len(before) - common if changed and n_cached <= common else 0)
    assert Program(ProgramKey("", "q")).rewritten(prompt, 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=30))
def test_computed_tokens_are_bounded_and_the_oldest_are_forgotten(turns):
    programs, model = Programs(EngineStats(), tokens=50), {}
    for name, n in turns:
        programs.remember(programs.of(request(name))[0], np.zeros(n, np.int32), "")
        model.pop(name, None)
        model[name] = n
        while sum(model.values()) > 50:
            del model[next(iter(model))]
        assert programs.remembered == sum(model.values())
        assert {p.key.name: len(p.computed) for p in programs if len(p.computed)} == model


def test_records_in_use_are_never_forgotten_and_idle_ones_are_the_oldest_first():
    programs = Programs(EngineStats(), tokens=100, most=3)
    runs = Sequence.of(request("runs"), 0, 0.0, frozenset(), 0, programs.of(request("runs")))
    programs.begin(runs)
    for name in "abcd":
        programs.of(request(name))
    assert [program.key.name for program in programs] == ["runs", "c", "d"] or len(programs) == 3
    assert programs.find(ProgramKey("", "runs")) is runs.program
    assert programs.find(ProgramKey("", "a")) is None
    programs.end(runs)
    for name in "efg":
        programs.of(request(name))
    assert programs.find(ProgramKey("", "runs")) is None


def test_tokens_computed_ahead_are_wasted_when_their_program_is_forgotten():
    stats = EngineStats()
    programs = Programs(stats, tokens=100, most=2)
    submit = request("p", background=PartialPrefill("h"))
    sequence = Sequence.of(submit, 0, 0.0, frozenset(), 0, programs.of(submit))
    programs.begin(sequence)
    assert (programs.ahead, sequence.target.ahead) == (1, [sequence])
    programs.prefilled(sequence, 10)
    programs.end(sequence)
    assert (programs.ahead, sequence.target.ahead) == (0, [])
    for name in "abc":
        programs.of(request(name))
    assert (stats.ahead_used, stats.ahead_wasted) == (0, 10)


def test_the_key_of_a_request_is_its_session_before_its_handle_before_its_program():
    assert ProgramKey.of(request("p", session=SessionTurn("s"))) == ProgramKey("", "s", Kind.SESSION)
    assert ProgramKey.of(request("p", background=PartialPrefill("h"))) == ProgramKey("", "h", Kind.HANDLE)
    assert ProgramKey.of(request("p")) == ProgramKey("", "p") != ProgramKey("", "p", Kind.SESSION)
    assert ProgramKey.of(request()) is None
    handle, target = Programs(EngineStats(), tokens=1).of(request("p", background=PartialPrefill("h")))
    assert (handle.key.kind, target.key) == (Kind.HANDLE, ProgramKey("", "p"))
