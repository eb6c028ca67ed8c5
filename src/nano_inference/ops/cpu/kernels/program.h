// A decoder step as a list of operations on numbered buffers, run in one call. Python records the list once
// (ops/cpu/recorder.py) and runs it with every batch.
#pragma once
#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "rows.h"

namespace nano {

enum class Kind : int32_t { EMBED = 0, LINEAR = 1, NORM = 2, ROPE_AND_STORE = 3, ATTENTION = 4, GATE = 5, MEET = 6, LORA = 7 };

// One operation.
struct Op {
  Kind kind;
  Finish finish;        // LINEAR, GATE
  int32_t input, output;  // buffers, -1 for none
  int32_t residual;     // buffer: NORM; MEET: queries
  int32_t layer, plan;  // ROPE_AND_STORE, ATTENTION; LORA: plan is the product's index within an adapter
  int32_t wide;         // NORM: out is float32
  float scale;          // EMBED; NORM and ADD: factor of the addend
  int32_t read_once;    // NORM: only the following product reads the output
  int64_t first_column;  // LINEAR, ROPE_AND_STORE: first column to read in a row of the input
  // LINEAR: number of products, each with an equal share of the weight's rows; 0: one product. MEET: query heads
  int64_t heads;
  int64_t input_step, output_step, first_output;  // LINEAR by heads: distance between heads in rows of input and
                                                  // output, and the first column of the output; MEET: per query, per key
  const void *weight, *bias;  // EMBED, LINEAR; ATTENTION: bias are its sinks, float
  int64_t rows, columns;      // of the weight; NORM, LORA: columns of the row; GATE: rows is the output's width; MEET: columns is the latent's
  NormWeight norm, key_norm, value_norm;  // NORM; MEET; ROPE_AND_STORE: of queries, keys, values; data is null for none
  const float *cos, *sin;     // ROPE_AND_STORE: [positions, turning / 2]
  const float* query_scales;  // ROPE_AND_STORE: [positions], or null
  int64_t turning;            // ROPE_AND_STORE, MEET: rotated numbers per head
  int64_t interleaved;        // ROPE_AND_STORE: rotated pairs are adjacent
  int64_t query_heads, kv_heads, head_dim;  // ROPE_AND_STORE; without KV heads nothing is stored
  int64_t joint;              // ROPE_AND_STORE: values are the unrotated keys, and a row contains them once
  Segments segments;          // LINEAR
  const Quantised* codes;     // EMBED, LINEAR: the weight in codes, instead of `weight`; or null
  // EMBED: first token of the weight; number of tokens over all ranks, 0: the weight's rows
  int64_t first_token, vocab;
};

struct Layer {
  void *keys, *values;   // [kv heads][units], with strides in numbers (kv_store.h)
  const int64_t* units;  // block -> unit, or null
  int64_t head_stride, unit_stride;
};

struct Window {
  int64_t size;  // 0: none
  float scale, cap;  // as in AttentionShape
  int64_t num_heads, num_kv_heads, head_dim;
};

struct ProgramSpec {
  int64_t num_ops, num_layers, num_windows;
  const Op* ops;
  const Layer* layers;
  const Window* windows;
  int64_t is_bf16;
  int64_t block_size, num_blocks, num_positions;
  int64_t kv_codes;  // keys and values are codes (kv_store.h)
};

struct Step {
  BatchRows rows;
  const int64_t* input_ids;  // [N]
  void* const* buffers;      // each with room for N rows
  const int64_t* row_bytes;  // of each buffer
  const int64_t* row_adapters;        // [N], -1 for none; null if no row has one
  const LoraParts* const* adapters;  // [num_adapters], each indexed by product
  int64_t num_adapters;
  int64_t num_threads;
  int64_t first, last;  // operations to run; a step begins with a run from operation 0
};

}  // namespace nano
