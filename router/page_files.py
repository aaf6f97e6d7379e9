"""The page at `/`: its files, which stand in the folder `page`, as they are. There is nothing to build.

Open to everybody, as there is no data in them. The policy lets a browser load this server's own files, send requests to
this server, and nothing else: no script or style in the document, nothing from elsewhere, in no other page's frame.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from holdfast.router.protocol.errors import Refusal, RefusedError

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for whether it has changed
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media: str
    tag: str


class PageFiles:
    """All of them, read once."""

    def __init__(self) -> None:
        self._files = {each.name: _file(each) for each in FOLDER.iterdir()}

    async def index(self, request: Request) -> Response:
        return self._answer(request, INDEX)

    async def file(self, request: Request) -> Response:
        """Raises RefusedError where there is none of that name."""
        return self._answer(request, request.path_params["name"])

    def _answer(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise RefusedError(Refusal.NO_PATH, f"Unknown path: {request.method} {request.url.path}")
        headers = {**HEADERS, "etag": found.tag}
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers=headers, media_type=found.media)


def _file(path: Path) -> File:
    content = path.read_bytes()
    return File(content, TYPES[path.suffix], f'"{sha256(content).hexdigest()[:16]}"')
