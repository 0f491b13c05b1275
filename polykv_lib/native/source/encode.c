// Vectors -> codes and what multiplies them, without numbers in between that memory would hold.
#include "codes.h"

enum { MAX_LEVELS = 16 };

typedef struct {
  const float *y;                 // [row, dim]: vectors, rotated
  const float *edges, *levels;    // [2^bits - 1], [2^bits], ascending
  uint8_t *words, *tops;          // [row, bytes]: packed codes (quantize/packing.py); tops: 3 bits
  float *length;                  // [row]
  int64_t rows, dim, bits, matched, threads;  // dim: 64, 128, 192 or 256
} Vectors;

// The norm of a vector; in fp64 where its square leaves the range of fp32.
static double norm_of(const float *y, int64_t dim) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512 x = _mm512_loadu_ps(y + d);
    sum = _mm512_fmadd_ps(x, x, sum);
  }
  const float square = _mm512_reduce_add_ps(sum);
  if (square > 1e-30f && square < 1e37f) return sqrt(square);
  double exact = 0;
  for (int64_t d = 0; d < dim; d++) exact += (double)y[d] * y[d];
  return sqrt(exact);
}

// Codes of a vector, packed: four of 3 bits to a word, whose top nibbles lie apart.
static void pack(const uint8_t *code, int64_t dim, int64_t bits, uint8_t *words, uint8_t *tops) {
  uint8_t top[MAX_DIM / 4];
  if (bits != 3) {
    const int64_t n = 8 / bits;
    for (int64_t i = 0; i < dim / n; i++) {
      words[i] = 0;
      for (int64_t j = 0; j < n; j++) words[i] |= code[n * i + j] << j * bits;
    }
    return;
  }
  for (int64_t d = 0; d < dim; d += 64) {
    const __m512i four = _mm512_loadu_si512(code + d);  // codes c0 c1 c2 c3, a byte each
    __m512i word = _mm512_or_si512(four, _mm512_srli_epi32(four, 5));
    word = _mm512_and_si512(word, _mm512_set1_epi32(0x003f003f));
    word = _mm512_or_si512(word, _mm512_srli_epi32(word, 10));
    _mm_storeu_si128((__m128i *)(words + d / 4), _mm512_cvtepi32_epi8(word));
    word = _mm512_and_si512(_mm512_srli_epi32(word, 8), _mm512_set1_epi32(15));
    _mm_storeu_si128((__m128i *)(top + d / 4), _mm512_cvtepi32_epi8(word));
  }
  for (int64_t i = 0; i < dim / 8; i++) tops[i] = top[i] | top[i + dim / 8] << 4;
}

// TurboQuant (quantize/turboquant.py): the nearest levels of sqrt(dim) y / |y|, half-way the lower.
// A vector too small to be spread in fp32 gets a length of NaN.
void polykv_encode(const Vectors *a) {
  const int64_t dim = a->dim, n = 1 << a->bits;
  const int64_t wide = dim * (a->bits == 3 ? 2 : a->bits) / 8, narrow = dim / 8;
  float table[MAX_LEVELS] = {0};
  for (int64_t i = 0; i < n; i++) table[i] = a->levels[i] * a->levels[i];
  const __m512 squares = _mm512_loadu_ps(table);
#pragma omp parallel for schedule(static) num_threads(a->threads)
  for (int64_t r = 0; r < a->rows; r++) {
    const float *y = a->y + r * dim;
    const double norm = norm_of(y, dim);
    const double spread = sqrt((double)dim) / (norm > 0 ? norm : 1);
    uint8_t code[MAX_DIM];
    __m512 square = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 z = _mm512_mul_ps(_mm512_loadu_ps(y + d), _mm512_set1_ps((float)spread));
      __m512i c = _mm512_setzero_si512();
      for (int64_t e = 0; e < n - 1; e++) {
        const __mmask16 above = _mm512_cmp_ps_mask(z, _mm512_set1_ps(a->edges[e]), _CMP_GT_OQ);
        c = _mm512_mask_add_epi32(c, above, c, _mm512_set1_epi32(1));
      }
      _mm_storeu_si128((__m128i *)(code + d), _mm512_cvtepi32_epi8(c));
      square = _mm512_add_ps(square, _mm512_permutexvar_ps(c, squares));
    }
    pack(code, dim, a->bits, a->words + r * wide, a->tops + (a->bits == 3 ? r * narrow : 0));
    a->length[r] = norm > 0 && norm < 1e-30 ? NAN : norm / sqrt(a->matched ? _mm512_reduce_add_ps(square) : (double)dim);
  }
}

typedef struct {
  const float *x;              // [head, token, dim]: vectors whose levels are looked for
  const float *feed, *moments; // [head, dim, dim]: L with M = L D L^T, and M
  const float *edges, *levels; // [2^bits - 1], [2^bits], ascending
  uint8_t *codes;              // as x
  float *fit;                  // [head, token]
  int64_t heads, tokens, dim, bits, threads;  // dim: 64, 128, 192 or 256
} Shaped;

