"""Chat prompts to text through the model's chat template.

Clients send messages from other servers and clients: arguments that are no object, results in any order, system
messages anywhere. Messages are first normalized for the template. The result for a message depends only on the
messages around it and on the template, so a conversation that continues renders with the same beginning.

Text from a client that looks like a control token must stay text. A mark, a character that no text of the conversation
contains, is put behind the first character of each such text. So the template's own control tokens are the only ones
in the rendered text; `encode` takes the marks out again.
"""

import inspect
import json
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import TemplateError

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat, detect_format, hermes_may_be_told
from holdfast.replicas.text.encode import LONG, read_added_tokens

Message = dict[str, Any]

INVALID = "invalid_arguments"
"""The member that holds the text of arguments that are no JSON object. The model can see its mistake there."""
UNKNOWN = ("0", "{", "a", " ", "\n", "\u00e9")
"""Beginnings of an unknown text. A token before it is sure only if it is the same before all of these."""

_REASONING = "reasoning_content"  # a message's key
# Noncharacters first: Unicode keeps them out of interchanged text. Then a private plane, in case all are taken.
_MARKS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))
_BEFORE = "said-before"  # content of a made-up message before a part of a conversation
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)  # by a template
_COMPLAINT = 300  # characters of a template's complaint that are passed on
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, the least first
_OF_FORMAT = {  # efforts that models know although their templates write any word
    ToolFormat.HARMONY: ("low", "medium", "high"),
    ToolFormat.MUSE: ("low", "medium", "high", "xhigh"),
}
_FEW = 256  # messages, calls and tools that no template needs long for
_MOST_LINES = 1 << 22  # of the template and Jinja, run for pairs of messages: about half a second
_TEMPLATES = ("<template>", str(Path(jinja2.__file__).parent))  # files of these lines
_HEAD = 48  # characters by which a message is found in a prompt
_NEAR = 65_536  # characters behind the message before it in which it is looked for
_MOST_NESTED = 100  # levels of arguments that templates write; Jinja and `json` give up at some hundreds
_BETWEEN = "\n\n"  # messages that are joined


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt. `mark` stands behind the first character of texts that look like a control token; or ""."""

    text: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """Abilities of a chat template: a `first` system message, a `second` one behind it, a `later` one.

    `objects`: arguments of calls are objects, else text. `tools` is False if the system prompt describes the tools, and
    calls and results are text.
    """

    first: bool = True
    second: bool = True
    later: bool = True
    objects: bool = True
    tools: bool = True


class TemplateRefusalError(InvalidRequestError):
    """The chat template refuses the messages."""


class Renderer:
    """The chat template of `tokenizer` (a transformers tokenizer).

    `tool_format` is how the model writes calls; the argument of this name overrides the template's.
    `tools_as_text`: the template takes no tools, so the system prompt describes them, in Hermes' format.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "") -> None:
        self._tokenizer = tokenizer
        self._control = read_added_tokens(tokenizer.backend_tokenizer).control_word
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
        template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
        may_tell = bool(template) and hermes_may_be_told(template, tool_format)
        self.tools_as_text = may_tell and not self._takes_tools()
        self.tool_format = ToolFormat.HERMES if self.tools_as_text else detect_format(template, tool_format)
        # gpt-oss' templates have a name of their own for reasoning, others none or OpenAI's.
        self._names_thinking = ".thinking" in template and _REASONING not in template

    def render(self, prompt: ChatPrompt) -> Rendered:
        """The prompt up to where the assistant begins to write. A `tool_choice` does not change it.

        Raises InvalidRequestError for messages the template refuses, and when the model has no template.
        """
        self._check(prompt)
        try:
            return self._rendered(prompt.messages, prompt.tools, prompt.template_kwargs)
        except TemplateRefusalError as refusal:
            field = self._refused_field(prompt, refusal)
            why = refusal.message if field == "messages" else f"'{field}': {refusal.message}"
            raise InvalidRequestError(why, field) from refusal

    async def rendered(
        self, prompt: ChatPrompt, on_thread: Callable[[Callable[[], Rendered]], Awaitable[Rendered]]
    ) -> Rendered:
        """As `render`. A prompt that is long or has many parts is rendered by `on_thread`, not on the event loop."""
        work = partial(self.render, prompt)
        return work() if _parts(prompt) <= _FEW and _size(prompt) < LONG else await on_thread(work)

    def part(self, prompt: ChatPrompt, *, begins: bool, reply: bool) -> Rendered:
        """The text that its messages add to a conversation, which `begins` with them or continues.

        `reply`: up to where the assistant begins to write. The tools count at the beginning only. Raises as `render`,
        also for a template that cannot continue with these messages.
        """
        self._check(prompt)
        if begins:
            return self._rendered(prompt.messages, prompt.tools, prompt.template_kwargs, reply)
        messages = normalised(prompt.messages, self._rules.objects)
        before = _messages_before(messages)
        whole = self._rendered([*before, *messages], [], prompt.template_kwargs, reply)
        ending = self._after(before, prompt.template_kwargs)
        text = whole.text.partition(_BEFORE)[2]
        if not text.startswith(ending):
            raise InvalidRequestError("the chat template cannot continue with these messages", "messages")
        return Rendered(text.removeprefix(ending), whole.mark)

    def closing(self, kwargs: Mapping[str, Any]) -> str:
        """The template's text behind a reply; "" if the template does not show it."""
        return self._after(_messages_before([{"role": "user"}]), kwargs)

    @cached_property
    def most_parts(self) -> float:
        """How many messages, calls and tools a conversation may have; inf: any number.

        Some templates loop over all messages for each message. The work is measured in conversations of several kinds,
        each in three sizes: the second difference of a polynomial in the size leaves the part of the square.
        """
        most = math.inf
        for sizes in zip(*map(_conversations, (4, 4, 8, 16)), strict=True):
            try:
                work = [partial(self._apply, *self._adapted(each.messages, each.tools), {}, True) for each in sizes]
                _, small, middle, large = map(_lines, work)  # the first run warms up
            except _REFUSALS:
                continue  # the template takes no such conversation
            parts, squares = _parts(sizes[-1]), (large - 3 * middle + 2 * small) * 16 / 6  # in the largest
            if squares > parts:
                most = min(most, parts * math.sqrt(_MOST_LINES / squares))
        return most

    def _template_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """`kwargs` with thinking and effort under every name that templates use; templates ignore other names.

        An effort that the template does not know becomes the nearest one that it knows, the higher of two.
        """
        told: dict[str, Any] = {"thinking": kwargs["enable_thinking"]} if "enable_thinking" in kwargs else {}
        effort = kwargs.get("reasoning_effort")
        if effort in _EFFORTS and self._efforts:
            rank = _EFFORTS.index
            known = min(self._efforts, key=lambda each: (abs(rank(each) - rank(effort)), -rank(each)))
            told |= {"reasoning_strength": known, "low_effort": rank(effort) <= rank("low")}
            told |= {"medium_effort": rank(effort) <= rank("medium")}
            kwargs = {**kwargs, "reasoning_effort": known}
        return {**told, **kwargs}

    @cached_property
    def _efforts(self) -> Sequence[str]:
        """The efforts that the template accepts."""
        messages = [{"role": "user", "content": "a"}]
        known = _OF_FORMAT.get(self.tool_format, _EFFORTS)
        return [each for each in known if self._try_render(messages, reasoning_effort=each) is not None]

    @cached_property
    def _rules(self) -> TemplateRules:
        """The rules of the template, found by rendering small conversations."""
        system, user, reply = ({"role": role, "content": f"{role}-1"} for role in ("system", "user", "assistant"))
        second, later = ({**message, "content": f"{message['role']}-2"} for message in (system, user))
        return TemplateRules(
            first=self._shows(system, user),
            second=self._shows(system, second, user),
            later=self._shows(system, user, reply, second, later),
            tools=not self.tools_as_text,
            objects=self._try_render(_conversation_with_call({"x": "y"})) is not None
            or self._try_render(_conversation_with_call('{"x": "y"}')) is None,
        )

    def _takes_tools(self) -> bool:
        """Whether a tool changes the prompt."""
        function = {"name": "f", "description": "e", "parameters": {"type": "object", "properties": {}}}
        message = {"role": "user", "content": "a"}
        without, with_tool = (
            self._try_render([message]),
            self._try_render([message], [{"type": "function", "function": function}]),
        )
        return without is None or without != with_tool

    def _shows(self, *messages: Message) -> bool:
        """Whether the template takes these messages and shows their contents in this order."""
        text = self._try_render(messages)
        places = [-1 if text is None else text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)

    def _try_render(self, messages: Sequence[Message], tools: Sequence[Any] = (), **kwargs: Any) -> str | None:
        """The rendered text of `messages`; None if the template refuses them."""
        try:
            return self._apply(list(messages), tools, kwargs, True)
        except _REFUSALS:
            return None

    def _check(self, prompt: ChatPrompt) -> None:
        if not self._tokenizer.chat_template:
            helps = "use /v1/completions, serve the instruct version of the model, or set engine.chat_template"
            raise InvalidRequestError(f"the model has no chat template: {helps} to a file", "messages")
        if reserved := self._reserved.intersection(prompt.template_kwargs):
            raise InvalidRequestError(f"chat_template_kwargs must not name {min(reserved)}", "chat_template_kwargs")
        if (parts := _parts(prompt)) > _FEW and parts > self.most_parts:
            limit = f"{parts} messages, calls and tools are more than the {self.most_parts:.0f} that the chat template"
            raise InvalidRequestError(f"{limit} can take: its work grows with their square", "messages")

    def _after(self, before: list[Message], kwargs: Mapping[str, Any]) -> str:
        """The template's text behind the content of the last of these messages."""
        return self._rendered(before, [], kwargs, reply=False).text.partition(_BEFORE)[2]

    def _adapted(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[Message], Sequence[Any]]:
        """Messages and tools in the form that the template accepts."""
        result = normalised(messages, self._rules.objects)
        if self.tools_as_text:
            result, tools = _with_tools_as_text(result, tools), ()
        result = adapted(result, self._rules)
        return list(map(_thinking, result)) if self._names_thinking else result, tools

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any], reply: bool = True
    ) -> Rendered:
        adapted, tools = self._adapted(messages, tools)
        kwargs = self._template_kwargs(kwargs)
        mark, word = "", self._control
        values = [*chain.from_iterable(message.values() for message in adapted), tools, kwargs]
        texts = [value if isinstance(value, str) else _checked_json(value) for value in values]
        if word is not None and any(map(word.search, texts)):
            mark = next((char for char in map(chr, chain(*_MARKS)) if not any(char in text for text in texts)), "")
            if not mark:
                raise InvalidRequestError("the messages use too many private characters", "messages")
        try:
            if word is not None and mark:
                marked = partial(word.sub, lambda match: match[0][0] + mark + match[0][1:])
                adapted, tools, kwargs = _replaced([adapted, tools, kwargs], marked)
            text = self._apply(adapted, tools, kwargs, reply)
        except _REFUSALS as error:
            complaint = f"the chat template refuses the messages: {str(error)[:_COMPLAINT]}"
            raise TemplateRefusalError(complaint, "messages") from error
        try:
            text.encode()
        except UnicodeEncodeError:
            text = _HALF_PAIR.sub("\ufffd", text)
        return Rendered(text, mark)

    def _refused_field(self, prompt: ChatPrompt, refusal: TemplateRefusalError) -> str:
        """The field of the first message that causes this refusal; "messages" if it is the first of all."""

        def refuses(count: int) -> bool:
            try:
                self._rendered(prompt.messages[:count], prompt.tools, prompt.template_kwargs)
            except TemplateRefusalError as other:
                return other.message == refusal.message
            return False

        first = bisect_left(range(1, len(prompt.messages)), True, key=refuses)
        return f"messages.{first}" if first else "messages"

    def _apply(self, messages: list[Message], tools: Sequence[Any], kwargs: Mapping[str, Any], reply: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=reply, **kwargs
            )
        )


