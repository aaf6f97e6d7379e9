"""The common part of all generation requests: the sampling fields, the program's names, and the resulting turn.

A field that a request leaves out has the value of the checkpoint's generation settings (`ModelCard.defaults`), or else
OpenAI's default: temperature 1 and top_p 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, WithJsonSchema
from typing_extensions import TypeAliasType

from holdfast.replicas.errors import InvalidRequestError, too_long
from holdfast.replicas.kv.tags import Hint
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, ModelCard, RawPrompt, SessionTurn
from holdfast.replicas.types import Priority
from holdfast.router.protocol.body import MOST_WORDS, NULL_IS_ABSENT, Body, text_or
from holdfast.router.protocol.errors import CHAT_FIELDS, FieldNames, Refusal, RefusedError
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_ANSWERS = 128  # of one request, to all of its prompts
MAX_LOGPROBS = 20
REST_OF_CONTEXT = -1
INT64 = 2**63
FLEX = "flex"  # OpenAI's service tier for requests that may wait
MAX_DIGITS = 19  # of an INT64; Python refuses to read thousands of digits
MAX_IDENTIFIER = 256

Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Identifier = Annotated[
    str, Field(min_length=1, max_length=MAX_IDENTIFIER), WithJsonSchema({"type": "string", "pattern": "^[ -~]{1,256}$"})
]
Name = Annotated[str, Field(max_length=MAX_IDENTIFIER)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PriorityField: TypeAlias = Literal["interactive", "batch"] | int
# These three have names in `/openapi.json`, where the limits of the served models are put in.
ModelName = TypeAliasType("ModelName", str)
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0)])
LogitBias = TypeAliasType("LogitBias", dict[str, Annotated[float, Field(ge=-100, le=100)]])

_STOP = {"type": "string", "minLength": 1}
Stops: Any = Annotated[
    text_or(list[str]), WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]})
]


class StreamOptions(Body):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: chunks are never padded


class SamplingBody(Body):
    """The sampling fields of every API."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0  # 0: the most likely token
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0  # until then neither the model's end nor a stop ends the reply
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0


class QuestionFields(SamplingBody):
    """Fields that a standing question of a session has too."""

    model: ModelName
    stop: Stops = Field(default_factory=list)
    timeout: Seconds | None = None  # how long the client waits
    priority: PriorityField | None = None  # ours: the class. Other servers' numbers are accepted and not used
    service_tier: str | None = None  # "flex": batch


class ReplyFields(QuestionFields):
    """Fields that a query of a session has too."""

    stream: bool = False
    stream_options: Annotated[StreamOptions, NULL_IS_ABSENT] | None = None
    fresh_draw: bool = False  # ours: a random seed if none is given, and no cached answer


class GenerationBody(ReplyFields):
    """Fields of OpenAI's endpoints that generate."""

    program_id: Identifier | None = None
    previous_response_id: Identifier | None = None
    prompt_cache_key: Name | None = None  # "": none
    program_end: bool = False  # the program ends with this turn
    cache_salt: Name | None = None  # vLLM's; "": none
    kv_hints: KvHints | None = None  # vLLM's: which parts of the prompt the cache should keep


B = TypeVar("B", bound=ReplyFields)


@dataclass(frozen=True, slots=True)
class ClaimedIds:
    """The ids in a body that may name the program, the strongest first."""

    program_id: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One more answer of a request. `again`: it has the same prompt as the answer before it."""

    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    again: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A validated request, the same in every API."""

    model: ModelCard
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    ids: ClaimedIds = ClaimedIds()
    program_end: bool = False
    prefill_id: str = ""
    session: SessionTurn | None = None  # an operation of this session, which is the program
    hints: tuple[Hint, ...] = ()  # which parts of the prompt the cache should keep
    others: tuple[Choice, ...] = ()  # the answers besides the one to `prompt`
    skipped: tuple[str, ...] = ()  # unknown fields, and parts that no model here can read
    priority: Priority | None = None  # None: the tenant's usual class
    timeout_s: float | None = None
    cache_salt: str = ""  # caches find only entries with the same salt
    thoughts: bool = True  # False: reasoning is left out of the answer
    fresh_draw: bool = False  # computed for this request alone, from a random seed unless `sampling` has one
    fields: FieldNames = CHAT_FIELDS  # the names of fields in errors


def check_length(turn: Turn) -> Turn:
    """`turn`. Raises ContextLengthError for a prompt that cannot fit, however it is tokenized.

    White space around a message does not count: templates may leave it out.
    """
    for prompt in (turn.prompt, *(other.prompt for other in turn.others)):
        _check_length(prompt, turn.model, turn.fields)
    return turn


def _check_length(prompt: ChatPrompt | RawPrompt, card: ModelCard, fields: FieldNames) -> None:
    if isinstance(prompt, RawPrompt) and not isinstance(prompt.content, str):
        least = len(prompt.content)
    elif not card.longest_token:
        return
    else:
        texts = [prompt.content] if isinstance(prompt, RawPrompt) else [m.get("content") for m in prompt.messages]
        least = sum(len(text.strip()) for text in texts if isinstance(text, str)) // card.longest_token
    if least > card.context_length:
        field = "prompt" if isinstance(prompt, RawPrompt) else fields.of("messages")
        raise too_long(card.context_length, f"the prompt has at least {least} tokens", field)


