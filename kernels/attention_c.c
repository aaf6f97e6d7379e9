// Attention over the paged KV store on the cores of a CPU: the maths of attention.py, which plans the work.
//
// For a query row at position p, over the positions j that it may see, p - window < j <= p:
//
//     s_j = scale * q . k_j,  s_j = softcap * tanh(s_j / softcap) with a softcap,    o = sum_j softmax(s)_j v_j
//
// A model may have learnt a sink for each query head, a score of its own that joins the softmax's sum and has no value.
//
// The softmax is taken online: with m the greatest score so far, l = sum_j 2^(s_j - m) and o = sum_j 2^(s_j - m) v_j are
// carried from block to block of keys, times 2^(old m - new m). Scores are in units of log 2 from the product on.
//
// Order. Positions come in parts of PART, and these in blocks of 96 or 48, both counted from the sequence's beginning.
// Each part begins anew, and is joined to those before it:
//
//     m' = max(M, m),  L' = L * 2^(M - m') + l * 2^(m - m'),  O' = O * 2^(M - m') + o * 2^(m - m')
//
// Every sum, of a score, of a block's share of l and of a column of o, is taken in order, one value (or pair of values)
// after the other, and what a row does not see weighs 0 and changes nothing. So a row comes to the same bits in either
// routine, whatever its span and the batch have besides: however a prompt is cut, with drafts beside it or without, by
// any number of threads. A sink joins last, as a part of one position, when all others have.
//
// Work. A span is `count` tokens against the positions [low, high) of one page table row. A task is a span, or one of its
// parts, for one KV head; the group's query heads are rows of it, row = token * group + g, so that the head is read once
// for all of them. The threads of a team draw tasks from a counter. A span whose parts are tasks leaves m, l and o of each,
// and they are joined when all tasks are done.
//
// The store has values as they are multiplied, or bytes: of each key, and each value, `dim` integers of 8 bits and behind
// them their scale, a float32. Those are turned into values block by block, and all else is the same.
//
// Two routines, each over blocks of keys that lie in one stretch of memory, or are copied into one:
//
//     few     up to 8 rows, which wait for memory.  lane = key of a score, column of an output.
//     many    more rows, which wait for the multipliers.  lane = row.  Tiles of keys x rows, and of columns x rows, stay in
//             registers; scores lie transposed, so that softmax takes a vector of rows at once.
//
// Both ask for the next block's cells while they multiply.
//
// This file is compiled once for each kind of processor and each dtype of the store:
//
//     LANES   8 or 16: float32 values of a vector
//     PAIRS   bfloat16 is multiplied in pairs, two products added to a float32 lane, else each value as a float32
//     WIDE    the queries, and the store where it is not in bytes, are float32, else bfloat16
//     NAME    of the function
//
// Vectors are the compiler's own types. Only the product of pairs is an instruction by name, and without that it is
// computed from float32 products, which is how a processor that lacks it tests all the rest.

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t attention_source = SOURCE;
#else

enum { MAX_DIM = 512, MAX_ROWS = 128, FEW_ROWS = 8, MAX_KEYS = 96, BLOCK_VALUES = 48 * MAX_DIM };
enum { PART = 384 };  // positions; mirrored by attention.py

// Mirrored by attention.py.
typedef struct {
    int32_t first, count;    // of its tokens in the batch
    int32_t start;           // position of the first; the next ones follow
    int32_t row, low, high;  // of the page table, and its positions
    int32_t before, tasks;   // over kv_heads: of the spans before this one, its own
    int32_t slot;            // partial results: part i of token t at slot + i * count + t; -1: one task for all its parts
} Span;

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use
    const int32_t *pages;  // [rows][slots]: page of every page_size positions
    const Span *spans;
    float *partial;        // [slots of partial results][heads][width], columns in the order of `unpack`
    float *sums;           // [slots of partial results][heads][2]: m and l
    int64_t slots, page_size, cell_stride, head_stride;  // strides in bytes
    int32_t n_spans, heads, kv_heads, dim, width, window;  // width: dim up to a multiple of STEP, with zeros
    int32_t stored, scaled;  // bytes of a key, or of a value, in the store; whether they are integers with a scale
} Plan;

#if WIDE
typedef float value;
#else
typedef uint16_t value;
#endif

typedef struct {
    const Plan *plan;
    const value *q;
    const char *k, *v;
    value *out;  // [tokens][heads][dim]
    const float *sinks;  // [heads], or null
    int64_t q_token, q_head;  // strides in values
    float scale, softcap;     // scale in units of log 2 unless there is a softcap
    int64_t tasks, next;
} Job;

// ---- vectors ----

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(4 * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint32_t vu_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef float f32_at __attribute__((aligned(2), may_alias));
typedef int8_t vb_at __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(2 * LANES)));
typedef int16_t vs_at __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

enum { STEP = 2 * LANES, LOADS = PAIRS ? 1 : 2, KEYS = PAIRS ? 2 : 1 };  // KEYS: of one product over positions

#define LOG2E 1.44269504f
#define NEVER (-1e30f)  // a score that weighs nothing beside a real one, and is no infinity
#define HIGH 0xffff0000u

#if LANES == 8
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x}; }
#else
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#endif
INLINE vf load(const void *p) { return (vf)*(const vf_at *)p; }
INLINE void store(void *p, vf x) { *(vf_at *)p = x; }
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return either(a > b, a, b); }  // b where either is NaN, as the instruction has it
INLINE vf muladd(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }

// 2^x for x <= 0, 1 for 0, 0 from about -126.5 on, NaN for NaN. Relative error 1e-4, and 1e-7 where results stay in float32.
INLINE vf exp2_of(vf x) {
    x = larger(splat(-127.f), x);
    vf shifted = x + 12583039.f;  // 1.5 * 2^23 + 127: the rounded exponent ends up in the last bits, biased
    vf f = x - (shifted - 12583039.f);
#if WIDE
    vf p = muladd(splat(1.5345811e-4f), f, splat(1.3399931e-3f));
    p = muladd(p, f, splat(9.6184890e-3f));
    p = muladd(p, f, splat(5.5503288e-2f));
    p = muladd(p, f, splat(2.4022647e-1f));
    p = muladd(p, f, splat(6.9314721e-1f));
    p = muladd(p, f, splat(1.f));
#else
    vf p = muladd(splat(0.05500887f), f, splat(0.24221097f));
    p = muladd(p, f, splat(0.69328294f));
    p = muladd(p, f, splat(1.f));
#endif
    return p * (vf)((vi)shifted << 23);
}

// tanh by Eigen's rational approximation, a few units in the last place.
INLINE vf tanh_of(vf x) {
    const vf most = splat(7.90531110763549805f);
    x = larger(-most, x);
    x = -larger(-most, -x);
    vf y = x * x;
    vf p = splat(-2.76076847742355e-16f);
    p = muladd(p, y, splat(2.00018790482477e-13f));
    p = muladd(p, y, splat(-8.60467152213735e-11f));
    p = muladd(p, y, splat(5.12229709037114e-08f));
    p = muladd(p, y, splat(1.48572235717979e-05f));
    p = muladd(p, y, splat(6.37261928875436e-04f));
    p = muladd(p, y, splat(4.89352455891786e-03f));
    vf r = splat(1.19825839466702e-06f);
    r = muladd(r, y, splat(1.18534705686654e-04f));
    r = muladd(r, y, splat(2.26843463243900e-03f));
    r = muladd(r, y, splat(4.89352518554385e-03f));
    return x * p / r;
}

// Of two vectors, turns of h lanes each: the lower ones of either, and the upper ones.
#if LANES == 8
#define LOWER(x, y, h) (h == 4 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11) : \
                        h == 2 ? __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13) : \
                               __builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14))
#define UPPER(x, y, h) (h == 4 ? __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15) : \
                        h == 2 ? __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15) : \
                               __builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15))
#else
#define LOWER(x, y, h) (h == 8 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) : \
                        h == 4 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) : \
                        h == 2 ? __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) : \
                               __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30))
#define UPPER(x, y, h) (h == 8 ? __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31) : \
                        h == 4 ? __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31) : \
                        h == 2 ? __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) : \
                               __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#endif

#if LANES == 8
static const vi LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const vi LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// Lane j of vector i becomes lane i of vector j.
INLINE void transpose(vf *a) {
#pragma clang loop unroll(full)
    for (int h = LANES / 2; h; h /= 2)
#pragma clang loop unroll(full)
        for (int i = 0; i < LANES; i++)
            if (!(i & h)) {
                vf x = a[i], y = a[i + h];
                a[i] = LOWER(x, y, h);
                a[i + h] = UPPER(x, y, h);
            }
}

// The greatest lane, in each of them.
INLINE vf greatest_of(vf x) {
    x = larger(x, UPPER(x, x, 1));
    x = larger(x, UPPER(x, x, 2));
    x = larger(x, UPPER(x, x, 4));
#if LANES == 16
    x = larger(x, UPPER(x, x, 8));
#endif
    return splat(x[0]);
}

// ---- values ----

// The next STEP values of a row, as LOADS vectors to multiply: floats, of bfloat16 the even ones and the odd ones, or
// pairs as they lie.
INLINE void unpack(const value *p, vf *x) {
#if WIDE
    x[0] = load(p);
    x[1] = load(p + LANES);
#elif PAIRS
    x[0] = load(p);
#else
    vu u = *(const vu_at *)p;
    x[0] = (vf)(u << 16);
    x[1] = (vf)(u & HIGH);
#endif
}

// acc + a * b, lane by lane; of pairs both products.
INLINE vf mac(vf acc, vf a, vf b) {
#if PAIRS && defined __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif PAIRS
    acc = muladd((vf)((vu)a & HIGH), (vf)((vu)b & HIGH), acc);
    return muladd((vf)((vu)a << 16), (vf)((vu)b << 16), acc);
#else
    return muladd(a, b, acc);
#endif
}

// 2^score, rounded to bfloat16 where pairs are multiplied. What l sums is what is multiplied by.
INLINE vf weight_of(vf score) {
    vf w = exp2_of(score);
    return PAIRS ? (vf)(((vu)w + 0x8000u) & HIGH) : w;
}

// Values of 1, to sum weights as columns are summed.
INLINE vf ones(void) { return PAIRS ? (vf)((vu){0} + 0x3f803f80u) : splat(1.f); }

