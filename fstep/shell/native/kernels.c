/* The kernels of the CPU: matrix products over packed weights, paged attention, and what lies between.
 *
 * Plain C with the vector types of GCC and Clang, compiled once for each instruction set in one library without any
 * dependency: `isa` says which to run (see `fstep_isa`). All tensors are float32, ids and lengths int32.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define ROWS_BYTES (1 << 20) /* of x that stay in the second-level cache while panels pass over them */
#define ROWS_A_TASK 8        /* of what is done row by row */

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- Threads: torch's own, if its OpenMP is in the process, since two pools would fight for the cores ---------------- */

extern void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));

struct job {
  void (*task)(struct job *, int64_t, float *);
  void *args;
  int64_t tasks, next, workers;
  float *scratch; /* `each` floats for every worker */
  int64_t each;
};

static void work(void *data) {
  struct job *job = data;
  float *scratch = job->scratch + __atomic_fetch_add(&job->workers, 1, __ATOMIC_RELAXED) * job->each;
  for (;;) {
    int64_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (task >= job->tasks) return;
    job->task(job, task, scratch);
  }
}

static void run(void (*task)(struct job *, int64_t, float *), void *args, int64_t tasks, int threads, float *scratch,
                int64_t each) {
  struct job job = {task, args, tasks, 0, 0, scratch, each};
  threads = (int)least(threads, tasks);
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(work, &job, (unsigned)threads, 0);
  else
    work(&job);
}

/* ---- What the kernels are given -------------------------------------------------------------------------------------- */

struct packing {
  const float *weight; /* [out, in] */
  float *packed;       /* [out rounded up to a panel, in] */
  int64_t out, in;
};

struct product {
  const float *x, *packed, *bias; /* [rows, in] with a stride; the bias [out] may be null */
  float *y;                       /* [rows, out] */
  int64_t rows, in, out, x_stride;
  int64_t rows_each, panels_each; /* of a task */
};

struct norm {
  const float *x, *more, *weight; /* [rows, width] with a stride, [rows, width] or null, [width] */
  float *sum, *y;                 /* x + more, if there is more; normed */
  int64_t rows, width, x_stride;
  float eps;
};

struct silu {
  const float *x; /* [rows, 2 width]: gates, then what they gate */
  float *y;       /* [rows, width] */
  int64_t rows, width;
};

struct rotation {
  float *x; /* [tokens, heads, head_dim], tokens with a stride */
  const float *cos, *sin; /* [tokens, head_dim], [tokens, head_dim / 2] */
  int64_t tokens, heads, head_dim, x_stride;
};

struct attention {
  const float *q, *k, *v;          /* [tokens, heads, head_dim] with a stride; [blocks, kv_heads, block_size, head_dim] */
  float *y;                        /* [tokens, heads, head_dim] */
  const int32_t *block_table, *tasks; /* [requests, table_width]; [n, 4] */
  int64_t q_stride, table_width, heads, kv_heads, head_dim, block_size;
  float scale;
};

/* The rows of an attention task: `group` heads of one query after the other, the first of which is `token`. */
struct span {
  const int32_t *blocks;
  int64_t kv_head, group, token, seen, stride; /* positions that the first query sees; floats from row to row of scores */
};

/* ---- One set of kernels for each instruction set ---------------------------------------------------------------------- */

#if defined(__clang__)
#define TARGET_(text) _Pragma(#text)
#define BEGIN_TARGET(features) TARGET_(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define TARGET_(text) _Pragma(#text)
#define BEGIN_TARGET(features) _Pragma("GCC push_options") TARGET_(GCC target(features))
#define END_TARGET _Pragma("GCC pop_options")
#endif

/* CALL(rows) for 1 row up to the most that a tile has. */
#define CASES(most) CASES_(most)
#define CASES_(most) CASES_##most
#define CASE(rows) \
  case rows: CALL(rows); break;
#define CASES_3 CASE(1) CASE(2) CASE(3)
#define CASES_6 CASES_3 CASE(4) CASE(5) CASE(6)
#define CASES_14 CASES_6 CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)

#define LANES 4
#define TALL 6
#define WIDE 3
#define ISA plain
#define SHUFFLE_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define SHUFFLE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#include "isa.h"

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma")
#define LANES 8
#define TALL 6
#define WIDE 3
#define ISA avx2
#define SHUFFLE_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SHUFFLE_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#include "isa.h"
END_TARGET

BEGIN_TARGET("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")
#define LANES 16
#define TALL 14
#define WIDE 6
#define ISA avx512
#define SHUFFLE_LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SHUFFLE_HIGH(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#include "isa.h"
END_TARGET
#endif

/* ---- The library's functions ------------------------------------------------------------------------------------------ */

enum { PLAIN, AVX2, AVX512 };

/* The best instruction set of this processor. */
int fstep_isa(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq"))
    return AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
  return PLAIN;
}

/* Floats of a vector: a panel has 2 vectors of rows, a strip of keys 4 of positions. */
int fstep_lanes(int isa) { return isa == AVX512 ? 16 : isa == AVX2 ? 8 : 4; }

#if defined(__x86_64__)
#define IN_SET(isa, name) (isa == AVX512 ? avx512_##name : isa == AVX2 ? avx2_##name : plain_##name)
#else
#define IN_SET(isa, name) plain_##name
#endif

void fstep_pack(int isa, int threads, struct packing *p) {
  run(IN_SET(isa, pack_task), p, ceil_div(p->out, 2 * fstep_lanes(isa)), threads, NULL, 0);
}

void fstep_product(int isa, int threads, struct product *p) { IN_SET(isa, product)(p, threads); }

void fstep_norm(int isa, int threads, struct norm *p) {
  run(IN_SET(isa, norm_task), p, ceil_div(p->rows, ROWS_A_TASK), threads, NULL, 0);
}

void fstep_silu(int isa, int threads, struct silu *p) {
  run(IN_SET(isa, silu_task), p, ceil_div(p->rows, ROWS_A_TASK), threads, NULL, 0);
}

void fstep_rotate(int isa, int threads, struct rotation *p) {
  run(IN_SET(isa, rotate_task), p, ceil_div(p->tokens, ROWS_A_TASK), threads, NULL, 0);
}

/* Puts k and v, [tokens, kv_heads, head_dim] with a stride, at their slots; slot -1 is dropped. */
void fstep_write_kv(const float *k, const float *v, int64_t k_stride, int64_t v_stride, const int32_t *slots,
                    int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t block_size, float *k_pages,
                    float *v_pages) {
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0) continue;
    int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
    for (int64_t head = 0; head < kv_heads; head++) {
      int64_t to = ((block * kv_heads + head) * block_size + offset) * head_dim, from = head * head_dim;
      memcpy(k_pages + to, k + token * k_stride + from, (size_t)head_dim * sizeof *k);
      memcpy(v_pages + to, v + token * v_stride + from, (size_t)head_dim * sizeof *v);
    }
  }
}

/* `scratch` has `each` floats for every thread: keys, queries, factors and scores of a task. */
void fstep_attention(int isa, int threads, struct attention *p, int64_t tasks, float *scratch, int64_t each) {
  run(IN_SET(isa, attention_task), p, tasks * p->kv_heads, threads, scratch, each);
}
