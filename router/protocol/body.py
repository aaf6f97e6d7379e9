"""From bytes to a validated pydantic model, and errors that name the field as OpenAI's do (`messages.2.content`).

The fields of each endpoint stand with it. The fields that every endpoint ignores or refuses stand here.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, PrivateAttr, Tag, ValidationError
from pydantic_core import ErrorDetails

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.protocol.errors import Refusal, RefusedError

Model = TypeVar("Model", bound="Body")
QueryModel = TypeVar("QueryModel", bound="Query")

CLOSED = ConfigDict(strict=True, extra="forbid")
OPEN = ConfigDict(strict=True, extra="allow")
MOST_MESSAGES = 8192  # of a conversation, and parts of one message
MOST_TOOLS = 1024
EXACT = 2.0**53  # a float beyond it need not be the integer that was written
STRING = re.compile(rb'"[^"]*"?')  # an open one goes to the end
NO_MARKS = bytes(byte for byte in range(256) if byte not in b'",[{')
# Every escape in a string, so that a match cannot begin inside another escape. A surrogate pair is one match.
ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)

_IGNORED = (
    "cache_control client_metadata extra_headers litellm_metadata litellm_session_id litellm_trace_id max_retries "
    "metadata num_retries prediction prompt_cache_options prompt_cache_retention provider request_id safety_identifier "
    "session_id store stream_reasoning tags trace_id usage user"
)
IGNORED = frozenset(_IGNORED.split())
"""Fields of OpenAI, other servers and gateways that cannot change an answer. They are accepted and not used."""

_NEVER = (
    "allowed_token_ids audio conversation enable_thinking function_call grammar guided_choice guided_grammar "
    "guided_json guided_regex moderation prompt_logprobs regex structured_outputs thinking truncate_prompt_tokens "
    "web_search_options"
)
_ONLY_FALSE = (
    "continue_final_message echo include_stop_str_in_output return_token_ids return_token_strs "
    "return_tokens_as_token_ids use_beam_search"
)
_ONLY_TRUE = (
    "add_generation_prompt add_special_tokens include_reasoning separate_reasoning skip_special_tokens "
    "spaces_between_special_tokens"
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NEVER.split(), ()),
    **dict.fromkeys(_ONLY_FALSE.split(), (False,)),
    **dict.fromkeys(_ONLY_TRUE.split(), (True,)),
    **dict.fromkeys(("best_of", "length_penalty", "n", "typical_p"), (1, 1.0)),
    **dict.fromkeys(("bad_words", "functions"), ([],)),
    "mirostat": (0,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_a": (0, 0.0),
    "verbosity": ("medium",),
}
"""Fields that would change an answer and are not supported, each with the values that change nothing."""

MAX_TOKENS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # the same limit in different APIs
WORD = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MOST_WORDS = 32  # in the header that lists what was skipped


def word(name: object) -> str:
    """`name` if it may stand in a header, else "unknown"."""
    return name if isinstance(name, str) and WORD.fullmatch(name) else "unknown"


def text_or(many: Any) -> Any:
    """The type of a string or a list `many`. Errors are about the one of them that was sent."""

    def kind(value: object) -> str:
        return "many" if isinstance(value, list) else "one"

    return Annotated[Annotated[str, Tag("one")] | Annotated[many, Tag("many")], Discriminator(kind)]


def without_nulls(value: Any) -> Any:
    """An object without its members that are null."""
    if isinstance(value, dict) and None in value.values():
        return {name: member for name, member in value.items() if member is not None}
    return value


NULL_IS_ABSENT = BeforeValidator(without_nulls)
"""In an object below the top level of a body: a member that is null counts as absent."""


class Body(BaseModel):
    """Base of every request body: no coercion (`"1"` is not a number), no unknown fields at the top.

    `skipped`: the paths, without indices, of unknown fields further in. They change nothing.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    _skipped: tuple[str, ...] = PrivateAttr(())

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped


class Query(BaseModel):
    """Base of the parameters of a URL. Unknown ones and empty ones change nothing."""

    model_config = ConfigDict(frozen=True)


def read_query(model: type[QueryModel], parameters: Mapping[str, str]) -> QueryModel:
    """The parameters of a URL. Raises InvalidRequestError that names the parameter."""
    sent = {name: value for name, value in parameters.items() if value}
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        raise _translate(model, error.errors(include_url=False), sent) from None


def read(model: type[Model], raw: bytes) -> Model:
    """`raw` as a `model`. Raises InvalidRequestError that names the field."""
    return validate(model, decode(raw))


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidRequestError for a syntax error, and for a field that is nested deeper
    than the JSON writer can write.
    """
    try:
        body = _loads(raw)
    except orjson.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno} (position {error.pos})"
        raise InvalidRequestError(f"The request body is not valid JSON: {error.msg} at {position}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object")
    for name, value in body.items():
        try:
            orjson.dumps([[[[value]]]])  # it writes 254 levels; a request's digest puts the value a few levels deeper
        except TypeError:
            raise InvalidRequestError(f"'{name}' is nested too deeply", name) from None
    return body


def _loads(raw: bytes) -> Any:
    """The JSON in `raw`, with U+FFFD for half a surrogate pair.

    JavaScript clients send a half when they cut a text inside a pair, and send it again with each turn.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], raw)
        if whole == raw:
            raise
    return orjson.loads(whole)


