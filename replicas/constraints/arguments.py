"""Rules for the arguments of a call: an object of JSON, Python's keyword arguments, or a tag for each.

Plain, which is what a call has to be that is drawn under masks from its first character on, or free: see `spelling`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.replicas.constraints.lark import LarkText, Schema, escaped, literal
from holdfast.replicas.constraints.spelling import JSON, PYTHON, TAGGED, Member, Spelling
from holdfast.replicas.text.calls.formats import TagForm
from holdfast.replicas.text.calls.tracker import as_json
from holdfast.replicas.text.calls.values import INTEGER, NUMBER, alternatives, argument_schema, kinds_of

_LINE = r'("\n")?'
_NAMES = re.compile(r'[^\s<>"]+')
_OTHER_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class ArgumentRules:
    """Adds rules for arguments to a grammar, their values as `spelling` has them."""

    def __init__(self, grammar: LarkText, spelling: Spelling) -> None:
        self._grammar = grammar
        self._spelling = spelling
        self._known: dict[str, str] = {}  # rules of values in tags, by what they say

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
            try:
                text = self._argument(f"{name}_value{index}", literal(key), schema, properties[key], form)
            except ValueError as error:
                raise ValueError(f"argument {key!r}: {error}") from error
            members.append((text, key in required))
        other = ""
        if schema.content.get("additionalProperties", True) is not False:
            but = f" & ~/({'|'.join(map(escaped, keys))})/" if keys else ""
            key = self._grammar.add(f"{name.upper()}_KEY", _OTHER_KEY + but)
            other = self._argument(f"{name}_other", key, schema, argument_schema(schema.content, ""), form)
        return self._grammar.add(name, self._spelling.members(members, "", '""', other))

    @property
    def _space(self) -> str:
        """Between tags."""
        return self._spelling.space or _LINE

    def _tags(self, key: str, form: TagForm, text: bool | None) -> str:
        """The tags of an argument up to its value. `text`: whether they call it one; None: they may call it either."""
        value = f" {self._space} ".join(map(literal, form.value.split("\n")))
        if form.json and text is not True:
            value = literal(form.json) if text is False else f"({value} | {literal(form.json)})"
        return f"{self._space} {literal(form.key)} {key} {value}"

    def _argument(self, name: str, key: str, schema: Schema, value: Any, form: TagForm) -> str:
        """An argument with its tags. Raises ValueError for a value that cannot be followed in them."""
        options = alternatives(value, schema.content)
        if not options:
            raise ValueError("it has no value, or too many alternatives")
        texts = [each for each in options if each["type"] == "string"]
        rest = [each for each in options if each["type"] != "string"]
        if not (form.json and texts and rest):
            return f"{self._tags(key, form, None)} {self._in_tags(name, schema, texts, form, rest)}"
        text = f"{self._tags(key, form, True)} {self._in_tags(f'{name}_text', schema, texts, form)}"
        return f"({text} | {self._tags(key, form, False)} {self._in_tags(name, schema, (), form, rest)})"

    def _in_tags(
        self,
        name: str,
        schema: Schema,
        texts: Sequence[Mapping[str, Any]],
        form: TagForm,
        rest: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A rule for one of `texts` or `rest` up to and with its end, added once for all that say the same."""
        said = json.dumps([schema.strict, form.end, [*texts], [*rest]], default=dict)
        key = name if '"$ref"' in said else said
        if key not in self._known:
            found = self._text(name, schema, texts, form, rest) if texts else self._json(name, schema, rest, form)
            self._known[key] = found
        return self._known[key]

    def _json(self, name: str, schema: Schema, options: Sequence[Mapping[str, Any]], form: TagForm) -> str:
        """A rule for a value in JSON up to and with its end."""
        begin, end = self._around(form)
        return self._grammar.add(name, f"{begin} {self._value(schema, options)} {end}")

    def _around(self, form: TagForm) -> tuple[str, str]:
        """What stands around a value in JSON."""
        if self._spelling.free:
            return self._space, f"{self._space} {literal(form.end)}"
        line = literal("\n") if form.line else ""
        return line, f"{line} {literal(form.end)}"

    def _value(self, schema: Schema, options: Sequence[Mapping[str, Any]]) -> str:
        node = options[0] if len(options) == 1 else {"anyOf": [*options]}
        return self._spelling.value(schema, node, TAGGED)

    def _text(
        self,
        name: str,
        schema: Schema,
        texts: Sequence[Mapping[str, Any]],
        form: TagForm,
        rest: Sequence[Mapping[str, Any]],
    ) -> str:
        """A rule for one of `texts` as it is, or a value of `rest` in JSON, up to and with its end.

        A lexer cannot go back. So all that has no bracket is one terminal, and a text that begins as an object or a
        list does is none where only some objects or lists may stand.
        """
        free, listed = _texts(texts, schema.strict)
        scalars = _Scalars.of(rest, schema.strict, any_text=(0, None) in free)
        kinds = kinds_of({"anyOf": [*texts, *rest]}, schema.content)
        words = [text for text in listed if as_json(text, kinds) == json.dumps(text, ensure_ascii=False)]
        some = " | ".join(f"/{_counted(least, most)}/" for least, most in free)
        if some and scalars.taken:
            some = f"({some}) & ~/{_BLANK}({'|'.join(scalars.taken)}){_BLANK}/"
        patterns = [f"({some})"] if some else []
        patterns += [f"/{each}/" for each in scalars.patterns]
        patterns += [literal(word) or "/(x){0}/" for word in (*words, *scalars.words)]
        if not patterns:
            return self._json(name, schema, rest, form)  # none of the texts can be told from it
        within = "" if patterns == ["(/(.|\\n)*/)"] else f" & ~/(.|\\n)*{escaped(form.end)}(.|\\n)*/"
        text = self._grammar.add(f"{name.upper()}_TEXT", f"({' | '.join(patterns)}){within}")
        line = "\n" if form.line else ""
        # The reader takes one line end on either side for none of the text.
        lines = bool(line) and self._spelling.free and not any(least for least, _ in free)
        begin, end = literal(line), literal(line + form.end)
        if scalars.json:
            shut = "|".join(scalars.begins)
            after = " /\\n?/" if lines else ""
            text = self._grammar.add(f"{name.upper()}_APART", f"({text}{after}) & ~/({shut})/")
            end = literal(form.end) if lines else end
        elif lines:
            text = self._grammar.add(f"{name.upper()}_LINES", f"/\\n?/ {text} /\\n?/")
            begin, end = "", literal(form.end)
        until = self._grammar.add(f"{name}_until[lazy]", f"{text} {end}")
        if not scalars.json:
            return self._grammar.add(name, f"{begin} {until}")
        behind = self._around(form)[1]
        return self._grammar.add(name, f"{begin} ({until} | {self._value(schema, scalars.json)} {behind})")


