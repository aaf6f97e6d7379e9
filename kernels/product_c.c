// Products with the matrices of a model on the cores of a CPU: the maths of linear.py, which packs the weights.
//
// For a row x of `inner` values and an output o:
//
//     y_o = sum_k x_k W_ok + bias_o
//
// A matrix may have an activation, for which outputs come in pairs, gates and their partners (`activate` of linear.py).
// `plus` is added last; all of that is float32, then it is rounded once. With weights in int8, W_ok = scale_o w_ok, and
// rows become integers, too:
//
//     s = max |x_k| / 127,  q_k = round(x_k / s),  y_o = (sum_k q_k w_ok) * (s * scale_o) + bias_o
//
// An output's sum is taken by one thread from the first k to the last, whatever rows are beside it: a row comes to the
// same in any batch, to the last bit.
//
// Work. A block is VECTORS * LANES outputs; its weights lie together in the order in which they are read. A thread
// draws blocks from a counter and multiplies each with all rows, up to ROWS at a time, whose sums stay in registers.
// Where blocks are too few to keep all threads busy and rows are many, rows are cut into pieces as well.
// Few rows wait for memory, which is read once from front to back and asked for ahead; many rows wait for the
// multipliers, or, with TILES, for the cache: then two vectors of a block are multiplied with 32 rows at a time.
//
// Experts (experts.py). A token has rows in the products of those matrices that it chose. Rows are gathered by expert,
// so that each active expert is a piece of the rows with a matrix of its own, then multiplied twice; a token's terms
// stay in float32, and are summed in the order in which it chose. Only the matrices of active experts are read.
//
// This file is compiled once for each kind of processor, each kind of weights and each dtype of x and y:
//
//     LANES     8 or 16: 32-bit values of a vector
//     VECTORS   of a block
//     ROWS      of a tile: as many as the registers hold
//     KIND      BYTES   weights in int8, q is a byte with 128 added, and four products are added to a lane by one
//                       instruction (VNNI)
//               WORDS   weights in int8, q has two bytes, and two products are: AVX2 multiplies bytes only with sums of
//                       16 bits, which overflow
//               PAIRS   weights and x in bfloat16, two products are added to a lane by one instruction (AVX512-BF16), or
//                       one after the other as float32
//               REALS   weights and x in float32
//     TILES     of BYTES and PAIRS: sums of 16 rows and 16 outputs are taken by one instruction (AMX)
//     WIDE      x and y are float32, else bfloat16
//     NAME      of the function; that of experts is `experts_` and NAME
//
// Where a processor lacks an instruction it is spelt out, which is how one without it tests all the rest.

#include <stdint.h>
#include <stdlib.h>
#include <immintrin.h>

#ifdef SOURCE  // compiled once besides: the digest of this file
const uint64_t product_source = SOURCE;
#else

#include "lanes.h"

#define BYTES 1
#define WORDS 2
#define PAIRS 3
#define REALS 4
#define INTEGERS (KIND <= WORDS)

enum { BLOCK = VECTORS * LANES, STEP = KIND == BYTES ? 4 : KIND == REALS ? 1 : 2 };
enum { SHARE = 1 << 16 };  // bytes of weights that are drawn at once
enum { TASKS = 4 };  // for each thread, at least, where the rows can be cut into so many
enum { AHEAD = 1 << 12 };  // bytes from a weight to the one that is asked for when it is read
enum { CHUNK = 1 << 13 };  // bytes of a block that few rows are multiplied with at a time
enum { FEW = 6 * ROWS };  // rows, at most

#if TILES
enum { HIGH = 16, DEEP = 16 * STEP };  // of a tile: rows, and columns of x in 64 bytes
_Static_assert(LANES == 16 && ROWS == 2 * HIGH && VECTORS % 2 == 0, "tiles are of 16 rows and 64 bytes");
#endif

#if KIND == BYTES
typedef int8_t weight;
typedef uint8_t quantum;  // of a row as it is multiplied
#elif KIND == WORDS
typedef int8_t weight;
typedef int16_t quantum;
#elif KIND == PAIRS
typedef uint16_t weight, quantum;
#else
typedef float weight, quantum;
#endif

