// Products with weights in codes of 8 or 4 bits. ops/quantised.py defines their results.
#pragma once
#include <cstdint>

#include "segments.h"

namespace nano {

// Storage of a weight [rows, columns]. A panel is 16 rows; a quad is four columns of each of them, 64 codes.
//   codes of 8 bits: [panels][quads][16][4] int8
//   codes of 4 bits: [panels][quads / 2][16][4] bytes: the lower halves of line j are quad 2 j, the upper halves quad
//                    2 j + 1; without minima 8 represents 0
//   scales: [panels][groups][16], float if wide, otherwise float16; minima: float, same shape
// A group is 16, 32, 64 or 128 columns; group 0: a segment. Columns are padded with codes of 0 to whole groups or
// quads.
struct Quantised {
  int64_t bits, group, wide;
  const void *codes, *scales;
  const float* mins;  // or null
  Segments segments;  // of the columns; at least one

  int64_t num_quads() const {
    const int64_t columns = segments.bounds[segments.count];
    return group ? (columns + group - 1) / group * (group / 4) : (columns + 3) / 4;
  }
  int64_t num_groups() const { return group ? num_quads() * 4 / group : segments.count; }  // per row
};

// Replace rows [start, start + count) by `source` [count, columns], bf16 or float, rounded to codes.
template <class S>
void quantise(const S* source, const Quantised& weight, int64_t start, int64_t count, int64_t columns);
// Decode the columns of row `row`, and multiply them by scale.
void dequantise(const Quantised& weight, int64_t row, int64_t columns, float scale, float* out);

}  // namespace nano