#if PAIRS
// Two rows of STEP values as two vectors of pairs, one of each: columns in order.
INLINE void paired(const value *a, const value *b, vf *x) {
    vh u = *(const vh_at *)a, v = *(const vh_at *)b;
    x[0] = (vf)__builtin_shufflevector(u, v, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11,
                                       43, 12, 44, 13, 45, 14, 46, 15, 47);
    x[1] = (vf)__builtin_shufflevector(u, v, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
                                       26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}

// Two vectors of weights as bfloat16, one behind the other.
INLINE vf halves(vf a, vf b) {
    return (vf)__builtin_shufflevector((vh)a, (vh)b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
                                       31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}
#endif

// Where column d lies among the columns of an output, which are in the order in which V is loaded.
INLINE int column(int d) {
    int e = d % STEP;
    return WIDE || PAIRS ? d : d - e + e % 2 * LANES + e / 2;
}

// STEP columns of an output, in the order of memory again.
INLINE void put(value *p, vf x, vf y) {
#if WIDE
    store(p, x);
    store(p + LANES, y);
#elif PAIRS && defined __AVX512BF16__
    store(p, (vf)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));  // what is below 1e-38 becomes 0
#else
    // To the nearest, and to even from the middle.
    vu a = (vu)x + 0x7fffu + (((vu)x >> 16) & 1), b = (vu)y + 0x7fffu + (((vu)y >> 16) & 1);
#if PAIRS
    store(p, (vf)__builtin_shufflevector((vh)a, (vh)b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37,
                                         39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63));
#else
    store(p, (vf)(a >> 16 | (b & HIGH)));
#endif
#endif
}

// The next STEP integers of a row as floats, in the order of `put`.
INLINE void floats(const int8_t *p, vf *x) {
#if WIDE || PAIRS
    x[0] = __builtin_convertvector(*(const vb_at *)p, vf);
    x[1] = __builtin_convertvector(*(const vb_at *)(p + LANES), vf);
#else
    const vs both = *(const vs_at *)p;
    x[0] = __builtin_convertvector((vs)(both << 8) >> 8, vf);
    x[1] = __builtin_convertvector(both >> 8, vf);
#endif
}

// ---- keys ----

typedef struct {
    const Plan *plan;
    const int32_t *pages;  // of the row
    const char *k, *v;     // of the KV head
} Store;

// Positions of a block. Of even length, so that pairs of positions are the same everywhere.
INLINE int block_keys(int width) { return width <= 80 ? MAX_KEYS : MAX_KEYS / 2; }

INLINE int64_t cell_of(const Plan *plan, const int32_t *pages, int64_t position) {
    int64_t slot = position / plan->page_size;
    return pages[slot] * plan->page_size + position - slot * plan->page_size;
}

// How many of `n` positions from `position` on lie in neighbouring cells.
static int64_t unbroken(const Plan *plan, const int32_t *pages, int64_t position, int64_t n) {
    int64_t slot = position / plan->page_size, found = (slot + 1) * plan->page_size - position;
    for (; found < n && pages[slot + 1] == pages[slot] + 1; slot++) found += plan->page_size;
    return found < n ? found : n;
}

INLINE void copy(value *to, const value *from, int dim, int width) {
    memcpy(to, from, dim * sizeof(value));
    if (width > dim) memset(to + dim, 0, (width - dim) * sizeof(value));
}

// Integers and the scale behind them as values.
INLINE void widen(value *to, const int8_t *from, int dim, int width) {
    float scale;
    memcpy(&scale, from + dim, sizeof(scale));
    vf x[2];
    int d = 0;
    for (; d + STEP <= dim; d += STEP) {
        floats(from + d, x);
        put(to + d, x[0] * scale, x[1] * scale);
    }
    if (d == width) return;
    int8_t rest[STEP] = {0};
    memcpy(rest, from + d, dim - d);
    floats(rest, x);
    put(to + d, x[0] * scale, x[1] * scale);
}

// The keys, or the values, of `n` positions, `width` values each, and zeros up to `room` of them: in place where they lie
// so without a break, else in `to`.
static const value *fetch(const Store *s, int keys, int64_t position, int n, int room, value *to) {
    const Plan *plan = s->plan;
    const int dim = plan->dim, width = plan->width;
    const int64_t stride = plan->cell_stride;
    const char *base = keys ? s->k : s->v;
    int64_t cells = unbroken(plan, s->pages, position, n), first = cell_of(plan, s->pages, position);
    if (cells == n && n == room && stride == width * (int64_t)sizeof(value) && dim == width && !plan->scaled)
        return (const value *)(base + first * stride);
    for (int done = 0; done < n;) {
        for (int i = 0; i < cells; i++) {
            const char *cell = base + (first + i) * stride;
            if (plan->scaled) widen(to + (done + i) * width, (const int8_t *)cell, dim, width);
            else copy(to + (done + i) * width, (const value *)cell, dim, width);
        }
        done += cells;
        if (done < n) {
            cells = unbroken(plan, s->pages, position + done, n - done);
            first = cell_of(plan, s->pages, position + done);
        }
    }
    memset(to + n * width, 0, (room - n) * width * sizeof(value));
    return to;
}

// A span, or one part of it, for one KV head.
typedef struct Task {
    const Job *job;
    const Span *span;
    Store store;
    int head, low, high, slot;  // of the KV heads; the task's positions and first partial result, or -1
    int rows, group;
    const struct Task *then;  // what the thread does next, or null
} Task;

// Lines of memory that are to be in the second level of cache when they are read. They are asked for a few at a time,
// between products: many at once would wait for each other, and what is read meanwhile for them.
typedef struct {
    const char *at;
    int left, of_cell, in_cell;  // lines: all, and of this cell
    int64_t skip;                // bytes from a cell's last line to the next cell
} Lines;

// Those of the keys, or the values, of `n` positions, which are taken to be neighbours. Behind the task's last position
// begins what comes then.
INLINE Lines ahead(const Task *t, int keys, int position, int n) {
    if (position >= t->high) {
        if (!t->then) return (Lines){0};
        position += t->then->low - t->high;
        t = t->then;
    }
    if (position + n > t->high) return (Lines){0};
    const Plan *plan = t->store.plan;
    const char *cell = (keys ? t->store.k : t->store.v) + cell_of(plan, t->store.pages, position) * plan->cell_stride;
    if (plan->cell_stride == plan->stored) return (Lines){cell, (n * plan->stored + 63) / 64, INT32_MAX, INT32_MAX, 0};
    const int lines = (plan->stored + 63) / 64;
    return (Lines){cell, n * lines, lines, lines, plan->cell_stride - 64 * (int64_t)lines};
}

INLINE void ask(Lines *lines, int n) {
    for (; n && lines->left; n--, lines->left--) {
        __builtin_prefetch(lines->at, 0, 2);
        lines->at += 64;
        if (!--lines->in_cell) lines->at += lines->skip, lines->in_cell = lines->of_cell;
    }
}

// A row's query, `width` values: as it lies, or in `room` with zeros behind it.
INLINE const value *query_of(const Task *t, int row, value *room) {
    const Job *job = t->job;
    const int dim = job->plan->dim, width = job->plan->width;
    int64_t token = t->span->first + row / t->group;
    const value *q = job->q + token * job->q_token + (t->head * t->group + row % t->group) * job->q_head;
    if (dim == width) return q;
    copy(room, q, dim, width);
    return room;
}

// Positions that a row may see: from `*from` up to what is returned.
INLINE int seen_by(const Task *t, int row, int *from) {
    int position = t->span->start + row / t->group, window = t->job->plan->window;
    *from = window ? position - window + 1 : 0;
    return position;
}

// Where a stretch of positions that begins at `low` ends: at a multiple of `length`, or at `high`.
INLINE int end_of(int low, int high, int length) {
    const int end = (low / length + 1) * length;
    return end < high ? end : high;
}

// Joins a part to those before it: m and l, and what of either the columns are to be multiplied by.
INLINE void join(vf *m, vf *l, vf part_m, vf part_l, vf *kept, vf *added) {
    const vf most = larger(part_m, *m);
    *kept = exp2_of(*m - most);
    *added = exp2_of(part_m - most);
    *m = most;
    *l = muladd(part_l, *added, *l * *kept);
}

// A row's output: `o` in the order of `unpack`, over l, with the head's sink in it.
INLINE void give(const Job *job, int64_t token, int head, const float *o, float row_m, float row_l) {
    const Plan *plan = job->plan;
    const int dim = plan->dim, width = plan->width;
    ALIGNED value room[MAX_DIM];
    value *place = job->out + (token * plan->heads + head) * dim, *out = dim == width ? place : room;
    vf m = splat(row_m), l = splat(row_l), kept = splat(1.f), added;
    if (job->sinks) join(&m, &l, splat(job->sinks[head] * LOG2E), splat(1.f), &kept, &added);
    const vf inverse = kept / l;
    for (int d = 0; d < width; d += STEP) put(out + d, load(o + d) * inverse, load(o + d + LANES) * inverse);
    if (dim != width) memcpy(place, room, dim * sizeof(value));
}

// One row's result: into the output, or as a partial one. `o` has the row's columns `stride` values apart.
INLINE void finish(const Task *t, int row, float m, float l, const float *o, int stride, int width) {
    const Plan *plan = t->job->plan;
    const int token = row / t->group, head = t->head * t->group + row % t->group;
    ALIGNED float gathered[MAX_DIM];
    if (stride != 1) {
        for (int d = 0; d < width; d++) gathered[d] = o[d * stride];
        o = gathered;
    }
    if (t->slot < 0) {
        give(t->job, t->span->first + token, head, o, m, l);
        return;
    }
    const int64_t place = (int64_t)(t->slot + token) * plan->heads + head;
    memcpy(plan->partial + place * width, o, width * sizeof(float));
    plan->sums[2 * place] = m;
    plan->sums[2 * place + 1] = l;
}

// Products of scores are of units, which are floats, or pairs of values where PAIRS.
enum { UNIT = PAIRS ? 2 : 1, WORD = WIDE ? 1 : 2 };  // values of a unit, and of 32 bits of a row
typedef f32_at unit;

// ---- few rows: lane = key of a score, column of an output ----

// s[row][keys / LANES], KT vectors of keys at a time. Asks for the values of the same positions, which begin at `low`.
INLINE void few_scores(const Task *t, int low, const value *k, const unit *q, vf *s, int keys, vf scale, int width,
                       const int ROWS, const int KT) {
    const int words = width / WORD, units = width / UNIT;
    vf kt[3 * MAX_DIM];  // [KT][words]: of LANES keys, turned
    for (int key = 0; key < keys; key += KT * LANES) {
        Lines lines[3];
        for (int g = 0; g < KT; g++) {
            lines[g] = ahead(t, 0, low + key + g * LANES, LANES);
            for (int w = 0; w < words; w += LANES) {
                vf turned[LANES];
#pragma clang loop unroll(full)
                for (int i = 0; i < LANES; i++) turned[i] = load(k + (key + g * LANES + i) * width + w * WORD);
                transpose(turned);
#pragma clang loop unroll(full)
                for (int i = 0; i < LANES; i++) kt[g * words + w + i] = turned[i];
            }
        }
        vf acc[FEW_ROWS * 3];
        for (int i = 0; i < ROWS * KT; i++) acc[i] = splat(0.f);
#if !PAIRS && !WIDE
        // In the order of `unpack`: of every LANES words the even values, then the odd ones.
        for (int u = 0; u < units; u++) {
            const int w = u / STEP * LANES + u % LANES;
            for (int g = 0; g < KT; g++) {
                const vu word = (vu)kt[g * words + w];
                const vf x = (vf)(u & LANES ? word & HIGH : word << 16);
                ask(lines + g, 1);
                for (int r = 0; r < ROWS; r++) acc[r * KT + g] = mac(acc[r * KT + g], x, splat(q[r * units + u]));
            }
        }
#else
        for (int u = 0; u < units; u++)
            for (int g = 0; g < KT; g++) {
                ask(lines + g, 1);
                for (int r = 0; r < ROWS; r++)
                    acc[r * KT + g] = mac(acc[r * KT + g], kt[g * words + u], splat(q[r * units + u]));
            }
#endif
        for (int r = 0; r < ROWS; r++)
            for (int g = 0; g < KT; g++) s[r * (MAX_KEYS / LANES) + key / LANES + g] = acc[r * KT + g] * scale;
    }
}

// o[row] = old[row] * o[row] + sum of weight * value, for some rows and COLS steps of columns at a time; l likewise.
// Asks for the keys from position `next` on.
INLINE void few_values(const Task *t, int next, const value *v, const unit *weights, const vf *old, float *o, vf *l, int keys,
                       int width, const int ROWS, const int SOME, const int COLS) {
    for (int row = 0; row < ROWS; row += SOME)
        for (int d = 0; d < width; d += COLS * STEP) {
            vf acc[2 * LANES], sum[FEW_ROWS];
            for (int r = 0; r < SOME; r++) {
                sum[r] = splat(0.f);
                for (int c = 0; c < 2 * COLS; c++) acc[r * 2 * COLS + c] = splat(0.f);
            }
            Lines lines = {0};
            int each = 0;  // lines, so that eight keys are asked for evenly
            for (int key = 0; key < keys; key += KEYS) {
                if (!d && !row && key % 8 == 0) {
                    lines = ahead(t, 1, next + key, 8);
                    each = (lines.left * KEYS + 7) / 8;
                }
                ask(&lines, each);
                for (int c = 0; c < COLS; c++) {
                    vf x[2];
#if PAIRS
                    paired(v + key * width + d + c * STEP, v + (key + 1) * width + d + c * STEP, x);
#else
                    unpack(v + key * width + d + c * STEP, x);
#endif
                    for (int r = 0; r < SOME; r++) {
                        vf w = splat(weights[((row + r) * MAX_KEYS + key) / KEYS]);
                        acc[(r * COLS + c) * 2] = mac(acc[(r * COLS + c) * 2], w, x[0]);
                        acc[(r * COLS + c) * 2 + 1] = mac(acc[(r * COLS + c) * 2 + 1], w, x[1]);
                        if (!d && !c) sum[r] = mac(sum[r], w, ones());
                    }
                }
            }
            for (int r = 0; r < SOME; r++) {
                for (int c = 0; c < 2 * COLS; c++) {
                    float *place = o + (row + r) * width + d + c * LANES;
                    store(place, muladd(load(place), old[row + r], acc[r * 2 * COLS + c]));
                }
                if (!d) l[row + r] = muladd(l[row + r], old[row + r], sum[r]);
            }
        }
}

INLINE void few(const Task *t, const int width, const int ROWS) {
    const int units = width / UNIT, most_keys = block_keys(width);
    // Vectors of keys at a time: enough sums at once, and no more than the registers hold.
    const int KT = ROWS == 8 ? 1 : 3, vectors = MAX_KEYS / LANES;
    const Job *job = t->job;
    ALIGNED float q[FEW_ROWS * MAX_DIM];
    ALIGNED vf s[FEW_ROWS * (MAX_KEYS / LANES)];
    ALIGNED unit weights[FEW_ROWS * MAX_KEYS];
    ALIGNED float o[FEW_ROWS * MAX_DIM], all[FEW_ROWS * MAX_DIM];
    ALIGNED value block[BLOCK_VALUES], query_room[MAX_DIM];
    vf m[FEW_ROWS], l[FEW_ROWS], all_m[FEW_ROWS], all_l[FEW_ROWS], old[FEW_ROWS];
    vi from[FEW_ROWS], to[FEW_ROWS];
    int common_from = 0, common_to = INT32_MAX;  // seen by every row
    for (int r = 0; r < ROWS; r++) {
        int row = r < t->rows ? r : 0, first, last = seen_by(t, row, &first);
        const value *query = query_of(t, row, query_room);
        for (int u = 0; u < units; u += (PAIRS ? LANES : STEP)) {
            vf x[2];
            unpack(query + u * UNIT, x);
            for (int i = 0; i < LOADS; i++) store(q + r * units + u + i * LANES, x[i]);
        }
        from[r] = (vi){0} + first;
        to[r] = (vi){0} + last;
        common_from = first > common_from ? first : common_from;
        common_to = last < common_to ? last : common_to;
        all_m[r] = splat(NEVER);
        all_l[r] = splat(0.f);
    }
    memset(all, 0, ROWS * width * sizeof(float));
    const vf scale = splat(job->scale);
    for (int begin = t->low, stop; begin < t->high; begin = stop) {
        stop = end_of(begin, t->high, PART);
        memset(o, 0, ROWS * width * sizeof(float));
        for (int r = 0; r < ROWS; r++) m[r] = splat(NEVER), l[r] = splat(0.f);
        for (int low = begin, end; low < stop; low = end) {
            end = end_of(low, stop, most_keys);
            const int n = end - low, room = (n + KT * LANES - 1) / (KT * LANES) * (KT * LANES), here = room / LANES;
            few_scores(t, low, fetch(&t->store, 1, low, n, room, block), q, s, room, scale, width, ROWS, KT);
            const int hides = n < room || low < common_from || end - 1 > common_to;
            for (int r = 0; r < ROWS; r++) {
                vf *x = s + r * vectors, most = splat(NEVER);
                if (hides || job->softcap != 0.f)
                    for (int i = 0; i < here; i++) {
                        if (job->softcap != 0.f) x[i] = tanh_of(x[i]) * job->softcap;
                        vi position = LANE + (low + i * LANES);
                        x[i] = either((position >= end) | (position < from[r]) | (position > to[r]), splat(NEVER), x[i]);
                    }
                for (int i = 0; i < here; i++) most = larger(x[i], most);
                most = larger(greatest_of(most), m[r]);
                old[r] = exp2_of(m[r] - most);
                m[r] = most;
                for (int i = 0; i < here; i += KEYS) {
                    vf w = weight_of(x[i] - most);
#if PAIRS
                    // Of an odd number of vectors the last one has none beside it.
                    w = halves(w, i + 1 < here ? weight_of(x[i + 1] - most) : splat(0.f));
#endif
                    store(weights + (r * MAX_KEYS + i * LANES) / KEYS, w);
                }
            }
            const value *v = fetch(&t->store, 0, low, n, room, block);
            // As many accumulators as the registers hold beside what they are made of.
#define VALUES(some, cols) few_values(t, end, v, weights, old, o, l, room, width, ROWS, some, cols)
            if (ROWS == 1 && width % (4 * STEP) == 0) VALUES(1, 4);
            else if (ROWS <= 2 && width % (2 * STEP) == 0) VALUES(ROWS, 2);
            else if (LANES == 16 && ROWS == 4 && width % (2 * STEP) == 0) VALUES(4, 2);
            else VALUES(LANES == 8 && ROWS == 8 ? 4 : ROWS, 1);
        }
        for (int r = 0; r < ROWS; r++) {
            vf kept, added;
            join(all_m + r, all_l + r, m[r], l[r], &kept, &added);
            for (int d = r * width; d < (r + 1) * width; d += LANES)
                store(all + d, muladd(load(o + d), added, load(all + d) * kept));
        }
    }
    for (int r = 0; r < t->rows; r++) finish(t, r, all_m[r][0], all_l[r][0], all + r * width, 1, width);
}

// ---- many rows: lane = row; a tile is NV vectors of them ----

// s[key][NV] of KT keys at a time; raises `most` [NV] to the greatest. Asks for what comes from position `next` on.
INLINE void many_scores(const Task *t, int next, const unit *k, const vf *q, vf *s, vf *most, int keys, vf scale, int units,
                        const int NV, const int KT) {
    for (int key = 0; key < keys; key += KT) {
        if (next) {
            Lines k_lines = ahead(t, 1, next + key, KT), v_lines = ahead(t, 0, next + key, KT);
            ask(&k_lines, k_lines.left), ask(&v_lines, v_lines.left);
        }
        vf acc[2 * LANES];
        for (int i = 0; i < KT * NV; i++) acc[i] = splat(0.f);
#pragma clang loop unroll_count(2)
        for (int u = 0; u < units; u++)
            for (int i = 0; i < KT; i++) {
                vf x = splat(k[(key + i) * units + u]);
                for (int v = 0; v < NV; v++) acc[i * NV + v] = mac(acc[i * NV + v], q[u * NV + v], x);
            }
        for (int i = 0; i < KT; i++)
            for (int v = 0; v < NV; v++) {
                vf x = acc[i * NV + v] * scale;
                s[(key + i) * NV + v] = x;
                most[v] = larger(x, most[v]);
            }
    }
}

// o[column][NV] = old * o + sum of weight * value, DT columns at a time.
INLINE void many_values(const unit *values, const vf *weights, const vf *old, vf *o, int keys, int width, const int NV,
                        const int DT) {
    for (int d = 0; d < width; d += DT) {
        vf acc[2 * LANES];
        for (int i = 0; i < DT * NV; i++) acc[i] = splat(0.f);
        for (int j = 0; j < keys / KEYS; j++)
            for (int i = 0; i < DT; i++) {
                vf x = splat(values[j * width + d + i]);
                for (int v = 0; v < NV; v++) acc[i * NV + v] = mac(acc[i * NV + v], weights[j * NV + v], x);
            }
        for (int i = 0; i < DT; i++)
            for (int v = 0; v < NV; v++) o[(d + i) * NV + v] = muladd(o[(d + i) * NV + v], old[v], acc[i * NV + v]);
    }
}

typedef struct {
    vf q[MAX_DIM / UNIT * MAX_ROWS / LANES];  // tile by tile [unit][NV]
    vf o[MAX_DIM * MAX_ROWS / LANES];         // tile by tile [column][NV]; of a part
    vf all[MAX_DIM * MAX_ROWS / LANES];       // the same of those before it as well
    vf s[MAX_KEYS * 4], m[MAX_ROWS / LANES], l[MAX_ROWS / LANES], all_m[MAX_ROWS / LANES], all_l[MAX_ROWS / LANES];
    vi from[MAX_ROWS / LANES], to[MAX_ROWS / LANES];
    float k[BLOCK_VALUES], v[BLOCK_VALUES];  // a block's units
    value k_room[BLOCK_VALUES], v_room[BLOCK_VALUES], query_room[MAX_DIM];
} Room;

// A tile, which begins with vector `at`, against a block of `room` keys, of which `n` are real.
INLINE void many_tile(const Task *t, Room *r, const unit *k, const unit *v, int at, int low, int n, int room, int hides,
                      const int width, const int NV, const int KT, const int DT) {
    const Job *job = t->job;
    const vf *q = r->q + at * (width / UNIT);
    vf *o = r->o + at * width, *s = r->s, *m = r->m + at, *l = r->l + at, most[4], old[4], sum[4];
    for (int x = 0; x < NV; x++) most[x] = m[x];
    many_scores(t, at ? 0 : low + n, k, q, s, most, room, splat(job->scale), width / UNIT, NV, KT);
    if (hides || job->softcap != 0.f) {
        for (int x = 0; x < NV; x++) most[x] = m[x];
        for (int i = 0; i < room; i++)
            for (int x = 0; x < NV; x++) {
                vf score = s[i * NV + x];
                if (job->softcap != 0.f) score = tanh_of(score) * job->softcap;
                vi position = (vi){0} + (i < n ? low + i : INT32_MAX);
                score = either((position < r->from[at + x]) | (position > r->to[at + x]), splat(NEVER), score);
                s[i * NV + x] = score;
                most[x] = larger(score, most[x]);
            }
    }
    for (int x = 0; x < NV; x++) {
        old[x] = exp2_of(m[x] - most[x]);
        m[x] = most[x];
        sum[x] = splat(0.f);
    }
    for (int i = 0; i < room; i += KEYS)
        for (int x = 0; x < NV; x++) {
            vf w = weight_of(s[i * NV + x] - m[x]);
#if PAIRS
            w = (vf)((vu)w >> 16 | (vu)weight_of(s[(i + 1) * NV + x] - m[x]));
#endif
            sum[x] = mac(sum[x], w, ones());
            s[i / KEYS * NV + x] = w;
        }
    for (int x = 0; x < NV; x++) l[x] = muladd(l[x], old[x], sum[x]);
    many_values(v, s, old, o, room, width, NV, DT);
}

// Registers hold LANES * 2 vectors: the tiles' accumulators, and what they are made of.
#if LANES == 8
enum { MOST_NV = 2 };
#define TILE(nv) (nv == 1 ? 8 : 6), (nv == 1 ? 8 : 4)
#else
enum { MOST_NV = 4 };
#define TILE(nv) (nv == 1 ? 12 : nv == 2 ? 12 : nv == 3 ? 8 : 6), (nv == 1 ? 16 : nv == 4 ? 4 : 8)
#endif

// A block's keys and values as units to multiply by.
INLINE void many_units(Room *r, const value *keys, const value *values, int n, int width, const unit **k, const unit **v) {
    *k = (const unit *)keys;
    *v = (const unit *)values;
#if PAIRS
    for (int j = 0; j < n; j += 2)
        for (int d = 0; d < width; d += STEP) {
            vf x[2];
            paired(values + j * width + d, values + (j + 1) * width + d, x);
            store(r->v + j / 2 * width + d, x[0]);
            store(r->v + j / 2 * width + d + LANES, x[1]);
        }
    *v = r->v;
#elif !WIDE
    for (int i = 0; i < n * width; i += STEP) {
        vf x[4];
        unpack(keys + i, x);
        unpack(values + i, x + 2);
        store(r->k + i, x[0]);
        store(r->k + i + LANES, x[1]);
        store(r->v + i, x[2]);
        store(r->v + i + LANES, x[3]);
    }
    *k = r->k;
    *v = r->v;
#endif
}

INLINE void many(const Task *t, const int width) {
    ALIGNED Room r;
    const int vectors = (t->rows + LANES - 1) / LANES;
    const int most_keys = block_keys(width);
    int common_from = 0, common_to = INT32_MAX;
    for (int i = 0; i < vectors * LANES; i++) {
        int row = i < t->rows ? i : 0, first, last = seen_by(t, row, &first);
        // Of the tile: its first vector, its vectors, and the row's lane among them.
        int at = i / LANES / MOST_NV * MOST_NV, nv = vectors - at < MOST_NV ? vectors - at : MOST_NV, lane = i - at * LANES;
        const value *query = query_of(t, row, r.query_room);
        float *q = (float *)(r.q + at * (width / UNIT)) + lane;
#if PAIRS
        for (int u = 0; u < width / 2; u++) q[u * nv * LANES] = ((const f32_at *)query)[u];
#else
        for (int d = 0; d < width; d += STEP) {
            vf x[2];
            unpack(query + d, x);
            for (int e = 0; e < STEP; e++) q[(d + e) * nv * LANES] = x[e / LANES][e % LANES];
        }
#endif
        ((int32_t *)r.from)[i] = first;
        ((int32_t *)r.to)[i] = last;
        common_from = first > common_from ? first : common_from;
        common_to = last < common_to ? last : common_to;
    }
    memset(r.all, 0, vectors * LANES * width * sizeof(float));
    for (int i = 0; i < vectors; i++) r.all_m[i] = splat(NEVER), r.all_l[i] = splat(0.f);
    for (int begin = t->low, stop; begin < t->high; begin = stop) {
        stop = end_of(begin, t->high, PART);
        memset(r.o, 0, vectors * LANES * width * sizeof(float));
        for (int i = 0; i < vectors; i++) r.m[i] = splat(NEVER), r.l[i] = splat(0.f);
        for (int low = begin, end; low < stop; low = end) {
            end = end_of(low, stop, most_keys);
            const int n = end - low, room = (n + 23) / 24 * 24;
            const int hides = n < room || low < common_from || end - 1 > common_to;
            const unit *k, *v;
            const value *keys = fetch(&t->store, 1, low, n, room, r.k_room);
            many_units(&r, keys, fetch(&t->store, 0, low, n, room, r.v_room), room, width, &k, &v);
            for (int at = 0; at < vectors; at += MOST_NV) {
                switch (vectors - at < MOST_NV ? vectors - at : MOST_NV) {
                    case 1: many_tile(t, &r, k, v, at, low, n, room, hides, width, 1, TILE(1)); break;
                    case 2: many_tile(t, &r, k, v, at, low, n, room, hides, width, 2, TILE(2)); break;
#if LANES == 16
                    case 3: many_tile(t, &r, k, v, at, low, n, room, hides, width, 3, TILE(3)); break;
                    case 4: many_tile(t, &r, k, v, at, low, n, room, hides, width, 4, TILE(4)); break;
#endif
                }
            }
        }
        for (int i = 0; i < vectors; i++) {
            const int at = i / MOST_NV * MOST_NV, nv = vectors - at < MOST_NV ? vectors - at : MOST_NV;
            vf kept, added, *all = r.all + at * width + i - at, *o = r.o + at * width + i - at;
            join(r.all_m + i, r.all_l + i, r.m[i], r.l[i], &kept, &added);
            for (int d = 0; d < width * nv; d += nv) all[d] = muladd(o[d], added, all[d] * kept);
        }
    }
    for (int i = 0; i < t->rows; i++) {
        int at = i / LANES / MOST_NV * MOST_NV, nv = vectors - at < MOST_NV ? vectors - at : MOST_NV, lane = i - at * LANES;
        finish(t, i, ((float *)r.all_m)[i], ((float *)r.all_l)[i], (float *)(r.all + at * width) + lane, nv * LANES, width);
    }
}

// ---- a team's work ----

// The commonest head sizes are compiled by themselves.
#define BY_WIDTH(call)                                                                                               \
    do {                                                                                                           \
        const int width_ = t->job->plan->width;                                                                    \
        if (width_ == 64) call(64);                                                                                \
        else if (width_ == 128) call(128);                                                                         \
        else call(width_);                                                                                         \
    } while (0)

#define FEW(rows)                                          \
    static __attribute__((noinline)) void few_##rows(const Task *t) { \
        _Pragma("clang diagnostic push");                  \
        BY_WIDTH(FEW_CALL_##rows);                           \
        _Pragma("clang diagnostic pop");                   \
    }
#define FEW_CALL_1(width) few(t, width, 1)
#define FEW_CALL_2(width) few(t, width, 2)
#define FEW_CALL_4(width) few(t, width, 4)
#define FEW_CALL_8(width) few(t, width, 8)
FEW(1)
FEW(2)
FEW(4)
FEW(8)
#define MANY_CALL(width) many(t, width)
static __attribute__((noinline)) void many_rows(const Task *t) { BY_WIDTH(MANY_CALL); }

static Task task_of(const Job *job, int64_t index) {
    const Plan *plan = job->plan;
    int lower = 0, upper = plan->n_spans;  // the last span that begins at or before this task
    while (upper - lower > 1) {
        int middle = (lower + upper) / 2;
        if ((int64_t)plan->spans[middle].before * plan->kv_heads <= index) lower = middle;
        else upper = middle;
    }
    const Span *span = plan->spans + lower;
    const int64_t inside = index - (int64_t)span->before * plan->kv_heads;
    const int part = inside / plan->kv_heads, head = inside % plan->kv_heads, group = plan->heads / plan->kv_heads;
    int low = span->low, high = span->high;
    if (span->slot >= 0) {
        if (part) low = (span->low / PART + part) * PART;
        high = end_of(low, high, PART);
    }
    return (Task){
        .job = job,
        .span = span,
        .store = {plan, plan->pages + span->row * plan->slots, job->k + head * plan->head_stride,
                  job->v + head * plan->head_stride},
        .head = head,
        .low = low,
        .high = high,
        .slot = span->slot < 0 ? -1 : span->slot + part * span->count,
        .rows = span->count * group,
        .group = group,
    };
}

static void run(const Task *t) {
    if (t->rows > FEW_ROWS) many_rows(t);
    else if (t->rows > 4) few_8(t);
    else if (t->rows > 2) few_4(t);
    else if (t->rows == 2) few_2(t);
    else few_1(t);
}

// Joins the parts of one token of a span, for one KV head.
static void merge(const Job *job, const Span *span, int token, int kv_head) {
    const Plan *plan = job->plan;
    const int width = plan->width, group = plan->heads / plan->kv_heads;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        ALIGNED float o[MAX_DIM] = {0};
        vf m = splat(NEVER), l = splat(0.f);
        for (int i = 0; i < span->tasks; i++) {
            const int64_t place = (span->slot + token + (int64_t)i * span->count) * plan->heads + head;
            const float *partial = plan->partial + place * width;
            vf kept, added;
            join(&m, &l, splat(plan->sums[2 * place]), splat(plan->sums[2 * place + 1]), &kept, &added);
            for (int d = 0; d < width; d += LANES) store(o + d, muladd(load(partial + d), added, load(o + d) * kept));
        }
        give(job, span->first + token, head, o, m[0], l[0]);
    }
}

