// One layer for all agents in one call: queries become rows, which attend to the agents' own tokens
// and to every piece of the document; results merge by their log-sum-exps.
//
// A row is a query head of an agent's query. Rows of a KV head lie together, [head, row, dim] with
// row = (agent, query head of the group, query). Scores and lse are in base 2, numbers fp32.
#include "rows.h"

enum { FLOAT32, BFLOAT16, FLOAT16, ROWS = 4 };  // ROWS: that share what is loaded

// Keys and values of some tokens as they are, for each head.
typedef struct {
  const void *keys, *values;
  int64_t tokens, head, key_token, value_token, dtype;  // strides, in numbers
} Few;

typedef struct {
  Task task;                  // keys and values at rest; heads, tokens, dim, digits and terms
  Few few;                    // or tokens that are not quantised
  const float *scale;         // of keys: [head, dim], or null
  const float *to, *back;     // bases of keys and of values: [dim, dim], or null
  const int64_t *heads;       // whose tokens these are; null: all heads'
} Piece;

typedef struct {
  const Piece *pieces;
  const void *q;              // [agent, q_head, query, dim]
  const void *keys, *values;  // [agent, head, token, dim], the agents' own; null: none
  const uint8_t *visible;     // [agent, token]: which of them are seen; null: all
  void *out;                  // [agent, query, q_head, dim]
  float *lse;                 // [agent, q_head, query], natural
  int64_t n_pieces, agents, heads, group, queries, dim, own;
  int64_t q_strides[3], key_strides[3], value_strides[3], visible_stride;  // in numbers
  int64_t dtype, out_dtype, threads;  // of q, keys and values; of out
  float factor;               // of scores, log2 e included
} Layer;

static int64_t padded(int64_t tokens) { return (tokens + 15) / 16 * 16; }

static __m512 load(const void *x, int64_t at, int64_t dtype) {
  if (dtype == FLOAT32) return _mm512_loadu_ps((const float *)x + at);
  const __m256i half = _mm256_loadu_si256((const void *)((const uint16_t *)x + at));
  return dtype == BFLOAT16 ? as_float(half) : _mm512_cvtph_ps(half);
}

static void store(void *x, int64_t at, int64_t dtype, __m512 y) {
  if (dtype == FLOAT32) {
    _mm512_storeu_ps((float *)x + at, y);
    return;
  }
  if (dtype == FLOAT16) {  // what rounds past the largest number is that number
    const __m512 most = _mm512_set1_ps(65504.f), least = _mm512_set1_ps(-65504.f);
    const __mmask16 number = _mm512_cmp_ps_mask(y, y, _CMP_ORD_Q);
    y = _mm512_mask_min_ps(y, number, most, _mm512_max_ps(least, y));
  }
  const __m256i half = dtype == BFLOAT16 ? (__m256i)_mm512_cvtneps_pbh(y)
                                         : _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256((void *)((uint16_t *)x + at), half);
}

// What earlier results weigh beside new ones, w and 1 - w, once both are merged into lse.
static float merged(float *lse, float other) {
  if (isnan(*lse) || isnan(other)) return *lse = NAN;
  const float max = fmaxf(*lse, other);
  if (max == -INFINITY) return 0;
  const float one = exp2_one(*lse - max), both = one + exp2_one(other - max);
  *lse = max + log2f(both);
  return one / both;
}

// The sums of four vectors.
static __m128 sums(const __m512 x[ROWS]) {
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m256 d = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
  return _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1));
}

// Scores -> weights, whose sum is returned; the lse before becomes that with them, and `before`
// what earlier results weigh.
static float soften(float *s, int64_t tokens, const uint8_t *visible, float *lse, float *before) {
  float max = *lse, nan = 0;
  for (int64_t t = 0; t < tokens; t++)
    if (!visible || visible[t]) {
      max = fmaxf(max, s[t]);
      nan += 0 * s[t];  // NaN where a score is no number
    } else {
      s[t] = -INFINITY;
    }
  for (int64_t t = tokens; t % 16; t++) s[t] = -INFINITY;
  if (max == -INFINITY) return 0;  // nothing was seen, and is not now
  __m512 sum = _mm512_setzero_ps();
  for (int64_t t = 0; t < tokens; t += 16) {
    const __m512 p = exp2_ps(_mm512_sub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(max)));
    _mm512_storeu_ps(s + t, p);
    sum = _mm512_add_ps(sum, p);
  }
  *before = exp2_one(*lse - max);
  const float total = *before + _mm512_reduce_add_ps(sum) + nan;
  *lse = max + log2f(total);
  return total;
}

