"""Chat prompts to text through the model's chat template.

Strings of control tokens that a client wrote must stay text. They are marked: a character that no text of the
conversation contains is put behind their first one, so the template's own control tokens are the only ones in the
rendered text. `encode` takes the marks out again. Not here: what messages become before the template reads them
(`history`), and whether a conversation makes sense (the router's validation, and the template's own complaints).
"""

import inspect
import json
import math
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from jinja2 import TemplateError

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat, detect_format, hermes_may_be_told
from holdfast.replicas.text.encode import LONG, AddedTokens, read_added_tokens
from holdfast.replicas.text.history import TemplateRules, adapted, normalised, told_as_text

_REASONING = "reasoning_content"  # of a message: what was thought before it
# Noncharacters first: Unicode keeps them out of interchanged text. Then a private plane, should all be taken.
_MARKS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))
# What a message says that stands before the middle of a conversation: after it begins what is asked for.
_BEFORE = "said-before"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)  # by a template
# Only this much of a template's complaint is passed on.
_COMPLAINT = 300
_FEW = 256  # messages, calls and tools, of which no template makes an event loop wait for long
_LEAST = 4  # of them in the smallest conversation that a template is tried on
_MOST_LINES = 1 << 22  # of it and of Jinja, that what it does for each pair of them may run: about half a second
_TEMPLATES = ("<template>", str(Path(jinja2.__file__).parent))  # files of such lines
_HEAD = 48  # characters by which a message is found in a prompt
_NEAR = 65_536  # and how far behind the one before it
# What a text that is not known yet may begin with: no token before it is sure to end there unless it does with all.
UNKNOWN = ("0", "{", "a", " ", "\n", "\u00e9")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt. `mark`, where not empty, stands inside strings that look like control tokens and are not."""

    text: str
    mark: str = ""


class TemplateRefusalError(InvalidRequestError):
    """The chat template refuses the messages."""


class Renderer:
    """The chat template of `tokenizer` (a transformers tokenizer).

    `tool_format` is how the model writes calls. The argument of this name overrides what the template shows.
    `tools_as_text`: the template takes no tools, so they are told in the system prompt, in Hermes' format.
    """

    def __init__(self, tokenizer: Any, tool_format: str = "") -> None:
        self._tokenizer = tokenizer
        self._added: AddedTokens = read_added_tokens(tokenizer.backend_tokenizer)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
        template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
        may_tell = bool(template) and hermes_may_be_told(template, tool_format)
        self.tools_as_text = may_tell and not self._takes_tools()
        self.tool_format = ToolFormat.HERMES if self.tools_as_text else detect_format(template, tool_format)
        # gpt-oss' templates have a name of their own for it, others none or OpenAI's.
        self._names_thinking = ".thinking" in template and _REASONING not in template

    def render(self, prompt: ChatPrompt) -> Rendered:
        """The prompt up to where the assistant begins to write. A `tool_choice` changes nothing of it.

        Raises InvalidRequestError for messages the template refuses, and when the model has no template.
        """
        self._check(prompt)
        try:
            return self._rendered(*self._given(prompt.messages, prompt.tools), prompt.template_kwargs)
        except TemplateRefusalError as refusal:
            field = self._refused_field(prompt, refusal)
            why = refusal.message if field == "messages" else f"'{field}': {refusal.message}"
            raise InvalidRequestError(why, field) from refusal

    async def rendered(
        self, prompt: ChatPrompt, beside: Callable[[Callable[[], Rendered]], Awaitable[Rendered]]
    ) -> Rendered:
        """As `render`. A prompt that is long or has many parts is rendered by `beside`, not on the event loop."""
        work = partial(self.render, prompt)
        return work() if _parts(prompt) <= _FEW and _size(prompt) < LONG else await beside(work)

    def part(self, prompt: ChatPrompt, *, begins: bool, reply: bool) -> Rendered:
        """What its messages add to a conversation that `begins` with them, or that goes on.

        With `reply` up to where the assistant begins to write. The tools count at the beginning only. Raises as
        `render`, also for a template that cannot go on with these messages.
        """
        self._check(prompt)
        said = normalised(prompt.messages, self._rules.objects)
        before = [] if begins else _said_before(said)
        tools = list(prompt.tools) if begins else []
        whole = self._rendered(*self._given([*before, *said], tools), prompt.template_kwargs, reply)
        if begins:
            return whole
        ending = self._after(before, prompt.template_kwargs)
        text = whole.text.partition(_BEFORE)[2]
        if not text.startswith(ending):
            raise InvalidRequestError("the chat template cannot go on with these messages", "messages")
        return Rendered(text.removeprefix(ending), whole.mark)

    def closing(self, kwargs: Mapping[str, Any]) -> str:
        """What the template puts behind a reply; "" where that cannot be seen."""
        return self._after(_said_before([{"role": "user"}]), kwargs)

    def _after(self, before: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """What stands after the text of the last of these messages."""
        return self._rendered(before, [], kwargs, reply=False).text.partition(_BEFORE)[2]

    def _given(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[dict[str, Any]], Sequence[Any]]:
        """Messages and tools as the template takes them."""
        given = normalised(messages, self._rules.objects)
        if self.tools_as_text:
            given, tools = told_as_text(given, tools), ()
        given = adapted(given, self._rules)
        return list(map(_thinking, given)) if self._names_thinking else given, tools

    def _takes_tools(self) -> bool:
        """Whether a prompt is another one with a tool than without."""
        function = {"name": "f", "description": "e", "parameters": {"type": "object", "properties": {}}}
        asked = {"role": "user", "content": "a"}
        without, told = self._tried([asked]), self._tried([asked], [{"type": "function", "function": function}])
        return without is None or without != told

    @cached_property
    def _rules(self) -> TemplateRules:
        """What the template takes, as seen by rendering small conversations."""
        system, user, reply = ({"role": role, "content": f"{role}-1"} for role in ("system", "user", "assistant"))
        second, later = ({**message, "content": f"{message['role']}-2"} for message in (system, user))
        return TemplateRules(
            first=self._shows(system, user),
            second=self._shows(system, second, user),
            later=self._shows(system, user, reply, second, later),
            tools=not self.tools_as_text,
            objects=self._tried(_called({"x": "y"})) is not None or self._tried(_called('{"x": "y"}')) is None,
        )

    def _shows(self, *messages: dict[str, Any]) -> bool:
        """Whether the template takes these messages and shows their contents in this order."""
        text = self._tried(messages)
        places = [-1 if text is None else text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)

    def _tried(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> str | None:
        """The text of these messages; None where the template refuses them."""
        try:
            return self._apply(list(messages), tools, {}, True)
        except _REFUSALS:
            return None

    def _check(self, prompt: ChatPrompt) -> None:
        if not self._tokenizer.chat_template:
            helps = (
                "use /v1/completions, serve the instruct version of the model, or set engine.chat_template to a file"
            )
            raise InvalidRequestError(f"the model has no chat template: {helps}", "messages")
        reserved = self._reserved.intersection(prompt.template_kwargs)
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs must not name {min(reserved)}", "chat_template_kwargs")
        parts = _parts(prompt)
        if parts > _FEW and parts > self.most_parts:
            told = f"{parts} messages, calls and tools are more than the {self.most_parts:.0f} that the chat template"
            raise InvalidRequestError(f"{told} can be given: it goes over them again for each of them", "messages")

    @cached_property
    def most_parts(self) -> float:
        """Of how many messages, calls and tools a conversation may be; inf: of any number.

        Some templates go over all messages for each of them. How often is seen in conversations of several kinds, each
        in three sizes: of a polynomial in the size the square's part is left by their second difference.
        """
        return min(self._most_of(kind) for kind in range(len(list(_conversations(1)))))

    def _most_of(self, kind: int) -> float:
        """In conversations of this kind; inf too where the template takes none of them."""
        lines, parts = [], 0
        for times in (1, 2, 4):
            prompt = list(_conversations(times * _LEAST))[kind]
            parts = _parts(prompt)
            try:
                given = (*self._given(prompt.messages, prompt.tools), prompt.template_kwargs, True)
                self._apply(*given)  # what is done once is done
                lines.append(_lines(partial(self._apply, *given)))
            except _REFUSALS:
                return math.inf
        squares = (lines[2] - 3 * lines[1] + 2 * lines[0]) * 16 / 6  # in the largest
        return parts * math.sqrt(_MOST_LINES / squares) if squares > parts else math.inf

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any], reply: bool = True
    ) -> Rendered:
        mark = ""
        word = self._added.control_word
        plain = _plain_texts(messages, tools, kwargs)
        if word is not None and any(word.search(text) for text in plain):
            mark = next((char for char in map(chr, chain(*_MARKS)) if not any(char in text for text in plain)), "")
            if not mark:
                raise InvalidRequestError("the messages use too many private characters", "messages")
        try:
            if word is not None and mark:
                marked = partial(word.sub, lambda found: found[0][0] + mark + found[0][1:])
                messages, tools, kwargs = _replaced([messages, tools, kwargs], marked)
            text = self._apply(messages, tools, kwargs, reply)
        except _REFUSALS as error:
            complaint = f"the chat template refuses the messages: {str(error)[:_COMPLAINT]}"
            raise TemplateRefusalError(complaint, "messages") from error
        try:
            text.encode()
        except UnicodeEncodeError:
            text = _HALF_PAIR.sub("\ufffd", text)
        return Rendered(text, mark)

    def _refused_field(self, prompt: ChatPrompt, refusal: TemplateRefusalError) -> str:
        """The first message with which the template complains as it does of all; "messages" where it is the first."""
        least, most = 1, len(prompt.messages)
        while least < most:
            middle = (least + most) // 2
            try:
                self._rendered(*self._given(prompt.messages[:middle], prompt.tools), prompt.template_kwargs)
                refused = False
            except TemplateRefusalError as other:
                refused = other.message == refusal.message
            least, most = (least, middle) if refused else (middle + 1, most)
        return f"messages.{most - 1}" if most > 1 else "messages"

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any], reply: bool
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=reply, **kwargs
            )
        )


def _parts(prompt: ChatPrompt) -> int:
    """Its messages, the calls in them, and its tools."""
    calls = (message.get("tool_calls") for message in prompt.messages if isinstance(message, Mapping))
    return len(prompt.messages) + len(prompt.tools) + sum(len(each) for each in calls if isinstance(each, Sequence))


def _size(prompt: ChatPrompt) -> int:
    """About how many characters it has: enough to tell a long one."""
    size = len(_as_json(prompt.tools))
    for message in prompt.messages:
        size += sum(len(value) for value in message.values() if isinstance(value, str))
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments") if "function" in call else None
            size += len(arguments) if isinstance(arguments, str) else 0
    return size


def _called(arguments: Any) -> list[dict[str, Any]]:
    """A small conversation with a call in it."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "123456789", "type": "function", "function": function}]  # Mistral's templates want nine characters
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    return [{"role": "user", "content": "user-1"}, asked]