Lengths: TypeAlias = tuple[int, int | None]

_BLANK = r"[ \t\r\n]*"
_WORDS = {True: "[tT]rue", False: "[fF]alse", None: "null|None"}
_ANY_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_VALUE_BEGINS = r"[\]\[\{\"0-9\-]|[tT]rue|[fF]alse|null|None"
_BEGINS = {
    # White space before a bracket ends the text at once: the bracket would be read as a part of both.
    "object": rf"[ \t\r\n]+\{{(.|\n)*|\{{{_BLANK}[\"\}}](.|\n)*",
    "array": rf"[ \t\r\n]+\[(.|\n)*|\[{_BLANK}({_VALUE_BEGINS})(.|\n)*",
    "number": rf"{_BLANK}[0-9\-](.|\n)*",
}


def _texts(texts: Sequence[Mapping[str, Any]], strict: bool) -> tuple[list[Lengths], list[str]]:
    """The lengths of free texts, and the listed ones. Raises ValueError for a strict one that says more."""
    free: list[Lengths] = []
    listed: list[str] = []
    for each in texts:
        if strict and (unfit := sorted(each.keys() - {"type", "enum", "minLength", "maxLength"})):
            raise ValueError(f"{unfit[0]} of a text cannot be followed in tags")
        least, most = each.get("minLength"), each.get("maxLength")
        lengths = least if isinstance(least, int) else 0, most if isinstance(most, int) else None
        if "enum" not in each:
            free.append(lengths)
        else:
            fits = [text for text in each["enum"] if lengths[0] <= len(text) <= (lengths[1] or len(text))]
            listed += (text for text in fits if text not in listed)
    return list(dict.fromkeys(free)), listed


def _counted(least: int, most: int | None) -> str:
    return rf"(.|\n){{{least},{'' if most is None else most}}}" if least or most is not None else r"(.|\n)*"


@dataclass(slots=True)
class _Scalars:
    """How values that may stand beside texts are told from them.

    `patterns` and `words` are of values without brackets. A text that matches one of `taken` is none, nor is one that
    matches one of `begins`: the `json` alternatives, which have rules of their own, begin so.
    """

    patterns: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    json: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, options: Sequence[Mapping[str, Any]], strict: bool, any_text: bool) -> "_Scalars":
        """`any_text`: any text may stand beside them, also one that is read as one of them."""
        found = cls()
        for kind in ("boolean", "null", "number", "object", "array"):
            of = [each for each in options if each["type"] == kind or (kind, each["type"]) == ("number", "integer")]
            unsaid = any(_says_nothing(each) for each in of)
            if not of or (unsaid and any_text):
                continue
            if kind in ("object", "array"):
                found.json += of
                found.begins.append(_BEGINS[kind])
            elif kind == "number":
                found._number(of, strict, unsaid)
            else:
                if strict and (unfit := sorted({key for each in of for key in each} - {"type", "enum"})):
                    raise ValueError(f"{unfit[0]} of a {kind} cannot be followed in tags")
                values = [True, False] if kind == "boolean" else [None]
                listed = values if unsaid else [value for each in of for value in each.get("enum", values)]
                found.patterns += (_WORDS[value] for value in dict.fromkeys(listed))
                found.taken += [] if unsaid else ["|".join(_WORDS[value] for value in values)]
        return found

    def _number(self, of: Sequence[Mapping[str, Any]], strict: bool, unsaid: bool) -> None:
        kinds = {each["type"] for each in of if _says_nothing(each) or not strict}
        listed = [value for each in of for value in each.get("enum", ())]
        limited = [each for each in of if each.keys() - {"type", "enum"} and not _says_nothing(each)]
        if strict and limited and not unsaid:
            self.json += of
            self.begins.append(_BEGINS["number"])
        elif unsaid or limited:
            self.patterns.append(NUMBER if "number" in kinds else INTEGER)
        self.words += () if self.begins[-1:] == [_BEGINS["number"]] else map(json.dumps, listed)
        self.taken += [] if unsaid else [_ANY_NUMBER]


def _says_nothing(option: Mapping[str, Any]) -> bool:
    """Whether every value of its type follows it."""
    return all(key == "type" or said is True or said == {} for key, said in option.items())


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
