// Attention of query rows over keys and values at rest, with no decoded copy of either.
//
//     s[t]  = q . k[t]                                       k: int8 codes
//     p[t]  = 2 ^ (s[t] - max s)
//     out   = sum_t p[t] gain[t] LEVEL[c[t]] / sum_t p[t]            c: codes of 1 to 4 bits
//     lse   = max s + log2 sum_t p[t]
//
// Blocks of 64 tokens, softmax online (FlashAttention, arXiv:2205.14135). A row of q is a sum of
// int8 digits, q = unit (d0 + d1 / 254 + d2 / 254^2), so that q . k is exact in int32: two digits
// hold 15 bits of it, three 23. Levels are exact in bf16; a weight p * gain is a sum of one or two
// bf16 numbers, of 8 bits each. Sums are int32 and fp32. Loads and stores of q, keys, codes, gains
// and out need no alignment: a pool may be a mapped file.
//
// Both products are made in tiles of 16 rows by AMX, or six rows at a time by VNNI and BF16 of
// AVX-512; the numbers lie in memory alike. -DNO_AMX leaves AMX out.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && !defined(NO_AMX)
#define AMX
#define INSTRUCTIONS "AMX"
enum { TILE = 16, KEY_BIAS = 0 };
#else
#define INSTRUCTIONS "AVX-512"
enum { TILE = 6, KEY_BIAS = 128 };  // VNNI multiplies bytes without a sign by bytes with one
#endif
enum { BLOCK = 64, VECTORS = BLOCK / 16, MAX_DIGITS = 3, MAX_TERMS = 2 };
#define ALIGNED __attribute__((aligned(64)))

typedef struct {
  const float *q;                // [head, row, dim]
  const int8_t *keys;            // [head, token, dim]
  const uint8_t *words, *tops;   // [head, token, bytes]: packed codes; tops: 3 bits only
  const float *gain, *levels;    // of values: [head, token], [2^bits]
  float *out, *lse;              // [head, row, dim], [head, row]
  int64_t heads, rows, tokens, dim, bits;
  int64_t digits, terms, threads;  // 2 or 3; 1 or 2
} Task;

typedef struct { __m512i low, high, shifts, order; } Table;  // bytes of the levels in bf16

typedef struct { float max, total, unit; } Row;

// A span of tokens of one head, attended to but not yet divided by the rows' totals.
typedef struct { Row *row; float *sum; int32_t *bias; int8_t *digit; } Part;

static __m512 exp2_ps(__m512 x) {  // relative error 2e-9 before rounding; 0 below 2^-150
  x = _mm512_max_ps(x, _mm512_set1_ps(-200.f));
  const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(1.5337577e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339986e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6185198e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550329e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022646e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f)), n);
}

static float exp2_one(float x) { return _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(x))); }

// Digits of a row, the row's unit and, for each digit, what the keys' bias adds to products.
static float to_digits(const float *x, int64_t dim, int digits, int8_t *digit, int32_t *bias) {
  __m512 largest = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 16)
    largest = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), largest);
  const float top = _mm512_reduce_max_ps(largest), unit = top > 1e-30f ? top / 127 : 1.f;
  __m512i sum[MAX_DIGITS] = {{0}};
  __m512 nan = _mm512_setzero_ps();  // becomes NaN where x is not finite
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 y = _mm512_loadu_ps(x + d);
    nan = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nan);
    y = _mm512_div_ps(y, _mm512_set1_ps(unit));
    for (int i = 0; i < digits; i++) {
      const __m512i c = _mm512_cvtps_epi32(y);
      _mm_storeu_si128((__m128i *)(digit + i * dim + d), _mm512_cvtepi32_epi8(c));
      sum[i] = _mm512_add_epi32(sum[i], c);
      y = _mm512_mul_ps(_mm512_sub_ps(y, _mm512_cvtepi32_ps(c)), _mm512_set1_ps(254.f));
    }
  }
  for (int i = 0; i < digits; i++) bias[i] = KEY_BIAS * _mm512_reduce_add_epi32(sum[i]);
  return unit + _mm512_reduce_add_ps(nan);
}

