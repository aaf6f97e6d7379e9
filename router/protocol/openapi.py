"""`/openapi.json`: every operation with its headers, its body, its answers, events and errors; and as a page, `/docs`.

Bodies come from the pydantic models that validate requests, answers from `replies`, events of streams from `events`,
headers from `headers`, errors from the one table of them.
What a model cannot say of a body, and `body.validate` does, is added here: null counts as absent, some fields are taken
and ignored, some have one value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib import metadata
from typing import Any, TypeAlias

import orjson
from pydantic import TypeAdapter

from holdfast.replicas.requests import ModelCard
from holdfast.router.protocol import events, headers, replies
from holdfast.router.protocol.admin import MOST_ROWS, ChangeBody, KeyBody, TenantBody
from holdfast.router.protocol.anthropic import CountBody, MessagesBody
from holdfast.router.protocol.body import IGNORED, NEUTRAL, Body
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.completions import CompletionBody
from holdfast.router.protocol.errors import TABLE
from holdfast.router.protocol.prefills import ExtendBody, PrefillBody
from holdfast.router.protocol.programs import HeartbeatBody
from holdfast.router.protocol.responses import ResponsesBody
from holdfast.router.protocol.sessions import (
    KINDS,
    NO_PROGRAM,
    NO_STREAM,
    AppendBody,
    ForkBody,
    OpenBody,
    QueryBody,
    QuestionBody,
)
from holdfast.router.protocol.tokens import DetokenizeBody, TokenizeBody
from holdfast.router.protocol.turn import MAX_STOPS, GenerationBody

EVENTS = "text/event-stream"
JSON = "application/json"
TEXT = "text/plain"
LINES = "application/jsonl"
CSV = "text/csv"  # where lines may be asked for as such
ANY = {401: "", 403: "", 429: "", 500: "", 503: ""}
BODY = (400, 404, 408, 413)
ASKED = (409, 410, 504)
LEAST: Mapping[str, Mapping[str, Any]] = {"string": {"minLength": 1}, "array": {"minItems": 1}}
Served: TypeAlias = tuple[str, int, int]  # a model's name, its context and how many tokens it knows
ONE_OF = (OpenBody, AppendBody, QueryBody, QuestionBody, TokenizeBody)  # one of the fields for a prompt is given
REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One path and method. `events`: what a streamed answer is made of; `errors` beside `ANY`."""

    summary: str
    answer: Any
    body: type[Body] | None = None
    events: Any = None
    generates: bool = False
    errors: Sequence[int] = ()
    query: Mapping[str, Mapping[str, Any]] | None = None
    needs: Sequence[str] = ()  # fields that the model takes for optional and something else asks for
    optional: bool = False  # the body
    media: str = JSON


def _generation(summary: str, body: type[Body], answer: Any, events: Any, *needs: str) -> Operation:
    return Operation(summary, answer, body, events, generates=True, errors=(*BODY, *ASKED, 422), needs=needs)


def _number(least: int, most: int) -> Mapping[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


PAGE: Mapping[str, Mapping[str, Any]] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": _number(1, 100),
    "after": {"type": "string"},
}

