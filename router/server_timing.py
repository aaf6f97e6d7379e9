"""How long a request waited, prefilled and decoded, as clients are told: in a header, or in a stream's last chunk."""

from holdfast.replicas.requests import Timing


def stages(timing: Timing) -> dict[str, float]:
    """Milliseconds of each stage that the request came to: queue, prefill (to the first token), decode.

    Empty for an answer that no engine made.
    """
    ends = (("queue", timing.scheduled), ("prefill", timing.first_token), ("decode", timing.finished))
    told: dict[str, float] = {}
    begin = timing.arrived
    for name, end in ends:
        if end is None:
            break
        told[name] = round((end - begin) * 1e3, 3)
        begin = end
    return told


def header(timing: Timing) -> str:
    """The value of `Server-Timing` (W3C Server Timing, section 3), or "" where there is nothing to tell."""
    return ", ".join(f"{name};dur={milliseconds}" for name, milliseconds in stages(timing).items())
