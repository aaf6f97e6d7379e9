"""What the Open Responses specification (version 2026-04-24) requires of answers and events, as JSON schemas of ours.

Written by what the specification says; more fields than it names are allowed, as there. `response.reasoning_text.*` are
OpenAI's events: the specification calls them `response.reasoning.*`, and OpenAI's clients know the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema

Schema = Mapping[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def many(*schemas: Schema) -> Schema:
    return {"type": "array", "items": {"anyOf": list(schemas)}}


def having(**fields: Schema) -> Schema:
    """An object with these fields; those whose name ends with an underscore may be absent."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in fields.items()},
        "required": [name for name in fields if not name.endswith("_")],
    }


SCORE = {"token": TEXT, "logprob": NUMBER, "bytes": many(WHOLE)}
SCORES = many(having(**SCORE, top_logprobs=many(having(**SCORE))))
STATUS = one_of("in_progress", "completed", "incomplete")
TOLD = having(type=one_of("output_text"), text=TEXT, annotations=many(OBJECT), logprobs_=SCORES)
ASKED = having(type=one_of("input_text"), text=TEXT)
THOUGHT = having(type=one_of("reasoning_text", "summary_text", "text"), text=TEXT)
REFUSED = having(type=one_of("refusal"), refusal=TEXT)
PART: Schema = {"anyOf": [TOLD, ASKED, THOUGHT, REFUSED]}

ITEM: Schema = {
    "oneOf": [
        having(
            type=one_of("message"),
            id=TEXT,
            status=STATUS,
            role=one_of("user", "assistant", "system", "developer"),
            content=many(PART),
            phase_=one_of("commentary", "final_answer"),
        ),
        having(type=one_of("function_call"), id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS),
        having(type=one_of("function_call_output"), id=TEXT, call_id=TEXT, status=STATUS),
        having(type=one_of("reasoning"), id=TEXT, summary=many(PART), content_=many(PART), encrypted_content_=TEXT),
        having(type=one_of("compaction"), id=TEXT, encrypted_content=TEXT),
    ]
}
USAGE = having(
    input_tokens=WHOLE,
    output_tokens=WHOLE,
    total_tokens=WHOLE,
    input_tokens_details=having(cached_tokens=WHOLE),
    output_tokens_details=having(reasoning_tokens=WHOLE),
)
FUNCTION = having(
    type=one_of("function"), name=TEXT, description=maybe(TEXT), parameters=maybe(OBJECT), strict=maybe(TRUTH)
)
CHOSEN = having(type=one_of("function"), name_=TEXT)
MODE = one_of("none", "auto", "required")
FORMAT: Schema = {
    "oneOf": [
        having(type=one_of("text")),
        having(type=one_of("json_object")),
        having(type=one_of("json_schema"), name=TEXT, description=maybe(TEXT), schema={}, strict=TRUTH),
    ]
}
RESPONSE = having(
    id=TEXT,
    object=one_of("response"),
    created_at=WHOLE,
    completed_at=maybe(WHOLE),
    status=TEXT,
    incomplete_details=maybe(having(reason=TEXT)),
    model=TEXT,
    previous_response_id=maybe(TEXT),
    instructions=maybe(TEXT),
    output=many(ITEM),
    error=maybe(having(code=TEXT, message=TEXT)),
    tools=many(FUNCTION),
    tool_choice={
        "anyOf": [MODE, CHOSEN, having(type=one_of("allowed_tools"), tools=many(CHOSEN), mode=MODE)],
    },
    truncation=one_of("auto", "disabled"),
    parallel_tool_calls=TRUTH,
    text=having(format=FORMAT, verbosity_=one_of("low", "medium", "high")),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=WHOLE,
    temperature=NUMBER,
    reasoning=maybe(having(effort=maybe(TEXT), summary=maybe(TEXT))),
    usage=maybe(USAGE),
    max_output_tokens=maybe(WHOLE),
    max_tool_calls=maybe(WHOLE),
    store=TRUTH,
    background=TRUTH,
    service_tier=TEXT,
    metadata={},
    safety_identifier=maybe(TEXT),
    prompt_cache_key=maybe(TEXT),
)
COMPACTION = having(id=TEXT, object=one_of("response.compaction"), output=many(ITEM), created_at=WHOLE, usage=USAGE)

_OF_ITEM = {"item_id": TEXT, "output_index": WHOLE}
_OF_PART = {**_OF_ITEM, "content_index": WHOLE}
_FIELDS: Mapping[str, Mapping[str, Schema]] = {
    **{key: {"response": RESPONSE} for key in ("created", "in_progress", "completed", "failed", "incomplete")},
    **{key: {"output_index": WHOLE, "item": maybe(ITEM)} for key in ("output_item.added", "output_item.done")},
    **{key: {**_OF_PART, "part": PART} for key in ("content_part.added", "content_part.done")},
    "output_text.delta": {**_OF_PART, "delta": TEXT, "logprobs_": SCORES},
    "output_text.done": {**_OF_PART, "text": TEXT, "logprobs_": SCORES},
    "reasoning_text.delta": {**_OF_PART, "delta": TEXT},
    "reasoning_text.done": {**_OF_PART, "text": TEXT},
    "function_call_arguments.delta": {**_OF_ITEM, "delta": TEXT},
    "function_call_arguments.done": {**_OF_ITEM, "arguments": TEXT},
}
EVENTS: Mapping[str, Schema] = {
    f"response.{kind}": having(type=one_of(f"response.{kind}"), sequence_number=WHOLE, **fields)
    for kind, fields in _FIELDS.items()
}


def check(schema: Schema, value: object) -> None:
    """Raises jsonschema.ValidationError."""
    jsonschema.Draft202012Validator(schema).validate(value)


def check_event(event: Mapping[str, Any]) -> None:
    """Raises KeyError for an event that there is not, or jsonschema.ValidationError."""
    check(EVENTS[event["type"]], event)