// Weights of one step: that many lines of memory.
enum { LINE = BLOCK * STEP * (int)sizeof(weight) < 64 ? BLOCK * STEP * (int)sizeof(weight) : 64 };
enum { LINES = BLOCK * STEP * (int)sizeof(weight) / LINE };

enum { PLAIN, SILU, GELU_TANH, CLAMPED, RELU2 };  // activations; mirrored by linear.py

// Mirrored by linear.py.
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of the team to use
    const weight *weights;  // [blocks][padded / STEP][VECTORS][LANES][STEP]
    const float *bias;      // [blocks][BLOCK]
    const float *scale;     // [blocks][BLOCK]; of integers
    const int32_t *offset;  // [blocks][BLOCK]; with bytes -128 times the sum of an output's weights, with words 0
    int64_t inner, padded;  // columns, and with zeros to a multiple of STEP; of floats there are none
    int64_t outputs;        // of y
    int64_t activation;     // of pairs: the first half of a block are gates, the second their partners
    float alpha, limit;     // of CLAMPED
} Matrix;

// Rows are cut into pieces. Without `begins` all of them are multiplied with the first matrix.
typedef struct {
    const Matrix *matrices;  // all of one shape
    const int32_t *experts;  // [pieces]: which matrix
    const int64_t *begins;   // [pieces + 1]: first rows
    const value *x, *plus;
    value *y;
    float *terms;                   // instead of y, in float32: [rows][blocks][outputs of a block]
    int64_t x_row, plus_row, rows;  // strides in values
    const quantum *q;               // [rows][q_row]: x itself, or its integers
    int64_t q_row;
    float *s;                       // [rows]: of integers
    int64_t blocks, pieces, at_once, next, next_row;
} Job;

INLINE int in_pairs(const Matrix *matrix) { return matrix->activation != PLAIN && matrix->activation != RELU2; }
INLINE int64_t blocks_of(const Matrix *matrix) {
    return ((in_pairs(matrix) ? 2 : 1) * matrix->outputs + BLOCK - 1) / BLOCK;
}

// ---- vectors ----

INLINE vf larger(vf a, vf b) { return either(a > b, a, b); }

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

INLINE vf times_sigmoid(vf x, vf of) { return x / (1.f + exp2_of(of * -1.44269504f)); }

// A NaN stays one.
INLINE vf activate(const Matrix *matrix, vf gate, vf up) {
    switch (matrix->activation) {
    case SILU:
        return times_sigmoid(gate, gate) * up;
    case GELU_TANH:  // (1 + tanh(z)) / 2 is sigmoid(2 z)
        return times_sigmoid(gate, gate * (1.59576912f + 0.0713548163f * gate * gate)) * up;
    case CLAMPED: {
        const vf low = splat(-matrix->limit);
        gate = -larger(low, -gate);
        up = -larger(low, -larger(low, up));
        return times_sigmoid(gate, gate * matrix->alpha) * (up + 1.f);
    }
    case RELU2:
        gate = larger(splat(0.f), gate);
        return gate * gate;
    }
    return gate;
}

// ---- integers of a row ----

#if INTEGERS
typedef quantum vq __attribute__((vector_size(sizeof(quantum) * LANES)));
typedef quantum vq_at __attribute__((vector_size(sizeof(quantum) * LANES), aligned(1), may_alias));

static void quantise(const Matrix *matrix, const value *x, quantum *q, float *s) {
    const int64_t inner = matrix->inner, whole = inner / LANES * LANES;
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
    *s = any ? __builtin_nanf("") : top / 127.f;  // a row with a NaN is NaN, not a guess
    const vf inverse = splat(top > 0.f ? 127.f / top : 0.f);
    for (int64_t k = 0; k < inner; k += LANES) {
        vf v = get(k < whole ? x + k : rest) * inverse;
        vi bits = (vi)(v + 12582912.f) - 0x4b400000;  // 1.5 * 2^23: rounded, ties to even
        vq found = __builtin_convertvector(bits + (KIND == BYTES ? 128 : 0), vq);
        if (k < whole) *(vq_at *)(q + k) = found;
        else memcpy(q + k, &found, (inner - whole) * sizeof(quantum));
    }
    for (int64_t k = inner; k < matrix->padded; k++) q[k] = 0;  // those weights are zero
}
#endif

// ---- four bytes of each of LANES outputs, times the same of a row ----

