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

from holdfast.loadgen.program import Json, Output, Program, Sized, Turn, prompts
from holdfast.loadgen.traces import mooncake
from holdfast.loadgen.traces.mooncake import KEY

FIELDS = json.loads((Path(__file__).parent / "aiperf_fields.json").read_text(encoding="utf-8"))["MooncakeTrace"]
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


def test_lines_keep_to_the_fields_of_mooncake_trace(tmp_path: Path) -> None:
    mooncake.write((parcel_program(), TALK, SIZES), tmp_path / "t.jsonl")
    for row in rows(tmp_path / "t.jsonl"):
        for name in row.keys() - {KEY, *NEWER}:
            assert TYPES[type(row[name])] in FIELDS[name], name
        assert len({"input_length", "text_input", "messages", "payload"} & set(row)) == 1
        assert "hash_ids" not in row or "input_length" in row
        assert "tools" not in row or (row["tools"] and "messages" in row)
        assert "messages" not in row or (row["messages"] and all("role" in message for message in row["messages"]))
        assert row.get("output_length") != 0
        assert not {"messages", "input"} & set(row.get("extra", {}))


@needs_aiperf
def test_the_fields_are_those_of_the_installed_one() -> None:
    from aiperf.dataset.loader import models

    found = models.MooncakeTrace.model_json_schema()["properties"]
    kinds = {field: {kind["type"] for kind in about.get("anyOf", [about])} for field, about in found.items()}
    assert {field: kinds[field] for field in FIELDS} == {field: set(kinds) for field, kinds in FIELDS.items()}


@needs_aiperf
def test_its_mooncake_loader_sends_the_recorded_prompts(tmp_path: Path) -> None:
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    mooncake.write((parcel_program(), TALK), tmp_path / "t.jsonl")
    loader: Any = MooncakeTraceDatasetLoader(filename=str(tmp_path / "t.jsonl"), prompt_generator=Mock())
    assert all(loader.can_load(row) for row in rows(tmp_path / "t.jsonl"))
    sent_by_it = loader.convert_to_conversations(loader.load_dataset())
    for program, found in zip((parcel_program(), TALK), sent_by_it, strict=True):
        assert found.session_id == program.id
        assert str(found.context_mode) == "message_array_with_responses"
        for turn, whole, sent in zip(program.turns, prompts(program), found.turns, strict=True):
            assert (tuple(sent.raw_messages), tuple(sent.raw_tools or ())) == (whole, turn.tools)
            assert (sent.timestamp, sent.delay, sent.max_tokens) == (turn.at_ms, turn.delay_ms, turn.output.tokens)
            assert (sent.extra_body or {}) == turn.sampling


@needs_aiperf
def test_its_mooncake_loader_takes_lengths(tmp_path: Path) -> None:
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    mooncake.write((SIZES,), tmp_path / "t.jsonl")
    loader: Any = MooncakeTraceDatasetLoader(filename=str(tmp_path / "t.jsonl"), prompt_generator=Mock())
    (sized,) = loader.load_dataset()["sizes"]
    assert (sized.input_length, sized.hash_ids, sized.output_length) == (700, [0, 7], 52)
