// Products with weights in codes of 8 or 4 bits: ops/quantised.py says what is computed.
#pragma once
#include <cstdint>

#include "segments.h"

namespace nano {

// How a weight [rows, columns] is stored. A panel is 16 rows; a quad is four columns of each of them, 64 codes.
//   codes of 8 bits: [panels][quads][16][4] int8
//   codes of 4 bits: [panels][quads / 2][16][4] bytes: of line j the lower halves are quad 2 j, the upper ones quad
//                    2 j + 1; without minima 8 stands for 0
//   scales: [panels][groups][16], float where they are wide, else float16; minima: float, likewise
// A group is 16, 32, 64 or 128 columns; group 0: a segment. Columns are padded with codes of 0 to whole groups, or to whole quads.
struct Quantised {
  int64_t bits, group, wide;
  const void *codes, *scales;
  const float* mins;  // or null
  Segments segments;  // of the columns; at least one

  int64_t num_quads() const {
    const int64_t columns = segments.bounds[segments.count];
    return group ? (columns + group - 1) / group * (group / 4) : (columns + 3) / 4;
  }
  int64_t num_groups() const { return group ? num_quads() * 4 / group : segments.count; }  // of a row
};

// Rows [start, start + count) take the values of `source` [count, columns], bf16 or float, rounded to codes.
template <class S>
void quantise(const S* source, const Quantised& weight, int64_t start, int64_t count, int64_t columns);
// The numbers that codes stand for: of row `row`, its columns, times scale.
void dequantise(const Quantised& weight, int64_t row, int64_t columns, float scale, float* out);

}  // namespace nano
