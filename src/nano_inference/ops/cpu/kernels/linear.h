// Products with packed weights: each output is one sum over k in rising order, whatever else is computed beside it.
#pragma once
#include <cstdint>

#include "quantised.h"
#include "segments.h"
#include "simd.h"

namespace nano {

// A packed weight [rows, columns], padded with zeros to whole panels of 16 rows.
//   bf16: [ceil(rows / 16)][ceil(columns / 2)][16][2]      float: [ceil(rows / 16)][columns][16]
// Or one of codes, which products read as they are: data is null then, and its first panel is panel `first` of theirs.
template <class T>
struct Matrix {
  const T* data;
  int64_t rows, columns;
  const Quantised* codes = nullptr;
  int64_t first = 0;

  int64_t num_panels() const { return (rows + LANES - 1) / LANES; }
  int64_t panel_size() const { return (sizeof(T) == 2 ? (columns + 1) / 2 * 2 : columns) * LANES; }
  const T* panel(int64_t index) const { return data + index * panel_size(); }
  // `count` rows from panel `index` on.
  Matrix part(int64_t index, int64_t count) const {
    return {codes ? nullptr : panel(index), count, columns, codes, first + index};
  }
};

// What becomes of the sums. From SILU on: the weight holds gate rows, then as many up rows; activation(gate) * up is
// stored as T. Nothing is rounded before.
enum class Finish : int32_t { STORE = 0, ADD = 1, SILU = 2, GELU = 3, CLAMPED = 4 };

template <class T>
struct Linear {
  const T* x;  // rows, ldx apart
  int64_t ldx;
  Matrix<T> w;
  const T* bias;  // [w.rows], or null
  Finish finish;
  float scale;  // ADD: out += scale * sums
  void* out;    // float rows, T rows for a gate; ldo apart
  int64_t ldo;
  bool padded;  // out has room for whole panels
  Segments segments;

  bool gated() const { return finish >= Finish::SILU; }
  int64_t num_panels() const { return gated() ? w.rows / 2 / LANES : w.num_panels(); }  // of the output
};

// The panels that a tile reads: the first half of them from `low` on, the second from `high` on, `size` apart.
template <class T>
struct Panels {
  const T *low, *high;
  int64_t size;
};

// A tile is up to ROWS rows by up to WIDE panels: as many sums as fit into registers, with few loads for each product.
// 4 x 6 makes 24 sums from 10 loads. A gate takes half of its panels from the gate and half from up. With AVX2 a tile of
// four rows and more goes through its panels one after the other: twelve sums of 6 x 1 from 4 loads and 6 broadcasts.
#if defined(NANO_AVX512) && defined(NANO_BF16)
constexpr int ROWS = 4, WIDE = 6;
#elif defined(NANO_AVX512)  // halves of weights take instructions, which more rows share
constexpr int ROWS = 6, WIDE = 4;
#elif defined(NANO_AVX2)
constexpr int ROWS = 6, WIDE = 2;
#elif defined(NANO_NEON)  // 24 of 32 registers are sums
constexpr int ROWS = 3, WIDE = 2;
#else
constexpr int ROWS = 3, WIDE = 2;
#endif

// The panels of the tile at output panel `index`.
template <class T>
Panels<T> panels_at(const Linear<T>& job, int64_t index, int width = WIDE) {
  const int64_t other = job.gated() ? index + job.num_panels() : index + (width + 1) / 2;
  return {job.w.panel(index), job.w.panel(other), job.w.panel_size()};
}

// Rows [row, end_row) and output panels [panel, end_panel) of a product. `next`: the weights that this thread reads
// afterwards, fetched ahead; low may be null. A gate needs w.rows to be a multiple of 32.
void linear(const Linear<bf16>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<bf16> next);
void linear(const Linear<float>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<float> next);
// The same of a weight in codes.
template <class T>
void quantised_linear(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel);

// out[i][16 * j ...] = x[i] . rows of panel first + j, for num_rows rows of x (columns apart by ldx) and panels [first,
// last). Whole panels are stored: out needs 16 * (last - first) columns, ldo apart.
template <class T>
void products(const T* x, int64_t ldx, int64_t num_rows, Matrix<T> w, int64_t first, int64_t last, float* out,
              int64_t ldo, const T* next) {
  const int64_t size = w.panel_size();
  linear({x, ldx, w.part(first, (last - first) * LANES), nullptr, Finish::STORE, 1.f, out, ldo, true, {}}, 0, num_rows, 0, last - first,
         {next, next ? next + (WIDE + 1) / 2 * size : nullptr, size});
}

// activation(gate) * up
Vec gated(Vec gate, Vec up, Finish activation);

// Rows [start, start + count) of a weight [*, columns] take the values of `source` [count, columns], bf16 or float.
template <class T, class S>
void pack(const S* source, T* packed, int64_t start, int64_t count, int64_t columns);
// The other way round.
template <class T>
void unpack(const T* packed, T* out, int64_t start, int64_t count, int64_t columns);

}  // namespace nano
