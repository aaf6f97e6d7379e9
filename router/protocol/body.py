"""From bytes to a validated pydantic model: JSON, fields that are ignored or not supported, and errors that name
the field as OpenAI's do (`messages.2.content`).

The supported fields themselves are in `chat`, `completions` and `tokens`.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.protocol.errors import Refusal, RefusedError

Model = TypeVar("Model", bound="Body")
T = TypeVar("T")

MOST_MESSAGES = 8192  # of a conversation, and parts of one message
MOST_TOOLS = 1024
EXACT = 2.0**53  # integers beyond it are no integers to everybody
TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # one that does not end goes to the end
# Every escape of a text, so that none is taken for one which begins inside of another; a pair of surrogates is one.
ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)

IGNORED = frozenset(
    {
        "cache_control",
        "client_metadata",
        "extra_headers",
        "litellm_metadata",
        "litellm_session_id",
        "litellm_trace_id",
        "max_retries",
        "metadata",
        "num_retries",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "provider",
        "request_id",
        "safety_identifier",
        "session_id",
        "store",
        "stream_reasoning",
        "tags",
        "trace_id",
        "usage",
        "user",
    }
)
"""Fields of OpenAI's, of other servers' and of gateways' that cannot change the answer: nothing is done with them."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1, 1.0),
    "conversation": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "enable_thinking": (),
    "function_call": (),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "mirostat": (0,),
    "moderation": (),
    "n": (1, 1.0),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking": (),
    "top_a": (0, 0.0),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that would change the answer and are not supported, with the values that change nothing."""


WORD = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MOST_WORDS = 32  # that the header of what was skipped names


def word(name: object) -> str:
    """A type or a name as it may stand in a header, whatever a client has sent."""
    return name if isinstance(name, str) and WORD.fullmatch(name) else "unknown"


class Unknown:
    """Collects the fields that are not known of a request's parts, each by its path without numbers."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def look(self, given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        if not given.keys() <= known:
            self.found.update(f"{where}.{word(n)}" for n in given.keys() - known if given[n] is not None)


def one_or_many(value: object) -> str:
    """Discriminates a field that is a string or a list, so that an error speaks of the one that was meant."""
    return "many" if isinstance(value, list) else "one"


def without_nulls(given: Any) -> Any:
    """An object without those of its members that are null."""
    if isinstance(given, dict) and None in given.values():
        return {name: value for name, value in given.items() if value is not None}
    return given


NULL_IS_ABSENT = BeforeValidator(without_nulls)
"""Marks an object below the top level of a body whose members count as absent where they are null."""


class Body(BaseModel):
    """Base of every request body: no coercion (`"1"` is not a number), no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Lenient(Body):
    """An object in which unknown fields change nothing."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidRequestError that names the position of a syntax error, or the field
    that is nested deeper than can be written again.
    """
    try:
        body = _loads(raw)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno} (position {error.pos})"
        raise InvalidRequestError(f"The request body is not valid JSON: {error.msg} at {where}") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object")
    for name, value in body.items():
        try:
            orjson.dumps([[[[value]]]])  # 254 levels at most; in a request's digest it stands a few further down
        except TypeError:
            raise InvalidRequestError(f"'{name}' is nested too deeply", name) from None
    return body


def _loads(raw: bytes) -> Any:
    """The JSON in `raw`, with U+FFFD for each half of a surrogate pair.

    JavaScript's clients send a half where they cut a text inside of a pair, and would send it again with each turn.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = ESCAPE.sub(lambda found: rb"\ufffd" if found["half"] else found[0], raw)
        if whole == raw:
            raise
    return orjson.loads(whole)


def parse_long(raw: bytes, most: int, parse: Callable[..., T], arguments: Sequence[object]) -> T:
    """What `parse` makes of a long body.

    Raises RefusedError (413) for JSON with more than `most` values in it, before any of them is made: a value of two
    bytes takes a hundred in memory. What stands between values is counted, outside of texts.
    """
    if _signs(raw) > most and _signs(TEXT.sub(b"", raw)) > most:
        raise RefusedError(Refusal.TOO_LARGE, f"The request body has more than {most} values")
    return parse(raw, *arguments)


def _signs(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def validate(model: type[Model], body: Mapping[str, Any]) -> Model:
    """`body` as a `model`. A field that is null counts as absent, further in where `NULL_IS_ABSENT` stands.

    Raises InvalidRequestError for the first thing that is wrong, with the field's path.
    """
    given: dict[str, Any] = {}
    for name, value in body.items():
        known = name in model.model_fields
        if value is None or (name in IGNORED and not known):
            continue
        if name in NEUTRAL and not known:
            _require_neutral(name, value)
            continue
        given[name] = value
    try:
        return model.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        if any(each["type"] == "int_type" and isinstance(each["input"], float) for each in details):
            with contextlib.suppress(ValidationError):
                return model.model_validate(_whole(given))  # to JSON, 5.0 is an integer as well
        raise _translate(model, error.errors(include_url=False), given) from None


def _whole(value: Any) -> Any:
    """`value` with integers for all numbers in it that are some."""
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


def _translate(model: type[Body], details: Sequence[ErrorDetails], given: Mapping[str, Any]) -> InvalidRequestError:
    detail = details[0]
    if detail["type"] == "missing":  # perhaps because of a misspelling, which says more
        detail = next((item for item in details if item["type"] == "extra_forbidden"), detail)
    kind = detail["type"]
    path = _path(detail["loc"], given, missing=kind == "missing")
    if kind == "extra_forbidden":
        return InvalidRequestError(f"Unrecognized request argument supplied: {path}{_nearest(model, path)}", path)
    if kind == "missing":
        return InvalidRequestError(f"Missing required parameter: '{path}'", path)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = f"{path}.{detail['ctx']['discriminator'].strip(chr(39))}"
        if kind == "union_tag_not_found":
            return InvalidRequestError(f"Missing required parameter: '{path}'", path)
        expected = detail["ctx"]["expected_tags"]
        return InvalidRequestError(f"Invalid value for '{path}': '{detail['ctx']['tag']}', not one of {expected}", path)
    if kind == "literal_error":
        sent, expected = word(detail["input"]), detail["ctx"]["expected"]
        return InvalidRequestError(f"Invalid value for '{path}': '{sent}', not {expected}", path)
    message = detail["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"Invalid value for '{path}': {message[:1].lower()}{message[1:]}", path)


def _path(location: Sequence[int | str], given: object, *, missing: bool) -> str:
    """`location` without the names of union branches, which pydantic mixes in and a client never wrote.

    The last step of a `missing` field is not in what was `given`.
    """
    parts: list[str] = []
    here = given
    for index, step in enumerate(location):
        last = index + 1 == len(location)
        if isinstance(here, dict) and step in here:  # noqa: SIM114 (types are lost in the joint form)
            here = here[step]
        elif isinstance(here, list) and isinstance(step, int):
            here = here[step]
        elif not (last and missing):
            continue
        parts.append(str(step))
    return ".".join(parts)


def _nearest(model: type[Body], path: str) -> str:
    near = get_close_matches(path, [*model.model_fields, *NEUTRAL], n=1, cutoff=0.75) if "." not in path else ()
    return f" (did you mean '{near[0]}'?)" if near else ""
