// y = x w^T for a few rows x: what one round of decoding multiplies. Each weight is read from memory once, as it lies there;
// bfloat16 is multiplied as it is where the CPU can, and else widened in registers. A row is summed in the same order
// whatever rows stand beside it here.
//
// x [R, I] and w [O, I], both float32 or both bfloat16; y [R, O] float32 or bfloat16. I is a multiple of PAIR.

#include "ffi.h"

#define TILE_ROWS 6  // with TILE_OUTPUTS outputs, the sums fill the registers
#ifdef __AVX512F__
#define TILE_OUTPUTS 4
#else
#define TILE_OUTPUTS 2
#endif
#define CHUNKS_PER_THREAD 4
#define LINE 64  // bytes of a cache line
#define AHEAD 16384  // bytes, measured: a CPU's own prefetching stops at the end of a page

typedef struct {
  const floats* x;  // as `operand` gives it, in the order in which a tile takes it
  const char* w;
  char* y;
  int64_t rows, size, outputs, chunk;
  int is_bf16, y_is_bf16;
} Product;

#define HALVES(is_bf16) (IN_PAIRS(is_bf16) ? 1 : 2)

// What `multiply` takes, of PAIR elements from `from`: one vector with two elements in each lane, or one of two halves.
INLINED floats operand(const char* from, int64_t at, int half, int is_bf16) {
  if (HALVES(is_bf16) == 2) return load(from, at, half, is_bf16);
  floats pairs;
  memcpy(&pairs, from + 2 * at, sizeof pairs);
  return pairs;
}

INLINED void tile(int rows, int outputs, int is_bf16, const floats* x, const char* w, int64_t size,
                  float sums[TILE_ROWS][TILE_OUTPUTS]) {
  floats acc[TILE_ROWS][TILE_OUTPUTS] = {0};
  const int64_t width = is_bf16 ? 2 : 4;
  for (int64_t i = 0; i < size; i += PAIR) {
    // In the order in which they lie, not in the one they are taken in: memory is fastest so (measured).
    for (int64_t at = 0; at < outputs * PAIR * width; at += LINE)
      __builtin_prefetch(w + i * outputs * width + at + AHEAD, 0, 2);
    for (int half = 0; half < HALVES(is_bf16); half++) {
      floats weights[TILE_OUTPUTS];
      for (int o = 0; o < outputs; o++) weights[o] = operand(w + o * size * width, i, half, is_bf16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        const floats value = *x++;
        for (int o = 0; o < outputs; o++) acc[r][o] = multiply(acc[r][o], weights[o], value, is_bf16);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int o = 0; o < outputs; o++) sums[r][o] = sum_of(acc[r][o]);
}

#define ROWS(n) \
  case n: tile(n, outputs, is_bf16, x, w, size, sums); break;
INLINED void any_rows(int rows, int outputs, int is_bf16, const floats* x, const char* w, int64_t size,
                      float sums[TILE_ROWS][TILE_OUTPUTS]) {
  switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) default: ROWS(6) }
}

INLINED void outputs_of(const Product* p, int64_t o, int outputs, int is_bf16) {
  const char* w = p->w + o * p->size * (is_bf16 ? 2 : 4);
  for (int64_t first = 0; first < p->rows; first += TILE_ROWS) {
    const int rows = p->rows - first < TILE_ROWS ? (int)(p->rows - first) : TILE_ROWS;
    float sums[TILE_ROWS][TILE_OUTPUTS];
    any_rows(rows, outputs, is_bf16, p->x + first * (p->size / PAIR) * HALVES(is_bf16), w, p->size, sums);
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < outputs; k++) store(p->y, (first + r) * p->outputs + o + k, sums[r][k], p->y_is_bf16);
  }
}

static void do_chunk(const void* job, int64_t chunk, int64_t worker) {
  (void)worker;
  const Product* p = job;
  const int64_t end = (chunk + 1) * p->chunk < p->outputs ? (chunk + 1) * p->chunk : p->outputs;
  int64_t o = chunk * p->chunk;
  for (; o + TILE_OUTPUTS <= end; o += TILE_OUTPUTS) {
    if (p->is_bf16) outputs_of(p, o, TILE_OUTPUTS, 1);
    else outputs_of(p, o, TILE_OUTPUTS, 0);
  }
  for (; o < end; o++) {
    if (p->is_bf16) outputs_of(p, o, 1, 1);
    else outputs_of(p, o, 1, 0);
  }
}

static void pack(floats* to, const char* x, int64_t rows, int64_t size, int is_bf16) {
  for (int64_t first = 0; first < rows; first += TILE_ROWS) {
    const int64_t end = first + TILE_ROWS < rows ? first + TILE_ROWS : rows;
    for (int64_t i = 0; i < size; i += PAIR)
      for (int half = 0; half < HALVES(is_bf16); half++)
        for (int64_t r = first; r < end; r++) *to++ = operand(x + r * size * (is_bf16 ? 2 : 4), i, half, is_bf16);
  }
}

XLA_FFI_Error* spec_jax_matmul(XLA_FFI_CallFrame* frame) {
  if (is_about_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1), *y = result(frame);
  const int64_t rows = x->dims[0], size = x->dims[1], outputs = w->dims[0], threads = num_threads(frame);
  floats* packed = aligned_alloc(sizeof(floats), (size_t)(rows * size) * sizeof(float));
  if (packed == NULL) return out_of_memory(frame);
  pack(packed, x->data, rows, size, is_bf16(x));
  const int64_t chunks = threads * CHUNKS_PER_THREAD * TILE_OUTPUTS;
  Product product = {.x = packed, .w = w->data, .y = y->data, .rows = rows, .size = size, .outputs = outputs,
                     .chunk = (outputs + chunks - 1) / chunks * TILE_OUTPUTS, .is_bf16 = is_bf16(w),
                     .y_is_bf16 = is_bf16(y)};
  XLA_FFI_Error* error = share(frame, do_chunk, &product, (outputs + product.chunk - 1) / product.chunk, threads);
  free(packed);
  return error;
}
