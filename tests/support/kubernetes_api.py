"""As much of a Kubernetes API server as helm's `lookup` asks: discovery, and objects that are there."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUPS = {"v1": ("", {"Secret": "secrets"}), "ray.io/v1": ("ray.io", {"RayCluster": "rayclusters"})}
VERSION = {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}


@contextmanager
def serving(objects: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The address of a server that has `objects`; those of every kind are looked for by list and by name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path.partition("?")[0].rstrip("/"), objects)
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(path: str, objects: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the server says to GET `path`; None: it is not there."""
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "ray.io/v1", "version": "v1"}
        group = {"name": "ray.io", "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    for version, (group, kinds) in GROUPS.items():
        base = f"/apis/{version}" if group else f"/api/{version}"
        if path == base:
            resources = [
                {"name": name, "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
                for kind, name in kinds.items()
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        for kind, name in kinds.items():
            here = [each for each in objects if (each["apiVersion"], each["kind"]) == (version, kind)]
            for each in here:
                where = f"{base}/namespaces/{each['metadata']['namespace']}/{name}"
                if path == f"{where}/{each['metadata']['name']}":
                    return each
                if path == where:
                    return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": here}
    return None