// Up to ROWS rows over few tokens, added to what they attended to before.
static void attend_rows(const Few *few, int64_t head, const uint8_t *visible, const float *q,
                        int64_t rows, int64_t dim, float *score, float *out, float *lse) {
  const int64_t tokens = few->tokens, wide = padded(tokens), at = head * few->head;
  float four[ROWS], before[ROWS] = {0}, total[ROWS] = {0};
  const float *row[ROWS];
  for (int r = 0; r < ROWS; r++) row[r] = q + (r < rows ? r : 0) * dim;
  for (int64_t t = 0; t < tokens; t++) {
    __m512 dot[ROWS] = {{0}};
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 k = load(few->keys, at + t * few->key_token + d, few->dtype);
      for (int r = 0; r < ROWS; r++)
        dot[r] = _mm512_fmadd_ps(k, _mm512_loadu_ps(row[r] + d), dot[r]);
    }
    _mm_storeu_ps(four, sums(dot));
    for (int r = 0; r < ROWS; r++) score[r * wide + t] = four[r];
  }
  for (int64_t r = 0; r < rows; r++)
    total[r] = soften(score + r * wide, tokens, visible, lse + r, before + r);
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 sum[ROWS] = {{0}};
    for (int64_t r = 0; r < rows; r++)
      sum[r] = _mm512_mul_ps(_mm512_loadu_ps(out + r * dim + d), _mm512_set1_ps(before[r]));
    for (int64_t t = 0; t < tokens; t++) {
      if (visible && !visible[t]) continue;
      const __m512 v = load(few->values, at + t * few->value_token + d, few->dtype);
      for (int r = 0; r < ROWS; r++)
        sum[r] = _mm512_fmadd_ps(v, _mm512_set1_ps(score[r * wide + t]), sum[r]);
    }
    for (int64_t r = 0; r < rows; r++)
      if (total[r] != 0)
        _mm512_storeu_ps(out + r * dim + d, _mm512_div_ps(sum[r], _mm512_set1_ps(total[r])));
  }
}

static void attend_few(const Few *few, int64_t head, const uint8_t *visible, const float *q,
                       int64_t rows, int64_t dim, float *score, float *out, float *lse) {
  for (int64_t r = 0; r < rows; r += ROWS)
    attend_rows(few, head, visible, q + r * dim, rows - r < ROWS ? rows - r : ROWS, dim, score,
                out + r * dim, lse + r);
}

// y = x @ matrix; rows up to a multiple of ROWS are read and written.
static void turn(const float *x, int64_t rows, int64_t dim, const float *matrix, int threads,
                 float *y) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; r += ROWS)
    for (int64_t c = 0; c < dim; c += 64) {
      __m512 sum[ROWS][4] = {{{0}}};
      for (int64_t k = 0; k < dim; k++)
        for (int i = 0; i < 4; i++) {
          const __m512 m = _mm512_loadu_ps(matrix + k * dim + c + 16 * i);
          for (int j = 0; j < ROWS; j++)
            sum[j][i] = _mm512_fmadd_ps(_mm512_set1_ps(x[(r + j) * dim + k]), m, sum[j][i]);
        }
      for (int j = 0; j < ROWS; j++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(y + (r + j) * dim + c + 16 * i, sum[j][i]);
    }
}

// Where row r of a head comes from and goes to.
static int64_t place(const Layer *a, int64_t head, int64_t r, const int64_t *strides) {
  const int64_t query = r % a->queries, g = r / a->queries % a->group;
  const int64_t agent = r / a->queries / a->group;
  return agent * strides[0] + (head * a->group + g) * strides[1] + query * strides[2];
}

static void gather(const Layer *a, int64_t rows, float *q) {
  for (int64_t i = 0; i < a->heads * rows; i++) {
    const int64_t from = place(a, i / rows, i % rows, a->q_strides);
    for (int64_t d = 0; d < a->dim; d += 16)
      _mm512_storeu_ps(q + i * a->dim + d, _mm512_mul_ps(load(a->q, from + d, a->dtype),
                                                         _mm512_set1_ps(a->factor)));
  }
}

static void scatter(const Layer *a, int64_t rows, const float *out, const float *lse) {
  const int64_t q_heads = a->heads * a->group;
  const int64_t strides[3] = {a->queries * q_heads * a->dim, a->dim, q_heads * a->dim};
  const int64_t flat[3] = {q_heads * a->queries, a->queries, 1};
  for (int64_t i = 0; i < a->heads * rows; i++) {
    const int64_t to = place(a, i / rows, i % rows, strides);
    for (int64_t d = 0; d < a->dim; d += 16)
      store(a->out, to + d, a->out_dtype, _mm512_loadu_ps(out + i * a->dim + d));
    if (a->lse) a->lse[place(a, i / rows, i % rows, flat)] = lse[i] * 0.69314718056f;
  }
}

