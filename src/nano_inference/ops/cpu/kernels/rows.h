// What is done row by row: embedding, RMS norm, rotary embedding, gate.
#pragma once
#include "linear.h"
#include "simd.h"

namespace nano {

// A weight of a norm, in the model's dtype or in float32.
struct NormWeight {
  const void* data;
  int64_t size;
  bool is_float;
  float eps, offset;
};

// out = row `id` of a packed weight, times scale; zeros where there is no such row, since another rank has it. They are
// negative: adding them changes no bit, not even of a zero.
template <class T>
void embed(Matrix<T> w, int64_t id, float scale, float* out);

// residual += scale * x where x is given; out = residual / rms(residual) * (offset + weight), as Out. Without a weight
// out is the residual itself, rounded.
template <class T, class Out>
void rms_norm(const float* x, float scale, float* residual, const NormWeight& norm, int64_t size, Out* out);

// x / rms(x) * (offset + weight), in place, for each run of norm.size numbers
template <class T>
void norm_heads(float* x, int64_t num_runs, const NormWeight& norm);

// How heads turn: so many numbers of each, halves of them or neighbours being the two coordinates
// (arXiv:2104.09864). What lies behind them stays.
struct Turn {
  int64_t head_dim, turning;
  bool interleaved;
};

// Rotate one head and multiply it by scale; out rounded to T.
template <class T>
void rope(const float* x, const float* cos, const float* sin, const Turn& turn, float scale, T* out);

// Heads of which so much turns, beside latents.
struct LatentHeads {
  int64_t heads, query, key;  // numbers of a query before it meets the latents, and of one that does
  int64_t turning, rank;
};

// Of a row of attention over latents (ops/latent.py) all but the products: what turns of the queries q [heads * query]
// to its place in out [(heads + 2) * key], and behind the queries twice the key of c [rank + turning], which is what
// turns, then the normed latent.
template <class T>
void meet(const float* q, float* c, const LatentHeads& size, const NormWeight& norm, float* out);

// out = activation(x[i]) * x[size + i]
template <class T>
void gate(const float* x, int64_t size, Finish activation, T* out);

// out = x, rounded to T
template <class T>
void round_row(const float* x, int64_t size, T* out);

}  // namespace nano
