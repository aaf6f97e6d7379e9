"""The handlers of the API's paths."""

from holdfast.router.endpoints.admin import AdminEndpoints, UsageEndpoints
from holdfast.router.endpoints.formats import ChatFormat, CompletionFormat, Format, MessagesFormat, loaded_models
from holdfast.router.endpoints.metrics_endpoints import MetricsEndpoints, Peers, watch_line, watch_redis
from holdfast.router.endpoints.openapi import LINES, TEXT, ApiDocument, Endpoint, page, served
from holdfast.router.endpoints.prefills import PrefillEndpoints, StoredPrefills
from holdfast.router.endpoints.program_endpoints import HeartbeatBody, ProgramEndpoints
from holdfast.router.endpoints.responses import CompactionFormat, ResponseEndpoints, ResponsesFormat
from holdfast.router.endpoints.session_homes import SessionHomes
from holdfast.router.endpoints.sessions import SessionEndpoints
from holdfast.router.endpoints.status import ClusterStatus, Live, LiveQuery, PageFiles, StatusQuery
from holdfast.router.endpoints.turns import Turns
