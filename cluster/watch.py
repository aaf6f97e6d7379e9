"""Asking a running server for its status over HTTP. What is made of it is `status_view`'s."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from holdfast.replicas.errors import ConfigError, UnavailableError

PATH = "/v1/cluster/status"
URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A server, and the key of an operator; "" where none is needed."""

    url: str = URL
    key: str = ""


def key_from(file: Path | None, environment: str) -> str:
    """The key in `file`, else that of the environment. Raises ConfigError."""
    if file is None:
        return environment
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", "api-key-file") from error


def ask(client: httpx.Client, server: Watched, programs: int) -> dict[str, Any]:
    """The status, with at most so many programs. Raises UnavailableError saying what to do."""
    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    try:
        answer = client.get(server.url.rstrip("/") + PATH, params={"programs": programs}, headers=headers)
    except httpx.HTTPError as error:
        raise UnavailableError(f"no server answers at {server.url} ({error}); `--url` names another one") from error
    if answer.status_code in (401, 403):
        raise UnavailableError(f"{_reason(answer)}. Give it by --api-key-file or in HOLDFAST_API_KEY")
    if answer.status_code != 200:
        raise UnavailableError(f"{server.url} answered {answer.status_code}: {_reason(answer)}")
    try:
        told: dict[str, Any] = answer.json()
        told["replicas"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"what answers at {server.url} is no Holdfast server") from error
    return told


def client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase
