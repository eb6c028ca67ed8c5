// Arguments of the kernels of experts (moe.cpp).
#pragma once
#include <cstdint>

#include "quantised.h"

namespace nano {

// Selection and weights of a row's experts, as defined by `Routing` of ops/settings.py.
struct Routing {
  int64_t num_experts, per_token, sigmoid, renormalized, groups, groups_kept, group_best;
  int64_t shared;     // 0: no shared expert; 1: its weight is 1; 2: its weight is the sigmoid of the last logit
  const float* bias;    // [num_experts], or null
  const float* logits;  // [num_experts], added to the logits, or null
  float scale, floor, logit_scale;
};

// Packed weights of experts, one below the other: gate_up [count * 2 * inner, hidden] and down [count * hidden, inner].
// hidden and inner are multiples of 16. Biases have the weights' type or are null. Codes replace weights, or are null.
struct ExpertWeights {
  const void *gate_up, *gate_up_bias, *down, *down_bias;
  const Quantised *gate_up_codes, *down_codes;
  int64_t hidden, inner;
};

// A layer of experts, all of them in memory.
struct MoeLayer {
  Routing routing;
  ExpertWeights experts, shared_expert;  // the second: if the routing has one
  const void* router;             // [router_rows, hidden]
  int64_t router_rows;
  const float* scales;            // [num_experts] factors of the experts' weights, or null
  int64_t is_bf16, activation;    // a Finish
};

}  // namespace nano

extern "C" {
void nano_moe_route(const void* x, int64_t num_rows, int64_t hidden, const void* router, int64_t rows, int64_t is_bf16,
                    const nano::Routing* routing, int64_t* ids, float* weights, int64_t num_threads);
int nano_moe_products(const void* x, int64_t num_rows, const int64_t* rows, const int64_t* experts, int64_t count,
                      int64_t num_experts, const nano::ExpertWeights* weights, int64_t is_bf16, int64_t activation,
                      float* out, int64_t num_threads);
void nano_moe_combine(const float* products, const float* weights, int64_t num_rows, int64_t per_token, int64_t hidden,
                      float* out, int64_t num_threads);
void nano_moe_layer(const nano::MoeLayer* layer, const void* x, const void* routed, int64_t num_rows, int64_t* ids,
                    float* out, int64_t num_threads);
}