#if KIND == BYTES
typedef vi sum, some;
INLINE some widen(const weight *p) { return *(const vi_at *)p; }
INLINE some spread(int32_t of_row) { return (vi){0} + of_row; }
INLINE sum dot(sum s, some q, some w) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)s, (__m512i)q, (__m512i)w);
#else
    typedef uint8_t vq4 __attribute__((vector_size(4 * LANES)));
    typedef int8_t vw4 __attribute__((vector_size(4 * LANES)));
    const vq4 a = (vq4)q;
    const vw4 b = (vw4)w;
    for (int i = 0; i < 4 * LANES; i++) s[i / 4] += (int32_t)a[i] * b[i];
    return s;
#endif
}
#elif KIND == WORDS
typedef vi sum, some;
INLINE some widen(const weight *p) { return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE some spread(int32_t of_row) { return (vi){0} + of_row; }
INLINE sum dot(sum s, some q, some w) { return s + (vi)_mm256_madd_epi16((__m256i)q, (__m256i)w); }
#elif KIND == PAIRS && defined __AVX512BF16__
typedef vf sum, some;
INLINE some widen(const weight *p) { return *(const vf_at *)p; }
INLINE some spread(int32_t of_row) { return (vf)((vi){0} + of_row); }
INLINE sum dot(sum s, some x, some w) { return (vf)_mm512_dpbf16_ps((__m512)s, (__m512bh)x, (__m512bh)w); }
#elif KIND == PAIRS
typedef vf sum;
typedef struct {
    vf even, odd;
} some;
INLINE some halves(vu pairs) { return (some){(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)}; }
INLINE some widen(const weight *p) { return halves((vu)*(const vi_at *)p); }
INLINE some spread(int32_t of_row) { return halves((vu){0} + (uint32_t)of_row); }
INLINE sum dot(sum s, some x, some w) { return muladd(x.even, w.even, muladd(x.odd, w.odd, s)); }
#else
typedef vf sum, some;
INLINE some widen(const weight *p) { return *(const vf_at *)p; }
INLINE some spread(int32_t of_row) { return (vf)((vi){0} + of_row); }
INLINE sum dot(sum s, some x, some w) { return muladd(x, w, s); }
#endif

// ---- blocks ----

// The sums of a block for one row become its outputs.
INLINE void finish(const Job *job, const Matrix *matrix, int64_t block, int64_t row, const sum *sums) {
    const int pairs = in_pairs(matrix), vectors = pairs ? VECTORS / 2 : VECTORS;
    const int64_t first = block * vectors * LANES;
    vf found[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const int64_t at = block * BLOCK + v * LANES;
        const vf bias = *(const vf_at *)(matrix->bias + at);
#if INTEGERS
        const vf scale = *(const vf_at *)(matrix->scale + at);
        found[v] = __builtin_convertvector(sums[v], vf) * (scale * job->s[row]) + bias;
#else
        found[v] = sums[v] + bias;
#endif
    }
    for (int v = 0; v < vectors; v++) {
        const vf out = activate(matrix, found[v], found[pairs ? v + VECTORS / 2 : v]);
        const int64_t at = first + v * LANES;
        if (job->terms) {
            *(vf_at *)(job->terms + row * job->blocks * vectors * LANES + at) = out;
            continue;
        }
        const int64_t left = matrix->outputs - at;
        value *y = job->y + row * matrix->outputs + at;
        const value *plus = job->plus ? job->plus + row * job->plus_row + at : 0;
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

#if TILES
#ifdef __AMX_TILE__
#define tile_configure(how) _tile_loadconfig(how)
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#if KIND == BYTES
#define tile_dot(c, a, b) _tile_dpbusd(c, a, b)
#else
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)
#endif
#else  // spelt out
static _Thread_local struct {
    int rows;
    char of[8][16][64];
} spelt;
static void tile_configure(const void *how) { spelt.rows = ((const uint8_t *)how)[48]; }
static void tile_release(void) {}
static void tile_zero(int t) { memset(spelt.of[t], 0, sizeof spelt.of[t]); }
static void tile_load(int t, const void *from, int64_t stride) {
    for (int r = 0; r < (t < 6 ? spelt.rows : 16); r++) memcpy(spelt.of[t][r], (const char *)from + r * stride, 64);
}
static void tile_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < spelt.rows; r++) memcpy((char *)to + r * stride, spelt.of[t][r], 64);
}
static void tile_dot(int c, int a, int b) {
    for (int r = 0; r < spelt.rows; r++) {
        sum s;
        memcpy(&s, spelt.of[c][r], 64);
        for (int k = 0; k < 16; k++) {
            int32_t together;
            memcpy(&together, spelt.of[a][r] + 4 * k, 4);
            s = dot(s, spread(together), widen((const weight *)spelt.of[b][k]));
        }
        memcpy(spelt.of[c][r], &s, 64);
    }
}
#endif

