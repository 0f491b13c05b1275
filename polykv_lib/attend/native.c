// Attention of query rows over keys and values at rest, with no decoded copy of either.
//
//     s[t]  = q . k[t]                                       k: int8 codes; or
//     s[t]  = gain[t] q . LEVEL[c[t]] + w . h[t]             c: codes of 1 to 4 bits
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
// AVX-512; the numbers lie in memory alike. -DNO_AMX leaves AMX out, and packed keys with it: q is
// then a sum of two or three bf16 numbers, and they are as many products.
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
enum { BLOCK = 64, VECTORS = BLOCK / 16, MAX_DIGITS = 3, MAX_TERMS = 2, MAX_DIM = 256 };
#define ALIGNED __attribute__((aligned(64)))

typedef struct {
  const uint8_t *words, *tops;  // [head, token, bytes]: packed codes; tops: 3 bits only
  const float *gain, *levels;   // [head, token], [2^bits]
  int64_t bits;
} Packed;

// Harmonics over tokens, h[t] = a exp(i f t) for each pair of channels j and j + dim / 2, which add to
// packed keys in the basis of w (quantize/harmonic.py).
typedef struct {
  const float *rows;   // w: [head, row, dim]; null: no harmonics
  const float *lines;  // [head, 3, dim / 2]: a's real and imaginary part, f
} Waves;

typedef struct {
  const float *q;                // [head, row, dim]
  const int8_t *keys;            // [head, token, dim]; null: they are packed
  Packed packed_keys, values;
  Waves waves;                   // beside packed keys
  float *out, *lse;              // [head, row, dim], [head, row]
  int64_t heads, rows, tokens, dim;
  int64_t digits, terms, threads;  // of q: 2 or 3; of weights: 1 or 2
} Task;

typedef struct { __m512i low, high, shifts, order; } Table;  // bytes of the levels in bf16

typedef struct { float max, total, unit; } Row;

// A span of tokens of one head, attended to but not yet divided by the rows' totals.
typedef struct { Row *row; float *sum, *wave; int32_t *bias; int8_t *digit; } Part;  // or terms

typedef struct { double cosine[MAX_DIM / 2], sine[MAX_DIM / 2]; } Turn;  // of each pair of channels

static int64_t wide(const Packed *p, int64_t dim) { return dim * (p->bits == 3 ? 2 : p->bits) / 8; }

static int64_t narrow(const Packed *p, int64_t dim) { return p->bits == 3 ? dim / 8 : 0; }

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

static __m512 as_float(__m256i half) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

// 16 numbers as sums of bf16 numbers, the next term `stride` further.
static void split(__m512 y, int64_t terms, uint16_t *to, int64_t stride) {
  for (int64_t i = 0; i < terms; i++) {
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(y);
    _mm256_storeu_si256((__m256i *)(to + i * stride), half);
    y = _mm512_sub_ps(y, as_float(half));
  }
}

// bf16 terms of a row, one after the other, and the row's unit, which is 1.
static float to_terms(const float *x, int64_t dim, int64_t terms, uint16_t *term) {
  __m512 nan = _mm512_setzero_ps();  // becomes NaN where x is not finite
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512 y = _mm512_loadu_ps(x + d);
    nan = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nan);
    split(y, terms, term + d, dim);
  }
  return 1 + _mm512_reduce_add_ps(nan);
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

