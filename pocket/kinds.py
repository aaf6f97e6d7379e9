"""Kinds of parameters: their JSON type, likely names, phrases that mention a value, and draws of values."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from pocket.words import Lexicon, listed

Value = str | int | float | bool | list[str]
Draw = Callable[[random.Random, Lexicon], Value]

_CURRENCIES = listed("USD EUR GBP JPY CHF CAD AUD INR CNY SEK NOK BRL MXN ZAR KRW PLN")
_LANGUAGES = listed(
    "English French German Spanish Italian Portuguese Dutch Swedish Polish Turkish Greek Japanese Korean"
)
_EXTENSIONS = listed("py js ts go rs md txt json yaml csv toml html css sh sql log cpp java")
_FOLDERS = listed("src lib app tests docs data config scripts core utils api models services home tmp var etc build")
_ALNUM = string.ascii_letters + string.digits


def identifier(rng: random.Random, lex: Lexicon) -> str:
    """An opaque id in a shape that real systems use."""
    digits = str(rng.randint(1, 10 ** rng.randint(2, 7)))
    shape = rng.randrange(8)
    if shape == 0:
        return "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 4))) + rng.choice("-_") + digits
    if shape == 1:
        return "".join(rng.choices("0123456789abcdef", k=rng.randint(6, 12)))
    if shape == 2:
        return "".join(rng.choices(_ALNUM, k=rng.randint(5, 10)))
    if shape == 3:
        return f"{lex.noun(rng)}{rng.choice('-_')}{digits}"
    if shape == 4:
        return "".join(rng.choices(string.ascii_uppercase, k=2)) + digits
    if shape == 5:
        return f"{rng.choice(string.ascii_uppercase)}-{digits}{rng.choice(string.ascii_lowercase)}"
    if shape == 6:
        return f"{lex.noun(rng)[:3].upper()}-{rng.randint(2019, 2029)}-{rng.randint(1, 999):03d}"
    return digits


def date(rng: random.Random, lex: Lexicon) -> str:
    """An ISO date."""
    return f"{rng.randint(2019, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng: random.Random, lex: Lexicon) -> str:
    """A time of day."""
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45, rng.randint(0, 59))):02d}"


def email(rng: random.Random, lex: Lexicon) -> str:
    """An e-mail address."""
    user = lex.invented(rng) if rng.random() < 0.5 else rng.choice(lex.first_names).lower()
    if rng.random() < 0.4:
        user += rng.choice("._-") + rng.choice(lex.last_names).lower()
    return f"{user}@{lex.noun(rng)}.{rng.choice(('com', 'org', 'net', 'io', 'dev'))}"


def path(rng: random.Random, lex: Lexicon) -> str:
    """A file path with an extension."""
    stem = lex.noun(rng) if rng.random() < 0.6 else f"{lex.noun(rng)}_{lex.noun(rng)}"
    return (
        f"{folder(rng, lex)}/{stem}.{rng.choice(_EXTENSIONS)}"
        if rng.random() < 0.75
        else (f"{stem}.{rng.choice(_EXTENSIONS)}")
    )


def folder(rng: random.Random, lex: Lexicon) -> str:
    """A directory path."""
    parts = [rng.choice(_FOLDERS) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.4:
        parts.append(lex.noun(rng))
    return ("/" if rng.random() < 0.25 else "") + "/".join(parts)


def url(rng: random.Random, lex: Lexicon) -> str:
    """A web address."""
    return f"https://{lex.noun(rng)}.{rng.choice(('com', 'org', 'io'))}/{lex.noun(rng)}"


def integer(rng: random.Random, lex: Lexicon) -> int:
    """A count, mostly small."""
    return rng.randint(1, rng.choice((5, 10, 50, 100, 1000, 50000)))


def number(rng: random.Random, lex: Lexicon) -> float:
    """A number, often a whole one."""
    if rng.random() < 0.4:
        return rng.randint(1, rng.choice((10, 100, 1000))) * rng.choice((1, 5, 10))
    return round(rng.uniform(0, rng.choice((1, 10, 100, 1000))), rng.choice((1, 2)))


def sentence(rng: random.Random, lex: Lexicon) -> str:
    """A short free-text message."""
    subject, thing = lex.noun(rng), lex.phrase(rng, 3)
    return rng.choice(
        (
            f"The {subject} is ready",
            f"Please review the {thing}",
            f"The {subject} moves to {date(rng, lex)}",
            f"Thanks for the {thing}",
            f"We need a new {subject}",
            f"Call {rng.choice(lex.first_names)} about the {subject}",
            f"{thing.capitalize()} is late",
            f"Update on {thing}",
        )
    )


def command(rng: random.Random, lex: Lexicon) -> str:
    """A shell command."""
    noun = lex.noun(rng)
    return rng.choice(
        (
            "ls -la",
            "git status",
            "git diff",
            "pwd",
            "make test",
            "df -h",
            "ps aux",
            "whoami",
            "uname -a",
            "npm run build",
            f"ls {folder(rng, lex)}",
            f"cat {path(rng, lex)}",
            f"python {path(rng, lex)}",
            f"wc -l {path(rng, lex)}",
            f"grep -rn {noun} {folder(rng, lex)}",
            f"mkdir -p {folder(rng, lex)}/{noun}",
            f"pytest -q {folder(rng, lex)}",
            f"rm {path(rng, lex)}",
            f"git checkout {noun}-{lex.noun(rng)}",
            f"pip install {noun}",
            f"npm install {noun}",
            f"head -n {rng.randint(1, 90)} {path(rng, lex)}",
            f"docker stop {noun}",
            f"cp {path(rng, lex)} {folder(rng, lex)}",
            f"find {folder(rng, lex)} -name '*.{rng.choice(_EXTENSIONS)}'",
            f"git commit -m '{lex.phrase(rng, 3)}'",
            f"curl {url(rng, lex)}",
            f"kill {rng.randint(100, 99999)}",
            f"du -sh {folder(rng, lex)}",
            f"which {noun}",
        )
    )


def sql(rng: random.Random, lex: Lexicon) -> str:
    """A short SQL query."""
    table, column, other = lex.noun(rng), lex.noun(rng), lex.noun(rng)
    return rng.choice(
        (
            f"SELECT * FROM {table}",
            f"SELECT count(*) FROM {table}",
            f"SELECT {column} FROM {table} LIMIT {rng.randint(1, 99)}",
            f"SELECT {column}, {other} FROM {table} WHERE {column} > {rng.randint(0, 999)}",
            f"select {column} from {table} where {other} = '{lex.noun(rng)}'",
            f"SELECT avg({column}) FROM {table} GROUP BY {other}",
            f"SELECT {column} FROM {table} ORDER BY {other} DESC",
        )
    )


def expression(rng: random.Random, lex: Lexicon) -> str:
    """An arithmetic expression."""
    a, b, c = (rng.randint(1, rng.choice((9, 99, 999))) for _ in range(3))
    first, second = rng.choice("+-*/"), rng.choice("+-*/")
    return rng.choice(
        (
            f"{a} {first} {b}",
            f"{a}{first}{b}",
            f"({a} {first} {b}) {second} {c}",
            f"{a} {first} {b} {second} {c}",
        )
    )


def ticker(rng: random.Random, lex: Lexicon) -> str:
    """A stock symbol."""
    return "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 5)))


def words_list(rng: random.Random, lex: Lexicon) -> list[str]:
    """Two or three short strings."""
    draw = rng.choice((lex.noun, lex.city, lex.person, lambda r: identifier(r, lex), lambda r: path(r, lex)))
    words: list[str] = []
    while len(words) < 2 or (len(words) < 3 and rng.random() < 0.5):
        word = draw(rng)
        if word not in words:
            words.append(word)
    return words


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: JSON type, likely parameter names, clauses that mention it (``{v}``), and its draw."""

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

DESCRIPTIONS = {
    "city": ("City name", "The city", "Name of the city, e.g. {v}"),
    "date": ("Date in YYYY-MM-DD format", "The date, e.g. {v}", "ISO date"),
    "integer": ("Number of {w}", "The {w}", "Maximum {w}"),
    "boolean": ("Whether to use {w}", "If true, {w}"),
    "list": ("List of {w}", "The {w}"),
    "path": ("Path of the file", "File path", "Path to the file, e.g. {v}"),
    "query": ("Search query", "What to search for"),
}
"""Descriptions by kind; ``{w}`` is the parameter's name in words and ``{v}`` an example value."""