# ---- messages as the template takes them ----


def normalised(messages: Sequence[Mapping[str, Any]], parse_arguments: bool = True) -> list[Message]:
    """OpenAI messages as chat templates want them, in new dicts: plain strings, no nulls, tool arguments as objects.

    Content parts are joined by line ends, null content is "", other nulls and empty `tool_calls` are dropped,
    `developer` becomes `system`. The results of an assistant message's calls come in the order of the calls. Arguments
    are objects if `parse_arguments` (see `INVALID`), else text. Raises InvalidRequestError that names the field.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    result = [_message(message, f"messages.{index}", parse_arguments) for index, message in enumerate(messages)]
    for index, message in enumerate(result):
        if len(calls := message.get("tool_calls", ())) < 2:
            continue
        answers = list(takewhile(lambda each: each["role"] == "tool", result[index + 1 :]))
        places = {call.get("id"): place for place, call in reversed([*enumerate(calls)])}
        # Most templates show no ids.
        answers.sort(key=lambda answer: places.get(answer.get("tool_call_id"), len(calls)))
        result[index + 1 : index + 1 + len(answers)] = answers
    return result


def _message(message: Mapping[str, Any], field: str, parse_arguments: bool) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError("a message must be an object with a role", f"{field}.role")
    result = {key: value for key, value in message.items() if value is not None}
    if result["role"] == "developer":
        result["role"] = "system"
    content = result.setdefault("content", "")
    if not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise InvalidRequestError("content must be a string or a list of parts", f"{field}.content")
        result["content"] = "\n".join(_part(part, field) for part in content)
    if calls := result.pop("tool_calls", None):
        result["tool_calls"] = [_tool_call(call, field, parse_arguments) for call in calls]
    return result


def _part(part: Any, field: str) -> str:
    """The text of a part of a message's content."""
    part = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"content parts of type {kind!r} are not supported, only text", f"{field}.content")
    return str(part["text"])


