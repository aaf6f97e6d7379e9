"""The entrance to the text side of one model: prompts to token ids, and token ids to the pieces of a reply.

Used from one asyncio thread.
"""

import json
import logging
import marshal
import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np

from holdfast.replicas.config import EngineConfig, Guarantee
from holdfast.replicas.constraints.compiler import MOST_GRAMMARS, Compiler, leave_event_loop
from holdfast.replicas.constraints.grammar import ReplyRule, reply_rule
from holdfast.replicas.constraints.guidance import AVAILABLE, CallGuard, Vocabulary
from holdfast.replicas.constraints.matcher import AnyTokens, Matcher
from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, RawPrompt, TextDelta
from holdfast.replicas.stats import TextStats
from holdfast.replicas.text.calls.formats import ENDS, MARKERS, ToolFormat
from holdfast.replicas.text.calls.tracker import READERS, CallTracker
from holdfast.replicas.text.decode import Pieces, StreamDecoder
from holdfast.replicas.text.encode import LONG, Encoder, Entry, LongTexts, PendingText, TokenCache, common_start
from holdfast.replicas.text.reasoning import (
    BLOCKS,
    CHANNELS,
    AfterThinking,
    ChannelReader,
    ThinkingReader,
    TrailingCalls,
    thinking_reader,
)
from holdfast.replicas.text.render import UNKNOWN, Rendered, Renderer, continuations, message_starts
from holdfast.replicas.text.reply import Reply, StopStrings, prompt_logprobs
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix

log = logging.getLogger(__name__)

