// The products six rows at a time, or three (see products.h).
#pragma once
#include "task.h"

static void open_tiles(void) {}

static void close_tiles(void) {}

// Rows and vectors by name, so that every accumulator is a register; `rows` is a constant.
#define ALWAYS static inline __attribute__((always_inline))
#define EACH_VECTOR(M, r) if (r < rows) { M(r, 0) M(r, 1) M(r, 2) M(r, 3) }
#define EACH_ROW(M) M(0) M(1) M(2) M(3) M(4) M(5)
#define EACH(M) EACH_VECTOR(M, 0) EACH_VECTOR(M, 1) EACH_VECTOR(M, 2) \
                EACH_VECTOR(M, 3) EACH_VECTOR(M, 4) EACH_VECTOR(M, 5)
#define SUMS(type, r) type x##r##0 = {0}, x##r##1 = {0}, x##r##2 = {0}, x##r##3 = {0};
#define INTEGERS(r) SUMS(__m512i, r)
#define FLOATS(r) SUMS(__m512, r)
#define BY_ROWS(f, n, ...) if (n > TILE / 2) f(TILE, __VA_ARGS__); else f(TILE / 2, __VA_ARGS__)

ALWAYS void keys_of(const int rows, const int8_t *digit, const int32_t *bias, const uint8_t *keys,
                    int64_t dim, int digits, float to[TILE][BLOCK]) {
#define KEYS(i) const __m512i k##i = _mm512_load_si512(keys + i * 16 * dim + 64 * d);
// In assembler because GCC 12 spills accumulators around the intrinsic.
#define DOT(r, i) __asm__("vpdpbusd %2, %1, %0" : "+v"(x##r##i) : "v"(k##i), "v"(four));
#define DIGITS(r) if (r < rows) { memcpy(&own, digit + (r * digits + j) * dim + 4 * d, 4); \
    const __m512i four = _mm512_set1_epi32(own); EACH_VECTOR(DOT, r) }
#define UNBIASED(r, i) \
    x##r##i = _mm512_sub_epi32(x##r##i, _mm512_set1_epi32(bias[r * digits + j]));
#define SHIFTED(r, i) x##r##i = _mm512_slli_epi32(x##r##i, 8);
#define STORED(r, i) _mm512_store_ps(to[r] + 16 * i, _mm512_cvtepi32_ps(x##r##i)); \
    x##r##i = _mm512_setzero_si512();
#define ADDED(r, i) _mm512_store_ps(to[r] + 16 * i, _mm512_fmadd_ps( \
    _mm512_cvtepi32_ps(x##r##i), _mm512_set1_ps(1 / 256.f), _mm512_load_ps(to[r] + 16 * i)));
  int32_t own;
  EACH_ROW(INTEGERS)
  for (int j = 0; j < digits; j++) {
    for (int64_t d = 0; d < dim / 4; d++) {
      KEYS(0) KEYS(1) KEYS(2) KEYS(3)
      EACH_ROW(DIGITS)
    }
    EACH(UNBIASED)
    if (j == 0) {
      EACH(SHIFTED)
    } else if (j == 1) {
      EACH(STORED)
    } else {
      EACH(ADDED)
    }
  }
}

static void multiply_keys(int64_t n, const int8_t *digit, const int32_t *bias, const uint8_t *keys,
                          int64_t dim, int digits, float to[TILE][BLOCK]) {
  BY_ROWS(keys_of, n, digit, bias, keys, dim, digits, to);
}

#define DOT_BF16(r, i) x##r##i = _mm512_dpbf16_ps(x##r##i, pair, v##i);

ALWAYS void bf16_of(const int rows, int terms, const uint16_t *const *row, int64_t stride,
                    const uint16_t *const *keys, int64_t dim, float to[TILE][BLOCK]) {
#define PACKED_KEYS(i) const __m512bh v##i = \
    (__m512bh)_mm512_load_si512(keys[j] + 16 * (i * dim + d));
#define PAIRS(r) if (r < rows) { memcpy(&two, row[j] + r * stride + d, 4); \
    const __m512bh pair = (__m512bh)_mm512_set1_epi32(two); EACH_VECTOR(DOT_BF16, r) }
#define STORED_BF16(r, i) _mm512_store_ps(to[r] + 16 * i, x##r##i);
  int32_t two;
  EACH_ROW(FLOATS)
  for (int j = 0; j < terms; j++)
    for (int64_t d = 0; d < dim; d += 2) {
      PACKED_KEYS(0) PACKED_KEYS(1) PACKED_KEYS(2) PACKED_KEYS(3)
      EACH_ROW(PAIRS)
    }
  EACH(STORED_BF16)
}

static void multiply_bf16(int64_t n, int terms, const uint16_t *const *row, int64_t stride,
                          const uint16_t *const *keys, int64_t dim, float to[TILE][BLOCK]) {
  BY_ROWS(bf16_of, n, terms, row, stride, keys, dim, to);
}

ALWAYS void values_of(const int rows, const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
                      const float *shrink, const uint16_t *values, int64_t dim, float *sum) {
#define SUM(r, i) x##r##i = \
    _mm512_mul_ps(_mm512_load_ps(sum + r * dim + 16 * i), _mm512_set1_ps(shrink[r]));
#define VALUES(i) const __m512bh v##i = \
    (__m512bh)_mm512_load_si512(values + 2 * (t * dim + 16 * i));
#define WEIGHTS(r) if (r < rows) { memcpy(&two, weight[term][r] + 2 * t, 4); \
    const __m512bh pair = (__m512bh)_mm512_set1_epi32(two); EACH_VECTOR(DOT_BF16, r) }
#define SUMMED(r, i) _mm512_store_ps(sum + r * dim + 16 * i, x##r##i);
  int32_t two;
  EACH_ROW(FLOATS)
  EACH(SUM)
  for (int term = 0; term < terms; term++)
    for (int t = 0; t < BLOCK / 2; t++) {
      VALUES(0) VALUES(1) VALUES(2) VALUES(3)
      EACH_ROW(WEIGHTS)
    }
  EACH(SUMMED)
}

static void multiply_values(int64_t n, const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
                            const float *shrink, const uint16_t *values, int64_t dim, float *sum) {
  BY_ROWS(values_of, n, weight, terms, shrink, values, dim, sum);
}
