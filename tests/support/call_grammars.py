"""Grammars of calls, in every format and for any tokenizer, and what is read of a reply that follows one."""

from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.grammar import ReplyRule, Schema, ToolRule
from holdfast.replicas.constraints.guidance import Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.requests import TextDelta
from holdfast.replicas.text.calls.formats import MARKERS, ToolFormat
from holdfast.replicas.text.calls.tracker import CallTracker
from holdfast.replicas.text.reasoning import CHANNELS, ChannelReader

FORMATS = [format for format in ToolFormat if format is not ToolFormat.NONE]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "unit": {"enum": ["°C", "°F", '"', "<tool_call>"]},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "from": {"type": "number"},
        "class": {"type": "string", "maxLength": 2},
        "ﬁle": {"const": None},
    },
    "$defs": {"day": {"type": "integer", "minimum": -20, "maximum": 31}},
    "required": ["unit", "city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get-time": NOTHING, "f": {**WEATHER, "required": ["days"]}}


def rule(**options: Any) -> ReplyRule:
    tools = tuple(ToolRule(name, Schema(schema, True, name)) for name, schema in SCHEMAS.items())
    return ReplyRule(tools, **options)


def compiler(tokenizer: Any, format: ToolFormat) -> Compiler:
    markers = {token for text, token in tokenizer.get_vocab().items() if text in MARKERS[format]}
    control = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special) - markers
    return Compiler(lambda: Vocabulary(tokenizer, control, frozenset({tokenizer.eos_token_id})), format, 8)


def vocabulary(made: Compiler) -> Vocabulary:
    return made.vocabulary


def allowed(matcher: Matcher) -> list[int]:
    bits = np.empty((1, matcher.words), np.int32)
    matcher.fill((), bits)
    found: list[int] = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def read(format: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = CallTracker(format, frozenset(SCHEMAS), True, str, schemas=SCHEMAS)
    if format in CHANNELS:
        channels = ChannelReader(CHANNELS[format])
        text = channels.feed(text)[1] + channels.flush()[1]
    deltas = [*parser.feed(text), *parser.finish()]
    prose = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return prose, [(call.name, call.arguments) for call in parser.calls]


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(SCHEMAS[name])
