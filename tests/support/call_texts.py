"""Replies with tool calls in them: written as models write them, cut into pieces, and read back."""

import json
from typing import Any

from hypothesis import strategies as st

from holdfast.replicas.requests import TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.formats import ToolFormat
from holdfast.replicas.text.calls.readers import ToolCallParser

NAMES = frozenset({"get_weather", "search", "f"})
FORMATS = [format for format in ToolFormat if format is not ToolFormat.NONE]
JSON_FORMATS = [format for format in FORMATS if format is not ToolFormat.PYTHONIC]

STRINGS = st.text(st.sampled_from("ab \"\\{}[]()<>/'\n,é日"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9).map(lambda x: round(x, 3)) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x"]), JSON, max_size=3)
CALLS = st.tuples(st.sampled_from([*sorted(NAMES), "rm"]), ARGUMENTS)

Call = tuple[str, dict[str, Any]]


def parser(format: ToolFormat, **options: Any) -> ToolCallParser:
    settings = {"declared_names": NAMES, "parallel": True, "call_id": lambda index: f"call_{index}", **options}
    return ToolCallParser(format, **settings)


def collected(chunks: list[str], reader: ToolCallParser) -> tuple[str, list[list[str]]]:
    """The text, and name and arguments of every call that was sent; checks the order of the deltas, and that a call is
    told to be closed with the text that closes it, once.
    """
    text, calls = "", []
    closed: dict[str, str] = {}  # arguments by the id of the call
    for deltas in (reader.feed(chunk) if chunk is not None else reader.finish() for chunk in [*chunks, None]):
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                text += delta.text
            elif delta.name is not None:
                assert delta.index == len(calls)
                assert delta.call_id == f"call_{delta.index}"
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                assert delta.call_id is None
                calls[-1][1] += delta.arguments
            if isinstance(delta, ToolCallDelta):
                call_id = f"call_{delta.index}"
                assert call_id not in closed
                if delta.closed:
                    closed[call_id] = calls[-1][1]
        assert closed == {call.call_id: call.arguments for call in reader.calls}
    return text, calls


def read(format: ToolFormat, text: str, **options: Any) -> tuple[str, list[list[str]]]:
    return collected([text], parser(format, **options))


def valid(arguments: str) -> Any:
    """`arguments` as strict JSON: an object, with no constants that only Python knows."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(arguments, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def call_texts(format: ToolFormat, calls: list[Call], style: Any = json.dumps, variant: int = 0) -> list[str]:
    """The calls as a model of that format writes them, one text each: together they are the reply.

    Separators stand before a call, what ends all of them behind the last. `style` writes the arguments.
    """
    key = "parameters" if format is ToolFormat.LLAMA3 else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {style(arguments)}}}' for name, arguments in calls]
    match format:
        case ToolFormat.HERMES:
            return [f"<tool_call>\n{one}\n</tool_call>" for one in objects]
        case ToolFormat.LLAMA3:
            return joined("<|python_tag|>" * (variant % 2), "; ", "", objects)
        case ToolFormat.LLAMA3_FUNCTION:
            return [f"<function={name}>{style(arguments)}</function>" for name, arguments in calls]
        case ToolFormat.MISTRAL if variant % 2:
            return [f"[TOOL_CALLS]{name}[ARGS]{style(arguments)}" for name, arguments in calls]
        case ToolFormat.MISTRAL:
            return joined("[TOOL_CALLS][", ", ", "]", objects)
        case _:
            texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
            opener, closer = ("<|python_start|>[", "]<|python_end|>") if variant % 2 else ("[", "]")
            return joined(opener, ", ", closer, texts)


def joined(opener: str, between: str, closer: str, texts: list[str]) -> list[str]:
    last = len(texts) - 1
    return [(between if i else opener) + text + (closer if i == last else "") for i, text in enumerate(texts)]


def chunked(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def mutated(text: str, data: st.DataObject) -> str:
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 4))
        text = text[:at] + data.draw(st.text(st.sampled_from('"\\{}[](),:<>= a1\nT'), max_size=3)) + text[at + gone :]
    return text
