// Weights into panels and back, in place.
#include "linear.h"

namespace nano {
namespace {

template <class T, class S>
inline T cast(S value) {
  if constexpr (sizeof(T) == sizeof(S)) return value;
  else if constexpr (sizeof(T) == 2) return narrow1(value);
  else return widen1(value);
}

// Where [row, column] lies.
template <class T>
inline int64_t place(int64_t row, int64_t column, int64_t columns) {
  const int64_t panel = row / LANES, lane = row % LANES;
  if constexpr (sizeof(T) == 2) {
    const int64_t pairs = (columns + 1) / 2;
    return ((panel * pairs + column / 2) * LANES + lane) * 2 + column % 2;
  } else {
    return (panel * columns + column) * LANES + lane;
  }
}

}  // namespace

template <class T, class S>
void pack(const S* source, T* packed, int64_t start, int64_t count, int64_t columns) {
  for (int64_t first = 0; first < count;) {
    // Sixteen rows of a panel at once where they are all there: the writes then follow each other.
    const int64_t lanes = (start + first) % LANES == 0 && count - first >= LANES ? LANES : 1;
    if (lanes == LANES) {
      T* out = packed + place<T>(start + first, 0, columns);
      constexpr int group = sizeof(T) == 2 ? 2 : 1;
      for (int64_t k = 0; k + group <= columns; k += group, out += group * LANES)
        for (int n = 0; n < LANES; n++)
          for (int g = 0; g < group; g++) out[n * group + g] = cast<T>(source[(first + n) * columns + k + g]);
      if (group == 2 && columns % 2)
        for (int n = 0; n < LANES; n++) out[n * 2] = cast<T>(source[(first + n) * columns + columns - 1]);
    } else {
      for (int64_t k = 0; k < columns; k++)
        packed[place<T>(start + first, k, columns)] = cast<T>(source[first * columns + k]);
    }
    first += lanes;
  }
}

template <class T>
void unpack(const T* packed, T* out, int64_t start, int64_t count, int64_t columns) {
  for (int64_t row = 0; row < count; row++)
    for (int64_t k = 0; k < columns; k++) out[row * columns + k] = packed[place<T>(start + row, k, columns)];
}

template void pack(const bf16*, bf16*, int64_t, int64_t, int64_t);
template void pack(const float*, bf16*, int64_t, int64_t, int64_t);
template void pack(const bf16*, float*, int64_t, int64_t, int64_t);
template void pack(const float*, float*, int64_t, int64_t, int64_t);
template void unpack(const bf16*, bf16*, int64_t, int64_t, int64_t);
template void unpack(const float*, float*, int64_t, int64_t, int64_t);

}  // namespace nano
