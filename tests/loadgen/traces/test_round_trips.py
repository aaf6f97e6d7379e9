"""What is written is read again as it was, for everything that a format can carry."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from trace_samples import LENGTHS, LIVE, RECORDED, SPOKEN, TOOL, parcel_program, says, user

from holdfast.loadgen.program import Output, Program, Sized, Turn
from holdfast.loadgen.traces import mooncake, multi_turn
from holdfast.replicas.errors import ConfigError

FEW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def again(path: Path, programs: tuple[Program, ...], module: Any, **options: Any) -> None:
    module.write(programs, path, **options)
    reading = module.read(path)
    assert reading.programs == programs
    assert not reading.left_out


@FEW
@given(programs=RECORDED)
def test_whole_prompts(programs: tuple[Program, ...], tmp_path: Path) -> None:
    again(tmp_path / "t.jsonl", programs, mooncake)


@FEW
@given(programs=LIVE)
def test_new_messages(programs: tuple[Program, ...], tmp_path: Path) -> None:
    again(tmp_path / "t.jsonl", programs, mooncake, live=True)


@FEW
@given(programs=LENGTHS)
def test_lengths_and_blocks(programs: tuple[Program, ...], tmp_path: Path) -> None:
    again(tmp_path / "t.jsonl", programs, mooncake)


@FEW
@given(programs=SPOKEN)
def test_conversations_of_texts(programs: tuple[Program, ...], tmp_path: Path) -> None:
    again(tmp_path / "t.jsonl", programs, multi_turn)


@pytest.mark.parametrize("live", [False, True])
def test_a_program_with_tools(tmp_path: Path, live: bool) -> None:
    again(tmp_path / "t.jsonl", (parcel_program(),), mooncake, live=live)


REPLACED = Turn((user("new"),), whole=True)
UNFIT: list[tuple[Callable[..., None], dict[str, bool], tuple[Turn, ...], str]] = [
    (mooncake.write, {}, (Turn((user("a"),)), Turn((user("b"),))), "turn 0: the trace has no answer"),
    (mooncake.write, {}, (Turn(()),), "without messages"),
    (mooncake.write, {}, (Turn((user("a"),)), Turn(Sized(3))), "mix lengths and messages"),
    (mooncake.write, {}, (Turn(Sized(3), tools=(TOOL,)),), "tools without messages"),
    (mooncake.write, {"live": True}, (Turn((user("a"),)), REPLACED), "turn 1: .* whole prompt"),
    (mooncake.write, {"live": True}, (Turn((user("a"),)), Turn(())), "adds no message"),
    (mooncake.write, {"live": True}, (Turn((user("a"),), tools=(TOOL,)), Turn((user("b"),))), "no tools any more"),
    (multi_turn.write, {}, (Turn((user("a"), user("b"))),), "a turn of 2 messages"),
    (multi_turn.write, {}, (Turn(({"role": "system", "content": "a"},)),), "system prompt alone"),
    (multi_turn.write, {}, (Turn((user("a"),), at_ms=1, delay_ms=1),), "a moment and a delay"),
    (multi_turn.write, {}, (Turn((user(""),)),), "more than text"),
    (multi_turn.write, {}, (Turn(Sized(3)),), "length only"),
    (mooncake.write, {}, (Turn((user("\ud83d"),)),), "cannot write"),
]


@pytest.mark.parametrize(("write", "options", "turns", "why"), UNFIT)
def test_what_does_not_fit_is_said_and_not_written(
    tmp_path: Path, write: Callable[..., None], options: dict[str, bool], turns: tuple[Turn, ...], why: str
) -> None:
    fits = Program("fits", (Turn((user("a"),), output=Output(says("b"))),))
    with pytest.raises(ConfigError, match=why):
        write((fits, Program("p", turns)), tmp_path / "t.jsonl", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [mooncake.write, multi_turn.write])
def test_two_programs_of_one_id_are_not_made_one(tmp_path: Path, write: Callable[..., None]) -> None:
    program = Program("p", (Turn((user("a"),)),))
    with pytest.raises(ConfigError, match="two programs 'p'"):
        write((program, program), tmp_path / "t.jsonl")
