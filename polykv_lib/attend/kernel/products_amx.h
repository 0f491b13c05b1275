// The products in tiles of 16 rows (see products.h).
#pragma once
#include "rows.h"

#define EACH_TILE(M) M(0) M(1) M(2) M(3)
#define WRITTEN __asm__ volatile("" ::: "memory")  // GCC 12 does not know that tiles read memory

static void open_tiles(void) {
  const struct { uint8_t palette, row, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } eight = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  WRITTEN;
  _tile_loadconfig(&eight);
}

static void close_tiles(void) { _tile_release(); }

static void multiply_keys(const int8_t *digit, const int32_t *bias, const uint8_t *keys,
                          int64_t dim, int32_t to[TILE][BLOCK]) {
  (void)bias;
  WRITTEN;
#define ZERO(i) _tile_zero(i);
#define DOT(i) _tile_loadd(5, keys + i * 16 * dim + 16 * d, 64); _tile_dpbssd(i, 4, 5);
#define PRODUCTS(i) _tile_stored(i, to[0] + 16 * i, sizeof to[0]);
  EACH_TILE(ZERO)
  for (int64_t d = 0; d < dim; d += 64) {
    _tile_loadd(4, digit + d, dim);
    EACH_TILE(DOT)
  }
  EACH_TILE(PRODUCTS)
}

// Adds rows of bf16 times 64 tokens, [16 tokens][pair of channels][token][2], to tiles 0 to 3.
static void add_products(const uint16_t *x, int64_t stride, const uint16_t *y, int64_t dim) {
#define DOT_KEYS(i) _tile_loadd(5, y + 16 * (i * dim + d), 64); _tile_dpbf16ps(i, 4, 5);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(4, x + d, 2 * stride);
    EACH_TILE(DOT_KEYS)
  }
}

static void multiply_packed(const uint16_t *term, int64_t terms, const uint16_t *keys, int64_t dim,
                            int32_t to[TILE][BLOCK]) {
  WRITTEN;
  EACH_TILE(ZERO)
  for (int64_t i = 0; i < terms; i++) add_products(term + i * dim, terms * dim, keys, dim);
  EACH_TILE(PRODUCTS)
}

static void multiply_waves(const float *wave, int64_t n_rows, const float *turn,
                           const uint16_t *basis, int64_t terms, int64_t dim,
                           int32_t to[TILE][BLOCK]) {
  uint16_t turned[TILE][MAX_DIGITS][MAX_DIM];
  for (int64_t r = 0; r < n_rows; r++)
    for (int64_t j = 0; j < dim / 2; j += 16) {
      const __m512 x = _mm512_loadu_ps(wave + r * dim + j), c = _mm512_loadu_ps(turn + j);
      const __m512 y = _mm512_loadu_ps(wave + r * dim + dim / 2 + j);
      const __m512 s = _mm512_loadu_ps(turn + dim / 2 + j);
      uint16_t *term = turned[r][0] + j;
      split(_mm512_fmadd_ps(x, c, _mm512_mul_ps(y, s)), terms, term, MAX_DIM);
      split(_mm512_fmsub_ps(y, c, _mm512_mul_ps(x, s)), terms, term + dim / 2, MAX_DIM);
    }
  WRITTEN;
  EACH_TILE(ZERO)
  for (int64_t i = 0; i < terms; i++)
    for (int64_t j = 0; i + j < terms; j++)
      add_products(turned[0][i], MAX_DIGITS * MAX_DIM, basis + j * BLOCK * dim, dim);
  EACH_TILE(PRODUCTS)
}

static void multiply_values(const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
                            const float *shrink, const uint16_t *values, int64_t dim, float *sum) {
#define SUM(i) _tile_loadd(i, sum + 16 * i, 4 * dim);
#define DOT_BF16(i) \
    _tile_loadd(5, values + 2 * (t * dim + 16 * i), 4 * dim); _tile_dpbf16ps(i, 4, 5);
#define SUMS(i) _tile_stored(i, sum + 16 * i, 4 * dim);
  for (int r = 0; r < TILE; r++)
    for (int i = 0; shrink[r] != 1 && i < 64; i += 16) {
      float *at = sum + r * dim + i;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(shrink[r])));
    }
  WRITTEN;
  EACH_TILE(SUM)
  for (int term = 0; term < terms; term++)
    for (int t = 0; t < BLOCK / 2; t += 16) {
      _tile_loadd(4, weight[term][0] + 2 * t, sizeof weight[0][0]);
      EACH_TILE(DOT_BF16)
    }
  EACH_TILE(SUMS)
}
