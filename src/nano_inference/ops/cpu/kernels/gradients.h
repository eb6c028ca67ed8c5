// The backward pass: gradients of products, norms, rotations, gates, attention and logits, and the optimizer's step.
//
// All sums have a fixed order. Sums of products follow the laws of `linear`. Other sums run over rows in rising order, or
// over a row in sixteen lanes and then through `vsum`. Threads own whole outputs. So the bits depend neither on the number
// of threads nor on the instruction set. T is bf16 or float: the type of products' inputs. Gradients are float.
#pragma once
#include <cstdint>

#include "rows.h"

namespace nano {

// out = x . weight rows (+ bias), or out += scale * that.
struct GradientProduct {
  const void* x;       // T [num_rows], ldx apart
  const void* weight;  // T, packed [rows, columns]
  const void* bias;    // T [rows], or null
  float* out;          // [num_rows][rows], ldo apart
  int64_t ldx, num_rows, rows, columns, ldo, adds, is_bf16, num_threads;
  float scale;
};

// Queries, keys and values of rows: parts of the rows of one product, normed and rotated.
struct RotatedHeads {
  const float* rows;                            // [num_rows][(heads + 2 * kv_heads) * head_dim]
  const float *cos, *sin, *query_scales;        // tables by position; query_scales or null
  const int64_t* positions;                     // [num_rows]
  const void *query_norm, *key_norm;            // NormWeight, or null
  void *queries, *keys, *values;                // T [num_rows][...], or float gradients of them
  float* d_rows;                                // like `rows`
  int64_t num_rows, heads, kv_heads, head_dim, turning, interleaved, is_bf16, num_threads;
};

// Gradients of x / rms(x) * (offset + weight), for each run of norm.size numbers.
struct NormGradient {
  const float* x;       // [num_rows], ldx apart: `runs` runs each
  const float* d_out;   // [num_rows], ldd apart
  const void* norm;     // NormWeight
  float* d_x;           // like d_out, and may be the same memory unless it is added to
  float* d_weight;      // [norm.size], added to; or null
  int64_t ldx, ldd, num_rows, runs, adds, num_threads;
  float scale;          // factor of d_out
};

// Attention of the rows of one segment: the last `num_rows` of the `length` rows of its path.
struct AttentionGradient {
  const void *q, *k, *v;    // T [rows of the batch][heads * head_dim], [...][kv_heads * head_dim]
  const int64_t* path;      // [length] rows of the batch, each once
  const float* sinks;       // [heads], or null
  void* out;                // T, like q: forward only
  const void* d_out;        // T, like q
  float *d_q, *d_k, *d_v;   // like q, k, v; d_k and d_v are added to. Null d_q: forward
  float* d_sinks;           // [heads], added to; or null
  int64_t num_rows, length, heads, kv_heads, head_dim, window, is_bf16, num_threads;
  float scale, cap;
};

// Gradients of logprobs: (one-hot - softmax(z)) * slope, where z are logits, divided, capped, masked and divided by the
// temperature. The logits become the gradients in place.
struct LogitGradient {
  float* logits;              // [num_rows][vocab]
  const int64_t* first_targets;  // [num_rows + 1] first of a row's targets
  const int64_t* targets;     // token ids, unique in each row
  const float* gradients;     // of the targets' logprobs
  const int64_t* mask_rows;   // [num_rows] of mask_words, -1 for none
  const int32_t* mask_words;  // [masks][mask_width] as in `DrawBatch`
  int64_t mask_width, num_rows, vocab, num_threads;
  float divisor, cap, temperature;
};

// Weights of each row's experts, as `Routing` defines them, or the gradients of the router's logits. A shared expert of
// kind 2 (as in `Routing`) has the weight sigmoid(last logit).
struct RouteGradient {
  const float* logits;     // [num_rows][columns]
  const int64_t* ids;      // [num_rows][per_token] experts, rising
  float* weights;          // [num_rows][per_token], and one more with a shared expert: forward only
  const float* d_weights;  // like weights. Null: forward
  float* d_logits;         // like logits
  int64_t num_rows, num_experts, columns, per_token, sigmoid, renormalized, shared, num_threads;
  float scale, floor;
};

// A step of AdamW (arXiv:1711.05101) for one parameter.
struct AdamStep {
  void *param, *mean, *square, *largest;  // bf16 or float [count]; largest: of `square` (AMSGrad), or null
  const void* gradient;
  int64_t count, is_bf16, num_threads;
  float decay;         // factor of the parameter
  float mean_share, square_decay, square_share;
  float step_size, root_divisor, eps;
  float factor;        // of the gradient: clips, and -1 maximizes
};

// Pack columns [16 * first, 16 * last) of a source [rows][columns] as a weight [columns, rows].
template <class T>
void pack_turned(const T* source, int64_t ld, int64_t rows, int64_t columns, int64_t first, int64_t last, T* packed);

// out[c][r] = source[r][c], rounded to T, for columns [from, to).
template <class T>
void turn(const float* source, int64_t ld, int64_t rows, int64_t from, int64_t to, T* out, int64_t ldo);

}  // namespace nano

extern "C" {
void nano_gradient_product(const nano::GradientProduct* product);
void nano_pack_turned(const void* source, int64_t rows, int64_t columns, void* packed, int64_t is_bf16, int64_t num_threads);
void nano_turn(const float* source, int64_t rows, int64_t columns, void* out, int64_t ldo, int64_t is_bf16,
               int64_t num_threads);
void nano_round_rows(const float* source, int64_t count, void* out, int64_t num_threads);
void nano_norm_rows(const float* x, int64_t num_rows, const void* norm, void* out, int64_t is_bf16, int64_t num_threads);
void nano_norm_gradient(const nano::NormGradient* norm);
void nano_rotate(const nano::RotatedHeads* heads);
void nano_rotate_gradient(const nano::RotatedHeads* heads);
void nano_gate_rows(const float* x, int64_t num_rows, int64_t inner, int64_t activation, void* out, int64_t is_bf16,
                    int64_t num_threads);
void nano_gate_gradient(const float* x, const float* d_out, int64_t num_rows, int64_t inner, int64_t activation, float* d_x,
                        int64_t num_threads);
void nano_add_columns(const float* rows, int64_t num_rows, int64_t columns, float* out, int64_t num_threads);
void nano_add_rows(const float* rows, const int64_t* ids, int64_t num_rows, int64_t columns, float scale, float* out,
                   int64_t num_threads);
void nano_attention_gradient(const nano::AttentionGradient* attention);
void nano_logit_gradient(const nano::LogitGradient* logits);
void nano_route_gradient(const nano::RouteGradient* route);
void nano_row_products(const float* a, const float* b, int64_t num_rows, int64_t columns, float* out, int64_t num_threads);
void nano_adamw(const nano::AdamStep* step);
double nano_sum_of_squares(const void* x, int64_t count, int64_t is_bf16, double* blocks, int64_t num_threads);
}