// Tiles 0 to 3 are sums, [row][output]: of 16 rows with two vectors, of 16 more with the same. 4 and 5 are rows of x,
// `count` of them, 6 and 7 weights.
static void begin_tiles(int64_t count) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } how = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        how.bytes[t] = 64;
        how.rows[t] = t < 6 ? count : 16;
    }
    tile_configure(&how);
}

// One block for HIGH rows, or with `twice` for as many again; of fewer, `count`.
INLINE void tiles(const Job *job, const Matrix *matrix, int64_t block, int64_t row, int64_t count, const int twice) {
    const int64_t of_x = job->q_row * sizeof(quantum), of_w = BLOCK * STEP * sizeof(weight), across = sizeof(sum) * VECTORS;
    sum sums[ROWS][VECTORS];
    for (int v = 0; v < VECTORS; v += 2) {
        const weight *w = matrix->weights + block * BLOCK * matrix->padded + v * LANES * STEP;
        const quantum *q = job->q + row * job->q_row;
        tile_zero(0);
        tile_zero(1);
        if (twice) tile_zero(2);
        if (twice) tile_zero(3);
        for (int64_t k = 0; k < matrix->padded; k += DEEP, q += DEEP, w += BLOCK * DEEP) {
            tile_load(4, q, of_x);
            tile_load(6, w, of_w);
            tile_load(7, w + LANES * STEP, of_w);
            tile_dot(0, 4, 6);
            tile_dot(1, 4, 7);
            if (twice) {
                tile_load(5, q + HIGH * job->q_row, of_x);
                tile_dot(2, 5, 6);
                tile_dot(3, 5, 7);
            }
        }
        tile_store(0, &sums[0][v], across);
        tile_store(1, &sums[0][v + 1], across);
        if (twice) tile_store(2, &sums[HIGH][v], across);
        if (twice) tile_store(3, &sums[HIGH][v + 1], across);
    }
    for (int64_t r = 0; r < count; r++) {
#if INTEGERS
        for (int v = 0; v < VECTORS; v++) sums[r][v] += *(const vi_at *)(matrix->offset + block * BLOCK + v * LANES);
#endif
        finish(job, matrix, block, row + r, sums[r]);
    }
}

