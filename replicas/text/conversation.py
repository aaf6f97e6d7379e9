"""The one entrance of the text side: prompts to token ids, and token ids to the pieces of a reply.

Used from one asyncio thread. Not here: the engine, and anything of HTTP.
"""

import json
import logging
import marshal
import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from operator import index
from typing import Any

import numpy as np

from holdfast.replicas.config import EngineConfig, Guarantee
from holdfast.replicas.constraints.compiler import MOST_GRAMMARS, Compiler, leave_event_loop
from holdfast.replicas.constraints.grammar import ReplyRule, reply_rule
from holdfast.replicas.constraints.guidance import AVAILABLE, CallGuard, Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import ConfigError, InvalidRequestError
from holdfast.replicas.plan import TokenLogprobs
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, LogprobText, RawPrompt, TextDelta
from holdfast.replicas.stats import TextStats
from holdfast.replicas.text.calls.formats import ENDS, MARKERS, ToolFormat
from holdfast.replicas.text.calls.tracker import READERS, CallTracker
from holdfast.replicas.text.decode import Pieces, StreamDecoder
from holdfast.replicas.text.encode import LONG, Begun, Encoder, Entry, LongTexts, TokenCache, common_start
from holdfast.replicas.text.reasoning import (
    CLOSER,
    OPENER,
    AfterThinking,
    ChannelReader,
    ThinkingReader,
    TrailingCalls,
    thinking_reader,
)
from holdfast.replicas.text.render import UNKNOWN, Rendered, Renderer, continuations, message_starts
from holdfast.replicas.text.reply import Reply, Stages, StopStrings, logprob_text
from holdfast.replicas.types import NO_TOKENS, TokenIds, common_prefix

log = logging.getLogger(__name__)

