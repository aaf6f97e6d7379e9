"""`/openapi.json`: every operation with its headers, body, answers, events and errors; and as a page, `/docs`.

Bodies come from the pydantic models that validate requests, answers and events from `shapes`, errors from their table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib import metadata
from typing import Any, TypeAlias

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import TaggedUnionSchema

from holdfast.replicas.requests import ModelCard
from holdfast.router.endpoints.headers import answer_headers, header_components, header_parameters, request_headers
from holdfast.router.protocol import shapes
from holdfast.router.protocol.admin import MOST_ROWS, ChangeBody, KeyBody, TenantBody
from holdfast.router.protocol.anthropic import CountBody, MessagesBody
from holdfast.router.protocol.body import IGNORED, NEUTRAL, Body
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.completions import CompletionBody, DetokenizeBody, TokenizeBody
from holdfast.router.protocol.errors import TABLE
from holdfast.router.protocol.prefills import ExtendBody, PrefillBody
from holdfast.router.protocol.programs import HeartbeatBody
from holdfast.router.protocol.responses import ResponsesBody
from holdfast.router.protocol.sessions import AppendBody, ForkBody, OpenBody, QueryBody, QuestionBody

EVENTS = "text/event-stream"
JSON = "application/json"
TEXT = "text/plain"
LINES = "application/jsonl"
CSV = "text/csv"  # the other form of `LINES`
REF = "#/components/schemas/{model}"
REFERENCE = re.compile(r"#/components/(\w+)/([\w-]+)")
ServedModel: TypeAlias = tuple[str, int]  # a model's name, and the size of its vocabulary
Query: TypeAlias = Mapping[str, Mapping[str, Any]]

EVERY = (401, 403, 429, 500, 503)  # errors that every operation may answer with
BODY = (400, 404, 408, 413)  # errors of an operation with a body
GENERATION = (*BODY, 409, 410, 422, 504)
LOST = (404, 410)


@dataclass(frozen=True, slots=True)
class Operation:
    """One path and method. `events`: the events of a streamed answer. `errors`: the statuses besides `EVERY`."""

    summary: str
    answer: Any
    body: type[Body] | None = None
    errors: Sequence[int] = ()
    query: Query | None = None
    events: Any = None
    generates: bool = False
    optional_body: bool = False
    media: str = JSON


def _generation(summary: str, body: type[Body], answer: Any, events: Any = None) -> Operation:
    return Operation(summary, answer, body, GENERATION, events=events, generates=True)


def _number(least: int, most: int) -> Mapping[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


TENANT: Query = {"tenant": {"type": "string"}}
DAYS: Query = {"days": _number(1, 400)}
RECORDS: Query = {
    "from": {"type": "string", "format": "date"},
    "to": {"type": "string", "format": "date"},
    "after": {"type": "string", "pattern": "^[0-9]{1,13}-[0-9]{1,6}$"},
    "limit": _number(1, MOST_ROWS),
    "format": {"enum": ["jsonl", "csv"]},
}
ITEMS: Query = {"order": {"enum": ["asc", "desc"]}, "limit": _number(1, 100), "after": {"type": "string"}}
SESSION = "/v1/sessions/{session_id}"
RESPONSE = "/v1/responses/{response_id}"
ADMIN = "/v1/admin/tenants/{name}"

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _generation(
        "A chat completion", ChatBody, shapes.ChatCompletion, shapes.ChatEvent
    ),
    ("POST", "/v1/completions"): _generation(
        "A completion of text or token ids", CompletionBody, shapes.Completion, shapes.CompletionEvent
    ),
    ("POST", "/v1/messages"): _generation("A message", MessagesBody, shapes.MessageReply, shapes.MessageEvent),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of a message's prompt", shapes.InputTokens, CountBody, BODY
    ),
    ("POST", "/v1/responses"): _generation("A response", ResponsesBody, shapes.ResponseReply, shapes.ResponseEvent),
    ("POST", "/v1/responses/compact"): _generation("Compact a conversation", ResponsesBody, shapes.CompactionReply),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Count the tokens of a response's prompt", shapes.CountedInput, ResponsesBody, BODY
    ),
    ("GET", RESPONSE): Operation(
        "A stored response", shapes.ResponseReply, None, (400, 404), {"stream": {"enum": ["false", "0"]}}
    ),
    ("DELETE", RESPONSE): Operation("Delete a stored response", shapes.Deleted, None, (404,)),
    ("POST", f"{RESPONSE}/cancel"): Operation("Always refused", shapes.ResponseReply, None, (400, 404)),
    ("GET", f"{RESPONSE}/input_items"): Operation(
        "The items of a response's own request", shapes.ItemPage, None, (400, 404), ITEMS
    ),
    ("POST", "/v1/prefills"): Operation(
        "Compute the beginning of a prompt", shapes.PrefillReply, PrefillBody, (*BODY, 409, 410, 504)
    ),
    ("GET", "/v1/prefills/{prefill_id}"): Operation("A prefill", shapes.PrefillReply, None, (404,)),
    ("DELETE", "/v1/prefills/{prefill_id}"): Operation("Release a prefill", shapes.Deleted, None, (404,)),
    ("POST", "/v1/prefills/{prefill_id}/extend"): Operation(
        "Compute more messages of a prefill", shapes.PrefillReply, ExtendBody, (*BODY, 409, 410, 504)
    ),
    ("POST", "/v1/sessions"): _generation("Open a session", OpenBody, shapes.SessionOpened),
    ("GET", "/v1/sessions"): Operation(
        "The caller's sessions", shapes.SessionList, None, (400,), {"limit": _number(1, 1000)}
    ),
    ("GET", SESSION): Operation("A session", shapes.SessionReply, None, LOST),
    ("DELETE", SESSION): Operation("Close a session", shapes.Deleted, None, LOST),
    ("POST", f"{SESSION}/append"): _generation("Append to a session", AppendBody, shapes.SessionAppended),
    ("POST", f"{SESSION}/query"): _generation("Query a session", QueryBody, shapes.Completion, shapes.CompletionEvent),
    ("POST", f"{SESSION}/fork"): Operation(
        "A second session with the same history", shapes.SessionReply, ForkBody, (*BODY, 409, 410), optional_body=True
    ),
    ("POST", f"{SESSION}/questions"): Operation(
        "Ask a question that is answered ahead", shapes.QuestionReply, QuestionBody, (*BODY, 409, 410)
    ),
    ("GET", f"{SESSION}/questions"): Operation("The standing questions", shapes.QuestionList, None, LOST),
    ("GET", f"{SESSION}/questions/{{question_id}}"): Operation(
        "The latest answer to a question", shapes.QuestionReply, None, LOST
    ),
    ("DELETE", f"{SESSION}/questions/{{question_id}}"): Operation("Withdraw a question", shapes.Deleted, None, LOST),
    ("POST", "/v1/programs/{program_id}/heartbeat"): Operation(
        "The program's client is alive", shapes.HeartbeatReply, HeartbeatBody, BODY
    ),
    ("DELETE", "/v1/programs/{program_id}"): Operation("End a program", shapes.Deleted, None, (400, 404)),
    ("GET", "/v1/tools/latency"): Operation("How long the caller's tools take", shapes.LatencyList),
    ("GET", "/v1/usage"): Operation("The caller's usage", shapes.UsageSums, None, (400,), DAYS),
    ("GET", "/v1/usage/records"): Operation(
        "One record for each request of the caller", str, None, (400,), RECORDS, media=LINES
    ),
    ("GET", "/v1/admin/tenants"): Operation("Tenants and their keys", shapes.TenantList),
    ("POST", "/v1/admin/tenants"): Operation(
        "Make a tenant with its first key", shapes.KeyMade, TenantBody, (*BODY, 409)
    ),
    ("PATCH", ADMIN): Operation("Change a tenant", shapes.TenantRow, ChangeBody, (*BODY, 409)),
    ("DELETE", ADMIN): Operation("Delete a tenant", shapes.Deleted, None, (400, 404, 409)),
    ("DELETE", f"{ADMIN}/cache"): Operation("Delete a tenant's cached answers", shapes.Deleted, None, (400, 404)),
    ("POST", f"{ADMIN}/keys"): Operation(
        "Make another key for a tenant", shapes.KeyMade, KeyBody, (*BODY, 409), optional_body=True
    ),
    ("DELETE", f"{ADMIN}/keys/{{key_id}}"): Operation("Delete a key", shapes.Deleted, None, (400, 404, 409)),
    ("GET", "/v1/admin/usage"): Operation("The usage of tenants", shapes.UsageOfAll, None, (400,), {**DAYS, **TENANT}),
    ("GET", "/v1/admin/usage/records"): Operation(
        "One record for each request", str, None, (400,), {**RECORDS, **TENANT}, media=LINES
    ),
    ("GET", "/v1/admin/audit"): Operation("The audit log", str, None, (400,), RECORDS, media=LINES),
    ("GET", "/v1/cluster/status"): Operation(
        "The cluster at this moment", shapes.StatusReply, None, (400,), {"programs": _number(0, 1000)}
    ),
    ("GET", "/v1/live"): Operation(
        "What the caller's programs do now", shapes.LiveReply, None, (400,), {"since": {"type": "string"}}
    ),
    ("POST", "/tokenize"): Operation("A prompt as token ids", shapes.TokenizeReply, TokenizeBody, BODY),
    ("POST", "/detokenize"): Operation("Token ids as text", shapes.DetokenizeReply, DetokenizeBody, BODY),
    ("GET", "/v1/models"): Operation("The served models", shapes.AnyModelList),
    ("GET", "/v1/models/{name}"): Operation("One model", shapes.AnyModel, None, (404,)),
    ("GET", "/version"): Operation("Holdfast's version", shapes.VersionReply),
    ("GET", "/health"): Operation("Whether a replica can take requests", shapes.HealthReply),
    ("GET", "/metrics"): Operation("Prometheus text of all processes", str, media=TEXT),
    ("GET", "/metrics/targets"): Operation("The addresses of each process's own metrics", shapes.TargetList),
    ("GET", "/metrics/processes/{process}"): Operation("One process's metrics", str, None, (404,), media=TEXT),
}


def served(cards: Sequence[ModelCard]) -> tuple[ServedModel, ...]:
    """The models as `document` takes them."""
    return tuple((card.name, card.vocabulary) for card in cards)


class _Schemas(GenerateJsonSchema):
    """A tagged union is `anyOf`: a value may have the form of several members, and its tag decides."""

    def tagged_union_schema(self, schema: TaggedUnionSchema) -> dict[str, Any]:
        made = super().tagged_union_schema(schema)
        return {"anyOf" if name == "oneOf" else name: value for name, value in made.items()}


@lru_cache(maxsize=4)
def document(models: tuple[ServedModel, ...] = ()) -> bytes:
    """The OpenAPI 3.1 document in JSON, with the names and limits of `models` in it."""
    kinds = {each: None for op in OPERATIONS.values() for each in (op.answer, op.body, op.events) if each is not None}
    kinds |= dict.fromkeys((shapes.Error, shapes.AnthropicError))
    adapters = [(kind, "validation", TypeAdapter(kind)) for kind in kinds]
    by_kind, components = TypeAdapter.json_schemas(adapters, ref_template=REF, schema_generator=_Schemas)  # type: ignore[arg-type]
    references = {kind: schema for (kind, _), schema in by_kind.items()}
    schemas = components["$defs"]
    for body in {op.body for op in OPERATIONS.values() if op.body is not None}:
        _add_common_fields(schemas[body.__name__])
    if models:
        schemas["ModelName"]["enum"] = [name for name, _ in models]
        most = max(size for _, size in models) - 1
        schemas["TokenId"]["maximum"] = most
        schemas["LogitBias"]["propertyNames"] = {"pattern": f"^[0-9]{{1,{len(str(most))}}}$"}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, references)
    statuses = sorted({row.status for row in TABLE.values()})
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Holdfast",
                "version": metadata.version("holdfast"),
                "description": "OpenAI's, Open Responses' and Anthropic's interfaces, with programs and sessions.",
            },
            "paths": paths,
            "security": [{"bearer": []}, {"x-api-key": []}, {}],
            "components": {
                "schemas": schemas,
                "parameters": header_parameters(),
                "headers": header_components(),
                "responses": {
                    _error_name(status, anthropic): _error(status, anthropic, references)
                    for status in statuses
                    for anthropic in (False, True)
                },
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def _add_common_fields(schema: dict[str, Any]) -> None:
    """What `body.validate` does with every body: some fields are accepted and not used, and null counts as absent."""
    properties = schema["properties"]
    if schema.get("additionalProperties") is False:
        for name in sorted(IGNORED - properties.keys()):
            properties[name] = {"description": "Accepted and not used"}
        for name, values in sorted(NEUTRAL.items()):
            properties.setdefault(name, {"enum": [*values], "description": "Only where it changes nothing"})
    null = {"type": "null"}
    for name, each in properties.items():
        if name not in schema.get("required", ()) and each and null not in each.get("anyOf", ()):
            properties[name] = {"anyOf": [each, null]}


def _operation(method: str, path: str, operation: Operation, references: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": references[operation.answer]}}
    anthropic = path.startswith("/v1/messages")
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(references[operation.events], done=not anthropic)}
    if operation.media == LINES:
        content[CSV] = {"schema": {"type": "string"}}
    turn = operation.generates and "session" not in path
    reads = operation.generates or operation.body in (CountBody, ResponsesBody)
    errors = {
        str(status): {"$ref": f"#/components/responses/{_error_name(status, anthropic)}"}
        for status in sorted({*EVERY, *operation.errors})
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names]
    parameters += [{"name": each, "in": "query", "schema": schema} for each, schema in (operation.query or {}).items()]
    parameters += request_headers(
        turn=turn,
        program=turn or operation.body is PrefillBody,
        anthropic=anthropic or path.startswith("/v1/models"),
    ).values()
    words = [part.strip("{}") for part in path.split("/") if part not in ("", "v1")]
    described: dict[str, Any] = {
        "operationId": "_".join((method.lower(), *words)).replace(".", "_"),
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {
            "200": {
                "description": operation.summary,
                "headers": answer_headers(anthropic=anthropic, reads=reads),
                "content": content,
            },
            **errors,
        },
    }
    if operation.body is not None:
        schema = references[operation.body]
        described["requestBody"] = {"required": not operation.optional_body, "content": {JSON: {"schema": schema}}}
    if operation.generates:
        described["tags"] = ["generation"]
    return described


def _error_name(status: int, anthropic: bool) -> str:
    return f"anthropic-{status}" if anthropic else str(status)


def _error(status: int, anthropic: bool, references: Mapping[Any, Any]) -> dict[str, Any]:
    kind = shapes.AnthropicError if anthropic else shapes.Error
    return {
        "description": ", ".join(row.code or row.type for row in TABLE.values() if row.status == status),
        "headers": answer_headers(anthropic=anthropic, later=status in (429, 503)),
        "content": {JSON: {"schema": references[kind]}},
    }


def _event(schema: Any, *, done: bool) -> dict[str, Any]:
    """An event of a stream. `done`: the last event has `[DONE]` instead of JSON."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    return {
        "type": "object",
        "description": "An event: `data` is JSON" + ("; the last one is [DONE]" if done else ""),
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [data, {"const": "[DONE]"}]} if done else data},
        "required": ["data"],
    }


# ---- the page ----

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code,pre{font:14px monospace}"
    "summary{cursor:pointer}b{display:inline-block;min-width:4.5em}"
)


def page(raw: bytes) -> str:
    """The document as HTML, without scripts and without anything from other servers."""
    spec = orjson.loads(raw)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Holdfast API</title>",
        f"<style>{STYLE}</style><h1>Holdfast {escape(spec['info']['version'])}</h1>",
        f"<p>{escape(spec['info']['description'])} <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            title = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
            parts.append(f"<details><summary>{title}</summary>{_json(operation)}</details>")
    for kind in ("schemas", "responses", "parameters", "headers"):
        parts.append(f"<h2>{kind.capitalize()}</h2>")
        for name, each in sorted(spec["components"][kind].items()):
            title = f"<code>{escape(name)}</code> {escape(each.get('description', ''))}"
            parts.append(f"<details id={kind}-{escape(name)}><summary>{title}</summary>{_json(each)}</details>")
    return "".join(parts)


def _json(value: Any) -> str:
    """`value` as indented JSON, with links for its references."""
    text = escape(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode(), quote=False)
    linked = REFERENCE.sub(r"<a href=#\1-\2>\2</a>", text)
    return f"<pre>{linked}</pre>"
