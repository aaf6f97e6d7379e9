"""The text of a grammar in the library's Lark dialect, rule by rule, and the schemas that it speaks of.

Not here: what a reply has to be (`grammar`), and the spellings that a value may have (`spelling`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEEPEST = 32  # schemas in schemas that are read here; what is deeper is left to the library as it is
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # others could spell half a surrogate pair
}


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A JSON schema and the request's field that holds it. Not `strict`: what the library lacks is left out."""

    content: Mapping[str, Any]
    strict: bool
    field: str

    def part(self, value: Any) -> "Schema":
        """The schema of one of its values, with the definitions that it may refer to."""
        shared = {key: self.content[key] for key in ("$defs", "definitions") if key in self.content}
        return Schema({**(value if isinstance(value, Mapping) else {}), **shared}, self.strict, self.field)


class LarkText:
    """Rules of a grammar as they are written, one a line."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, *alternatives: str) -> str:
        """A rule with these right-hand sides; returns its name. One with "::" in its name has a parameter."""
        self._lines.append(f"{name}: {' | '.join(alternatives)}")
        return name.partition("[")[0]

    def json(self, name: str, schema: Schema) -> str:
        """A rule for the values of `schema`, written as `json.dumps` does, which is how chat templates write them."""
        style = _STYLE if schema.strict else {**_STYLE, "lenient": True}
        return self.add(name, "%json " + json.dumps({**schema.content, "x-guidance": style}))

    def thought(self, name: str, opener: str, closer: str, behind: str) -> str:
        """A rule for a text between the two, and what stands `behind` it; or for nothing."""
        text = self.add(f"{name.upper()}_TEXT", r"/(.|\n)*/")
        until = self.add(f"{name}_until[lazy]", f"{text} {literal(closer)}")
        return self.add(name, f"({literal(opener)} {until} {literal(behind)})?")

    @property
    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "required", "dependentRequired", "dependencies"})


def without_annotations(schema: Any, depth: int = DEEPEST) -> Any:
    """`schema` with nothing in it that only people read, down to some depth: what it allows is the same."""
    if not depth:
        return schema
    if isinstance(schema, Mapping):
        return {
            key: value
            if key in _VALUES
            else _each(value, depth)
            if key in _NAMED
            else without_annotations(value, depth - 1)
            for key, value in schema.items()
            if key not in _ANNOTATIONS
        }
    return [without_annotations(each, depth - 1) for each in schema] if isinstance(schema, (list, tuple)) else schema


def _each(named: Any, depth: int) -> Any:
    if not isinstance(named, Mapping):
        return named
    return {name: without_annotations(schema, depth - 1) for name, schema in named.items()}
