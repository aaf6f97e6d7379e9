"""The records that routers share in Redis: programs, stored responses, histories, cached answers, tool latencies."""

from holdfast.router.records.answers import commands, generate, ids, pieces_of, repeated, stream, total, varied
from holdfast.router.records.conversations import (
    Conversation,
    conversation,
    hint,
    histories,
    mark_of,
    placed_by,
    prompt_tokens,
    shared_prefix,
)
from holdfast.router.records.identity import (
    FRESH_DRAW,
    MAX_LENGTH,
    PRIORITY,
    fresh_draw_named,
    named_program,
    neighbour,
    parent_named,
    priority_named,
    program_named,
    session_program,
    shown_program,
    unnamed_program,
    within_named,
)
from holdfast.router.records.lru import SHARE, Lru
from holdfast.router.records.programs import Begun, Program, ProgramTable, Run, ToolGap
from holdfast.router.records.response_cache import CachedAnswer, CacheQuery, CacheResult, ResponseCache
from holdfast.router.records.round_trips import RoundTrips
from holdfast.router.records.session_histories import Home, SavedSession, SessionHistories, SessionRecord
from holdfast.router.records.store import Argument, PutResult, Records, RedisAddress, RedisInfo
from holdfast.router.records.stored_responses import StoredResponse, StoredResponses, StoredTurn
from holdfast.router.records.tool_latency import Reader, ToolLatencies
