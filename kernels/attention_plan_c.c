// How the attention of a GPU's forward is cut into items: `cut_reference` of kernels/attention_plan.py.
//
// A step's chunks are too few for array operations in Python to pay: each takes a microsecond or two, and it took seventy.

#include <stdint.h>

#ifdef SOURCE  // compiled once besides: the digest of this file and lanes.h
const uint64_t attention_plan_source = SOURCE;
#else

typedef struct {
    int32_t first, count, row, low, high, slot;
} Item;

typedef struct {
    int32_t token, first, stride, count, others[3];
} Merge;

// Mirrored by attention_plan.py: how to cut, `count` chunks, and the results.
typedef struct {
    int64_t block, split, wide_split, programs, window, whole;  // `Shape`
    int64_t longest;                                            // `part_sizes` has so many sizes and one more
    const int32_t *part_sizes;
    int64_t count, continued;
    const int32_t *rows, *starts, *lengths, *shared, *is_long;
    Item *items;  // null: items, merges and partial results are only counted
    Merge *merges;
    int32_t *positions;
    int64_t n_narrow, n_items, n_merges, partials, most;
} Cut;

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Adds the items of some tokens, in parts that end at multiples of `size`, and the merges of their results.
static void add(Cut *c, Item item, int64_t size) {
    const int64_t low = item.low, high = item.high, before = low / size, parts = ceil_div(high, size) - before;
    const int merged = parts > 1 || (c->continued && low > 0);
    for (int64_t part = 0; c->items && part < parts; part++) {
        item.low = (int32_t)(part ? (before + part) * size : low);
        item.high = (int32_t)(part + 1 < parts ? (before + part + 1) * size : high);
        item.slot = (int32_t)(merged ? c->partials + part * item.count : -1);
        c->items[c->n_items + part] = item;
    }
    c->n_items += parts;
    if (!merged) return;
    for (int32_t i = 0; c->items && i < item.count; i++)
        c->merges[c->n_merges + i] =
            (Merge){item.first + i, (int32_t)c->partials + i, item.count, (int32_t)parts, {0, 0, 0}};
    c->n_merges += item.count, c->partials += parts * item.count;
}

// Adds chunk `i`, whose tokens begin with `first`.
static void add_chunk(Cut *c, int64_t i, int64_t first) {
    const int64_t start = c->starts[i], length = c->lengths[i], end = start + length;
    int64_t block = length, size = 0;
    if (c->is_long[i]) {
        const int64_t fill = c->programs / ceil_div(length, c->block), most = end / c->wide_split;
        const int64_t cuts = c->whole || fill < 1 || most < 1 ? 1 : fill < most ? fill : most;
        block = c->block, size = ceil_div(end, cuts * c->split) * c->split;
    } else if (length > c->most) {
        c->most = length;
    }
    for (int64_t at = 0; at < length; at += block) {
        const int64_t count = length - at < block ? length - at : block, high = start + at + count;
        int64_t low = c->window && start + at >= c->window ? start + at - c->window + 1 : c->shared[i];
        if (c->whole) low = low / c->split * c->split;
        if (!c->is_long[i]) {
            const int64_t splits = ((c->whole ? high : high - low) - 1) / c->split;
            size = c->part_sizes[splits < c->longest ? splits : c->longest] * c->split;
        }
        add(c, (Item){(int32_t)(first + at), (int32_t)count, c->rows[i], (int32_t)low, (int32_t)high, -1}, size);
    }
}

// Cuts the narrow chunks, then the long ones.
void attention_plan_cut(Cut *c) {
    c->n_items = c->n_merges = c->partials = 0, c->most = 1;
    for (int32_t is_long = 0; is_long < 2; is_long++) {
        for (int64_t i = 0, first = 0; i < c->count; first += c->lengths[i++])
            if (c->is_long[i] == is_long) add_chunk(c, i, first);
        if (!is_long) c->n_narrow = c->n_items;
    }
    for (int64_t i = 0, first = 0; c->items && i < c->count; first += c->lengths[i++])
        for (int32_t t = 0; t < c->lengths[i]; t++) c->positions[first + t] = c->starts[i] + t;
}

#endif
