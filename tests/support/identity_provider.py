"""An identity provider on loopback: tokens, and the public keys that they are signed for."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

ISSUER, AUDIENCE = "https://id.example", "holdfast"


class IdentityProvider:
    """Its public keys over HTTP, at any path; `keys` are private ones by id. `issuer` "": its address."""

    def __init__(self, issuer: str = "") -> None:
        self.keys = {"k1": ec.generate_private_key(ec.SECP256R1())}
        self.asked: list[str] = []  # paths
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(provider.document())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = issuer or f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def keys_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/jwks"

    def document(self) -> bytes:
        algorithm = jwt.algorithms.ECAlgorithm
        rows = [{**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid} for kid, key in self.keys.items()]
        return json.dumps({"keys": rows}).encode()

    def token(self, kid: str = "k1", key: Any = None, algorithm: str = "ES256", **claims: Any) -> str:
        """A claim that is None is left out."""
        told = {"iss": self.issuer, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "ann", "tenant": "acme", **claims}
        told = {name: value for name, value in told.items() if value is not None}
        return jwt.encode(told, key or self.keys[kid], algorithm, headers={"kid": kid})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
