"""Tenants of a cluster: the file that routers read, and `holdfast tenants` over the admin API of a running server.

A tenant or key in the file comes and goes without a replica being replaced. Kubernetes brings a changed Secret into a
pod within a minute or two.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster import config_file, environment
from holdfast.cluster.config import Settings
from holdfast.replicas.errors import ConfigError, InvalidRequestError, UnavailableError
from holdfast.router.tenants import Tenant, TenantDirectory

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

Commands = argparse._SubParsersAction  # argparse has no public name for it
INTERVAL_S = 5.0  # between two looks at the file
SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
SECONDS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TENANTS = "/v1/admin/tenants"
PAGE = 1000  # rows of one answer


def tenants_in(path: Path) -> tuple[Tenant, ...]:
    """The tenants in the YAML file at `path`, which holds nothing else. Raises ConfigError."""
    settings = config_file.read(path)
    if not settings.tenants or settings != Settings(tenants=settings.tenants):
        raise ConfigError(f"{path} must hold `tenants`, and nothing else", "tenants")
    return settings.tenants


class TenantsWatch:
    """Puts the tenants of a file into a directory, now and after each change. A faulty file changes nothing.

    Create it on the event loop that it is to run on.
    """

    def __init__(self, path: Path, directory: TenantDirectory, interval_s: float = INTERVAL_S) -> None:
        self._path = path
        self._directory = directory
        self._interval_s = interval_s
        self._text = ""
        self._fault = ""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
                self._fault = ""
            except Exception as error:  # the supervisor of the watch: others write the file
                fault = error.message if isinstance(error, ConfigError) else f"cannot read {self._path}: {error!r}"
                if fault != self._fault:
                    log.error("the tenants stay as they were: %s", fault)
                self._fault = fault
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> None:
        text = await asyncio.to_thread(config_file.read_text, self._path)
        if text == self._text:
            return
        tenants = await asyncio.to_thread(tenants_in, self._path)
        if tenants != self._directory.configured:
            self._directory.replace(tenants)
            log.warning("%s has changed: there are %d tenants now", self._path, len(tenants))
        self._text = text


# ---- the commands ----


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `holdfast tenants`."""
    text = "Tenants and their keys, limits and usage, on a running server."
    command = commands.add_parser("tenants", help=text, description=text)
    names = "list | add | limit | cache | cells | purge | rotate | remove | usage | audit"
    kinds = command.add_subparsers(metavar=names, required=True)

    def kind(run: Callable[[argparse.Namespace], None], text: str, tenant: bool = True) -> argparse.ArgumentParser:
        parser = kinds.add_parser(run.__name__.strip("_"), help=text, description=text)
        parser.add_argument(
            "--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)"
        )
        parser.add_argument("--admin-key-file", type=Path, help="file with the key (or HOLDFAST_ADMIN_KEY)")
        if tenant:
            parser.add_argument("tenant")

        def done(options: argparse.Namespace) -> int:
            run(options)
            return 0

        parser.set_defaults(run=done)
        return parser

    listed = kind(_list, "List tenants: limits, and keys with their scopes, expiry and last use.", tenant=False)
    listed.add_argument("--json", action="store_true", help="print JSON")
    _add_key(_add_limits(kind(_add, "Add a tenant and print its first key, which is shown once.")))
    _add_limits(kind(_limit, "Replace a tenant's limits, or its weight."))
    cache = kind(_cache, "Replace a tenant's rules for the response cache.").add_argument
    cache("--off", action="store_true", help="keep nothing")
    cache("--age", metavar="TIME", help="answers no older than this, as 30m (default: as for all)")
    cache("--size", type=int, metavar="BYTES", help="of its answers in each process, and put into Redis")
    cells = kind(_cells, "Replace a tenant's shares of each engine's cells.").add_argument
    cells("--floor", type=float, default=0.0, metavar="SHARE", help="others take none of it (default: 0)")
    cells("--ceiling", type=float, default=1.0, metavar="SHARE", help="it has no more (default: 1)")
    cells("--pinned", type=float, default=1.0, metavar="SHARE", help="it pins no more (default: 1)")
    kind(_purge, "Forget every answer that the response cache has for a tenant.")
    rotate = _add_key(kind(_rotate, "Make a new key of a tenant and print it; with --retire-in the others expire."))
    rotate.add_argument(
        "--retire-in", metavar="TIME", help="as 0s, 12h or 7d: when other keys that were made here expire"
    )
    remove = kind(_remove, "Remove a tenant, or one of its keys. Its usage stays in the books.")
    remove.add_argument("--key", metavar="ID", help="this key alone")
    usage = kind(_usage, "Print usage: sums of days and months, or with --records one line a request.", tenant=False)
    usage.add_argument("tenant", nargs="?", help="this one alone (default: all that there are and were)")
    usage.add_argument("--days", type=int, default=31, help="so many days (default: 31)")
    usage.add_argument("--json", action="store_true", help="print JSON")
    usage.add_argument("--records", choices=("jsonl", "csv"), help="records in this form, to the standard output")
    usage.add_argument("--from", dest="begin", default="", help="records from this date (2026-11-01) or time on")
    usage.add_argument("--to", dest="end", default="", help="and before this one")
    audit = kind(_audit, "Print administrative acts and refused keys, the latest first, as JSON lines.", tenant=False)
    audit.add_argument("--limit", type=int, default=100, help="so many entries (default: 100)")


