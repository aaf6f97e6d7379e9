"""Tools of `/v1/responses` as a client declares them, and as the model sees them: all of them are functions there.

    function                  itself
    function of a namespace   NAMESPACE__NAME, whatever else is declared, so that names stay as tools come and go
    custom tool               a function with one argument, the text `input`

A call is told back as it was declared, and a call of the history is shown under the name that the model knows.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from holdfast.replicas.errors import InvalidRequestError
from holdfast.router.protocol.body import MOST_TOOLS, word
from holdfast.router.protocol.chat import Tool, check_name

_JSON = json.JSONDecoder(strict=False)
LONGEST = 64  # characters of a name that a model sees
HEAD = re.compile(r'\s*+\{\s*+"input"\s*+:\s*+"')
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NOT_LOW = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
CHARACTERS = re.compile(  # of a JSON string, as far as they are whole: half of a surrogate pair waits for the other
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rf"|\\u[dD][89abAB][0-9a-fA-F]{{2}}(?:{_LOW}|{_NOT_LOW}))*+"
)


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A function or a `custom` tool. `namespace` "": of none. `field`: where it stands in the request."""

    given: Mapping[str, Any]
    namespace: str
    field: str
    note: str = ""  # what its namespace says of itself: it is told with the first tool there
    shown: str = ""  # its name to the model

    @property
    def name(self) -> str:
        name: str = self.given["name"]
        return name

    @property
    def custom(self) -> bool:
        return bool(self.given["type"] == "custom")

    def function(self) -> Tool:
        """It as chat has it."""
        function: Any = {"name": self.shown}
        if self.custom:
            function.update(_custom_function(self.given))
        else:
            given = self.given
            function.update({key: given[key] for key in ("description", "parameters", "strict") if given.get(key)})
        if self.note:
            function["description"] = f"{self.note}\n\n{function.get('description', '')}".rstrip()
        return {"type": "function", "function": function}


class DeclaredTools:
    """Those of one request; `skipped` are the types of those that no model here can call.

    Raises InvalidRequestError for a name that is not well formed or stands twice in a namespace.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.skipped: list[str] = []
        found: list[DeclaredTool] = []
        for index, tool in enumerate(tools):
            if is_namespace(tool):
                note = tool.get("description") or ""
                for inner, each in enumerate(tool["tools"]):
                    read = self._read(each, tool["name"], f"tools.{index}.tools.{inner}", note)
                    found, note = [*found, *read], "" if read else note
            else:
                found += self._read(tool, "", f"tools.{index}")
        if len(found) > MOST_TOOLS:
            raise InvalidRequestError(f"'tools' has {len(found)} functions; at most {MOST_TOOLS} are allowed", "tools")
        self.tools = _shown(found)
        self._declared = {(each.namespace, each.name): each for each in self.tools}
        self._by_name = {each.shown: each for each in self.tools}
        names = Counter(each.name for each in self.tools)
        for each in self.tools:  # also by its own name, where that says which one is meant
            if names[each.name] == 1:
                self._by_name.setdefault(each.name, each)

    def called(self, shown: str) -> DeclaredTool | None:
        """The tool that the model calls by this name."""
        return self._by_name.get(shown)

    def shown(self, name: str, namespace: str) -> str:
        """How the model knows the tool of a call in the history, also where it is no longer declared."""
        known = self._declared.get((namespace, name)) if namespace else self._by_name.get(name)
        return known.shown if known is not None else _flat(namespace, name)

    def chosen(self, given: Mapping[str, Any], where: str) -> list[str]:
        """The names to the model of what one entry of `tool_choice` means. Raises InvalidRequestError."""
        kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
        if not isinstance(name, str):
            raise InvalidRequestError(f"Missing required parameter: '{where}.name'", f"{where}.name")
        if kind == "namespace":
            found = [each for each in self.tools if each.namespace == name]
            if not found:
                raise InvalidRequestError(f"'{where}.name': no namespace is named {name!r}", f"{where}.name")
            return [each.shown for each in found]
        same = [each for each in self.tools if each.custom == (kind == "custom")]
        if namespace is not None:
            found = [each for each in same if (each.namespace, each.name) == (namespace, name)]
        else:
            found = [each for each in same if each.shown == name] or [each for each in same if each.name == name]
        if not found:
            raise InvalidRequestError(f"'{where}.name': no {kind} tool is named {name!r}", f"{where}.name")
        if len(found) > 1:
            message = f"'{where}.name': {name!r} is in several namespaces; say which one in '{where}.namespace'"
            raise InvalidRequestError(message, f"{where}.namespace")
        return [found[0].shown]

    def _read(self, tool: Any, namespace: str, where: str, note: str = "") -> list[DeclaredTool]:
        if not is_function(tool) and not is_custom(tool):
            self.skipped.append(word(tool.get("type") if isinstance(tool, Mapping) else None))
            return []
        check_name(tool["name"], f"{where}.name")
        return [DeclaredTool(tool, namespace, where, note)]


def is_function(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "custom" and "name" in tool


def is_namespace(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "namespace" and "name" in tool and "tools" in tool


def custom_arguments(given: str) -> str:
    """A custom call's text as the arguments that the model wrote."""
    return orjson.dumps({"input": given}).decode()


