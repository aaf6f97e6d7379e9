"""Replies held against transformers': differences count as wrong, and engines are right in every setting."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.loadgen.bench.gpu import parity
from holdfast.loadgen.bench.gpu.__main__ import main
from holdfast.loadgen.bench.gpu.accounting import CountingRunner
from holdfast.loadgen.bench.gpu.parity import NEAR, Counters, Expected, ParityError, ParitySizes, Reply, Setting
from holdfast.loadgen.bench.parts import Deadline
from holdfast.replicas.model import startup
from holdfast.replicas.plan import Landed, StepOutput

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes there, and is run by hand")

NOTHING = Counters(*(0 for _ in fields(Counters)))
SIZES = ParitySizes("cpu", prompts=6, turns=3, longest=120, new=12, chunk=32, abreast=3, dtypes=("float32",))
PROMPTS = parity.make_prompts(SIZES)
ALL = {each.name: each for each in parity.settings(SIZES, PROMPTS)}


@st.composite
def expectations(draw):
    """Transformers' choices by random logits."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    logits = rng.normal(size=(draw(st.integers(1, 8)), draw(st.integers(3, 9)))).astype(np.float32)
    return Expected(logits.argmax(1).astype(np.int32), logits)


def logprobs(expected: Expected) -> list[float]:
    """Of its tokens, computed in another way than there."""
    exact = torch.log_softmax(torch.from_numpy(expected.logits).double(), 1)
    return [float(row[token]) for row, token in zip(exact, expected.tokens, strict=True)]


@given(expectations(), st.data())
def test_a_reply_differs_where_its_first_other_token_stands_whatever_follows(expected, data):
    same = Reply(0, expected.tokens, tuple(logprobs(expected)))
    assert parity.difference(same, expected) is None
    assert parity.apart(same, expected) < 1e-9
    n, vocabulary = expected.logits.shape
    at = data.draw(st.integers(0, n - 1))
    ours = expected.tokens.copy()
    ours[at:] = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=n - at, max_size=n - at))
    assume(ours[at] != expected.tokens[at])
    found = parity.difference(Reply(3, ours), expected)
    assert (found.at, found.ours, found.theirs) == (at, ours[at], expected.tokens[at])
    assert found.gap == pytest.approx(expected.logits[at].max() - expected.logits[at, ours[at]])
    assert found.share == pytest.approx(found.gap / (expected.logits[at].max() - expected.logits[at].min()))
    # Log probabilities of the tokens after it are of another text.
    assert parity.apart(Reply(0, ours, (*logprobs(expected)[:at], *[-9.0] * (n - at))), expected) < 1e-9
    with pytest.raises(ParityError, match=f"{n + 1} tokens, and {n}"):
        parity.difference(Reply(0, np.append(ours, 0)), expected)


@given(expectations(), st.floats(2 * parity.ROUNDED, 1.0))
def test_log_probabilities_that_are_off_are_seen(expected, share):
    values = logprobs(expected)
    values[-1] -= share * expected.spread(len(values) - 1)
    assert parity.apart(Reply(0, expected.tokens, tuple(values)), expected) == pytest.approx(share)
    values[0] = float("nan")
    assert np.isnan(parity.apart(Reply(0, expected.tokens, tuple(values)), expected))


def tied(gap: float) -> Expected:
    """Two tokens of two thousand, which lie so far apart in the second place, in a spread of 10."""
    logits = np.array([[10.0, 0.0, 1.0], [10.0, 10.0 - gap, 0.0]], np.float32)
    return Expected(np.array([0, 0], np.int32), logits)


@pytest.mark.parametrize(
    ("gap", "faults"),
    [(3 * NEAR, []), (30 * NEAR, ["other tokens"]), (5.0, ["other tokens"]), (float("nan"), ["other tokens"])],
)
def test_only_what_transformers_cannot_tell_apart_may_be_another_token(gap, faults):
    replies = [Reply(i, np.array(tokens, np.int32)) for i, tokens in enumerate(([0, 0], [0, 1], [0, 1]))]
    figures, found = parity.compared(Setting("any"), replies, [tied(gap), tied(gap), tied(2 * NEAR)], NOTHING)
    assert found == faults
    assert (figures["asked"], figures["same"], figures["agreed"]) == (3, 1, 1)
    assert figures["gap"] == pytest.approx(gap, rel=1e-2, nan_ok=True)
    assert "prompt 1 after 1 tokens: 1 for 0" in figures["worst"]


def test_a_mechanism_that_stood_still_proves_nothing():
    replies, expected = [Reply(0, np.array([0, 0], np.int32))], [tied(1.0)]
    for counter in (each.name for each in fields(Counters)):
        figures, faults = parity.compared(Setting("any", (counter,)), replies, expected, NOTHING)
        assert faults == [f"nothing {counter}"]
        assert (figures["idle"], figures[counter]) == (counter, 0)
        worked = replace(NOTHING, **{counter: 1})
        figures, faults = parity.compared(Setting("any", (counter,)), replies, expected, worked)
        assert faults == []
        assert "idle" not in figures


