// Attention over a paged cache. For one KV head and a block of query rows at a time: scores of LANES positions at once, over
// keys turned so that positions lie side by side; then the softmax; then the weighted sum of the values. Pages are read
// where they lie, and only those that a row of the block sees.
//
// q [B, T, H, hd]; keys and values [P, K, page, hd], of the same dtype, float32 or bfloat16; block tables [B, N] and positions
// [B, T] int32; the factor on the scores, float32; the sliding window, int32 (all positions: the largest int). hd is a
// multiple of PAIR, page of LANES. Meaning and result as in `xla.py`.

#include "ffi.h"

#define TILE_ROWS 6
#define BLOCK_ROWS 48  // query rows that share a turned key

typedef struct {
  const char *q, *k, *v;
  char* out;
  const int32_t *tables, *positions;
  int64_t T, H, K, G, hd, page, num_pages, table_size;
  float scale;
  int64_t window;
  int64_t rows, blocks, scratch_size;  // query rows of a block, blocks per KV head; floats per worker
  float* scratch;
  int is_bf16;
} Attention;

// e^x for x <= 0: 2^n times a polynomial of the rest, which lies within half of ln 2.
INLINED floats exponential(floats x) {
  const floats least = same(-87.0f);
  x = choose(x < least, least, x);  // what is no number stays none
  const ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
  const floats turns = __builtin_convertvector(n, floats);
  const floats r = (x - turns * 0.693359375f) + turns * 2.12194440e-4f;
  floats p = same(1.0f / 720);
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (floats)((n + 127) << 23);
}

static int64_t page_start(const Attention* a, int64_t b, int64_t s, int64_t head) {
  int64_t page = a->tables[b * a->table_size + s / a->page];
  page = page < 0 ? 0 : page < a->num_pages ? page : a->num_pages - 1;  // as XLA's gather does
  return ((page * a->K + head) * a->page + s % a->page) * a->hd;
}

INLINED void score_tile(int rows, int is_bf16, const float* q, int64_t size, const floats* turned, float* scores,
                        int64_t stride) {
  floats acc[TILE_ROWS] = {0};
  for (int64_t i = 0; i < size; i++)
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      uint32_t word;
      memcpy(&word, q + r * size + i, 4);
      acc[r] = multiply(acc[r], turned[i], same_word(word), is_bf16);
    }
  for (int r = 0; r < rows; r++) memcpy(scores + r * stride, &acc[r], sizeof acc[r]);
}

// The keys of LANES positions from `k`, as `multiply` takes them; vector i holds operand i of each position.
INLINED void turn_keys(const char* k, int64_t hd, int is_bf16, floats* turned) {
  const int64_t size = hd * (is_bf16 ? 2 : 4);
  for (int64_t at = 0; at < size; at += sizeof(floats)) {
    floats keys[LANES];
    for (int64_t i = 0; i < LANES; i++) memcpy(&keys[i], k + i * size + at, sizeof keys[i]);
    turn(keys);
    for (int64_t i = 0; i < LANES; i++) {
      if (!is_bf16 || IN_PAIRS(is_bf16)) *turned++ = keys[i];
      else for (int half = 0; half < 2; half++) *turned++ = load((const char*)&keys[i], 0, half, 1);
    }
  }
}

// PAIR channels from d of the weighted sums of the values at positions first .. end - 1.
INLINED void value_tile(const Attention* a, int rows, int is_bf16, int64_t b, int64_t head, int64_t d, int64_t first,
                        int64_t end, const float* weights, int64_t stride, floats out[TILE_ROWS][2]) {
  floats acc[TILE_ROWS][2] = {0};
  for (int64_t s = first; s < end; s += LANES) {
    const char* v = a->v + (page_start(a, b, s, head) + d) * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < LANES; i++) {
      const floats low = load(v, i * a->hd, 0, is_bf16), high = load(v, i * a->hd, 1, is_bf16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        acc[r][0] += low * weights[r * stride + s - first + i];
        acc[r][1] += high * weights[r * stride + s - first + i];
      }
    }
  }
  memcpy(out, acc, sizeof acc);
}

