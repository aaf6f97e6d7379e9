"""Replies with tool calls in them: written as models write them, cut into pieces, and read back."""

import json
import re
from typing import Any

from hypothesis import strategies as st

from holdfast.replicas.requests import TextDelta, ToolCallDelta
from holdfast.replicas.text.calls.formats import TAGS, ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker, as_json
from holdfast.replicas.text.calls.values import ANYTHING

NAMES = frozenset({"get_weather", "search", "f"})
FORMATS = [format for format in ToolFormat if format is not ToolFormat.NONE]
JSON_FORMATS = [each for each in FORMATS if each not in TAGS and each not in ("pythonic", "gemma4")]

STRINGS = st.text(st.sampled_from("ab \"\\{}[]()<>/'\n,é日"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9).map(lambda x: round(x, 3)) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "x"]), JSON, max_size=3)
CALLS = st.tuples(st.sampled_from([*sorted(NAMES), "rm"]), ARGUMENTS)

Call = tuple[str, dict[str, Any]]


def parser(format: ToolFormat, **options: Any) -> CallTracker:
    settings = {"declared_names": NAMES, "parallel": True, "call_id": lambda index: f"call_{index}", **options}
    return CallTracker(format, **settings)


def collected(chunks: list[str], reader: CallTracker, *, cut: bool = False) -> tuple[str, list[list[str]]]:
    """The text, and name and arguments of every call that was sent, of a reply that is `cut` behind the last chunk;
    checks the order of the deltas, and that a call is told to be closed with the text that closes it, once.
    """
    text, calls = "", []
    ids: list[str] = []
    closed: dict[str, str] = {}  # arguments by the id of the call
    for deltas in (reader.feed(chunk) if chunk is not None else reader.finish(cut=cut) for chunk in [*chunks, None]):
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                text += delta.text
            elif delta.name is not None:
                assert delta.index == len(calls)
                assert delta.call_id
                assert delta.call_id not in ids
                ids.append(delta.call_id)
                calls.append([delta.name, delta.arguments])
            else:
                assert delta.index == len(calls) - 1
                assert delta.call_id is None
                calls[-1][1] += delta.arguments
            if isinstance(delta, ToolCallDelta):
                assert ids[delta.index] not in closed
                if delta.closed:
                    closed[ids[delta.index]] = calls[-1][1]
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


def call_texts(
    format: ToolFormat, calls: list[Call], style: Any = json.dumps, variant: int = 0, whole: Any = None
) -> list[str]:
    """The calls as a model of that format writes them, one text each: together they are the reply.

    Separators stand before a call, what ends all of them behind the last. `style` writes the arguments, and `whole`,
    where it is given, calls that are objects.
    """
    key = "parameters" if format in (ToolFormat.LLAMA3, ToolFormat.LLAMA4) else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {style(arguments)}}}' for name, arguments in calls]
    if whole is not None:
        objects = [whole({"name": name, key: arguments}) for name, arguments in calls]
    match format:
        case ToolFormat.HERMES:
            return [f"<tool_call>\n{one}\n</tool_call>" for one in objects]
        case ToolFormat.LLAMA3:
            return joined("<|python_tag|>" * (variant % 2), "; ", "", objects)
        case ToolFormat.LLAMA3_FUNCTION:
            return [f"<function={name}>{style(arguments)}</function>" for name, arguments in calls]
        case ToolFormat.LLAMA4:
            return joined("<|python_start|>" * (variant % 2), "", "<|python_end|>" * (variant % 2), objects)
        case ToolFormat.DEEPSEEK_V31 | ToolFormat.DEEPSEEK_V3:
            v3 = format is ToolFormat.DEEPSEEK_V3
            texts = [
                f"function<｜tool▁sep｜>{name}\n```json\n{style(arguments)}\n```"
                if v3
                else f"{name}<｜tool▁sep｜>{style(arguments)}"
                for name, arguments in calls
            ]
            texts = [f"<｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜>" for text in texts]
            return joined("<｜tool▁calls▁begin｜>", "\n" * v3, "<｜tool▁calls▁end｜>", texts)
        case ToolFormat.KIMI_K2:
            texts = [
                f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{style(arguments)}<|tool_call_end|>"
                for i, (name, arguments) in enumerate(calls)
            ]
            return joined("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", texts)
        case ToolFormat.HARMONY:
            return harmony_texts(calls, style, variant)
        case ToolFormat.MINIMAX:
            return joined("<tool_calls>\n", "\n", "\n</tool_calls>", objects)
        case ToolFormat.GEMMA4:
            return [f"<|tool_call>call:{name}{gemma(arguments, variant)}<tool_call|>" for name, arguments in calls]
        case _ if format in TAGS:
            return tagged_texts(format, calls, variant)
        case ToolFormat.MISTRAL if variant % 2:
            return [f"[TOOL_CALLS]{name}[ARGS]{style(arguments)}" for name, arguments in calls]
        case ToolFormat.MISTRAL:
            return joined("[TOOL_CALLS][", ", ", "]", objects)
        case _:
            texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
            opener, closer = ("<|python_start|>[", "]<|python_end|>") if variant % 2 else ("[", "]")
            return joined(opener, ", ", closer, texts)


