"""What a replica says of its KV cells, on the device and in host memory."""

from holdfast.replicas.metrics.reading import counter, gauge

STATES = ("free", "tree", "held")

CELLS = (
    gauge(
        "cells",
        "cells",
        "KV cells `free`, in the `tree`, `held` by sequences. One cell holds one token",
        "`free` near 0 is as it should be; `held` near the capacity is not: more cells or replicas",
        lambda r: {state: getattr(r.now, f"cells_{state}") for state in STATES},
        "state",
    ),
    gauge(
        "cell_capacity",
        "cells",
        "The sum of the three",
        "Follows from the model and `engine.gpu_memory`, on a CPU `engine.kv_memory`",
        lambda r: r.now.cells_total,
    ),
    gauge(
        "cells_pinned",
        "cells",
        'Cells kept for programs until their next turn, shared ones once (of `holdfast_cells{state="tree"}`)',
        "At `engine.retention.share` of the capacity with many pins refused: more cells",
        lambda r: r.now.cells_pinned,
    ),
    gauge(
        "programs_pinned",
        "",
        "Programs whose cells are kept until their next turn",
        "Compare it with the programs that wait for a tool",
        lambda r: r.now.pins,
    ),
    gauge(
        "host_cells",
        "cells",
        "KV cells in host memory; they do not count in `holdfast_cells`",
        "At the capacity with reloads: raise `engine.host_memory`",
        lambda r: r.now.cells_host,
    ),
    gauge(
        "host_cell_capacity",
        "cells",
        "KV cells that host memory has room for; 0: there is no second tier",
        "Follows from `engine.host_memory` and the model",
        lambda r: r.now.cells_host_total,
    ),
    gauge(
        "reload_cells_per_second",
        "cells/s",
        "How fast cells came back from host memory lately; 0: none has",
        "Far below what the bus can do: other work on it, or memory that is not pinned",
        lambda r: r.now.reload_cells_per_s,
    ),
    counter(
        "host_pages_out",
        "pages",
        "Evicted pages copied to host memory",
        "Many out and few in: the second tier is smaller than what comes back, or nothing does",
        lambda r: r.stats.pages_out,
    ),
    counter(
        "host_pages_in",
        "pages",
        "Pages copied back",
        "See `holdfast_host_pages_out_total`",
        lambda r: r.stats.pages_in,
    ),
    counter(
        "tokens_reloaded",
        "tokens",
        "Tokens that came back from host memory instead of being computed again",
        "Nothing: what the second tier saved",
        lambda r: r.stats.tokens_reloaded,
    ),
    counter(
        "host_moves_failed",
        "",
        "Steps whose copies between the tiers failed: the tier was emptied, and what was to come back computed",
        "Any: look into the replica's log; host memory may be short",
        lambda r: r.stats.failed_moves,
    ),
)
