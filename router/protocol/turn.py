"""What every kind of generation request has in common: sampling fields, who asks, and the turn they become.

`chat` and `completions` add their prompts. Where a request says nothing, sampling is as the checkpoint's own generation
settings have it (`ModelCard.defaults`), and where they do not, as at OpenAI: temperature 1 and top_p 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from holdfast.replicas.errors import InvalidRequestError, too_long
from holdfast.replicas.kv.tags import Hint
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import ChatPrompt, ModelCard, RawPrompt, SessionTurn
from holdfast.replicas.types import Priority
from holdfast.router.protocol.body import NULL_IS_ABSENT, Body, Lenient, one_or_many, word
from holdfast.router.protocol.errors import Refusal, RefusedError
from holdfast.router.protocol.fields import CHAT_FIELDS, FieldNames

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_ANSWERS = 128  # of one request, for all of its prompts
REST_OF_CONTEXT = -1
INT64 = 2**63
FLEX = "flex"  # OpenAI's tier of what may wait
MAX_DIGITS = 19  # of an INT64; Python reads no number of thousands

MAX_IDENTIFIER = 256
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Identifier = Annotated[
    str, Field(min_length=1, max_length=MAX_IDENTIFIER), WithJsonSchema({"type": "string", "pattern": "^[ -~]{1,256}$"})
]
TokenId = Annotated[int, Field(ge=0)]


AskedPriority: TypeAlias = Literal["interactive", "batch"] | int  # of a `Priority`

G = TypeVar("G", bound="GenerationBody")


class StreamOptions(Lenient):
    include_usage: bool = False
    event_names: bool = False  # ours: a chunk that closes a call is an event with a name of its own
    include_obfuscation: bool = False  # accepted: chunks are not padded either way


class SamplingBody(Body):
    """How tokens are drawn, in every format."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0  # 0: the most likely token
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0  # before so many neither the model's end nor a stop ends the reply
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    fresh_draw: bool = False  # ours: a random seed where there is none, and no answer of another request


class GenerationBody(SamplingBody):
    """Fields of OpenAI's endpoints that generate."""

    model: str

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[Annotated[str, Tag("one")] | Annotated[list[str], Tag("many")], Discriminator(one_or_many)] = Field(
        default_factory=list
    )

    stream: bool = False
    stream_options: Annotated[StreamOptions, NULL_IS_ABSENT] | None = None

    program_id: Identifier | None = None
    previous_response_id: Identifier | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_IDENTIFIER)] | None = None  # "": none
    program_end: bool = False  # the program will not come back after this turn
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # seconds that the client waits
    cache_salt: Annotated[str, Field(max_length=MAX_IDENTIFIER)] | None = None  # vLLM's; "": none
    priority: AskedPriority | None = None  # ours: the class; other servers' numbers count for nothing
    service_tier: str | None = None  # "flex": batch


@dataclass(frozen=True, slots=True)
class ClaimedIds:
    """The ids in a body that may name the program, in the order in which they count."""

    program_id: str | None
    previous_response_id: str | None
    prompt_cache_key: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Another answer that a request asks for. `again`: to the prompt of the one before."""

    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    again: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A validated request, the same for every format.

    `session`: it is an operation of that, which is its program. `hints`: what parts of its prompt are worth. `others`:
    the answers that it asks for besides the one to `prompt`. `skipped`: the unknown fields that it has. `priority`: the
    class that it asks for; None: its tenant's usual one. `timeout_s`: how long its client waits, as its body says.
    `cache_salt`: caches find what came with the same, and nothing else. `thoughts`: they are told, not left out.
    `fresh_draw`: the answer is computed for this request alone, from a random seed unless `sampling` has one. `fields`
    are the names by which errors tell the request's own fields.
    """

    model: ModelCard
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ids: ClaimedIds
    program_end: bool = False
    event_names: bool = False
    prefill_id: str = ""
    session: SessionTurn | None = None
    hints: tuple[Hint, ...] = ()
    others: tuple[Choice, ...] = ()
    skipped: tuple[str, ...] = ()
    priority: Priority | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    thoughts: bool = True
    fresh_draw: bool = False
    fields: FieldNames = CHAT_FIELDS