static void all_rows(const Job *job, const Matrix *matrix, int64_t block, int64_t row, int64_t end) {
    const int64_t count = end - row < HIGH ? end - row : HIGH;
    for (; row + ROWS <= end; row += ROWS) tiles(job, matrix, block, row, ROWS, 1);
    // The last rows are multiplied once more with those before them, which changes nothing of these.
    for (; row < end; row += HIGH) tiles(job, matrix, block, row + count <= end ? row : end - count, count, 0);
}
#else
// Adds `deep` columns of a block to the sums of `count` rows, which is a constant wherever this is called. In each step
// `lines` of what is read later are asked for.
INLINE void some_rows(const weight *w, const quantum *q, int64_t q_row, int64_t deep, sum (*of_rows)[VECTORS],
                      const int count, const char *ahead, const int64_t lines) {
    sum sums[ROWS][VECTORS];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = of_rows[r][v];
    for (int64_t k = 0; k < deep; k += STEP, w += BLOCK * STEP) {
        some part[VECTORS];
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(ahead + i * LINE, 0, 2);
        ahead += lines * LINE;
        for (int v = 0; v < VECTORS; v++) part[v] = widen(w + v * LANES * STEP);
        for (int r = 0; r < count; r++) {
            int32_t together;
            memcpy(&together, q + r * q_row + k, 4);
            const some each = spread(together);
            for (int v = 0; v < VECTORS; v++) sums[r][v] = dot(sums[r][v], each, part[v]);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) of_rows[r][v] = sums[r][v];
}

INLINE void begin_sums(const Matrix *matrix, int64_t block, sum (*sums)[VECTORS], int64_t rows) {
    for (int v = 0; v < VECTORS; v++) {
#if INTEGERS
        const sum first = *(const vi_at *)(matrix->offset + block * BLOCK + v * LANES);
#else
        const sum first = {0};
#endif
        for (int64_t r = 0; r < rows; r++) sums[r][v] = first;
    }
}

// One block for at most FEW rows: its weights come CHUNK bytes at a time, which stay in the nearest cache while all
// tiles are multiplied with them; these share in asking for the next ones, so that memory never waits for the sums. One
// tile reads its weights once anyway, and asks for those AHEAD, as the processor does that anew in each page only.
static void few_rows(const Job *job, const Matrix *matrix, int64_t block, int64_t row, int64_t rows) {
    const weight *w = matrix->weights + block * BLOCK * matrix->padded;
    const int64_t tiles = (rows + ROWS - 1) / ROWS, lines = (LINES + tiles - 1) / tiles;
    const int64_t chunk = tiles > 1 ? CHUNK / (BLOCK * (int64_t)sizeof(weight)) : matrix->padded;
    sum sums[FEW][VECTORS];
    begin_sums(matrix, block, sums, rows);
    for (int64_t k = 0; k < matrix->padded; k += chunk, w += BLOCK * chunk) {
        const int64_t deep = matrix->padded - k < chunk ? matrix->padded - k : chunk;
        const char *ahead = (const char *)w + (tiles > 1 ? CHUNK : AHEAD);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = rows * t / tiles, asked = t * lines < LINES ? lines : 0;
            const quantum *q = job->q + (row + r) * job->q_row + k;
#define SOME(count, lines) some_rows(w, q, job->q_row, deep, sums + r, count, ahead, lines)
#define CASE(count) case count: if (tiles > 1) SOME(count, asked); else SOME(count, LINES); break
            switch (rows * (t + 1) / tiles - r) {
                CASE(1);
                CASE(2);
                CASE(3);
                CASE(4);
#if ROWS > 4
                CASE(5);
                CASE(6);
#endif
            }
#undef CASE
#undef SOME
            ahead += asked * LINE * (deep / STEP);
        }
    }
    for (int64_t r = 0; r < rows; r++) finish(job, matrix, block, row + r, sums[r]);
}

static void all_rows(const Job *job, const Matrix *matrix, int64_t block, int64_t row, int64_t end) {
    const weight *w = matrix->weights + block * BLOCK * matrix->padded;
    const int many = end - row > FEW;
    for (; many && end - row >= ROWS; row += ROWS) {
        sum sums[ROWS][VECTORS];
        begin_sums(matrix, block, sums, ROWS);
        some_rows(w, job->q + row * job->q_row, job->q_row, matrix->padded, sums, ROWS, 0, 0);
        for (int64_t r = 0; r < ROWS; r++) finish(job, matrix, block, row + r, sums[r]);
    }
    if (row < end) few_rows(job, matrix, block, row, end - row);
}
#endif

// The first row of a piece: without experts pieces are of whole tiles, as many as each other but for one, and the last
// has what is left.
INLINE int64_t begin_of(const Job *job, int64_t piece) {
    if (job->begins) return job->begins[piece];
    return piece < job->pieces ? job->rows / ROWS * piece / job->pieces * ROWS : job->rows;
}

static void work(void *argument) {
    Job *job = argument;
    const int64_t tasks = job->blocks * job->pieces;
#if TILES
    int64_t high = 0;
#endif
    for (;;) {
        const int64_t first = __atomic_fetch_add(&job->next, job->at_once, __ATOMIC_RELAXED);
        if (first >= tasks) break;
        const int64_t last = first + job->at_once < tasks ? first + job->at_once : tasks;
        for (int64_t task = first; task < last; task++) {
            const int64_t piece = task / job->blocks, row = begin_of(job, piece), end = begin_of(job, piece + 1);
#if TILES
            const int64_t wanted = end - row < HIGH ? end - row : HIGH;
            if (wanted != high) begin_tiles(high = wanted);
#endif
            all_rows(job, job->matrices + (job->experts ? job->experts[piece] : 0), task % job->blocks, row, end);
        }
    }
#if TILES
    if (high) tile_release();
#endif
}

