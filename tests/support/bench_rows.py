"""Rows of a comparison, made by hand."""

from holdfast.loadgen.rows import Row


def row(server: str = "a", started: float = 0.0, latency: float = 1.0, **more) -> Row:
    """A request that succeeded, with its first token in the middle."""
    given = {
        "workload": "w", "repetition": 0, "wave": 0, "program": "p", "turn": 0, "first_byte": started,
        "first_token": started + latency / 2, "prompt_tokens": 100, "cached_tokens": 50, "output_tokens": 10,
        "reason": "stop", "calls": 0, "fits": True, "as_scripted": True, "prompt": "x", "answer": {},
    }  # fmt: skip
    return Row(server=server, started=started, ended=started + latency, **{**given, **more})
