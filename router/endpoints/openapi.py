"""`/openapi.json`: every operation with its headers, body, answers, events and errors; and as a page, `/docs`.

Bodies come from the pydantic models that validate requests, answers and events from `shapes`, errors from their table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata
from typing import Any, TypeAlias

import orjson
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import TaggedUnionSchema

from holdfast.replicas.requests import ModelCard
from holdfast.replicas.types import Priority
from holdfast.router.config import DEADLINE_HEADERS, PLACEMENT_HEADERS, PROGRAM_HEADERS
from holdfast.router.entry import Handler
from holdfast.router.protocol import shapes
from holdfast.router.protocol.anthropic import CountBody
from holdfast.router.protocol.body import IGNORED, NEUTRAL, Body, Query
from holdfast.router.protocol.errors import TABLE
from holdfast.router.protocol.prefills import PrefillBody
from holdfast.router.protocol.responses import ResponsesBody
from holdfast.router.records import FRESH_DRAW, MAX_LENGTH, PRIORITY, CacheResult

EVENTS = "text/event-stream"
JSON = "application/json"
TEXT = "text/plain"
LINES = "application/jsonl"
CSV = "text/csv"  # the other form of `LINES`
REF = "#/components/schemas/{model}"
REFERENCE = re.compile(r"#/components/(\w+)/([\w-]+)")
ServedModel: TypeAlias = tuple[str, int]  # a model's name, and the size of its vocabulary

EVERY = (401, 403, 429, 500, 503)  # errors that every operation may answer with
BODY = (400, 404, 408, 413)  # errors of an operation with a body
GENERATION = (409, 410, 422, 504)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method: its handler, and what the document says of it (nothing without an `answer`).

    `events`: the events of a streamed answer. `errors`: the statuses besides those that follow from the other fields.
    The summary is the first sentence of `about`, by default the handler's docstring.
    """

    method: str
    path: str
    handler: Handler
    answer: Any = None
    body: type[Body] | None = None
    query: type[Query] | None = None
    events: Any = None
    errors: Sequence[int] = ()
    generates: bool = False
    optional_body: bool = False
    media: str = JSON
    about: str = ""

    @property
    def summary(self) -> str:
        return (self.about or self.handler.__doc__ or "").partition(".")[0].strip()

    @property
    def shown_path(self) -> str:
        return self.path.replace(":path", "")

    @property
    def statuses(self) -> set[int]:
        """The statuses of its errors."""
        invalid = (400,) if self.query is not None or "{" in self.path else ()
        missing = (404,) if "{" in self.path else ()
        body = BODY if self.body is not None else ()
        return {*EVERY, *invalid, *missing, *body, *(GENERATION if self.generates else ()), *self.errors}

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The parameters of its path and of its query."""
        names = [part[1:-1] for part in self.shown_path.split("/") if part.startswith("{")]
        parameters = [{"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names]
        fields = self.query.model_json_schema()["properties"] if self.query is not None else {}
        for name, schema in fields.items():
            parameters.append({"name": name, "in": "query", "schema": next(iter(schema.get("anyOf", ())), schema)})
        return parameters


def served(cards: Sequence[ModelCard]) -> tuple[ServedModel, ...]:
    """The models as `document` takes them."""
    return tuple((card.name, card.vocabulary) for card in cards)


class _Schemas(GenerateJsonSchema):
    """A tagged union is `anyOf`: a value may have the form of several members, and its tag decides."""

    def tagged_union_schema(self, schema: TaggedUnionSchema) -> dict[str, Any]:
        union = super().tagged_union_schema(schema)
        return {"anyOf" if name == "oneOf" else name: value for name, value in union.items()}


class ApiDocument:
    """The document of the endpoints with an answer. `endpoints` are set once, before the first request."""

    def __init__(self) -> None:
        self.endpoints: Sequence[Endpoint] = ()
        self._documents: dict[tuple[ServedModel, ...], bytes] = {}

    def json(self, models: tuple[ServedModel, ...] = ()) -> bytes:
        """The OpenAPI 3.1 document, with the names and limits of `models` in it."""
        if models not in self._documents:
            self._documents = {models: _document([each for each in self.endpoints if each.answer is not None], models)}
        return self._documents[models]


def _document(endpoints: Sequence[Endpoint], models: tuple[ServedModel, ...]) -> bytes:
    kinds = {each: None for op in endpoints for each in (op.answer, op.body, op.events) if each is not None}
    kinds |= dict.fromkeys((shapes.Error, shapes.AnthropicError))
    adapters = [(kind, "validation", TypeAdapter(kind)) for kind in kinds]
    by_kind, components = TypeAdapter.json_schemas(adapters, ref_template=REF, schema_generator=_Schemas)  # type: ignore[arg-type]
    references = {kind: schema for (kind, _), schema in by_kind.items()}
    schemas = components["$defs"]
    for body in {op.body for op in endpoints if op.body is not None}:
        _add_common_fields(schemas[body.__name__])
    if models:
        schemas["ModelName"]["enum"] = [name for name, _ in models]
        most = max(size for _, size in models) - 1
        schemas["TokenId"]["maximum"] = most
        schemas["LogitBias"]["propertyNames"] = {"pattern": f"^[0-9]{{1,{len(str(most))}}}$"}
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.shown_path, {})[each.method.lower()] = _operation(each, references)
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
                "parameters": {
                    name: {"name": name, "in": "header", "description": text, "schema": schema}
                    for name, (text, schema) in {**ANY, **PROGRAM, **TURN, **ANTHROPIC}.items()
                },
                "headers": {
                    name: {"description": text, "required": name in ALWAYS, "schema": schema}
                    for name, (text, schema) in {**ALWAYS, **READ, **LATER, **STANDING, **ANTHROPIC_STANDING}.items()
                },
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
    """Describe the rules of `body.validate` for every body: some fields are accepted and ignored, and null counts as
    absent.
    """
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


def _operation(operation: Endpoint, references: Mapping[Any, Any]) -> dict[str, Any]:
    path = operation.shown_path
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
        for status in sorted(operation.statuses)
    }
    headers = request_headers(
        turn=turn,
        program=turn or operation.body is PrefillBody,
        anthropic=anthropic or path.startswith("/v1/models"),
    )
    words = [part.strip("{}") for part in path.split("/") if part not in ("", "v1")]
    described: dict[str, Any] = {
        "operationId": "_".join((operation.method.lower(), *words)).replace(".", "_"),
        "summary": operation.summary,
        "parameters": [*operation.parameters, *headers.values()],
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


# ---- headers, by their defaults: the configuration can name others for programs and deadlines ----

Headers: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]  # the description and the schema of each

STRING: Mapping[str, Any] = {"type": "string"}
NAME: Mapping[str, Any] = {"type": "string", "pattern": f"^[!-~]{{1,{MAX_LENGTH}}}$"}
COUNT: Mapping[str, Any] = {"type": "integer", "minimum": 0}
SECONDS: Mapping[str, Any] = {"type": "number", "exclusiveMinimum": 0}
GRPC: Mapping[str, Any] = {"type": "string", "pattern": "^[1-9][0-9]{0,7}[HMSmun]$"}

ANY: Headers = {
    "x-request-id": ("The request's id, which comes back", {**STRING, "pattern": "^[A-Za-z0-9._:-]{1,128}$"})
}
PROGRAM: Headers = {
    **dict.fromkeys(PROGRAM_HEADERS, ("Names the program, if the body does not", NAME)),
    **dict.fromkeys(PLACEMENT_HEADERS, ("Names the program with which a new one is placed", NAME)),
}
TURN: Headers = {
    "idempotency-key": ("A retry with the same key gets the same answer, and changes a session once", NAME),
    "cache-control": ("For the response cache: no-store, no-cache, max-age=N", {**STRING, "pattern": "^[!-~]*$"}),
    FRESH_DRAW: ("As `fresh_draw` of the body", {"enum": ["true", "false"]}),
    PRIORITY: ("The request's class, if the body does not name it", {"enum": [*Priority]}),
    **{name: ("How long the client waits", GRPC if name == "grpc-timeout" else SECONDS) for name in DEADLINE_HEADERS},
}
ANTHROPIC: Headers = {"anthropic-version": ("Sent by Anthropic's clients", STRING)}

ALWAYS: Headers = {
    "x-request-id": ("The request's id", STRING),
    "request-id": ("The same", STRING),
    "x-holdfast-replica": ("The replica that answered, or none", STRING),
    "x-holdfast-cache": ("The result of the look-up in the response cache", {"enum": [*CacheResult]}),
}
READ: Headers = {
    "age": ("Seconds since an answer from the response cache was computed", COUNT),
    "idempotent-replayed": ("The answer that the same request got with its `Idempotency-Key`", {"enum": ["true"]}),
    "x-holdfast-repeat": (
        "An answer from the response cache was drawn with the prompt's own seed; `fresh_draw` asks for another one",
        {"enum": ["prompt-seed"]},
    ),
    "x-holdfast-skipped": ("The parts of the request that the model does not see", STRING),
    "x-holdfast-tools": (
        "system-prompt: the chat template takes no tools, so they stand in the system prompt",
        {"enum": ["system-prompt"]},
    ),
    "server-timing": ("Milliseconds of each stage, for a computed answer that is not streamed", STRING),
}
LATER: Headers = {"retry-after": ("Seconds", {"type": "integer", "minimum": 1})}
STANDING: Headers = {
    f"x-ratelimit-{quantity}-{of}": (f"The tenant's limit of {of}", STRING if quantity == "reset" else COUNT)
    for of in ("requests", "tokens")
    for quantity in ("limit", "remaining", "reset")
}
ANTHROPIC_STANDING: Headers = {
    f"anthropic-ratelimit-{of}-{quantity}": (
        f"The tenant's limit of {of}",
        {**STRING, "format": "date-time"} if quantity == "reset" else COUNT,
    )
    for of in ("requests", "input-tokens", "output-tokens", "tokens")
    for quantity in ("limit", "remaining", "reset")
}


def request_headers(*, turn: bool, program: bool, anthropic: bool) -> dict[str, Any]:
    """References to the headers of a request: of a `turn`, of one that names a `program`, in Anthropic's form."""
    groups = ((PROGRAM, program), (TURN, turn), (ANTHROPIC, anthropic))
    return _refer("parameters", [*ANY, *(name for names, included in groups if included for name in names)])


def answer_headers(*, anthropic: bool, reads: bool = False, later: bool = False) -> dict[str, Any]:
    """References to the headers of an answer: to a request that `reads` a prompt, to one to retry `later`."""
    groups = ((READ, reads), (LATER, later), (ANTHROPIC_STANDING if anthropic else STANDING, True))
    return _refer("headers", [*ALWAYS, *(name for names, included in groups if included for name in names)])


def _refer(kind: str, names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/{kind}/{name}"} for name in names}


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
