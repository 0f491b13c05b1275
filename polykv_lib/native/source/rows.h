// Rows of queries as the products want them: int8 digits, or terms of bf16.
#pragma once
#include "task.h"

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

static __m512 exp2_coarse_ps(__m512 x) {  // relative error 1e-4, for weights of 8 bits
  const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(5.5171649e-2f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4261112e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9326098e-1f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(9.9992807e-1f)), n);
}

static float exp2_one(float x) { return _mm512_cvtss_f32(exp2_ps(_mm512_set1_ps(x))); }

// Digits of a row, the row's unit and, for each digit, what the keys' bias adds to products.
static float to_digits(const float *x, int64_t dim, int digits, int8_t *digit, int32_t *bias) {
  __m512 largest = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += 16)
    largest = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), largest);
  const float top = _mm512_reduce_max_ps(largest), unit = top > 1e-30f ? top / 127 : 1.f;
  const __m512 steps = _mm512_set1_ps((1 << 8 * (digits - 1)) / unit);
  __m512i sum[MAX_DIGITS] = {{0}};
  __m512 nan = _mm512_setzero_ps();  // becomes NaN where x is not finite
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512 y = _mm512_loadu_ps(x + d);
    nan = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nan);
    __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(y, steps));
    for (int i = digits - 1; i >= 0; i--) {  // the last first: its low byte, with a sign
      const __m512i c = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
      _mm_storeu_si128((__m128i *)(digit + i * dim + d), _mm512_cvtepi32_epi8(c));
      sum[i] = _mm512_add_epi32(sum[i], c);
      rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, c), 8);
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
