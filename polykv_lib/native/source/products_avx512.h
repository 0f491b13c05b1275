// The products six rows at a time (see products.h).
#pragma once
#include "task.h"

static void open_tiles(void) {}

static void close_tiles(void) {}

// Rows and vectors by name, so that every accumulator is a register.
#define EACH_VECTOR(M, r) M(r, 0) M(r, 1) M(r, 2) M(r, 3)
#define EACH(M) EACH_VECTOR(M, 0) EACH_VECTOR(M, 1) EACH_VECTOR(M, 2) \
                EACH_VECTOR(M, 3) EACH_VECTOR(M, 4) EACH_VECTOR(M, 5)

static void multiply_keys(const int8_t *digit, const int32_t *bias, const uint8_t *keys,
                          int64_t dim, int32_t to[TILE][BLOCK]) {
#define BIAS(r, i) __m512i x##r##i = _mm512_set1_epi32(-bias[r]);
#define KEYS(r, i) const __m512i k##i = _mm512_load_si512(keys + i * 16 * dim + 64 * d);
// In assembler because GCC 12 spills accumulators around the intrinsic.
#define DOT(r, i) __asm__("vpdpbusd %2, %1, %0" : "+v"(x##r##i) : "v"(k##i), "v"(q##r));
#define DIGITS(r) memcpy(&four, digit + r * dim + 4 * d, 4); \
    const __m512i q##r = _mm512_set1_epi32(four); EACH_VECTOR(DOT, r)
#define PRODUCTS(r, i) _mm512_store_si512(to[r] + 16 * i, x##r##i);
  int32_t four;
  EACH(BIAS)
  for (int64_t d = 0; d < dim / 4; d++) {
    EACH_VECTOR(KEYS, 0)
    DIGITS(0) DIGITS(1) DIGITS(2) DIGITS(3) DIGITS(4) DIGITS(5)
  }
  EACH(PRODUCTS)
}

#define DOT_BF16(r, i) x##r##i = _mm512_dpbf16_ps(x##r##i, p##r, v##i);

static void multiply_bf16(int n, const uint16_t *const *rows, int64_t stride,
                          const uint16_t *const *keys, int64_t dim, int32_t to[TILE][BLOCK]) {
#define ZERO(r, i) __m512 x##r##i = _mm512_setzero_ps();
#define PACKED_KEYS(r, i) const __m512bh v##i = \
    (__m512bh)_mm512_load_si512(keys[j] + 16 * (i * dim + d));
#define PAIRS(r) memcpy(&two, rows[j] + r * stride + d, 4); \
    const __m512bh p##r = (__m512bh)_mm512_set1_epi32(two); EACH_VECTOR(DOT_BF16, r)
#define FLOATS(r, i) _mm512_store_ps(to[r] + 16 * i, x##r##i);
  int32_t two;
  EACH(ZERO)
  for (int j = 0; j < n; j++)
    for (int64_t d = 0; d < dim; d += 2) {
      EACH_VECTOR(PACKED_KEYS, 0)
      PAIRS(0) PAIRS(1) PAIRS(2) PAIRS(3) PAIRS(4) PAIRS(5)
    }
  EACH(FLOATS)
}

static void multiply_values(const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
                            const float *shrink, const uint16_t *values, int64_t dim, float *sum) {
#define SUM(r, i) __m512 x##r##i = \
    _mm512_mul_ps(_mm512_load_ps(sum + r * dim + 16 * i), _mm512_set1_ps(shrink[r]));
#define VALUES(r, i) const __m512bh v##i = \
    (__m512bh)_mm512_load_si512(values + 2 * (t * dim + 16 * i));
#define WEIGHTS(r) memcpy(&two, weight[term][r] + 2 * t, 4); \
    const __m512bh p##r = (__m512bh)_mm512_set1_epi32(two); EACH_VECTOR(DOT_BF16, r)
#define SUMS(r, i) _mm512_store_ps(sum + r * dim + 16 * i, x##r##i);
  int32_t two;
  EACH(SUM)
  for (int term = 0; term < terms; term++)
    for (int t = 0; t < BLOCK / 2; t++) {
      EACH_VECTOR(VALUES, 0)
      WEIGHTS(0) WEIGHTS(1) WEIGHTS(2) WEIGHTS(3) WEIGHTS(4) WEIGHTS(5)
    }
  EACH(SUMS)
}
