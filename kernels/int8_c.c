// Products with int8 weights on the cores of a CPU: the maths of int8.py, for what it packs.
//
// For a row x of `inner` values and an output o, with scale_o and the integers w_o of its weights:
//
//     s = max |x_k| / 127,  q_k = round(x_k / s),  y_o = (sum_k q_k w_ok) * (s * scale_o) + bias_o
//
// The sum is of integers and exact, so what a row comes to does not depend on the rows beside it or on the threads. A
// gated matrix gives silu(y_gate) * y_up. `plus` is added last; all of that is float32, then it is rounded once.
//
// Work. A block is VECTORS * LANES outputs; its weights lie together in the order in which they are read. A thread
// draws blocks from a counter and multiplies each with all rows, up to ROWS at a time, whose sums stay in registers.
// Few rows wait for memory, which is read once from front to back; many rows wait for the multipliers.
//
// This file is compiled once for each kind of processor and each dtype of x and y:
//
//     LANES     8 or 16: 32-bit values of a vector
//     VECTORS   of a block
//     BYTES     q is a byte with 128 added, and four products are added to a lane by one instruction (VNNI). Else q has
//               two bytes and two are: AVX2 multiplies bytes only with sums of 16 bits, which overflow
//     WIDE      x and y are float32, else bfloat16
//     NAME      of the function
//
// Without VNNI its instruction is spelt out, which is how a processor that lacks it tests all the rest.

#include <stdint.h>
#include <string.h>
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t int8_source = SOURCE;
#else

enum { BLOCK = VECTORS * LANES, STEP = BYTES ? 4 : 2, ROWS = 6, SHARE = 1 << 16 };  // SHARE: bytes that are drawn at once

// Mirrored by int8.py.
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use
    const int8_t *weight;   // [blocks][padded / STEP][VECTORS][LANES][STEP]
    const float *scale;     // [blocks][BLOCK]
    const float *bias;      // [blocks][BLOCK]
    const int32_t *offset;  // [blocks][BLOCK]: with bytes -128 times the sum of an output's weights, else 0
    int64_t inner, padded;  // columns, and with zeros to a multiple of STEP
    int64_t outputs;        // of y
    int64_t gated;          // the first half of a block are gates, the second their partners
} Weights;

#if WIDE
typedef float value;
#else
typedef uint16_t value;
#endif

#if BYTES
typedef uint8_t quantum;
#else
typedef int16_t quantum;
#endif

typedef struct {
    const Weights *weights;
    const value *x, *plus;
    value *y;
    int64_t x_row, plus_row, rows;  // strides in values
    quantum *q;                     // [rows][padded]
    float *s;                       // [rows]
    int64_t blocks, at_once, next, next_row;
} Job;

// ---- vectors ----

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef quantum vq __attribute__((vector_size(sizeof(quantum) * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef quantum vq_at __attribute__((vector_size(sizeof(quantum) * LANES), aligned(1), may_alias));

INLINE vf splat(float x) { return (vf){0} + x; }
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return either(a > b, a, b); }

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
    bits = (vu)either(x == x, (vf)bits, (vf)((vu){0} + 0x7fc0));
    *(vh_at *)p = __builtin_convertvector(bits, vh);
#endif
}

// 2^x in [-126, 126], and their values beyond. Relative error 1e-7.
INLINE vf exp2_of(vf x) {
    x = larger(splat(-126.f), x);
    x = -larger(splat(-126.f), -x);
    vf shifted = x + 12583039.f;  // 1.5 * 2^23 + 127: the rounded exponent ends up in the last bits, biased
    vf f = x - (shifted - 12583039.f);
    vf p = splat(1.5345811e-4f) * f + 1.3399931e-3f;
    p = p * f + 9.6184890e-3f;
    p = p * f + 5.5503288e-2f;
    p = p * f + 2.4022647e-1f;
    p = p * f + 6.9314721e-1f;
    p = p * f + 1.f;
    return p * (vf)((vi)shifted << 23);
}

INLINE vf silu(vf x) { return x / (1.f + exp2_of(x * -1.44269504f)); }

// ---- rows ----

static void quantise(const Job *job, int64_t row) {
    const int64_t inner = job->weights->inner, whole = inner / LANES * LANES;
    const value *x = job->x + row * job->x_row;
    quantum *q = job->q + row * job->weights->padded;
    value rest[LANES] = {0};
    memcpy(rest, x + whole, (inner - whole) * sizeof(value));
    vf most = {0};
    vi bad = {0};
    for (int64_t k = 0; k < inner; k += LANES) {
        vf v = get(k < whole ? x + k : rest);
        vf size = (vf)((vi)v & 0x7fffffff);
        most = larger(size, most);
        bad |= v != v;
    }
    float top = 0.f;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) {
        top = most[i] > top ? most[i] : top;
        any |= bad[i];
    }
    job->s[row] = any ? __builtin_nanf("") : top / 127.f;  // a row with a NaN is NaN, not a guess
    const vf inverse = splat(top > 0.f ? 127.f / top : 0.f);
    for (int64_t k = 0; k < inner; k += LANES) {
        vf v = get(k < whole ? x + k : rest) * inverse;
        vi bits = (vi)(v + 12582912.f) - 0x4b400000;  // 1.5 * 2^23: rounded, ties to even
        vq found = __builtin_convertvector(bits + (BYTES ? 128 : 0), vq);
        if (k < whole) *(vq_at *)(q + k) = found;
        else memcpy(q + k, &found, (inner - whole) * sizeof(quantum));
    }
    for (int64_t k = inner; k < job->weights->padded; k++) q[k] = 0;  // those weights are zero
}