// Noise shaping (quantize/shaping.py) of up to 16 tokens, side by side: codes, and what fits their
// levels to x best. x: [dim][16].
static void shape(const Shaped *a, int64_t head, const __m512 *x, uint8_t code[][16], float *fit) {
  const int64_t dim = a->dim, n = (1 << a->bits) - 1;
  const float *feed = a->feed + head * dim * dim, *moments = a->moments + head * dim * dim;
  float table[MAX_LEVELS] = {0};
  memcpy(table, a->levels, 4 * (n + 1));
  const __m512 levels = _mm512_loadu_ps(table);
  __m512 aim[MAX_DIM], level[MAX_DIM], along = _mm512_setzero_ps(), own = along;
  memcpy(aim, x, sizeof aim[0] * dim);
  for (int64_t j = dim - 1; j >= 0; j--) {
    __m512i c = _mm512_setzero_si512();
    for (int64_t e = 0; e < n; e++) {
      const __mmask16 above = _mm512_cmp_ps_mask(aim[j], _mm512_set1_ps(a->edges[e]), _CMP_GT_OQ);
      c = _mm512_mask_add_epi32(c, above, c, _mm512_set1_epi32(1));
    }
    _mm_storeu_si128((__m128i *)code[j], _mm512_cvtepi32_epi8(c));
    level[j] = _mm512_permutexvar_ps(c, levels);
    const __m512 error = _mm512_sub_ps(x[j], level[j]);
    for (int64_t i = 0; i < j; i++)
      aim[i] = _mm512_fmadd_ps(_mm512_set1_ps(feed[j * dim + i]), error, aim[i]);
  }
  for (int64_t j = 0; j < dim; j++) {
    __m512 seen[4] = {{0}};  // four sums: one would wait for itself
    for (int64_t i = 0; i < dim; i++)
      seen[i % 4] = _mm512_fmadd_ps(_mm512_set1_ps(moments[j * dim + i]), level[i], seen[i % 4]);
    seen[0] = _mm512_add_ps(_mm512_add_ps(seen[0], seen[1]), _mm512_add_ps(seen[2], seen[3]));
    along = _mm512_fmadd_ps(seen[0], x[j], along);
    own = _mm512_fmadd_ps(seen[0], level[j], own);
  }
  _mm512_storeu_ps(fit, _mm512_max_ps(_mm512_div_ps(along, own), _mm512_setzero_ps()));
}

void polykv_shape(const Shaped *a) {
  const int64_t groups = (a->tokens + 15) / 16, dim = a->dim;
#pragma omp parallel for schedule(static) num_threads(a->threads)
  for (int64_t g = 0; g < a->heads * groups; g++) {
    const int64_t head = g / groups, first = head * a->tokens + g % groups * 16;
    const int64_t left = a->tokens - g % groups * 16, n = left < 16 ? left : 16;
    float short_one[16 * MAX_DIM], fit[16];
    uint8_t code[MAX_DIM][16];
    __m512 x[MAX_DIM];
    const float *from = a->x + first * dim;
    if (n < 16) from = memcpy(memset(short_one, 0, sizeof short_one), from, 4 * n * dim);
    for (int64_t d = 0; d < dim; d += 16) transpose(from + d, 4 * dim, 0, x + d);
    shape(a, head, x, code, fit);
    memcpy(a->fit + first, fit, 4 * n);
    for (int64_t t = 0; t < n; t++)
      for (int64_t d = 0; d < dim; d++) a->codes[(first + t) * dim + d] = code[d][t];
  }
}

typedef struct {
  const float *x;  // [head, token, dim]
  float *scale;    // [head, dim]: read by polykv_round
  int8_t *codes;   // as x
  int64_t heads, tokens, dim, threads;  // dim: a multiple of 16
} Channels;

// The largest magnitude of each channel; NaN where there is one.
void polykv_largest(const Channels *a) {
  const int64_t n = a->dim / 16;
#pragma omp parallel for schedule(static) num_threads(a->threads)
  for (int64_t i = 0; i < a->heads * n; i++) {
    const float *x = a->x + i / n * a->tokens * a->dim + i % n * 16;
    __m512 top = _mm512_setzero_ps(), nan = top;
    for (int64_t t = 0; t < a->tokens; t++) {
      const __m512 y = _mm512_loadu_ps(x + t * a->dim);
      top = _mm512_max_ps(_mm512_abs_ps(y), top);
      nan = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nan);
    }
    _mm512_storeu_ps(a->scale + 16 * i, _mm512_add_ps(top, nan));
  }
}

// x / scale, rounded to even; where the scale is 0, x is.
void polykv_round(const Channels *a) {
#pragma omp parallel for schedule(static) num_threads(a->threads)
  for (int64_t i = 0; i < a->heads * a->tokens; i++)
    for (int64_t d = 0; d < a->dim; d += 16) {
      const float *scale = a->scale + i / a->tokens * a->dim + d;
      __m512 y = _mm512_loadu_ps(scale);
      const __mmask16 none = _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_EQ_OQ);
      y = _mm512_mask_mov_ps(y, none, _mm512_set1_ps(1));
      y = _mm512_div_ps(_mm512_loadu_ps(a->x + i * a->dim + d), y);
      _mm_storeu_si128((__m128i *)(a->codes + i * a->dim + d),
                       _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(y)));
    }
}
