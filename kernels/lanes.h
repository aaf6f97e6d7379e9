// Vectors of LANES float32 values, and values in memory: float32 where WIDE is set, else bfloat16.
//
// Included by the kernels that compute in float32 and round once: layer_c.c, linear_state_c.c, product_c.c.

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if WIDE
typedef float value;
#else
typedef uint16_t value;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vf splat(float x) { return (vf){0} + x; }
INLINE vf muladd(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
INLINE vf either(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

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
#elif defined __AVX512BF16__
    *(vh_at *)p = (vh)_mm512_cvtneps_pbh((__m512)x);  // what is below 1e-38 becomes 0
#else
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    vi real = x == x;
    bits = (bits & (vu)real) | (~(vu)real & 0x7fc0);
    *(vh_at *)p = __builtin_convertvector(bits, vh);
#endif
}
