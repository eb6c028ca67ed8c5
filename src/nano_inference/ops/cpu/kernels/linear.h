// Products with packed weights. Each output is one sum over k in rising order, independent of all other outputs.
#pragma once
#include <cstdint>

#include "quantised.h"
#include "segments.h"
#include "simd.h"

namespace nano {

// A packed weight [rows, columns], padded with zeros to whole panels of 16 rows.
//   bf16: [ceil(rows / 16)][ceil(columns / 2)][16][2]      float: [ceil(rows / 16)][columns][16]
// Or a weight in codes, which products read directly. Then data is null, and panel 0 is panel `first` of the codes.
template <class T>
struct Matrix {
  const T* data;
  int64_t rows, columns;
  const Quantised* codes = nullptr;
  int64_t first = 0;

  int64_t num_panels() const { return (rows + LANES - 1) / LANES; }
  int64_t panel_size() const { return (sizeof(T) == 2 ? (columns + 1) / 2 * 2 : columns) * LANES; }
  const T* panel(int64_t index) const { return data + index * panel_size(); }
  // Return `count` rows from panel `index` on.
  Matrix part(int64_t index, int64_t count) const {
    return {codes ? nullptr : panel(index), count, columns, codes, first + index};
  }
};

// Destination of the sums. From SILU on, the weight holds gate rows and then as many up rows, and activation(gate) * up
// is stored as T. Nothing is rounded before that.
enum class Finish : int32_t { STORE = 0, ADD = 1, SILU = 2, GELU = 3, CLAMPED = 4 };

template <class T>
struct Linear {
  const T* x;  // rows, ldx apart
  int64_t ldx;
  Matrix<T> w;
  const T* bias;  // [w.rows], or null
  Finish finish;
  float scale;  // ADD: out += scale * sums
  void* out;    // float rows, or T rows for a gate; ldo apart
  int64_t ldo;
  bool padded;  // out has room for whole panels
  Segments segments;

  bool gated() const { return finish >= Finish::SILU; }
  int64_t num_panels() const { return gated() ? w.rows / 2 / LANES : w.num_panels(); }  // panels of the output
};

// Panels read by a tile: the first half starts at `low`, the second half at `high`, `size` apart.
template <class T>
struct Panels {
  const T *low, *high;
  int64_t size;
};

// A tile is up to ROWS rows by up to WIDE panels: as many sums as fit into registers, with few loads per product. 4 x 6
// makes 24 sums from 10 loads. A gate takes half of its panels from the gate and half from up. With AVX2, a tile of
// four or more rows processes its panels one by one: twelve sums of 6 x 1 from 4 loads and 6 broadcasts.
#if defined(NANO_AVX512) && defined(NANO_BF16)
constexpr int ROWS = 4, WIDE = 6;
#elif defined(NANO_AVX512)  // halves of weights cost instructions, which more rows amortize
constexpr int ROWS = 6, WIDE = 4;
#elif defined(NANO_AVX2)
constexpr int ROWS = 6, WIDE = 2;
#elif defined(NANO_NEON)  // 24 of 32 registers hold sums
constexpr int ROWS = 3, WIDE = 2;
#else
constexpr int ROWS = 3, WIDE = 2;
#endif

// Return the panels of the tile at output panel `index`.
template <class T>
Panels<T> panels_at(const Linear<T>& job, int64_t index, int width = WIDE) {
  const int64_t other = job.gated() ? index + job.num_panels() : index + (width + 1) / 2;
  return {job.w.panel(index), job.w.panel(other), job.w.panel_size()};
}

// Compute rows [row, end_row) and output panels [panel, end_panel) of a product. `next`: weights that this thread reads
// afterwards, which are prefetched; low may be null. For a gate, w.rows must be a multiple of 32.
void linear(const Linear<bf16>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<bf16> next);
void linear(const Linear<float>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<float> next);
// Compute the same product with a weight in codes.
template <class T>
void quantised_linear(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel);

// out[i][16 * j ...] = x[i] . rows of panel first + j, for num_rows rows of x (ldx apart) and panels [first, last).
// Whole panels are stored, so out needs 16 * (last - first) columns, ldo apart.
template <class T>
void products(const T* x, int64_t ldx, int64_t num_rows, Matrix<T> w, int64_t first, int64_t last, float* out,
              int64_t ldo, const T* next) {
  const int64_t size = w.panel_size();
  linear({x, ldx, w.part(first, (last - first) * LANES), nullptr, Finish::STORE, 1.f, out, ldo, true, {}}, 0, num_rows, 0, last - first,
         {next, next ? next + (WIDE + 1) / 2 * size : nullptr, size});
}

// activation(gate) * up
Vec gated(Vec gate, Vec up, Finish activation);

// Replace rows [start, start + count) of a weight [*, columns] by `source` [count, columns], bf16 or float.
template <class T, class S>
void pack(const S* source, T* packed, int64_t start, int64_t count, int64_t columns);
// Copy rows [start, start + count) of a packed weight to `out` [count, columns].
template <class T>
void unpack(const T* packed, T* out, int64_t start, int64_t count, int64_t columns);

}  // namespace nano