// 16 tokens x 64 channels of int8 -> [4 channels][token] dwords of bytes, biased.
static void transpose(const int8_t *from, int64_t dim, uint8_t *to) {
  __m512i r[16], t[16];
  const __m512i bias = _mm512_set1_epi8((char)KEY_BIAS);
  for (int i = 0; i < 16; i++) r[i] = _mm512_xor_si512(_mm512_loadu_si512(from + i * dim), bias);
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
    _mm512_store_si512(to + 64 * j, _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88));
    _mm512_store_si512(to + 64 * (j + 8), _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd));
  }
}

static Table make_table(const float *levels, int64_t bits) {
  uint8_t low[64] ALIGNED, high[64] ALIGNED, shifts[64] ALIGNED, order[64] ALIGNED;
  for (int i = 0; i < 64; i++) {
    uint32_t word;
    memcpy(&word, levels + (i & ((1 << bits) - 1)), 4);  // bits above a code's own do not matter
    low[i] = word >> 16 & 255;
    high[i] = word >> 24;
    const int j = i % 8;  // of eight codes in 64 bits; with 3 bits, two words of 12 in 16 bits each
    shifts[i] = bits == 3 ? 16 * (j / 4) + 3 * (j % 4) : bits * j;
    order[i] = 16 * (i / 4 % 4) + 4 * (i / 16) + i % 4;  // undone by the unpacking of 128-bit lanes
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

// Packed codes of a block -> levels in bf16, [pair of tokens][channel][2].
static void unpack(const uint8_t *words, const uint8_t *tops, const Task *a, const Table *table,
                   uint16_t *to) {
  const int64_t wide = a->dim * (a->bits == 3 ? 2 : a->bits) / 8, narrow = a->dim / 8;
  for (int c = 0; c < a->dim / 64; c++)
    for (int pair = 0; pair < BLOCK / 2; pair++) {
      __m512i part[2][2];
      for (int i = 0; i < 2; i++) {
        const int t = 2 * pair + i;
        __m512i code = fields(words + t * wide, tops + t * narrow, a->dim, a->bits, c);
        code = _mm512_multishift_epi64_epi8(table->shifts, code);
        code = _mm512_permutexvar_epi8(table->order, code);
        const __m512i low = _mm512_permutexvar_epi8(code, table->low);
        const __m512i high = _mm512_permutexvar_epi8(code, table->high);
        part[i][0] = _mm512_unpacklo_epi8(low, high);
        part[i][1] = _mm512_unpackhi_epi8(low, high);
      }
      uint16_t *o = to + (pair * a->dim + 64 * c) * 2;
      for (int i = 0; i < 2; i++) {
        _mm512_store_si512(o + 64 * i, _mm512_unpacklo_epi16(part[0][i], part[1][i]));
        _mm512_store_si512(o + 64 * i + 32, _mm512_unpackhi_epi16(part[0][i], part[1][i]));
      }
    }
}

// Two steps, each with AMX and without:
//
// multiply_keys: products of TILE digit rows with a block's keys, less the bias.
// multiply_values: sum = sum * shrink + weights times levels, for TILE rows and 64 channels.

#ifdef AMX
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

#else
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

static void multiply_values(const uint16_t weight[MAX_TERMS][TILE][BLOCK], int terms,
                            const float *shrink, const uint16_t *values, int64_t dim, float *sum) {
#define SUM(r, i) __m512 x##r##i = \
    _mm512_mul_ps(_mm512_load_ps(sum + r * dim + 16 * i), _mm512_set1_ps(shrink[r]));
#define VALUES(r, i) const __m512bh v##i = \
    (__m512bh)_mm512_load_si512(values + 2 * (t * dim + 16 * i));
#define DOT_BF16(r, i) x##r##i = _mm512_dpbf16_ps(x##r##i, p##r, v##i);
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
#endif

// A row's products with a block of n tokens -> its weights; returns what earlier sums shrink by.
static inline __attribute__((always_inline)) float weigh(  // faster where digits are constants
    const int32_t product[][BLOCK], Row *row, const float *gain, int64_t n, int64_t digits,
    int64_t terms, uint16_t weight[][TILE][BLOCK]) {
  __m512 s[VECTORS], top = _mm512_set1_ps(row->max), sum = _mm512_setzero_ps();
  for (int i = 0; i < VECTORS; i++) {
    const __m512i *of = (const __m512i *)product + i;  // the next digit's are VECTORS further
    s[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[0]), _mm512_set1_ps(254.f),
                           _mm512_cvtepi32_ps(of[VECTORS]));
    if (digits == 3)
      s[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[2 * VECTORS]), _mm512_set1_ps(1 / 254.f), s[i]);
    s[i] = _mm512_mul_ps(s[i], _mm512_set1_ps(row->unit / 254));
    const int64_t left = n - 16 * i;
    const __mmask16 here = left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
    s[i] = _mm512_mask_blend_ps(here, _mm512_set1_ps(-INFINITY), s[i]);
    top = _mm512_max_ps(top, s[i]);
  }
  const float max = _mm512_reduce_max_ps(top);
  const float shrink = max == row->max ? 1 : exp2_one(row->max - max);
  for (int i = 0; i < VECTORS; i++) {
    s[i] = exp2_ps(_mm512_sub_ps(s[i], _mm512_set1_ps(max)));
    sum = _mm512_add_ps(sum, s[i]);
    s[i] = _mm512_mul_ps(s[i], _mm512_loadu_ps(gain + 16 * i));
    for (int term = 0; term < terms; term++) {
      const __m256i half = (__m256i)_mm512_cvtneps_pbh(s[i]);
      _mm256_store_si256((__m256i *)weight[term][0] + i, half);
      s[i] = _mm512_sub_ps(s[i], (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }
  *row = (Row){max, row->total * shrink + _mm512_reduce_add_ps(sum), row->unit};
  return shrink;
}

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t tiled(const Task *a) { return (a->rows + TILE - 1) / TILE * TILE; }

// Tokens from..to of a head; `scratch`: a block's keys and values, and the bytes of a short block.
static void attend_span(const Task *a, const Table *table, int64_t head, int64_t from, int64_t to,
                        Part part, uint8_t *scratch) {
  const int64_t dim = a->dim, rows = tiled(a), wide = dim * (a->bits == 3 ? 2 : a->bits) / 8;
  const int64_t narrow = a->bits == 3 ? dim / 8 : 0, coarse = a->digits == 2 && a->terms == 1;
  int32_t product[TILE * MAX_DIGITS][BLOCK] ALIGNED;
  uint16_t weight[MAX_TERMS][TILE][BLOCK] ALIGNED = {0};
  uint16_t *values = (uint16_t *)(scratch + BLOCK * dim);
  float shrink[TILE] = {0}, short_gain[BLOCK] = {0};
  open_tiles();
  memset(part.digit, 0, rows * a->digits * dim);
  memset(part.bias, 0, 4 * rows * a->digits);
  memset(part.sum, 0, 4 * rows * dim);
  for (int64_t m = 0; m < a->rows; m++) {
    const int64_t i = m * a->digits;
    const float unit = to_digits(a->q + (head * a->rows + m) * dim, dim, a->digits,
                                 part.digit + i * dim, part.bias + i);
    part.row[m] = (Row){-INFINITY, 0 * unit, unit};  // a total of NaN where q is not finite
  }
  for (int64_t t = from; t < to; t += BLOCK) {
    const int64_t at = head * a->tokens + t, n = to - t < BLOCK ? to - t : BLOCK;
    const int8_t *keys = a->keys + at * dim;
    const uint8_t *words = a->words + at * wide, *tops = a->tops + at * narrow;
    const float *gain = a->gain + at;
    if (n < BLOCK) {  // nothing is read behind the last token
      uint8_t *copy = memset(scratch + 3 * BLOCK * dim, 0, 2 * BLOCK * dim);
      keys = memcpy(copy, keys, n * dim);
      words = memcpy(copy + BLOCK * dim, words, n * wide);
      if (narrow) tops = memcpy(copy + BLOCK * (dim + wide), tops, n * narrow);
      gain = memcpy(short_gain, gain, 4 * n);
    }
    for (int i = 0; i < VECTORS; i++)
      for (int c = 0; c < dim / 64; c++)
        transpose(keys + 16 * i * dim + 64 * c, dim, scratch + 16 * i * dim + 1024 * c);
    unpack(words, tops, a, table, values);
    for (int64_t m = 0; m < a->rows; m += TILE) {
      const int64_t here = a->rows - m < TILE ? a->rows - m : TILE, first = m * a->digits;
      for (int64_t i = 0; i < here * a->digits; i += TILE)
        multiply_keys(part.digit + (first + i) * dim, part.bias + first + i, scratch, dim,
                      product + i);
#define WEIGH(digits, terms) \
    weigh(product + r * digits, part.row + m + r, gain, n, digits, terms, (void *)weight[0][r])
      for (int64_t r = 0; r < here; r++)
        shrink[r] = coarse ? WEIGH(2, 1) : WEIGH(a->digits, a->terms);
      for (int c = 0; c < dim / 64; c++)
        multiply_values(weight, a->terms, shrink, values + 128 * c, dim,
                        part.sum + m * dim + 64 * c);
    }
  }
  close_tiles();
}

// A row's spans, merged by their log-sum-exps and divided by the total.
static void merge(const Task *a, const Part *part, int64_t spans, int64_t head, int64_t m) {
  float *out = a->out + (head * a->rows + m) * a->dim, max = -INFINITY, total = 0;
  for (int64_t i = 0; i < spans; i++) max = fmaxf(max, part[i].row[m].max);
  for (int64_t i = 0; i < spans; i++)
    total += part[i].row[m].total * exp2_one(part[i].row[m].max - max);
  memset(out, 0, 4 * a->dim);
  for (int64_t i = 0; i < spans; i++) {
    const float share = exp2_one(part[i].row[m].max - max) / total;
    for (int64_t d = 0; d < a->dim; d++) out[d] += share * part[i].sum[m * a->dim + d];
  }
  a->lse[head * a->rows + m] = max + log2f(total);
}

const char polykv_instructions[8] = INSTRUCTIONS;

// 0, or 1 if there is no memory. Threads share out heads times spans of tokens.
int polykv_attend(const Task *a) {
  const int64_t blocks = (a->tokens + BLOCK - 1) / BLOCK, rows = tiled(a), most = (blocks + 3) / 4;
  int64_t spans = a->threads > 1 ? (4 * a->threads + a->heads - 1) / a->heads : 1;
  if (spans > most) spans = most;  // of 256 tokens or more
  const int64_t length = (blocks + spans - 1) / spans * BLOCK, n = a->heads * spans;
  const int64_t sum = 4 * rows * a->dim, digit = rows * a->digits * a->dim;
  const int64_t size = rounded(sum + digit + rows * (sizeof(Row) + 4 * a->digits));
  const int64_t scratch = 5 * BLOCK * a->dim;
  Part *part = malloc(n * sizeof(Part));
  uint8_t *room = aligned_alloc(64, n * size + a->threads * scratch);
  const int failed = !part || !room;
  if (!failed) {
    const Table table = make_table(a->levels, a->bits);
#pragma omp parallel for schedule(dynamic) num_threads(a->threads)
    for (int64_t i = 0; i < n; i++) {
      const int64_t from = i % spans * length, end = from + length;
      uint8_t *at = room + i * size;
      part[i] = (Part){(Row *)(at + sum + digit), (float *)at,
                       (int32_t *)(at + sum + digit + rows * sizeof(Row)), (int8_t *)at + sum};
      attend_span(a, &table, i / spans, from, end < a->tokens ? end : a->tokens, part[i],
                  room + n * size + THREAD * scratch);
    }
    for (int64_t i = 0; i < a->heads * a->rows; i++)
      merge(a, part + i / a->rows * spans, spans, i / a->rows, i % a->rows);
  }
  free(part);
  free(room);
  return failed;
}
