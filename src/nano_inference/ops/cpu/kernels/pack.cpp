// Conversion of weights to panels and back. The bits are those of a cast to nearest even; denormals are kept.
#include "linear.h"
#include "transpose.h"

namespace nano {
namespace {

inline bf16 round1(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T, class S>
inline T cast(S value) {
  if constexpr (sizeof(T) == sizeof(S)) return value;
  else if constexpr (sizeof(T) == 2) return round1(value);
  else return widen1(value);
}

// round1 of 16 floats, in the upper half of each word.
inline IVec round16(IVec bits) {
  const IVec rounded = iadd(bits, iadd(iset(0x7fff), iand(ishr<16>(bits), iset(1))));
  return ibits(vselect(vnan(vbits(bits)), vbits(ior(bits, iset(0x400000))), vbits(rounded)));
}

// Index of [row, column] in the packed weight.
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

// Columns of 16 whole rows that are moved together: a word per row and column, or per pair of columns if both are bf16.
template <class T, class S>
constexpr int64_t WIDTH = sizeof(T) == 2 || sizeof(S) == 2 ? 32 : 16;

template <class S>
inline void load_words(IVec (&words)[16], const S* source, int64_t columns) {
  for (int n = 0; n < LANES; n++) words[n] = iload(source + n * columns);
  transpose(words);
}

template <bool streaming>
inline void put(void* p, IVec v) {
  if constexpr (streaming) istream(p, v);
  else istore(p, v);
}

// Move columns [0, WIDTH) of 16 rows into a panel.
template <bool streaming, class T, class S>
inline void move(const S* source, int64_t columns, T* out) {
  const IVec upper = iset(0xffff0000);
  IVec words[16];
  if constexpr (sizeof(T) == sizeof(S)) {
    load_words(words, source, columns);
    for (int k = 0; k < 16; k++) put<streaming>(out + k * (64 / sizeof(T)), words[k]);
  } else if constexpr (sizeof(T) == 2) {
    for (int half = 0; half < 2; half++, source += 16, out += 16 * LANES) {
      load_words(words, source, columns);
      for (int k = 0; k < 16; k += 2)
        put<streaming>(out + k * LANES, ior(ishr<16>(round16(words[k])), iand(round16(words[k + 1]), upper)));
    }
  } else {
    load_words(words, source, columns);
    for (int k = 0; k < 16; k++, out += 2 * LANES) {
      put<streaming>(out, ishl<16>(words[k]));
      put<streaming>(out + LANES, iand(words[k], upper));
    }
  }
}

// Pack one panel: 16 whole, contiguous rows. The rows of the next panel are prefetched, because 16 streams are too many
// for the processor's own prefetcher.
template <bool streaming, class T, class S>
void pack_panel(const S* source, T* out, int64_t columns, bool more) {
  constexpr int64_t width = WIDTH<T, S>, line = 64 / sizeof(S);
  int64_t k = 0;
  for (; k + width <= columns; k += width) {
    if (more)
      for (int64_t i = 0; i < width * LANES; i += line) fetch2(source + columns * LANES + k * LANES + i);
    move<streaming>(source + k, columns, out + k * LANES);
  }
  for (; k < columns; k++)
    for (int64_t n = 0; n < LANES; n++) out[place<T>(n, k, columns)] = cast<T>(source[n * columns + k]);
}

}  // namespace

template <class T, class S>
void pack(const S* source, T* packed, int64_t start, int64_t count, int64_t columns) {
  const bool aligned = reinterpret_cast<uintptr_t>(packed) % 64 == 0;
  for (int64_t first = 0; first < count;) {
    const S* row = source + first * columns;
    if ((start + first) % LANES == 0 && count - first >= LANES) {
      T* out = packed + place<T>(start + first, 0, columns);
      const bool more = count - first >= 2 * LANES;
      aligned ? pack_panel<true>(row, out, columns, more) : pack_panel<false>(row, out, columns, more);
      first += LANES;
    } else {
      for (int64_t k = 0; k < columns; k++) packed[place<T>(start + first, k, columns)] = cast<T>(row[k]);
      first++;
    }
  }
  streamed();
}

template <class T>
void unpack(const T* packed, T* out, int64_t start, int64_t count, int64_t columns) {
  constexpr int64_t width = 64 / sizeof(T);
  for (int64_t first = 0; first < count;) {
    T* row = out + first * columns;
    if ((start + first) % LANES == 0 && count - first >= LANES) {
      const T* panel = packed + place<T>(start + first, 0, columns);
      int64_t k = 0;
      for (; k + width <= columns; k += width) {
        IVec words[16];
        for (int n = 0; n < 16; n++) words[n] = iload(panel + k * LANES + n * width);
        transpose(words);
        for (int n = 0; n < LANES; n++) istore(row + n * columns + k, words[n]);
      }
      for (; k < columns; k++)
        for (int64_t n = 0; n < LANES; n++) row[n * columns + k] = panel[place<T>(n, k, columns)];
      first += LANES;
    } else {
      for (int64_t k = 0; k < columns; k++) row[k] = packed[place<T>(start + first, k, columns)];
      first++;
    }
  }
}

template void pack(const bf16*, bf16*, int64_t, int64_t, int64_t);
template void pack(const float*, bf16*, int64_t, int64_t, int64_t);
template void pack(const bf16*, float*, int64_t, int64_t, int64_t);
template void pack(const float*, float*, int64_t, int64_t, int64_t);
template void unpack(const bf16*, bf16*, int64_t, int64_t, int64_t);
template void unpack(const float*, float*, int64_t, int64_t, int64_t);

}  // namespace nano
