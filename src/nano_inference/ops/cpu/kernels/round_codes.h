// Rounding of numbers to codes of 8 bits with a scale: inputs of products, and rows of keys and values
// (ops/quantised.py).
#pragma once
#include "simd.h"

namespace nano {

constexpr float MOST = 127.f;   // largest code of 8 bits
constexpr float TINY = 1e-30f;  // groups whose largest magnitude is at most this count as zeros

// Largest magnitude, and 0, or NaN if a number is not finite.
struct Range {
  float largest, known;
};

inline Range range_of(const float* x, int64_t count) {
  Vec largest = vset(0.f), known = vset(0.f);
  const IVec magnitude = iset(0x7fffffff);
  for (int64_t k = 0; k < count; k += LANES) {
    const Vec v = vload_n(x + k, count - k < LANES ? int(count - k) : LANES);
    largest = vmax(vbits(iand(ibits(v), magnitude)), largest);
    known = vadd(known, vmul(v, vset(0.f)));
  }
  return {vhighest(largest), vsum(known)};
}

// Compute codes of x / scale, rounded to nearest, ties to even.
inline void round_codes(const float* x, int64_t count, float inverse, float low, float high, int8_t* codes) {
  const Vec factor = vset(inverse), least = vset(low), most = vset(high);
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = count - k < LANES ? int(count - k) : LANES;
    const IVec whole = ito_int(vmin(most, vmax(least, vround(vmul(vload_n(x + k, n), factor)))));
#if defined(NANO_AVX512)
    _mm_mask_storeu_epi8(codes + k, __mmask16(first_lanes(n)), _mm512_cvtepi32_epi8(whole));
#else
#if defined(NANO_AVX2)
    if (n == LANES) {
      const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole.lo, whole.hi), 0xd8);
      const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), bytes);
      continue;
    }
#endif
    int32_t each[LANES];
    istore(each, whole);
    for (int i = 0; i < n; i++) codes[k + i] = int8_t(each[i]);
#endif
  }
}

// Encode a group of numbers. Return its scale, which is NaN if a number is not finite.
inline float encode(const float* x, int64_t count, int8_t* codes) {
  const Range range = range_of(x, count);
  if (range.known == 0.f && range.largest > TINY) {
    round_codes(x, count, MOST / range.largest, -MOST, MOST, codes);
    return range.largest / MOST;
  }
  memset(codes, 0, size_t(count));
  return range.known == 0.f ? 0.f : NAN;  // the same NaN on all machines
}

}  // namespace nano
