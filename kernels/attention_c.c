// Attention over the paged KV store on the cores of a CPU: the maths of attention.py, for what attention_c.py plans.
//
// For a query row at position p, over the positions j that it may see, p - window < j <= p:
//
//     s_j = scale * q . k_j,  s_j = softcap * tanh(s_j / softcap) with a softcap,    o = sum_j softmax(s)_j v_j
//
// The softmax is taken online: with m the greatest score so far, l = sum_j 2^(s_j - m) and o = sum_j 2^(s_j - m) v_j are
// carried from block to block of keys, times 2^(old m - new m). Scores are in units of log 2 from the product on.
//
// Work. A span is `count` tokens against the positions [low, high) of one page table row, in parts that end at multiples
// of `size`. A task is one part for one KV head; the group's query heads are rows of it, row = token * group + g, so that
// the head is read once for all of them. The threads of a team draw tasks from a counter. A span of several parts leaves
// m, l and o of each, and they are merged when all tasks are done. What a row comes to depends on its own span alone,
// never on how many threads there are or where its pages lie.
//
// Two routines, each over blocks of keys that lie in one stretch of memory, or are copied into one:
//
//     few     up to 8 rows, which wait for memory.  lane = row * LP + key % LP.  K and V are read as they lie.
//     many    more rows, which wait for the multipliers.  lane = row.  Tiles of keys x rows, and of columns x rows, stay in
//             registers; scores lie transposed, so that softmax takes a vector of rows at once.
//
// This file is compiled once for each kind of processor and each dtype of the store:
//
//     LANES   8 or 16: float32 values of a vector
//     PAIRS   bfloat16 is multiplied in pairs, two products added to a float32 lane, else each value as a float32
//     WIDE    the store and the queries are float32, else bfloat16
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

enum { MAX_DIM = 256, MAX_ROWS = 128, FEW_ROWS = 8, FEW_KEYS = 128, MANY_KEYS = 96, BLOCK_VALUES = 8192 };

// Mirrored by attention_c.py.
typedef struct {
    int32_t first, count;    // of its tokens in the batch
    int32_t start;           // position of the first; the next ones follow
    int32_t row, low, high;  // of the page table, and its positions
    int32_t size;            // parts end at its multiples
    int32_t before, parts;   // tasks, over kv_heads, of the spans before this one; its own parts
    int32_t slot;            // partial results: part i of token t at slot + i * count + t; -1: one part, which is the result
} Span;

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use
    const int32_t *pages;  // [rows][slots]: page of every page_size positions
    const Span *spans;
    float *partial;        // [slots of partial results][heads][dim], columns in the order of `unpack`
    float *sums;           // [slots of partial results][heads][2]: m and l
    int64_t slots, page_size, cell_stride, head_stride;  // strides in values
    int32_t n_spans, heads, kv_heads, dim, window;
} Plan;

#if WIDE
typedef float value;
#else
typedef uint16_t value;
#endif

typedef struct {
    const Plan *plan;
    const value *q, *k, *v;
    value *out;  // [tokens][heads][dim]
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

enum { STEP = 2 * LANES, LOADS = PAIRS ? 1 : 2, KEYS = PAIRS ? 2 : 1 };  // KEYS: of one product over positions

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

// 2^x for x <= 0; 2^-126 for less, NaN for NaN. Relative error 1e-4, and 1e-7 where results stay in float32.
INLINE vf exp2_of(vf x) {
    x = larger(splat(-126.f), x);
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
    vf p = muladd(splat(0.055171664f), f, splat(0.24261112f));
    p = muladd(p, f, splat(0.69326099f));
    p = muladd(p, f, splat(0.99992807f));
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

// Lanes of x and y by turns of h: those that stay where they are, and those that come from h lanes away.
#if LANES == 8
#define KEPT(x, y, h) (h == 4 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 12, 13, 14, 15) : \
                       h == 2 ? __builtin_shufflevector(x, y, 0, 1, 10, 11, 4, 5, 14, 15) : \
                                __builtin_shufflevector(x, y, 0, 9, 2, 11, 4, 13, 6, 15))
#define CAME(x, y, h) (h == 4 ? __builtin_shufflevector(x, y, 4, 5, 6, 7, 8, 9, 10, 11) : \
                       h == 2 ? __builtin_shufflevector(x, y, 2, 3, 8, 9, 6, 7, 12, 13) : \
                                __builtin_shufflevector(x, y, 1, 8, 3, 10, 5, 12, 7, 14))