static void work(void *argument) {
    Job *job = argument;
    Task tasks[2];
    int64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (index < job->tasks) tasks[0] = task_of(job, index);
    for (int i = 0; index < job->tasks; i = !i) {
        index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index < job->tasks) tasks[!i] = task_of(job, index);
        tasks[i].then = index < job->tasks ? &tasks[!i] : 0;
        run(&tasks[i]);
    }
}

static void work_on_merges(void *argument) {
    Job *job = argument;
    const Plan *plan = job->plan;
    int64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED), before = 0;
    for (const Span *span = plan->spans; span < plan->spans + plan->n_spans; span++) {
        if (span->slot < 0) continue;
        const int64_t here = (int64_t)span->count * plan->kv_heads;
        for (; index < before + here; index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED))
            merge(job, span, (index - before) / plan->kv_heads, (index - before) % plan->kv_heads);
        before += here;
    }
}

void NAME(const Plan *plan, const void *q, int64_t q_token, int64_t q_head, const void *k, const void *v, void *out,
          const float *sinks, float scale, float softcap, int32_t threads) {
    Job job = {.plan = plan, .q = q, .k = k, .v = v, .out = out, .sinks = sinks, .q_token = q_token, .q_head = q_head};
    job.scale = softcap != 0.f ? scale / softcap : scale * LOG2E;
    job.softcap = softcap * LOG2E;
    int64_t merges = 0;
    for (int i = 0; i < plan->n_spans; i++) {
        job.tasks += (int64_t)plan->spans[i].tasks * plan->kv_heads;
        if (plan->spans[i].slot >= 0) merges += (int64_t)plan->spans[i].count * plan->kv_heads;
    }
    // The whole team or nobody: libgomp ends threads that a smaller team leaves over.
    if (threads > 1 && job.tasks > 1) plan->parallel(work, &job, threads, 0);
    else work(&job);
    job.next = 0;
    if (threads > 1 && merges > 1) plan->parallel(work_on_merges, &job, threads, 0);
    else if (merges) work_on_merges(&job);
}
#endif