// Every agent's rows over its own tokens; one query an agent.
static void attend_own(const Layer *a, const float *q, float *score, float *out, float *lse) {
#pragma omp parallel for num_threads(a->threads)
  for (int64_t i = 0; i < a->agents * a->heads; i++) {
    const int64_t agent = i / a->heads, head = i % a->heads, size = a->dtype == FLOAT32 ? 4 : 2;
    const int64_t row = (head * a->agents + agent) * a->group;
    const Few few = {(const char *)a->keys + size * agent * a->key_strides[0],
                     (const char *)a->values + size * agent * a->value_strides[0], a->own,
                     a->key_strides[1], a->key_strides[2], a->value_strides[2], a->dtype};
    attend_few(&few, head, a->visible ? a->visible + agent * a->visible_stride : NULL,
               q + row * a->dim, a->group, a->dim, score + THREAD * ROWS * padded(a->own),
               out + row * a->dim, lse + row);
  }
}

typedef struct { float *q, *own, *turned, *part, *back, *part_lse, *score; } Room;

// All rows over a piece at rest, added to what they attended to before; 0, or 1 without memory.
static int attend_packed(const Layer *a, const Piece *piece, int64_t rows, Room room, float *out,
                         float *lse) {
  const int64_t dim = a->dim, each = rows * dim, n = piece->task.heads;
  const float *q = room.q, *part = room.part;
  if (piece->heads) {
    for (int64_t h = 0; h < n; h++)
      memcpy(room.own + h * each, q + piece->heads[h] * each, 4 * each);
    q = room.own;
  }
  Task task = piece->task;
  task.q = q;
  if (piece->to) {
    turn(q, n * rows, dim, piece->to, a->threads, room.turned);
    task.q = room.turned;
  } else if (piece->scale) {
    for (int64_t i = 0; i < n * rows; i++)
      for (int64_t d = 0; d < dim; d += 16)
        _mm512_storeu_ps(room.turned + i * dim + d,
                         _mm512_mul_ps(_mm512_loadu_ps(q + i * dim + d),
                                       _mm512_loadu_ps(piece->scale + i / rows * dim + d)));
    task.q = room.turned;
  }
  if (task.waves.lines) task.waves.rows = q;
  task.rows = rows;
  task.threads = a->threads;
  task.out = room.part;
  task.lse = room.part_lse;
  if (polykv_attend(&task)) return 1;
  if (piece->back) {
    turn(part, n * rows, dim, piece->back, a->threads, room.back);
    part = room.back;
  }
  for (int64_t i = 0; i < n * rows; i++) {
    const int64_t to = (piece->heads ? piece->heads[i / rows] : i / rows) * rows + i % rows;
    const float before = merged(lse + to, room.part_lse[i]);
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 x = _mm512_loadu_ps(part + i * dim + d), y = _mm512_loadu_ps(out + to * dim + d);
      _mm512_storeu_ps(out + to * dim + d,
                       _mm512_fmadd_ps(_mm512_sub_ps(y, x), _mm512_set1_ps(before), x));
    }
  }
  return 0;
}

// 0, or 1 if there is no memory.
int polykv_layer(const Layer *a) {
  const int64_t rows = a->agents * a->group * a->queries, dim = a->dim;
  const int64_t all = (a->heads * rows + ROWS - 1) / ROWS * ROWS, each = all * dim;
  int64_t scores = a->threads * ROWS * padded(a->own);
  for (int64_t i = 0; i < a->n_pieces; i++) {
    const int64_t n = ROWS * padded(a->pieces[i].few.tokens);
    if (n > scores) scores = n;
  }
  float *const memory = aligned_alloc(64, (4 * (6 * each + 2 * all + scores) + 63) / 64 * 64);
  if (!memory) return 1;
  float *const out = memset(memory + 5 * each, 0, 4 * each), *const lse = out + each;
  const Room room = {memory, memory + each, memory + 2 * each, memory + 3 * each,
                     memory + 4 * each, lse + all, lse + 2 * all};
  for (int64_t i = 0; i < all; i++) lse[i] = -INFINITY;
  gather(a, rows, room.q);
  if (a->keys) attend_own(a, room.q, room.score, out, lse);
  int failed = 0;
  for (int64_t i = 0; i < a->n_pieces && !failed; i++) {
    const Piece *piece = a->pieces + i;
    if (!piece->few.tokens) {
      failed = attend_packed(a, piece, rows, room, out, lse);
      continue;
    }
    for (int64_t h = 0; h < piece->task.heads; h++) {
      const int64_t head = piece->heads ? piece->heads[h] : h;
      attend_few(&piece->few, h, NULL, room.q + head * rows * dim, rows, dim, room.score,
                 out + head * rows * dim, lse + head * rows);
    }
  }
  if (!failed) scatter(a, rows, out, lse);
  free(memory);
  return failed;
}
