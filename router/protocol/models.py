"""`/v1/models`: all models or one, in OpenAI's shape or in Anthropic's. `created` is in seconds since the epoch."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from holdfast.replicas.requests import ModelCard


def model_reply(card: ModelCard, created: int, *, anthropic: bool) -> bytes:
    return orjson.dumps(_model(card, created, anthropic))


def models_reply(cards: Sequence[ModelCard], created: int, *, anthropic: bool) -> bytes:
    """All models, on one page."""
    data = [_model(card, created, anthropic) for card in cards]
    if not anthropic:
        return orjson.dumps({"object": "list", "data": data})
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})


def _model(card: ModelCard, created: int, anthropic: bool) -> dict[str, Any]:
    context = card.context_length
    if not anthropic:
        model = {"id": card.name, "object": "model", "created": created}
        return {**model, "owned_by": "holdfast", "max_model_len": context}
    day = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    model = {"type": "model", "id": card.name, "display_name": card.name, "created_at": day}
    return {**model, "max_input_tokens": context, "max_tokens": context}
