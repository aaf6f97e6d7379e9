"""Panels of what Holdfast runs on: routers, Redis, Ray's nodes and Serve's deployments."""

from helm.build.dashboards.board import JOB, Board, Chosen, Kind, Panel, Query, Row, Unit, graph

WHO = Chosen((JOB,))
RAY = Chosen(())  # scraped by a job of its own
NODE = "{{ip}}"
DEPLOYMENT = "{{application}} {{deployment}}"


def _of_node(title: str, description: str, unit: Unit, expression: str, gpu: bool = False) -> Panel:
    return graph(title, description, unit, Query(expression, NODE), gpu=gpu)


REDIS = Row(
    "Redis",
    (
        graph(
            "Away",
            "1: a router cannot reach Redis, or Redis did not answer it at the scrape.",
            Unit.PLAIN,
            Query(WHO.most("holdfast_store_degraded", "router"), "router {{router}} works from memory"),
            Query(f"1 - {WHO.most('holdfast_redis_up', 'router')}", "router {{router}}: no answer"),
        ),
        graph(
            "Operations",
            "Failed ones were errors, or longer than router.store_timeout_s.",
            Unit.RATE,
            Query(WHO.rate("holdfast_store_operations_total", "result"), "{{result}}"),
            kind=Kind.STACKED,
        ),
        graph(
            "Operation time",
            "As routers see it, the network and their own event loop included.",
            Unit.SECONDS,
            *WHO.quantiles("holdfast_store_operation_seconds"),
        ),
        graph(
            "Memory",
            "At the limit keys are evicted.",
            Unit.BYTES,
            Query(WHO.most("holdfast_redis_memory_bytes"), "in use"),
            Query(WHO.most("holdfast_redis_memory_limit_bytes"), "limit (0: none)"),
        ),
        graph(
            "Keys",
            "Evicted ones were still wanted.",
            Unit.PLAIN,
            Query(WHO.most("holdfast_redis_keys"), "keys"),
            Query(f"max (increase({WHO.of('holdfast_redis_evicted_keys_total')}[$__rate_interval]))", "evicted"),
        ),
        graph(
            "Connections", "Of routers and replicas.", Unit.PLAIN, Query(WHO.most("holdfast_redis_clients"), "clients")
        ),
    ),
)

ROUTERS = Row(
    "Routers",
    (
        graph(
            "Line before the replicas",
            "Requests wait here only while no replica has room.",
            Unit.PLAIN,
            Query(WHO.total("holdfast_requests_in_line", "router"), "router {{router}}"),
            Query(WHO.rate("holdfast_line_waits_total", "for"), "a second that had to wait for {{for}}"),
            Query(WHO.rate("holdfast_line_wait_seconds_total", "for"), "waiting for {{for}} on average"),
        ),
        graph(
            "Why turns went where they went",
            "home: their program's state is there. crowded, waited, lost: their program moved. Beside them sessions"
            " that moved.",
            Unit.PLAIN,
            Query(WHO.rate("holdfast_placements_total", "reason"), "{{reason}}"),
            Query(WHO.rate("holdfast_session_moves_total", "reason"), "sessions moved, {{reason}}"),
        ),
        graph(
            "Balance of the replicas",
            "Turns that the busiest has in hand over the mean of all. 1: all have alike, or there is nothing to do.",
            Unit.PLAIN,
            Query(WHO.most("holdfast_replica_balance", "router"), "router {{router}}"),
        ),
        graph(
            "Replicas that came and went",
            "Both growing together: replicas die and are started again.",
            Unit.PLAIN,
            Query(WHO.most("holdfast_replicas", "router"), "there: router {{router}}"),
            Query(f"max (increase({WHO.of('holdfast_replicas_joined_total')}[$__rate_interval]))", "joined"),
            Query(f"max (increase({WHO.of('holdfast_replicas_lost_total')}[$__rate_interval]))", "lost"),
            width=12,
        ),
        graph(
            "Router processor",
            "Cores in use; one is all that a router can have.",
            Unit.PLAIN,
            Query(WHO.rate("holdfast_router_cpu_seconds_total", "router"), "{{router}}"),
            width=12,
        ),
        graph(
            "Router memory",
            "Of the process.",
            Unit.BYTES,
            Query(WHO.most("holdfast_router_memory_bytes", "router"), "{{router}}"),
            width=12,
        ),
        graph(
            "Router started",
            "A new one that nobody deployed: the router died.",
            Unit.MOMENT,
            Query(f"1000 * {WHO.most('holdfast_router_start_time_seconds', 'router')}", "{{router}}"),
            kind=Kind.NUMBER,
            width=12,
        ),
    ),
)

SERVE = Row(
    "Ray Serve",
    (
        graph(
            "Healthy replicas",
            "Fewer than wanted: one is starting, or has failed its health check.",
            Unit.PLAIN,
            Query(RAY.total("ray_serve_deployment_replica_healthy", "application", "deployment"), DEPLOYMENT),
            Query(
                RAY.most("ray_serve_autoscaling_target_replicas", "application", "deployment"), f"{DEPLOYMENT}: wanted"
            ),
        ),
        graph(
            "Replica starts",
            "Steps that nobody made: replicas die.",
            Unit.PLAIN,
            Query(RAY.total("ray_serve_deployment_replica_starts_total", "application", "deployment"), DEPLOYMENT),
        ),
        graph(
            "Calls in hand",
            "Of each deployment's replicas, and queued before them.",
            Unit.PLAIN,
            Query(RAY.total("ray_serve_replica_processing_queries", "application", "deployment"), DEPLOYMENT),
            Query(
                RAY.total("ray_serve_deployment_queued_queries", "application", "deployment"), f"{DEPLOYMENT}: queued"
            ),
        ),
    ),
)

NODES = Row(
    "Nodes",
    (
        graph("Nodes", "Alive, as Ray sees it.", Unit.PLAIN, Query(RAY.total("ray_cluster_active_nodes"), "alive")),
        _of_node("Processor", "Of the node.", Unit.PERCENT, RAY.most("ray_node_cpu_utilization", "ip")),
        _of_node(
            "Memory",
            "Share in use. At 95 % Ray kills workers.",
            Unit.SHARE,
            f"{RAY.most('ray_node_mem_used', 'ip')} / {RAY.most('ray_node_mem_total', 'ip')}",
        ),
        _of_node("Disk", "Share in use.", Unit.PERCENT, RAY.most("ray_node_disk_utilization_percentage", "ip")),
        _of_node(
            "GPU", "Busy; sum over the node's GPUs.", Unit.PERCENT, RAY.total("ray_node_gpus_utilization", "ip"), True
        ),
        _of_node(
            "GPU memory",
            "In use, all of the node's GPUs.",
            Unit.BYTES,
            f"1048576 * {RAY.total('ray_node_gram_used', 'ip')}",
            True,
        ),
    ),
)

BOARD = Board(
    "redis-ray",
    "Holdfast: Redis and Ray",
    "What Holdfast stands on. Ray's metrics come from its own exporter (docs/metrics.md says how it is scraped).",
    (JOB,),
    (REDIS, ROUTERS, SERVE, NODES),
)
