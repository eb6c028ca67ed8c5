// Parts of operations on rows that forward and backward kernels share.
#pragma once
#include <cmath>

#include "rows.h"

namespace nano {

inline int left(int64_t size, int64_t at) { return size - at >= LANES ? LANES : int(size - at); }

template <class T>
inline void store_as(T* p, Vec v, int n) {
  if constexpr (sizeof(T) == 2) n == LANES ? vnarrow(p, v) : vnarrow_n(p, v, n);
  else vstore_n(p, v, n);
}

inline Vec weight_at(const NormWeight& norm, int64_t i, int n) {
  Vec w;
  if (norm.is_float) {
    w = vload_n(static_cast<const float*>(norm.data) + i, n);
  } else {
    bf16 some[LANES] = {};
    memcpy(some, static_cast<const bf16*>(norm.data) + i, 2 * size_t(n));
    w = vwiden(some);
  }
  return vadd(vset(norm.offset), w);
}

// 1 / rms of a row: sixteen lanes of squares, folded once. The root is computed in double, so that the norm stays
// within 2 ulp plus half the error of that sum.
inline float inverse_rms(const float* x, int64_t size, float eps) {
  Vec even = vset(0.f), odd = even;
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    Vec a = vload(x + i), b = vload(x + i + LANES);
    even = vfma(a, a, even), odd = vfma(b, b, odd);
  }
  for (; i < size; i += LANES) {
    Vec a = vload_n(x + i, left(size, i));
    even = vfma(a, a, even);
  }
  return float(1. / std::sqrt(double(vsum(vadd(even, odd))) / double(size) + double(eps)));
}

inline Vec vsigmoid(Vec x) {
  return vdiv(vset(1.f), vadd(vset(1.f), vexp(vmax(vset(-100.f), vmin(vset(88.f), vsub(vset(0.f), x))))));
}

// Compute the scores of a row's experts from their logits. The caller must divide them by the returned sum.
inline float expert_scores(const float* z, int64_t num_experts, bool sigmoid, float* scores) {
  float highest = z[0];
  for (int64_t e = 1; e < num_experts; e++) highest = z[e] > highest ? z[e] : highest;
  Vec lanes = vset(0.f);
  for (int64_t e = 0; e < num_experts; e += LANES) {
    const int n = left(num_experts, e);
    const Vec x = vload_n(z + e, n), v = sigmoid ? vsigmoid(x) : vexp(vsub(x, vset(highest)));
    lanes = vadd(lanes, vselect(first_lanes(n), v, vset(0.f)));
    vstore_n(scores + e, v, n);
  }
  return sigmoid ? 1.f : vsum(lanes);
}

}  // namespace nano
