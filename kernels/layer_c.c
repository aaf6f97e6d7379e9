// What a decoder's layer does between its products, on the cores of a CPU: the maths of layer.py.
//
//     norm      y_d = w_d x_d / sqrt(mean_d x_d^2 + eps)                      of rows of dim values
//               y_d silu(z_d)                                                 where the rows have a gate z behind the norm
//               the norm of x_d silu(z_d)                                     where they have one before it
//     rotate    of the queries and keys of a token, normed before where the model does that:
//                   y_i        = x_i cos_i - x_{i + half} sin_i
//                   y_{i+half} = x_{i + half} cos_i + x_i sin_i               for i < half; from 2 half on y_i = x_i
//               They stay where they are; keys and values go to the token's cell of the store besides, in bytes where
//               it is in int8 (kv.py): s = max |x| / 127, q = round(x / s), and s behind them.
//
// All is float32 in between and rounded once. What a row comes to depends on itself alone. Rows are cheap: a team is
// called for many of them only.
//
// This file is compiled once for each kind of processor and each dtype:
//
//     LANES     8 or 16: float32 values of a vector
//     WIDE      x and y, and the store where it is not in int8, are float32, else bfloat16
//     NORM, ROTATE   names of the functions

#include <stdint.h>

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t layer_source = SOURCE;
#else

#include "lanes.h"

enum { SHARE = 1 << 15 };  // values that are worth a team

typedef void parallel(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_at __attribute__((vector_size(LANES), aligned(1), may_alias));

// The values from `p` on that are left of a row, zeros behind them; and the same to store.
INLINE vf get_rest(const value *p, int64_t left) {
    value rest[LANES] = {0};
    memcpy(rest, p, left * sizeof(value));
    return get(rest);
}

INLINE void put_rest(value *p, vf x, int64_t left) {
    value rest[LANES];
    put(rest, x);
    memcpy(p, rest, left * sizeof(value));
}

// The same of a norm's weights, which are float32.
INLINE vf weights(const float *p) { return *(const vf_at *)p; }

INLINE vf weights_rest(const float *p, int64_t left) {
    float rest[LANES] = {0};
    memcpy(rest, p, left * sizeof(float));
    return weights(rest);
}

// 2^x in [-126, 126], and their values beyond. Relative error 1e-7.
INLINE vf exp2_of(vf x) {
    const vf most = (vf){0} + 126.f;
    const vi high = x > most, low = x < -most;
    x = (vf)((high & (vi)most) | (low & (vi)-most) | (~(high | low) & (vi)x));
    vf shifted = x + 12583039.f;  // 1.5 * 2^23 + 127: the rounded exponent ends up in the last bits, biased
    vf f = x - (shifted - 12583039.f);
    vf p = 1.5345811e-4f * f + 1.3399931e-3f;
    p = p * f + 9.6184890e-3f;
    p = p * f + 5.5503288e-2f;
    p = p * f + 2.4022647e-1f;
    p = p * f + 6.9314721e-1f;
    p = p * f + 1.f;
    return p * (vf)((vi)shifted << 23);
}

INLINE vf silu(vf x) { return x / (1.f + exp2_of(x * -1.44269504f)); }

// x silu(gate), or x where there is no gate; and the same at the end of a row.
INLINE vf gated(const value *x, const value *gate, int64_t d) {
    return gate ? get(x + d) * silu(get(gate + d)) : get(x + d);
}

INLINE vf gated_rest(const value *x, const value *gate, int64_t d, int64_t left) {
    return gate ? get_rest(x + d, left) * silu(get_rest(gate + d, left)) : get_rest(x + d, left);
}

// 1 / sqrt(mean x^2 + eps) of a row, gated before where there is a gate.
INLINE float scale_of(const value *x, const value *gate, int64_t dim, float eps) {
    vf sums[4] = {{0}, {0}, {0}, {0}};
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        for (int i = 0; i < 4; i++) {
            vf part = gated(x, gate, d + i * LANES);
            sums[i] += part * part;
        }
    for (; d < dim; d += LANES) {
        vf part = dim - d < LANES ? gated_rest(x, gate, d, dim - d) : gated(x, gate, d);
        sums[0] += part * part;
    }
    vf sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float total = 0.f;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return 1.f / __builtin_sqrtf(total / dim + eps);
}

// ---- norm ----

typedef struct {
    const value *x, *gate;  // gate: of `heads` rows beside each other, or null
    const float *weight;
    value *y;
    int64_t x_row, gate_row, heads, rows, dim, next;
    float eps;
    int32_t before;  // the gate comes before the norm, and each of the heads has its own weights
} Norm;

static void norm_rows(void *argument) {
    Norm *job = argument;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (row >= job->rows) return;
        const value *x = job->x + row * job->x_row;
        value *y = job->y + row * job->dim;
        const int64_t of_head = row % job->heads * job->dim;
        const value *z = job->gate ? job->gate + row / job->heads * job->gate_row + of_head : 0;
        const value *before = job->before ? z : 0, *behind = job->before ? 0 : z;
        const float *weight = job->weight + (job->before ? of_head : 0), scale = scale_of(x, before, job->dim, job->eps);
        int64_t d = 0;
        for (; d + LANES <= job->dim; d += LANES) {
            const vf normed = gated(x, before, d) * scale * weights(weight + d);
            put(y + d, behind ? normed * silu(get(behind + d)) : normed);
        }
        const int64_t left = job->dim - d;
        if (left) {
            const vf normed = gated_rest(x, before, d, left) * scale * weights_rest(weight + d, left);
            put_rest(y + d, behind ? normed * silu(get_rest(behind + d, left)) : normed, left);
        }
    }
}

