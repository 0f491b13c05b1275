// Keys and values at rest -> bytes and bf16 numbers, laid out for the products.
#pragma once
#include "rows.h"

typedef struct { __m512i low, high, shifts, order; } Table;  // bytes of the levels in bf16

static int64_t wide(const Packed *p, int64_t dim) { return dim * (p->bits == 3 ? 2 : p->bits) / 8; }

static int64_t narrow(const Packed *p, int64_t dim) { return p->bits == 3 ? dim / 8 : 0; }

// What multiplies the levels of a block's tokens; 0 behind the n-th.
static void gains_of(const Packed *p, int64_t n, float *gain) {
  const uint16_t *halves = p->norms;
  const uint8_t *bytes = p->norms;
  for (int64_t i = 0; i < BLOCK; i += 16) {
    const __mmask16 here = n - i >= 16 ? 0xffff : n <= i ? 0 : (1 << (n - i)) - 1;
    __m512 y;
    if (!p->norm_bytes) {
      y = _mm512_maskz_mov_ps(here, _mm512_set1_ps(1));
    } else if (p->norm_bytes == 2) {
      y = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(here, halves + i));
      y = _mm512_mul_ps(y, _mm512_set1_ps(p->unit[0]));
    } else {  // a code c stands for unit[0] 2^((c - 255) unit[1]), but 0 for 0
      const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, bytes + i));
      const __mmask16 some = _mm512_test_epi32_mask(code, code);
      y = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(255)));
      y = exp2_ps(_mm512_mul_ps(y, _mm512_set1_ps(p->unit[1])));
      y = _mm512_maskz_mul_ps(some, y, _mm512_set1_ps(p->unit[0]));
    }
    _mm512_storeu_ps(gain + i, y);
  }
}

// 16 tokens of 64 bytes -> [4 bytes][token] dwords, with a bias on each byte.
static void transpose(const void *from, int64_t stride, int bias, void *to) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++)
    r[i] = _mm512_xor_si512(_mm512_loadu_si512((const char *)from + i * stride),
                            _mm512_set1_epi8((char)bias));
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    _mm512_store_si512((char *)to + 64 * j, _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88));
    _mm512_store_si512((char *)to + 64 * (j + 8), _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd));
  }
}

// Values are interleaved in two steps, keys in one, each of which reorders inside 128-bit lanes.
static Table make_table(const Packed *p, int steps) {
  const int64_t bits = p->bits;
  uint8_t low[64] ALIGNED, high[64] ALIGNED, shifts[64] ALIGNED, order[64] ALIGNED;
  for (int i = 0; i < 64; i++) {
    uint32_t word = 0;
    const int own = i & ((1 << bits) - 1);  // bits above a code's own do not matter
    if (p->levels) memcpy(&word, p->levels + own, 4);
    low[i] = word >> 16 & 255;
    high[i] = word >> 24;
    const int j = i % 8;  // of eight codes in 64 bits; with 3 bits, two words of 12 in 16 bits each
    shifts[i] = bits == 3 ? 16 * (j / 4) + 3 * (j % 4) : bits * j;
    order[i] = steps == 2 ? 16 * (i / 4 % 4) + 4 * (i / 16) + i % 4
                          : 32 * (i / 8 % 2) + 8 * (i / 16) + i % 8;
  }
  return (Table){_mm512_load_si512(low), _mm512_load_si512(high), _mm512_load_si512(shifts),
                 _mm512_load_si512(order)};
}

// 64 codes of one token from channel 64 * c on, eight in the low bits of each 64.
static __m512i fields(const uint8_t *words, const uint8_t *tops, int64_t dim, int64_t bits, int c) {
  if (bits == 4) return _mm512_cvtepu32_epi64(_mm256_loadu_si256((const void *)(words + 32 * c)));
  if (bits == 2) return _mm512_cvtepu16_epi64(_mm_loadu_si128((const void *)(words + 16 * c)));
  if (bits == 1) return _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)(words + 8 * c)));
  uint64_t top[2];
  for (int i = 0; i < 2; i++) {  // word j shares a byte of tops with word j + dim / 8
    const int64_t word = 16 * c + 8 * i, upper = word >= dim / 8;
    memcpy(top + i, tops + word - upper * (dim / 8), 8);
    top[i] = top[i] >> 4 * upper & 0x0f0f0f0f0f0f0f0f;
  }
  const __m256i high = _mm256_cvtepu8_epi16(_mm_set_epi64x(top[1], top[0]));
  const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(words + 16 * c)));
  return _mm512_cvtepu32_epi64(_mm256_or_si256(low, _mm256_slli_epi16(high, 8)));
}

