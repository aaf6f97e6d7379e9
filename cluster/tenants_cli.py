"""`holdfast tenants`: tenants, keys, usage and the audit log of a running server, over its admin API."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster import environment
from holdfast.replicas.errors import ConfigError, InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    import httpx

Commands = argparse._SubParsersAction  # argparse has no public name for it
SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
SECONDS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TENANTS = "/v1/admin/tenants"
PAGE = 1000  # rows of one answer


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "Tenants and their keys, limits and usage, on a running server."
    command = commands.add_parser("tenants", help=text, description=text)
    kinds = command.add_subparsers(
        metavar="list | add | limit | cache | cells | purge | rotate | remove | usage | audit", required=True
    )
    text = "Who there is: limits, keys with what they are for, when they expire and were used last."
    listed = _kind(kinds, "list", text)
    listed.add_argument("--json", action="store_true", help="print JSON")
    listed.set_defaults(run=_list)
    text = "Add a tenant and print its first key, which is shown once."
    added = _kind(kinds, "add", text)
    _add_tenant(added)
    _add_key(added)
    added.set_defaults(run=_add)
    text = "Give a tenant other limits, in the place of all it has, or another weight."
    limited = _kind(kinds, "limit", text)
    _add_tenant(limited)
    limited.set_defaults(run=_limit)
    text = "Say what the response cache keeps for a tenant, in the place of what was said before."
    cache = _kind(kinds, "cache", text)
    cache.add_argument("tenant")
    cache.add_argument("--off", action="store_true", help="nothing")
    cache.add_argument("--age", metavar="TIME", help="answers no older than this, as 30m (default: as for all)")
    cache.add_argument("--size", type=int, metavar="BYTES", help="of its answers in each process, and put into Redis")
    cache.set_defaults(run=_cache)
    text = "Say what a tenant may have of each engine's cells, in the place of what was said before."
    cells = _kind(kinds, "cells", text)
    cells.add_argument("tenant")
    cells.add_argument("--floor", type=float, default=0.0, metavar="SHARE", help="others take none of it (default: 0)")
    cells.add_argument("--ceiling", type=float, default=1.0, metavar="SHARE", help="it has no more (default: 1)")
    cells.add_argument("--pinned", type=float, default=1.0, metavar="SHARE", help="it pins no more (default: 1)")
    cells.set_defaults(run=_cells)
    text = "Forget every answer that the response cache has for a tenant."
    purged = _kind(kinds, "purge", text)
    purged.add_argument("tenant")
    purged.set_defaults(run=_purge)
    text = "Make a new key of a tenant and print it; with --retire-in the others expire then."
    rotated = _kind(kinds, "rotate", text)
    rotated.add_argument("tenant")
    _add_key(rotated)
    rotated.add_argument("--retire-in", metavar="TIME", help="as 0s, 12h or 7d: the others that were made here expire")
    rotated.set_defaults(run=_rotate)
    text = "Remove a tenant, or one of its keys. What it used stays in the books."
    removed = _kind(kinds, "remove", text)
    removed.add_argument("tenant")
    removed.add_argument("--key", metavar="ID", help="this key alone")
    removed.set_defaults(run=_remove)
    text = "What tenants have used: sums of days and months, or with --records one line a request."
    usage = _kind(kinds, "usage", text)
    usage.add_argument("tenant", nargs="?", help="this one alone (default: all that there are and were)")
    usage.add_argument("--days", type=int, default=31, help="so many days (default: 31)")
    usage.add_argument("--json", action="store_true", help="print JSON")
    usage.add_argument("--records", choices=("jsonl", "csv"), help="records in this form, to the standard output")
    usage.add_argument("--from", dest="begin", default="", help="records from this date (2026-11-01) or time on")
    usage.add_argument("--to", dest="end", default="", help="and before this one")
    usage.set_defaults(run=_usage)
    text = "Acts of administration and keys that were refused, the latest first, as JSON lines."
    audit = _kind(kinds, "audit", text)
    audit.add_argument("--limit", type=int, default=100, help="so many entries (default: 100)")
    audit.set_defaults(run=_audit)


def _kind(kinds: Commands[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    command = kinds.add_parser(name, help=text, description=text)
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    command.add_argument("--admin-key-file", type=Path, help="file with the key (or HOLDFAST_ADMIN_KEY)")
    return command


def _add_tenant(command: argparse.ArgumentParser) -> None:
    command.add_argument("tenant")
    command.add_argument("--weight", type=float, help="its share against the others'")
    command.add_argument("--limit", action="append", default=[], metavar="NAME=N", help="as requests_per_minute=60")


def _add_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("--id", help="what lists and records call the key (default: made)")
    command.add_argument("--scopes", default="infer,usage", help="of infer, usage, operate (default: infer,usage)")
    command.add_argument("--expires-in", metavar="TIME", help="as 12h or 90d (default: never)")


# ---- what they do ----


def _list(options: argparse.Namespace) -> int:
    with _client(options) as client:
        answer = _ask(client, "GET", TENANTS)
    if options.json:
        print(answer.text)
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("tenant", "from", "weight", "limits", "key", "for", "expires", "last used"):
        table.add_column(name, no_wrap=name in ("tenant", "limits", "key"))
    for tenant in answer.json()["tenants"]:
        limits = "\n".join(f"{name}={value:g}" for name, value in tenant["limits"].items() if value is not None)
        head = [tenant["name"], tenant["source"], f"{tenant['weight']:g}", limits or "none"]
        for key in tenant["keys"] or [None]:
            row = (key["id"], " ".join(key["scopes"]), _date(key["expires"]), _date(key["last_used"])) if key else ()
            table.add_row(*head, *row)
            head = [""] * 4
    Console().print(table)
    return 0


def _add(options: argparse.Namespace) -> int:
    body = {"name": options.tenant, **_tenant(options), "key": _key(options)}
    with _client(options) as client:
        _show(_ask(client, "POST", TENANTS, body).json())
    return 0


def _limit(options: argparse.Namespace) -> int:
    body = {**_tenant(options), "limits": _limits(options.limit)}
    with _client(options) as client:
        told = _ask(client, "PATCH", f"{TENANTS}/{options.tenant}", body).json()
    print(" ".join(f"{name}={value:g}" for name, value in told["limits"].items() if value is not None) or "no limits")
    return 0


def _cache(options: argparse.Namespace) -> int:
    age = None if options.age is None else _seconds(options.age)
    body = {"cache": {"enabled": not options.off, "ttl_s": age, "bytes": options.size}}
    with _client(options) as client:
        told = _ask(client, "PATCH", f"{TENANTS}/{options.tenant}", body).json()["cache"]
    if not told["enabled"]:
        print("off")
        return 0
    ages = "as for all" if told["ttl_s"] is None else f"{told['ttl_s']:g} s"
    size = "as for all" if told["bytes"] is None else f"{told['bytes']:,} bytes"
    print(f"on; age {ages}; size {size}")
    return 0


def _cells(options: argparse.Namespace) -> int:
    body = {"cells": {"floor": options.floor, "ceiling": options.ceiling, "pinned": options.pinned}}
    with _client(options) as client:
        told = _ask(client, "PATCH", f"{TENANTS}/{options.tenant}", body).json()["cells"]
    print(" ".join(f"{name}={value:g}" for name, value in told.items()))
    return 0


def _purge(options: argparse.Namespace) -> int:
    with _client(options) as client:
        _ask(client, "DELETE", f"{TENANTS}/{options.tenant}/cache")
    print(f"purged {options.tenant}")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    body = _key(options)
    if options.retire_in:
        body["retire_in_s"] = _seconds(options.retire_in)
    with _client(options) as client:
        _show(_ask(client, "POST", f"{TENANTS}/{options.tenant}/keys", body).json())
    return 0


def _remove(options: argparse.Namespace) -> int:
    below = f"/keys/{options.key}" if options.key else ""
    with _client(options) as client:
        _ask(client, "DELETE", f"{TENANTS}/{options.tenant}{below}")
    print(f"removed {options.key or options.tenant}")
    return 0


def _usage(options: argparse.Namespace) -> int:
    who = {"tenant": options.tenant} if options.tenant else {}
    with _client(options) as client:
        if options.records:
            for text in _records(client, options):
                print(text, end="")
            return 0
        answer = _ask(client, "GET", "/v1/admin/usage", query={**who, "days": str(options.days)})
    if options.json:
        print(answer.text)
        return 0
    from rich.console import Console
    from rich.table import Table

    names = ("requests", "input", "cached", "output", "drafted", "units")
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant")
    table.add_column("period")
    for name in names:
        table.add_column(name, justify="right")
    for tenant in answer.json()["tenants"]:
        for row in tenant["periods"]:
            if row["requests"]:
                table.add_row(tenant["tenant"], row["period"], *(f"{row[name]:,}" for name in names))
    Console().print(table)
    return 0


def _audit(options: argparse.Namespace) -> int:
    with _client(options) as client:
        print(_ask(client, "GET", "/v1/admin/audit", query={"limit": str(options.limit)}).text, end="")
    return 0


def _records(client: httpx.Client, options: argparse.Namespace) -> Iterator[str]:
    """Page after page."""
    from holdfast.router.usage import as_csv, as_json_lines

    if options.records == "csv":
        yield as_csv(())
    asked = {"tenant": options.tenant, "from": options.begin, "to": options.end, "limit": str(PAGE)}
    while True:
        query = {key: value for key, value in asked.items() if value}
        rows = _rows(_ask(client, "GET", "/v1/admin/usage/records", query=query).text)
        yield as_csv(rows, head=False) if options.records == "csv" else as_json_lines(rows).decode()
        if len(rows) < PAGE:
            break
        asked["after"] = f"{rows[-1]['place']}/{rows[-1]['tenant']}"


def _rows(text: str) -> list[dict[str, Any]]:
    import orjson

    return [orjson.loads(line) for line in text.splitlines()]


# ---- parts ----


def _client(options: argparse.Namespace) -> httpx.Client:
    import httpx

    from holdfast.cluster.watch import key_from

    key = key_from(options.admin_key_file, environment.admin_key())
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=options.url, headers=headers, timeout=30.0, trust_env=False)


def _ask(
    client: httpx.Client, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None
) -> httpx.Response:
    """The answer. Raises UnavailableError where nobody answers, InvalidRequestError with what the server says."""
    import httpx

    try:
        answer = client.request(method, path, params=query, **({} if body is None else {"json": body}))
    except httpx.HTTPError as error:
        text = f"no server answers at {client.base_url} ({error}); `--url` names another one"
        raise UnavailableError(text) from error
    if answer.status_code == 200:
        return answer
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.text[:200] or answer.reason_phrase
    hint = ". Give the key by --admin-key-file or in HOLDFAST_ADMIN_KEY" if answer.status_code == 401 else ""
    raise InvalidRequestError(f"{said}{hint}")


def _tenant(options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if options.weight is not None:
        body["weight"] = options.weight
    if options.limit:
        body["limits"] = _limits(options.limit)
    return body


def _limits(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"--limit is NAME=N, not {each!r}", "limit") from None
        found[name] = int(number) if number.is_integer() else number
    return found


def _key(options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"scopes": [each.strip() for each in options.scopes.split(",") if each.strip()]}
    if options.id:
        body["id"] = options.id
    if options.expires_in:
        body["expires_in_s"] = _seconds(options.expires_in)
    return body


def _show(told: Mapping[str, Any]) -> None:
    print(f"API key of {told['name']}, shown once: {told['key']}")
    print(f"id {told['key_id']}, for {' '.join(told['scopes'])}, expires {_date(told['expires'])}")


def _seconds(text: str) -> float:
    found = SPAN.fullmatch(text)
    if found is None:
        raise ConfigError(f"a time is a number and s, m, h or d, as 12h: not {text!r}", "time")
    return float(found[1]) * SECONDS[found[2]]


def _date(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
