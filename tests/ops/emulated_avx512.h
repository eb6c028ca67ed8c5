// AVX-512 by SIMDe (libsimde-dev, 0.7.4) on processors without it, with the functions that SIMDe lacks or computes
// otherwise. Included before the kernels, with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace emulated {

template <class To, class From>
inline To bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}
template <class T, int N>
struct Lanes {
  T at[N];
};
using Floats = Lanes<float, 16>;
using Ints = Lanes<int32_t, 16>;

inline float widened(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
inline uint16_t narrowed(float x) {
  uint32_t u = bits<uint32_t>(x);
  if (x != x) return uint16_t(u >> 16 | 0x40);
  if ((u & 0x7f800000) == 0) return uint16_t(u >> 16 & 0x8000);  // denormals are zero
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline Lanes<uint16_t, 16> narrowed16(__m512 x) {
  auto in = bits<Floats>(x);
  Lanes<uint16_t, 16> out;
  for (int i = 0; i < 16; i++) out.at[i] = narrowed(in.at[i]);
  return out;
}
inline __m256bh cvtneps_pbh(__m512 x) { return bits<__m256bh>(narrowed16(x)); }
inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  Lanes<Lanes<uint16_t, 16>, 2> out = {{narrowed16(low), narrowed16(high)}};
  return bits<__m512bh>(out);
}
inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  auto out = bits<Floats>(sum);
  auto x = bits<Lanes<uint16_t, 32>>(a), y = bits<Lanes<uint16_t, 32>>(b);
  for (int i = 0; i < 16; i++) {
    out.at[i] = std::fma(widened(x.at[2 * i + 1]), widened(y.at[2 * i + 1]), out.at[i]);
    out.at[i] = std::fma(widened(x.at[2 * i]), widened(y.at[2 * i]), out.at[i]);
  }
  return bits<__m512>(out);
}
inline __m512i madd_epi16(__m512i a, __m512i b) {
  auto x = bits<Lanes<__m256i, 2>>(a), y = bits<Lanes<__m256i, 2>>(b);
  Lanes<__m256i, 2> out = {{_mm256_madd_epi16(x.at[0], y.at[0]), _mm256_madd_epi16(x.at[1], y.at[1])}};
  return bits<__m512i>(out);
}
inline void stream_si512(void* p, __m512i x) { std::memcpy(p, &x, 64); }
inline __mmask16 testn_epi32_mask(__m512i a, __m512i b) {
  auto x = bits<Ints>(a), y = bits<Ints>(b);
  unsigned out = 0;
  for (int i = 0; i < 16; i++) out |= unsigned((x.at[i] & y.at[i]) == 0) << i;
  return __mmask16(out);
}
template <class To, class From, int N>
inline Lanes<To, N> converted(Lanes<From, N> x) {
  Lanes<To, N> out;
  for (int i = 0; i < N; i++) out.at[i] = To(x.at[i]);
  return out;
}
inline __m128i cvtepi32_epi8(__m512i x) { return bits<__m128i>(converted<int8_t>(bits<Ints>(x))); }
inline __m256i cvtepi32_epi16(__m512i x) { return bits<__m256i>(converted<int16_t>(bits<Ints>(x))); }
inline __m512i cvtepu16_epi32(__m256i x) {
  return bits<__m512i>(converted<int32_t>(bits<Lanes<uint16_t, 16>>(x)));
}
inline __m512i cvtepi8_epi32(__m128i x) {
  return bits<__m512i>(converted<int32_t>(bits<Lanes<int8_t, 16>>(x)));
}
inline __m512 joined(__m256 low, __m256 high) {
  Lanes<__m256, 2> out = {{low, high}};
  return bits<__m512>(out);
}
inline __m512 cvtph_ps(__m256i x) {
  auto in = bits<Lanes<__m128i, 2>>(x);
  return joined(_mm256_cvtph_ps(in.at[0]), _mm256_cvtph_ps(in.at[1]));
}
inline __m512i cvtps_epi32(__m512 x) {
  auto in = bits<Lanes<__m256, 2>>(x);
  Lanes<__m256i, 2> out = {{_mm256_cvtps_epi32(in.at[0]), _mm256_cvtps_epi32(in.at[1])}};
  return bits<__m512i>(out);
}
inline __m512 maskz_loadu_ps(__mmask16 mask, const void* p) {
  Floats out = {};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) std::memcpy(&out.at[i], static_cast<const float*>(p) + i, 4);
  return bits<__m512>(out);
}
inline void mask_storeu_ps(void* p, __mmask16 mask, __m512 x) {
  auto in = bits<Floats>(x);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) std::memcpy(static_cast<float*>(p) + i, &in.at[i], 4);
}
// The number of smaller magnitude, with the sign of the first.
inline __m512 range_ps(__m512 a, __m512 b, int) {
  auto x = bits<Floats>(a), y = bits<Floats>(b);
  for (int i = 0; i < 16; i++) {
    float least = x.at[i] != x.at[i] || std::fabs(y.at[i]) < std::fabs(x.at[i]) ? y.at[i] : x.at[i];
    x.at[i] = std::copysign(least, x.at[i]);
  }
  return bits<__m512>(x);
}
// a * 2^floor(n), rounded once. Denormal numbers are zero.
inline __m512 scalef_ps(__m512 a, __m512 n) {
  auto x = bits<Floats>(a), y = bits<Floats>(n);
  for (int i = 0; i < 16; i++) {
    float from = std::fpclassify(x.at[i]) == FP_SUBNORMAL ? std::copysign(0.0f, x.at[i]) : x.at[i];
    float to = float(std::ldexp(double(from), int(std::floor(y.at[i]))));
    x.at[i] = std::fpclassify(to) == FP_SUBNORMAL ? std::copysign(0.0f, to) : to;
  }
  return bits<__m512>(x);
}
inline void mask_storeu_epi16(void* p, __mmask16 mask, __m256i x) {
  auto in = bits<Lanes<uint16_t, 16>>(x);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) std::memcpy(static_cast<uint16_t*>(p) + i, &in.at[i], 2);
}
inline void mask_storeu_epi8(void* p, __mmask16 mask, __m128i x) {
  auto in = bits<Lanes<uint8_t, 16>>(x);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) static_cast<uint8_t*>(p)[i] = in.at[i];
}
inline __m256i maskz_loadu_epi16(__mmask16 mask, const void* p) {
  Lanes<uint16_t, 16> out = {};
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) std::memcpy(&out.at[i], static_cast<const uint16_t*>(p) + i, 2);
  return bits<__m256i>(out);
}
inline __m512 cvtepi32_ps(__m512i x) {
  auto in = bits<Lanes<__m256i, 2>>(x);
  return joined(_mm256_cvtepi32_ps(in.at[0]), _mm256_cvtepi32_ps(in.at[1]));
}
inline __m256 extractf32x8_ps(__m512 x, int half) { return bits<Lanes<__m256, 2>>(x).at[half]; }
inline float cvtss_f32(__m512 x) { return bits<Floats>(x).at[0]; }

}  // namespace emulated

#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_stream_si512 emulated::stream_si512
#define _mm512_testn_epi32_mask emulated::testn_epi32_mask
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_cvtss_f32 emulated::cvtss_f32
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated::mask_storeu_epi16
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm_mask_storeu_epi8
#define _mm_mask_storeu_epi8 emulated::mask_storeu_epi8
#undef _mm512_range_ps
#define _mm512_range_ps emulated::range_ps
#undef _mm512_scalef_ps
#define _mm512_scalef_ps emulated::scalef_ps
