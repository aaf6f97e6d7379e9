"""Kinds of parameters: JSON type, likely names, how a user mentions a value, and which values there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.loadgen.pocket.values import (
    Value,
    clock,
    command,
    date,
    email,
    expression,
    folder,
    identifier,
    integer,
    number,
    path,
    sentence,
    sql,
    ticker,
    url,
    words_list,
)
from holdfast.loadgen.pocket.words import Lexicon, listed

Draw = Callable[[random.Random, Lexicon], Value]

_CURRENCIES = listed("USD EUR GBP JPY CHF CAD AUD INR CNY SEK NOK BRL MXN ZAR KRW PLN")
_LANGUAGES = listed(
    "English French German Spanish Italian Portuguese Dutch Swedish Polish Turkish Greek Japanese Korean"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: JSON type, likely parameter names, clauses that mention it (``{v}``), and how to draw it."""

    json_type: str
    names: tuple[str, ...]
    clauses: tuple[str, ...]
    draw: Draw


KINDS: dict[str, Kind] = {
    "city": Kind(
        "string",
        ("city", "location", "place", "destination", "town", "city_name"),
        ("in {v}", "for {v}", "in {v}", "near {v}"),
        lambda r, x: x.city(r),
    ),
    "person": Kind(
        "string",
        ("name", "customer", "user_name", "recipient", "owner", "assignee", "employee", "contact"),
        ("for {v}", "by {v}", "from {v}"),
        lambda r, x: x.person(r),
    ),
    "date": Kind(
        "string",
        ("date", "start_date", "end_date", "day", "due_date", "check_in", "departure_date"),
        ("on {v}", "for {v}", "from {v}"),
        date,
    ),
    "time": Kind("string", ("time", "start_time", "end_time", "hour", "at"), ("at {v}",), clock),
    "email": Kind("string", ("email", "to", "address", "user_email", "sender"), ("to {v}", "for {v}"), email),
    "path": Kind(
        "string",
        ("path", "file", "file_path", "filename", "source", "target", "output"),
        ("in {v}", "from {v}", "at {v}", "{v}"),
        path,
    ),
    "folder": Kind("string", ("directory", "folder", "dir", "root", "base_path"), ("in {v}", "under {v}"), folder),
    "url": Kind("string", ("url", "link", "endpoint", "page"), ("at {v}", "from {v}", "{v}"), url),
    "id": Kind(
        "string",
        ("id", "order_id", "user_id", "ticket_id", "code", "reference", "key", "number"),
        ("with id {v}", "{v}", "number {v}", "id {v}"),
        identifier,
    ),
    "word": Kind(
        "string",
        ("name", "label", "tag", "keyword", "title", "symbol", "topic"),
        ("called {v}", "named {v}", "{v}", "about {v}"),
        lambda r, x: x.noun(r),
    ),
    "query": Kind(
        "string",
        ("query", "q", "search", "text", "keywords", "pattern", "topic"),
        ('for "{v}"', "for {v}", "about {v}", "'{v}'"),
        lambda r, x: x.phrase(r),
    ),
    "text": Kind(
        "string",
        ("message", "text", "content", "body", "note", "comment", "description", "subject"),
        ('saying "{v}"', "saying '{v}'", 'with the text "{v}"', 'that says "{v}"'),
        sentence,
    ),
    "integer": Kind(
        "integer",
        (
            "limit",
            "count",
            "max_results",
            "guests",
            "days",
            "page",
            "quantity",
            "size",
            "year",
            "line",
            "port",
            "timeout",
            "top_k",
            "nights",
            "people",
        ),
        (),
        integer,
    ),
    "number": Kind(
        "number",
        ("price", "amount", "threshold", "max_price", "weight", "budget", "rate", "distance"),
        (),
        number,
    ),
    "boolean": Kind(
        "boolean",
        (
            "verbose",
            "recursive",
            "dry_run",
            "force",
            "urgent",
            "public",
            "notify",
            "detailed",
            "include_archived",
            "express",
            "strict",
        ),
        (),
        lambda r, x: r.random() < 0.65,
    ),
    "currency": Kind(
        "string",
        ("currency", "from_currency", "to_currency"),
        ("in {v}",),
        lambda r, x: r.choice(_CURRENCIES),
    ),
    "language": Kind(
        "string",
        ("language", "target_language", "lang"),
        ("in {v}", "to {v}"),
        lambda r, x: r.choice(_LANGUAGES),
    ),
    "command": Kind("string", ("command", "cmd", "script"), ("`{v}`",), command),
    "sql": Kind("string", ("sql", "query", "statement"), ('"{v}"',), sql),
    "expression": Kind("string", ("expression", "formula"), ("`{v}`",), expression),
    "ticker": Kind("string", ("symbol", "ticker"), ("{v}",), ticker),
    "list": Kind(
        "array",
        ("tags", "items", "names", "columns", "members", "files", "keywords", "labels", "fields"),
        (),
        words_list,
    ),
}

ENUMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("unit", "units", "temperature_unit"), ("celsius", "fahrenheit")),
    (("priority", "severity", "level", "urgency"), ("low", "medium", "high")),
    (("priority", "importance"), ("low", "normal", "high", "critical")),
    (("format", "output_format", "file_type"), ("json", "csv", "xml", "pdf")),
    (("sort", "order", "sort_order"), ("asc", "desc")),
    (("status", "state"), ("open", "closed", "pending")),
    (("size",), ("small", "medium", "large")),
    (("mode",), ("fast", "normal", "full")),
    (("period", "interval", "frequency"), ("daily", "weekly", "monthly")),
    (("color", "theme"), ("red", "green", "blue", "black")),
    (("cabin_class", "seat_class", "class"), ("economy", "business", "first")),
    (("environment", "env", "stage"), ("dev", "staging", "production")),
    (("chart_type", "kind", "type"), ("bar", "line", "pie", "scatter")),
    (("category", "type"), ("food", "music", "sport", "travel")),
    (("visibility", "access"), ("public", "private", "internal")),
)

MAPPED_DESCRIPTIONS = {
    "city": ("City name", "The city", "Name of the city, e.g. {v}"),
    "date": ("Date in YYYY-MM-DD format", "The date, e.g. {v}", "ISO date"),
    "integer": ("Number of {w}", "The {w}", "Maximum {w}"),
    "boolean": ("Whether to use {w}", "If true, {w}"),
    "list": ("List of {w}", "The {w}"),
    "path": ("Path of the file", "File path", "Path to the file, e.g. {v}"),
    "query": ("Search query", "What to search for"),
}
"""Descriptions by kind; ``{w}`` is the parameter's name in words and ``{v}`` an example value."""