static const vi LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
#define KEPT(x, y, h) (h == 8 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) : \
                       h == 4 ? __builtin_shufflevector(x, y, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) : \
                       h == 2 ? __builtin_shufflevector(x, y, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) : \
                                __builtin_shufflevector(x, y, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31))
#define CAME(x, y, h) (h == 8 ? __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23) : \
                       h == 4 ? __builtin_shufflevector(x, y, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27) : \
                       h == 2 ? __builtin_shufflevector(x, y, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29) : \
                                __builtin_shufflevector(x, y, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30))
static const vi LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// The sums of LANES vectors: lane i of the result is that of a[i]. All are summed in the same order.
INLINE vf sums_of(vf *a) {
#pragma clang loop unroll(full)
    for (int h = LANES / 2; h; h /= 2)
#pragma clang loop unroll(full)
        for (int i = 0; i < h; i++) a[i] = KEPT(a[i], a[i + h], h) + CAME(a[i], a[i + h], h);
    return a[0];
}

// The greatest of every `n` neighbouring lanes, in each of them.
INLINE vf greatest_of(vf x, int n) {
    for (int h = n / 2; h; h /= 2) x = larger(x, CAME(x, x, h));
    return x;
}

INLINE vf sum_of_lanes(vf x, int n) {
    for (int h = n / 2; h; h /= 2) x = x + CAME(x, x, h);
    return x;
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

// 2^score, rounded to bfloat16 where pairs are multiplied, and added to a sum: what is summed is what is multiplied by.
INLINE vf weight_of(vf score, vf *sum) {
    vf w = exp2_of(score);
    if (PAIRS) w = (vf)(((vu)w + 0x8000u) & HIGH);
    *sum += w;
    return w;
}

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

// ---- keys ----

typedef struct {
    const Plan *plan;
    const int32_t *pages;  // of the row
    const value *k, *v;    // of the KV head
} Store;

typedef struct {
    const value *k, *v;  // `room` keys of dim values each, zeros behind the last one
    value *k_room, *v_room;
} Block;

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

// The keys and values of `n` positions, and zeros up to `room` of them: in place where they lie there without a break.
static void fetch(const Store *s, int64_t position, int n, int room, Block *block) {
    const Plan *plan = s->plan;
    const int dim = plan->dim;
    const int64_t stride = plan->cell_stride;
    int64_t cells = unbroken(plan, s->pages, position, n), first = cell_of(plan, s->pages, position);
    block->k = s->k + first * stride;
    block->v = s->v + first * stride;
    if (cells == n && n == room && stride == dim) return;
    for (int done = 0; done < n;) {
        for (int i = 0; i < cells; i++) {
            memcpy(block->k_room + (done + i) * dim, s->k + (first + i) * stride, dim * sizeof(value));
            memcpy(block->v_room + (done + i) * dim, s->v + (first + i) * stride, dim * sizeof(value));
        }
        done += cells;
        if (done < n) {
            cells = unbroken(plan, s->pages, position + done, n - done);
            first = cell_of(plan, s->pages, position + done);
        }
    }
    memset(block->k_room + n * dim, 0, (room - n) * dim * sizeof(value));
    memset(block->v_room + n * dim, 0, (room - n) * dim * sizeof(value));
    block->k = block->k_room;
    block->v = block->v_room;
}

// One part of a span for one KV head.
typedef struct {
    const Job *job;
    const Span *span;
    Store store;
    int head, low, high, slot;  // of the KV heads; the part's positions and first partial result, or -1
    int rows, group;
} Task;

INLINE const value *query_of(const Task *t, int row) {
    const Job *job = t->job;
    int64_t token = t->span->first + row / t->group;
    return job->q + token * job->q_token + (t->head * t->group + row % t->group) * job->q_head;
}

// Positions that a row may see: from `*from` up to what is returned.
INLINE int seen_by(const Task *t, int row, int *from) {
    int position = t->span->start + row / t->group, window = t->job->plan->window;
    *from = window ? position - window + 1 : 0;
    return position;
}

// One row's result: into the output, or as a partial one. `o` has the row's columns `stride` values apart.
INLINE void finish(const Task *t, int row, float m, float l, const float *o, int stride, int dim) {
    const Plan *plan = t->job->plan;
    const int token = row / t->group, head = t->head * t->group + row % t->group;
    ALIGNED float gathered[MAX_DIM];
    if (stride != 1) {
        for (int d = 0; d < dim; d++) gathered[d] = o[d * stride];
        o = gathered;
    }
    if (t->slot < 0) {
        value *out = t->job->out + ((int64_t)(t->span->first + token) * plan->heads + head) * dim;
        const vf inverse = splat(1.f / l);
        for (int d = 0; d < dim; d += STEP) put(out + d, load(o + d) * inverse, load(o + d + LANES) * inverse);
        return;
    }
    const int64_t place = (int64_t)(t->slot + token) * plan->heads + head;
    memcpy(plan->partial + place * dim, o, dim * sizeof(float));
    plan->sums[2 * place] = m;
    plan->sums[2 * place + 1] = l;
}

// ---- few rows: lane = row * LP + key % LP, with ROWS * LP = LANES ----

// Scores of LP keys at a time into s[keys / LP]; returns the greatest of each lane.
INLINE vf few_scores(const value *k, const vf *q, vf *s, int keys, vf scale, int dim, const int ROWS) {
    const int LP = LANES / ROWS, steps = dim / STEP;
    vf most = splat(NEVER);
    for (int key = 0; key < keys; key += LP) {
        vf acc[LANES];
        for (int i = 0; i < LANES; i++) acc[i] = splat(0.f);
        for (int c = 0; c < steps; c++)
            for (int i = 0; i < LP; i++) {
                vf x[2];
                unpack(k + (key + i) * dim + c * STEP, x);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < LOADS; v++)
                        acc[r * LP + i] = mac(acc[r * LP + i], x[v], q[(r * steps + c) * LOADS + v]);
            }
        s[key / LP] = sums_of(acc) * scale;
        most = larger(s[key / LP], most);
    }
    return most;
}

