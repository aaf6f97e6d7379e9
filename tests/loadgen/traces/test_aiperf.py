"""Exported files are what aiperf loads: its own loaders say so where it is installed, and everywhere its fields do.

`aiperf_fields.json` has the fields and types of its models; the rules between fields are those of their validators.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from trace_samples import parcel_program, says, user

from holdfast.loadgen.program import Json, Messages, Output, Program, Sized, Turn, prompts
from holdfast.loadgen.traces import mooncake, multi_turn
from holdfast.loadgen.traces.carried import KEY

FIELDS = json.loads((Path(__file__).parent / "aiperf_fields.json").read_text(encoding="utf-8"))
NEWER = {"assistant_responses"}  # a field of later releases; 0.13 passes it over, as it does ours
TYPES = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}

TALK = Program(
    "talk",
    (
        Turn(({"role": "system", "content": "Be brief."}, user("One?")), at_ms=0, output=Output(says("1"), tokens=2)),
        Turn((user("Two?"),), sampling={"top_p": 0.5}, delay_ms=250.5, output=Output(says("2"), tokens=3)),
    ),
)
SIZES = Program("sizes", (Turn(Sized(700, (0, 7)), at_ms=27482, output=Output(tokens=52)),))

needs_aiperf = pytest.mark.skipif(importlib.util.find_spec("aiperf") is None, reason="aiperf is not installed")


def rows(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def check(row: Json, model: str) -> None:
    for name, value in row.items():
        if name not in {KEY, *NEWER}:
            assert TYPES[type(value)] in FIELDS[model][name], name


@pytest.mark.parametrize("live", [False, True])
def test_lines_keep_to_the_fields_of_mooncake_trace(tmp_path: Path, live: bool) -> None:
    mooncake.write((parcel_program(), TALK, SIZES), tmp_path / "t.jsonl", live)
    for row in rows(tmp_path / "t.jsonl"):
        check(row, "MooncakeTrace")
        assert len({"input_length", "text_input", "messages", "payload"} & set(row)) == 1
        assert "hash_ids" not in row or "input_length" in row
        assert "tools" not in row or (row["tools"] and "messages" in row)
        assert "messages" not in row or (row["messages"] and all("role" in message for message in row["messages"]))
        assert row.get("output_length") != 0
        assert not {"messages", "input"} & set(row.get("extra", {}))


def test_lines_keep_to_the_fields_of_multi_turn(tmp_path: Path) -> None:
    multi_turn.write((TALK,), tmp_path / "t.jsonl")
    (row,) = rows(tmp_path / "t.jsonl")
    check(row, "MultiTurn")
    assert row["turns"][0] == {"role": "system", "text": "Be brief."}
    for turn in row["turns"]:
        check(turn, "SingleTurn")
        assert bool(turn.get("text")) != bool(turn.get("texts"))
        assert not (turn.get("timestamp") and turn.get("delay"))
        assert turn.get("output_length") != 0


@needs_aiperf
def test_the_fields_are_those_of_the_installed_one() -> None:
    from aiperf.dataset.loader import models

    for name in ("MooncakeTrace", "MultiTurn", "SingleTurn"):
        found = getattr(models, name).model_json_schema()["properties"]
        kinds = {field: {kind["type"] for kind in about.get("anyOf", [about])} for field, about in found.items()}
        assert {field: kinds[field] for field in FIELDS[name]} == {f: set(kinds) for f, kinds in FIELDS[name].items()}


@needs_aiperf
def test_its_mooncake_loader_sends_the_recorded_prompts(tmp_path: Path) -> None:
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    mooncake.write((parcel_program(), TALK), tmp_path / "t.jsonl")
    loader: Any = MooncakeTraceDatasetLoader(filename=str(tmp_path / "t.jsonl"), prompt_generator=Mock())
    assert all(loader.can_load(row) for row in rows(tmp_path / "t.jsonl"))
    for program, found in zip((parcel_program(), TALK), conversations(loader), strict=True):
        assert found.session_id == program.id
        assert str(found.context_mode) == "message_array_with_responses"
        for turn, whole, sent in zip(program.turns, prompts(program), found.turns, strict=True):
            assert (tuple(sent.raw_messages), tuple(sent.raw_tools or ())) == (whole, turn.tools)
            assert (sent.timestamp, sent.delay, sent.max_tokens) == (turn.at_ms, turn.delay_ms, turn.output.tokens)
            assert (sent.extra_body or {}) == turn.sampling


@needs_aiperf
def test_its_mooncake_loader_takes_lengths_and_live_turns(tmp_path: Path) -> None:
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    mooncake.write((parcel_program(), SIZES), tmp_path / "t.jsonl", live=True)
    loader: Any = MooncakeTraceDatasetLoader(filename=str(tmp_path / "t.jsonl"), prompt_generator=Mock())
    found = loader.load_dataset()
    assert [len(found[name]) for name in ("parcel", "sizes")] == [3, 1]
    (sized,) = found["sizes"]
    assert (sized.input_length, sized.hash_ids, sized.output_length) == (700, [0, 7], 52)


@needs_aiperf
def test_its_multi_turn_loader_sends_the_same_conversation(tmp_path: Path) -> None:
    from aiperf.dataset.loader.multi_turn import MultiTurnDatasetLoader

    multi_turn.write((TALK,), tmp_path / "t.jsonl")
    loader: Any = MultiTurnDatasetLoader(filename=str(tmp_path / "t.jsonl"))
    (found,) = conversations(loader)
    assert (found.session_id, found.system_message) == ("talk", "Be brief.")
    sent: list[Messages] = [
        tuple({"role": turn.role or "user", "content": text} for text in turn.texts[0].contents) for turn in found.turns
    ]
    assert sent == [(user("One?"),), (user("Two?"),)]
    assert [turn.delay for turn in found.turns] == [None, 250.5]
    assert [turn.max_tokens for turn in found.turns] == [2, 3]
    assert found.turns[1].extra_body == {"top_p": 0.5}


def conversations(loader: Any) -> Any:
    return loader.convert_to_conversations(loader.load_dataset())
