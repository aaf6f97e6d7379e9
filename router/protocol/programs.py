"""`/v1/programs` and `/v1/tools/latency`: the body of a heartbeat, and the latencies of tools."""

import math
from typing import Annotated, Any

import orjson
from pydantic import Field

from holdfast.replicas.retention.latency import LatencySnapshot, ToolLatency, pooled
from holdfast.router.protocol.body import Body, read

QUANTILES = (50, 90, 99)


class HeartbeatBody(Body):
    """`within_s`: the client promises another heartbeat within so many seconds."""

    within_s: Annotated[float, Field(gt=0, le=3600)]


def read_heartbeat(raw: bytes) -> float:
    """Seconds until the next heartbeat. Raises InvalidRequestError."""
    return read(HeartbeatBody, raw).within_s


def latency_reply(tenant: str, snapshot: LatencySnapshot, *, operates: bool) -> bytes:
    """The latencies of the tenant's tools, the most called first, and `overall`: of all of them together.

    For an operator (`operates`), `overall` has the tools of all tenants. Times are in seconds. Quantiles are of the
    latest intervals, the other figures of all.
    """
    own = [(tools, latency) for (owner, tools), latency in snapshot.tools.items() if owner == tenant]
    own.sort(key=lambda item: (-item[1].count, item[0]))
    data = [{"tools": tools.split(","), **_figures(latency)} for tools, latency in own]
    overall = snapshot.overall if operates else pooled(latency for _, latency in own)
    return orjson.dumps({"object": "list", "data": data, "overall": _figures(overall)})


def _figures(latency: ToolLatency) -> dict[str, Any]:
    recent = latency.recent
    quantiles = {
        f"p{share}_s": recent[max(math.ceil(len(recent) * share / 100) - 1, 0)] if recent else None
        for share in QUANTILES
    }
    return {"count": latency.count, "mean_s": latency.mean, "std_s": math.sqrt(latency.variance), **quantiles}
