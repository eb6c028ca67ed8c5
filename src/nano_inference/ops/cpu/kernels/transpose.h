// Transpose sixteen rows of sixteen words in registers, between rows and panels.
#pragma once
#include "simd.h"

namespace nano {

#if defined(NANO_AVX512)

// Interleave words, then pairs of words. Then exchange the quarters of four vectors, twice.
inline void transpose(IVec (&v)[16]) {
  IVec t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  // v[4 * g + c] holds, in its quarter q, rows 4 * g ... of column 4 * q + c.
  for (int c = 0; c < 4; c++) {
    const IVec low02 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88), low13 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const IVec high02 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    const IVec high13 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    t[4 + c] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
  for (int i = 0; i < 16; i++) v[i] = t[i];
}

// Store past the caches, which would otherwise read the overwritten line first. `p` is a multiple of 64.
inline void istream(void* p, IVec v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }
inline void streamed() { _mm_sfence(); }

#elif defined(NANO_AVX2)

inline void transpose8(__m256i* (&v)[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(*v[i], *v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(*v[i], *v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      u[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int c = 0; c < 4; c++) {
    *v[c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x20);
    *v[4 + c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x31);
  }
}

// Transpose four squares of eight, and exchange two of them.
inline void transpose(IVec (&v)[16]) {
  for (int i = 0; i < 16; i += 8) {
    __m256i *low[8], *high[8];
    for (int j = 0; j < 8; j++) low[j] = &v[i + j].lo, high[j] = &v[i + j].hi;
    transpose8(low);
    transpose8(high);
  }
  for (int i = 0; i < 8; i++) {
    const __m256i moved = v[i].hi;
    v[i].hi = v[8 + i].lo;
    v[8 + i].lo = moved;
  }
}

inline void istream(void* p, IVec v) {
  _mm256_stream_si256(static_cast<__m256i*>(p), v.lo);
  _mm256_stream_si256(static_cast<__m256i*>(p) + 1, v.hi);
}
inline void streamed() { _mm_sfence(); }

#elif defined(NANO_NEON)

inline void transpose4(uint32x4_t& a, uint32x4_t& b, uint32x4_t& c, uint32x4_t& d) {
  auto low = [](uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u32_u64(vtrn1q_u64(vreinterpretq_u64_u32(x), vreinterpretq_u64_u32(y)));
  };
  auto high = [](uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u32_u64(vtrn2q_u64(vreinterpretq_u64_u32(x), vreinterpretq_u64_u32(y)));
  };
  const uint32x4_t even = vtrn1q_u32(a, b), odd = vtrn2q_u32(a, b), next_even = vtrn1q_u32(c, d), next_odd = vtrn2q_u32(c, d);
  a = low(even, next_even), b = low(odd, next_odd), c = high(even, next_even), d = high(odd, next_odd);
}

// Transpose sixteen squares of four, and exchange them.
inline void transpose(IVec (&v)[16]) {
  uint32x4_t t[16][4];
  for (int i = 0; i < 16; i++) t[i][0] = v[i].q0, t[i][1] = v[i].q1, t[i][2] = v[i].q2, t[i][3] = v[i].q3;
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 4; j++) transpose4(t[i][j], t[i + 1][j], t[i + 2][j], t[i + 3][j]);
  for (int i = 0; i < 16; i++) v[i] = {t[i % 4][i / 4], t[4 + i % 4][i / 4], t[8 + i % 4][i / 4], t[12 + i % 4][i / 4]};
}

inline void istream(void* p, IVec v) { istore(p, v); }
inline void streamed() {}

#else

inline void transpose(IVec (&v)[16]) {
  uint32_t words[16][16];
  for (int i = 0; i < 16; i++) istore(words[i], v[i]);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      const uint32_t moved = words[i][j];
      words[i][j] = words[j][i];
      words[j][i] = moved;
    }
  for (int i = 0; i < 16; i++) v[i] = iload(words[i]);
}

inline void istream(void* p, IVec v) { istore(p, v); }
inline void streamed() {}

#endif

}  // namespace nano