// o[row] = old[row] * o[row] + sum of weight * value, for some rows and COLS steps of columns at a time.
INLINE void few_values(const value *v, const float *weights, const float *old, float *o, int keys, int dim, const int ROWS,
                       const int SOME, const int COLS) {
    const int LP = LANES / ROWS;
    for (int row = 0; row < ROWS; row += SOME)
        for (int d = 0; d < dim; d += COLS * STEP) {
            vf acc[2 * LANES];
            for (int r = 0; r < SOME; r++)
                for (int c = 0; c < 2 * COLS; c++)
                    acc[r * 2 * COLS + c] = load(o + (row + r) * dim + d + c * LANES) * old[(row + r) * LP];
            for (int key = 0; key < keys; key += KEYS)
                for (int c = 0; c < COLS; c++) {
                    vf x[2];
#if PAIRS
                    paired(v + key * dim + d + c * STEP, v + (key + 1) * dim + d + c * STEP, x);
#else
                    unpack(v + key * dim + d + c * STEP, x);
#endif
                    for (int r = 0; r < SOME; r++) {
                        // A lane is a weight of KEYS keys.
                        int at = (key / LP * LANES + (row + r) * LP + key % LP) / KEYS;
                        vf w = splat(((const f32_at *)weights)[at]);
                        acc[(r * COLS + c) * 2] = mac(acc[(r * COLS + c) * 2], w, x[0]);
                        acc[(r * COLS + c) * 2 + 1] = mac(acc[(r * COLS + c) * 2 + 1], w, x[1]);
                    }
                }
            for (int r = 0; r < SOME; r++)
                for (int c = 0; c < 2 * COLS; c++) store(o + (row + r) * dim + d + c * LANES, acc[r * 2 * COLS + c]);
        }
}

