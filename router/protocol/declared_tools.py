"""The tools of `/v1/responses`, as a client declares them and as the functions that the model sees.

    function                  itself
    function of a namespace   NAMESPACE__NAME, whatever else is declared: names stay as tools come and go
    custom tool               a function with one argument, the text `input`

A call goes back to the client as its tool was declared. A call in the history has the name that the model knows.
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
from holdfast.router.protocol.body import MOST_TOOLS, missing, word
from holdfast.router.protocol.chat import Tool, check_name

LONGEST = 64  # characters of a function's name
_JSON = json.JSONDecoder(strict=False)
_HEAD = re.compile(r'\s*+\{\s*+"input"\s*+:\s*+"')
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NOT_LOW = r"(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
_CHARACTERS = re.compile(  # the complete characters of a JSON string: half of a surrogate pair waits for the other half
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rf"|\\u[dD][89abAB][0-9a-fA-F]{{2}}(?:{_LOW}|{_NOT_LOW}))*+"
)


def is_function(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "custom" and "name" in tool


def is_namespace(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "namespace" and "name" in tool and "tools" in tool


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A function or a custom tool. `namespace` is "" for none; `field` is its place in the request."""

    declared: Mapping[str, Any]
    namespace: str
    field: str
    note: str = ""  # the description of its namespace, which the first tool there carries
    shown: str = ""  # the model's name for it

    @property
    def name(self) -> str:
        name: str = self.declared["name"]
        return name

    @property
    def custom(self) -> bool:
        return bool(self.declared["type"] == "custom")

    def function(self) -> Tool:
        """The tool as chat has it."""
        function: Any = {"name": self.shown}
        if self.custom:
            function.update(_custom_function(self.declared))
        else:
            optional = ("description", "parameters", "strict")
            function.update({key: self.declared[key] for key in optional if self.declared.get(key)})
        if self.note:
            function["description"] = f"{self.note}\n\n{function.get('description', '')}".rstrip()
        return {"type": "function", "function": function}


class DeclaredTools:
    """The tools of one request. `skipped` are the types of those that no model here can call.

    Raises InvalidRequestError for a name that is not well formed, or is declared twice in a namespace.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.skipped: list[str] = []
        declared: list[DeclaredTool] = []
        for index, tool in enumerate(tools):
            if is_namespace(tool):
                note = tool.get("description") or ""
                for inner, each in enumerate(tool["tools"]):
                    read = self._read(each, tool["name"], f"tools.{index}.tools.{inner}", note)
                    declared, note = [*declared, *read], "" if read else note
            else:
                declared += self._read(tool, "", f"tools.{index}")
        if len(declared) > MOST_TOOLS:
            raise InvalidRequestError(
                f"'tools' has {len(declared)} functions; at most {MOST_TOOLS} are allowed", "tools"
            )
        self.tools = _with_shown_names(declared)
        self._declared = {(each.namespace, each.name): each for each in self.tools}
        self._by_name = {each.shown: each for each in self.tools}
        names = Counter(each.name for each in self.tools)
        for each in self.tools:
            if names[each.name] == 1:  # its own name is enough to identify it
                self._by_name.setdefault(each.name, each)

    def called(self, shown: str) -> DeclaredTool | None:
        """The tool that the model calls by this name."""
        return self._by_name.get(shown)

    def shown(self, name: str, namespace: str) -> str:
        """The model's name for the tool of a call in the history, even if the tool is no longer declared."""
        tool = self._declared.get((namespace, name)) if namespace else self._by_name.get(name)
        return tool.shown if tool is not None else _flat(namespace, name)

    def chosen(self, entry: Mapping[str, Any], path: str) -> list[str]:
        """The model's names for the tools of one entry of `tool_choice`. Raises InvalidRequestError."""
        kind, name, namespace = entry.get("type"), entry.get("name"), entry.get("namespace")
        if not isinstance(name, str):
            raise missing(f"{path}.name")
        if kind == "namespace":
            matches = [each for each in self.tools if each.namespace == name]
            if not matches:
                raise InvalidRequestError(f"'{path}.name': no namespace is named {name!r}", f"{path}.name")
            return [each.shown for each in matches]
        same = [each for each in self.tools if each.custom == (kind == "custom")]
        if namespace is not None:
            matches = [each for each in same if (each.namespace, each.name) == (namespace, name)]
        else:
            matches = [each for each in same if each.shown == name] or [each for each in same if each.name == name]
        if not matches:
            raise InvalidRequestError(f"'{path}.name': no {kind} tool is named {name!r}", f"{path}.name")
        if len(matches) > 1:
            message = f"'{path}.name': {name!r} is in several namespaces; name one in '{path}.namespace'"
            raise InvalidRequestError(message, f"{path}.namespace")
        return [matches[0].shown]

    def _read(self, tool: Any, namespace: str, path: str, note: str = "") -> list[DeclaredTool]:
        if not is_function(tool) and not is_custom(tool):
            self.skipped.append(word(tool.get("type") if isinstance(tool, Mapping) else None))
            return []
        check_name(tool["name"], f"{path}.name")
        return [DeclaredTool(tool, namespace, path, note)]


def _with_shown_names(tools: Sequence[DeclaredTool]) -> list[DeclaredTool]:
    """`tools` with the model's names for them. A digest is added where a namespace's tool has another tool's name."""
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


# ---- custom tools ----


def _custom_function(declared: Mapping[str, Any]) -> dict[str, Any]:
    """The description and parameters of a custom tool. A regex is enforced; a Lark grammar is only described."""
    notes, text = [declared.get("description") or ""], {"type": "string"}
    notes.append("`input` is free text, with no quotes or fences around it.")
    form = declared.get("format") or {}
    regex = form.get("type") == "grammar" and form["syntax"] == "regex"
    if form.get("type") == "grammar":
        notes.append(f"It follows this {form['syntax']} grammar:\n{form['definition']}")
    if regex:
        text["pattern"] = f"^(?:{form['definition']})$"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    function: dict[str, Any] = {"description": "\n".join(filter(None, notes)), "parameters": parameters}
    return {**function, "strict": True} if regex else function


def custom_arguments(text: str) -> str:
    """The text of a custom call as the arguments that the model wrote."""
    return orjson.dumps({"input": text}).decode()


class CustomInput:
    """Reads the text of a custom call out of its arguments as they arrive.

    Arguments of another form than `{"input": "..."}` are the text themselves.
    """

    def __init__(self) -> None:
        self._raw = ""  # what has not been read yet
        self._in_string = False  # the string has begun
        self._ended = False

    def feed(self, arguments: str) -> str:
        """The text that these arguments add."""
        if self._ended:
            return ""
        self._raw += arguments
        if not self._in_string:
            head = _HEAD.match(self._raw)
            if head is None:
                return ""
            self._in_string, self._raw = True, self._raw[head.end() :]
        whole = _CHARACTERS.match(self._raw)
        assert whole is not None  # the pattern matches the empty text too
        self._raw = self._raw[whole.end() :]
        self._ended = self._raw.startswith('"')
        return _decoded(whole[0])

    def end(self) -> str:
        """The missing text when no more arguments come."""
        if self._in_string:
            return ""
        try:
            value = orjson.loads(self._raw)
        except orjson.JSONDecodeError:
            return self._raw
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._raw


def _decoded(characters: str) -> str:
    if "\\" not in characters:
        return characters
    text: str = _JSON.decode(f'"{characters}"')
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