INLINED ints between(ints values, int64_t low, int64_t high) {
  return (values >= (int32_t)low) & (values <= (int32_t)high);
}

// Makes weights of the scores at positions first .. end - 1, of which the row sees low .. high, and returns their sum.
static float softmax(float* scores, int64_t first, int64_t end, int64_t low, int64_t high, float scale) {
  floats most = same(-1e30f), sum = {0};
  ints at;
  for (int lane = 0; lane < LANES; lane++) at[lane] = lane;
  for (int64_t s = first; s < end; s += LANES) {
    floats x;
    memcpy(&x, scores + s - first, sizeof x);
    x = choose(between(at + (int32_t)s, low, high), x * scale, same(-1e30f));
    memcpy(scores + s - first, &x, sizeof x);
    most = choose(x > most, x, most);
  }
  float largest = most[0];
  for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  for (int64_t s = first; s < end; s += LANES) {
    floats x;
    memcpy(&x, scores + s - first, sizeof x);
    x = choose(between(at + (int32_t)s, low, high), exponential(x - largest), same(0));
    memcpy(scores + s - first, &x, sizeof x);
    sum += x;
  }
  return sum_of(sum);
}

#define EACH(n) \
  case n: RUN(n); break;
#define ANY_ROWS(rows) \
  switch (rows) { EACH(1) EACH(2) EACH(3) EACH(4) EACH(5) EACH(6) }

INLINED void attend(const Attention* a, int64_t item, int64_t worker, int is_bf16) {
  const int64_t block = item % a->blocks, head = item / a->blocks % a->K, b = item / a->blocks / a->K;
  const int64_t first_row = block * a->rows, all = a->T * a->G;  // row r is query head r % G of token r / G
  const int64_t rows = all - first_row < a->rows ? all - first_row : a->rows;
  const int64_t hd = a->hd, width = is_bf16 ? 2 : 4, S = a->table_size * a->page;

  // What the rows see, cut to whole vectors.
  int64_t first = S, end = 0;
  int64_t lows[BLOCK_ROWS], highs[BLOCK_ROWS];
  for (int64_t r = 0; r < rows; r++) {
    const int64_t position = a->positions[b * a->T + (first_row + r) / a->G];
    highs[r] = position < S - 1 ? position : S - 1;
    lows[r] = position - a->window + 1 > 0 ? position - a->window + 1 : 0;
    if (lows[r] > highs[r]) continue;
    first = lows[r] < first ? lows[r] : first;
    end = highs[r] + 1 > end ? highs[r] + 1 : end;
  }
  first = first < end ? first / LANES * LANES : 0;
  end = (end + LANES - 1) / LANES * LANES;
  const int64_t stride = end - first;

  const int64_t size = IN_PAIRS(is_bf16) ? hd / 2 : hd;  // operands of a row
  float* q = a->scratch + worker * a->scratch_size;      // [rows, size]
  floats* turned = (floats*)(q + a->rows * hd);          // [size] of LANES positions
  float* scores = (float*)(turned + hd);                 // [rows, stride]
  const int64_t row_at = ((b * a->T) * a->H + head * a->G) * hd;
  for (int64_t r = 0; r < rows; r++) {
    const char* row = a->q + (row_at + ((first_row + r) / a->G * a->H + (first_row + r) % a->G) * hd) * width;
    if (IN_PAIRS(is_bf16)) {
      memcpy(q + r * size, row, size * 4);
      continue;
    }
    for (int64_t d = 0; d < hd; d += PAIR)
      for (int half = 0; half < 2; half++) {
        const floats x = load(row, d, half, is_bf16);
        for (int lane = 0; lane < LANES; lane++) q[r * size + d + place(half, lane, is_bf16)] = x[lane];
      }
  }

  for (int64_t s = first; s < end; s += LANES) {
    turn_keys(a->k + page_start(a, b, s, head) * width, hd, is_bf16, turned);
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
#define RUN(n) score_tile(n, is_bf16, q + r * size, size, turned, scores + r * stride + s - first, stride)
      ANY_ROWS(rows - r < TILE_ROWS ? rows - r : TILE_ROWS)
#undef RUN
    }
  }

  float totals[BLOCK_ROWS];
  for (int64_t r = 0; r < rows; r++) {
    totals[r] = softmax(scores + r * stride, first, end, lows[r], highs[r], a->scale);
    if (totals[r] == 0) totals[r] = 1;  // a row that sees nothing
  }

  for (int64_t r = 0; r < rows; r += TILE_ROWS) {
    const int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
    for (int64_t d = 0; d < hd; d += PAIR) {
      floats out[TILE_ROWS][2];
#define RUN(n) value_tile(a, n, is_bf16, b, head, d, first, end, scores + r * stride, stride, out)
      ANY_ROWS(count)
#undef RUN
      for (int64_t i = 0; i < count; i++) {
        const int64_t row = first_row + r + i;
        const int64_t at = row_at + (row / a->G * a->H + row % a->G) * hd + d;
        for (int half = 0; half < 2; half++)
          for (int lane = 0; lane < LANES; lane++)
            store(a->out, at + place(half, lane, is_bf16), out[i][half][lane] / totals[r + i], is_bf16);
      }
    }
  }
}