#if INTEGERS
static void work_on_rows(void *argument) {
    Job *job = argument;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&job->next_row, 1, __ATOMIC_RELAXED);
        if (row >= job->rows) return;
        quantise(job->matrices, job->x + row * job->x_row, (quantum *)job->q + row * job->q_row, job->s + row);
    }
}
#endif

// On as many threads as are worth it for this many bytes.
INLINE void run(const Matrix *matrix, void (*what)(void *), void *argument, int64_t bytes, int32_t threads) {
    if (threads > 1 && bytes > SHARE) matrix->parallel(what, argument, threads, 0);
    else what(argument);
}

// Multiplies all rows, which become integers before where weights are. The job's x, y, q, s and pieces are set.
static void multiply(Job *job, int32_t threads) {
    const Matrix *matrix = job->matrices;
    const int64_t of_block = BLOCK * matrix->padded * (int64_t)sizeof(weight);
    job->blocks = blocks_of(matrix);
    if (!job->at_once) job->at_once = SHARE > of_block ? SHARE / of_block : 1;
#if INTEGERS
    if (job->x) run(matrix, work_on_rows, job, job->rows * matrix->inner, threads);
#endif
    run(matrix, work, job, job->blocks * job->pieces > job->at_once ? INT64_MAX : 0, threads);
}

// `room`, of integers: for the rows as they are multiplied, [rows][padded], and after them their scales.
void NAME(const Matrix *matrix, const void *x, int64_t x_row, const void *plus, int64_t plus_row, void *y, int64_t rows,
          void *room, int32_t threads) {
    if (!rows) return;
    Job job = {.matrices = matrix, .x = x, .x_row = x_row, .plus = plus, .plus_row = plus_row, .y = y, .rows = rows};
    const int64_t blocks = blocks_of(matrix);
    const int64_t most = rows / ROWS, wanted = threads > 1 ? (TASKS * threads + blocks - 1) / blocks : 1;
    job.pieces = wanted < most ? wanted : most > 1 ? most : 1;
    if (job.pieces > 1) job.at_once = 1;
#if INTEGERS
    job.q = room;
    job.q_row = matrix->padded;
    job.s = (float *)((char *)room + (rows * matrix->padded * (int64_t)sizeof(quantum) + 63) / 64 * 64);
#else
    (void)room;
    job.q = x;
    job.q_row = x_row;
#endif
    multiply(&job, threads);
}

// ---- experts ----

typedef struct {
    Job up, down;  // their rows are pairs of a token and an expert, by expert and then by token
    const value *x, *plus;
    value *y;
    const int32_t *rows;   // [tokens][each]: a pair's row in both products
    const float *weights;  // [tokens][each]
    int64_t x_row, plus_row, tokens, each, next, next_sum;
} Mixture;

// Tokens become rows of the first product.
static void gather(void *argument) {
    Mixture *all = argument;
    Job *job = &all->up;
    const size_t bytes = job->q_row * sizeof(quantum);
    for (;;) {
        const int64_t token = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        if (token >= all->tokens) return;
        const value *x = all->x + token * all->x_row;
        const int32_t *rows = all->rows + token * all->each;
        const quantum *from = (const quantum *)x;
#if INTEGERS
        quantise(job->matrices, x, (quantum *)job->q + rows[0] * job->q_row, job->s + rows[0]);
        from = job->q + rows[0] * job->q_row;
        for (int64_t i = 1; i < all->each; i++) job->s[rows[i]] = job->s[rows[0]];
#endif
        for (int64_t i = INTEGERS; i < all->each; i++) memcpy((quantum *)job->q + rows[i] * job->q_row, from, bytes);
    }
}

static void sum_terms(void *argument) {
    Mixture *all = argument;
    const int64_t outputs = all->down.matrices->outputs, across = all->down.blocks * BLOCK;
    for (;;) {
        const int64_t token = __atomic_fetch_add(&all->next_sum, 1, __ATOMIC_RELAXED);
        if (token >= all->tokens) return;
        for (int64_t at = 0; at < outputs; at += LANES) {
            const int64_t size = (outputs - at < LANES ? outputs - at : LANES) * sizeof(value);
            value rest[LANES] = {0};
            vf out = {0};
            for (int64_t i = token * all->each; i < (token + 1) * all->each; i++)
                out = muladd(splat(all->weights[i]), *(const vf_at *)(all->down.terms + all->rows[i] * across + at), out);
            if (all->plus) {
                memcpy(rest, all->plus + token * all->plus_row + at, size);
                out += get(rest);
            }
            put(rest, out);
            memcpy(all->y + token * outputs + at, rest, size);
        }
    }
}

