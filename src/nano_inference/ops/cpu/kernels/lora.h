// Adapters of low rank: y += B (scale * A x), row by row (ops/lora.py).
#pragma once
#include <cstdint>

#include "simd.h"

namespace nano {

// What an adapter adds to columns [first, first + columns) of a product of `in` columns.
struct LoraPart {
  const float *a, *b;  // [rank][in], [rank][columns]
  int64_t rank, first, columns;
  float scale;
};

// All that it adds to one product.
struct LoraParts {
  const LoraPart* parts;
  int64_t count;
};

// Columns [from, to) of a row y of a product, of which x [in] is the input. A column's sum goes over the ranks in
// rising order; one of A x lane by lane over `in`, and then vsum.
template <class T>
void lora(const T* x, int64_t in, const LoraParts& own, int64_t from, int64_t to, float* y);

}  // namespace nano
