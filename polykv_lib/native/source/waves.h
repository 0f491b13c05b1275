// Harmonics over tokens as one more product: a row's wave, turned to a block, times a fixed basis.
#pragma once
#include "codes.h"
#include "products.h"
#include "rows.h"

typedef struct { double cosine[MAX_DIM / 2], sine[MAX_DIM / 2]; } Turn;  // of each pair of channels

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

// Products of up to TILE rows' waves, turned to a block, with the basis.
static void multiply_waves(const float *wave, int64_t n_rows, const float *turn,
                           const uint16_t *basis, int64_t terms, int64_t dim,
                           float to[TILE][BLOCK]) {
  uint16_t turned[TILE][MAX_DIGITS][MAX_DIM] = {0};
  for (int64_t r = 0; r < n_rows; r++)
    for (int64_t j = 0; j < dim / 2; j += 16) {
      const __m512 x = _mm512_loadu_ps(wave + r * dim + j), c = _mm512_loadu_ps(turn + j);
      const __m512 y = _mm512_loadu_ps(wave + r * dim + dim / 2 + j);
      const __m512 s = _mm512_loadu_ps(turn + dim / 2 + j);
      uint16_t *term = turned[r][0] + j;
      split(_mm512_fmadd_ps(x, c, _mm512_mul_ps(y, s)), terms, term, MAX_DIM);
      split(_mm512_fmsub_ps(y, c, _mm512_mul_ps(x, s)), terms, term + dim / 2, MAX_DIM);
    }
  const uint16_t *rows[MAX_DIGITS * MAX_DIGITS], *keys[MAX_DIGITS * MAX_DIGITS];
  int n = 0;
  for (int64_t i = 0; i < terms; i++)
    for (int64_t j = 0; i + j < terms; j++) {  // the others are below the last term
      rows[n] = turned[0][i];
      keys[n++] = basis + j * BLOCK * dim;
    }
  multiply_bf16(n_rows, n, rows, MAX_DIGITS * MAX_DIM, keys, dim, to);
}
