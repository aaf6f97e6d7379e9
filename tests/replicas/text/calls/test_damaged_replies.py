"""Five thousand damaged replies, by seed: whatever is wrong with them, nothing raises, is lost or runs together."""

import json
import random
import re
from typing import Any

import pytest
from call_texts import NAMES, valid

from holdfast.replicas.requests import TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker

MARKERS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=f>", "</function>", "; ",
    "<|python_start|>", "<|python_end|>", '{"name": "f"', '"arguments": {', "[f(", "\n\n", "\\", '"', "'", "{", "}",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    1, -2.5, True, None, [], {}, "é日", 'a "quoted" \\ one', "{not [a} call]", [{"deep": ["]}"]}], "<tool_call>", "\n",
)  # fmt: skip
KINDS = 7
PER_KIND = 400


def written(kind: int, calls: list[tuple[str, dict[str, Any]]]) -> tuple[ToolFormat, str]:
    """The calls as a model writes them, in one of the ways that are read."""
    objects = [json.dumps({"name": name, "arguments": body}, ensure_ascii=False) for name, body in calls]
    bodies = [json.dumps(body) for _, body in calls]
    names = [name for name, _ in calls]
    match kind:
        case 0:
            return ToolFormat.HERMES, "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case 1:
            return ToolFormat.LLAMA3, "; ".join(objects)
        case 2:
            pairs = zip(names, bodies, strict=True)
            return ToolFormat.LLAMA3_FUNCTION, "".join(f"<function={n}>{b}</function>" for n, b in pairs)
        case 3:
            return ToolFormat.MISTRAL, f"[TOOL_CALLS][{', '.join(objects)}]"
        case 4:
            pairs = zip(names, bodies, strict=True)
            return ToolFormat.MISTRAL, "".join(f"[TOOL_CALLS]{n}[ARGS]{b}" for n, b in pairs)
        case 5:
            return ToolFormat.LLAMA3, "<|python_tag|>" + "; ".join(objects)
        case _:
            texts = [f"{n}({', '.join(f'{key}={value!r}' for key, value in body.items())})" for n, body in calls]
            return ToolFormat.PYTHONIC, f"<|python_start|>[{', '.join(texts)}]<|python_end|>"


def reply(kind: int, rng: random.Random) -> tuple[ToolFormat, str]:
    """Calls that carry their number, and prose around them in words that are numbered, too."""
    calls = []
    for number in range(rng.randint(1, 3)):
        body = {"mark": f"@{number}@", **{f"k{i}": rng.choice(VALUES) for i in range(rng.randint(0, 3))}}
        calls.append((rng.choice([*sorted(NAMES), "rm"]), body))
    format, block = written(kind, calls)
    return format, "zq0 Well, " * (kind != 1) * rng.randint(0, 1) + block + rng.choice(["", " zq1", "\nAnd zq2."])


def damaged(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        other = rng.randrange(len(text) + 1)
        a, b = sorted((at, min(other, at + 12)))
        match rng.randrange(5):
            case 0:
                text = text[:at] + rng.choice(MARKERS) + text[at:]
            case 1:
                text = text[:a] + text[b:]
            case 2:
                text = text[:b] + text[a:]
            case 3:
                c = min(len(text), b + rng.randint(0, 9))
                text = text[:a] + text[b:c] + text[a:b] + text[c:]
            case _:
                text = text[:at] + rng.choice("\"'\\{}[](),:<>=;é日\n\x00\U0001f600 ") + text[at + rng.randint(0, 1) :]
    return text


def parsed(format: ToolFormat, pieces: list[str], early_stop: bool) -> tuple[str, list[list[str]], CallTracker]:
    parser = CallTracker(format, NAMES, True, str, early_stop=early_stop)
    text, calls = "", []
    for deltas in [*map(parser.feed, pieces), parser.finish()]:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                text += delta.text
            elif isinstance(delta, ToolCallDelta) and delta.name is not None:
                calls.append([delta.name, delta.arguments])
            else:
                calls[-1][1] += delta.arguments
    return text, calls, parser


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(1, 30)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check(format: ToolFormat, raw: str, text: str, calls: list[list[str]], parser: CallTracker) -> None:
    """What came out of `raw` is all of it but the markup of calls, in its order; and a call is one value."""
    if not calls:
        assert text == raw
    rest = iter(raw)
    assert all(char in rest for char in text), "text is what was written, in its order"
    sent = text + "".join(arguments for _, arguments in calls)
    for word in set(re.findall(r"zq\d|@\d@", raw)):
        assert word in sent, f"{word} is lost"
    at = 0
    for call in parser.calls:
        assert [call.name, call.arguments] in calls
        valid(call.arguments)
        if format is not ToolFormat.PYTHONIC and call.arguments not in ("{}", "") and call.arguments in raw:
            at = raw.index(call.arguments, at) + len(call.arguments)
            assert _is_one_value(call.arguments), "two calls became one"


def _is_one_value(text: str) -> bool:
    """Whether the bracket that `text` begins with is closed by its last character and not before."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[][{}]', text, re.DOTALL):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end() == len(text)
    return False


@pytest.mark.parametrize("kind", range(KINDS))
def test_damaged_replies_lose_nothing(kind: int) -> None:
    rng = random.Random(kind)
    read = 0
    for number in range(PER_KIND):
        format, good = reply(kind, rng)
        raw = damaged(good, rng)
        text, calls, parser = parsed(format, [raw], early_stop=False)
        try:
            check(format, raw, text, calls, parser)
        except AssertionError:
            raise AssertionError(f"{number}: {raw!r} -> {text!r} {calls}") from None
        for early_stop, whole in ((False, (text, calls, parser)), (True, parsed(format, [raw], early_stop=True))):
            cut = parsed(format, pieces_of(raw, rng), early_stop)
            assert whole[:2] == cut[:2], raw
            assert whole[2].calls == cut[2].calls
        read += len(parser.calls)
    assert read > PER_KIND / 8