def _conversations(n: int) -> Iterator[ChatPrompt]:
    """What agents and others say, one of each kind, with and without tools; all grow by `n`."""
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    function = {"name": "f", "arguments": '{"x": "y"}'}
    calls = [{"id": f"{i:09}", "type": "function", "function": function} for i in range(n)]
    asks = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "c"} for call in calls]
    thought = [{**ask, _REASONING: "d"} for ask in asks]
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "e", "parameters": schema}}] * n
    talks: list[list[Any]] = [[user, said] * n, [{"role": "system", "content": "s"}, user] * n]
    talks += [list(chain([user], *zip(each, results, strict=True))) for each in (asks, thought)]
    talks.append([user, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    for talk in talks:
        yield ChatPrompt(talk, tools)
        yield ChatPrompt(talk)


def _lines(work: Callable[[], object]) -> int:
    """How many lines of templates and of Jinja `work` runs."""
    lines = 0

    def line(frame: FrameType, event: str, about: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return line

    def call(frame: FrameType, event: str, about: object) -> Any:
        return line if frame.f_code.co_filename.startswith(_TEMPLATES) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def continuations(prompt: ChatPrompt) -> list[ChatPrompt]:
    """Prompts that go on from `prompt`, whose renderings have in common what all that do begin with.

    Where calls are open a result of theirs comes next, else after an assistant's message, or none, a user's. After any
    other one the assistant writes: that is the prompt as it is.
    """
    messages, answered, calls = prompt.messages, set[object](), list[Mapping[str, Any]]()
    for message in reversed(messages):
        if message.get("role") != "tool":
            calls = list(message.get("tool_calls") or ())
            break
        answered.add(message.get("tool_call_id"))
    missing = [call for call in calls if call.get("id") not in answered]
    if not missing and messages and messages[-1].get("role") in ("user", "tool"):
        return [prompt]

    def going_on(text: str) -> ChatPrompt:
        more: list[Mapping[str, Any]] = [
            {"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": text}
            for call in missing
        ]
        return replace(prompt, messages=[*messages, *(more or [{"role": "user", "content": text}])])

    return [going_on(text) for text in UNKNOWN[:2]]


def message_starts(messages: Sequence[Mapping[str, Any]], text: str) -> list[int]:
    """Where in a rendered `text` the contents of `messages` begin, in their order, ascending; a guess, but a safe one.

    Each is looked for behind the one before it, by its first characters. One that a template rewrites, or that says
    nothing, begins with the one after it. Tools may stand before the first message that is no system prompt, so that
    is looked for in the whole text; where a later one is not near, nothing is said of it and of those behind it.
    """
    starts: list[int] = []
    place, silent, far = 0, 0, True
    for message in messages:
        head = _head(message)
        found = text.find(head, place, len(text) if far else place + len(head) + _NEAR) if head else -1
        if found < 0:
            silent += 1
            if head and not far:
                break
            continue
        far = message.get("role") in ("system", "developer")
        starts += [found] * (silent + 1)
        content = message.get("content")
        whole = content.strip() if isinstance(content, str) else ""
        place, silent = found + (len(whole) if text.startswith(whole, found) else 0) + (0 if whole else len(head)), 0
    return starts + [len(text)] * (len(messages) - len(starts))


def _head(message: Mapping[str, Any]) -> str:
    """What a message says first, as a template may write it; "" where that cannot be told."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        first = content[0]
        content = first.get("text") if isinstance(first, Mapping) else first
    if isinstance(content, str) and (head := content.strip()[:_HEAD].rstrip()):
        return head
    calls = message.get("tool_calls") or ()
    function = calls[0].get("function") if calls and isinstance(calls[0], Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _said_before(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What may stand before `messages` for any template: roles take turns, and a user begins."""
    asked, answered = {"role": "user", "content": _BEFORE}, {"role": "assistant", "content": _BEFORE}
    if messages[0]["role"] == "assistant":
        return [asked]
    return [{**asked, "content": "?"}, answered]


def _plain_texts(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Every text that the template is given. Raises InvalidRequestError for tools that are not JSON."""
    values = [value for message in messages for value in message.values()]
    return [value if isinstance(value, str) else _as_json(value) for value in (*values, tools, kwargs)]


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=dict)
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


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning as `thinking`; before calls what it says is in there as well, since templates refuse
    one that has both.
    """
    if not (thought := message.get(_REASONING)):
        return message
    if message.get("tool_calls") and message["content"]:
        thought, message = f"{thought}\n\n{message['content']}", {**message, "content": ""}
    return {key: value for key, value in message.items() if key != _REASONING} | {"thinking": thought}
