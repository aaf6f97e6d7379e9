"""Every metric of the router: name, labels, unit, meaning, and what to do about it, in the order of docs/metrics.md.

The label `router` is added when they are read. Tenants and models come from the configuration.
"""

from collections.abc import Mapping

from holdfast.replicas.metrics import Metric, read_table

BUCKETS = {
    "token": (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
    "wait": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    "turn": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    "program": (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
    "store": (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    "turns": (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 100.0),
}

# Blocks of: name{labels} (unit) = buckets of a histogram, and a paragraph: help > advice
_TABLE = """
# Requests

requests_total{tenant,model,endpoint,outcome}
Generation requests by how they ended: `completed`, `cached`, `rejected`, `failed`, `aborted` > `failed` is the server's
fault: see the reason in `holdfast_request_errors_total`, then the replica's log

request_errors_total{tenant,reason}
Requests that were rejected or failed, by the `code` of the answer; of other calls only those without a valid key >
`rate_limit_exceeded`: the tenant's limits; `overloaded`: more replicas; `internal_error`: see the log

requests_in_flight
Generation requests being served > Near `router.max_in_flight`: more replicas

time_to_first_token_seconds{tenant,model} (s) = wait
From a request's arrival at the router to its first token > Rising with `holdfast_sequences_waiting`: more replicas;
without: longer prompts, or fewer of them cached

time_per_output_token_seconds{tenant,model} (s) = token
Mean time between a request's tokens after the first > Rising with `holdfast_step_duration_seconds`: larger batches or
longer chunks (`engine.step_tokens`)

turn_seconds{tenant,model} (s) = turn
From a completed request's arrival to its last token, response-cache hits left out > The sum of queue, prefill and
decode: see which of them grew

queue_seconds{tenant,model} (s) = wait
How long a completed request waited in its replica for its first step > Growing: more replicas, or more cells

# Programs

program_seconds{tenant,model} (s) = program
How long a program ran: from its first turn's arrival, or its first one after its last answer, to the end of the reply
that calls no tool > What users wait for. Split it into `holdfast_tool_seconds`, `holdfast_bubble_seconds` and
`holdfast_turn_seconds`

first_token_rendered_seconds{tenant,model} (s) = program
FTR: from the arrival of a program's first turn to the first token of the answer that calls no tool > What an agent's
users see. Growing with `holdfast_tool_seconds`: the tools; with `holdfast_bubble_seconds`: add replicas

program_turns{tenant,model} (turns) = turns
Turns of a program's run > Growing: the model calls tools in circles

tool_seconds{tenant,model} (s) = turn
From the end of a reply that called tools to the program's next turn > The tools' own time; long ones outlive their pins

bubble_seconds{tenant,model} (s) = wait
How long a turn after a tool waited before the engine worked on it: in the router, its queue and the engine's > Growing:
add replicas. A program waits at most 10 s for the replica that has its state

# Tenants

tenant_tokens_total{tenant,model,kind} (tokens)
Tokens of requests that completed, or whose clients left: `prompt`, of these `cached`, and `completion` > For bills use
the usage records: these counts end with their router

tenant_requests_in_flight{tenant}
Admitted requests of a tenant that have not ended > Near its part of `router.max_in_flight` for long: another router

tenant_limit{tenant,limit}
The limits of a tenant, by the names of `tenants[].limits`, for all routers together; no sample without a limit > Set in
`tenants`

tenant_quota_used{tenant,limit}
A tenant's use of each of its limits, as this router knows it: in the last minute, now, in the day or the month > Near
`holdfast_tenant_limit`: its calls will be refused

tenant_quota_refusals_total{tenant,limit}
Calls that one of a tenant's limits refused > Raise the limit, or ask the tenant about its load

quota_local
1 while Redis cannot be reached and the router limits by a local token bucket with its share of each limit > Bring Redis
back: a tenant whose requests come to one router alone gets only that router's share of its limits

quota_routers
Routers that share the limits while Redis is away: `server.routers` > More than those that run: each grants too small a
share

usage_records_total{result}
Records of requests: `booked`, `again` (sent twice, booked once), `lost` (Redis was away too long), `uncounted` (no
replica said what it did for a request that was cut off) > Any `lost`: they are on no bill. Any `uncounted`: their
tokens are on no bill

usage_records_waiting
Ends of requests that Redis does not know yet > Above 0 for long: bring Redis back

response_cache_lookups_total{tenant,result}
Look-ups in the response cache: `hit`, `miss` or `bypass` > Few hits are usual: only exact repeats hit

request_fields_skipped_total{tenant,endpoint}
Parts of requests that were left out: unknown fields, and items, blocks and tools of types that no model reads > The
header `x-holdfast-skipped` of an answer names them. Growing after a client's update: see what it sends

# Replicas and the queue before them

replicas
Replicas that the router may send to > Fewer than configured: one is starting or has died; see Serve's status

replicas_joined_total
Replicas that started > Growing with the lost ones: replicas die and are started again

replicas_lost_total
Replicas that died or were stopped, each counted once. A silent replica that answers again is not counted > A replica
that nobody stopped has died: see its log

requests_in_line
Requests in the router's queue, because no replica has room > Above 0 for long: more replicas, or a higher
`replicas.max_ongoing_requests`

tokens_in_line (tokens)
Estimated tokens in the prompts of these > Near 1,024 for each of `placement.max_waiting` requests: requests will be
refused

line_waits_total{for}
Requests that waited in the queue: for `home`, the replica that has their program's state, or for `any` replica >
Compare with all requests

line_wait_seconds_total{for} (s)
How long they waited > Divided by the waits: the mean wait

placements_total{reason}
Turns by the reason for their replica. `home`: their program's state is there. New programs: `prefix`, `near` (a
parent), `load`, `hash` (without Redis). Programs that moved: `crowded`, `waited`, `lost` > Moves but few `lost`:
replicas are too full, or unevenly loaded; `hash`: bring Redis back

session_moves_total{reason}
Sessions that moved and were computed again, because their replica was `gone`, `silent`, or had `forgotten` them >
Without lost replicas: see why one is silent, or restarts its engine

replica_balance
Turns of the busiest replica, over the mean of all replicas > Far above 1 with work to do: few long programs

# Redis

store_degraded
1 while Redis cannot be reached and the router works from memory > Bring Redis back. Generation goes on, but routers
share nothing, and what needs the store answers 503

store_operations_total{result}
Operations on Redis: `done` or `failed` (an error, or longer than `router.store_timeout_s`) > Failed ones: see
`holdfast_store_degraded`

store_operation_seconds (s) = store
How long they took > Near `router.store_timeout_s`: Redis is busy, swapping or far away

redis_up
1 where Redis answered when the metrics were read > 0: bring it back

redis_memory_bytes (bytes)
Memory that Redis has in use > At the limit keys are evicted: raise it

redis_memory_limit_bytes (bytes)
Memory that Redis may use; 0: no limit > `redis.memory_mb`, or the server's

redis_clients
Connections to Redis > Many more than 33 for each router and replica: something leaks

redis_keys
Keys in Redis > Nothing: keys expire

redis_evicted_keys_total
Keys that Redis dropped for lack of memory > Any: more memory for Redis

# Process

router_cpu_seconds_total (s)
Processor time of the router's process > Near one core: another router

router_memory_bytes (bytes)
Memory of the router's process > Growing without end: a leak

router_start_time_seconds (s since 1970)
When the router's process began > A new one that nobody deployed: the router died; see its log
"""

GROUPS: Mapping[str, tuple[Metric, ...]] = read_table(_TABLE, BUCKETS)
ALL = tuple(metric for group in GROUPS.values() for metric in group)
METRICS: Mapping[str, Metric] = {metric.name.removeprefix("holdfast_"): metric for metric in ALL}