_MANY_TOOLS = 12  # reading so many would hold up the event loop
_CACHED_CHARACTERS = 64  # of texts in the token cache for each cell: a token has 3 to 5, and texts outlive their cells


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as int32 token ids. `text` is a chat prompt as rendered (`mark`: see `Rendered`), None for others.

    `starts`: the token at which each message of a chat begins, as far as the text shows that; see `message_starts`.
    """

    tokens: TokenIds
    text: str | None = None
    mark: str = ""
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraints:
    """The rules that a reply must follow.

    `matcher` holds the whole reply. `declared` matches calls of declared tools: a call of another tool that got out
    before it was known for a call is written again under it. `loose`: calls are not guaranteed, or only in part.
    """

    matcher: Matcher | None = None
    declared: Matcher | None = None
    loose: bool = False

    def guaranteed(self) -> bool:
        """Whether calls of this reply are whole: there is a grammar, and it was not given up."""
        return self.matcher is not None and not self.matcher.given_up


FREE = Constraints()


@dataclass(frozen=True, slots=True)
class _RuleRequest:
    """A prompt without its messages. Equal for prompts with the same rule: one scope, the same tools and choice."""

    key: Hashable
    prompt: ChatPrompt = field(compare=False)


class TextSide:
    """Rendering, tokenizing and reading replies for one model.

    `tokenizer` is a transformers tokenizer with a tokenizer.json; `tool_format` overrides what the chat template shows.
    `eos`: the ids that end a reply, with the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any, config: EngineConfig, tool_format: str = "", eos: frozenset[int] = frozenset()
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("the model's tokenizer has no tokenizer.json", "model")
        self.tokenizer, self._config = tokenizer, config
        self.renderer = Renderer(tokenizer, tool_format)
        # Without end where the engine's cells are not known yet.
        characters = _CACHED_CHARACTERS * ((config.cells + config.host_cells) or math.inf)
        self.cache = TokenCache(tokenizer, characters if config.has("tokenize_cache") else 0)
        added = self.cache.added
        self._long = LongTexts(backend, added, config.context_length)
        self.pieces = Pieces(backend)
        self.vocabulary = len(tokenizer)
        template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
        self.tool_format = self.renderer.tool_format
        if self.renderer.tools_as_text:
            log.warning(
                "the chat template takes no tools: they are told in the system prompt, in Hermes' format; "
                "engine.chat_template names a template that takes tools"
            )
        self._writes_calls = self.tool_format is not ToolFormat.NONE
        if not self._writes_calls and not tool_format and "tools" in template:
            log.warning("the chat template takes tools, but its calls are in no format that is read: they come as text")
        self._hidden = added.special_ids | set(tokenizer.all_special_ids)
        self._markers = frozenset(added.ids[text] for text in MARKERS[self.tool_format] if text in added.ids)
        self._channels = CHANNELS.get(self.tool_format)
        block = next((block for block in BLOCKS if block.closer in template), None)
        self._block = None if self._channels else block
        around = (self._block.opener, self._block.closer) if self._block else ()
        self._think_ids = [added.ids[text] for text in around if text in added.ids]
        ends = {added.ids[text] for text in ENDS.get(self.tool_format, ()) if text in added.ids}
        self.eos = eos | ends | ({tokenizer.eos_token_id} - {None})
        lines = (self.cache.encoder.encode("\n" * count, at_start=False).tolist() for count in (1, 2, 3))
        self._line_ends = frozenset(ids[0] for ids in lines if len(ids) == 1)
        self._compiler = Compiler(
            lambda: Vocabulary(tokenizer, frozenset(self._hidden - self._markers), frozenset(self.eos)),
            self.tool_format,
        )
        self.unguarded = 0  # replies whose calls are not guaranteed, or only in their names
        self.rewritten = 0  # replies in which a call of an undeclared tool was written again
        self.empty = 0  # replies without content and calls
        self.stopped = 0  # replies ended where their tool calls did, before the model ended them
        self.saved = 0  # tokens that these would have drawn, an estimate
        self._guarantee: Guarantee = config.tools_guarantee if AVAILABLE else "off"
        if self._guarantee != config.tools_guarantee:
            log.warning("calls are not guaranteed: the package llguidance is not installed")
        self._rule = lru_cache(MOST_GRAMMARS)(self._rule_of)

    def prepare(self) -> None:
        """Read the vocabulary now, in seconds, instead of at the first request with tools or JSON."""
        self._compiler.prepare()
        if self.tokenizer.chat_template:
            _ = self.renderer.most_parts

    def close(self) -> None:
        """Refuse long texts from now on, including those that wait for their turn."""
        self._long.close()

    @property
    def longest_token(self) -> int:
        """The most characters of one token; 0: no limit is known."""
        return self._long.token_characters

    @property
    def stats(self) -> TextStats:
        """Counts of tokenized characters and of replies."""
        counts = (self.stopped, self.saved, self.rewritten, self.unguarded, self.empty)
        return TextStats(self.cache.reused, self.cache.tokenized, *counts)

    # ---- prompts ----

    async def encoded(self, prompt: ChatPrompt | RawPrompt, scope: str = "", program: str = "") -> Encoded:
        """As `encode`. A long text is tokenized on a thread.

        Raises ContextLengthError at once for a text that cannot fit, and UnavailableError for a long text whose turn
        comes after `close`.
        """
        if isinstance(prompt, RawPrompt):
            content = prompt.content
            if not isinstance(content, str) or len(content) < LONG:
                return self.encode(prompt)
            return _plain(await self._long.run(partial(_text_ids, content), len(content), scope))
        rendered = await self._rendered(prompt, scope)
        pending = self.cache.begin(rendered.text, rendered.mark, scope, program)
        entry = await self._tokenized(pending)
        return Encoded(self.cache.end(pending, entry), rendered.text, rendered.mark, self._starts(prompt, entry))

    async def beginning(self, prompt: ChatPrompt, scope: str = "", program: str = "") -> Encoded:
        """The sure tokens that every prompt that continues this one begins with.

        Its text is kept, so that only the end of the coming prompt has to be tokenized. Raises as `encoded`.
        """
        common = _common([await self._rendered(each, scope) for each in continuations(prompt)])
        pending = self.cache.begin(*common, scope, program)
        return self._sure(prompt, pending, await self._tokenized(pending))

    def preamble(self, prompt: ChatPrompt, scope: str) -> TokenIds:
        """The tokens of `beginning`, at once. Raises InvalidRequestError."""
        pending = self.cache.begin(*_common([self.renderer.render(each) for each in continuations(prompt)]), scope)
        return self._sure(prompt, pending, self.cache.tokenize(pending, self.cache.encoder)).tokens

    def encode(self, prompt: ChatPrompt | RawPrompt, scope: str = "", program: str = "") -> Encoded:
        """The prompt's token ids. They begin with the ids of the earlier turns of its `program`, as generated.

        Other scopes (tenants) share nothing with it. Plain text gets the tokens the model expects around it (beginning
        of sequence), and its special tokens count. Raises InvalidRequestError for an empty prompt, ids outside the
        vocabulary, and messages the template refuses.
        """
        if isinstance(prompt, ChatPrompt):
            rendered = self.renderer.render(prompt)
            tokens = self.cache.encode(rendered.text, rendered.mark, scope, program)
            return Encoded(tokens, rendered.text, rendered.mark)
        content = prompt.content
        return _plain(_text_ids(content, self.cache.encoder) if isinstance(content, str) else self._ids(content))

    async def part(self, prompt: ChatPrompt | RawPrompt, *, begins: bool, reply: bool, scope: str = "") -> TokenIds:
        """Ids to append to a session's history: text and ids as they are, messages as in `Renderer.part`.

        No tokens are put around a text, and its special tokens count. A long text is tokenized on a thread. Raises as
        `encoded`.
        """
        if isinstance(prompt, ChatPrompt):
            rendered = self.renderer.part(prompt, begins=begins, reply=reply)
            text, mark = rendered.text, rendered.mark
        elif isinstance(prompt.content, str):
            text, mark = prompt.content, ""
            _check_text(text)
        else:
            return _plain(self._ids(prompt.content)).tokens

        def work(encoder: Encoder) -> TokenIds:
            return encoder.encode(text, mark, at_start=begins)

        long = len(text) >= LONG
        return _plain(await self._long.run(work, len(text), scope) if long else work(self.cache.encoder)).tokens

    def closing(self, prompt: ChatPrompt | RawPrompt) -> TokenIds:
        """Ids that the template puts behind a reply to these messages; none for text."""
        if not isinstance(prompt, ChatPrompt):
            return NO_TOKENS
        return self.cache.encoder.encode(self.renderer.closing(prompt.template_kwargs), at_start=False)

    def detokenize(self, tokens: Any) -> str:
        """The text of token ids, special tokens included. Raises InvalidRequestError for unknown ids."""
        return str(self.tokenizer.backend_tokenizer.decode(self._ids(tokens).tolist(), skip_special_tokens=False))

    async def _rendered(self, prompt: ChatPrompt, scope: str) -> Rendered:
        return await self.renderer.rendered(prompt, lambda work: self._long.run(lambda _: work(), 0, scope))

    async def _tokenized(self, pending: PendingText) -> Entry:
        work, length = partial(self.cache.tokenize, pending), len(pending.text) - pending.char
        return await self._long.run(work, length, pending.scope) if length >= LONG else work(self.cache.encoder)

    def _sure(self, prompt: ChatPrompt, pending: PendingText, entry: Entry) -> Encoded:
        """The tokens of a text that stay the same for every continuation; all of them if the text is a whole prompt."""
        text = pending.text
        tokens = self.cache.end(pending, entry)
        if len(continuations(prompt)) > 1:
            for each in UNKNOWN:
                more = self.cache.begin(text + each, pending.mark, pending.scope, pending.program)
                tokens = tokens[: common_prefix(tokens, self.cache.tokenize(more, self.cache.encoder).ids)]
            tokens = tokens[: len(entry.ids) - self.cache.unsure(text)]
        if not len(tokens):
            raise InvalidRequestError("no part of the prompt is fixed before its next message", "messages")
        return Encoded(tokens, text, pending.mark, self._starts(prompt, entry))

    def _starts(self, prompt: ChatPrompt, entry: Entry) -> tuple[int, ...]:
        """The tokens at which the messages of a prompt begin."""
        if not self._config.has("kv_tags"):
            return ()
        places = (bisect_right(entry.chars, char) - 1 for char in message_starts(prompt.messages, entry.text))
        return tuple(entry.tokens[place] if place >= 0 else 0 for place in places)

    def _ids(self, tokens: Any) -> TokenIds:
        try:
            ids = np.array([index(token) for token in tokens], np.int64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError("token ids must be integers", "prompt") from None
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocabulary):
            raise InvalidRequestError(f"token ids must be from 0 to {self.vocabulary - 1}", "prompt")
        return ids.astype(np.int32)

    # ---- replies ----

    def constraints(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Constraints:
        """The rules for a reply to `prompt`. Scopes do not share grammars.

        Compiles an unknown grammar, for milliseconds; on an event loop's thread that raises NotCompiledError instead.
        Raises InvalidRequestError, naming the field, for a schema or a choice that cannot be followed.
        """
        if not isinstance(prompt, ChatPrompt):
            return FREE
        form = prompt.output and (_digest([prompt.output.schema]), prompt.output.strict)
        request = replace(_callable(prompt), messages=())
        key = (scope, prompt.tool_choice, prompt.forced_tool, prompt.parallel_tool_calls, form, _digest(request.tools))
        rule = self._rule(_RuleRequest(key, request))
        if rule is None and prompt.tools and prompt.tool_choice == "none" and self._writes_calls:
            return Constraints(
                self._compiler.without_calls(frozenset(str(each.get("name")) for each in _functions(prompt)))
            )
        if rule is None:
            return FREE
        try:
            matcher = self._compiler.matcher(rule, scope)
        except InvalidRequestError:
            if rule.strict or not rule.in_text:
                raise
            return Constraints(loose=True)  # the client did not request it
        if not isinstance(matcher, CallGuard):
            return Constraints(matcher)
        return Constraints(matcher, matcher.calls if matcher.bare else None, matcher.loose)

    def _rule_of(self, request: _RuleRequest) -> ReplyRule | None:
        """Read the rule of a prompt, once for all turns of an agent: 14 tools take half a millisecond.

        Many tools are read away from the event loop: NotCompiledError there.
        """
        if len(request.prompt.tools) >= _MANY_TOOLS:
            leave_event_loop(request.prompt)
        return reply_rule(request.prompt, self._guarantee, self._writes_calls)

    def after_thinking(self, request: GenerateRequest, encoded: Encoded, matcher: Matcher | None) -> Matcher | None:
        """`matcher` of the reply's content as one of the whole reply, thinking included, which has its budget."""
        prompt = request.prompt
        thinking = self._thinking(prompt, encoded)
        budget = prompt.thinking_budget if isinstance(prompt, ChatPrompt) else None
        unheld = matcher is None and budget is None
        if unheld or not isinstance(thinking, ThinkingReader) or len(self._think_ids) < 2:
            return matcher
        opener, closer = self._think_ids
        held = _wants_content(prompt)
        return AfterThinking(
            matcher or AnyTokens(self.vocabulary),
            opener,
            closer,
            thinking.begun,
            self.eos if held else frozenset(),
            lambda token: self.pieces.of(token).isspace(),
            self._line_ends if held else frozenset(),
            -1 if budget is None else budget,
        )

    def reply(self, request: GenerateRequest, encoded: Encoded, limits: Constraints = FREE) -> Reply:
        """A reader for the reply to `request`, whose prompt is `encoded` and which the engine holds to `limits`."""
        prompt = request.prompt
        schemas = _declared(prompt)
        names = frozenset(schemas)
        thinking = self._thinking(prompt, encoded)
        shown = self._markers if names or isinstance(thinking, ChannelReader) else frozenset[int]()
        shown |= frozenset(self._think_ids if isinstance(thinking, ThinkingReader) else ())
        hidden = frozenset(self._hidden - shown) | request.sampling.stop_token_ids

        def call_id(number: int) -> str:
            digest = blake2b(f"{request.request_id}/{number}".encode(), digest_size=12).hexdigest()
            # Mistral's templates take ids of nine letters and digits only.
            return digest[:9] if self.tool_format is ToolFormat.MISTRAL else f"call_{digest}"

        def remember_turn(tokens: TokenIds, text: str) -> None:
            if encoded.text is not None:
                ids = np.concatenate((encoded.tokens, tokens))
                self.cache.remember(encoded.text + text, ids, encoded.mark, request.cache_scope, request.program_id)

        tracker = partial(CallTracker, self.tool_format, names, schemas=schemas)
        trailing = None
        if names and isinstance(thinking, ThinkingReader) and (reader := READERS.get(self.tool_format)):
            trailing = TrailingCalls(reader.marked, partial(tracker, True, str, early_stop=False))
        parallel = not isinstance(prompt, ChatPrompt) or prompt.parallel_tool_calls
        return Reply(
            self.pieces,
            StreamDecoder(self.pieces, hidden, continues=isinstance(prompt, RawPrompt)),
            StopStrings(request.stop),
            tracker(parallel, call_id, early_stop=self._config.early_stop, guaranteed=limits.guaranteed),
            remember_turn,
            hidden=hidden,
            thinking=thinking,
            trailing=trailing,
            declared=limits.declared,
            runs_on=request.sampling.ignore_eos,
            least=request.sampling.min_tokens,
        )

    def echoed(self, prompt: RawPrompt, encoded: Encoded, logprobs: Sequence[TokenLogprobs] | None) -> TextDelta:
        """The prompt as the beginning of a reply. `logprobs`: of its tokens after the first; None: not wanted."""
        content = prompt.content
        text = content if isinstance(content, str) else self.detokenize(encoded.tokens)
        if logprobs is None:
            return TextDelta(text)
        first = TokenLogprobs(int(encoded.tokens[0]), math.nan)
        return TextDelta(text, prompt_logprobs((first, *logprobs), text.encode(), self.pieces, self._hidden))

    def _thinking(self, prompt: ChatPrompt | RawPrompt, encoded: Encoded) -> ThinkingReader | ChannelReader | None:
        """A reader of the reasoning in a reply to `prompt`; None where the reply begins with its content."""
        if not isinstance(prompt, ChatPrompt) or encoded.text is None:
            return None
        if self._channels is not None:
            return ChannelReader(self._channels)
        if self._block is None:
            return None
        if _wants_content(prompt) and len(self._think_ids) < 2:
            return None  # no token ends the thinking: the grammar of the content cannot wait for it
        return thinking_reader(encoded.text, self._block)


def _common(rendered: Sequence[Rendered]) -> tuple[str, str]:
    """The text that all of these begin with, and its mark."""
    return rendered[0].text[: common_start(rendered[0].text, rendered[-1].text)], rendered[0].mark


def _text_ids(text: str, encoder: Encoder) -> TokenIds:
    """int32 ids of plain text, with the tokens the model expects around it."""
    _check_text(text)
    return encoder.whole(text)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the prompt contains half a surrogate pair", "prompt") from None


def _plain(tokens: TokenIds) -> Encoded:
    if not len(tokens):
        raise InvalidRequestError("the prompt has no tokens", "prompt")
    return Encoded(tokens)


def _digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for tools that are declared alike; fast, since hundreds of them may be read on the event loop's thread."""
    try:
        content = marshal.dumps([*tools], 2)  # later versions tell equal values apart by where they stand in memory
    except ValueError:  # a mapping that is no dict
        content = json.dumps(tools, default=dict).encode()
    return blake2b(content, digest_size=16).digest()


def _wants_content(prompt: ChatPrompt | RawPrompt) -> bool:
    """Whether a grammar holds the reply from its first character on: JSON, or calls."""
    if not isinstance(prompt, ChatPrompt):
        return False
    return prompt.output is not None or bool(prompt.tools and prompt.tool_choice == "required")


def _callable(prompt: ChatPrompt) -> ChatPrompt:
    """`prompt` with {} in place of tools that the reply must not call, since errors name a tool by its place."""
    if not prompt.allowed_tools:
        return prompt
    allowed = [tool if tool.get("function", tool).get("name") in prompt.allowed_tools else {} for tool in prompt.tools]
    return replace(prompt, tools=allowed)


def _declared(prompt: ChatPrompt | RawPrompt) -> Mapping[str, Mapping[str, Any]]:
    """The tools the model may call, by name, with the schemas of their arguments."""
    if not isinstance(prompt, ChatPrompt) or prompt.tool_choice == "none":
        return {}
    functions = _functions(_callable(prompt))
    return {f["name"]: f.get("parameters") or {} for f in functions if isinstance(f.get("name"), str)}


def _functions(prompt: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    return [tool.get("function", tool) for tool in prompt.tools]
