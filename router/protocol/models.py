"""`/v1/models`: the list of models and a single one, in OpenAI's shape or in Anthropic's."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from holdfast.replicas.requests import ModelCard


def anthropic_models_reply(cards: Sequence[ModelCard], created: int) -> bytes:
    """The list as Anthropic's clients read it. All models are on one page."""
    data = [_anthropic(card, created) for card in cards]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})


def anthropic_model_reply(card: ModelCard, created: int) -> bytes:
    return orjson.dumps(_anthropic(card, created))


def models_reply(cards: Sequence[ModelCard], created: int) -> bytes:
    """The `list` object. `created` is when this server started, in seconds since the epoch."""
    return orjson.dumps({"object": "list", "data": [_object(card, created) for card in cards]})


def model_reply(card: ModelCard, created: int) -> bytes:
    return orjson.dumps(_object(card, created))


def _object(card: ModelCard, created: int) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "holdfast",
        "max_model_len": card.context_length,
    }


def _anthropic(card: ModelCard, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }
