"""The parts of values.schema.json that follow from the code: `config` and `alerts`.

`config` has the fields of the configuration classes, with the comments behind them; `alerts` has the names of the
alerts. The rest of the file is written by hand.
"""

import dataclasses
import json
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from helm.build.rules import ALERTS
from holdfast.cluster.config import Settings
from holdfast.cluster.config_file import comments

FILE = Path(__file__).parents[1] / "holdfast" / "values.schema.json"
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}


def of(hint: Any) -> dict[str, Any]:
    """JSON schema of a value of type `hint`, as `cluster.config_file` reads it. Raises TypeError for other types."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return of_class(hint)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    inside = get_args(hint)
    if get_origin(hint) is Annotated:
        return of(inside[0]) | {"pattern": inside[1]}
    if get_origin(hint) is Literal:
        return {"enum": list(inside)}
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [of(each) for each in inside]}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": of(inside[0])}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [each.value for each in hint]}
    raise TypeError(f"no schema for {hint}")


def of_class(kind: type) -> dict[str, Any]:
    """JSON schema of a mapping with the fields of `kind`, and no others."""
    hints, told = get_type_hints(kind, include_extras=True), comments(kind)
    properties = {
        each.name: of(hints[each.name]) | ({"description": text} if (text := told.get(each.name)) else {})
        for each in dataclasses.fields(kind)
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def alerts() -> dict[str, Any]:
    """JSON schema of other numbers for alerts."""
    numbers = {"threshold": {"type": "number"}, "for": {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}}
    one = {"type": "object", "additionalProperties": False, "properties": numbers}
    lasting = one | {"properties": {"for": numbers["for"]}}
    named = {each.name: lasting if each.absent else one for each in ALERTS}
    return {"type": "object", "additionalProperties": False, "properties": named}


def schema(file: Path = FILE) -> str:
    """The whole text of the file."""
    read = json.loads(file.read_text())
    read["$defs"] |= {"config": of_class(Settings), "alerts": alerts()}
    return json.dumps(read, indent=2) + "\n"
