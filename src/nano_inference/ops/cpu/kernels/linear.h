// Products with packed weights: each output is one sum over k in rising order, whatever else is computed beside it.
#pragma once
#include <cstdint>

#include "simd.h"

namespace nano {

// A packed weight [rows, columns], padded with zeros to whole panels of 16 rows.
//   bf16: [ceil(rows / 16)][ceil(columns / 2)][16][2]      float: [ceil(rows / 16)][columns][16]
template <class T>
struct Matrix {
  const T* data;
  int64_t rows, columns;

  int64_t num_panels() const { return (rows + LANES - 1) / LANES; }
  int64_t panel_size() const { return (sizeof(T) == 2 ? (columns + 1) / 2 * 2 : columns) * LANES; }
  const T* panel(int64_t index) const { return data + index * panel_size(); }
};

// out[i][16 * j ...] = x[i] . rows of panel first + j, for num_rows rows of x (columns apart by ldx) and panels [first,
// last). Whole panels are stored: out needs 16 * (last - first) columns, ldo apart. `next`: where this thread reads
// weights afterwards, fetched ahead; may be null.
void products(const bf16* x, int64_t ldx, int64_t num_rows, Matrix<bf16> w, int64_t first, int64_t last, float* out,
              int64_t ldo, const bf16* next);
void products(const float* x, int64_t ldx, int64_t num_rows, Matrix<float> w, int64_t first, int64_t last, float* out,
              int64_t ldo, const float* next);

}  // namespace nano
