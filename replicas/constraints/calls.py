"""How calls are written in each format, as far as a grammar needs it: the counterpart of the readers in `text`.

A model may write a call in more ways than one; a grammar has the one that its chat template writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.replicas.constraints.lark import Grammar, literal
from holdfast.replicas.constraints.rules import Schema, ToolRule
from holdfast.replicas.text.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls are `opener` `head` call (`between` call)* `tail`, and a call is `before` its name, `middle`, its
    arguments and `after`. `keywords`: the arguments are Python's, else JSON.
    """

    opener: str
    middle: str
    between: str
    before: str = ""
    after: str = ""
    head: str = ""
    tail: str = ""
    keywords: bool = False


_OBJECT = '{"name": "'

HERMES = CallForm(
    opener="<tool_call>",
    before="\n" + _OBJECT,
    middle='", "arguments": ',
    after="}\n</tool_call>",
    between="\n<tool_call>",
)
LLAMA3 = CallForm(opener="<|python_tag|>", before=_OBJECT, middle='", "parameters": ', after="}", between="; ")
LLAMA3_BARE = replace(LLAMA3, opener="")
LLAMA3_FUNCTION = CallForm(opener="<function=", middle=">", after="</function>", between="<function=")
MISTRAL_LIST = CallForm(
    opener="[TOOL_CALLS]", head="[", before=_OBJECT, middle='", "arguments": ', after="}", between=", ", tail="]"
)
MISTRAL = CallForm(opener="[TOOL_CALLS]", middle="[ARGS]", between="[TOOL_CALLS]")
PYTHONIC = CallForm(opener="", head="[", middle="(", after=")", between=", ", tail="]", keywords=True)
PYTHONIC_MARKED = replace(PYTHONIC, opener="<|python_start|>", tail="]<|python_end|>")


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one model: `first` for a reply that begins with calls, `triggered` by their opener in a text.

    A text that begins as `bare` does is calls in that form.
    """

    first: CallForm
    triggered: tuple[CallForm, ...]
    bare: CallForm | None = None


def forms_of(tool_format: ToolFormat, knows: Callable[[str], bool]) -> Forms | None:
    """The forms of `tool_format`; `knows` tells which markers are tokens of the model. None: it has no calls."""
    match tool_format:
        case ToolFormat.HERMES:
            return Forms(HERMES, (HERMES,))
        case ToolFormat.LLAMA3:
            return Forms(LLAMA3_BARE, (LLAMA3, LLAMA3_FUNCTION), LLAMA3_BARE)
        case ToolFormat.LLAMA3_FUNCTION:
            return Forms(LLAMA3_FUNCTION, (LLAMA3_FUNCTION, LLAMA3), LLAMA3_BARE)
        case ToolFormat.MISTRAL:
            form = MISTRAL if knows("[ARGS]") else MISTRAL_LIST
            return Forms(form, (form,))
        case ToolFormat.PYTHONIC:
            first = PYTHONIC_MARKED if knows("<|python_start|>") else PYTHONIC
            return Forms(first, (PYTHONIC_MARKED,), PYTHONIC)
        case ToolFormat.NONE:
            return None


class CallRules:
    """Adds the rules of calls to a grammar, each once."""

    def __init__(self, grammar: Grammar, tools: tuple[ToolRule, ...], parallel: bool) -> None:
        self._grammar = grammar
        self._tools = tools
        self._parallel = parallel
        self._known: dict[CallForm, str] = {}
        self._arguments: dict[tuple[bool, int], str] = {}

    def after_opener(self, form: CallForm) -> str:
        """The rule for everything after `form`'s opener, to the end of the reply. Raises ValueError: see `Grammar`."""
        found = self._known.get(form)
        if found is None:
            name = f"calls{len(self._known)}"
            calls = [self._call(form, index) for index in range(len(self._tools))]
            call = self._grammar.add(f"{name}_one", *calls)
            more = f"({literal(form.between)} {call})*" if self._parallel else ""
            found = self._grammar.add(name, f"{literal(form.head)} {call} {more} {literal(form.tail)}")
            self._known[form] = found
        return found

    def _call(self, form: CallForm, index: int) -> str:
        tool = self._tools[index]
        before, after = literal(f"{form.before}{tool.name}{form.middle}"), literal(form.after)
        return f"{before} {self._arguments_rule(form.keywords, index, tool.arguments)} {after}"

    def _arguments_rule(self, keywords: bool, index: int, schema: Schema) -> str:
        found = self._arguments.get((keywords, index))
        if found is None:
            if keywords:
                found = self._grammar.keywords(f"keywords{index}", schema)
            else:
                found = self._grammar.json(f"arguments{index}", schema)
            self._arguments[keywords, index] = found
        return found
