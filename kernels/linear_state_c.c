// Gated DeltaNet and Mamba-2 over states in slots, on the cores of a CPU: the maths of linear_state.py.
//
// The recurrence is computed token by token. The columns of S do not depend on each other, and each lies in one stretch of
// memory. TILE of them stay in the first level of cache while BLOCK tokens pass. One sweep over a column serves a token and
// the one after it, whose key is k':
//
//     S <- decay S + delta k        o = q . S        p = k' . S        delta = beta (v - decay p), with p of the token before
//
// That is four vector operations for each vector of S. The chunked form of the literature takes three and a share that
// grows with its chunk, and rounds differently wherever a chunk ends. In Mamba-2 delta = dt v, and no p is needed: a sweep
// is three vector operations.
//
// Order. Each sum over keys is taken in one order, and a state between two calls is float32, as it is inside. So a token
// comes to the same bits however a prompt is cut, as a draft or not, beside any other sequences, and with any number of
// threads.
//
// Work. A task is some columns of the value heads of one key head, of one sequence. The threads of a team draw tasks from a
// counter. A task reads and writes only its own columns of states. The inputs that slots keep are written by the thread
// that ends the last task of a sequence, because all of them read them. A single token waits for memory.
//
// This file is compiled once for each kind of processor and each dtype:
//
//     LANES     8 or 16: float32 values of a vector
//     WIDE      mixed, out and the inputs in slots are float32, else bfloat16
//     NAME      of the function

#include <stdint.h>

#define ALIGNED __attribute__((aligned(64)))

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t linear_state_source = SOURCE;
#else

#include "lanes.h"

enum { MAX_KEY = 256, MAX_COLUMNS = 512, MAX_TAPS = 8 };  // mirrored by linear_state.py
enum { BLOCK = 32, TILE = 32, ROWS = 4, LINE = 16 };  // tokens; columns of S that pass all of them, and of these at a time

