// Operations on single rows: embedding, RMS norm, rotary embedding, gate.
#pragma once
#include "linear.h"
#include "simd.h"

namespace nano {

// A norm's weight, in the model's dtype or in float32.
struct NormWeight {
  const void* data;
  int64_t size;
  bool is_float;
  float eps, offset;
};

// out = row `id` of a packed weight, times scale. If another rank holds the row, out is negative zeros: adding them
// changes no bit, not even of a zero.
template <class T>
void embed(Matrix<T> w, int64_t id, float scale, float* out);

// residual += scale * x if x is not null; out = residual / rms(residual) * (offset + weight), as Out. Without a weight,
// out is the rounded residual.
template <class T, class Out>
void rms_norm(const float* x, float scale, float* residual, const NormWeight& norm, int64_t size, Out* out);

// x / rms(x) * (offset + weight), in place, for each run of norm.size numbers
template <class T>
void norm_heads(float* x, int64_t num_runs, const NormWeight& norm);

// Rotation of heads: the first `turning` numbers of each rotate, and their halves or neighbors are the two coordinates
// (arXiv:2104.09864). The rest is unchanged.
struct Turn {
  int64_t head_dim, turning;
  bool interleaved;
};

// Rotate one head and multiply it by scale; out is rounded to T.
template <class T>
void rope(const float* x, const float* cos, const float* sin, const Turn& turn, float scale, T* out);

// Sizes of heads in attention over latents.
struct LatentHeads {
  int64_t heads, query, key;  // numbers per query before and after its projection to latents
  int64_t turning, rank;
};

// Complete a row of attention over latents (`LatentOps` of ops/interface.py), except for the products. Copy the part of
// the queries q [heads * query] that will be rotated to its place in out [(heads + 2) * key]. After the queries, write
// the key of c [rank + turning] twice: the part that will be rotated, then the normed latent.
template <class T>
void meet(const float* q, float* c, const LatentHeads& size, const NormWeight& norm, float* out);

// out = activation(x[i]) * x[size + i]
template <class T>
void gate(const float* x, int64_t size, Finish activation, T* out);

// out = x, rounded to T
template <class T>
void round_row(const float* x, int64_t size, T* out);

}  // namespace nano
