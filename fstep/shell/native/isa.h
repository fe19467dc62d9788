/* The kernels for one instruction set; `kernels.c` includes this file once for each, with these set:
 *
 *   ISA        the name of the set
 *   LANES      floats of a vector
 *   TALL       rows of a tile that is 2 vectors wide and is kept in registers
 *   WIDE       the same for a tile that is 4 vectors wide
 *
 * Every sum runs over its terms in an order that depends on its length alone: over the columns in a product, over the
 * dimensions and then the positions in attention. So what a token gets depends neither on its batch, nor on the chunks
 * of its prompt, nor on the number of threads: the bits are the same.
 */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define FN(name) JOIN(ISA, name)
#define VEC FN(vec)
#define INTS FN(ints)
#define PANEL (2 * LANES)
#define STRIP (4 * LANES) /* positions whose keys are worked on at once */

typedef float VEC __attribute__((vector_size(LANES * 4)));
typedef int32_t INTS __attribute__((vector_size(LANES * 4)));
typedef float FN(somewhere) __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); /* not aligned */

INLINE VEC FN(load)(const float *p) { return *(const FN(somewhere) *)p; }
INLINE void FN(store)(float *p, VEC v) { *(FN(somewhere) *)p = v; }
INLINE VEC FN(all)(float x) { return x - (VEC){0}; }

/* The first `count` floats at `p`, and `rest` in the lanes behind them. */
INLINE VEC FN(load_some)(const float *p, int64_t count, float rest) {
  VEC v = FN(all)(rest);
  for (int64_t i = 0; i < count; i++) v[i] = p[i];
  return v;
}

INLINE void FN(store_some)(float *p, int64_t count, VEC v) {
  for (int64_t i = 0; i < count; i++) p[i] = v[i];
}

/* The lanes of `v` added up, in halves. */
INLINE float FN(sum)(VEC v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

/* e to the power of each lane, within two units in the last place: 0 below -87.3, e^88.3 above 88.3, NaN for NaN.
 * Cody and Waite's reduction to |r| <= ln(2) / 2, then the series up to r^7. */
INLINE VEC FN(exp)(VEC x) {
  const VEC low = FN(all)(-87.3f), high = FN(all)(88.3f);
  const float shift = 12582912.0f; /* 1.5 * 2^23: a number added to it is rounded to an integer, in the low bits */
  INTS over = (INTS)(x > high);
  VEC t = (VEC)(((INTS)x & ~over) | ((INTS)high & over));
  VEC shifted = t * 1.44269504f + shift;
  VEC n = shifted - shift;
  VEC r = t - n * 0.693145752f - n * 1.42860677e-6f;
  VEC p = FN(all)(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  VEC power = p * (VEC)(((INTS)shifted << 23) + 0x3f800000);
  return (VEC)((INTS)power & ~(INTS)(x < low));
}

/* acc[rows][width] += a[rows, n] times b[n, width vectors], term by term. If `ahead` isn't null, b comes from far away:
 * some of it is asked for early, and with it what lies at `ahead`, which moves by `step` a term. */
INLINE void FN(accumulate)(const int rows, const int width, VEC *acc, const float *a, int64_t a_stride, const float *b,
                           int64_t b_stride, int64_t n, const float *ahead, int64_t step) {
  for (int64_t k = 0; k < n; k++, b += b_stride) {
    VEC w[4];
    if (ahead) __builtin_prefetch(ahead + k * step, 0, 2);
#pragma GCC unroll 4
    for (int c = 0; c < width; c++) {
      w[c] = FN(load)(b + c * LANES);
      if (ahead) __builtin_prefetch(b + 8 * b_stride + c * LANES, 0, 3);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      VEC v = FN(all)(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int c = 0; c < width; c++) acc[r * width + c] += v * w[c];
    }
  }
}

/* Runs CALL(rows) with `rows` as a constant, so that a tile of so many rows lies in registers. */
#define FOR_TALL(rows) \
  switch (rows) { CASES(TALL) }
#define FOR_WIDE(rows) \
  switch (rows) { CASES(WIDE) }

/* ---- Products ------------------------------------------------------------------------------------------------------
 * A weight [out, in] lies in panels of PANEL rows, each column by column: [out / PANEL, in, PANEL], the last panel
 * filled up with zeros.
 */

static void FN(pack_task)(struct job *job, int64_t panel, float *scratch) {
  (void)scratch;
  const struct packing *p = job->args;
  float *packed = p->packed + panel * PANEL * p->in;
  for (int64_t r = 0; r < PANEL; r++) {
    const float *row = p->weight + (panel * PANEL + r) * p->in;
    int there = panel * PANEL + r < p->out;
    for (int64_t k = 0; k < p->in; k++) packed[k * PANEL + r] = there ? row[k] : 0;
  }
}

INLINE void FN(tile)(const int rows, const struct product *p, int64_t row, int64_t panel, const float *ahead,
                     int64_t step) {
  VEC acc[TALL * 2];
#pragma GCC unroll 32
  for (int i = 0; i < 2 * rows; i++) acc[i] = (VEC){0};
  const float *x = p->x + row * p->x_stride, *w = p->packed + panel * PANEL * p->in;
  FN(accumulate)(rows, 2, acc, x, p->x_stride, w, PANEL, p->in, ahead, step);
  int64_t column = panel * PANEL;
#pragma GCC unroll 32
  for (int i = 0; i < 2 * rows; i++) {
    int64_t at = column + i % 2 * LANES, left = p->out - at;
    float *y = p->y + (row + i / 2) * p->out + at;
    if (left >= LANES)
      FN(store)(y, p->bias ? acc[i] + FN(load)(p->bias + at) : acc[i]);
    else if (left > 0)
      FN(store_some)(y, left, p->bias ? acc[i] + FN(load_some)(p->bias + at, left, 0) : acc[i]);
  }
}

static void FN(any_tile)(int64_t rows, const struct product *p, int64_t row, int64_t panel, const float *ahead,
                         int64_t step) {
#define CALL(n) FN(tile)(n, p, row, panel, ahead, step)
  FOR_TALL(rows)
#undef CALL
}

/* Some panels times some rows of x, in tiles of like sizes; the next panel is asked for while one is worked on. */
static void FN(product_task)(struct job *job, int64_t task, float *scratch) {
  (void)scratch;
  const struct product *p = job->args;
  int64_t panels = ceil_div(p->out, PANEL), parts = ceil_div(panels, p->panels_each);
  int64_t first = task / parts * p->rows_each, end = least(first + p->rows_each, p->rows);
  int64_t panel = task % parts * p->panels_each, stop = least(panel + p->panels_each, panels);
  int64_t tiles = ceil_div(end - first, TALL), step = tiles > 1 ? PANEL / 2 : PANEL;
  for (; panel < stop; panel++) {
    const float *ahead = p->packed + (panel + (panel + 1 < stop)) * PANEL * p->in;
    for (int64_t row = first, left = tiles; left; left--) {
      int64_t rows = ceil_div(end - row, left);
      FN(any_tile)(rows, p, row, panel, ahead, step);
      if (tiles - left < 1) ahead += p->in * step;
      row += rows;
    }
  }
}

static void FN(product)(struct product *p, int threads) {
  if (p->rows == 0) return;
  int64_t panels = ceil_div(p->out, PANEL), most = ROWS_BYTES / (4 * p->in) + 1;
  p->rows_each = ceil_div(p->rows, ceil_div(p->rows, most));
  p->panels_each = least(panels / (4 * threads) + 1, 16);
  run(FN(product_task), p, ceil_div(p->rows, p->rows_each) * ceil_div(panels, p->panels_each), threads, NULL, 0);
}

/* ---- Between the products ------------------------------------------------------------------------------------------ */

/* `count` floats at `p`, the last of a row perhaps fewer than LANES, with 0 behind them; and back. */
INLINE VEC FN(part)(const float *p, int64_t count) { return count < LANES ? FN(load_some)(p, count, 0) : FN(load)(p); }
INLINE void FN(put)(float *p, int64_t count, VEC v) {
  if (count < LANES)
    FN(store_some)(p, count, v);
  else
    FN(store)(p, v);
}

static void FN(norm_task)(struct job *job, int64_t task, float *scratch) {
  (void)scratch;
  const struct norm *p = job->args;
  int64_t n = p->width;
  for (int64_t row = task * ROWS_A_TASK; row < least((task + 1) * ROWS_A_TASK, p->rows); row++) {
    const float *x = p->x + row * p->x_stride, *weight = p->weight;
    float *sum = p->more ? p->sum + row * n : NULL, *y = p->y + row * n;
    VEC squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
      VEC v = FN(part)(x + i, n - i);
      if (sum) FN(put)(sum + i, n - i, v += FN(part)(p->more + row * n + i, n - i));
      squares += v * v;
    }
    float scale = 1.0f / __builtin_sqrtf(FN(sum)(squares) / (float)n + p->eps);
    if (sum) x = sum;
    for (int64_t i = 0; i < n; i += LANES)
      FN(put)(y + i, n - i, FN(part)(x + i, n - i) * scale * FN(part)(weight + i, n - i));
  }
}

static void FN(silu_task)(struct job *job, int64_t task, float *scratch) {
  (void)scratch;
  const struct silu *p = job->args;
  int64_t n = p->width;
  for (int64_t row = task * ROWS_A_TASK; row < least((task + 1) * ROWS_A_TASK, p->rows); row++) {
    const float *gate = p->x + row * 2 * n, *up = gate + n;
    for (int64_t i = 0; i < n; i += LANES) {
      VEC g = FN(part)(gate + i, n - i);
      FN(put)(p->y + row * n + i, n - i, g / (1.0f + FN(exp)(-g)) * FN(part)(up + i, n - i));
    }
  }
}

static void FN(rotate_task)(struct job *job, int64_t task, float *scratch) {
  (void)scratch;
  const struct rotation *p = job->args;
  int64_t half = p->head_dim / 2;
  for (int64_t token = task * ROWS_A_TASK; token < least((task + 1) * ROWS_A_TASK, p->tokens); token++) {
    const float *cos = p->cos + token * p->head_dim, *sin = p->sin + token * half;
    for (int64_t head = 0; head < p->heads; head++) {
      float *first = p->x + token * p->x_stride + head * p->head_dim, *second = first + half;
      for (int64_t i = 0; i < half; i += LANES) {
        VEC a = FN(part)(first + i, half - i), b = FN(part)(second + i, half - i);
        VEC c = FN(part)(cos + i, half - i), s = FN(part)(sin + i, half - i);
        FN(put)(first + i, half - i, a * c - b * s);
        FN(put)(second + i, half - i, b * c + a * s);
      }
    }
  }
}

/* ---- Attention -----------------------------------------------------------------------------------------------------
 * A task is some queries of one request and one KV head, with all query heads that share it: `rows` in all. Scores lie
 * in the scratch, [rows, positions]; then each row's softmax, then the weighted sum of the values.
 */

/* Where K or V of a position begins; the rest of its block follows. */
INLINE const float *FN(cell)(const struct attention *p, const float *pages, const int32_t *blocks, int64_t kv_head,
                             int64_t position) {
  int64_t block = blocks[position / p->block_size];
  return pages + ((block * p->kv_heads + kv_head) * p->block_size + position % p->block_size) * p->head_dim;
}

/* rows[LANES] of LANES floats each, transposed: what stands in rows i and i + LANES / 2 is laced, log2(LANES) times. */
INLINE void FN(transpose)(VEC *rows) {
#pragma GCC unroll 4
  for (int turn = 1; turn < LANES; turn *= 2) {
    VEC next[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = SHUFFLE_LOW(rows[i], rows[i + LANES / 2]);
      next[2 * i + 1] = SHUFFLE_HIGH(rows[i], rows[i + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

/* K of LANES positions from `first` on, of which `count` are there: where they lie, if it is one after the other, else
 * copied to `copy`. The values of a whole block are asked for, since they are wanted next. */
INLINE const float *FN(some_keys)(const struct attention *p, const int32_t *blocks, int64_t kv_head, int64_t first,
                                  int64_t count, float *copy) {
  if (first % p->block_size + LANES <= p->block_size) {
    const float *k = FN(cell)(p, p->k, blocks, kv_head, first), *v = p->v + (k - p->k);
    for (int64_t i = 0; i < LANES * p->head_dim; i += 16) __builtin_prefetch(v + i, 0, 2);
    return k;
  }
  for (int64_t i = 0; i < LANES; i++) {
    const float *k = i < count ? FN(cell)(p, p->k, blocks, kv_head, first + i) : NULL;
    for (int64_t d = 0; d < p->head_dim; d++) copy[i * p->head_dim + d] = k ? k[d] : 0;
  }
  return copy;
}

/* The keys of STRIP positions from `first` on, of which `count` are there, transposed: [head_dim, STRIP]. What the
 * others come to is not looked at. */
INLINE void FN(keys)(const struct attention *p, const int32_t *blocks, int64_t kv_head, int64_t first, int64_t count,
                     float *keys, float *copy) {
  for (int64_t group = 0; group < count; group += LANES) {
    const float *k = FN(some_keys)(p, blocks, kv_head, first + group, count - group, copy);
    for (int64_t d = 0; d < p->head_dim; d += LANES) {
      VEC rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) rows[i] = FN(load)(k + i * p->head_dim + d);
      FN(transpose)(rows);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) FN(store)(keys + (d + i) * STRIP + group, rows[i]);
    }
  }
}

INLINE void FN(score_tile)(const int rows, const float *q, int64_t head_dim, const float *keys, float *scores,
                           int64_t stride) {
  VEC acc[WIDE * 4];
#pragma GCC unroll 32
  for (int i = 0; i < 4 * rows; i++) acc[i] = (VEC){0};
  FN(accumulate)(rows, 4, acc, q, head_dim, keys, STRIP, head_dim, NULL, 0);
#pragma GCC unroll 32
  for (int i = 0; i < 4 * rows; i++) FN(store)(scores + i / 4 * stride + i % 4 * LANES, acc[i]);
}

/* Turns the first `seen` scores into the weights of a softmax that is not normed; the factor that norms it. */
INLINE float FN(softmax)(float *scores, int64_t seen) {
  int64_t end = ceil_div(seen, LANES) * LANES;
  for (int64_t i = seen; i < end; i++) scores[i] = -__builtin_inff();
  VEC highest = FN(load)(scores);
  for (int64_t i = LANES; i < end; i += LANES) {
    VEC v = FN(load)(scores + i);
    INTS more = (INTS)(v > highest);
    highest = (VEC)(((INTS)v & more) | ((INTS)highest & ~more));
  }
  float top = highest[0];
  for (int i = 1; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
  VEC total = {0};
  for (int64_t i = 0; i < end; i += LANES) {
    VEC e = FN(exp)(FN(load)(scores + i) - top);
    FN(store)(scores + i, e);
    total += e;
  }
  return 1.0f / FN(sum)(total);
}

/* The values of positions `first` to `stop`, weighted, added to `acc`. */
INLINE void FN(add_values)(const int rows, const int width, VEC *acc, const struct attention *p, const int32_t *blocks,
                           int64_t kv_head, int64_t at, const float *weights, int64_t stride, int64_t first,
                           int64_t stop) {
  while (first < stop) {
    int64_t count = least(p->block_size - first % p->block_size, stop - first);
    const float *v = FN(cell)(p, p->v, blocks, kv_head, first) + at;
    FN(accumulate)(rows, width, acc, weights + first, stride, v, p->head_dim, count, NULL, 0);
    first += count;
  }
}

/* The output of some rows, `width` vectors of it: together as far as all of them see, then each by itself. */
INLINE void FN(value_tile)(const int rows, const int width, const struct attention *p, const struct span *span,
                           int64_t row, int64_t at, const float *weights, const float *factors) {
  VEC acc[WIDE * 4];
  int64_t together = span->seen + row / span->group;
#pragma GCC unroll 32
  for (int i = 0; i < width * rows; i++) acc[i] = (VEC){0};
  FN(add_values)(rows, width, acc, p, span->blocks, span->kv_head, at, weights, span->stride, 0, together);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    int64_t query = (row + r) / span->group, head = span->kv_head * span->group + (row + r) % span->group;
    FN(add_values)(1, width, acc + r * width, p, span->blocks, span->kv_head, at, weights + r * span->stride,
                   span->stride, together, span->seen + query);
    float *y = p->y + ((span->token + query) * p->heads + head) * p->head_dim + at;
#pragma GCC unroll 4
    for (int c = 0; c < width; c++) FN(store)(y + c * LANES, acc[r * width + c] * factors[row + r]);
  }
}

static void FN(values)(int64_t rows, const struct attention *p, const struct span *span, int64_t row,
                       const float *weights, const float *factors) {
  int64_t at = 0;
  for (; at + 4 * LANES <= p->head_dim; at += 4 * LANES) {
#define CALL(n) FN(value_tile)(n, 4, p, span, row, at, weights, factors)
    FOR_WIDE(rows)
#undef CALL
  }
  for (; at < p->head_dim; at += LANES) {
#define CALL(n) FN(value_tile)(n, 1, p, span, row, at, weights, factors)
    FOR_WIDE(rows)
#undef CALL
  }
}

static void FN(attention_task)(struct job *job, int64_t task, float *scratch) {
  const struct attention *p = job->args;
  const int32_t *todo = p->tasks + task / p->kv_heads * 4; /* request, first token, tokens, positions the first sees */
  struct span span = {p->block_table + todo[0] * p->table_width, task % p->kv_heads, p->heads / p->kv_heads, todo[1],
                      todo[3], 0};
  int64_t rows = todo[2] * span.group, positions = todo[3] + todo[2] - 1;
  span.stride = ceil_div(positions, STRIP) * STRIP;
  float *keys = scratch, *copy = keys + p->head_dim * STRIP, *q = copy + p->head_dim * LANES;
  float *factors = q + rows * p->head_dim, *scores = factors + rows;
  for (int64_t row = 0; row < rows; row++) {
    int64_t token = span.token + row / span.group, head = span.kv_head * span.group + row % span.group;
    const float *from = p->q + token * p->q_stride + head * p->head_dim;
    for (int64_t d = 0; d < p->head_dim; d++) q[row * p->head_dim + d] = from[d] * p->scale;
  }
  for (int64_t first = 0; first < positions; first += STRIP) {
    FN(keys)(p, span.blocks, span.kv_head, first, least(positions - first, STRIP), keys, copy);
    int64_t blind = first < span.seen ? 0 : (first - span.seen + 1) * span.group; /* rows that see none of these */
    for (int64_t row = blind; row < rows; row += WIDE) {
#define CALL(n) \
  FN(score_tile)(n, q + row * p->head_dim, p->head_dim, keys, scores + row * span.stride + first, span.stride)
      FOR_WIDE(least(rows - row, WIDE))
#undef CALL
    }
  }
  for (int64_t row = 0; row < rows; row++)
    factors[row] = FN(softmax)(scores + row * span.stride, span.seen + row / span.group);
  for (int64_t row = 0; row < rows; row += WIDE)
    FN(values)(least(rows - row, WIDE), p, &span, row, scores + row * span.stride, factors);
}

#undef JOIN_
#undef JOIN
#undef FN
#undef VEC
#undef INTS
#undef PANEL
#undef STRIP
#undef FOR_TALL
#undef FOR_WIDE
#undef SHUFFLE_LOW
#undef SHUFFLE_HIGH
#undef ISA
#undef LANES
#undef TALL
#undef WIDE