def check_values(raw: bytes, most: int) -> None:
    """Raises RefusedError (413) if the JSON has more than `most` values, before any of them is made.

    A value of two bytes takes a hundred in memory. Separators outside of strings are counted.
    """
    if _separators(raw) <= most:
        return
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # without escapes, every quote begins or ends a string
    if _separators(STRING.sub(b"", plain.translate(None, NO_MARKS))) > most:
        raise RefusedError(Refusal.TOO_LARGE, f"The request body has more than {most} values")


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def validate(model: type[Model], body: Mapping[str, Any]) -> Model:
    """`body` as a `model`. A field that is null counts as absent; deeper down where `NULL_IS_ABSENT` says so.

    Raises InvalidRequestError for the first fault, with the field's path.
    """
    fields: dict[str, Any] = {}
    for name, value in body.items():
        known = name in model.model_fields
        if value is None or (name in IGNORED and not known):
            continue
        if name in NEUTRAL and not known:
            _require_neutral(name, value)
            continue
        fields[name] = value
    try:
        return model.model_validate(fields, extra="forbid")
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    if any(each["type"] == "int_type" and isinstance(each["input"], float) for each in details):
        fields = _whole(fields)  # in JSON, 5.0 is an integer too
    try:
        parsed = model.model_validate(fields)
    except ValidationError as error:
        raise _translate(model, error.errors(include_url=False), fields) from None
    parsed._skipped = _unknown(details, fields)
    return parsed


def _unknown(details: Sequence[ErrorDetails], fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths of fields that are not known and not null."""
    paths = set()
    for each in details:
        if each["type"] == "extra_forbidden" and each["input"] is not None:
            *outer, name = _steps(each["loc"], fields, missing=False)
            paths.add(".".join([*(step for step in outer if isinstance(step, str)), word(name)]))
    return tuple(sorted(paths))


def _whole(value: Any) -> Any:
    """`value` with an integer for each float that is one."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, dict) else value


def _require_neutral(name: str, value: object) -> None:
    neutral = NEUTRAL[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return
    only = f"; only {orjson.dumps(neutral[0]).decode()} is accepted" if neutral else ""
    raise InvalidRequestError(f"'{name}' is not supported{only}", name)


def _translate(
    model: type[BaseModel], details: Sequence[ErrorDetails], fields: Mapping[str, Any]
) -> InvalidRequestError:
    detail = details[0]
    if detail["type"] == "missing":  # a misspelled field, if there is one, says more
        detail = next((item for item in details if item["type"] == "extra_forbidden"), detail)
    kind = detail["type"]
    path = ".".join(map(str, _steps(detail["loc"], fields, missing=kind == "missing")))
    if kind == "extra_forbidden":
        return InvalidRequestError(f"Unrecognized request argument supplied: {path}{_nearest(model, path)}", path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = f"{path}.{detail['ctx']['discriminator'].strip(chr(39))}"
    if kind in ("missing", "union_tag_not_found"):
        return missing(path)
    if kind == "union_tag_invalid":
        expected = detail["ctx"]["expected_tags"]
        return InvalidRequestError(f"Invalid value for '{path}': '{detail['ctx']['tag']}', not one of {expected}", path)
    if kind == "literal_error":
        sent, expected = word(detail["input"]), detail["ctx"]["expected"]
        return InvalidRequestError(f"Invalid value for '{path}': '{sent}', not {expected}", path)
    message = detail["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"Invalid value for '{path}': {message[:1].lower()}{message[1:]}", path)


def missing(path: str) -> InvalidRequestError:
    return InvalidRequestError(f"Missing required parameter: '{path}'", path)


def _steps(location: Sequence[int | str], fields: object, *, missing: bool) -> list[int | str]:
    """`location` without the names of union branches, which pydantic puts in and a client never wrote.

    The last step of a `missing` field is not in `fields`. Otherwise only the name of a branch may end a location.
    """
    for end in range(len(location) - missing, 0, -1):
        steps = _walk(location[:end], fields)
        if steps is not None:
            return [*steps, location[-1]] if missing else steps
    return [location[-1]] if missing else []


def _walk(location: Sequence[int | str], part: object) -> list[int | str] | None:
    """The steps of `location` that lead to its last one; None if they do not. A branch may be called like a field."""
    if not location:
        return []
    step, rest = location[0], location[1:]
    inner: Any = part
    if step in part if isinstance(part, dict) else isinstance(part, list) and isinstance(step, int):
        steps = _walk(rest, inner[step])
        if steps is not None:
            return [step, *steps]
    return _walk(rest, part) if rest else None


def _nearest(model: type[BaseModel], path: str) -> str:
    if "." in path:
        return ""
    names = [name for name in MAX_TOKENS if path in MAX_TOKENS and name in model.model_fields]
    names = names or get_close_matches(path, [*model.model_fields, *NEUTRAL], n=1, cutoff=0.75)
    return f" (did you mean '{names[0]}'?)" if names else ""


def deleted_reply(kind: str, name: str) -> bytes:
    """The answer to a DELETE, in JSON."""
    return orjson.dumps({"id": name, "object": kind, "deleted": True})
