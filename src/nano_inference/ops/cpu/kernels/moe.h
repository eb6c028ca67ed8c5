// Arguments of the kernels of experts (moe.cpp).
#pragma once
#include <cstdint>

namespace nano {

// Selection and weights of a row's experts, as defined by `Routing` of ops/settings.py.
struct Routing {
  int64_t num_experts, per_token, sigmoid, renormalized, groups, groups_kept, group_best;
  int64_t shared;     // 0: no shared expert; 1: its weight is 1; 2: its weight is the sigmoid of the last logit
  const float* bias;    // [num_experts], or null
  const float* logits;  // [num_experts], added to the logits, or null
  float scale, floor, logit_scale;
};

}  // namespace nano

extern "C" {
void nano_moe_route(const void* x, int64_t num_rows, int64_t hidden, const void* router, int64_t rows, int64_t is_bf16,
                    const nano::Routing* routing, int64_t* ids, float* weights, int64_t num_threads);
int nano_moe_products(const void* x, int64_t num_rows, const int64_t* rows, const int64_t* experts, int64_t count,
                      int64_t num_experts, int64_t hidden, int64_t inner, const void* gate_up, const void* gate_up_bias,
                      const void* down, const void* down_bias, const nano::Quantised* gate_up_codes,
                      const nano::Quantised* down_codes, int64_t is_bf16, int64_t activation, float* out,
                      int64_t num_threads);
void nano_moe_combine(const float* products, const float* weights, int64_t num_rows, int64_t per_token, int64_t hidden,
                      float* out, int64_t num_threads);
}
