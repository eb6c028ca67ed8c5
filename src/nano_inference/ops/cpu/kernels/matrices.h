// Copies of matrices, optionally transposed and with a check for non-finite numbers: an adapter's new version
// (`Ops.placed`, ops/lora.py).
#pragma once
#include <cstdint>

namespace nano {

// Destination of a matrix [rows][columns]: [rows][columns], or [columns][rows] if it is turned.
struct MatrixPlace {
  float* out;
  int64_t rows, columns, turned;
};

}  // namespace nano

extern "C" {

// Copy each matrix to its place, bit for bit, on the calling thread, since the pool may be busy with a step. Return the
// index of the first matrix with a number that is not finite, -1 if there is none.
int64_t nano_place(const nano::MatrixPlace* places, const float* const* sources, int64_t count);
}
