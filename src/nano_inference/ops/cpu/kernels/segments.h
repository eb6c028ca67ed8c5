// Segments of a sum over columns.
#pragma once
#include <cstdint>

namespace nano {

// A sum over k in up to eight segments, which start at bounds[i] from zero, each in rising order of k. The segments are
// added in pairs: ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)). Ranks that hold some of them therefore agree bit
// for bit with a rank that holds all. Bounds rise. The last one is the number of columns, and all others are even.
// count 0: one segment.
struct Segments {
  static constexpr int MOST = 8, DEPTH = 3;  // DEPTH: most sums that wait for their partner
  int64_t count, bounds[MOST + 1];
};

}  // namespace nano
