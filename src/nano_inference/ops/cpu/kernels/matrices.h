// Matrices that are copied into place, as they are or turned, and looked at on the way: an adapter's new version
// (`Ops.placed` of ops/lora.py).
#pragma once
#include <cstdint>

namespace nano {

// Where a matrix [rows][columns] goes: [rows][columns], or turned, [columns][rows].
struct MatrixPlace {
  float* out;
  int64_t rows, columns, turned;
};

}  // namespace nano

extern "C" {

// Copy each matrix to its place, bit by bit, on the thread that calls: the pool's may be in the middle of a step, which it
// need not wait for. Returns the first matrix with a number that is not finite, -1 if there is none.
int64_t nano_place(const nano::MatrixPlace* places, const float* const* sources, int64_t count);
}