// Values are unpacked in two steps, keys in one, each of which reorders inside 128-bit lanes.
static Table make_table(const Packed *p, int steps) {
  const int64_t bits = p->bits;
  uint8_t low[64] ALIGNED, high[64] ALIGNED, shifts[64] ALIGNED, order[64] ALIGNED;
  for (int i = 0; i < 64; i++) {
    uint32_t word = 0;
    if (p->levels) memcpy(&word, p->levels + (i & ((1 << bits) - 1)), 4);  // bits above a code's own do not matter
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

// Packed values of a block -> levels in bf16, [pair of tokens][channel][2].
static void unpack_values(const Packed *p, int64_t dim, const Table *table, uint16_t *to) {
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

static void turn_to(const float *frequency, int64_t pairs, double tokens, Turn *to) {
  for (int64_t j = 0; j < pairs; j++) {
    to->cosine[j] = cos(frequency[j] * tokens);
    to->sine[j] = sin(frequency[j] * tokens);
  }
}

static void turn_on(Turn *at, const Turn *step, int64_t pairs) {
  for (int64_t j = 0; j < pairs; j++) {
    const double c = at->cosine[j], s = at->sine[j];
    at->cosine[j] = c * step->cosine[j] - s * step->sine[j];
    at->sine[j] = s * step->cosine[j] + c * step->sine[j];
  }
}

// Cosines and sines as channels, in fp32.
static void as_channels(const Turn *turn, int64_t pairs, float *to) {
  for (int64_t j = 0; j < pairs; j++) to[j] = turn->cosine[j];
  for (int64_t j = 0; j < pairs; j++) to[pairs + j] = turn->sine[j];
}

// exp(i f t) of tokens 0 to 63 as bf16 terms, each laid out as keys are.
static void make_basis(const float *frequency, int64_t dim, int64_t terms, uint16_t *to) {
  uint16_t half[MAX_DIGITS][16][MAX_DIM];
  float channel[MAX_DIM];
  Turn at, step;
  turn_to(frequency, dim / 2, 0, &at);
  turn_to(frequency, dim / 2, 1, &step);
  for (int i = 0; i < VECTORS; i++) {
    for (int t = 0; t < 16; t++, turn_on(&at, &step, dim / 2)) {
      as_channels(&at, dim / 2, channel);
      for (int64_t d = 0; d < dim; d += 16)
        split(_mm512_loadu_ps(channel + d), terms, half[0][t] + d, 16 * MAX_DIM);
    }
    for (int64_t term = 0; term < terms; term++)
      for (int64_t d = 0; d < dim; d += 32)
        transpose(half[term][0] + d, sizeof half[0][0], 0,
                  to + term * BLOCK * dim + 16 * (i * dim + d));
  }
}

// w times the conjugate of a: the row's share of cosines and of sines at token 0.
static void to_wave(const float *w, const float *lines, int64_t dim, float *to) {
  const int64_t pairs = dim / 2;
  const float *imaginary = lines + pairs;
  for (int64_t j = 0; j < pairs; j++) {
    to[j] = w[j] * lines[j] + w[pairs + j] * imaginary[j];
    to[pairs + j] = w[pairs + j] * lines[j] - w[j] * imaginary[j];
  }
}

// Steps with AMX and without:
//
// multiply_keys: products of TILE digit rows with a block's keys, less the bias.
// multiply_packed: products of TILE rows, of so many terms, with a block's packed keys.
// multiply_waves: the same of up to TILE rows with waves.
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

#else
static void open_tiles(void) {}

static void close_tiles(void) {}

static void multiply_packed(const uint16_t *term, int64_t terms, const uint16_t *keys, int64_t dim,
                            int32_t to[TILE][BLOCK]) {}

static void multiply_waves(const float *wave, int64_t n_rows, const float *turn,
                           const uint16_t *basis, int64_t terms, int64_t dim,
                           int32_t to[TILE][BLOCK]) {}

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
// No digits: keys were packed, products are fp32, and those with waves TILE rows further.
static inline __attribute__((always_inline)) float weigh(  // faster where digits are constants
    const int32_t product[][BLOCK], Row *row, const float *key_gain, const float *gain, int64_t n,
    int64_t digits, int64_t terms, uint16_t weight[][TILE][BLOCK]) {
  __m512 s[VECTORS], top = _mm512_set1_ps(row->max), sum = _mm512_setzero_ps();
  for (int i = 0; i < VECTORS; i++) {
    const __m512i *of = (const __m512i *)product + i;  // the next row's are VECTORS further
    if (digits == 0) {
      s[i] = _mm512_fmadd_ps((__m512)of[0], _mm512_loadu_ps(key_gain + 16 * i),
                             (__m512)of[TILE * VECTORS]);
    } else {
      s[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[0]), _mm512_set1_ps(254.f),
                             _mm512_cvtepi32_ps(of[VECTORS]));
      if (digits == 3)
        s[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of[2 * VECTORS]), _mm512_set1_ps(1 / 254.f),
                               s[i]);
      s[i] = _mm512_mul_ps(s[i], _mm512_set1_ps(row->unit / 254));
    }
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
    split(s[i], terms, weight[0][0] + 16 * i, TILE * BLOCK);
  }
  *row = (Row){max, row->total * shrink + _mm512_reduce_add_ps(sum), row->unit};
  return shrink;
}

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t tiled(const Task *a) { return (a->rows + TILE - 1) / TILE * TILE; }

// n tokens of packed codes; a short block is copied, so that nothing behind its last is read.
static Packed block_of(const Packed *p, int64_t dim, int64_t at, int64_t n, uint8_t *copy,
                       float *gain) {
  const int64_t words = wide(p, dim), tops = narrow(p, dim);
  Packed own = {p->words + at * words, p->tops + at * tops, p->gain + at, p->levels, p->bits};
  if (n < BLOCK) {
    uint8_t *second = memset(copy, 0, BLOCK * dim) + BLOCK * words;
    own.words = memcpy(copy, own.words, n * words);
    if (tops) own.tops = memcpy(second, own.tops, n * tops);
    own.gain = memcpy(memset(gain, 0, 4 * BLOCK), own.gain, 4 * n);
  }
  return own;
}

// The rows of a head as digits, or bf16 terms; a total of NaN where a row is not finite.
static void prepare(const Task *a, int64_t head, Part part) {
  for (int64_t m = 0; m < a->rows; m++) {
    const float *q = a->q + (head * a->rows + m) * a->dim;
    const int64_t i = m * a->digits, d = i * a->dim;
    const float unit = a->keys ? to_digits(q, a->dim, a->digits, part.digit + d, part.bias + i)
                               : to_terms(q, a->dim, a->digits, (uint16_t *)part.digit + d);
    part.row[m] = (Row){-INFINITY, 0 * unit, unit};
    if (a->waves.rows)
      to_wave(a->waves.rows + (head * a->rows + m) * a->dim,
              a->waves.lines + head * 3 * a->dim / 2, a->dim, part.wave + m * a->dim);
  }
}

// Keys of a block of n tokens, as the products want them.
static Packed lay_out(const Task *a, const Table *table, int64_t at, int64_t n, uint8_t *to,
                      uint8_t *copy, float *gain) {
  const int64_t dim = a->dim;
  if (!a->keys) {
    const Packed own = block_of(&a->packed_keys, dim, at, n, copy, gain);
    unpack_keys(&own, dim, table, (uint16_t *)to);
    return own;
  }
  const void *keys = a->keys + at * dim;
  if (n < BLOCK) keys = memcpy(memset(copy, 0, BLOCK * dim), keys, n * dim);
  for (int i = 0; i < VECTORS; i++)
    for (int c = 0; c < dim / 64; c++)
      transpose((const char *)keys + 16 * i * dim + 64 * c, dim, KEY_BIAS,
                to + 16 * i * dim + 1024 * c);
  return (Packed){0};
}

// Products of up to TILE rows of a head, from row m on, with a block's keys.
static void multiply(const Task *a, Part part, int64_t m, int64_t n_rows, const uint8_t *keys,
                     const float *turn, const uint16_t *basis,
                     int32_t product[TILE * MAX_DIGITS][BLOCK]) {
  const int64_t dim = a->dim, first = m * a->digits;
  if (!a->keys) {
    multiply_packed((uint16_t *)part.digit + first * dim, a->digits, (const uint16_t *)keys, dim,
                    product);
    if (a->waves.rows)
      multiply_waves(part.wave + m * dim, n_rows, turn, basis, a->digits, dim, product + TILE);
    return;
  }
  for (int64_t i = 0; i < n_rows * a->digits; i += TILE)
    multiply_keys(part.digit + (first + i) * dim, part.bias + first + i, keys, dim, product + i);
}

enum { SCRATCH = 6 };  // blocks of bytes: keys and values in bf16, copies of each

// Tokens from..to of a head.
static void attend_span(const Task *a, const Table *tables, const uint16_t *basis, int64_t head,
                        int64_t from, int64_t to, Part part, uint8_t *scratch) {
  const int64_t dim = a->dim, block = BLOCK * dim;
  const int64_t digits = a->keys ? a->digits : 0, coarse = a->digits == 2 && a->terms == 1;
  int32_t product[TILE * MAX_DIGITS][BLOCK] ALIGNED = {0};
  uint16_t weight[MAX_TERMS][TILE][BLOCK] ALIGNED = {0}, *levels = (uint16_t *)(scratch + 2 * block);
  float shrink[TILE] = {0}, key_gain[BLOCK], value_gain[BLOCK], channel[MAX_DIM];
  Turn turn, step;
  prepare(a, head, part);
  if (a->waves.rows) {
    turn_to(a->waves.lines + dim, dim / 2, from, &turn);
    turn_to(a->waves.lines + dim, dim / 2, BLOCK, &step);
  }
  open_tiles();
  for (int64_t t = from; t < to; t += BLOCK) {
    const int64_t at = head * a->tokens + t, n = to - t < BLOCK ? to - t : BLOCK;
    const Packed keys = lay_out(a, tables, at, n, scratch, scratch + 4 * block, key_gain);
    const Packed values = block_of(&a->values, dim, at, n, scratch + 5 * block, value_gain);
    unpack_values(&values, dim, tables + 1, levels);
    if (a->waves.rows) {
      as_channels(&turn, dim / 2, channel);
      turn_on(&turn, &step, dim / 2);
    }
    for (int64_t m = 0; m < a->rows; m += TILE) {
      const int64_t here = a->rows - m < TILE ? a->rows - m : TILE;
      multiply(a, part, m, here, scratch, channel, basis, product);
      for (int64_t r = 0; r < here; r++) {
#define WEIGH(digits, terms) \
    weigh(product + r * (digits ? digits : 1), part.row + m + r, keys.gain, values.gain, n, \
          digits, terms, (void *)weight[0][r])
        shrink[r] = !coarse ? WEIGH(digits, a->terms) : digits ? WEIGH(2, 1) : WEIGH(0, 1);
      }
      for (int c = 0; c < dim / 64; c++)
        multiply_values(weight, a->terms, shrink, levels + 128 * c, dim,
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
  const int64_t sum = 4 * rows * a->dim, wave = a->waves.rows ? sum : 0;
  const int64_t digit = rows * a->digits * a->dim * (a->keys ? 1 : 2);
  const int64_t size = rounded(sum + wave + digit + rows * (sizeof(Row) + 4 * a->digits));
  const int64_t scratch = SCRATCH * BLOCK * a->dim, basis = 2 * MAX_DIGITS * BLOCK * a->dim;
  Part *part = malloc(n * sizeof(Part));
  uint8_t *room = aligned_alloc(64, n * size + a->threads * scratch + basis);
  const int failed = !part || !room;
  if (!failed) {
    const Table tables[2] = {make_table(&a->packed_keys, 1), make_table(&a->values, 2)};
    uint16_t *const waves = (uint16_t *)(room + n * size + a->threads * scratch);
    if (wave) make_basis(a->waves.lines + a->dim, a->dim, a->digits, waves);
#pragma omp parallel for schedule(dynamic) num_threads(a->threads)
    for (int64_t i = 0; i < n; i++) {
      const int64_t from = i % spans * length, end = from + length;
      uint8_t *at = memset(room + i * size, 0, size);
      Row *row = (Row *)(at + sum + wave + digit);
      part[i] = (Part){row, (float *)at, (float *)(at + sum), (int32_t *)(row + rows),
                       (int8_t *)at + sum + wave};
      attend_span(a, tables, waves, i / spans, from, end < a->tokens ? end : a->tokens, part[i],
                  room + n * size + THREAD * scratch);
    }
    for (int64_t i = 0; i < a->heads * a->rows; i++)
      merge(a, part + i / a->rows * spans, spans, i / a->rows, i % a->rows);
  }
  free(part);
  free(room);
  return failed;
}
