// Adapters of low rank: y += B (scale * A x), row by row (ops/lora.py).
#pragma once
#include <cstdint>

#include "simd.h"

namespace nano {

// An adapter's addition to columns [first, first + columns) of a product with `in` input columns.
struct LoraPart {
  const float *a, *b;  // [rank][in], [rank][columns]
  int64_t rank, first, columns;
  float scale;
};

// All additions of an adapter to one product.
struct LoraParts {
  const LoraPart* parts;
  int64_t count;
};

// Add to columns [from, to) of a row y of a product with input x [in]. A column's sum runs over the ranks in rising
// order. A sum of A x runs lane by lane over `in`, then through vsum.
template <class T>
void lora(const T* x, int64_t in, const LoraParts& own, int64_t from, int64_t to, float* y);

}  // namespace nano