TENANT: Mapping[str, Mapping[str, Any]] = {"tenant": {"type": "string"}}
DAYS: Mapping[str, Mapping[str, Any]] = {"days": _number(1, 400)}
DAYS_OF = {**DAYS, **TENANT}
RECORDS: Mapping[str, Mapping[str, Any]] = {
    "from": {"type": "string", "format": "date"},
    "to": {"type": "string", "format": "date"},
    "after": {"type": "string", "pattern": "^[0-9]{1,13}-[0-9]{1,6}$"},
    "limit": _number(1, MOST_ROWS),
    "format": {"enum": ["jsonl", "csv"]},
}
RECORDS_OF = {**RECORDS, **TENANT}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _generation(
        "A chat completion", ChatBody, replies.ChatCompletion, events.ChatEvent
    ),
    ("POST", "/v1/completions"): _generation(
        "A completion of text or token ids", CompletionBody, replies.Completion, events.CompletionEvent
    ),
    ("POST", "/v1/messages"): _generation("A message", MessagesBody, replies.MessageReply, events.MessageEvent),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "How many tokens a message's prompt has", replies.InputTokens, CountBody, errors=BODY
    ),
    ("POST", "/v1/responses"): _generation(
        "A response", ResponsesBody, replies.ResponseReply, events.ResponseEvent, "input"
    ),
    ("POST", "/v1/responses/compact"): _generation(
        "A conversation made short", ResponsesBody, replies.CompactionReply, None
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "How many tokens a response's prompt has", replies.CountedInput, ResponsesBody, errors=BODY
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "A stored response", replies.ResponseReply, errors=(400, 404), query={"stream": {"enum": ["false", "0"]}}
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation("It is deleted", replies.Deleted, errors=(404,)),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation("Refused", replies.ResponseReply, errors=(400, 404)),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        "What its own request had", replies.ItemPage, errors=(400, 404), query=PAGE
    ),
    ("POST", "/v1/prefills"): Operation(
        "The beginning of a prompt is computed", replies.PrefillReply, PrefillBody, errors=(*BODY, *ASKED)
    ),
    ("GET", "/v1/prefills/{prefill_id}"): Operation("What the handle stands for", replies.PrefillReply, errors=(404,)),
    ("DELETE", "/v1/prefills/{prefill_id}"): Operation("Nobody comes back for it", replies.Deleted, errors=(404,)),
    ("POST", "/v1/prefills/{prefill_id}/extend"): Operation(
        "More of it has become known", replies.PrefillReply, ExtendBody, errors=(*BODY, *ASKED)
    ),
    ("POST", "/v1/sessions"): _generation("Opens a session", OpenBody, replies.SessionOpened, None),
    ("GET", "/v1/sessions"): Operation(
        "The caller's own sessions", replies.SessionList, errors=(400,), query={"limit": _number(1, 1000)}
    ),
    ("GET", "/v1/sessions/{session_id}"): Operation("A session", replies.SessionReply, errors=(404, 410)),
    ("DELETE", "/v1/sessions/{session_id}"): Operation("It is closed", replies.Deleted, errors=(404, 410)),
    ("POST", "/v1/sessions/{session_id}/append"): _generation(
        "What comes next in it", AppendBody, replies.SessionAppended, None
    ),
    ("POST", "/v1/sessions/{session_id}/query"): _generation(
        "A question", QueryBody, replies.Completion, events.CompletionEvent, "max_tokens"
    ),
    ("POST", "/v1/sessions/{session_id}/fork"): Operation(
        "A second session with its history", replies.SessionReply, ForkBody, errors=(*BODY, 409, 410), optional=True
    ),
    ("POST", "/v1/sessions/{session_id}/questions"): Operation(
        "A question to be answered ahead",
        replies.QuestionReply,
        QuestionBody,
        errors=(*BODY, 409, 410),
        needs=("max_tokens",),
    ),
    ("GET", "/v1/sessions/{session_id}/questions"): Operation(
        "Those that stand", replies.QuestionList, errors=(404, 410)
    ),
    ("GET", "/v1/sessions/{session_id}/questions/{question_id}"): Operation(
        "Its latest answer", replies.QuestionReply, errors=(404, 410)
    ),
    ("DELETE", "/v1/sessions/{session_id}/questions/{question_id}"): Operation(
        "It stands no longer", replies.Deleted, errors=(404, 410)
    ),
    ("POST", "/v1/programs/{program_id}/heartbeat"): Operation(
        "The program's client is there", replies.HeartbeatReply, HeartbeatBody, errors=BODY
    ),
    ("DELETE", "/v1/programs/{program_id}"): Operation("The program is over", replies.Deleted, errors=(400, 404)),
    ("GET", "/v1/tools/latency"): Operation("How long the caller's tools take", replies.LatencyList),
    ("GET", "/v1/usage"): Operation("What the caller has used", replies.UsageSums, errors=(400,), query=DAYS),
    ("GET", "/v1/usage/records"): Operation(
        "The caller's requests, one record each", str, errors=(400,), query=RECORDS, media=LINES
    ),
    ("GET", "/v1/admin/tenants"): Operation("Tenants and their keys", replies.TenantList),
    ("POST", "/v1/admin/tenants"): Operation(
        "A tenant, with its first key", replies.KeyMade, TenantBody, errors=(*BODY, 409)
    ),
    ("PATCH", "/v1/admin/tenants/{name}"): Operation(
        "What a tenant is and may use", replies.TenantRow, ChangeBody, errors=(*BODY, 409)
    ),
    ("DELETE", "/v1/admin/tenants/{name}"): Operation("A tenant goes", replies.Deleted, errors=(400, 404, 409)),
    ("DELETE", "/v1/admin/tenants/{name}/cache"): Operation(
        "Its cached answers go", replies.Deleted, errors=(400, 404)
    ),
    ("POST", "/v1/admin/tenants/{name}/keys"): Operation(
        "One more key of a tenant", replies.KeyMade, KeyBody, errors=(*BODY, 409), optional=True
    ),
    ("DELETE", "/v1/admin/tenants/{name}/keys/{key_id}"): Operation(
        "A key goes", replies.Deleted, errors=(400, 404, 409)
    ),
    ("GET", "/v1/admin/usage"): Operation("What tenants have used", replies.UsageOfAll, errors=(400,), query=DAYS_OF),
    ("GET", "/v1/admin/usage/records"): Operation(
        "Requests, one record each", str, errors=(400,), query=RECORDS_OF, media=LINES
    ),
    ("GET", "/v1/admin/audit"): Operation("The audit log", str, errors=(400,), query=RECORDS, media=LINES),
    ("GET", "/v1/cluster/status"): Operation(
        "The cluster at this moment", replies.StatusReply, errors=(400,), query={"programs": _number(0, 1000)}
    ),
    ("GET", "/v1/live"): Operation(
        "What the caller's programs do now", replies.LiveReply, errors=(400,), query={"since": {"type": "string"}}
    ),
    ("POST", "/tokenize"): Operation("A prompt as token ids", replies.TokenizeReply, TokenizeBody, errors=BODY),
    ("POST", "/detokenize"): Operation("Token ids as text", replies.DetokenizeReply, DetokenizeBody, errors=BODY),
    ("GET", "/v1/models"): Operation("What is served", replies.AnyModelList),
    ("GET", "/v1/models/{name}"): Operation("One model", replies.AnyModel, errors=(404,)),
    ("GET", "/version"): Operation("Holdfast's version", replies.VersionReply),
    ("GET", "/health"): Operation("Whether a replica can take requests", replies.HealthReply),
    ("GET", "/metrics"): Operation("Prometheus text of all processes", str, media=TEXT),
    ("GET", "/metrics/targets"): Operation("Where each process's own metrics are", replies.TargetList),
    ("GET", "/metrics/processes/{process}"): Operation("One process's metrics", str, errors=(404,), media=TEXT),
}


