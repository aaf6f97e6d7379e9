"""Server-sent events, and streams of replies."""

from holdfast.router.streaming.event_stream import EVENT_HEADERS, SILENCE_S, Connection, EventStream, until_disconnect
from holdfast.router.streaming.turn_stream import TurnStream, soon
