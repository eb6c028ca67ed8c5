#include "matrices.h"

#include <algorithm>

#include "transpose.h"

namespace nano {
namespace {

// The highest bit of a lane is set if a number is not finite: its exponent has no zero bit.
inline IVec look(IVec seen, IVec bits) {
  return ior(seen, iadd(iand(bits, iset(0x7fffffff)), iset(0x00800000)));
}

template <bool streaming>
inline void put(float* out, IVec v) {
  if constexpr (streaming) istream(out, v);
  else istore(out, v);
}

template <bool streaming>
IVec copy(const float* source, float* out, int64_t size) {
  IVec seen = iset(0);
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) {
    const IVec bits = iload(source + k);
    seen = look(seen, bits);
    put<streaming>(out + k, bits);
  }
  if (k == size) return seen;
  const Vec rest = vload_n(source + k, int(size - k));
  vstore_n(out + k, rest, int(size - k));
  return look(seen, ibits(rest));
}

// squares processed together, one below the other, so that a row of `out` receives four adjacent lines at a time
constexpr int SQUARES = 4;

// Transpose in squares of 16, of which those at the edges may be partial.
template <bool streaming>
IVec turn(const float* source, float* out, int64_t rows, int64_t columns) {
  IVec seen = iset(0), words[SQUARES][LANES];
  for (int64_t row = 0; row < rows; row += SQUARES * LANES)
    for (int64_t column = 0; column < columns; column += LANES) {
      const int tall = int(std::min<int64_t>(SQUARES * LANES, rows - row));
      const int wide = int(std::min<int64_t>(LANES, columns - column));
      for (int first = 0; first < tall; first += LANES) {
        IVec(&square)[LANES] = words[first / LANES];
        for (int i = 0; i < LANES; i++) {
          const float* from = source + (row + first + i) * columns + column;
          square[i] = first + i >= tall ? iset(0) : wide == LANES ? iload(from) : ibits(vload_n(from, wide));
          seen = look(seen, square[i]);
        }
        transpose(square);
      }
      for (int i = 0; i < wide; i++)
        for (int first = 0; first < tall; first += LANES) {
          float* to = out + (column + i) * rows + row + first;
          const IVec line = words[first / LANES][i];
          if (tall - first >= LANES) put<streaming>(to, line);
          else vstore_n(to, vbits(line), tall - first);
        }
    }
  return seen;
}

IVec place(const MatrixPlace& own, const float* source) {
  const int64_t size = own.rows * own.columns;
  // bypass the caches when whole lines are written, which would otherwise be read first
  const bool aligned = reinterpret_cast<uintptr_t>(own.out) % 64 == 0;
  if (!own.turned) return aligned ? copy<true>(source, own.out, size) : copy<false>(source, own.out, size);
  return aligned && own.rows % LANES == 0 ? turn<true>(source, own.out, own.rows, own.columns)
                                          : turn<false>(source, own.out, own.rows, own.columns);
}

}  // namespace
}  // namespace nano

extern "C" int64_t nano_place(const nano::MatrixPlace* places, const float* const* sources, int64_t count) {
  int64_t first = -1;
  for (int64_t i = 0; i < count; i++)
    if (nano::igt(nano::iset(0), nano::place(places[i], sources[i])) && first < 0) first = i;
  nano::streamed();
  return first;
}