def check_length(turn: Turn) -> Turn:
    """`turn` again. Raises ContextLengthError for a prompt that no tokenizing could make fit: before it costs anything.

    White space around a message's content counts for nothing, as templates may leave it out.
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
    """`turn`, with `n` answers to each of the prompts. Its own is the first of them.

    Choices but the first have their noise from seeds of their own. Raises InvalidRequestError for more than
    `MAX_ANSWERS`.
    """
    if len(prompts) * n > MAX_ANSWERS:
        raise InvalidRequestError(f"'n' times the number of prompts is {len(prompts) * n}, above {MAX_ANSWERS}", "n")
    asked = [Choice(p, replace(turn.sampling, choice=i), again=i > 0) for p in prompts for i in range(n)]
    return replace(turn, others=tuple(asked[1:]))


def with_defaults(body: G, card: ModelCard) -> G:
    """`body` with what the model's own files say of sampling, where the client says nothing."""
    missing = {name: value for name, value in card.defaults.items() if name not in body.model_fields_set}
    return body.model_copy(update=missing) if missing else body


def find_model(name: str, models: Sequence[ModelCard]) -> ModelCard:
    """The card of model `name`. Raises RefusedError (404)."""
    for card in models:
        if card.name == name:
            return card
    served = ", ".join(f"'{card.name}'" for card in models)
    raise RefusedError(Refusal.NO_MODEL, f"The model '{name}' does not exist; served: {served}", "model")


def build_turn(body: GenerationBody, prompt: ChatPrompt | RawPrompt, card: ModelCard, sampling: Sampling) -> Turn:
    """The turn that `body` asks for. Raises InvalidRequestError for stops or stream options that make no sense."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("'stream_options' is only allowed with 'stream': true", "stream_options")
    return Turn(
        model=card,
        prompt=prompt,
        sampling=sampling,
        stop=_stops(body.stop),
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        ids=ClaimedIds(body.program_id, body.previous_response_id, body.prompt_cache_key or None),
        program_end=body.program_end,
        event_names=body.stream_options is not None and body.stream_options.event_names,
        skipped=_unknown_options(body),
        priority=priority_of(body.priority, body.service_tier),
        timeout_s=body.timeout,
        cache_salt=body.cache_salt or "",
        fresh_draw=body.fresh_draw,
    )


def priority_of(given: AskedPriority | None, service_tier: str | None) -> Priority | None:
    """The class that a body asks for; None: it says nothing of that."""
    if isinstance(given, str):
        return Priority(given)
    return Priority.BATCH if service_tier == FLEX else None


def _unknown_options(body: GenerationBody) -> tuple[str, ...]:
    extra = body.stream_options.model_extra if body.stream_options is not None else None
    return tuple(f"stream_options.{word(name)}" for name in extra or ())


def build_sampling(
    body: GenerationBody, card: ModelCard, logprobs: int | None, max_tokens: int | None, max_field: str
) -> Sampling:
    """Sampling as the engine takes it; `max_field` is the name under which the client gave `max_tokens`.

    A reply that may be longer than the context is as long as the prompt leaves room for. Raises InvalidRequestError.
    """
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError(f"'min_tokens' {body.min_tokens} is more than '{max_field}'", "min_tokens")
    if body.min_tokens > card.context_length:
        told = f"'min_tokens' is {body.min_tokens}, more than the context of {card.context_length} tokens"
        raise InvalidRequestError(told, "min_tokens")
    check_tokens(body.stop_token_ids, card, "stop_token_ids")
    greedy = body.top_p == 0
    return Sampling(
        max_tokens=REST_OF_CONTEXT if max_tokens is None else min(max_tokens, card.context_length),
        temperature=0.0 if greedy else body.temperature,
        top_p=1.0 if greedy else body.top_p,
        top_k=min(max(body.top_k, 0), card.vocabulary),  # no more than all
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
        where = f"{field}.{index}"
        raise InvalidRequestError(f"'{where}': {tokens[index]} is not a token id below {card.vocabulary}", where)


def _bias(given: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        known = key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS and int(key) < card.vocabulary
        if not known:
            message = f"'logit_bias': key {key!r} is not a token id below {card.vocabulary}"
            raise InvalidRequestError(message, f"logit_bias.{key}")
        bias[int(key)] = value
    return dict(sorted(bias.items()))


def _stops(given: str | Sequence[str]) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"'stop' has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    if not all(stops):
        raise InvalidRequestError("'stop' must not contain an empty string", "stop")
    return stops