def ready(dtype: str) -> parity.Parity:
    """Over the kernels for a CPU, which are faster than the interpreter; no graphs there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parity, "interpreted", lambda loaded: loaded)
        made = parity.Parity(SIZES, PROMPTS, dtype)
        made.reference()
        made.load()
    return made


@pytest.fixture(scope="module")
def exact():
    return ready("float32")


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if not each.graphs or name == "all"])
def test_each_mechanism_works_and_changes_no_reply(exact, name):
    setting = replace(ALL[name], counters=tuple(each for each in ALL[name].counters if each != "replayed"))
    ((line, figures),) = exact.ask(setting, Deadline(1000.0))
    assert line == f"float32, {name}"
    assert figures["verdict"] == "ok"
    assert figures["same"] == figures["asked"] == -(-6 // setting.every) * setting.rounds
    assert figures["agreed"] == SIZES.new
    assert all(figures[counter] > 0 for counter in setting.counters)


def test_the_baseline_does_without_every_mechanism(exact):
    watching = replace(ALL["baseline"], counters=tuple(c.name for c in fields(Counters) if c.name != "pieces"))
    lines = exact.ask(watching, Deadline(1000.0))
    _, figures = next(lines)
    assert figures["idle"].split(", ") == list(watching.counters)
    with pytest.raises(ParityError, match="nothing replayed"):
        next(lines)


def test_one_after_the_other_is_asked_as_long_as_there_is_time(exact):
    ((_, figures),) = exact.ask(ALL["one at a time"], Deadline(0.0))
    assert figures["asked"] == 1


class Wrong(CountingRunner):
    """One token of one step is another one."""

    def begin(self, plan):
        output = super().begin(plan).land()
        drawn = [each for each in output.drawn if each is not None]
        if len(drawn) < SIZES.prompts:
            return Landed(output)
        first = drawn[0]
        other = replace(first, tokens=(first.tokens[0] ^ 1, *first.tokens[1:]))
        return Landed(StepOutput(tuple(other if each is first else each for each in output.drawn)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_says_something_else_is_wrong_in_float32_and_reported_in_bfloat16(exact, monkeypatch, dtype):
    engine = exact if dtype == "float32" else ready(dtype)
    monkeypatch.setattr(parity, "CountingRunner", Wrong)
    lines = engine.ask(replace(ALL["baseline"], logprobs=False), Deadline(1000.0))
    _, figures = next(lines)
    assert figures["same"] < figures["asked"]
    assert figures["gap_of_spread"] > NEAR
    if dtype == "float32":
        assert figures["verdict"] == "WRONG"
        with pytest.raises(ParityError, match="other tokens"):
            next(lines)
    else:
        assert "verdict" not in figures
        assert next(lines, None) is None


def test_the_command_runs_it_in_graphs_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "plans_to_compare", lambda config: [])  # test_main has some
    tiny = replace(parity.small_parity(), settings=("graphs",), prompts=1, abreast=1, longest=20, new=3)
    monkeypatch.setattr(parity, "small_parity", lambda: tiny)
    file = tmp_path / "gpu.json"
    assert main(["--json", str(file), "--only", "parity"]) == 0
    found = json.loads(file.read_text())
    assert (found["failed"], found["left_out"]) == ({}, [])
    assert list(found["parts"]) == [f"float32, {part}" for part in ("transformers", "engine", "capture", "graphs")]
    figures = found["parts"]["float32, graphs"]["float32, graphs"]
    assert (figures["asked"], figures["same"], figures["verdict"]) == (1, 1, "ok")
    assert figures["replayed"] > 0


def test_the_command_fails_where_float32_is_wrong_and_goes_on(tmp_path, monkeypatch):
    wanted = replace(SIZES, settings=("baseline", "overlap"))
    monkeypatch.setattr(parity, "small_parity", lambda: wanted)
    monkeypatch.setattr(parity, "interpreted", lambda loaded: loaded)
    monkeypatch.setattr(parity, "ROUNDED", -1.0)
    file = tmp_path / "gpu.json"
    assert main(["--json", str(file), "--only", "parity"]) == 1
    found = json.loads(file.read_text())
    assert list(found["failed"]) == ["float32, baseline"]
    assert "other log probabilities" in found["failed"]["float32, baseline"]
    assert found["parts"]["float32, baseline"]["float32, baseline"]["verdict"] == "WRONG"
    assert found["parts"]["float32, overlap"]["float32, overlap"]["verdict"] == "ok"


def test_the_full_size_fits_and_has_every_mechanism():
    full = parity.full_parity()
    prompts = parity.make_prompts(full)
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) < 500
    assert 1450 < max(lengths) <= full.longest == 1500
    assert len({prompt.tobytes() for prompt in prompts}) == full.prompts
    by_name = {each.name: each for each in parity.settings(full, prompts)}
    few = by_name["preemption"].changes["cells"]
    assert max(lengths) + full.new + 32 <= few < sum(lengths) / 3
    assert sum(lengths) + full.prompts * full.new < full.host_cells
    assert set(by_name["all"].counters) == {each.name for each in fields(Counters)}
    assert {c for each in by_name.values() if each.name != "all" for c in each.counters} == set(by_name["all"].counters)
