// The products in tiles of 16 rows (see products.h).
#pragma once
#include "task.h"

#define EACH_TILE(M) M(0) M(1) M(2) M(3)
#define WRITTEN __asm__ volatile("" ::: "memory")  // GCC 12 does not know that tiles read memory

static void open_tiles(void) {
  const struct { uint8_t palette, row, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } eight = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  WRITTEN;
  _tile_loadconfig(&eight);
}

static void close_tiles(void) { _tile_release(); }

static void multiply_keys(int64_t n, const int8_t *digit, const int32_t *bias, const uint8_t *keys,
                          int64_t dim, int digits, float to[TILE][BLOCK]) {
  int32_t product[TILE][BLOCK] ALIGNED;
  WRITTEN;
#define ZERO(i) _tile_zero(i);
#define DOT(i) _tile_loadd(5, keys + i * 16 * dim + 16 * d, 64); _tile_dpbssd(i, 4, 5);
#define PRODUCTS(i) _tile_stored(i, product[0] + 16 * i, sizeof product[0]);
  float share = 256;
  for (int j = 0; j < digits; j++, share /= 256) {
    EACH_TILE(ZERO)
    for (int64_t d = 0; d < dim; d += 64) {
      _tile_loadd(4, digit + j * dim + d, digits * dim);
      EACH_TILE(DOT)
    }
    EACH_TILE(PRODUCTS)
    for (float *at = to[0]; at < to[TILE]; at += 16) {
      const __m512 x = _mm512_cvtepi32_ps(_mm512_load_si512(product[0] + (at - to[0])));
      const __m512 before = j ? _mm512_load_ps(at) : _mm512_setzero_ps();
      _mm512_store_ps(at, _mm512_fmadd_ps(x, _mm512_set1_ps(share), before));
    }
  }
}

static void multiply_bf16(int64_t n, int terms, const uint16_t *const *row, int64_t stride,
                          const uint16_t *const *keys, int64_t dim, float to[TILE][BLOCK]) {
#define DOT_KEYS(i) _tile_loadd(5, keys[j] + 16 * (i * dim + d), 64); _tile_dpbf16ps(i, 4, 5);
  WRITTEN;
  EACH_TILE(ZERO)
  for (int j = 0; j < terms; j++)
    for (int64_t d = 0; d < dim; d += 32) {
      _tile_loadd(4, row[j] + d, 2 * stride);
      EACH_TILE(DOT_KEYS)
    }
#define FLOATS(i) _tile_stored(i, to[0] + 16 * i, sizeof to[0]);
  EACH_TILE(FLOATS)
}

static void multiply_values(int64_t n, const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
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
