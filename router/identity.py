"""Who is the program? The first name a request gives, scoped by tenant, or a digest of how the conversation began."""

import hashlib
from collections.abc import Mapping

import orjson

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, RawPrompt
from holdfast.router.protocol.turn import ClaimedIds

HEADERS = ("x-program-id", "x-session-id", "x-session-affinity", "x-correlation-id")
MAX_LENGTH = 256
HEAD = 256  # characters or token ids of a plain prompt that stand for its beginning


def program_key(tenant: str, ids: ClaimedIds, headers: Mapping[str, str], prompt: ChatPrompt | RawPrompt) -> str:
    """`<tenant>/<id>`, or `<tenant>/~<digest>` for a request that names no program.

    `headers` looks names up without regard to case. Raises InvalidRequestError for an id that is too long or has
    control characters.
    """
    if ids.program_id:
        return named_program(tenant, ids.program_id)
    for name in HEADERS:
        if value := headers.get(name):
            return _scoped(tenant, value, name)
    if ids.previous_response_id:
        return _scoped(tenant, ids.previous_response_id, "previous_response_id")
    if ids.prompt_cache_key:
        return _scoped(tenant, ids.prompt_cache_key, "prompt_cache_key")
    return f"{tenant}/~{_digest(tenant, prompt)}"


def named_program(tenant: str, program_id: str) -> str:
    """The key of the program that a tenant calls by this name. Raises InvalidRequestError, as `program_key` does."""
    return _scoped(tenant, program_id, "program_id")


def _scoped(tenant: str, value: str, field: str) -> str:
    if len(value) > MAX_LENGTH or not value.isprintable():
        raise InvalidRequestError(f"'{field}' must be at most {MAX_LENGTH} printable characters", field)
    # A name that looks like a digest must not meet one.
    return f"{tenant}/{'~' if value.startswith('~') else ''}{value}"


def _digest(tenant: str, prompt: ChatPrompt | RawPrompt) -> str:
    """Stays the same while a conversation, or a prompt that is sent again with more at its end, grows."""
    beginning: list[object]
    if isinstance(prompt, RawPrompt):
        beginning = [prompt.content[:HEAD]]
    else:
        system = next((message for message in prompt.messages if message["role"] == "system"), None)
        user = next((message for message in prompt.messages if message["role"] == "user"), None)
        beginning = [system, prompt.tools, user]
    return hashlib.sha256(orjson.dumps([tenant, *beginning])).hexdigest()[:32]
