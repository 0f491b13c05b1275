// What is asked of the kernel, what it works with, and which instructions it uses.
#pragma once
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
  const void *norms;            // [head, token]: a token's factor, in bytes or fp16 at rest
  const float *unit, *levels;   // what norms stand for (quantize/base.py); [2^bits]
  int64_t bits, norm_bytes;     // 16 and 0: numbers in bf16 as they are, no factor
} Packed;

// Harmonics over tokens, h[t] = a exp(i f t) for each pair of channels j and j + dim / 2, which add
// to packed keys in the basis of w (quantize/harmonic.py).
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

int polykv_attend(const Task *a);
