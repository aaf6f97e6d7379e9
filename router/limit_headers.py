"""How a tenant stands with its limits, in the headers that OpenAI's and Anthropic's clients know."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from holdfast.router.quotas import Standing

TOKENS = ("input_tokens_per_minute", "uncached_tokens_per_minute", "output_tokens_per_minute")
# Anthropic counts no cached tokens as input; where nobody limits those that are not, all of them.
ANTHROPIC = (
    ("requests", ("requests_per_minute",)),
    ("input-tokens", ("uncached_tokens_per_minute", "input_tokens_per_minute")),
    ("output-tokens", ("output_tokens_per_minute",)),
)


def openai_headers(standing: Standing) -> Iterator[tuple[bytes, bytes]]:
    """`x-ratelimit-*`; of several limits of tokens the one of which least is left."""
    reset = duration(standing.reset_s)
    for kind, name in (("requests", _limited(standing, ("requests_per_minute",))), ("tokens", _scarcest(standing))):
        if name:
            yield f"x-ratelimit-limit-{kind}".encode(), _text(getattr(standing.limits, name))
            yield f"x-ratelimit-remaining-{kind}".encode(), _text(standing.left(name))
            yield f"x-ratelimit-reset-{kind}".encode(), reset.encode()


def anthropic_headers(standing: Standing, now: float) -> Iterator[tuple[bytes, bytes]]:
    """`anthropic-ratelimit-*`; `tokens` is the limit of which least is left."""
    reset = (datetime.fromtimestamp(now, UTC) + timedelta(seconds=standing.reset_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = [(kind, _limited(standing, names)) for kind, names in ANTHROPIC]
    for kind, name in (*told, ("tokens", _scarcest(standing))):
        if name:
            yield f"anthropic-ratelimit-{kind}-limit".encode(), _text(getattr(standing.limits, name))
            yield f"anthropic-ratelimit-{kind}-remaining".encode(), _text(standing.left(name))
            yield f"anthropic-ratelimit-{kind}-reset".encode(), reset.encode()


def duration(seconds: float) -> str:
    """As Go writes it, which OpenAI's headers do: `250ms`, `6s`, `1m30s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


def _limited(standing: Standing, names: tuple[str, ...]) -> str:
    return next((name for name in names if getattr(standing.limits, name) is not None), "")


def _scarcest(standing: Standing) -> str:
    names = [name for name in TOKENS if getattr(standing.limits, name) is not None]
    return min(names, key=lambda name: standing.left(name) / getattr(standing.limits, name), default="")


def _text(value: float) -> bytes:
    return str(int(value)).encode()