INLINE void few(const Task *t, const int dim, const int ROWS) {
    const int LP = LANES / ROWS, steps = dim / STEP;
    const int most_keys = dim <= 64 ? FEW_KEYS : dim <= 128 ? 64 : 32;
    const Job *job = t->job;
    ALIGNED vf q[FEW_ROWS * MAX_DIM / STEP * LOADS];
    ALIGNED vf s[FEW_KEYS * FEW_ROWS / LANES];
    ALIGNED float o[FEW_ROWS * MAX_DIM], old[LANES];
    ALIGNED value k_room[BLOCK_VALUES], v_room[BLOCK_VALUES];
    Block block = {0, 0, k_room, v_room};
    vi from, to;
    int common_from = 0, common_to = INT32_MAX;  // seen by every row
    for (int r = 0; r < ROWS; r++) {
        int row = r < t->rows ? r : 0, first, last = seen_by(t, row, &first);
        const value *query = query_of(t, row);
        for (int c = 0; c < steps; c++) unpack(query + c * STEP, q + (r * steps + c) * LOADS);
        for (int i = 0; i < LP; i++) from[r * LP + i] = first, to[r * LP + i] = last;
        common_from = first > common_from ? first : common_from;
        common_to = last < common_to ? last : common_to;
    }
    memset(o, 0, ROWS * dim * sizeof(float));
    vf m = splat(NEVER), l = splat(0.f);
    const vf scale = splat(job->scale);
    for (int low = t->low; low < t->high; low += most_keys) {
        const int n = t->high - low < most_keys ? t->high - low : most_keys, room = (n + STEP - 1) / STEP * STEP;
        fetch(&t->store, low, n, room, &block);
        vf most = few_scores(block.k, q, s, room, scale, dim, ROWS);
        const int hides = n < room || low < common_from || low + n - 1 > common_to;
        if (hides || job->softcap != 0.f) {
            most = splat(NEVER);
            for (int i = 0; i < room / LP; i++) {
                if (job->softcap != 0.f) s[i] = tanh_of(s[i]) * job->softcap;
                vi key = LANE % LP + i * LP, position = key + low;
                s[i] = either((key >= n) | (position < from) | (position > to), splat(NEVER), s[i]);
                most = larger(s[i], most);
            }
        }
        most = larger(greatest_of(most, LP), m);
        vf scaled = exp2_of(m - most);
        store(old, scaled);
        m = most;
        l *= scaled;
        for (int i = 0; i < room / LP; i += KEYS) {
            vf w = weight_of(s[i] - m, &l);
#if PAIRS
            s[i / 2] = halves(w, weight_of(s[i + 1] - m, &l));
#else
            s[i] = w;
#endif
        }
        const float *weights = (const float *)s;
        // As many accumulators as the registers hold beside what they are made of.
        if (ROWS == 1 && dim % (4 * STEP) == 0) few_values(block.v, weights, old, o, room, dim, ROWS, 1, 4);
        else if (ROWS <= 2 && dim % (2 * STEP) == 0) few_values(block.v, weights, old, o, room, dim, ROWS, ROWS, 2);
        else if (LANES == 16 && ROWS == 4 && dim % (2 * STEP) == 0) few_values(block.v, weights, old, o, room, dim, ROWS, 4, 2);
        else few_values(block.v, weights, old, o, room, dim, ROWS, LANES == 8 && ROWS == 8 ? 4 : ROWS, 1);
    }
    ALIGNED float ms[LANES], ls[LANES];
    store(ms, m);
    store(ls, sum_of_lanes(l, LP));
    for (int r = 0; r < t->rows; r++) finish(t, r, ms[r * LP], ls[r * LP], o + r * dim, 1, dim);
}

