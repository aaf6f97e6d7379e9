// Gated DeltaNet over states in slots, on the cores of a CPU: the maths of linear_state.py.
//
// The recurrence is computed token by token. A head's columns of S [k, v] do not depend on each other, so a tile of COLUMNS
// columns stays in the first level of cache while all tokens pass over it. One sweep over the tile's rows serves a token
// and the one after it:
//
//     S_i <- decay S_i + k_i delta        o += q_i S_i        p += k'_i S_i        row i; k' is the next token's key
//
// With p the next token's delta' = beta' (v' - decay' p) is known, and its own sweep follows. That is four vector
// operations for each vector of S. The chunked form of the literature takes three and a share that grows with its chunk,
// and rounds differently at each border of a chunk.
//
// Order. Each sum over keys is taken from the first row to the last, and a state between two calls is float32, as it is
// inside. So a token comes to the same bits however a prompt is cut, as a draft or not, beside any other sequences, and
// with any number of threads.
//
// Work. A task is some columns of one head of one sequence. The threads of a team draw tasks from a counter. The
// convolution and the norms of queries and keys are computed BLOCK tokens at a time by each task that needs them. A task
// reads and writes only its own columns of states. The inputs that slots keep are written by the thread that ends the last
// task of a sequence, because all of them read them.
//
// A single token waits for memory: while a tile is computed, the next one is asked for.
//
// This file is compiled once for each kind of processor and each dtype:
//
//     LANES     8 or 16: float32 values of a vector
//     WIDE      mixed, out and the inputs in slots are float32, else bfloat16
//     NAME      of the function

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t linear_state_source = SOURCE;
#else

enum { MAX_KEY = 256, MAX_COLUMNS = 128, MAX_TAPS = 8 };  // mirrored by linear_state.py
enum { BLOCK = 32, COLUMNS = 32, MOST = COLUMNS / LANES };  // tokens; columns of a tile, and its vectors

#if WIDE
typedef float value;
#else
typedef uint16_t value;
#endif

