"""From a request's arrival to its booked end: keys, limits, usage, metrics and the log of turns."""

from holdfast.router.entry.admission import Drain, Entry
from holdfast.router.entry.audit import Audit
from holdfast.router.entry.call import Call, estimate
from holdfast.router.entry.http import (
    DELIVERY,
    IDEMPOTENCY,
    VERSION,
    AnswerHeadersMiddleware,
    Handler,
    answer_headers,
    caller,
    error_response,
    json_response,
    retry_of,
    route_of,
    supervised,
)
from holdfast.router.entry.idempotency import KeptAnswers, NamedRequest, named
from holdfast.router.entry.metrics import Merged, Outcome, RouterMetrics
from holdfast.router.entry.oidc import IdentityTokens
from holdfast.router.entry.quotas import MINUTE_MS, PART_MS, Cost, QuotaError, Quotas
from holdfast.router.entry.tenant_store import TenantStore
from holdfast.router.entry.turn_log import ENDED, Totals, TurnFacts, TurnLog
from holdfast.router.entry.usage import (
    SUMS,
    CallEnd,
    UsageBooks,
    UsageRecord,
    as_csv,
    as_json_lines,
    cost_of,
    first_rows,
    priced,
)