// ---- many rows: lane = row; a tile is NV vectors of them ----

// Products are of units, which are floats, or pairs of values where PAIRS.
enum { UNIT = PAIRS ? 2 : 1, WORD = 4 };
typedef f32_at unit;

// s[key][NV] of KT keys at a time; raises `most` [NV] to the greatest.
INLINE void many_scores(const unit *k, const vf *q, vf *s, vf *most, int keys, vf scale, int units, const int NV, const int KT) {
    for (int key = 0; key < keys; key += KT) {
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
INLINE void many_values(const unit *values, const vf *weights, const vf *old, vf *o, int keys, int dim, const int NV,
                        const int DT) {
    for (int d = 0; d < dim; d += DT) {
        vf acc[2 * LANES];
        for (int i = 0; i < DT; i++)
            for (int v = 0; v < NV; v++) acc[i * NV + v] = o[(d + i) * NV + v] * old[v];
        for (int j = 0; j < keys / KEYS; j++)
            for (int i = 0; i < DT; i++) {
                vf x = splat(values[j * dim + d + i]);
                for (int v = 0; v < NV; v++) acc[i * NV + v] = mac(acc[i * NV + v], weights[j * NV + v], x);
            }
        for (int i = 0; i < DT * NV; i++) o[d * NV + i] = acc[i];
    }
}

typedef struct {
    vf q[MAX_DIM / UNIT * MAX_ROWS / LANES];  // tile by tile [unit][NV]
    vf o[MAX_DIM * MAX_ROWS / LANES];         // tile by tile [column][NV]
    vf s[MANY_KEYS * 4], m[MAX_ROWS / LANES], l[MAX_ROWS / LANES];
    vi from[MAX_ROWS / LANES], to[MAX_ROWS / LANES];
    float k[BLOCK_VALUES], v[BLOCK_VALUES];  // a block's units
    value k_room[BLOCK_VALUES], v_room[BLOCK_VALUES];
} Room;

// A tile, which begins with vector `at`, against a block of `room` keys, of which `n` are real.
INLINE void many_tile(const Task *t, Room *r, const unit *k, const unit *v, int at, int low, int n, int room, int hides,
                      const int dim, const int NV, const int KT, const int DT) {
    const Job *job = t->job;
    const vf *q = r->q + at * (dim / UNIT);
    vf *o = r->o + at * dim, *s = r->s, *m = r->m + at, *l = r->l + at, most[4], old[4];
    for (int x = 0; x < NV; x++) most[x] = m[x];
    many_scores(k, q, s, most, room, splat(job->scale), dim / UNIT, NV, KT);
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
        l[x] *= old[x];
    }
    for (int i = 0; i < room; i += KEYS)
        for (int x = 0; x < NV; x++) {
            vf w = weight_of(s[i * NV + x] - m[x], l + x);
#if PAIRS
            s[i / 2 * NV + x] = (vf)((vu)w >> 16 | (vu)weight_of(s[(i + 1) * NV + x] - m[x], l + x));
#else
            s[i * NV + x] = w;
#endif
        }
    many_values(v, s, old, o, room, dim, NV, DT);
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
INLINE void many_units(Room *r, const Block *block, int keys, int dim, const unit **k, const unit **v) {
    *k = (const unit *)block->k;
    *v = (const unit *)block->v;
#if PAIRS
    for (int j = 0; j < keys; j += 2)
        for (int d = 0; d < dim; d += STEP) {
            vf x[2];
            paired(block->v + j * dim + d, block->v + (j + 1) * dim + d, x);
            store(r->v + j / 2 * dim + d, x[0]);
            store(r->v + j / 2 * dim + d + LANES, x[1]);
        }
    *v = r->v;
#elif !WIDE
    for (int i = 0; i < keys * dim; i += STEP) {
        vf x[4];
        unpack(block->k + i, x);
        unpack(block->v + i, x + 2);
        store(r->k + i, x[0]);
        store(r->k + i + LANES, x[1]);
        store(r->v + i, x[2]);
        store(r->v + i + LANES, x[3]);
    }
    *k = r->k;
    *v = r->v;
#endif
}

INLINE void many(const Task *t, const int dim) {
    ALIGNED Room r;
    const int vectors = (t->rows + LANES - 1) / LANES;
    const int most_keys = dim <= 80 ? MANY_KEYS : dim <= 128 ? 48 : 24;
    Block block = {0, 0, r.k_room, r.v_room};
    int common_from = 0, common_to = INT32_MAX;
    for (int i = 0; i < vectors * LANES; i++) {
        int row = i < t->rows ? i : 0, first, last = seen_by(t, row, &first);
        // Of the tile: its first vector, its vectors, and the row's lane among them.
        int at = i / LANES / MOST_NV * MOST_NV, nv = vectors - at < MOST_NV ? vectors - at : MOST_NV, lane = i - at * LANES;
        const value *query = query_of(t, row);
        float *q = (float *)(r.q + at * (dim / UNIT)) + lane;
#if PAIRS
        for (int u = 0; u < dim / 2; u++) q[u * nv * LANES] = ((const f32_at *)query)[u];
#else
        for (int d = 0; d < dim; d += STEP) {
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
    memset(r.o, 0, vectors * LANES * dim * sizeof(float));
    for (int i = 0; i < vectors; i++) r.m[i] = splat(NEVER), r.l[i] = splat(0.f);
    for (int low = t->low; low < t->high; low += most_keys) {
        const int n = t->high - low < most_keys ? t->high - low : most_keys, room = (n + 23) / 24 * 24;
        const int hides = n < room || low < common_from || low + n - 1 > common_to;
        const unit *k, *v;
        fetch(&t->store, low, n, room, &block);
        many_units(&r, &block, room, dim, &k, &v);
        for (int at = 0; at < vectors; at += MOST_NV) {
            switch (vectors - at < MOST_NV ? vectors - at : MOST_NV) {
                case 1: many_tile(t, &r, k, v, at, low, n, room, hides, dim, 1, TILE(1)); break;
                case 2: many_tile(t, &r, k, v, at, low, n, room, hides, dim, 2, TILE(2)); break;
#if LANES == 16
                case 3: many_tile(t, &r, k, v, at, low, n, room, hides, dim, 3, TILE(3)); break;
                case 4: many_tile(t, &r, k, v, at, low, n, room, hides, dim, 4, TILE(4)); break;
#endif
            }
        }
    }
    for (int i = 0; i < t->rows; i++) {
        int at = i / LANES / MOST_NV * MOST_NV, nv = vectors - at < MOST_NV ? vectors - at : MOST_NV, lane = i - at * LANES;
        finish(t, i, ((float *)r.m)[i], ((float *)r.l)[i], (float *)(r.o + at * dim) + lane, nv * LANES, dim);
    }
}

// ---- a team's work ----

// The commonest head sizes are compiled by themselves.
#define BY_DIM(call)                                                                                               \
    do {                                                                                                           \
        const int dim_ = t->job->plan->dim;                                                                        \
        if (dim_ == 64) call(64);                                                                                  \
        else if (dim_ == 128) call(128);                                                                           \
        else call(dim_);                                                                                           \
    } while (0)

#define FEW(rows)                                          \
    static __attribute__((noinline)) void few_##rows(const Task *t) { \
        _Pragma("clang diagnostic push");                  \
        BY_DIM(FEW_CALL_##rows);                           \
        _Pragma("clang diagnostic pop");                   \
    }
#define FEW_CALL_1(dim) few(t, dim, 1)
#define FEW_CALL_2(dim) few(t, dim, 2)
#define FEW_CALL_4(dim) few(t, dim, 4)
#define FEW_CALL_8(dim) few(t, dim, 8)
FEW(1)
FEW(2)
FEW(4)
FEW(8)
#define MANY_CALL(dim) many(t, dim)
static __attribute__((noinline)) void many_rows(const Task *t) { BY_DIM(MANY_CALL); }

static void run(const Job *job, int64_t index) {
    const Plan *plan = job->plan;
    int lower = 0, upper = plan->n_spans;  // the last span that begins at or before this task
    while (upper - lower > 1) {
        int middle = (lower + upper) / 2;
        if ((int64_t)plan->spans[middle].before * plan->kv_heads <= index) lower = middle;
        else upper = middle;
    }
    const Span *span = plan->spans + lower;
    const int64_t inside = index - (int64_t)span->before * plan->kv_heads;
    const int part = inside / plan->kv_heads, head = inside % plan->kv_heads;
    const int edge = (span->low / span->size + part) * span->size, group = plan->heads / plan->kv_heads;
    Task t = {
        .job = job,
        .span = span,
        .store = {plan, plan->pages + span->row * plan->slots, job->k + head * plan->head_stride,
                  job->v + head * plan->head_stride},
        .head = head,
        .low = edge > span->low ? edge : span->low,
        .high = edge + span->size < span->high ? edge + span->size : span->high,
        .slot = span->slot < 0 ? -1 : span->slot + part * span->count,
        .rows = span->count * group,
        .group = group,
    };
    if (t.rows > FEW_ROWS) many_rows(&t);
    else if (t.rows > 4) few_8(&t);
    else if (t.rows > 2) few_4(&t);
    else if (t.rows == 2) few_2(&t);
    else few_1(&t);
}

// Puts the partial results of one token of a span together, for one KV head.
static void merge(const Job *job, const Span *span, int token, int kv_head) {
    const Plan *plan = job->plan;
    const int dim = plan->dim, group = plan->heads / plan->kv_heads;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        ALIGNED float o[MAX_DIM] = {0};
        float most = NEVER, l = 0.f;
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < span->parts; i++) {
                const int64_t place = (span->slot + token + (int64_t)i * span->count) * plan->heads + head;
                const float m = plan->sums[2 * place];
                if (!pass) {
                    most = m > most || m != m ? m : most;
                    continue;
                }
                const vf weight = exp2_of(splat(m - most));
                l += weight[0] * plan->sums[2 * place + 1];
                for (int d = 0; d < dim; d += LANES) store(o + d, muladd(load(plan->partial + place * dim + d), weight, load(o + d)));
            }
        value *out = job->out + ((int64_t)(span->first + token) * plan->heads + head) * dim;
        const vf inverse = splat(1.f / l);
        for (int d = 0; d < dim; d += STEP) put(out + d, load(o + d) * inverse, load(o + d + LANES) * inverse);
    }
}

static void work(void *argument) {
    Job *job = argument;
    for (;;) {
        int64_t index = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (index >= job->tasks) return;
        run(job, index);
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
          float scale, float softcap, int32_t threads) {
    const float log2e = 1.44269504f;
    Job job = {.plan = plan, .q = q, .k = k, .v = v, .out = out, .q_token = q_token, .q_head = q_head};
    job.scale = softcap != 0.f ? scale / softcap : scale * log2e;
    job.softcap = softcap * log2e;
    int64_t merges = 0;
    for (int i = 0; i < plan->n_spans; i++) {
        job.tasks += (int64_t)plan->spans[i].parts * plan->kv_heads;
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