typedef void parallel(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use

// Mirrored by linear_state.py.
typedef struct {
    parallel *team;
    // Slots. Strides in values, of layers and of slots.
    float *recurrent, *gates;
    value *conv, *window;
    int64_t recurrent_layer, gates_layer, conv_layer, window_layer;
    int64_t recurrent_slot, gates_slot, conv_slot, window_slot;
    int64_t slots, drafts, delta;  // drafts of a window at most; whether the rule is the delta rule, else Mamba-2
    int64_t key_heads, heads, key_dim, value_dim, kernel, channels;
    int64_t queries, keys, values, gates_token;  // the first channel of each; gates of a token, of all heads
    const int32_t *starts, *source, *target, *applied, *held, *marks;  // StateBatch
    int64_t sequences, n_marks;
    int32_t *left;  // [sequences]: room for the tasks that are left of each
    // Of a layer
    const float *taps, *bias, *a_log, *dt_bias, *d;  // taps [kernel][channels]; bias may be null
    const value *mixed;
    const float *a, *b;  // Mamba-2: a is dt
    value *out;  // [tokens][heads][value_dim]
    int64_t layer, tokens, threads, mixed_row, a_row, b_row;  // rows in values
    int64_t wrong;                                            // set where the batch does not fit
    // Of the work
    int64_t parts, columns, next;  // tasks of a key head, columns of each
} Call;

// ---- vectors ----

#define LOG2E 1.44269504f

INLINE vf load(const float *p) { return *(const vf_at *)p; }
INLINE void store(float *p, vf x) { *(vf_at *)p = x; }

// e^x to a relative error of 1e-7; as for -87 below that, and for 87 above. NaN for NaN.
INLINE vf exp_of(vf x) {
    x = either(x < -87.f, splat(-87.f), x);
    x = either(x > 87.f, splat(87.f), x);
    const vf shifted = muladd(x, splat(LOG2E), splat(12583039.f));  // 1.5 * 2^23 + 127: the exponent in the last bits
    const vf n = shifted - 12583039.f;
    const vf f = muladd(n, splat(-1.42860677e-6f), muladd(n, splat(-0.693145752f), x));  // ln 2 in two parts
    vf p = muladd(splat(1.98756965e-4f), f, splat(1.39819994e-3f));
    p = muladd(p, f, splat(8.33345205e-3f));
    p = muladd(p, f, splat(4.16657962e-2f));
    p = muladd(p, f, splat(1.66666657e-1f));
    p = muladd(p, f, splat(0.5f));
    p = muladd(p * f, f, f) + 1.f;
    return p * (vf)((vi)shifted << 23);
}

INLINE vf sigmoid(vf x) { return 1.f / (exp_of(-x) + 1.f); }

// log(1 + e^x) = max(x, 0) + 2 artanh(e / (2 + e)), e = e^-|x|.
INLINE vf softplus(vf x) {
    const vf e = exp_of((vf)((vi)x | INT32_MIN)), s = e / (e + 2.f), y = s * s;
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

// `columns` columns of S of the value heads of one key head, from `column` of all columns on.
typedef struct {
    const Call *call;
    Sequence sequence;
    int64_t key_head, column;
} Task;

INLINE int64_t tasks_of(const Call *call) { return call->sequences * call->key_heads * call->parts; }

INLINE Task task_of(const Call *call, int64_t number) {
    const int64_t head = number / call->parts % call->key_heads;
    const int64_t column = (head * call->parts + number % call->parts) * call->columns;
    return (Task){call, sequence_of(call, number / call->parts / call->key_heads), head, column};
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
        float *gates = call->gates + s->target * call->gates_slot + i * call->gates_token;
        memcpy(gates, call->a + token * call->a_row, call->heads * sizeof(float));
        if (call->delta) memcpy(gates + call->heads, call->b + token * call->b_row, call->heads * sizeof(float));
    }
}

// ---- queries, keys, values and gates of a block of tokens ----

// y [n][count] = silu of the convolution of `count` channels from `channel` on. Rows are read in stretches: they often lie
// a multiple of a page apart, where a cache has room for few of them at a time.
INLINE void convolve(const Call *call, const value *const *rows, int64_t channel, int64_t count, int64_t n, float *y,
                     const int kernel) {
    enum { SOME = 8 };  // vectors
    for (int64_t begin = 0; begin < count; begin += SOME * LANES) {
        const int64_t left = (count - begin) / LANES, some = left < SOME ? left : SOME;
        vf x[(BLOCK + MAX_TAPS - 1) * SOME];
        for (int64_t i = 0; i < n + kernel - 1; i++)
            for (int64_t c = 0; c < some; c++)
                x[i * SOME + c] = rows[i] ? get(rows[i] + channel + begin + c * LANES) : splat(0.f);
        for (int64_t c = 0; c < some; c++) {
            const int64_t at = channel + begin + c * LANES;
            const float *taps = call->taps + at;
            const vf bias = call->bias ? load(call->bias + at) : splat(0.f);
            for (int64_t t = 0; t < n; t++) {
                vf sum = muladd(x[t * SOME + c], load(taps), bias);
                for (int j = 1; j < kernel; j++) sum = muladd(x[(t + j) * SOME + c], load(taps + j * call->channels), sum);
                store(y + t * count + begin + c * LANES, sum);
            }
        }
    }
    for (int64_t i = 0; i < n * count; i += LANES) {
        const vf x = load(y + i);
        store(y + i, x / (exp_of(-x) + 1.f));
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
    float decay[BLOCK * MAX_COLUMNS / LANES], beta[BLOCK * MAX_COLUMNS / LANES];  // [heads][BLOCK]; Mamba-2: beta is dt
    float state[MAX_KEY * MAX_COLUMNS];                     // [columns][key_dim]
} Room;

// Of a task, for n tokens from `token` on.
static void prepare(const Task *task, int64_t token, int64_t n, Room *room) {
    const Call *call = task->call;
    const Sequence *s = &task->sequence;
    const value *rows[BLOCK + MAX_TAPS];
    for (int64_t i = 0; i < n + call->kernel - 1; i++) rows[i] = input_of(call, s, token + i);
    const int64_t dim = call->key_dim;
    inputs(call, rows, call->queries + task->key_head * dim, dim, n, room->q);
    inputs(call, rows, call->keys + task->key_head * dim, dim, n, room->k);
    inputs(call, rows, call->values + task->column, call->columns, n, room->v);
    if (call->delta) {
        normalize(room->q, n, dim, 1.f / __builtin_sqrtf((float)dim));
        normalize(room->k, n, dim, 1.f);
    }
    const int64_t first = task->column / call->value_dim, last = (task->column + call->columns - 1) / call->value_dim;
    for (int64_t head = first; head <= last; head++) {
        float *decay = room->decay + (head - first) * BLOCK, *beta = room->beta + (head - first) * BLOCK;
        for (int64_t t = 0; t < n; t++) {
            const int64_t at = token + t, own = s->first + at - s->applied;
            const float *gates = call->gates + s->source * call->gates_slot + at * call->gates_token;
            decay[t] = at < s->applied ? gates[head] : call->a[own * call->a_row + head];
            if (call->delta) beta[t] = at < s->applied ? gates[call->heads + head] : call->b[own * call->b_row + head];
        }
        const vf rate = -exp_of(splat(call->a_log[head]));
        for (int64_t t = 0; t < n; t += LANES) {
            const vf dt = softplus(load(decay + t) + call->dt_bias[head]);
            store(beta + t, call->delta ? sigmoid(load(beta + t)) : dt);
            store(decay + t, exp_of(dt * rate));
        }
    }
}

// ---- tiles ----

typedef float v4 __attribute__((vector_size(16)));
typedef float v4_at __attribute__((vector_size(16), aligned(4), may_alias));
typedef float v8 __attribute__((vector_size(32)));

// The sums of neighbouring lanes, of both.
INLINE v8 pairs(v8 a, v8 b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The sum of each of four vectors.
INLINE v4 totals(const vf *x) {
    v8 half[ROWS];
    for (int r = 0; r < ROWS; r++) {
#if LANES == 16
        half[r] = __builtin_shufflevector(x[r], x[r], 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(x[r], x[r], 8, 9, 10, 11, 12, 13, 14, 15);
#else
        half[r] = x[r];
#endif
    }
    const v8 sums = pairs(pairs(half[0], half[1]), pairs(half[2], half[3]));
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}

// p = S^T k for ROWS columns, which lie one behind the other. They are read in the order of memory, as processors foresee it.
INLINE v4 project(const float *s, int64_t dim, const float *k) {
    vf sum[ROWS] = {{0}, {0}, {0}, {0}};
    for (int r = 0; r < ROWS; r++)
        for (int64_t d = 0; d < dim; d += LANES) sum[r] = muladd(load(s + r * dim + d), load(k + d), sum[r]);
    return totals(sum);
}

// S' = decay S + k delta^T, which may be where S is, o = S'^T q and, where there is a next key, p = S'^T next. A last token
// asks for the columns that come next.
INLINE void sweep(const float *s, float *to, int64_t dim, const float *k, const float *q, const float *next, float decay,
                  v4 delta, v4 *o, v4 *p, const int NEXT) {
    vf out[ROWS] = {{0}, {0}, {0}, {0}}, sum[ROWS] = {{0}, {0}, {0}, {0}};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf key = load(k + d), query = load(q + d), then = NEXT ? load(next + d) : key;
        if (!NEXT)
            for (int i = 0; i < ROWS * LANES; i += LINE) __builtin_prefetch(s + ROWS * (dim + d) + i, 0, 2);
        for (int r = 0; r < ROWS; r++) {
            const vf x = muladd(splat(delta[r]), key, load(s + r * dim + d) * decay);
            store(to + r * dim + d, x);
            out[r] = muladd(x, query, out[r]);
            if (NEXT) sum[r] = muladd(x, then, sum[r]);
        }
    }
    *o = totals(out);
    if (NEXT) *p = totals(sum);
}

// n tokens from `token` on over the `width` columns of a head from column `at` of the task on.
INLINE void pass(const Task *task, int64_t at, int64_t width, int64_t token, int64_t n, Room *room, const int DELTA) {
    const Call *call = task->call;
    const Sequence *s = &task->sequence;
    const int64_t dim = call->key_dim, column = task->column + at, size = width * dim * (int64_t)sizeof(float);
    const int64_t head = (column / call->value_dim - task->column / call->value_dim) * BLOCK;
    const vf d = splat(DELTA ? 0.f : call->d[column / call->value_dim]);
    float *slots = call->recurrent + column * dim, *target = slots + s->target * call->recurrent_slot;
    float *own = room->state + at * dim;
    const float *from = own;
    if (token && token == s->kept) from = target;
    else if (!token && s->source >= 0) from = slots + s->source * call->recurrent_slot;
    else if (!token) memset(own, 0, size);
    if (!token && !s->kept && from != target) memcpy(target, from, size);
    const int32_t *mark = s->marks;
    ALIGNED float p[TILE], o[TILE];
    for (int64_t t = 0; t < n; t++) {
        const float *k = room->k + t * dim, *q = room->q + t * dim, *v = room->v + t * call->columns + at;
        const float decay = room->decay[head + t], beta = room->beta[head + t];
        const int64_t done = token + t + 1;
        float *to = done == s->kept ? target : own;
        for (int64_t c = 0; c < width; c += ROWS) {
            v4 delta = *(const v4_at *)(v + c) * beta, *next = (v4 *)(p + c), *out = (v4 *)(o + c);
            if (DELTA) {
                const v4 here = t ? *next : project(from + c * dim, dim, k);
                delta = (*(const v4_at *)(v + c) - here * decay) * beta;
            }
            if (DELTA && t + 1 < n) sweep(from + c * dim, to + c * dim, dim, k, q, k + dim, decay, delta, out, next, 1);
            else sweep(from + c * dim, to + c * dim, dim, k, q, 0, decay, delta, out, next, 0);
        }
        from = to;
        for (; mark < s->marks_end && s->applied + mark[1] <= done; mark += 3)
            if (s->applied + mark[1] == done) memcpy(slots + mark[2] * call->recurrent_slot, from, size);
        if (done <= s->applied) continue;
        value *row = call->out + (s->first + done - 1 - s->applied) * call->heads * call->value_dim + column;
        for (int64_t c = 0; c < width; c += LANES) put(row + c, DELTA ? load(o + c) : muladd(load(v + c), d, load(o + c)));
    }
}

// ---- tasks ----

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

static void run(const Call *call, int64_t number) {
    const Task task = task_of(call, number);
    const Sequence *s = &task.sequence;
    Room room;
    int64_t token = 0;
    do {
        const int64_t n = lesser(s->all - token, BLOCK);
        prepare(&task, token, n, &room);
        for (int64_t at = 0, width; at < call->columns; at += width) {
            const int64_t of_head = call->value_dim - (task.column + at) % call->value_dim;
            width = lesser(lesser(of_head, call->columns - at), TILE);
            if (call->delta) pass(&task, at, width, token, n, &room, 1);
            else pass(&task, at, width, token, n, &room, 0);
        }
        token += n;
    } while (token < s->all);
    if (__atomic_sub_fetch(call->left + s->number, 1, __ATOMIC_ACQ_REL) == 0) keep(call, s);
}

static void work(void *argument) {
    Call *call = argument;
    for (;;) {
        const int64_t task = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (task >= tasks_of(call)) return;
        run(call, task);
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

void NAME(Call *plan) {
    plan->wrong = !fits(plan);
    if (plan->wrong) return;
    Call of_layer = *plan, *call = &of_layer;
    call->recurrent += call->layer * call->recurrent_layer;
    call->gates += call->layer * call->gates_layer;
    call->conv += call->layer * call->conv_layer;
    call->window += call->layer * call->window_layer;
    // The columns of a key head are cut where they are too many for a room, or its heads too few for all threads.
    enum { ENOUGH = 4 };  // tasks of a thread
    const int64_t all = call->heads / call->key_heads * call->value_dim;
    call->parts = 1;
    while (all / call->parts > MAX_COLUMNS || all % (call->parts * LANES)) call->parts++;
    for (int64_t parts = call->parts + 1; tasks_of(call) < ENOUGH * call->threads && parts <= all / TILE; parts++)
        if (all % (parts * TILE) == 0) call->parts = parts;
    call->columns = all / call->parts;
    call->next = 0;
    for (int64_t i = 0; i < call->sequences; i++) call->left[i] = (int32_t)(call->key_heads * call->parts);
    if (call->threads > 1 && tasks_of(call) > 1) call->team(work, call, call->threads, 0);
    else work(call);
}
#endif