_MANY_TOOLS = 12  # what is made of so many would hold up the event loop


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as int32 token ids; `text` is a chat prompt as rendered (`mark`: see `Rendered`), None for others.

    `starts`: the token at which each message of a chat begins, as far as the text shows that; see `message_starts`.
    """

    tokens: TokenIds
    text: str | None = None
    mark: str = ""
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraints:
    """`matcher`: the reply follows it. `declared`: calls of declared tools, with which one is written again that named
    another tool before it could be known for a call. `loose`: calls are not guaranteed, or not in all they should be.
    """

    matcher: Matcher | None = None
    declared: Matcher | None = None
    loose: bool = False

    def guaranteed(self) -> bool:
        """Whether calls of this reply are whole: not where there is no grammar, or once it was given up."""
        return self.matcher is not None and not self.matcher.given_up


FREE = Constraints()


class TextSide:
    """Rendering, tokenizing and reading replies for one model.

    `tokenizer` is a transformers tokenizer with a tokenizer.json; `tool_format` overrides what the chat template shows.
    `eos`: the ids that end a reply, with the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Any, config: EngineConfig, tool_format: str = "", eos: frozenset[int] = frozenset()
    ) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError("the model's tokenizer has no tokenizer.json", "model")
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, tool_format)
        self.cache = TokenCache(tokenizer, _remembered(config))
        self._long = LongTexts(tokenizer.backend_tokenizer, self.cache.added, config.context_length)
        self.pieces = Pieces(tokenizer.backend_tokenizer)
        self.vocabulary = len(tokenizer)
        added = self.cache.added
        template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else None
        self.tool_format = self.renderer.tool_format
        if self.renderer.tools_as_text:
            log.warning(
                "the chat template takes no tools: they are told in the system prompt, in Hermes' format; "
                "engine.chat_template names a template that takes tools"
            )
        if self.tool_format is ToolFormat.NONE and not tool_format and "tools" in (template or ""):
            log.warning("the chat template takes tools, but its calls are in no format that is read: they come as text")
        self._hidden = added.special_ids | set(tokenizer.all_special_ids)
        self._markers = frozenset(added.ids[text] for text in MARKERS[self.tool_format] if text in added.ids)
        self._channels = self.tool_format is ToolFormat.HARMONY
        self._thinks = CLOSER in (template or "") and not self._channels
        self._think_ids = {text: added.ids[text] for text in (OPENER, CLOSER) if text in added.ids}
        self._config = config
        # The ids that end a reply.
        self.eos = eos | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else frozenset())
        self.eos |= {added.ids[text] for text in ENDS.get(self.tool_format, ()) if text in added.ids}
        self._writes_calls = self.tool_format is not ToolFormat.NONE
        self._rules: OrderedDict[Hashable, ReplyRule | None] = OrderedDict()  # of prompts with tools
        self._reading_rules = threading.Lock()
        self._compiler = Compiler(self._vocabulary, self.tool_format)
        self.unguarded = 0  # replies whose calls are not guaranteed, or only in their names
        self.rewritten = 0  # replies in which a call of an undeclared tool was written again
        self.empty = 0  # replies without content and calls
        self.stopped = 0  # replies ended where their tool calls did, before the model ended them
        self._guarantee: Guarantee = config.tools_guarantee if AVAILABLE else "off"
        if self._guarantee != config.tools_guarantee:
            log.warning("calls are not guaranteed: the package llguidance is not installed")

    def prepare(self) -> None:
        """Take from the first request with tools what it would otherwise wait for: seconds, with many tokens.

        Also where nothing is guaranteed: a request may ask for a call, or for JSON.
        """
        self._compiler.prepare()
        if self.tokenizer.chat_template:
            _ = self.renderer.most_parts

    async def encoded(self, prompt: ChatPrompt | RawPrompt, scope: str = "", program: str = "") -> Encoded:
        """As `encode`. A long text is tokenized on a thread.

        Raises ContextLengthError at once for one that can be seen never to fit, and UnavailableError for a long text
        whose turn comes after `close`.
        """
        if isinstance(prompt, RawPrompt):
            content = prompt.content
            if not isinstance(content, str) or len(content) < LONG:
                return self.encode(prompt)
            return _plain(await self._long.run(partial(_text_ids, content), len(content), scope))
        rendered = await self.renderer.rendered(prompt, self._on_thread(scope))
        begun = self.cache.begin(rendered.text, rendered.mark, scope, program)
        if len(begun.rest) < LONG:
            entry = self.cache.tokenize(begun, self.cache.encoder)
        else:
            entry = await self._long.run(partial(self.cache.tokenize, begun), len(begun.rest), scope)
        starts = _starts(prompt, entry) if self._config.has("kv_tags") else ()
        return Encoded(self.cache.end(begun, entry), rendered.text, rendered.mark, starts)

    async def beginning(self, prompt: ChatPrompt, scope: str = "", program: str = "") -> Encoded:
        """What every prompt begins with that goes on from this one, as far as its tokens are sure.

        Its text is kept, so that the prompt that comes has only its end to tokenize. Raises as `encoded`.
        """
        asked = continuations(prompt)
        rendered = [await self.renderer.rendered(each, self._on_thread(scope)) for each in asked]
        begun = self.cache.begin(_shared(rendered), rendered[0].mark, scope, program)
        long = len(begun.rest) >= LONG
        work = partial(self.cache.tokenize, begun)
        entry = await self._long.run(work, len(begun.rest), scope) if long else work(self.cache.encoder)
        return self._sure(prompt, rendered, begun, entry)

    def preamble(self, prompt: ChatPrompt, scope: str) -> TokenIds:
        """The tokens of `beginning`, at once. Raises InvalidRequestError."""
        rendered = [self.renderer.render(each) for each in continuations(prompt)]
        begun = self.cache.begin(_shared(rendered), rendered[0].mark, scope)
        return self._sure(prompt, rendered, begun, self.cache.tokenize(begun, self.cache.encoder)).tokens

    def _sure(self, prompt: ChatPrompt, rendered: list[Rendered], begun: Begun, entry: Entry) -> Encoded:
        """The tokens of it that are the same whatever comes behind it."""
        text, mark = begun.text, rendered[0].mark
        tokens = self.cache.end(begun, entry)
        if len(rendered) > 1:
            for each in UNKNOWN:
                more = self.cache.begin(text + each, mark, begun.scope, begun.program)
                tokens = tokens[: common_prefix(tokens, self.cache.tokenize(more, self.cache.encoder).ids)]
            tokens = tokens[: len(entry.ids) - self.cache.unsure(text)]
        if not len(tokens):
            raise InvalidRequestError("nothing is known of the prompt before its next message", "messages")
        return Encoded(tokens, text, mark, _starts(prompt, entry) if self._config.has("kv_tags") else ())

    @property
    def longest_token(self) -> int:
        """No token stands for more characters; 0: one may stand for any number."""
        return self._long.token_characters

    def close(self) -> None:
        """Long texts are refused from now on, also those that wait for their turn."""
        self._long.close()

    def encode(self, prompt: ChatPrompt | RawPrompt, scope: str = "", program: str = "") -> Encoded:
        """The prompt's token ids; those of an earlier turn of its `program` are as they were.

        Texts of other scopes (tenants) have no part in it. Plain text gets the tokens the model expects around it
        (beginning of sequence), and its special tokens count. Raises InvalidRequestError for what the template refuses,
        an empty prompt, and ids outside the vocabulary.
        """
        if isinstance(prompt, ChatPrompt):
            rendered = self.renderer.render(prompt)
            tokens = self.cache.encode(rendered.text, rendered.mark, scope, program)
            return Encoded(tokens, rendered.text, rendered.mark)
        content = prompt.content
        return _plain(_text_ids(content, self.cache.encoder) if isinstance(content, str) else self._ids(content))

    async def part(self, prompt: ChatPrompt | RawPrompt, *, begins: bool, reply: bool, scope: str = "") -> TokenIds:
        """Ids of what goes on from a session's history: text and ids as they are, messages as `Renderer.part` has them.

        Nothing is put around a text, its special tokens count. A long one is tokenized on a thread. Raises as
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

        if len(text) < LONG:
            return _plain(work(self.cache.encoder)).tokens
        return _plain(await self._long.run(work, len(text), scope)).tokens

    def closing(self, prompt: ChatPrompt | RawPrompt) -> TokenIds:
        """Ids of what ends a reply to these messages in the conversation; none for text."""
        if not isinstance(prompt, ChatPrompt):
            return NO_TOKENS
        return self.cache.encoder.encode(self.renderer.closing(prompt.template_kwargs), at_start=False)

    def tokenize(self, prompt: ChatPrompt | RawPrompt) -> TokenIds:
        """int32 ids of a prompt, as a request with it would have them."""
        return self.encode(prompt).tokens

    def detokenize(self, tokens: Any) -> str:
        """The text of token ids, special tokens included. Raises InvalidRequestError for unknown ids."""
        return str(self.tokenizer.backend_tokenizer.decode(self._ids(tokens).tolist(), skip_special_tokens=False))

    def constraints(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> Constraints:
        """What a reply to `prompt` must be; what is known of it is each scope's own.

        Compiles a grammar, for milliseconds, unless it is known; not on an event loop's thread: NotCompiledError.
        Raises InvalidRequestError, naming the field, for what cannot be followed.
        """
        if not isinstance(prompt, ChatPrompt):
            return FREE
        rule = self._rule(_callable(prompt), scope)
        if rule is None and prompt.tools and prompt.tool_choice == "none" and self._writes_calls:
            functions = (tool.get("function", tool) for tool in prompt.tools)
            return Constraints(self._compiler.without_calls(frozenset(str(each.get("name")) for each in functions)))
        if rule is None:
            return FREE
        try:
            matcher = self._compiler.matcher(rule, scope)
        except InvalidRequestError:
            if rule.strict or not rule.in_text:
                raise
            return Constraints(loose=True)  # nobody has asked for it
        if not isinstance(matcher, CallGuard):
            return Constraints(matcher)
        return Constraints(matcher, matcher.calls if matcher.bare else None, matcher.loose)

    def _rule(self, prompt: ChatPrompt, scope: str) -> ReplyRule | None:
        """What `prompt` asks for; an agent's turns ask alike, and it is read once. That of many tools is read away from
        the event loop: NotCompiledError there.
        """
        if not prompt.tools:
            return reply_rule(prompt, self._guarantee, self._writes_calls)
        form = prompt.output and (_digest([prompt.output.schema]), prompt.output.strict)
        key = (scope, prompt.tool_choice, prompt.forced_tool, prompt.parallel_tool_calls, form, _digest(prompt.tools))
        with self._reading_rules:
            if key in self._rules:
                self._rules.move_to_end(key)
                return self._rules[key]
        if len(prompt.tools) >= _MANY_TOOLS:
            leave_event_loop(prompt)
        rule = reply_rule(prompt, self._guarantee, self._writes_calls)
        with self._reading_rules:
            self._rules[key] = rule
            if len(self._rules) > MOST_GRAMMARS:
                self._rules.popitem(last=False)
        return rule

    def after_thinking(self, request: GenerateRequest, encoded: Encoded, matcher: Matcher | None) -> Matcher | None:
        """`matcher` of the reply's content as one of the whole reply, thinking included."""
        thinking = self._thinking(request.prompt, encoded)
        if matcher is None or not isinstance(thinking, ThinkingReader) or len(self._think_ids) < 2:
            return matcher
        opener, closer = self._think_ids[OPENER], self._think_ids[CLOSER]
        ends = self.eos if _wants_content(request.prompt) else frozenset[int]()
        return AfterThinking(
            matcher, opener, closer, thinking.begun, ends, lambda token: self.pieces.of(token).isspace()
        )

    def reply(self, request: GenerateRequest, encoded: Encoded, limits: Constraints = FREE) -> Reply:
        """A reader for the reply to `request`, whose prompt is `encoded` and which the engine holds to `limits`."""
        prompt = request.prompt
        chat = isinstance(prompt, ChatPrompt)
        schemas = _declared(prompt)
        names = frozenset(schemas)
        thinking = self._thinking(prompt, encoded)
        shown = self._markers if names or isinstance(thinking, ChannelReader) else frozenset[int]()
        shown |= frozenset(self._think_ids.values() if isinstance(thinking, ThinkingReader) else ())
        hidden = frozenset(self._hidden - shown) | request.sampling.stop_token_ids
        parallel = not isinstance(prompt, ChatPrompt) or prompt.parallel_tool_calls

        def call_id(number: int) -> str:
            digest = blake2b(f"{request.request_id}/{number}".encode(), digest_size=12).hexdigest()
            # Mistral's templates take ids of nine letters and digits only.
            return digest[:9] if self.tool_format is ToolFormat.MISTRAL else f"call_{digest}"

        def remember_turn(tokens: TokenIds, text: str) -> None:
            if encoded.text is not None:
                ids = np.concatenate((encoded.tokens, tokens))
                self.cache.remember(encoded.text + text, ids, encoded.mark, request.cache_scope, request.program_id)

        trailing = None
        if names and isinstance(thinking, ThinkingReader) and (reader := READERS.get(self.tool_format)):
            parser = partial(CallTracker, self.tool_format, names, True, str, early_stop=False, schemas=schemas)
            trailing = TrailingCalls(reader.marked, parser)
        stages = Stages(
            StreamDecoder(self.pieces, hidden, continues=not chat),
            StopStrings(request.stop),
            CallTracker(
                self.tool_format,
                names,
                parallel,
                call_id,
                early_stop=self._config.early_stop,
                guaranteed=limits.guaranteed,
                schemas=schemas,
            ),
            self.pieces,
            hidden,
            thinking,
            trailing,
        )
        runs_on = request.sampling.ignore_eos
        return Reply(stages, remember_turn, limits.declared, runs_on, request.sampling.min_tokens)

    def echoed(self, prompt: RawPrompt, encoded: Encoded, logprobs: Sequence[TokenLogprobs] | None) -> TextDelta:
        """The prompt as the beginning of a reply; `logprobs` are those of its tokens after the first, None where they
        are not asked for.
        """
        content = prompt.content
        text = content if isinstance(content, str) else self.detokenize(encoded.tokens)
        if logprobs is None:
            return TextDelta(text)
        first = TokenLogprobs(int(encoded.tokens[0]), math.nan)
        return TextDelta(text, tuple(_scored((first, *logprobs), text.encode(), self.pieces, self._hidden)))

    @property
    def stats(self) -> TextStats:
        """What was tokenized and ended early so far."""
        counts = (self.stopped, self.rewritten, self.unguarded, self.empty)
        return TextStats(self.cache.reused, self.cache.tokenized, *counts)

    def _thinking(self, prompt: ChatPrompt | RawPrompt, encoded: Encoded) -> ThinkingReader | ChannelReader | None:
        """A reader of what a reply to `prompt` thinks; None where it begins with its content."""
        if not isinstance(prompt, ChatPrompt) or encoded.text is None:
            return None
        if not self._thinks:
            return ChannelReader() if self._channels else None
        if _wants_content(prompt) and len(self._think_ids) < 2:
            return None  # no token says that thinking is over: the grammar of the content cannot wait for it
        return thinking_reader(encoded.text)

    def _on_thread(self, scope: str) -> Callable[[Callable[[], Rendered]], Awaitable[Rendered]]:
        return lambda work: self._long.run(lambda _: work(), 0, scope)

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, frozenset(self._hidden - self._markers), frozenset(self.eos))

    def _ids(self, tokens: Any) -> TokenIds:
        try:
            ids = np.array([index(token) for token in tokens], np.int64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError("token ids must be integers", "prompt") from None
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocabulary):
            raise InvalidRequestError(f"token ids must be from 0 to {self.vocabulary - 1}", "prompt")
        return ids.astype(np.int32)