def several(turn: Turn, prompts: Sequence[ChatPrompt | RawPrompt], n: int) -> Turn:
    """`turn` with `n` answers to each of the prompts; its own answer is the first one.

    Each choice draws with noise of its own. Raises InvalidRequestError for more than `MAX_ANSWERS`.
    """
    if len(prompts) * n > MAX_ANSWERS:
        raise InvalidRequestError(f"'n' times the number of prompts is {len(prompts) * n}, above {MAX_ANSWERS}", "n")
    choices = [Choice(p, replace(turn.sampling, choice=i), again=i > 0) for p in prompts for i in range(n)]
    return replace(turn, others=tuple(choices[1:]))


def with_defaults(body: B, card: ModelCard) -> B:
    """`body` with the model's own sampling defaults for the fields that the client left out."""
    missing = {name: value for name, value in card.defaults.items() if name not in body.model_fields_set}
    return body.model_copy(update=missing) if missing else body


def find_model(name: str, models: Sequence[ModelCard]) -> ModelCard:
    """The card of model `name`. Raises RefusedError (404)."""
    for card in models:
        if card.name == name:
            return card
    served = ", ".join(f"'{card.name}'" for card in models)
    raise RefusedError(Refusal.NO_MODEL, f"The model '{name}' does not exist; served: {served}", "model")


def build_turn(
    body: ReplyFields, prompt: ChatPrompt | RawPrompt, card: ModelCard, sampling: Sampling, *, prefilled: bool = False
) -> Turn:
    """The turn of a body. `prefilled`: the messages of a prefill come before its own.

    Raises InvalidRequestError, naming the field.
    """
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("'stream_options' is only allowed with 'stream': true", "stream_options")
    turn = Turn(
        model=card,
        prompt=prompt,
        sampling=sampling,
        stop=read_stops(body.stop),
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        skipped=body.skipped[:MOST_WORDS],
        priority=_priority(body.priority, body.service_tier),
        timeout_s=body.timeout,
        fresh_draw=body.fresh_draw,
    )
    if not isinstance(body, GenerationBody):
        return turn
    hints = read_hints(body.kv_hints)
    if not prefilled:
        check_ranges(hints, len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0)
    return replace(
        turn,
        ids=ClaimedIds(body.program_id, body.previous_response_id, body.prompt_cache_key or None),
        program_end=body.program_end,
        cache_salt=body.cache_salt or "",
        hints=hints,
    )


def _priority(value: PriorityField | None, service_tier: str | None) -> Priority | None:
    if isinstance(value, str):
        return Priority(value)
    return Priority.BATCH if service_tier == FLEX else None


def build_sampling(
    body: SamplingBody,
    card: ModelCard,
    max_tokens: int | None,
    max_field: str = "max_tokens",
    logprobs: int | None = None,
) -> Sampling:
    """Sampling as the engine takes it; `max_field` is the client's name for `max_tokens`.

    A reply that may be longer than the context ends where the context ends. Raises InvalidRequestError.
    """
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError(f"'min_tokens' {body.min_tokens} is more than '{max_field}'", "min_tokens")
    if body.min_tokens > card.context_length:
        message = f"'min_tokens' is {body.min_tokens}, more than the context of {card.context_length} tokens"
        raise InvalidRequestError(message, "min_tokens")
    check_tokens(body.stop_token_ids, card, "stop_token_ids")
    greedy = body.top_p == 0
    return Sampling(
        max_tokens=REST_OF_CONTEXT if max_tokens is None else min(max_tokens, card.context_length),
        temperature=0.0 if greedy else body.temperature,
        top_p=1.0 if greedy else body.top_p,
        top_k=min(max(body.top_k, 0), card.vocabulary),
        min_p=body.min_p,
        seed=body.seed,
        logprobs=logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_bias(body.logit_bias, card),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens,
    )


def check_tokens(tokens: Sequence[int], card: ModelCard, field: str) -> None:
    """Raises InvalidRequestError for an id outside the model's vocabulary."""
    if tokens and (min(tokens) < 0 or max(tokens) >= card.vocabulary):
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < card.vocabulary)
        path = f"{field}.{index}"
        raise InvalidRequestError(f"'{path}': {tokens[index]} is not a token id below {card.vocabulary}", path)


def _bias(values: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in values.items():
        valid = key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS and int(key) < card.vocabulary
        if not valid:
            message = f"'logit_bias': key {key!r} is not a token id below {card.vocabulary}"
            raise InvalidRequestError(message, f"logit_bias.{key}")
        bias[int(key)] = value
    return dict(sorted(bias.items()))


def read_stops(value: str | Sequence[str]) -> tuple[str, ...]:
    """Raises InvalidRequestError for too many, and for an empty one."""
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    if not all(stops):
        raise InvalidRequestError("'stop' must not contain an empty string", "stop")
    return stops