class CustomInput:
    """Reads the text of a custom call out of its arguments, as they come.

    Arguments of another form than `{"input": "..."}` are the text themselves.
    """

    def __init__(self) -> None:
        self._raw = ""  # what has not been read yet
        self._inside = False  # of the string
        self._ended = False

    def feed(self, arguments: str) -> str:
        """The text that they add."""
        if self._ended:
            return ""
        self._raw += arguments
        if not self._inside:
            head = HEAD.match(self._raw)
            if head is None:
                return ""
            self._inside, self._raw = True, self._raw[head.end() :]
        whole = CHARACTERS.match(self._raw)
        assert whole is not None  # it matches nothing, too
        self._raw = self._raw[whole.end() :]
        self._ended = self._raw.startswith('"')
        return _decoded(whole[0])

    def end(self) -> str:
        """The text that is missing once no more arguments come."""
        if self._inside:
            return ""
        try:
            found = orjson.loads(self._raw)
        except orjson.JSONDecodeError:
            return self._raw
        text = found.get("input") if isinstance(found, dict) else None
        return text if isinstance(text, str) else self._raw


def _decoded(characters: str) -> str:
    if "\\" not in characters:
        return characters
    text: str = _JSON.decode(f'"{characters}"')
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _custom_function(given: Mapping[str, Any]) -> dict[str, Any]:
    """The description and parameters of a custom tool. A regex is enforced, a Lark grammar is told to the model."""
    told, text, strict = [given.get("description") or ""], {"type": "string"}, False
    told.append("`input` is free text, with no quotes or fences around it.")
    form = given.get("format") or {}
    if form.get("type") == "grammar":
        told.append(f"It follows this {form['syntax']} grammar:\n{form['definition']}")
        if form["syntax"] == "regex":
            text, strict = {**text, "pattern": f"^(?:{form['definition']})$"}, True
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    function: dict[str, Any] = {"description": "\n".join(filter(None, told)), "parameters": parameters}
    return {**function, "strict": True} if strict else function


def _shown(tools: Sequence[DeclaredTool]) -> list[DeclaredTool]:
    """`tools` with their names to the model. Where two would be the same, those of namespaces get a digest behind."""
    seen: set[tuple[str, str]] = set()
    for each in tools:
        if (each.namespace, each.name) in seen:
            field = f"{each.field}.name"
            raise InvalidRequestError(f"'{field}': there are two tools named {each.name!r}", field)
        seen.add((each.namespace, each.name))
    flat = [_flat(each.namespace, each.name) for each in tools]
    count = Counter(flat)
    return [
        replace(each, shown=_digested(name, each.namespace, each.name) if count[name] > 1 and each.namespace else name)
        for each, name in zip(tools, flat, strict=True)
    ]


def _flat(namespace: str, name: str) -> str:
    if not namespace:
        return name
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", namespace)
    flat = f"{plain}{name}" if plain.endswith("__") else f"{plain}__{name}"
    return flat if len(flat) <= LONGEST else _digested(flat, namespace, name)


def _digested(flat: str, namespace: str, name: str) -> str:
    digest = blake2b(f"{namespace}\0{name}".encode(), digest_size=4).hexdigest()
    return f"{flat[: LONGEST - 9]}_{digest}"