def _starts(prompt: ChatPrompt, entry: Entry) -> tuple[int, ...]:
    """At which tokens the messages of a prompt begin."""
    begins = message_starts(prompt.messages, entry.text)
    places = (bisect_right(entry.chars, char) - 1 for char in begins)
    return tuple(entry.tokens[place] if place >= 0 else 0 for place in places)


def _scored(
    tokens: Sequence[TokenLogprobs], text: bytes, pieces: Pieces, hidden: Collection[int]
) -> Iterator[LogprobText]:
    """The tokens of a prompt, each with its bytes in `text`.

    Marks that the tokenizer puts around a text have no bytes in it, nor has the space that some put before it.
    """
    end = 0
    for each in tokens:
        scored = logprob_text(pieces, each)
        content = scored.bytes
        if not text.startswith(content, end):
            content = b"" if each.token in hidden else content.removeprefix(b" " if not end else b"")
        end += len(content)
        yield replace(scored, bytes=content)


def _digest(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for tools that are declared alike; quickly, for it may be hundreds of them on the event loop's thread."""
    try:
        content = marshal.dumps([*tools], 2)  # later versions tell equal values apart by where they stand in memory
    except ValueError:  # a mapping that is no dict
        content = json.dumps(tools, default=dict).encode()
    return blake2b(content, digest_size=16).digest()


def _remembered(config: EngineConfig) -> float:
    """Characters for which the token cache has room; without end where the engine's cells are not known yet."""
    cells = config.cells + config.host_cells
    return config.tokenize_cache * (cells or math.inf) if config.tokenize_cache else 0


def _shared(rendered: Sequence[Rendered]) -> str:
    """What all of these begin with."""
    return rendered[0].text[: common_start(rendered[0].text, rendered[-1].text)]


def _text_ids(text: str, encoder: Encoder) -> TokenIds:
    """int32 ids of plain text, with what the model expects around it."""
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


def _wants_content(prompt: ChatPrompt | RawPrompt) -> bool:
    """Whether a grammar says what the reply is from its first character on: JSON, or calls."""
    if not isinstance(prompt, ChatPrompt):
        return False
    return prompt.output is not None or bool(prompt.tools and prompt.tool_choice == "required")


def _callable(prompt: ChatPrompt) -> ChatPrompt:
    """`prompt` with nothing in the places of tools that the reply must not call: errors name a tool by its place."""
    if not prompt.allowed_tools:
        return prompt
    allowed = [tool if tool.get("function", tool).get("name") in prompt.allowed_tools else {} for tool in prompt.tools]
    return replace(prompt, tools=allowed)


def _declared(prompt: ChatPrompt | RawPrompt) -> Mapping[str, Mapping[str, Any]]:
    """The tools the model may call, by name, with the schemas of their arguments."""
    if not isinstance(prompt, ChatPrompt) or prompt.tool_choice == "none":
        return {}
    functions = (tool.get("function", tool) for tool in _callable(prompt).tools)
    return {f["name"]: f.get("parameters") or {} for f in functions if isinstance(f.get("name"), str)}