@lru_cache(maxsize=4)
def document(models: tuple[Served, ...] = ()) -> bytes:
    """The OpenAPI 3.1 document in JSON, with what is served where that is told."""
    schemas = _schemas()
    limited: set[type[Body]] = set()
    for operation in OPERATIONS.values():
        if operation.body is not None and operation.body not in limited:
            limited.add(operation.body)  # as the first that has it says
            _limit(schemas, operation, models)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
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
                "parameters": headers.parameters(),
                "headers": headers.told(),
                "responses": {
                    _error_name(status, anthropic): _error(status, anthropic)
                    for status in sorted({row.status for row in TABLE.values()})
                    for anthropic in (False, True)
                },
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
        }
    )


def served(cards: Sequence[ModelCard]) -> tuple[Served, ...]:
    """What `document` tells of the models."""
    return tuple((card.name, card.context_length, card.vocabulary) for card in cards)


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": _schema_of(operation.answer)}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(operation.events)}
    if operation.media == LINES:
        content[CSV] = {"schema": {"type": "string"}}
    anthropic = path.startswith("/v1/messages")
    turn = operation.generates and "session" not in path
    reads = operation.generates or operation.body in (CountBody, ResponsesBody)
    told: dict[str, Any] = {
        "operationId": _name(method, path),
        "summary": operation.summary,
        "responses": {
            "200": {
                "description": operation.summary,
                "headers": headers.of_answer(anthropic=anthropic, reads=reads),
                "content": content,
            },
            **{
                str(status): {"$ref": f"#/components/responses/{_error_name(status, anthropic)}"}
                for status in sorted({*ANY, *operation.errors})
            },
        },
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names]
    parameters += [{"name": each, "in": "query", "schema": schema} for each, schema in (operation.query or {}).items()]
    sent = headers.of_request(
        turn=turn,
        program=turn or operation.body is PrefillBody,
        anthropic=anthropic or path.startswith("/v1/models"),
    )
    told["parameters"] = [*parameters, *sent.values()]
    if operation.body is not None:
        schema = {"$ref": REF.format(model=operation.body.__name__)}
        told["requestBody"] = {"required": not operation.optional, "content": {JSON: {"schema": schema}}}
    if operation.generates:
        told["tags"] = ["generation"]
    return told


def _error_name(status: int, anthropic: bool) -> str:
    return f"anthropic-{status}" if anthropic else str(status)


