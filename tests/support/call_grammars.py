"""Grammars of calls, in every format and for any tokenizer, and what is read of a reply that follows one."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from holdfast.replicas.constraints.compiler import Compiler
from holdfast.replicas.constraints.grammar import ReplyRule, Schema, ToolRule, reply_rule
from holdfast.replicas.constraints.guidance import CallGuard, GuidedMatcher, Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.requests import ChatPrompt, TextDelta
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
GOOD = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(name: str, parameters: Any = GOOD, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def asks(**fields: Any) -> ReplyRule:
    """The rule of a request that has one."""
    rule = reply_rule(ChatPrompt([{"role": "user", "content": "hi"}], **fields))
    assert rule is not None
    return rule


def rule(**options: Any) -> ReplyRule:
    tools = tuple(ToolRule(name, Schema(schema, True, name)) for name, schema in SCHEMAS.items())
    return ReplyRule(tools, **options)


@cache
def compiler(tokenizer: Any, format: ToolFormat) -> Compiler:
    """One for all tests: grammars are compiled once."""
    markers = {token for text, token in tokenizer.get_vocab().items() if text in MARKERS[format]}
    control = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special) - markers
    return Compiler(lambda: Vocabulary(tokenizer, control, frozenset({tokenizer.eos_token_id})), format, 8)


def held(matcher: Matcher) -> GuidedMatcher:
    """What holds calls to their schemas, where they are forced or in a text."""
    calls = matcher.calls if isinstance(matcher, CallGuard) else matcher
    assert isinstance(calls, GuidedMatcher)
    return calls


def fits(matcher: Matcher, made: Compiler, text: str) -> bool:
    """Whether all of `text` may be drawn."""
    ids = made.vocabulary.encode(text)
    return matcher.accepts(ids) == len(ids)


def masks(matcher: Matcher, drafts: Sequence[int] = ()) -> np.ndarray:
    """The rows of bits for the next token, and for the one behind each draft."""
    rows = np.full((len(drafts) + 1, matcher.words), 7, np.int32)
    matcher.fill(drafts, rows)
    return rows


def allowed(matcher: Matcher) -> list[int]:
    found: list[int] = np.unpackbits(masks(matcher).view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


@cache
def closers(vocabulary: Vocabulary) -> frozenset[int]:
    return frozenset(token for token, text in enumerate(vocabulary.tokens) if set(text) & set(b"\"'}])>,<"))


def drawn(choices: list[int], vocabulary: Vocabulary, rng: random.Random, share: float) -> int:
    """One of `choices`: in this share of draws one that may close something, where there is any."""
    closing = [token for token in choices if token in closers(vocabulary)]
    return rng.choice(closing if closing and rng.random() < share else choices)


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