// Their levels: low bytes of bf16, and high ones.
static void look_up(const Packed *p, int64_t dim, int64_t token, int c, const Table *table,
                    __m512i *low, __m512i *high) {
  __m512i code = fields(p->words + token * wide(p, dim), p->tops + token * narrow(p, dim), dim,
                        p->bits, c);
  code = _mm512_multishift_epi64_epi8(table->shifts, code);
  code = _mm512_permutexvar_epi8(table->order, code);
  *low = _mm512_permutexvar_epi8(code, table->low);
  *high = _mm512_permutexvar_epi8(code, table->high);
}

// Values of a block in bf16 as they are -> [pair of tokens][channel][2].
static void interleave(const uint16_t *values, int64_t dim, uint16_t *to) {
  uint16_t order[2][32] ALIGNED;
  for (int i = 0; i < 64; i++) order[i / 32][i % 32] = i / 2 + i % 2 * 32;
  for (int64_t pair = 0; pair < BLOCK / 2; pair++)
    for (int64_t d = 0; d < dim; d += 32) {
      const uint16_t *from = values + 2 * pair * dim + d;
      const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + dim);
      uint16_t *o = to + (pair * dim + d) * 2;
      for (int i = 0; i < 2; i++)
        _mm512_store_si512(o + 32 * i,
                           _mm512_permutex2var_epi16(a, _mm512_load_si512(order[i]), b));
    }
}

// Packed values of a block -> levels in bf16, [pair of tokens][channel][2].
static void unpack_values(const Packed *p, int64_t dim, const Table *table, uint16_t *to) {
  if (p->bits == 16) {
    interleave((const uint16_t *)p->words, dim, to);
    return;
  }
  for (int c = 0; c < dim / 64; c++)
    for (int pair = 0; pair < BLOCK / 2; pair++) {
      __m512i part[2][2], low, high;
      for (int i = 0; i < 2; i++) {
        look_up(p, dim, 2 * pair + i, c, table, &low, &high);
        part[i][0] = _mm512_unpacklo_epi8(low, high);
        part[i][1] = _mm512_unpackhi_epi8(low, high);
      }
      uint16_t *o = to + (pair * dim + 64 * c) * 2;
      for (int i = 0; i < 2; i++) {
        _mm512_store_si512(o + 64 * i, _mm512_unpacklo_epi16(part[0][i], part[1][i]));
        _mm512_store_si512(o + 64 * i + 32, _mm512_unpackhi_epi16(part[0][i], part[1][i]));
      }
    }
}

// Packed keys of a block -> levels in bf16, [16 tokens][pair of channels][token][2].
static void unpack_keys(const Packed *p, int64_t dim, const Table *table, uint16_t *to) {
  uint16_t half[2][16][32] ALIGNED;
  __m512i low, high;
  for (int64_t d = 0; p->bits == 16 && d < VECTORS * dim; d += 32)  // bf16 as it is
    transpose(p->words + 32 * (d / dim) * dim + 2 * (d % dim), 2 * dim, 0, to + 16 * d);
  if (p->bits == 16) return;
  for (int i = 0; i < VECTORS; i++)
    for (int c = 0; c < dim / 64; c++) {
      for (int t = 0; t < 16; t++) {
        look_up(p, dim, 16 * i + t, c, table, &low, &high);
        _mm512_store_si512(half[0][t], _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(half[1][t], _mm512_unpackhi_epi8(low, high));
      }
      for (int j = 0; j < 2; j++)
        transpose(half[j], sizeof half[j][0], 0, to + 16 * i * dim + 1024 * c + 512 * j);
    }
}
