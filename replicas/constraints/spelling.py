"""The values of a schema in every spelling that models give them: properties in any order, any white space, escapes.

A call that is whole is what the model wrote, in its style. Plain, there is one text for one value: properties in the
schema's order, written as `json.dumps` does, which is how chat templates write them. What is not understood here is
left to the library, in that style too (`LarkText.json`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.replicas.constraints.lark import DEEPEST, LarkText, Schema, beyond, escaped, literal
from holdfast.replicas.text.calls.values import INTEGER, MOST_NESTED, NUMBER, referred

Member: TypeAlias = tuple[str, bool]
"""The right-hand side of a member of an object, and whether it must be there."""

_MOST_MEMBERS = 60  # of an object in any order: each has a bit of the 64 that the library counts with

_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two halves of one character
_WHOLE = r"[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
# Blanks, or line ends and an indentation: what is drawn under masks should not go on with white space for long.
_SOME = r"([ \t]{1,2}|[ \t]{0,2}(\r?\n){1,2}[ \t]{0,24})"
_SPACE = _SOME + "?"
_PLAIN = {
    "OPEN": r"\{",
    "CLOSE": r"\}",
    "OPEN_LIST": r"\[",
    "CLOSE_LIST": r"\]",
    "COLON": ": ",
    "COMMA": ", ",
    "IS": "=",
}
_TERMINALS = {
    "SPACE": _SOME,
    "OPEN": r"\{" + _SPACE,
    "CLOSE": _SPACE + r"\}",
    "OPEN_LIST": r"\[" + _SPACE,
    "CLOSE_LIST": _SPACE + r"\]",
    "COLON": f"{_SPACE}:{_SPACE}",
    "COMMA": f"{_SPACE},{_SPACE}",
    "IS": f"{_SPACE}={_SPACE}",
    "INTEGER": INTEGER,
    "NUMBER": NUMBER,
    "OTHER": r'"([^"\\\x00-\x1f]|\\["\\bfnrt])*"',
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written. `strings`: patterns of a string with `{}` for how many characters it has; `words`: the
    constants. The first of each is the plain one.
    """

    name: str
    strings: tuple[str, ...]
    words: Mapping[Any, tuple[str, ...]]
    quotes: str = '"'

    def spelled(self, value: Any) -> list[str]:
        """Texts for a constant that is no object and no list."""
        if value is None or isinstance(value, bool):
            return list(self.words[value])
        texts = [json.dumps(value, ensure_ascii=False), json.dumps(value)]
        if isinstance(value, str) and "'" in self.quotes:
            body = texts[0][1:-1].replace('\\"', '"')
            texts = [texts[0], "'" + body.replace("'", "\\'") + "'"]
        return list(dict.fromkeys(texts))


_CONSTANTS = {True: ("true",), False: ("false",), None: ("null",)}
_PYTHONS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}
_JSON_STRING = rf'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u({_WHOLE}|{_PAIR})){{}}"'
JSON = Dialect("json", (_JSON_STRING,), _CONSTANTS)
TAGGED = Dialect("tagged", (_JSON_STRING,), _PYTHONS)  # a value that stands alone: its reader takes Python's words
PYTHON = Dialect(
    "python",
    tuple(rf"""{quote}([^{quote}\\\x00-\x1f]|\\["'\\bfnrt]|\\u({_WHOLE})){{}}{quote}""" for quote in "\"'"),
    _PYTHONS,
    "\"'",
)

_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_BESIDE = frozenset({"type", "$defs", "definitions", "$schema"})  # say nothing of the value, or are read apart
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class _LeftToLibraryError(Exception):
    """A part of a schema that is not understood here."""


