// Attention of query rows over keys and values at rest, with no decoded copy of either.
//
//     s[t]  = q . k[t]                                       k: int8 codes; or
//     s[t]  = gain[t] q . LEVEL[c[t]] + w . h[t]             c: codes of 1 to 4 bits
//     p[t]  = 2 ^ (s[t] - max s)
//     out   = sum_t p[t] gain[t] LEVEL[c[t]] / sum_t p[t]            c: codes of 1 to 4 bits
//     lse   = max s + log2 sum_t p[t]
//
// Blocks of 64 tokens, softmax online (FlashAttention, arXiv:2205.14135). A row of q is a sum of
// int8 digits, q = unit (d0 + d1 / 256 + d2 / 256^2), so that q . k is exact in int32: two digits
// hold 15 bits of it, three 23. Levels are exact in bf16; a weight p * gain is a sum of one or two
// bf16 numbers, of 8 bits each. Sums are int32 and fp32. Loads and stores of q, keys, codes, gains
// and out need no alignment: a pool may be a mapped file.
//
// Both products are made in tiles of 16 rows by AMX, or six rows at a time by VNNI and BF16 of
// AVX-512; the numbers lie in memory alike. -DNO_AMX leaves AMX out. For packed keys q is a sum of
// two or three bf16 numbers instead.
#include "waves.h"

// Of a row: 16 parts of its total, its largest score in units, and at the end both as they are.
typedef struct ALIGNED { float sums[16], max, total, unit; } Row;

// A span of tokens of one head, attended to but not yet divided by the rows' totals.
typedef struct { Row *row; float *sum, *wave; int32_t *bias; int8_t *digit; } Part;  // or terms

// A row's products with a block of n tokens -> its weights; returns what earlier sums shrink by.
// Products with packed keys lack gains, and those with waves are TILE rows further.
static inline __attribute__((always_inline)) float weigh(  // faster where n and terms are constants
    const float product[][BLOCK], Row *row, const float *key_gain, const float *gain, int64_t n,
    int packed, int64_t terms, uint16_t weight[][TILE][BLOCK]) {
  __m512 s[VECTORS], top = _mm512_set1_ps(row->max), sum = _mm512_setzero_ps();
  float shrink = 1;
  for (int i = 0; i < VECTORS; i++) {
    s[i] = _mm512_load_ps(product[0] + 16 * i);
    if (packed)
      s[i] = _mm512_fmadd_ps(s[i], _mm512_loadu_ps(key_gain + 16 * i),
                             _mm512_load_ps(product[TILE] + 16 * i));
    const int64_t left = n - 16 * i;
    const __mmask16 here = left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1;
    if (n < BLOCK) s[i] = _mm512_mask_blend_ps(here, _mm512_set1_ps(-INFINITY), s[i]);
    top = _mm512_max_ps(top, s[i]);
  }
  if (_mm512_cmp_ps_mask(top, _mm512_set1_ps(row->max), _CMP_GT_OQ)) {  // seldom, later on
    const float max = _mm512_reduce_max_ps(top);
    shrink = exp2_one((row->max - max) * row->unit);
    row->max = max;
  }
  const __m512 unit = _mm512_set1_ps(row->unit), max = _mm512_set1_ps(row->max * row->unit);
  for (int i = 0; i < VECTORS; i++) {
    s[i] = _mm512_fmsub_ps(s[i], unit, max);
    s[i] = terms == 1 && n == BLOCK ? exp2_coarse_ps(s[i]) : exp2_ps(s[i]);
    sum = _mm512_add_ps(sum, s[i]);
    s[i] = _mm512_mul_ps(s[i], _mm512_loadu_ps(gain + 16 * i));
    split(s[i], terms, weight[0][0] + 16 * i, TILE * BLOCK);
  }
  const __m512 before = _mm512_load_ps(row->sums);
  _mm512_store_ps(row->sums, _mm512_fmadd_ps(before, _mm512_set1_ps(shrink), sum));
  return shrink;
}

static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t tiled(const Task *a) { return (a->rows + TILE - 1) / TILE * TILE; }

// n tokens of packed codes, and their gains; a short block is copied, so that nothing behind its
// last is read.
static Packed block_of(const Packed *p, int64_t dim, int64_t at, int64_t n, uint8_t *copy,
                       float *gain) {
  const int64_t words = wide(p, dim), tops = narrow(p, dim);
  Packed own = *p;
  own.words += at * words;
  own.tops += at * tops;
  own.norms = (const char *)own.norms + at * p->norm_bytes;
  if (n < BLOCK) {
    uint8_t *second = memset(copy, 0, BLOCK * (words + tops)) + BLOCK * words;
    own.words = memcpy(copy, own.words, n * words);
    if (tops) own.tops = memcpy(second, own.tops, n * tops);
  }
  gains_of(&own, n, gain);
  return own;
}