typedef void parallel(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use

// Mirrored by linear_state.py.
typedef struct {
    parallel *team;
    // The slots of the layer, and the values from one slot to the next.
    float *recurrent, *gates;
    value *conv, *window;
    int64_t recurrent_slot, gates_slot, conv_slot, window_slot;
    int64_t slots, drafts;  // drafts of a window at most
    int64_t key_heads, heads, key_dim, value_dim, kernel, channels;
    const float *taps, *a_log, *dt_bias;  // taps [kernel][channels]
    // StateBatch
    const int32_t *starts, *source, *target, *applied, *held, *marks;
    int64_t sequences, n_marks;
    const value *mixed;
    const float *a, *b;
    int64_t tokens, mixed_row, a_row, b_row;  // rows in values
    value *out;                               // [tokens][heads][value_dim]
    int32_t *left;                            // [sequences]: room for the tasks that are left of each
    int64_t threads, wrong;                   // set where the batch does not fit
    // Of the work
    int64_t parts, columns, next;  // tasks of a head, columns of each
} Call;

// ---- vectors ----

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define LOG2E 1.44269504f
#define LN2 0.693147181f

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf load(const float *p) { return *(const vf_at *)p; }
INLINE void store(float *p, vf x) { *(vf_at *)p = x; }
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf muladd(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }

INLINE vf get(const value *p) {
#if WIDE
    return *(const vf_at *)p;
#else
    return (vf)(__builtin_convertvector(*(const vh_at *)p, vu) << 16);
#endif
}

INLINE void put(value *p, vf x) {
#if WIDE
    *(vf_at *)p = x;
#else
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    vi real = x == x;
    bits = (bits & (vu)real) | (~(vu)real & 0x7fc0);
    *(vh_at *)p = __builtin_convertvector(bits, vh);
#endif
}

// e^x for x <= 0, to a relative error of 1e-7 above -87; 0 below; NaN for NaN.
INLINE vf exp_of(vf x) {
    const vf y = either(x < -87.f, splat(-87.f), x);
    const vf shifted = muladd(y, splat(LOG2E), splat(12583039.f));  // 1.5 * 2^23 + 127: the exponent in the last bits
    const vf n = shifted - 12583039.f;
    const vf f = muladd(n, splat(-1.42860677e-6f), muladd(n, splat(-0.693145752f), y));  // ln 2 in two parts
    vf p = muladd(splat(1.98756965e-4f), f, splat(1.39819994e-3f));
    p = muladd(p, f, splat(8.33345205e-3f));
    p = muladd(p, f, splat(4.16657962e-2f));
    p = muladd(p, f, splat(1.66666657e-1f));
    p = muladd(p, f, splat(0.5f));
    p = muladd(p * f, f, f) + 1.f;
    return either(x < -87.f, splat(0.f), p * (vf)((vi)shifted << 23));
}

INLINE vf size_of(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf sigmoid(vf x) {
    const vf e = exp_of(-size_of(x));
    return either(x < 0.f, e, splat(1.f)) / (e + 1.f);
}

// log(1 + e^x) = max(x, 0) + 2 artanh(e / (2 + e)), e = e^-|x|.
INLINE vf softplus(vf x) {
    const vf e = exp_of(-size_of(x)), s = e / (e + 2.f), y = s * s;
    vf p = muladd(splat(2.f / 15), y, splat(2.f / 13));
    p = muladd(p, y, splat(2.f / 11));
    p = muladd(p, y, splat(2.f / 9));
    p = muladd(p, y, splat(2.f / 7));
    p = muladd(p, y, splat(2.f / 5));
    p = muladd(p, y, splat(2.f / 3));
    p = muladd(p, y, splat(2.f));
    return muladd(p, s, either(x < 0.f, splat(0.f), x));
}

// ---- a sequence ----

typedef struct {
    int64_t number, first;             // of its tokens in the batch
    int64_t applied, kept, all;        // tokens: drafts of before, those that its state keeps, all that pass
    int64_t source, target;
    const int32_t *marks, *marks_end;
} Sequence;

INLINE Sequence sequence_of(const Call *call, int64_t number) {
    const int32_t *mark = call->marks, *end = mark + 3 * call->n_marks;
    while (mark < end && mark[0] < number) mark += 3;
    const int32_t *after = mark;
    while (after < end && after[0] == number) after += 3;
    const int64_t first = call->starts[number], applied = call->applied[number];
    const int64_t all = applied + call->starts[number + 1] - first;
    return (Sequence){number, first, applied, all - call->held[number], all, call->source[number], call->target[number],
                      mark, after};
}

// The convolution's input `row`; the first token's own one is row kernel - 1. Null: zeros.
INLINE const value *input_of(const Call *call, const Sequence *s, int64_t row) {
    const int64_t before = call->kernel - 1;
    if (row < before) return s->source < 0 ? 0 : call->conv + s->source * call->conv_slot + row * call->channels;
    row -= before;
    if (row < s->applied) return call->window + s->source * call->window_slot + row * call->channels;
    return call->mixed + (s->first + row - s->applied) * call->mixed_row;
}

// The inputs before token n to a slot, the oldest first. Where the slot is the source, no row is read after it was written.
static void keep_inputs(const Call *call, const Sequence *s, int64_t n, int64_t slot) {
    for (int64_t i = 0; i < call->kernel - 1; i++) {
        const value *from = input_of(call, s, n + i);
        value *to = call->conv + slot * call->conv_slot + i * call->channels;
        if (!from) memset(to, 0, call->channels * sizeof(value));
        else if (from != to) memcpy(to, from, call->channels * sizeof(value));
    }
}

// What slots keep beside S, once all have read it.
static void keep(const Call *call, const Sequence *s) {
    for (const int32_t *mark = s->marks; mark < s->marks_end; mark += 3) keep_inputs(call, s, s->applied + mark[1], mark[2]);
    keep_inputs(call, s, s->kept, s->target);
    const int64_t held = s->all - s->kept;
    for (int64_t i = 0; i < held; i++) {
        const int64_t token = s->first + s->kept - s->applied + i;
        memcpy(call->window + s->target * call->window_slot + i * call->channels, call->mixed + token * call->mixed_row,
               call->channels * sizeof(value));
        float *gates = call->gates + s->target * call->gates_slot + i * 2 * call->heads;
        memcpy(gates, call->a + token * call->a_row, call->heads * sizeof(float));
        memcpy(gates + call->heads, call->b + token * call->b_row, call->heads * sizeof(float));
    }
}

// ---- queries, keys, values and gates of a block of tokens ----

// y [n][count] = silu of the convolution of `count` channels from `channel` on.
INLINE void convolve(const Call *call, const value *const *rows, int64_t channel, int64_t count, int64_t n, float *y,
                     const int kernel) {
    for (int64_t c = 0; c < count; c += LANES) {
        vf taps[MAX_TAPS], x[MAX_TAPS];
        for (int j = 0; j < kernel; j++) taps[j] = load(call->taps + j * call->channels + channel + c);
        for (int j = 0; j < kernel - 1; j++) x[j] = rows[j] ? get(rows[j] + channel + c) : splat(0.f);
        for (int64_t t = 0; t < n; t++) {
            const value *row = rows[t + kernel - 1];
            x[kernel - 1] = row ? get(row + channel + c) : splat(0.f);
            vf sum = x[0] * taps[0];
            for (int j = 1; j < kernel; j++) sum = muladd(x[j], taps[j], sum);
            store(y + t * count + c, sum * sigmoid(sum));
            for (int j = 0; j < kernel - 1; j++) x[j] = x[j + 1];
        }
    }
}

INLINE void inputs(const Call *call, const value *const *rows, int64_t channel, int64_t count, int64_t n, float *y) {
    if (call->kernel == 4) convolve(call, rows, channel, count, n, y, 4);
    else convolve(call, rows, channel, count, n, y, (int)call->kernel);
}

// Each row of x [n][dim] over its length, times `scale`.
INLINE void normalize(float *x, int64_t n, int64_t dim, float scale) {
    for (int64_t t = 0; t < n; t++, x += dim) {
        vf sum = {0};
        for (int64_t d = 0; d < dim; d += LANES) sum = muladd(load(x + d), load(x + d), sum);
        float total = 1e-6f;
        for (int i = 0; i < LANES; i++) total += sum[i];
        const vf factor = splat(scale / __builtin_sqrtf(total));
        for (int64_t d = 0; d < dim; d += LANES) store(x + d, load(x + d) * factor);
    }
}

typedef struct {
    ALIGNED float q[BLOCK * MAX_KEY], k[BLOCK * MAX_KEY];  // [tokens][key_dim]
    float v[BLOCK * MAX_COLUMNS];                           // [tokens][columns]
    float decay[BLOCK], beta[BLOCK];
    float state[MAX_KEY * MAX_COLUMNS];  // tile after tile [key_dim][its columns]
} Room;

// Of head `head`'s columns from `column` on, for n tokens from `token` on.
static void prepare(const Call *call, const Sequence *s, int64_t head, int64_t column, int64_t token, int64_t n, Room *room) {
    const value *rows[BLOCK + MAX_TAPS];
    for (int64_t i = 0; i < n + call->kernel - 1; i++) rows[i] = input_of(call, s, token + i);
    const int64_t dim = call->key_dim, keys = call->key_heads * dim, key_head = head / (call->heads / call->key_heads);
    inputs(call, rows, key_head * dim, dim, n, room->q);
    inputs(call, rows, keys + key_head * dim, dim, n, room->k);
    inputs(call, rows, 2 * keys + head * call->value_dim + column, call->columns, n, room->v);
    normalize(room->q, n, dim, 1.f / __builtin_sqrtf((float)dim));
    normalize(room->k, n, dim, 1.f);
    for (int64_t t = 0; t < n; t++) {
        const int64_t at = token + t, own = s->first + at - s->applied;
        const float *gates = call->gates + s->source * call->gates_slot + at * 2 * call->heads;
        room->decay[t] = at < s->applied ? gates[head] : call->a[own * call->a_row + head];
        room->beta[t] = at < s->applied ? gates[call->heads + head] : call->b[own * call->b_row + head];
    }
    const float bias = call->dt_bias[head];
    const vf a_log = splat(call->a_log[head]), e = exp_of(-size_of(a_log)), rate = either(a_log < 0.f, e, 1.f / e);
    for (int64_t t = 0; t < n; t += LANES) {
        store(room->beta + t, sigmoid(load(room->beta + t)));
        store(room->decay + t, exp_of(softplus(load(room->decay + t) + bias) * -rate));
    }
}

// ---- tiles ----

// Lines of the tile that comes next: those of row i are asked for while row i of this one is computed.
typedef struct {
    const char *at;
    int64_t row;
} Ahead;

INLINE void ask(const Ahead *ahead, int64_t i) {
    if (ahead->at) {
        __builtin_prefetch(ahead->at + i * ahead->row, 0, 2);
        __builtin_prefetch(ahead->at + i * ahead->row + 64, 0, 2);
    }
}

// p = S^T k, for NV vectors of columns.
INLINE void project(const float *s, int64_t s_row, int64_t rows, const float *k, const Ahead *ahead, vf *p, const int NV) {
    vf sum[MOST];
    for (int v = 0; v < NV; v++) sum[v] = splat(0.f);
    for (int64_t i = 0; i < rows; i++) {
        ask(ahead, i);
        for (int v = 0; v < NV; v++) sum[v] = muladd(load(s + i * s_row + v * LANES), splat(k[i]), sum[v]);
    }
    for (int v = 0; v < NV; v++) p[v] = sum[v];
}

// S' = decay S + k delta^T, o = S'^T q and, where there is a next key, p = S'^T next. S' may be where S is.
INLINE void sweep(const float *s, int64_t s_row, float *to, int64_t to_row, int64_t rows, const float *k, const float *q,
                  const float *next, float decay, const vf *delta, vf *o, vf *p, const int NV, const int NEXT) {
    vf out[MOST], sum[MOST];
    for (int v = 0; v < NV; v++) out[v] = sum[v] = splat(0.f);
    for (int64_t i = 0; i < rows; i++)
        for (int v = 0; v < NV; v++) {
            const vf x = muladd(delta[v], splat(k[i]), load(s + i * s_row + v * LANES) * splat(decay));
            store(to + i * to_row + v * LANES, x);
            out[v] = muladd(x, splat(q[i]), out[v]);
            if (NEXT) sum[v] = muladd(x, splat(next[i]), sum[v]);
        }
    for (int v = 0; v < NV; v++) o[v] = out[v], p[v] = sum[v];
}

static void copy(float *to, int64_t to_row, const float *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, columns * sizeof(float));
}

// n tokens from `token` on over a tile of NV vectors: column `column` of the head, `at` of the task.
INLINE void pass(const Call *call, const Sequence *s, int64_t head, int64_t column, int64_t at, int64_t token, int64_t n,
                 Room *room, Ahead ahead, const int NV) {
    const int64_t dim = call->key_dim, row = call->value_dim, head_at = head * dim * row + column;
    float *own = room->state + at * dim, *target = call->recurrent + s->target * call->recurrent_slot + head_at;
    const float *from = own;
    int64_t from_row = NV * LANES;
    if (token && token == s->kept) from = target, from_row = row;
    else if (!token && s->source >= 0) from = call->recurrent + s->source * call->recurrent_slot + head_at, from_row = row;
    else if (!token) memset(own, 0, dim * NV * LANES * sizeof(float));
    if (!token && !s->kept && from != target) copy(target, row, from, from_row, dim, NV * LANES);
    const int32_t *mark = s->marks;
    vf p[MOST], o[MOST], delta[MOST];
    if (n) project(from, from_row, dim, room->k, &ahead, p, NV);
    for (int64_t t = 0; t < n; t++) {
        const float *k = room->k + t * dim, *q = room->q + t * dim, decay = room->decay[t], beta = room->beta[t];
        for (int v = 0; v < NV; v++) {
            const vf x = load(room->v + t * call->columns + at + v * LANES);
            delta[v] = (x - p[v] * decay) * beta;
        }
        const int64_t done = token + t + 1;
        float *to = done == s->kept ? target : own;
        const int64_t to_row = done == s->kept ? row : NV * LANES;
        if (t + 1 < n) sweep(from, from_row, to, to_row, dim, k, q, k + dim, decay, delta, o, p, NV, 1);
        else sweep(from, from_row, to, to_row, dim, k, q, 0, decay, delta, o, p, NV, 0);
        from = to, from_row = to_row;
        for (; mark < s->marks_end && s->applied + mark[1] <= done; mark += 3)
            if (s->applied + mark[1] == done)
                copy(call->recurrent + mark[2] * call->recurrent_slot + head_at, row, from, from_row, dim, NV * LANES);
        if (done <= s->applied) continue;
        value *out = call->out + ((s->first + done - 1 - s->applied) * call->heads + head) * row + column;
        for (int v = 0; v < NV; v++) put(out + v * LANES, o[v]);
    }
}

// ---- tasks ----

// Where the first tile of a task is read.
INLINE Ahead first_tile(const Call *call, int64_t task) {
    const int64_t part = task % call->parts, head = task / call->parts % call->heads;
    const int64_t number = task / call->parts / call->heads;
    if (number >= call->sequences || call->source[number] < 0) return (Ahead){0, 0};
    const float *at = call->recurrent + call->source[number] * call->recurrent_slot;
    at += head * call->key_dim * call->value_dim + part * call->columns;
    return (Ahead){(const char *)at, call->value_dim * (int64_t)sizeof(float)};
}

static void run(const Call *call, int64_t task, int64_t then) {
    const int64_t part = task % call->parts, head = task / call->parts % call->heads;
    const Sequence s = sequence_of(call, task / call->parts / call->heads);
    const int64_t column = part * call->columns;
    Room room;
    int64_t token = 0;
    do {
        const int64_t n = s.all - token < BLOCK ? s.all - token : BLOCK;
        prepare(call, &s, head, column, token, n, &room);
        for (int64_t at = 0, width; at < call->columns; at += width) {
            Ahead ahead = {0, 0};
            width = call->columns - at < COLUMNS ? LANES : COLUMNS;
            if (token + n == s.all && at + width == call->columns) ahead = first_tile(call, then);
            else if (!token && at + width < call->columns && s.source >= 0) {
                ahead = first_tile(call, task);
                ahead.at += (at + width) * sizeof(float);
            }
            if (width == LANES) pass(call, &s, head, column + at, at, token, n, &room, ahead, 1);
            else pass(call, &s, head, column + at, at, token, n, &room, ahead, MOST);
        }
        token += n;
    } while (token < s.all);
    if (__atomic_sub_fetch(call->left + s.number, 1, __ATOMIC_ACQ_REL) == 0) keep(call, &s);
}

static void work(void *argument) {
    Call *call = argument;
    const int64_t tasks = call->sequences * call->heads * call->parts;
    int64_t task = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
    while (task < tasks) {
        const int64_t then = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        run(call, task, then);
        task = then;
    }
}

// Whether all numbers of the batch lead to tokens and slots that exist.
static int fits(const Call *call) {
    const int32_t *mark = call->marks, *end = mark + 3 * call->n_marks;
    if (call->starts[0] || call->starts[call->sequences] != call->tokens) return 0;
    for (int64_t i = 0; i < call->sequences; i++) {
        const int64_t own = call->starts[i + 1] - (int64_t)call->starts[i], held = call->held[i], applied = call->applied[i];
        if (own < 0 || held < 0 || held > own || held > call->drafts || applied < 0 || applied > call->drafts) return 0;
        if (call->source[i] < -1 || call->source[i] >= call->slots || (call->source[i] < 0 && applied)) return 0;
        if (call->target[i] < 0 || call->target[i] >= call->slots) return 0;
        for (int64_t last = 0; mark < end && mark[0] == i; mark += 3) {
            if (mark[1] <= 0 || mark[1] < last || mark[1] > own - held || mark[2] < 0 || mark[2] >= call->slots) return 0;
            last = mark[1];
        }
    }
    return mark == end;
}

void NAME(Call *call) {
    call->wrong = !fits(call);
    if (call->wrong) return;
    // A head is cut where there are too few of them for all threads.
    enum { ENOUGH = 4 };
    call->parts = (call->value_dim + MAX_COLUMNS - 1) / MAX_COLUMNS;
    while (call->value_dim % (call->parts * LANES)) call->parts++;
    while (call->sequences * call->heads * call->parts < ENOUGH * call->threads) {
        if (call->value_dim % (2 * call->parts * COLUMNS)) break;
        call->parts *= 2;
    }
    call->columns = call->value_dim / call->parts;
    call->next = 0;
    for (int64_t i = 0; i < call->sequences; i++) call->left[i] = (int32_t)(call->heads * call->parts);
    if (call->threads > 1) call->team(work, call, call->threads, 0);
    else work(call);
}
#endif
