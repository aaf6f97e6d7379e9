"""Recording rules: what is asked often or over long times, computed once. Alerts are built on some of them."""

from holdfast.cluster.rules.definition import Recording

MODEL = "job, model"
TENANT = "job, tenant"


def rate(counter: str, by: str, labels: str = "", window: str = "5m") -> str:
    return f"sum by ({by}) (rate({counter}{labels}[{window}]))"


def p95(histogram: str, by: str) -> str:
    return f"histogram_quantile(0.95, {rate(f'{histogram}_bucket', f'{by}, le')})"


def share(part: str, whole: str) -> str:
    """0 where there is none of the part, no sample where there is none of the whole."""
    return f"(({part}) or 0 * ({whole})) / (({whole}) > 0)"


def failed(window: str) -> str:
    """Share of the requests in `window` that failed on our side."""
    requests = rate("holdfast_requests_total", MODEL, window=window)
    return share(rate("holdfast_requests_total", MODEL, '{outcome="failed"}', window), requests)


def slow(window: str) -> str:
    """Share of the requests with a token in `window` that waited longer than FIRST_TOKEN_S for it."""
    in_time = rate("holdfast_time_to_first_token_seconds_bucket", MODEL, f'{{le="{FIRST_TOKEN_S}"}}', window)
    return f"1 - {share(in_time, rate('holdfast_time_to_first_token_seconds_count', MODEL, window=window))}"


FIRST_TOKEN_S = "5.0"  # a bucket of the histogram
BURN_WINDOWS = ("5m", "30m", "1h", "6h")  # the pairs of the burn-rate alerts
REQUESTS = rate("holdfast_requests_total", MODEL)
CACHED = rate("holdfast_prompt_tokens_cached_total", MODEL)
COMPUTED = rate("holdfast_prompt_tokens_computed_total", MODEL)
HITS = rate("holdfast_pin_hits_total", MODEL, window="15m")
MISSES = rate("holdfast_pin_misses_total", MODEL, window="15m")

RECORDINGS = (
    Recording("model:holdfast_requests:rate5m", REQUESTS),
    *(Recording(f"model:holdfast_requests_failed:ratio_rate{each}", failed(each)) for each in BURN_WINDOWS),
    *(Recording(f"model:holdfast_first_tokens_slow:ratio_rate{each}", slow(each)) for each in BURN_WINDOWS),
    Recording(
        "model:holdfast_time_to_first_token_seconds:p95_rate5m", p95("holdfast_time_to_first_token_seconds", MODEL)
    ),
    Recording(
        "model:holdfast_time_per_output_token_seconds:p95_rate5m", p95("holdfast_time_per_output_token_seconds", MODEL)
    ),
    Recording("model:holdfast_turn_seconds:p95_rate5m", p95("holdfast_turn_seconds", MODEL)),
    Recording("model:holdfast_program_seconds:p95_rate5m", p95("holdfast_program_seconds", MODEL)),
    Recording("model:holdfast_bubble_seconds:p95_rate5m", p95("holdfast_bubble_seconds", MODEL)),
    Recording("model:holdfast_completion_tokens:rate5m", rate("holdfast_completion_tokens_total", MODEL)),
    Recording("model:holdfast_prompt_tokens_cached:ratio_rate5m", share(CACHED, f"{CACHED} + {COMPUTED}")),
    Recording("model:holdfast_pin_hits:ratio_rate15m", share(HITS, f"{HITS} + {MISSES}")),
    Recording(
        "model:holdfast_cells_held:ratio",
        f'sum by ({MODEL}) (holdfast_cells{{state="held"}}) / sum by ({MODEL}) (holdfast_cell_capacity)',
    ),
    Recording("tenant:holdfast_requests:rate5m", rate("holdfast_requests_total", TENANT)),
    Recording("tenant:holdfast_tenant_tokens:rate5m", rate("holdfast_tenant_tokens_total", f"{TENANT}, kind")),
)
