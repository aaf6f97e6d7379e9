"""Eight requests for tools in words that Pocket never saw: common requests to agents, and the correct calls.

Each request sees four tools, its own among them. Not here: the benchmark that uses them (`calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallTask:
    """A question, the declared tools, and the correct call."""

    ask: str
    tools: tuple[dict[str, Any], ...]
    expected: tuple[str, Mapping[str, Any]]


_KINDS: Mapping[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
}

# name, what it does, arguments; a kind with bars is a list of words to choose from, one with a mark may be left out
_TOOLS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("create_issue", "Open an issue in a repository", {"repository": "text", "title": "text", "labels": "texts?"}),
    ("run_sql", "Run a query against a database", {"database": "text", "query": "text", "limit": "whole?"}),
    ("send_mail", "Send an e-mail", {"to": "text", "subject": "text", "body": "text"}),
    ("read_file", "Read a file of the workspace", {"path": "text", "first_line": "whole?", "last_line": "whole?"}),
    ("book_room", "Book a meeting room", {"room": "text", "day": "text", "hours": "number"}),
    ("translate", "Translate a text", {"text": "text", "language": "german|french|polish|korean"}),
    ("restart_pod", "Restart a pod of a cluster", {"namespace": "text", "pod": "text", "force": "flag"}),
    ("order_pizza", "Order a pizza", {"size": "small|medium|large", "toppings": "texts"}),
)

_ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("File a ticket for repo quokka-web titled 'Login loops forever', label it bug and urgent.",
     {"repository": "quokka-web", "title": "Login loops forever", "labels": ["bug", "urgent"]}),
    ("Run 'select id from invoices where paid = false' on billing, 20 rows are enough.",
     {"database": "billing", "query": "select id from invoices where paid = false", "limit": 20}),
    ("Send linus@example.com an e-mail, subject 'Patch', body 'Applied, thanks.'",
     {"to": "linus@example.com", "subject": "Patch", "body": "Applied, thanks."}),
    ("Open Makefile, lines 10 to 40.", {"path": "Makefile", "first_line": 10, "last_line": 40}),
    ("I need the room Turing on Thursday for 1.5 hours.", {"room": "Turing", "day": "Thursday", "hours": 1.5}),
    ("What is 'the cat sleeps' in German?", {"text": "the cat sleeps", "language": "german"}),
    ("Restart pod web-7f9c in namespace staging by force", {"namespace": "staging", "pod": "web-7f9c", "force": True}),
    ("A large pizza with olives and capers.", {"size": "large", "toppings": ["olives", "capers"]}),
)  # fmt: skip


def _tool(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    properties = {}
    for key, kind in arguments.items():
        kind = kind.removesuffix("?")
        properties[key] = {"type": "string", "enum": kind.split("|")} if "|" in kind else _KINDS[kind]
    required = [key for key, kind in arguments.items() if not kind.endswith("?")]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _tasks() -> Iterator[CallTask]:
    """Each with the tool that it needs and the three after it."""
    tools = [_tool(*row) for row in _TOOLS]
    for number, (ask, arguments) in enumerate(_ASKS):
        declared = tuple(tools[(number + i) % len(tools)] for i in range(4))
        yield CallTask(ask, declared, (_TOOLS[number][0], arguments))


TASKS: tuple[CallTask, ...] = tuple(_tasks())
