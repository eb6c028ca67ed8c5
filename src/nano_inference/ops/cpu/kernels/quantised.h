// Products with weights in codes of 8 to 4 bits. ops/quantised.py defines their results.
#pragma once
#include <cstdint>

#include "segments.h"

namespace nano {

constexpr int64_t STEP = 256;  // columns that share a step

// Storage of scales and minima, [panels][groups][16] each: float16, float, the exponent bits of a float, or records of the
// groups of 256 columns: 16 float16 steps, then [groups][16] int8 numbers of steps.
enum class Scales : int32_t { HALF = 0, FLOAT = 1, STEPS = 2, EXPONENTS = 3 };

// Storage of a weight [rows, columns]. A panel is 16 rows; a quad is four columns of each of them, 64 codes.
//   codes of 8 bits: [panels][quads][16][4] int8
//   codes of fewer bits: [panels][units][bits][64] bytes. A unit is eight quads. The lower halves of its line j < 4 are
//     the low four bits of quad 2 j, the upper halves those of quad 2 j + 1. The fifth bit of quad q is bit q of line 4.
//     The fifth and sixth bits of quad q are bits 2 (q % 4) and above of line 4 + q / 4. Without minima, the middle of
//     the range represents 0, or codes of 4 bits stand for `values`
// A group is 16, 32, 64 or 128 columns; group 0: a segment. Columns are padded with codes of 0 to whole groups, units or
// quads.
struct Quantised {
  int64_t bits, group, scaling;
  const void *codes, *scales;
  const void* mins;  // stored like scales, or null
  Segments segments;  // of the columns; at least one
  int64_t num_panels;
  const Quantised* next;  // the weight's further rows, in another format; or null
  int8_t values[16];      // numbers of the codes, rising; or zeros

  bool has_table() const { return values[0] != 0; }

  int64_t num_columns() const { return segments.bounds[segments.count]; }
  int64_t num_quads() const {
    const int64_t whole = bits < 8 && group < 32 ? 32 : group ? group : 4;
    return (num_columns() + whole - 1) / whole * (whole / 4);
  }
  int64_t input_group() const { return scaling == int64_t(Scales::STEPS) ? STEP : group; }  // columns that share an input's scale
  int64_t num_groups() const { return group ? (num_columns() + group - 1) / group : segments.count; }  // per row
};

// Replace rows [start, start + count) by `source` [count, columns], bf16 or float, rounded to codes.
template <class S>
void quantise(const S* source, const Quantised& weight, int64_t start, int64_t count, int64_t columns);
// Decode the columns of row `row`, and multiply them by scale.
void dequantise(const Quantised& weight, int64_t row, int64_t columns, float scale, float* out);

}  // namespace nano
