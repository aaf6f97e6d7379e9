"""What a replica says of its order, of the cells that it keeps for programs, and of speculation."""

from holdfast.replicas.metrics.reading import counter

SCHEDULING = (
    counter(
        "preemptions",
        "",
        "Sequences sent back to the queue for lack of cells",
        "Often: more cells, or a lower `engine.admission_ceiling`",
        lambda r: r.stats.preemptions,
    ),
    counter(
        "tokens_recomputed",
        "tokens",
        "Computed before a preemption, and again after it",
        "What preemptions cost",
        lambda r: r.stats.tokens_recomputed,
    ),
    counter(
        "prefill_chunks_deferred",
        "",
        "Prefill chunks put off to a later step above the high-water mark",
        "Often: cells are short",
        lambda r: r.stats.chunks_deferred,
    ),
    counter(
        "pins",
        "",
        "Turns whose cells were kept for their program's next one",
        "0 with tools in use: `engine.retention.policy` is off, or finds that keeping does not pay",
        lambda r: r.stats.pins,
    ),
    counter(
        "pin_hits",
        "",
        "Follow-up turns that came while their program's cells were kept",
        "Compare it with the misses",
        lambda r: r.stats.pin_hits,
    ),
    counter(
        "pin_misses",
        "",
        "Follow-up turns that came when they were not",
        "Many with a growing `holdfast_prompt_tokens_computed_total`: more cells, or another `engine.retention.policy`",
        lambda r: r.stats.pin_misses,
    ),
    counter(
        "pins_expired",
        "",
        "Pins dropped at their deadline",
        "Many: tools take longer than keeping was worth",
        lambda r: r.stats.pins_expired,
    ),
    counter(
        "pins_given_way",
        "",
        "Pins dropped for others that needed the cells",
        "Often: cells are short",
        lambda r: r.stats.pins_given_way,
    ),
    counter(
        "pins_refused",
        "",
        "Pins dropped beyond `engine.retention.share` or `engine.retention.tenant_share`",
        "One tenant may be keeping more than its share; or raise the share",
        lambda r: r.stats.pins_refused,
    ),
)

SPECULATION = (
    counter(
        "draft_tokens",
        "tokens",
        "Tokens drafted by speculation and verified",
        "0 under load: the gate finds that drafts do not pay on this model, or `engine.speculation.enabled` is off",
        lambda r: r.stats.drafted,
    ),
    counter(
        "draft_tokens_accepted",
        "tokens",
        "Of these, tokens that the model drew too",
        "Below a third of the drafted ones: shorter drafts (`engine.speculation.max_draft`)",
        lambda r: r.stats.accepted,
    ),
    counter(
        "draft_tokens_withheld",
        "tokens",
        "Drafts that were there and not verified, for it would have cost more than it saves",
        "Nothing: the gate at work, mostly with many decoders",
        lambda r: r.stats.drafts.withheld,
    ),
    counter(
        "drafter_tokens",
        "tokens",
        "The verified ones by where they came from: `prompt_lookup`, `memory`, `skeleton`",
        "A source with many drafts and few accepted ones is better turned off",
        lambda r: {source.name.lower(): n for source, n in r.stats.drafts.drafted.items()},
        "source",
    ),
    counter(
        "drafter_tokens_accepted",
        "tokens",
        "The accepted ones by where they came from",
        "See `holdfast_drafter_tokens_total`",
        lambda r: {source.name.lower(): n for source, n in r.stats.drafts.accepted.items()},
        "source",
    ),
)
