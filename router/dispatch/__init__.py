"""Choosing a replica for a call, and waiting for one in a fair order."""

from holdfast.router.dispatch.dispatch_queue import QueueStats
from holdfast.router.dispatch.fair_share_sync import FairShareSync, Ledger
from holdfast.router.dispatch.replica_health import HEALTH, REPORT_S, Listener, ReplicaHealth, Reporter
