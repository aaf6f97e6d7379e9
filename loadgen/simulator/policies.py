"""What is compared: an order of requests and a way to keep cells, each pair under one name; all else is alike."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.loadgen.policies import ORDERS, RETENTION
from holdfast.loadgen.simulator.profile import Profile
from holdfast.loadgen.simulator.programs import CONTEXT
from holdfast.replicas.config import DraftConfig, EngineConfig, RetentionConfig
from holdfast.replicas.errors import ConfigError

PAGE = 16
_ENDLESS = 1e12  # seconds, and requests: what comes waits as long as it has to


@dataclass(frozen=True, slots=True)
class Policy:
    """`engine.order` and `engine.retention.policy`."""

    order: str
    retention: str


_DEFAULTS = EngineConfig()
POLICIES = {
    "request": Policy("request", "none"),
    "plas": Policy(ORDERS["plas"], "none"),
    "infercept-request": Policy("request", "infercept"),
    "infercept-program": Policy("program", "infercept"),
    "infercept": Policy(ORDERS["infercept"], "infercept"),
    "program": Policy("program", "none"),
    "fixed": Policy("program", RETENTION["fixed"]),
    "bernstein": Policy("program", RETENTION["bernstein"]),
    "restore-cost": Policy("program", RETENTION["restore-cost"]),
    "continuum": Policy("program", "continuum"),
    "expected_waste": Policy("program", "expected_waste"),
    "default": Policy(_DEFAULTS.order, _DEFAULTS.retention.policy),
}
USUAL = (
    "request", "plas", "infercept-request", "infercept", "program", "fixed", "bernstein", "continuum", "expected_waste"
)  # fmt: skip


def policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}", "policy")
    return POLICIES[name]


def engine_config(name: str, profile: Profile, host: bool) -> EngineConfig:
    """One replica under the policy of that name, with a second tier or without. Raises ConfigError."""
    named = policy(name)
    if host and not profile.host_cells:
        raise ConfigError(f"nothing is known of a second tier of {profile.name}", "host-tier")
    return EngineConfig(
        model=profile.name,
        context_length=CONTEXT,
        cells=profile.cells // PAGE * PAGE,
        host_cells=profile.host_cells // PAGE * PAGE if host else 0,
        page_size=PAGE,
        max_sequences=256,
        session_rows=128,
        max_waiting=int(_ENDLESS),
        queue_timeout_s=_ENDLESS,
        speculation=DraftConfig(enabled=False),
        order=named.order,
        retention=RetentionConfig(policy=named.retention),
    )