void NORM(parallel *team, const void *x, int64_t x_row, const void *weight, const void *gate, int64_t gate_row,
          int64_t heads, void *y, int64_t rows, int64_t dim, float eps, int32_t threads, int32_t before) {
    Norm job = {.x = x, .gate = gate, .weight = weight, .y = y, .x_row = x_row, .gate_row = gate_row, .heads = heads,
                .rows = rows, .dim = dim, .eps = eps, .before = before};
    if (threads > 1 && rows > 1 && rows * dim > SHARE) team(norm_rows, &job, threads, 0);
    else norm_rows(&job);
}

// ---- rotate ----

// Mirrored by layer.py.
typedef struct {
    parallel *team;
    const int64_t *positions, *cells;  // [tokens]
    const float *cos, *sin;            // [context][half]
    int64_t tokens, heads, kv_heads, dim, half, qkv_row;
    int64_t cell_stride, head_stride;  // in bytes
    float eps;
    int32_t threads, int8;  // whether the store is in int8
} Turn;

typedef struct {
    const Turn *turn;
    value *qkv;
    char *keys, *values;  // of the layer
    const float *q_norm, *k_norm;
    int64_t next;
} Job;

INLINE void rotate_head(value *x, const float *cos, const float *sin, const float *weight, const Turn *turn) {
    const int64_t half = turn->half, dim = turn->dim;
    const float scale = weight ? scale_of(x, 0, dim, turn->eps) : 1.f;
    if (weight)
        for (int64_t i = 2 * half; i < dim; i += LANES) put(x + i, get(x + i) * (scale * weights(weight + i)));
    for (int64_t i = 0; i < half; i += LANES) {
        vf low = get(x + i), high = get(x + i + half);
        if (weight) {
            low *= scale * weights(weight + i);
            high *= scale * weights(weight + i + half);
        }
        const vf c = *(const vf_at *)(cos + i), s = *(const vf_at *)(sin + i);
        put(x + i, low * c - high * s);
        put(x + i + half, high * c + low * s);
    }
}

// A head's key or value into the store.
INLINE void keep(const Turn *turn, char *place, const value *x) {
    const int64_t dim = turn->dim;
    if (!turn->int8) {
        memcpy(place, x, dim * sizeof(value));
        return;
    }
    vf most = {0};
    vi bad = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf part = get(x + d), size = (vf)((vi)part & 0x7fffffff);
        const vi more = size > most;
        most = (vf)((more & (vi)size) | (~more & (vi)most));
        bad |= part != part;
    }
    float top = 0.f;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) {
        top = most[i] > top ? most[i] : top;
        any |= bad[i];
    }
    const float scale = any ? __builtin_nanf("") : top / 127.f, inverse = top > 0.f ? 127.f / top : 0.f;
    for (int64_t d = 0; d < dim; d += LANES) {
        const vi found = __builtin_convertvector(__builtin_elementwise_roundeven(get(x + d) * inverse), vi);
        *(vb_at *)(place + d) = __builtin_convertvector(found, vb);
    }
    memcpy(place + dim, &scale, sizeof(scale));
}

static void rotate_tokens(void *argument) {
    Job *job = argument;
    const Turn *turn = job->turn;
    const int64_t dim = turn->dim, half = turn->half;
    for (;;) {
        const int64_t token = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (token >= turn->tokens) return;
        const float *cos = turn->cos + turn->positions[token] * half, *sin = turn->sin + turn->positions[token] * half;
        value *x = job->qkv + token * turn->qkv_row;
        for (int64_t h = 0; h < turn->heads; h++, x += dim) rotate_head(x, cos, sin, job->q_norm, turn);
        char *key = job->keys + turn->cells[token] * turn->cell_stride;
        char *val = job->values + turn->cells[token] * turn->cell_stride;
        for (int64_t h = 0; h < turn->kv_heads; h++, x += dim) {
            rotate_head(x, cos, sin, job->k_norm, turn);
            keep(turn, key + h * turn->head_stride, x);
            keep(turn, val + h * turn->head_stride, x + turn->kv_heads * dim);
        }
    }
}

void ROTATE(const Turn *turn, void *qkv, const void *q_norm, const void *k_norm, void *keys, void *values) {
    Job job = {.turn = turn, .qkv = qkv, .keys = keys, .values = values, .q_norm = q_norm, .k_norm = k_norm};
    if (turn->threads > 1 && turn->tokens > 1 && turn->tokens * (turn->heads + 2 * turn->kv_heads) * turn->dim > SHARE)
        turn->team(rotate_tokens, &job, turn->threads, 0);
    else rotate_tokens(&job);
}
#endif
