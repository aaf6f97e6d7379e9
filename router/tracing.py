"""Settings of tracing, and where it starts. Without an endpoint nothing of OpenTelemetry is imported or called.

Spans are made in `spans`, the one file that knows the library: by the router around a request, and by a replica from
the times that its engine reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.replicas.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.router.spans import Spans


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where spans go: OTLP over HTTP, in protobuf. Off without an endpoint."""

    endpoint: str = ""  # of a collector, as in http://collector:4318; without a path /v1/traces is added. Empty: off
    sample_ratio: float = 1.0  # of the requests whose caller has not decided (W3C traceparent); those follow the caller

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"sample_ratio must be in [0, 1], not {self.sample_ratio}", "sample_ratio")
        if self.endpoint and not _is_url(self.endpoint):
            raise ConfigError(f"endpoint must be a URL like http://collector:4318, not {self.endpoint!r}", "endpoint")

    @property
    def url(self) -> str:
        """Where batches of spans are posted."""
        bare = urlsplit(self.endpoint).path in ("", "/")
        return self.endpoint.rstrip("/") + "/v1/traces" if bare else self.endpoint


def start(config: TracingConfig, process: str) -> Spans | None:
    """What makes the spans of this process, or None where tracing is off. `process` is told with each of them.

    Raises ConfigError where the packages are not installed.
    """
    if not config.endpoint:
        return None
    try:
        from holdfast.router.spans import Spans
    except ImportError as error:
        mend = ".venv/bin/pip install -e '.[tracing]' -c constraints.txt"
        raise ConfigError(f"tracing needs packages that are missing ({error}): {mend}", "tracing.endpoint") from error
    return Spans.exporting(config.url, config.sample_ratio, process)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