def _tool_call(call: Any, field: str, parse_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a tool call needs a function with a name", f"{field}.tool_calls")
    arguments = _arguments(function.get("arguments"), parse_arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, parse: bool) -> Any:
    """Arguments as an object, since templates go over its members; or as text, for templates that join texts.

    None, an empty text and null are no arguments.
    """
    text = arguments if isinstance(arguments, str) else _as_json(arguments)
    if text.strip() in ("", "null"):
        text = "{}"
    if not parse:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {INVALID: text}
    return value if isinstance(value, dict) and not _deep(value, text) else {INVALID: text}


def _deep(value: Any, text: str) -> bool:
    """Whether `value`, whose JSON is `text`, has more levels than a template can write."""
    if text.count("{") + text.count("[") <= _MOST_NESTED:
        return False
    level = [value]
    for _ in range(_MOST_NESTED):
        members = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in members if isinstance(item, dict | list)]
    return bool(level)


# In Hermes' format, in the words that Hermes and Qwen are trained with.
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def _with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """`messages` for a template without tools: `tools` at the end of the first system message, calls and results as
    text in Hermes' format. Results still have the role `tool`; see `adapted`.
    """
    result = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            message = {"role": "tool", "content": f"<tool_response>\n{content}\n</tool_response>"}
        elif "tool_calls" in message:
            calls = [{key: call["function"][key] for key in ("name", "arguments")} for call in message["tool_calls"]]
            texts = [content] * bool(content) + [f"<tool_call>\n{_as_json(call)}\n</tool_call>" for call in calls]
            message = {**message, "content": "\n".join(texts)}
            del message["tool_calls"]
        result.append(message)
    if tools:
        description = _TOOLS.format("\n".join(map(_as_json, tools)))
        if result[0]["role"] == "system":
            result[0] = {**result[0], "content": result[0]["content"] + _BETWEEN + description}
        else:
            result.insert(0, {"role": "system", "content": description})
    return result