#define JOINED(a, b) a##b
#define EXPERTS(name) JOINED(experts_, name)
enum { OUTSIDE = 1, NO_MEMORY };  // failures; mirrored by experts.py

// `chosen` and `weights`: [tokens][each]. `failed` becomes OUTSIDE where a chosen expert is none of `experts`.
void EXPERTS(NAME)(const Matrix *up, const Matrix *down, int64_t experts, const void *x, int64_t x_row,
                   const int32_t *chosen, const float *weights, int64_t each, const void *plus, int64_t plus_row, void *y,
                   int64_t tokens, int32_t threads, int32_t *failed) {
    const int64_t pairs = tokens * each, inner = down->inner, across = blocks_of(down) * BLOCK;
    if (!pairs) return;
    enum { X, X_SCALES, INNER, Q, Q_SCALES, TERMS, ROW, BEGINS, ACTIVE, NEXT, PARTS };
    const int64_t sizes[PARTS] = {
        [X] = pairs * up->padded * (int64_t)sizeof(quantum),
        [X_SCALES] = INTEGERS * pairs * 4,
        [INNER] = pairs * inner * (int64_t)sizeof(value),
        [Q] = INTEGERS * pairs * down->padded * (int64_t)sizeof(quantum),
        [Q_SCALES] = INTEGERS * pairs * 4,
        [TERMS] = pairs * across * 4,
        [ROW] = pairs * 4,
        [BEGINS] = (experts + 1) * 8,
        [ACTIVE] = experts * 4,
        [NEXT] = experts * 4,
    };
    int64_t bytes = 64, at = 0;
    void *parts[PARTS];
    for (int i = 0; i < PARTS; i++) bytes += (sizes[i] + 63) / 64 * 64;
    char *room = malloc(bytes);
    if (!room) {
        *failed = NO_MEMORY;
        return;
    }
    for (int i = 0; i < PARTS; at += (sizes[i++] + 63) / 64 * 64) parts[i] = (char *)(((uintptr_t)room + 63) / 64 * 64) + at;

    int32_t *rows = parts[ROW], *active = parts[ACTIVE], *next = parts[NEXT];
    int64_t *begins = parts[BEGINS], pieces = 0, row = 0;
    memset(next, 0, sizes[NEXT]);
    for (int64_t i = 0; i < pairs; i++) {
        if (chosen[i] >= 0 && chosen[i] < experts) next[chosen[i]]++;
        else *failed = OUTSIDE;
    }
    if (*failed) {
        free(room);
        return;
    }
    for (int32_t e = 0; e < experts; e++) {
        const int32_t count = next[e];
        next[e] = row;
        if (!count) continue;
        active[pieces] = e;
        begins[pieces++] = row;
        row += count;
    }
    begins[pieces] = pairs;
    for (int64_t i = 0; i < pairs; i++) rows[i] = next[chosen[i]]++;

    const Job first = {.experts = active, .begins = begins, .pieces = pieces, .rows = pairs};
    Mixture all = {.up = first, .down = first, .x = x, .plus = plus, .y = y, .rows = rows, .weights = weights,
                   .x_row = x_row, .plus_row = plus_row, .tokens = tokens, .each = each};
    all.up.matrices = up;
    all.up.q = parts[X];
    all.up.q_row = up->padded;
    all.up.s = parts[X_SCALES];
    all.up.y = parts[INNER];
    all.down.matrices = down;
    all.down.x = parts[INNER];
    all.down.x_row = inner;
    all.down.q = parts[INTEGERS ? Q : INNER];
    all.down.q_row = INTEGERS ? down->padded : inner;
    all.down.s = parts[Q_SCALES];
    all.down.terms = parts[TERMS];
    run(up, gather, &all, sizes[X], threads);
    multiply(&all.up, threads);
    multiply(&all.down, threads);
    run(up, sum_terms, &all, sizes[TERMS], threads);
    free(room);
}
#endif
