"""The teacher-forced replay of traces: tiny ones made by hand, and the airline agent's where it is at hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.loadgen.bench import drafts
from holdfast.replicas.config import DraftConfig
from holdfast.replicas.errors import ConfigError

AIRLINE = Path(__file__).parents[4] / "shared" / "traces"

PARAMETERS = {"type": "object", "properties": {"origin": {"type": "string"}, "seats": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "find_flight", "parameters": PARAMETERS}}]


def conversation(origin: str, seats: int) -> dict[str, Any]:
    function = {"name": "find_flight", "arguments": json.dumps({"origin": origin, "seats": seats})}
    return {
        "messages": [
            {"role": "system", "content": "You book flights."},
            {"role": "user", "content": [{"type": "text", "text": f"{seats} seats from {origin}, please."}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": '{"flight": "HAT001"}'},
            {"role": "assistant", "content": "I found flight HAT001 for you. Shall I book it?"},
        ]
    }


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace, tools = tmp_path / "trace.jsonl", tmp_path / "tools.json"
    lines = [json.dumps(conversation(origin, seats)) for origin, seats in (("Oslo", 2), ("Rome", 4), ("Lima", 3))]
    trace.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    tools.write_text(json.dumps(TOOLS), encoding="utf-8")
    return trace, tools


def test_each_source_adds_tokens_a_forward(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts.main(*files, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["conversations"], report["turns"], report["tool_call_turns"]) == (3, 6, 3)
    runs = {run["drafters"]: run for run in report["runs"]}
    assert runs["off"]["tokens_per_forward"] == 1.0
    assert runs["off"]["drafted"] == 0
    assert runs["off"]["forwards"] == report["tokens"]
    yields = [runs[name]["tokens_per_forward"] for name in ("off", "lookup", "lookup+memory")]
    assert yields == sorted(set(yields))
    assert all(0 <= run["acceptance"] <= 1 and run["memory_bytes"] >= 0 for run in runs.values())


def test_a_saved_tokenizer_gives_the_same_as_the_trained_one(files: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    drafts.train_tokenizer(drafts.read_trace(files[0], TOOLS), "qwen").save(str(tmp_path / "tokenizer.json"))
    drafts.main(*files, cut="qwen")
    trained = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    drafts.main(*files, tokenizer=tmp_path)
    loaded = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert trained[2] == ["off", "1.00", "1.00", "0.00"]
    assert loaded[1:] == trained[1:]


def test_turns_end_where_the_assistant_stops(files: tuple[Path, Path]) -> None:
    conversations = drafts.read_trace(files[0], TOOLS)
    tokenizer = drafts.train_tokenizer(conversations, "gpt2")
    tokens = drafts.encoded(conversations[0], tokenizer)
    turns = [tokens.ids[turn.start : turn.end].tolist() for turn in tokens.turns]
    assert [tokenizer.decode(turn, skip_special_tokens=False) for turn in turns] == [
        '<tool_call>\n{"name": "find_flight", "arguments": {"origin": "Oslo", "seats": 2}}\n</tool_call><|im_end|>',
        "I found flight HAT001 for you. Shall I book it?<|im_end|>",
    ]
    assert [turn.calls for turn in tokens.turns] == [True, False]


def test_a_line_separator_inside_of_a_text_ends_no_line(files: tuple[Path, Path]) -> None:
    entry = {"messages": [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]}
    files[0].write_text(json.dumps(entry, ensure_ascii=False), encoding="utf-8")
    assert [one.messages[0]["content"] for one in drafts.read_trace(files[0], TOOLS)] == ["a\u2028b"]


def test_an_option_that_is_missing_or_not_what_it_should_be_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    given: dict[str, Any] = {"trace": files[0], "tools": files[1]}
    wrong: list[tuple[str, Any]] = [(field, tmp_path / "nowhere") for field in ("trace", "tools", "tokenizer")]
    texts = [("trace", text) for text in ("", "{", '{"messages": [{}]}', "[]")] + [("tools", "{}"), ("tools", "x")]
    for number, (field, text) in enumerate(texts):
        (tmp_path / f"{number}").write_text(text, encoding="utf-8")
        wrong.append((field, tmp_path / f"{number}"))
    for field, value in [*wrong, ("cut", "scissors")]:
        with pytest.raises(ConfigError) as caught:
            drafts.main(**given | {field: value})
        assert caught.value.field == field


@pytest.mark.skipif(not AIRLINE.exists(), reason="the trace is not part of the repository")
def test_the_airline_agent_needs_a_third_of_the_forwards() -> None:
    tools = drafts.read_tools(AIRLINE / "airline_tools.json")
    conversations = drafts.read_trace(AIRLINE / "airline_agent.jsonl", tools)[:12]
    tokenizer = drafts.train_tokenizer(conversations, "pocket")
    tokens = [drafts.encoded(conversation, tokenizer) for conversation in conversations]
    report = drafts.replay(tokens, DraftConfig())
    assert report["tokens_per_forward"] >= 2.8
    assert report["tokens_per_forward_tool_calls"] >= 3.9  # here no grammar forces tokens; in a served call it does
