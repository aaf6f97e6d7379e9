"""Tools of Anthropic's types that a client runs: `bash`, `text_editor` and `memory`, as functions.

A client declares one by its type alone. Anthropic's models know its arguments; any other model is told them here.
"""

import re
from collections.abc import Mapping
from typing import Any

from holdfast.router.protocol.messages import FunctionTool, Tool

_TYPE = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_NO_UNDO = 20250429  # from this version on the editor has no `undo_edit`, and `insert` has a field of its own
_NAMES: Mapping[str, str] = {"bash": "bash", "memory": "memory", "text_editor": "str_replace_based_edit_tool"}


def is_client_tool(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs this tool, and its arguments are known."""
    kind = tool.get("type")
    return isinstance(kind, str) and _TYPE.fullmatch(kind) is not None


def client_tool(tool: Mapping[str, Any]) -> Tool:
    """The function that stands for a client tool, under the name that its client gives it."""
    found = _TYPE.fullmatch(tool["type"])
    assert found is not None  # it is one: `is_client_tool`
    kind, version = found[1], int(found[2])
    if kind == "bash":
        function = _function(_BASH, _fields("command", "restart"), "command")
    elif kind == "memory":
        commands = (*_EDITS, "delete", "rename")
        function = _function(_MEMORY, _commands(commands, *_OF_EDITS, "insert_text", "old_path", "new_path"), "command")
    elif version >= _NO_UNDO:
        function = _function(_EDITOR, _commands(_EDITS, *_OF_EDITS, "insert_text"), "command", "path")
    else:
        function = _function(_EDITOR, _commands((*_EDITS, "undo_edit"), *_OF_EDITS), "command", "path")
    return {"type": "function", "function": {**function, "name": tool.get("name", _NAMES[kind])}}


_EDITS = ("view", "create", "str_replace", "insert")
_OF_EDITS = ("path", "view_range", "file_text", "old_str", "new_str", "insert_line")
_BASH = "Run a command in a bash shell that stays open between calls."
_EDITOR = "View, create and edit text files."
_MEMORY = "Keep notes between conversations, in files of the directory /memories. Look there before a task."
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "command": {"type": "string", "description": "The command to run"},
    "restart": {"type": "boolean", "description": "True: start the shell anew, and run nothing"},
    "path": {"type": "string", "description": "Path of the file or directory"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For `view`: the first and the last line, from 1; -1 is the end of the file",
    },
    "file_text": {"type": "string", "description": "For `create`: the content of the file"},
    "old_str": {"type": "string", "description": "For `str_replace`: the text to replace, which the file has once"},
    "new_str": {"type": "string", "description": "For `str_replace`: the text instead"},
    "insert_line": {"type": "integer", "description": "For `insert`: the line to insert after; 0 is the beginning"},
    "insert_text": {"type": "string", "description": "For `insert`: the text to insert"},
    "old_path": {"type": "string", "description": "For `rename`: the path as it is"},
    "new_path": {"type": "string", "description": "For `rename`: the path as it shall be"},
}


def _fields(*names: str) -> dict[str, Any]:
    return {name: _FIELDS[name] for name in names}


def _commands(commands: tuple[str, ...], *names: str) -> dict[str, Any]:
    """Fields of a tool that has several commands."""
    fields = {"command": {"type": "string", "enum": list(commands)}, **_fields(*names)}
    if "insert" in commands and "insert_text" not in names:
        fields["new_str"] = {"type": "string", "description": "For `str_replace` and `insert`: the new text"}
    return fields


def _function(description: str, properties: dict[str, Any], *required: str) -> FunctionTool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": "", "description": description, "parameters": schema}