class Spelling:
    """Adds rules for values to a grammar, equal ones once. `free`: in any spelling, else plain."""

    def __init__(self, grammar: LarkText, free: bool) -> None:
        self.free = free
        self._grammar = grammar
        self._known: dict[tuple[str, ...], str] = {}
        self._depth = 0

    def terminal(self, name: str) -> str:
        """One of the terminals that stand between values."""
        pattern = _TERMINALS[name] if self.free else _PLAIN.get(name, _TERMINALS[name])
        return self._once(("terminal", name), name, [f"/{pattern}/"])

    @property
    def space(self) -> str:
        """White space, or none; plain there is none."""
        return f"{self.terminal('SPACE')}?" if self.free else ""

    def value(self, schema: Schema, node: Any, dialect: Dialect = JSON) -> str:
        """A rule for the values of `node`, a part of `schema`. Raises ValueError where there can be none."""
        if node is False:
            raise ValueError("nothing is allowed for a value that must be there")
        if node is True or node == {} or not isinstance(node, Mapping):
            return self._anything(dialect)
        text = json.dumps(node, default=dict)
        root = json.dumps(schema.content, default=dict) if '"$ref"' in text else ""
        key = (dialect.name, str(schema.strict), text, root)
        if key not in self._known:
            name = self._known[key] = f"v{len(self._known)}"
            self._depth += 1
            try:
                self._grammar.add(name, *self._alternatives(schema, node, dialect))
            except _LeftToLibraryError:
                self._grammar.json(name, schema.part(node) if root else Schema(node, schema.strict, schema.field))
            finally:
                self._depth -= 1
        return self._known[key]

    def members(self, members: Sequence[Member], comma: str, end: str, other: str = "") -> str:
        """`members`, each once at most, with `comma` between them and `end` behind; the required ones are there then.

        `other`: a member that may come any number of times. Plain, and where there are too many, they are in order.
        """
        if not members and not other:
            return end
        if not self.free or len(members) > _MOST_MEMBERS:
            return self._ordered(members, comma, end, other)
        ordered = sorted(members, key=lambda member: not member[1])
        needed = sum(required for _, required in members)
        ends = end + (f" %if is_ones([0:{needed}])" if needed else "")
        name = self._new()
        begins, goes_on = f"{name}_first", f"{name}_rest" if comma else f"{name}_first"
        one = [f"{text} {goes_on}::set_bit({bit}) %if bit_clear({bit})" for bit, (text, _) in enumerate(ordered)]
        self._grammar.add(f"{name}_one::_", *one, *([f"{other} {goes_on}::_"] if other else []))
        self._grammar.add(f"{begins}::_", ends, f"{name}_one::_")
        if comma:
            left = "" if other else f" %if not(is_ones([0:{len(members)}]))"  # or nothing could follow the comma
            self._grammar.add(f"{goes_on}::_", ends, f"{comma} {name}_one::_{left}")
        return f"{begins}::0x0"

    def _ordered(self, members: Sequence[Member], comma: str, end: str, other: str) -> str:
        """One rule per place and whether anything stands before it."""
        name = self._new()
        for begun in (False, True):
            more = f"{comma} {other}" if begun else other
            last = [end] if not other else [f"{more} {name}_at{len(members)}_1", end]
            self._grammar.add(f"{name}_at{len(members)}_{int(begun)}", *last)
        for index in range(len(members) - 1, -1, -1):
            for begun in (False, True):
                item, needed = members[index]
                taken = f"{comma if begun else ''} {item} {name}_at{index + 1}_1"
                left = [] if needed else [f"{name}_at{index + 1}_{int(begun)}"]
                self._grammar.add(f"{name}_at{index}_{int(begun)}", taken, *left)
        return f"{name}_at0_0"

    def _new(self) -> str:
        name = f"m{len(self._known)}"
        self._known[(name,)] = name
        return name

    def _once(self, key: tuple[str, ...], name: str, alternatives: Iterable[str]) -> str:
        if key not in self._known:
            self._known[key] = name
            self._grammar.add(name, *alternatives)
        return self._known[key]

    def _alternatives(self, schema: Schema, node: Mapping[str, Any], dialect: Dialect) -> list[str]:
        """The right-hand sides of a value's rule."""
        if self._depth > DEEPEST:
            raise _LeftToLibraryError
        if "$ref" in node:
            return [self._referred(schema, node, dialect)]
        if "const" in node or "enum" in node:
            return self._constants(node, dialect)
        if node.keys() == {"anyOf"}:
            options = node["anyOf"]
            if not isinstance(options, Sequence) or isinstance(options, str):
                raise _LeftToLibraryError
            found = [self.value(schema, each, dialect) for each in options if each is not False]
            if not found:
                raise _LeftToLibraryError
            return found
        types = node.get("type")
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) and n in _OF_TYPE for n in names):
            raise _LeftToLibraryError
        if node.keys() - _BESIDE - frozenset().union(*(_OF_TYPE[name] for name in names)):
            raise _LeftToLibraryError
        if len(names) == 1:
            return self._typed(schema, node, names[0], dialect)
        parts = [{"type": n, **{k: v for k, v in node.items() if k in _OF_TYPE[n]}} for n in names]
        return [self.value(schema, part, dialect) for part in parts]

    def _referred(self, schema: Schema, node: Mapping[str, Any], dialect: Dialect) -> str:
        found = referred(node["$ref"], schema.content)
        if node.keys() - {"$defs", "definitions"} != {"$ref"} or not isinstance(found, Mapping) or "$ref" in found:
            raise _LeftToLibraryError  # one that leads to another may lead round
        return self.value(schema, found, dialect)

    def _constants(self, node: Mapping[str, Any], dialect: Dialect) -> list[str]:
        if not node.keys() <= {"const", "type"} and not node.keys() <= {"enum", "type"}:
            raise _LeftToLibraryError
        values = [node["const"]] if "const" in node else node["enum"]
        types = node.get("type")
        if types is not None:
            if types not in _KINDS or not isinstance(values, Sequence):
                raise _LeftToLibraryError
            values = [each for each in values if _is_kind(each, types)]
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise _LeftToLibraryError
        if not all(isinstance(each, (str, int, float, type(None))) for each in values):
            raise _LeftToLibraryError
        return [literal(text) for each in values for text in self._spelled(each, dialect)]

    def _spelled(self, value: Any, dialect: Dialect) -> list[str]:
        return dialect.spelled(value)[: None if self.free else 1]

    def _typed(self, schema: Schema, node: Mapping[str, Any], kind: str, dialect: Dialect) -> list[str]:
        match kind:
            case "string":
                if node.keys() & {"pattern", "format"}:
                    raise _LeftToLibraryError
                return [self._string(node, dialect)]
            case "boolean":
                return [literal(text) for value in (True, False) for text in self._spelled(value, dialect)]
            case "null":
                return [literal(text) for text in self._spelled(None, dialect)]
            case "object":
                return [self._object(schema, node, dialect)]
            case "array":
                return [self._list(schema, node, dialect)]
            case _:
                return self._number(schema, node, kind)

    def _number(self, schema: Schema, node: Mapping[str, Any], kind: str) -> list[str]:
        """A number, which has one spelling. Its limits are left to the library."""
        limits = {key: value for key, value in node.items() if key in _OF_TYPE["number"]}
        if not limits:
            return [self.terminal(kind.upper())]
        name = self._grammar.json(self._new(), Schema({"type": kind, **limits}, schema.strict, schema.field))
        more = beyond(limits, kind)
        return [name, self._once(("beyond", more), f"BEYOND{len(self._known)}", [f"/{more}/"])] if more else [name]

    def _string(self, node: Mapping[str, Any], dialect: Dialect) -> str:
        least, most = node.get("minLength", 0), node.get("maxLength")
        if not _is_count(least) or not (most is None or (_is_count(most) and most >= least)):
            raise _LeftToLibraryError
        times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        patterns = [f"/{each.replace('{}', times)}/" for each in dialect.strings[: None if self.free else 1]]
        return self._once(("string", dialect.name, times), f"STRING{len(self._known)}", patterns)

    def _object(self, schema: Schema, node: Mapping[str, Any], dialect: Dialect) -> str:
        properties, required = node.get("properties", {}), node.get("required", [])
        others = node.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
            raise _LeftToLibraryError
        if not properties.keys() >= set(map(str, required)) or not isinstance(others, (bool, Mapping)):
            raise _LeftToLibraryError
        colon, members = self.terminal("COLON"), list[Member]()
        for key, value in properties.items():
            if value is not False or key in required:
                names = " | ".join(map(literal, self._spelled(key, dialect)))
                members.append((f"({names}) {colon} {self.value(schema, value, dialect)}", key in required))
        other = ""
        if others is not False:
            other = f"{self._other(properties, dialect)} {colon} {self.value(schema, others, dialect)}"
        return f"{self.terminal('OPEN')} {self.members(members, self.terminal('COMMA'), self.terminal('CLOSE'), other)}"

    def _other(self, properties: Iterable[str], dialect: Dialect) -> str:
        """A terminal for keys that are none of `properties`, which an escape could spell another way."""
        quoted = {json.dumps(key, ensure_ascii=False) for key in properties}
        if not quoted:
            return self.terminal("OTHER")
        listed = "|".join(map(escaped, sorted(quoted)))
        any_key = self.terminal("OTHER")
        return self._once(("other", listed), f"OTHER{len(self._known)}", [f"{any_key} & ~/({listed})/"])

    def _list(self, schema: Schema, node: Mapping[str, Any], dialect: Dialect) -> str:
        least, most = node.get("minItems", 0), node.get("maxItems")
        if not _is_count(least) or not (most is None or (_is_count(most) and most >= least)):
            raise _LeftToLibraryError
        begin, end, comma = self.terminal("OPEN_LIST"), self.terminal("CLOSE_LIST"), self.terminal("COMMA")
        if most == 0:
            return f"{begin} {end}"
        items = node.get("items", True)
        if items is False:
            raise _LeftToLibraryError
        item = self.value(schema, items, dialect)
        times = "*" if most is None and least < 2 else f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f"{item} ({comma} {item}){times}" if most != 1 else item
        return f"{begin} {some} {end}" if least else f"{begin} ({some})? {end}"

    def _anything(self, dialect: Dialect) -> str:
        """Any value, nested to some depth."""
        name = f"any_{dialect.name}"
        if (key := ("anything", dialect.name)) not in self._known:
            self._known[key] = name
            words = [literal(text) for value in dialect.words for text in self._spelled(value, dialect)]
            scalar = [self._string({}, dialect), self.terminal("NUMBER"), *words]
            comma, colon, other = self.terminal("COMMA"), self.terminal("COLON"), self.terminal("OTHER")
            begin, end = self.terminal("OPEN"), self.terminal("CLOSE")
            begin_list, end_list = self.terminal("OPEN_LIST"), self.terminal("CLOSE_LIST")
            for level in range(MOST_NESTED + 1):
                whole, inner = (f"{name}_{level}" if level < MOST_NESTED else name), f"{name}_{level - 1}"
                members = f"{begin} ({other} {colon} {inner} ({comma} {other} {colon} {inner})*)? {end}"
                elements = f"{begin_list} ({inner} ({comma} {inner})*)? {end_list}"
                self._grammar.add(whole, *scalar, *((members, elements) if level else ()))
        return name


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
