"""What a replica says of its requests and their tokens."""

from holdfast.replicas.metrics.reading import counter, gauge

REQUESTS = (
    counter(
        "engine_requests",
        "",
        "Requests by their terminal event: `finished`, `aborted`, `rejected`, `failed`",
        "`failed` is ours to explain: look into the replica's log",
        lambda r: r.stats.ended,
        "outcome",
    ),
    gauge(
        "sequences_running",
        "",
        "Sequences in the batch",
        "At `engine.max_sequences` for long: more replicas, or more rows if cells are free",
        lambda r: r.now.running,
    ),
    gauge(
        "sequences_waiting",
        "",
        "Requests waiting for a place in the batch",
        "Above 0 for minutes: more replicas, or more cells",
        lambda r: r.now.waiting,
    ),
    gauge(
        "sequence_rows_taken",
        "",
        "Rows of the sequence pool in use",
        "At its most with cells free: raise `engine.max_sequences`",
        lambda r: r.now.rows_taken,
    ),
    gauge(
        "sequence_rows_parked",
        "",
        "Rows kept for programs between turns; whoever needs one takes it",
        "Nothing: it says how many next turns will find their row as it was",
        lambda r: r.now.rows_parked,
    ),
    gauge(
        "sessions",
        "",
        "Sessions that clients have open",
        "Near `engine.session_rows`: raise it, or lower `engine.session_idle_s`",
        lambda r: r.now.sessions,
    ),
)

TOKENS = (
    counter(
        "prompt_tokens_computed",
        "tokens",
        "Prompt tokens run through the model",
        "The work of prefill; compare it with the cached ones",
        lambda r: r.stats.prompt_computed,
    ),
    counter(
        "prompt_tokens_cached",
        "tokens",
        "Prompt tokens found in the KV cache",
        "A low share of the sum on agents' traffic: more cells, or a client that rewrites its history",
        lambda r: r.stats.prompt_cached,
    ),
    counter(
        "prompt_tokens_grouped",
        "tokens",
        "Of the cached ones, those computed by another request while this one waited for it",
        "Nothing: what grouped prefill saved",
        lambda r: r.stats.prompt_grouped,
    ),
    counter(
        "completion_tokens",
        "tokens",
        "Tokens drawn",
        "The throughput of a replica; divided by the steps, the tokens of a step",
        lambda r: r.stats.completion,
    ),
    counter(
        "turns_continued",
        "",
        "Turns that took over the row of the program's or session's turn before",
        "Few beside many pin hits: rows are short, raise `engine.max_sequences`",
        lambda r: r.stats.turns_continued,
    ),
    counter(
        "tokens_continued",
        "tokens",
        "Cached tokens of these turns, neither copied nor written to a row",
        "Nothing: what keeping rows saved",
        lambda r: r.stats.tokens_continued,
    ),
    counter(
        "tokens_rewritten",
        "tokens",
        "Computed for a program's last turn and lost, for its next prompt changed a token before them",
        "High: a template or a client that rewrites history",
        lambda r: r.stats.tokens_rewritten,
    ),
    counter(
        "prompt_seeds",
        "",
        "Sampled requests whose noise was seeded by their prompt",
        "Nothing: with `engine.prompt_seed` off it stands still",
        lambda r: r.stats.prompt_seeds,
    ),
)

TEXT = (
    counter(
        "render_cache_hits",
        "",
        "Prompts whose rendering was known",
        "Compare it with the misses",
        lambda r: r.text.render_hits,
    ),
    counter(
        "render_cache_misses",
        "",
        "Prompts rendered",
        "Nearly every one should be: a turn's prompt is new",
        lambda r: r.text.render_misses,
    ),
    counter(
        "prompt_characters_reused",
        "characters",
        "Of rendered prompts, those whose tokens were known from earlier turns",
        "Compare it with the tokenized ones",
        lambda r: r.text.characters_reused,
    ),
    counter(
        "prompt_characters_tokenized",
        "characters",
        "Of rendered prompts, those tokenized",
        "Near the reused ones: `engine.tokenize_cache` is too small",
        lambda r: r.text.characters_tokenized,
    ),
    counter(
        "replies_stopped",
        "",
        "Replies ended where their tool calls did, without waiting for the model to end them",
        "Nothing: what stopping early saved",
        lambda r: r.text.stopped,
    ),
    counter(
        "replies_rewritten",
        "",
        "Replies in which a call of an undeclared tool was written again",
        "Many: the model does not follow its tools; ask for `strict` ones",
        lambda r: r.text.rewritten,
    ),
)
