"""What is written is read again as it was, for everything that a format can carry."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from trace_samples import LENGTHS, RECORDED, TOOL, parcel_program, says, user

from holdfast.loadgen.program import Output, Program, Sized, Turn
from holdfast.loadgen.traces import mooncake
from holdfast.replicas.errors import ConfigError

FEW = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@FEW
@given(programs=RECORDED | LENGTHS)
def test_a_trace_is_read_as_it_was_written(programs: tuple[Program, ...], tmp_path: Path) -> None:
    for written in (programs, (parcel_program(),)):
        mooncake.write(written, tmp_path / "t.jsonl")
        reading = mooncake.read(tmp_path / "t.jsonl")
        assert reading.programs == written
        assert not reading.left_out


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ((Turn((user("a"),)), Turn((user("b"),))), "turn 0: the trace has no answer"),
        ((Turn(()),), "without messages"),
        ((Turn((user("a"),)), Turn(Sized(3))), "mix lengths and messages"),
        ((Turn(Sized(3), tools=(TOOL,)),), "tools without messages"),
        ((Turn((user("\ud83d"),)),), "cannot write"),
    ],
)
def test_a_program_that_does_not_fit_is_named_and_nothing_written(tmp_path, turns: tuple[Turn, ...], why: str) -> None:
    fits = Program("fits", (Turn((user("a"),), output=Output(says("b"))),))
    with pytest.raises(ConfigError, match=why):
        mooncake.write((fits, Program("p", turns)), tmp_path / "t.jsonl")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="two programs 'fits'"):
        mooncake.write((fits, fits), tmp_path / "t.jsonl")
