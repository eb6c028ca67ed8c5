// In which pieces a sum over columns is added up.
#pragma once
#include <cstdint>

namespace nano {

// A sum over k in up to eight pieces, which start at bounds[i] from zero, each in rising order of k; the pieces are added
// in pairs: ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)). So ranks that hold some of them agree to the bit with one
// that holds all. Bounds rise; the last one is the number of columns; all others are even. count 0: one piece.
struct Segments {
  static constexpr int MOST = 8, DEPTH = 3;  // DEPTH: sums that wait for their partner, at the most
  int64_t count, bounds[MOST + 1];
};

}  // namespace nano