def adapted(messages: Sequence[Message], rules: TemplateRules) -> list[Message]:
    """`messages` changed to those that the template takes, by `rules`.

    System messages at the beginning are joined. Others, and results of tools, become the user's text, joined with
    the user's messages next to them: some templates demand that roles take turns.
    """
    result: list[Message] = []
    begins, joins = True, False  # only system messages so far; the last message has been made here
    for message in messages:
        role, made = message["role"], False
        if role == "tool" and not rules.tools:
            begins, role, made = False, "user", True
        elif role == "system" and begins and rules.first:
            made = bool(result) and not rules.second
        else:
            begins = False
            if role == "system" and not (rules.first and rules.later):
                role, made = "user", True
        if result and result[-1]["role"] == role in ("system", "user") and (made or joins):
            result[-1] = {**result[-1], "content": result[-1]["content"] + _BETWEEN + message["content"]}
            joins = role == "user"
        else:
            result.append(message if role == message["role"] else {**message, "role": role})
            joins = made
    return result


def _thinking(message: Message) -> Message:
    """A message with its reasoning as `thinking`. Templates refuse a message with calls that has both `thinking` and
    content, so there the content is part of the reasoning.
    """
    if not (thought := message.get(_REASONING)):
        return message
    if message.get("tool_calls") and message["content"]:
        thought, message = f"{thought}\n\n{message['content']}", {**message, "content": ""}
    return {key: value for key, value in message.items() if key != _REASONING} | {"thinking": thought}


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=dict)


def _checked_json(value: Any) -> str:
    try:
        return _as_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages and tools must be JSON: {error}", "messages") from error


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every string in it, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replaced(key, change): _replaced(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, change) for item in value]
    return value


# ---- how much there is to render ----


def _parts(prompt: ChatPrompt) -> int:
    """Its messages, the calls in them, and its tools."""
    calls = (message.get("tool_calls") for message in prompt.messages if isinstance(message, Mapping))
    return len(prompt.messages) + len(prompt.tools) + sum(len(each) for each in calls if isinstance(each, Sequence))


