// Arguments of the kernels of layers with a state (state.cpp).
#pragma once
#include <cstdint>

namespace nano {

// Rows of sequences, and the units that store their states.
struct StateStep {
  int64_t num_rows, num_chunks, block_size, table_stride, num_blocks, num_units;
  int64_t window;  // number of tokens that a row reads, itself included
  const int64_t *positions, *slot_mapping, *row_chunks, *cu_seqlens_q, *block_tables;
  const int64_t* units;  // block -> unit; null: block ids are unit ids
};

// A separate convolution for each channel. The number of channels is a multiple of 16.
struct Convolution {
  void* inputs;        // stored inputs: [slots of units, channels]
  const void* weight;  // [channels, taps]
  const void* bias;    // [channels], or null
  int64_t channels, taps;
};

// The rule's weights and stored columns. Widths are multiples of 16.
struct DeltaRule {
  const float* projected;  // rows of the convolution's inputs, gates, betas, decays
  int64_t stride;          // distance between rows
  float* mixed;            // [rows, channels]: receives the convolution's output
  float *keys, *values, *decays, *state;
  const float *log_decay, *decay_bias;  // [value heads]
  const void* norm;                     // [value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t in_tiles;  // the order of the output's heads: by number within a key head, then by key head
  float eps;
};

}  // namespace nano

extern "C" {
int nano_short_conv(const nano::StateStep* step, const nano::Convolution* conv, const float* projected, int64_t is_bf16,
                    void* out, int64_t num_threads);
int nano_delta_net(const nano::StateStep* step, const nano::Convolution* conv, const nano::DeltaRule* rule,
                   int64_t is_bf16, void* out, int64_t num_threads);
}
