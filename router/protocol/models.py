"""`/v1/models`: the list of models and a single one."""

from collections.abc import Sequence
from typing import Any

import orjson

from holdfast.replicas.requests import ModelCard


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