def _error(status: int, anthropic: bool) -> dict[str, Any]:
    kind = replies.AnthropicError if anthropic else replies.Error
    return {
        "description": ", ".join(row.code or row.type for row in TABLE.values() if row.status == status),
        "headers": headers.of_answer(anthropic=anthropic, later=status in (429, 503)),
        "content": {JSON: {"schema": _schema_of(kind)}},
    }


def _event(kinds: Any) -> dict[str, Any]:
    """An event of a stream; its data has one of these forms, or ends the stream."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": _schema_of(kinds)}
    if kinds is not events.MessageEvent:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {
        "type": "object",
        "description": "An event: `data` is JSON" + ("; the last one says [DONE]" if "anyOf" in data else ""),
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _name(method: str, path: str) -> str:
    words = [part.strip("{}") for part in path.split("/") if part not in ("", "v1")]
    return "_".join((method.lower(), *words)).replace(".", "_")


def _schema_of(answer: Any) -> dict[str, Any]:
    schema: dict[str, Any] = TypeAdapter(answer).json_schema(ref_template=REF)
    schema.pop("$defs", None)
    name = getattr(answer, "__name__", "")
    return {"$ref": REF.format(model=name)} if schema.get("type") == "object" and name else schema


def _schemas() -> dict[str, Any]:
    """All schemas that operations name, by name, each with those it is made of."""
    found: dict[str, Any] = {}
    kinds = [replies.Error, replies.AnthropicError]
    for operation in OPERATIONS.values():
        kinds += [each for each in (operation.answer, operation.body, operation.events) if each is not None]
    for kind in dict.fromkeys(kinds):
        # Names of parts are kept apart by whose they are: two bodies may mean different things by one name.
        name = getattr(kind, "__name__", "")
        schema = TypeAdapter(kind).json_schema(ref_template=REF)
        parts = schema.pop("$defs", {})
        clash = {part: f"{name}{part}" for part, each in parts.items() if found.get(part, each) != each}
        for part, each in parts.items():
            found[clash.get(part, part)] = _renamed(each, clash)
        if schema.get("type") == "object" and name:
            found[name] = _renamed(schema, clash)
    return found


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    if isinstance(schema, list):
        return [_renamed(each, names) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _renamed(value, names) for key, value in schema.items()}
    part = str(told.get("$ref", "")).rpartition("/")[2]
    return {**told, "$ref": REF.format(model=names[part])} if part in names else told


def _limit(schemas: dict[str, Any], operation: Operation, models: Sequence[Served]) -> None:
    """Add to a body's schema what `body.validate`, and the model that is served, have to say of it."""
    assert operation.body is not None
    context = max((each for _, each, _ in models), default=2**31)
    vocabulary = max((each for _, _, each in models), default=2**31)
    schema = schemas[operation.body.__name__]
    properties, required = schema["properties"], [*schema.get("required", ()), *operation.needs]
    if issubclass(operation.body, GenerationBody):
        text = {"type": "string", "minLength": 1}
        properties["stop"] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}]}
        properties["logit_bias"]["propertyNames"] = {"pattern": f"^[0-9]{{1,{len(str(vocabulary - 1))}}}$"}
        if set(NO_PROGRAM) & set(properties) and issubclass(operation.body, QuestionBody):
            for refused in (*NO_PROGRAM, *(() if operation.body is QueryBody else NO_STREAM)):
                del properties[refused]
    if schema.get("additionalProperties") is False:
        for name in sorted(IGNORED - properties.keys()):
            properties[name] = {"description": "Taken, and nothing is done with it"}
        for name, values in sorted(NEUTRAL.items()):
            properties.setdefault(name, {"enum": [*values], "description": "Only where it changes nothing"})
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if name in properties and operation.body is not MessagesBody:
            _integers(properties[name], maximum=context)
    for name in ("prompt", "tokens", "stop_token_ids"):
        if name in properties:
            _integers(properties[name], maximum=vocabulary - 1)
    if "tool_choice" in properties and operation.body in (ChatBody, ResponsesBody):
        properties["tool_choice"] = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]}
    if operation.body is CompletionBody:
        properties["prompt"] = _not_empty(properties["prompt"])
    if operation.body is ResponsesBody:
        properties.pop("max_tokens", None)  # it is `max_output_tokens` there
        given = properties["input"]["oneOf"]
        properties["input"] = {"anyOf": [{**each, **LEAST[each["type"]]} for each in given]}
    for name, each in properties.items():
        if name not in required and each and {"type": "null"} not in each.get("anyOf", ()):
            properties[name] = {"anyOf": [each, {"type": "null"}]}
        elif name in required and {"type": "null"} in each.get("anyOf", ()):
            properties[name] = next(one for one in each["anyOf"] if one != {"type": "null"})
    if models and "model" in properties:
        properties["model"] = {"type": "string", "enum": [name for name, _, _ in models]}
    schema["required"] = required
    one_of = [kind for kind in ("prompt", *KINDS) if kind in properties] if operation.body in ONE_OF else []
    if one_of:
        empty = {} if operation.body is not OpenBody else {"": None}
        schemas[operation.body.__name__] = {
            "anyOf": [_only(schema, kind, one_of) for kind in (*one_of, *empty)],
            "type": "object",
            "description": f"One of {', '.join(one_of)} is given{', or none' if empty else ''}",
        }


def _only(schema: Mapping[str, Any], kind: str, kinds: Sequence[str]) -> dict[str, Any]:
    """The form of a body in which this one of `kinds` is given."""
    gone = {*kinds} - {kind} | (set() if kind == "messages" else {"chat_template_kwargs", "tools"})
    properties = {name: each for name, each in schema["properties"].items() if name not in gone}
    if kind:
        given = properties[kind]
        properties[kind] = next((each for each in given.get("anyOf", ()) if each != {"type": "null"}), given)
    return {**schema, "properties": properties, "required": [*schema["required"], *([kind] if kind else [])]}


def _integers(schema: Any, **limits: int) -> None:
    """Put `limits` on the integers in `schema`."""
    if isinstance(schema, list):
        for each in schema:
            _integers(each, **limits)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema.update(limits)
        for each in list(schema.values()):
            _integers(each, **limits)


def _not_empty(schema: Any) -> Any:
    """`schema` without empty texts and lists."""
    if isinstance(schema, list):
        return [_not_empty(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _not_empty(value) for key, value in schema.items()}
    return {**told, **LEAST.get(str(told.get("type")), {})}


# ---- the page ----

STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code,pre{font:14px monospace}"
    "summary{cursor:pointer}table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;text-align:left;"
    "vertical-align:top}b{display:inline-block;min-width:4.5em}"
)


def page(raw: bytes) -> str:
    """The document as HTML. It needs no script and nothing from elsewhere."""
    told = orjson.loads(raw)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Holdfast API</title>",
        f"<style>{STYLE}</style><h1>Holdfast {escape(told['info']['version'])}</h1>",
        f"<p>{escape(told['info']['description'])} <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> ")
            shown = "".join(_shown(operation, told["components"]["responses"]))
            parts.append(f"{escape(operation['summary'])}</summary>{shown}</details>")
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(told["components"]["schemas"].items()):
        parts.append(
            f"<details id={escape(name)}><summary><code>{escape(name)}</code></summary>{_table(schema)}</details>"
        )
    return "".join(parts)


def _shown(operation: Mapping[str, Any], errors: Mapping[str, Any]) -> Iterator[str]:
    for each in operation["parameters"]:
        if "$ref" not in each:
            yield f"<p><code>{escape(each['name'])}</code> in the {each['in']}: {_type(each['schema'])}</p>"
    sent = [each["$ref"].rpartition("/")[2] for each in operation["parameters"] if "$ref" in each]
    yield f"<p>Headers: {', '.join(f'<code>{escape(name)}</code>' for name in sent)}</p>"
    if "requestBody" in operation:
        yield f"<p>Body: {_type(operation['requestBody']['content'][JSON]['schema'])}</p>"
    yield "<table>"
    for status, given in operation["responses"].items():
        answer = errors[given["$ref"].rpartition("/")[2]] if "$ref" in given else given
        kinds = ", ".join(f"{_type(each['schema'])} ({media})" for media, each in answer["content"].items())
        yield f"<tr><td>{status}<td>{escape(answer['description'])}<td>{kinds}"
    yield "</table>"


def _table(schema: Mapping[str, Any]) -> str:
    rows = [f"<p>{escape(schema.get('description', ''))}</p><table>"]
    for name, each in schema.get("properties", {}).items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        rows.append(f"<tr><td><code>{escape(name)}</code>{needed}<td>{_type(each)}")
    return "".join(rows) + "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with a link where it has a name."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(each) for each in schema[key])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(f"<code>{escape(orjson.dumps(each).decode())}</code>" for each in values) or "null"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))