def _size(prompt: ChatPrompt) -> int:
    """The approximate number of characters, to recognise a long prompt."""
    size = len(_checked_json(prompt.tools))
    for message in prompt.messages:
        size += sum(len(value) for value in message.values() if isinstance(value, str))
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments") if "function" in call else None
            size += len(arguments) if isinstance(arguments, str) else 0
    return size


def _conversation_with_call(arguments: Any) -> list[Message]:
    """A small conversation with a call in it."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "123456789", "type": "function", "function": function}]  # Mistral's templates want nine characters
    return [{"role": "user", "content": "user-1"}, {"role": "assistant", "content": "", "tool_calls": calls}]


def _conversations(n: int) -> list[ChatPrompt]:
    """One conversation of each common kind; all grow with `n`."""
    user, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    function = {"name": "f", "arguments": '{"x": "y"}'}
    calls = [{"id": f"{i:09}", "type": "function", "function": function} for i in range(n)]
    asks = [{"role": "assistant", "content": "", "tool_calls": [call], _REASONING: "d"} for call in calls]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "c"} for call in calls]
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "e", "parameters": schema}}] * n
    turns = chain.from_iterable(zip(asks, results, strict=True))
    together = {"role": "assistant", "content": "", "tool_calls": calls}
    talks: list[list[Any]] = [[user, reply] * n, [user, *turns], [user, together, *results]]
    return [ChatPrompt(talk, tools) for talk in talks]


def _lines(work: Callable[[], object]) -> int:
    """How many lines of templates and of Jinja `work` runs."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename.startswith(_TEMPLATES) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


# ---- beginnings and parts of prompts ----


def continuations(prompt: ChatPrompt) -> list[ChatPrompt]:
    """Prompts that continue `prompt`. All its continuations begin with the common beginning of their renderings.

    If calls are open, one of their results comes next, else after an assistant's message, or none, a user's. After any
    other message the assistant writes: that is the prompt as it is.
    """
    messages = prompt.messages
    results = list(takewhile(lambda each: each.get("role") == "tool", reversed(messages)))
    answered = {result.get("tool_call_id") for result in results}
    calls = (messages[-1 - len(results)].get("tool_calls") or ()) if len(results) < len(messages) else ()
    missing = [call for call in calls if call.get("id") not in answered]
    if not missing and messages and messages[-1].get("role") in ("user", "tool"):
        return [prompt]

    def continued(text: str) -> ChatPrompt:
        more: list[Mapping[str, Any]] = [
            {"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": text}
            for call in missing
        ]
        return replace(prompt, messages=[*messages, *(more or [{"role": "user", "content": text}])])

    return [continued(text) for text in UNKNOWN[:2]]


def message_starts(messages: Sequence[Mapping[str, Any]], text: str) -> list[int]:
    """Estimate where in a rendered `text` the contents of `messages` begin, ascending.

    Each message is searched behind the one before it, by its first characters. A rewritten or empty one begins with the
    next. Tools may stand before the first message that is no system prompt, so the whole text is searched for that one.
    If a later message is not near, it and all behind it begin at the end.
    """
    starts: list[int] = []
    place, silent, far = 0, 0, True
    for message in messages:
        content, head = _text_and_head(message)
        start = text.find(head, place, len(text) if far else place + len(head) + _NEAR) if head else -1
        if start >= 0:
            far = message.get("role") in ("system", "developer")
            starts += [start] * (silent + 1)
            place, silent = start + (len(content) * text.startswith(content, start) if content else len(head)), 0
        elif head and not far:
            break
        else:
            silent += 1
    return starts + [len(text)] * (len(messages) - len(starts))


def _text_and_head(message: Mapping[str, Any]) -> tuple[str, str]:
    """A message's content if that is one text, and its first characters as a template may write them; "" if unknown."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else ""
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        content = content[0].get("text") if isinstance(content[0], Mapping) else content[0]
    if isinstance(content, str) and (head := content.strip()[:_HEAD].rstrip()):
        return text, head
    calls = message.get("tool_calls") or ()
    function = calls[0].get("function") if calls and isinstance(calls[0], Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return text, name if isinstance(name, str) else ""


def _messages_before(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages that may stand before `messages` in any template: roles take turns, and a user begins."""
    question, answer = {"role": "user", "content": _BEFORE}, {"role": "assistant", "content": _BEFORE}
    return [question] if messages[0]["role"] == "assistant" else [{**question, "content": "?"}, answer]