def gemma(value: Any, variant: int = 0) -> str:
    """A value as Gemma 4 writes it. With a `variant`, in white space that others might put there."""
    comma, colon = (" ,\n", ": ") if variant % 2 else (",", ":")
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            keys = (key if re.fullmatch(r"[\w.-]+( [\w.-]+)*", key) else gemma(key) for key in value)
            members = (f"{key}{colon}{gemma(each, variant)}" for key, each in zip(keys, value.values(), strict=True))
            return f"{{{comma.join(members)}}}"
        case list():
            return f"[{comma.join(gemma(each, variant) for each in value)}]"
        case _:
            return json.dumps(value)


def harmony_texts(calls: list[Call], style: Any, variant: int) -> list[str]:
    """As `call_texts`: a message a call, whose last end is most often no text."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        if variant % 2:
            header = f" to=functions.{name}<|channel|>commentary json<|message|>"
        start = "<|start|>assistant" if index or variant % 2 else ""
        ends = index + 1 < len(calls) or variant % 2
        texts.append(f"{start}{header}{style(arguments)}{'<|call|>' if ends else ''}")
    return texts


def as_read(format: ToolFormat, arguments: dict[str, Any]) -> dict[str, Any]:
    """What is read of arguments that no schema tells about: in tags a text may be taken for JSON."""
    if format not in TAGS or TAGS[format].json:
        return arguments
    return {key: json.loads(as_json(in_tag(value), ANYTHING)) for key, value in arguments.items()}


def in_tag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def tagged_texts(format: ToolFormat, calls: list[Call], variant: int) -> list[str]:
    """As `call_texts`, with arguments in tags."""
    texts = []
    for name, arguments in calls:
        if format is ToolFormat.GLM:
            line = "\n" * (variant % 2)
            tags = [
                f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{in_tag(value)}</arg_value>"
                for key, value in arguments.items()
            ]
            texts.append(f"<tool_call>{name}{''.join(tags)}{line}</tool_call>")
        elif format is ToolFormat.QWEN3_CODER:
            tags = [f"<parameter={key}>\n{in_tag(value)}\n</parameter>\n" for key, value in arguments.items()]
            call = f"<function={name}>\n{''.join(tags)}</function>"
            texts.append(call if variant % 2 else f"<tool_call>\n{call}\n</tool_call>")
        elif format is ToolFormat.DEEPSEEK_V32:
            tags = [
                f'<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">{in_tag(value)}'
                "</｜DSML｜parameter>\n"
                for key, value in arguments.items()
            ]
            texts.append(f'<｜DSML｜invoke name="{name}">\n{"".join(tags)}</｜DSML｜invoke>')
        else:
            of = "atem:" * (format is ToolFormat.MUSE)
            tags = [
                f'<{of}parameter name="{key}">{in_tag(value)}</{of}parameter>\n' for key, value in arguments.items()
            ]
            texts.append(f'<{of}invoke name="{name}">\n{"".join(tags)}</{of}invoke>')
    if format is ToolFormat.DEEPSEEK_V32:
        return joined("<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>", texts)
    if format is ToolFormat.MUSE:
        return joined("<atem:function_calls>\n", "\n", "\n</atem:function_calls>", texts)
    if format is ToolFormat.MINIMAX_M2:
        return joined("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>", texts)
    return texts


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