// The rows of a head as digits, or bf16 terms; a total of NaN where a row is not finite.
static void prepare(const Task *a, int64_t head, Part part) {
  for (int64_t m = 0; m < a->rows; m++) {
    const float *q = a->q + (head * a->rows + m) * a->dim;
    const int64_t i = m * a->digits, d = i * a->dim;
    const float unit = a->keys ? to_digits(q, a->dim, a->digits, part.digit + d, part.bias + i)
                               : to_terms(q, a->dim, a->digits, (uint16_t *)part.digit + d);
    part.row[m] = (Row){.sums = {0 * unit}, .max = -INFINITY, .unit = a->keys ? unit / 256 : unit};
    if (a->waves.rows)
      to_wave(a->waves.rows + (head * a->rows + m) * a->dim,
              a->waves.lines + head * 3 * a->dim / 2, a->dim, part.wave + m * a->dim);
  }
}

// Keys of a block of n tokens, as the products want them.
static void lay_out(const Task *a, const Table *table, int64_t at, int64_t n, uint8_t *to,
                    uint8_t *copy, float *gain) {
  const int64_t dim = a->dim;
  if (!a->keys) {
    const Packed own = block_of(&a->packed_keys, dim, at, n, copy, gain);
    unpack_keys(&own, dim, table, (uint16_t *)to);
    return;
  }
  const void *keys = a->keys + at * dim;
  if (n < BLOCK) keys = memcpy(memset(copy, 0, BLOCK * dim), keys, n * dim);
  for (int i = 0; i < VECTORS; i++)
    for (int c = 0; c < dim / 64; c++)
      transpose((const char *)keys + 16 * i * dim + 64 * c, dim, KEY_BIAS,
                to + 16 * i * dim + 1024 * c);
}

// Products of up to TILE rows of a head, from row m on, with a block's keys.
static void multiply(const Task *a, Part part, int64_t m, int64_t n_rows, const uint8_t *keys,
                     const float *turn, const uint16_t *basis, float product[2 * TILE][BLOCK]) {
  const int64_t dim = a->dim, first = m * a->digits;
  if (!a->keys) {
    const uint16_t *term = (uint16_t *)part.digit + first * dim, *own = (const uint16_t *)keys;
    const uint16_t *terms[MAX_DIGITS] = {term, term + dim, term + 2 * dim};
    const uint16_t *each[MAX_DIGITS] = {own, own, own};
    multiply_bf16(n_rows, a->digits, terms, a->digits * dim, each, dim, product);
    if (a->waves.rows)
      multiply_waves(part.wave + m * dim, n_rows, turn, basis, a->digits, dim, product + TILE);
    return;
  }
  multiply_keys(n_rows, part.digit + first * dim, part.bias + first, keys, dim, a->digits, product);
}

enum { SCRATCH = 8 };  // blocks of bytes: keys and values in bf16, copies of each

// Tokens from..to of a head.
static void attend_span(const Task *a, const Table *tables, const uint16_t *basis, int64_t head,
                        int64_t from, int64_t to, Part part, uint8_t *scratch) {
  const int64_t dim = a->dim, block = BLOCK * dim;
  float product[2 * TILE][BLOCK] ALIGNED = {0};
  uint16_t weight[MAX_TERMS][TILE][BLOCK] ALIGNED = {0};
  uint16_t *const levels = (uint16_t *)(scratch + 2 * block);
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
    lay_out(a, tables, at, n, scratch, scratch + 4 * block, key_gain);
    const Packed values = block_of(&a->values, dim, at, n, scratch + 6 * block, value_gain);
    unpack_values(&values, dim, tables + 1, levels);
    if (a->waves.rows) {
      as_channels(&turn, dim / 2, channel);
      turn_on(&turn, &step, dim / 2);
    }
    for (int64_t m = 0; m < a->rows; m += TILE) {
      const int64_t here = a->rows - m < TILE ? a->rows - m : TILE;
      multiply(a, part, m, here, scratch, channel, basis, product);
      for (int64_t r = 0; r < here; r++) {
#define WEIGH(n, packed, terms) \
    weigh(product + r, part.row + m + r, key_gain, value_gain, n, packed, terms, \
          (void *)weight[0][r])
        shrink[r] = a->terms > 1 || n < BLOCK ? WEIGH(n, !a->keys, a->terms)
                    : a->keys ? WEIGH(BLOCK, 0, 1) : WEIGH(BLOCK, 1, 1);
      }
      for (int c = 0; c < dim / 64; c++)
        multiply_values(here, weight, a->terms, shrink, levels + 128 * c, dim,
                        part.sum + m * dim + 64 * c);
    }
  }
  close_tiles();
  for (Row *row = part.row; row < part.row + a->rows; row++) {
    row->total = _mm512_reduce_add_ps(_mm512_load_ps(row->sums));
    row->max *= row->unit;
  }
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