static void do_block(const void* job, int64_t item, int64_t worker) {
  const Attention* a = job;
  if (a->is_bf16) attend(a, item, worker, 1);
  else attend(a, item, worker, 0);
}

XLA_FFI_Error* spec_jax_paged_attention(XLA_FFI_CallFrame* frame) {
  if (is_about_version(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *k = argument(frame, 1), *v = argument(frame, 2);
  const XLA_FFI_Buffer *tables = argument(frame, 3), *positions = argument(frame, 4);
  Attention a = {
      .q = q->data, .k = k->data, .v = v->data, .out = result(frame)->data, .tables = tables->data,
      .positions = positions->data, .T = q->dims[1], .H = q->dims[2], .K = k->dims[1], .G = q->dims[2] / k->dims[1],
      .hd = q->dims[3], .page = k->dims[2], .num_pages = k->dims[0], .table_size = tables->dims[1],
      .scale = *(const float*)argument(frame, 5)->data, .window = *(const int32_t*)argument(frame, 6)->data,
      .is_bf16 = is_bf16(q),
  };
  const int64_t all_rows = a.T * a.G, heads = q->dims[0] * a.K, most = num_threads(frame);
  a.blocks = (all_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  // Blocks of fewer rows turn more keys, but where there are few heads they keep all threads busy.
  while (heads * a.blocks % most != 0 && heads * a.blocks < 4 * most && all_rows / (a.blocks + 1) >= TILE_ROWS)
    a.blocks++;
  if (heads * a.blocks == 0) return NULL;
  a.rows = (all_rows + a.blocks - 1) / a.blocks;
  a.blocks = (all_rows + a.rows - 1) / a.rows;
  const int64_t items = heads * a.blocks, threads = items < most ? items : most;
  const int64_t S = a.table_size * a.page, all = q->dims[0] * a.T;
  int64_t longest = 0;
  for (int64_t i = 0; i < all; i++) longest = a.positions[i] >= longest ? (int64_t)a.positions[i] + 1 : longest;
  longest = longest < S ? (longest + LANES - 1) / LANES * LANES : S;
  a.scratch_size = a.rows * a.hd + LANES * a.hd + a.rows * longest;
  a.scratch = aligned_alloc(sizeof(floats), (size_t)(threads * a.scratch_size) * sizeof(float));
  if (a.scratch == NULL) return out_of_memory(frame);
  XLA_FFI_Error* error = share(frame, do_block, &a, items, threads);
  free(a.scratch);
  return error;
}
