"""How many prompt tokens each prefilling sequence computes in a step (stateful inference, section 3.2). Pure."""

from holdfast.replicas.config import EngineConfig


def chunk_size(remaining: int, active: int, latency_sensitive: bool, config: EngineConfig) -> int:
    """min(remaining, step_tokens // active prefills), at most `latency_chunk` beside a latency-sensitive request.

    Never 0, so that every prefill makes progress however many there are. Without `adaptive_chunks` every prefill may
    fill a step by itself.
    """
    if not config.adaptive_chunks:
        return max(1, min(remaining, config.step_tokens))
    share = config.step_tokens // active
    if latency_sensitive:
        share = min(share, config.latency_chunk)
    return max(1, min(remaining, share))