def _add_limits(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("--weight", type=float, help="its share against the others'")
    command.add_argument("--limit", action="append", default=[], metavar="NAME=N", help="as requests_per_minute=60")
    return command


def _add_key(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    command.add_argument("--id", help="the key's name in lists and records (default: made)")
    command.add_argument("--scopes", default="infer,usage", help="of infer, usage, operate (default: infer,usage)")
    command.add_argument("--expires-in", metavar="TIME", help="as 12h or 90d (default: never)")
    return command


def _list(options: argparse.Namespace) -> None:
    answer = _ask(options, "GET", TENANTS)
    if options.json:
        print(answer.text)
        return
    rows = []
    for tenant in answer.json()["tenants"]:
        head = [tenant["name"], tenant["source"], f"{tenant['weight']:g}", _limits_of(tenant, "\n") or "none"]
        for key in tenant["keys"] or [None]:
            cells = (key["id"], " ".join(key["scopes"]), _date(key["expires"]), _date(key["last_used"])) if key else ()
            rows.append([*head, *cells])
            head = [""] * 4
    _print_table(("tenant", "from", "weight", "limits", "key", "for", "expires", "last used"), rows)


def _add(options: argparse.Namespace) -> None:
    body = {"name": options.tenant, **_weight(options), "key": _key(options)}
    if options.limit:
        body["limits"] = _limits(options.limit)
    _show_key(_ask(options, "POST", TENANTS, body).json())


def _limit(options: argparse.Namespace) -> None:
    print(_limits_of(_patch(options, {**_weight(options), "limits": _limits(options.limit)}), " ") or "no limits")


def _cache(options: argparse.Namespace) -> None:
    ttl_s = None if options.age is None else _seconds(options.age)
    rules = _patch(options, {"cache": {"enabled": not options.off, "ttl_s": ttl_s, "bytes": options.size}})["cache"]
    if not rules["enabled"]:
        print("off")
        return
    age = "as for all" if rules["ttl_s"] is None else f"{rules['ttl_s']:g} s"
    size = "as for all" if rules["bytes"] is None else f"{rules['bytes']:,} bytes"
    print(f"on; age {age}; size {size}")


def _cells(options: argparse.Namespace) -> None:
    body = {"cells": {"floor": options.floor, "ceiling": options.ceiling, "pinned": options.pinned}}
    print(" ".join(f"{name}={value:g}" for name, value in _patch(options, body)["cells"].items()))


def _purge(options: argparse.Namespace) -> None:
    _ask(options, "DELETE", f"{TENANTS}/{options.tenant}/cache")
    print(f"purged {options.tenant}")


def _rotate(options: argparse.Namespace) -> None:
    body = _key(options)
    if options.retire_in:
        body["retire_in_s"] = _seconds(options.retire_in)
    _show_key(_ask(options, "POST", f"{TENANTS}/{options.tenant}/keys", body).json())


def _remove(options: argparse.Namespace) -> None:
    _ask(options, "DELETE", f"{TENANTS}/{options.tenant}" + (f"/keys/{options.key}" if options.key else ""))
    print(f"removed {options.key or options.tenant}")


def _usage(options: argparse.Namespace) -> None:
    query = {**({"tenant": options.tenant} if options.tenant else {}), "days": str(options.days)}
    if options.records:
        for text in _records(options):
            print(text, end="")
        return
    answer = _ask(options, "GET", "/v1/admin/usage", query=query)
    if options.json:
        print(answer.text)
        return
    names = ("requests", "input", "cached", "output", "drafted", "units")
    rows = [
        [tenant["tenant"], row["period"], *(f"{row[name]:,}" for name in names)]
        for tenant in answer.json()["tenants"]
        for row in tenant["periods"]
        if row["requests"]
    ]
    _print_table(("tenant", "period", *names), rows, right=names)


def _audit(options: argparse.Namespace) -> None:
    print(_ask(options, "GET", "/v1/admin/audit", query={"limit": str(options.limit)}).text, end="")


def _records(options: argparse.Namespace) -> Iterator[str]:
    """Page after page."""
    import orjson

    from holdfast.router.entry import as_csv, as_json_lines

    if options.records == "csv":
        yield as_csv(())
    query = {"tenant": options.tenant, "from": options.begin, "to": options.end, "limit": str(PAGE)}
    query = {key: value for key, value in query.items() if value}
    while True:
        text = _ask(options, "GET", "/v1/admin/usage/records", query=query).text
        rows = [orjson.loads(line) for line in text.splitlines()]
        yield as_csv(rows, head=False) if options.records == "csv" else as_json_lines(rows).decode()
        if len(rows) < PAGE:
            break
        query["after"] = f"{rows[-1]['place']}/{rows[-1]['tenant']}"


# ---- parts ----


def _ask(
    options: argparse.Namespace, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None
) -> httpx.Response:
    """The answer. Raises UnavailableError if no server answers, InvalidRequestError with the server's message."""
    import httpx

    from holdfast.cluster.status import error_message, key_from

    key = key_from(options.admin_key_file, environment.admin_key())
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(headers=headers, timeout=30.0, trust_env=False) as client:
            sent = {} if body is None else {"json": body}
            answer = client.request(method, f"{options.url.rstrip('/')}{path}", params=query, **sent)
    except httpx.HTTPError as error:
        text = f"no server answers at {options.url} ({error}); `--url` names another one"
        raise UnavailableError(text) from error
    if answer.status_code == 200:
        return answer
    hint = ". Give the key by --admin-key-file or in HOLDFAST_ADMIN_KEY" if answer.status_code == 401 else ""
    raise InvalidRequestError(f"{error_message(answer)}{hint}")


def _patch(options: argparse.Namespace, body: Mapping[str, Any]) -> dict[str, Any]:
    tenant: dict[str, Any] = _ask(options, "PATCH", f"{TENANTS}/{options.tenant}", body).json()
    return tenant


def _weight(options: argparse.Namespace) -> dict[str, Any]:
    return {} if options.weight is None else {"weight": options.weight}


def _limits(values: Sequence[str]) -> dict[str, float]:
    limits = {}
    for each in values:
        name, _, value = each.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"--limit is NAME=N, not {each!r}", "limit") from None
        limits[name] = int(number) if number.is_integer() else number
    return limits


def _limits_of(tenant: Mapping[str, Any], between: str) -> str:
    return between.join(f"{name}={value:g}" for name, value in tenant["limits"].items() if value is not None)


def _key(options: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"scopes": [each.strip() for each in options.scopes.split(",") if each.strip()]}
    if options.id:
        body["id"] = options.id
    if options.expires_in:
        body["expires_in_s"] = _seconds(options.expires_in)
    return body


def _show_key(answer: Mapping[str, Any]) -> None:
    print(f"API key of {answer['name']}, shown once: {answer['key']}")
    print(f"id {answer['key_id']}, for {' '.join(answer['scopes'])}, expires {_date(answer['expires'])}")


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(
            name, no_wrap=name in ("tenant", "limits", "key"), justify="right" if name in right else "left"
        )
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _seconds(text: str) -> float:
    match = SPAN.fullmatch(text)
    if match is None:
        raise ConfigError(f"a time is a number and s, m, h or d, as 12h: not {text!r}", "time")
    return float(match[1]) * SECONDS[match[2]]


def _date(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
