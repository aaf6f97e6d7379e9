"""Writing a grammar in the library's Lark dialect: literals, JSON schemas, Python keyword arguments.

JSON is written as `json.dumps` does, which is how chat templates write it: one text for one value, and no room for
white space without end. Escapes that could spell half a surrogate pair are left out.
"""

import json
from collections.abc import Mapping, Sequence

from holdfast.replicas.constraints.rules import Schema

_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


class Grammar:
    """Rules, one a line. `start` is the first."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, *alternatives: str) -> str:
        """A rule with these right-hand sides; returns its name."""
        self._lines.append(f"{name}: {' | '.join(alternatives)}")
        return name.partition("[")[0]

    def json(self, name: str, schema: Schema) -> str:
        """A rule for the values of `schema`."""
        style = _STYLE if schema.strict else {**_STYLE, "lenient": True}
        return self.add(name, "%json " + json.dumps({**schema.content, "x-guidance": style}))

    def keywords(self, name: str, schema: Schema) -> str:
        """A rule for the keyword arguments of a Python call: the properties of `schema`, in its order.

        Their values are JSON, whose words and escapes the reader of such calls takes as Python's. Raises ValueError
        for a schema whose properties cannot be told, and for a required one that is no Python name.
        """
        content = schema.content
        properties, required = content.get("properties", {}), content.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError("'properties' must be an object")
        if not isinstance(required, Sequence) or not all(isinstance(key, str) for key in required):
            raise ValueError("'required' must be a list of names")
        if unfit := [key for key in ("$ref", "anyOf", "allOf", "oneOf", "patternProperties") if key in content]:
            raise ValueError(f"{unfit[0]} at the top level has no meaning for keyword arguments")
        if nameless := [key for key in required if key not in properties or not key.isidentifier()]:
            raise ValueError(f"{nameless[0]!r} cannot be a keyword argument")
        shared = {key: content[key] for key in ("$defs", "definitions") if key in content}
        names = [key for key in properties if key.isidentifier()]
        values = []
        for index, key in enumerate(names):
            value = properties[key] if isinstance(properties[key], Mapping) else {}
            rule = self.json(f"{name}_value{index}", Schema({**value, **shared}, schema.strict, schema.field))
            values.append((literal(f"{key}=") + f" {rule}", key in required))
        return self._sequence(name, values)

    def _sequence(self, name: str, items: Sequence[tuple[str, bool]]) -> str:
        """`items` in order with commas between them, each with whether it must be there. One rule per place and
        whether anything stands before it."""
        for index in range(len(items), -1, -1):
            for begun in (False, True):
                rule = f"{name}_from{index}_{int(begun)}"
                if index == len(items):
                    self.add(rule, '""')
                    continue
                item, needed = items[index]
                taken = f"{literal(', ') if begun else ''} {item} {name}_from{index + 1}_1"
                self.add(rule, *([taken] if needed else [taken, f"{name}_from{index + 1}_{int(begun)}"]))
        return self.add(name, f"{name}_from0_0")

    @property
    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"
