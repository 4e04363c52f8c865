// What the kernels for CPUs share: XLA's calling convention (XLA FFI), its threads, and vectors of float32 or bfloat16.
// The vectors are those of GCC and Clang, so that this compiles for x86 and for ARM.

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINED static inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------------------------------
// Vectors
// ---------------------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define PAIR (2 * LANES)  // elements that `load` takes as two halves

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

// One half of PAIR elements from `from`: of bfloat16 those at even places, or at odd ones, as that is cheap to widen.
INLINED floats load(const char* from, int64_t at, int half, int is_bf16) {
  floats values;
  if (is_bf16) {
    words pairs;
    memcpy(&pairs, from + 2 * at, sizeof pairs);
    return half == 0 ? (floats)(pairs << 16) : (floats)(pairs & 0xffff0000u);
  }
  memcpy(&values, from + 4 * (at + half * LANES), sizeof values);
  return values;
}

// Where the element in `lane` of `half` lies among the PAIR.
INLINED int64_t place(int half, int lane, int is_bf16) { return is_bf16 ? 2 * lane + half : half * LANES + lane; }

INLINED void store(char* to, int64_t at, float value, int is_bf16) {
  if (!is_bf16) {
    memcpy(to + 4 * at, &value, 4);
    return;
  }
  uint32_t word;
  memcpy(&word, &value, 4);
  // To nearest, ties to even; what is no number stays none.
  const uint16_t bits = value != value ? (word >> 16) | 0x40 : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  memcpy(to + 2 * at, &bits, 2);
}

INLINED floats same(float value) { return (floats){0} + value; }

// Lanes hold the same 32 bits each: a float32, or a pair of bfloat16.
INLINED floats same_word(uint32_t word) { return (floats)((words){0} + word); }

// Whether `multiply` takes a pair of elements in each lane, as bfloat16 lies in memory, or one widened to float32.
#ifdef __AVX512BF16__
#define IN_PAIRS(is_bf16) (is_bf16)
#else
#define IN_PAIRS(is_bf16) 0
#endif

// sum + x y, lane by lane; of pairs, both products are added.
INLINED floats multiply(floats sum, floats x, floats y, int is_bf16) {
#ifdef __AVX512BF16__
  if (is_bf16) return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#endif
  return sum + x * y;
}

// Turns LANES vectors: lane j of vector i becomes lane i of vector j.
#ifdef __AVX512F__
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#ifdef __clang__
#define MIX(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define MIX(x, y, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif
INLINED void turn(floats x[LANES]) {
  for (int done = 1; done < LANES; done *= 2) {
    floats mixed[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      mixed[2 * i] = MIX(x[i], x[i + LANES / 2], LOW);
      mixed[2 * i + 1] = MIX(x[i], x[i + LANES / 2], HIGH);
    }
    memcpy(x, mixed, sizeof mixed);
  }
}

INLINED floats choose(ints is_first, floats first, floats second) {
  return (floats)(((words)is_first & (words)first) | (~(words)is_first & (words)second));
}

INLINED float sum_of(floats lanes) {
  typedef float quad __attribute__((vector_size(16)));
  quad parts[LANES / 4];
  memcpy(parts, &lanes, sizeof parts);
  for (int half = LANES / 8; half > 0; half /= 2)
#pragma GCC unroll 2
    for (int part = 0; part < half; part++) parts[part] += parts[part + half];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Calls
// ---------------------------------------------------------------------------------------------------------------------

// XLA asks once for what version a handler was compiled.
static int is_about_version(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start == NULL || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static const XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int number) { return frame->args.args[number]; }
static const XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame) { return frame->rets.rets[0]; }
static int is_bf16(const XLA_FFI_Buffer* buffer) { return buffer->dtype == XLA_FFI_DataType_BF16; }

static XLA_FFI_Error* out_of_memory(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "spec_jax: a kernel got no memory",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static int forgiven(XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  if (error == NULL) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// Threads
// ---------------------------------------------------------------------------------------------------------------------

#define MAX_THREADS 64

static int64_t num_threads(XLA_FFI_CallFrame* frame) {
  int64_t number = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &number};
  if (forgiven(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) || number < 1) return 1;
  return number < MAX_THREADS ? number : MAX_THREADS;
}

typedef void Work(const void* job, int64_t item, int64_t worker);

typedef struct {
  Work* work;
  const void* job;
  int64_t items;
  atomic_long next, done, workers, users;
} Crew;

static void leave(Crew* crew) {
  if (atomic_fetch_sub(&crew->users, 1) == 1) free(crew);
}

// A thread may come to this when all is done, and the job is gone: the crew lives as long as its last user.
static void help(void* data) {
  Crew* crew = data;
  const int64_t worker = atomic_fetch_add(&crew->workers, 1);
  for (;;) {
    const int64_t item = atomic_fetch_add(&crew->next, 1);
    if (item >= crew->items) break;
    crew->work(crew->job, item, worker);
    atomic_fetch_add(&crew->done, 1);
  }
  leave(crew);
}

// Does `work` for items 0 .. items - 1 on at most `threads` threads of XLA, this one among them, numbered from 0. It never
// waits for a thread that has not begun.
static XLA_FFI_Error* share(XLA_FFI_CallFrame* frame, Work* work, const void* job, int64_t items, int64_t threads) {
  Crew* crew = malloc(sizeof *crew);
  if (crew == NULL) return out_of_memory(frame);
  *crew = (Crew){.work = work, .job = job, .items = items};
  atomic_store(&crew->users, 2);
  for (int64_t i = 1; i < threads && i < items; i++) {
    atomic_fetch_add(&crew->users, 1);
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, crew};
    if (forgiven(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) leave(crew);
  }
  help(crew);
  while (atomic_load(&crew->done) < items) sched_yield();
  leave(crew);
  return NULL;
}
