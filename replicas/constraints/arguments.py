"""Rules for the arguments of a call: an object of JSON, Python's keyword arguments, or a tag for each.

Plain, which is what a call has to be that is drawn under masks from its first character on, or free: see `spelling`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.replicas.constraints.lark import LarkText, Schema, literal
from holdfast.replicas.constraints.spelling import JSON, PYTHON, TAGGED, Member, Spelling
from holdfast.replicas.text.calls.formats import TagForm
from holdfast.replicas.text.calls.values import TEXT, argument_schema, kinds_of, resolved

_LINE = r'("\n")?'
_NAMES = re.compile(r'[^\s<>"]+')
_OTHER_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class ArgumentRules:
    """Adds rules for arguments to a grammar, their values as `spelling` has them."""

    def __init__(self, grammar: LarkText, spelling: Spelling) -> None:
        self._grammar = grammar
        self._spelling = spelling

    def rule(self, name: str, schema: Schema, keywords: bool, tags: TagForm | None) -> str:
        """A rule for arguments of `schema`. Raises ValueError as the others do."""
        if keywords:
            return self.keywords(name, schema)
        if tags is not None:
            return self.tagged(name, schema, tags)
        return self._spelling.value(schema, schema.content, JSON)

    def keywords(self, name: str, schema: Schema) -> str:
        """A rule for the keyword arguments of a Python call: the properties of `schema`.

        Raises ValueError for a schema whose properties cannot be told, and for a required one that is no Python name.
        """
        properties, required = _properties(schema, "keyword arguments")
        if nameless := [key for key in required if key not in properties or not key.isidentifier()]:
            raise ValueError(f"{nameless[0]!r} cannot be a keyword argument")
        spelling = self._spelling
        members: list[Member] = [
            (f"{literal(key)} {spelling.terminal('IS')} {spelling.value(schema, value, PYTHON)}", key in required)
            for key, value in properties.items()
            if key.isidentifier()
        ]
        return self._grammar.add(name, spelling.members(members, spelling.terminal("COMMA"), '""'))

    def tagged(self, name: str, schema: Schema, form: TagForm) -> str:
        """A rule for arguments in tags: the properties of `schema`; with none, whatever there may be.

        Raises ValueError for a schema whose properties cannot be told, and of a strict one for texts that are more than
        of some length, or of a list.
        """
        properties, required = _properties(schema, "arguments in tags")
        if nameless := [key for key in required if key not in properties or not _NAMES.fullmatch(key)]:
            raise ValueError(f"{nameless[0]!r} cannot be an argument in tags")
        keys = [key for key in properties if _NAMES.fullmatch(key)]
        members: list[Member] = []
        for index, key in enumerate(keys):
            value = self._in_tag(f"{name}_value{index}", schema, properties[key], form)
            members.append((f"{self._tags(literal(key), form)} {value}", key in required))
        other = ""
        if schema.content.get("additionalProperties", True) is not False:
            value = self._in_tag(f"{name}_other", schema, argument_schema(schema.content, ""), form)
            but = f" & ~/({'|'.join(map(re.escape, keys))})/" if keys else ""
            key = self._grammar.add(f"{name.upper()}_KEY", _OTHER_KEY + but)
            other = f"{self._tags(key, form)} {value}"
        return self._grammar.add(name, self._spelling.members(members, "", '""', other))

    @property
    def _space(self) -> str:
        """Between tags."""
        return self._spelling.space or _LINE

    def _tags(self, key: str, form: TagForm) -> str:
        """The tags of an argument up to its value."""
        value = f" {self._space} ".join(map(literal, form.value.split("\n")))
        value = f"({value} | {literal(form.json)})" if form.json else value
        return f"{self._space} {literal(form.key)} {key} {value}"

    def _in_tag(self, name: str, schema: Schema, value: Any, form: TagForm) -> str:
        """A rule for one value up to and with its end: a text as it is, else JSON."""
        line = "\n" if form.line else ""
        free = self._spelling.free
        begin, end = literal(line), f"{literal(line)} {literal(form.end)}"
        if free and line:
            begin, end = _LINE, f"{_LINE} {literal(form.end)}"
        content = resolved(value, schema.content)
        listed = [content["const"]] if "const" in content else content.get("enum")
        if isinstance(listed, list) and listed:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in listed]
            return self._grammar.add(name, *(f"{begin} {literal(text)} {end}" for text in texts))
        if not kinds_of(value, schema.content) >= TEXT:
            if free:
                begin, end = self._space, f"{self._space} {literal(form.end)}"
            return self._grammar.add(name, f"{begin} {self._spelling.value(schema, value, TAGGED)} {end}")
        if schema.strict and (unfit := [key for key in ("pattern", "format") if key in content]):
            raise ValueError(f"{unfit[0]} of a text cannot be followed in tags")
        least, most = (content.get(key) for key in ("minLength", "maxLength"))
        counted = isinstance(least, int) or isinstance(most, int)
        times = f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
        pattern = rf"(.|\n){times if counted else '*'}"
        if free and line and not least:  # its reader takes one line end on either side for none of the text
            begin, line, pattern = "", "", rf"\n?{pattern}\n?"
        text = self._grammar.add(f"{name.upper()}_TEXT", f"/{pattern}/")
        until = self._grammar.add(f"{name}_until[lazy]", f"{text} {literal(line + form.end)}")
        return self._grammar.add(name, f"{literal(line) if begin else ''} {until}")


def _properties(schema: Schema, what: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The properties of an object and the names of the required ones. Raises ValueError where they cannot be told."""
    content = schema.content
    properties, required = content.get("properties", {}), content.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    if not isinstance(required, Sequence) or not all(isinstance(key, str) for key in required):
        raise ValueError("'required' must be a list of names")
    if unfit := [key for key in ("$ref", "anyOf", "allOf", "oneOf", "patternProperties") if key in content]:
        raise ValueError(f"{unfit[0]} at the top level has no meaning for {what}")
    return properties, required