#if BYTES
typedef vi weights_of;

INLINE weights_of widen(const int8_t *p) { return *(const vi_at *)p; }

INLINE vi dot(vi sum, vi q, weights_of w) {
#ifndef __AVX512VNNI__
    typedef uint8_t vq4 __attribute__((vector_size(4 * LANES)));
    typedef int8_t vw4 __attribute__((vector_size(4 * LANES)));
    const vq4 a = (vq4)q;
    const vw4 b = (vw4)w;
    for (int i = 0; i < 4 * LANES; i++) sum[i / 4] += (int32_t)a[i] * b[i];
    return sum;
#else
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)w);
#endif
}
#else
typedef __m256i weights_of;

INLINE weights_of widen(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }

INLINE vi dot(vi sum, vi q, weights_of w) { return sum + (vi)_mm256_madd_epi16((__m256i)q, w); }
#endif

// One block for `count` rows from `row` on. `count` is a constant wherever this is called.
INLINE void tile(const Job *job, int64_t block, int64_t row, const int count) {
    const Weights *weights = job->weights;
    const int8_t *w = weights->weight + block * BLOCK * weights->padded;
    const quantum *q = job->q + row * weights->padded;
    vi sums[ROWS][VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const vi offset = *(const vi_at *)(weights->offset + block * BLOCK + v * LANES);
        for (int r = 0; r < count; r++) sums[r][v] = offset;
    }
    for (int64_t k = 0; k < weights->padded; k += STEP, w += BLOCK * STEP) {
        weights_of part[VECTORS];
        for (int v = 0; v < VECTORS; v++) part[v] = widen(w + v * LANES * STEP);
        for (int r = 0; r < count; r++) {
            int32_t together;
            memcpy(&together, q + r * weights->padded + k, 4);
            const vi each = (vi){0} + together;
            for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], each, part[v]);
        }
    }
    const int vectors = weights->gated ? VECTORS / 2 : VECTORS;
    const int64_t first = block * vectors * LANES;
    for (int r = 0; r < count; r++) {
        vf found[VECTORS];
        const float s = job->s[row + r];
        for (int v = 0; v < VECTORS; v++) {
            const int64_t at = block * BLOCK + v * LANES;
            const vf scale = *(const vf_at *)(weights->scale + at), bias = *(const vf_at *)(weights->bias + at);
            found[v] = __builtin_convertvector(sums[r][v], vf) * (scale * s) + bias;
        }
        for (int v = 0; v < vectors; v++) {
            const vf out = weights->gated ? silu(found[v]) * found[v + VECTORS / 2] : found[v];
            const int64_t at = first + v * LANES;
            const int64_t left = weights->outputs - at;
            value *y = job->y + (row + r) * weights->outputs + at;
            const value *plus = job->plus ? job->plus + (row + r) * job->plus_row + at : 0;
            if (left >= LANES) {
                put(y, plus ? out + get(plus) : out);
            } else if (left > 0) {
                value rest[LANES] = {0}, added[LANES] = {0};
                if (plus) memcpy(added, plus, left * sizeof(value));
                put(rest, plus ? out + get(added) : out);
                memcpy(y, rest, left * sizeof(value));
            }
        }
    }
}

static void work(void *argument) {
    Job *job = argument;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&job->next, job->at_once, __ATOMIC_RELAXED);
        if (first >= job->blocks) return;
        const int64_t end = first + job->at_once < job->blocks ? first + job->at_once : job->blocks;
        for (int64_t block = first; block < end; block++) {
            int64_t row = 0;
            for (; row + ROWS <= job->rows; row += ROWS) tile(job, block, row, ROWS);
            switch (job->rows - row) {
                case 1: tile(job, block, row, 1); break;
                case 2: tile(job, block, row, 2); break;
                case 3: tile(job, block, row, 3); break;
                case 4: tile(job, block, row, 4); break;
                case 5: tile(job, block, row, 5); break;
            }
        }
    }
}

static void work_on_rows(void *argument) {
    Job *job = argument;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&job->next_row, 1, __ATOMIC_RELAXED);
        if (row >= job->rows) return;
        quantise(job, row);
    }
}

// `room`: for the quantised rows, [rows][padded], and after them the rows' scales.
void NAME(const Weights *weights, const void *x, int64_t x_row, const void *plus, int64_t plus_row, void *y,
          int64_t rows, void *room, int32_t threads) {
    Job job = {.weights = weights, .x = x, .x_row = x_row, .plus = plus, .plus_row = plus_row, .y = y, .rows = rows};
    job.q = room;
    job.s = (float *)((char *)room + (rows * weights->padded * (int64_t)sizeof(quantum) + 63) / 64 * 64);
    const int64_t outputs = weights->gated ? 2 * weights->outputs : weights->outputs;
    job.blocks = (outputs + BLOCK - 1) / BLOCK;
    job.at_once = SHARE / (BLOCK * weights->padded);
    if (!job.at_once) job.at_once = 1;
    if (threads > 1 && rows * weights->inner > SHARE) weights->parallel(work_on_rows, &job, threads, 0);
    else work_on_rows(&job);
    if (threads > 1 && job.blocks > job.at_once) weights->parallel(work, &job, threads, 0);
    else work(&job);
}
#endif
