// Vec, IVec, Pairs on AVX2 with FMA, two registers each. simd.h lists the functions.
#pragma once
#include <immintrin.h>

namespace nano {

struct Vec {
  __m256 lo, hi;
};
struct IVec {
  __m256i lo, hi;
};
using Pairs = IVec;

inline __m256i lane_bits(Mask m) {  // all ones in the lanes of the lowest eight bits
  const __m256i bits = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(m)), bits), bits);
}

inline Vec vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec vload_n(const float* p, int n) {
  Mask m = first_lanes(n);
  return {_mm256_maskload_ps(p, lane_bits(m)), _mm256_maskload_ps(p + 8, lane_bits(m >> 8))};
}
inline void vstore(float* p, Vec v) { _mm256_storeu_ps(p, v.lo), _mm256_storeu_ps(p + 8, v.hi); }
inline void vstore_n(float* p, Vec v, int n) {
  Mask m = first_lanes(n);
  _mm256_maskstore_ps(p, lane_bits(m), v.lo), _mm256_maskstore_ps(p + 8, lane_bits(m >> 8), v.hi);
}
inline float vfirst(Vec v) { return _mm256_cvtss_f32(v.lo); }
inline Vec vadd(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec vsub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec vmul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec vdiv(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec vfma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec vmin(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec vsqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Vec vround(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}

inline float vsum(Vec a) {
  __m256 t = _mm256_add_ps(a.lo, a.hi);
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_shuffle_ps(u, u, 1)));
}
inline float vhighest(Vec a) {
  __m256 t = _mm256_max_ps(a.lo, a.hi);
  __m128 u = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_max_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_max_ss(u, _mm_shuffle_ps(u, u, 1)));
}

template <int op>
inline Mask compare(Vec a, Vec b) {
  return Mask(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, op))) |
         Mask(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, op))) << 8;
}
inline Mask vgt(Vec a, Vec b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask vge(Vec a, Vec b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask veq(Vec a, Vec b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask vnan(Vec a) { return compare<_CMP_UNORD_Q>(a, a); }
inline Vec vselect(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lane_bits(m))),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(lane_bits(m >> 8)))};
}

inline IVec iset(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline IVec iload(const void* p) {
  auto q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void istore(void* p, IVec v) {
  auto q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.lo), _mm256_storeu_si256(q + 1, v.hi);
}
inline IVec ilanes() { return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_epi32(15, 14, 13, 12, 11, 10, 9, 8)}; }
inline IVec iadd(IVec a, IVec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline IVec isub(IVec a, IVec b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline IVec imul(IVec a, IVec b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline IVec ixor(IVec a, IVec b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline IVec iand(IVec a, IVec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline IVec ior(IVec a, IVec b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int n>
inline IVec ishl(IVec a) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
template <int n>
inline IVec ishr(IVec a) { return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)}; }
inline Mask igt(IVec a, IVec b) {
  return Mask(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.lo, b.lo)))) |
         Mask(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.hi, b.hi)))) << 8;
}
inline Vec vfrom_int(IVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline IVec ito_int(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Vec vbits(IVec a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline IVec ibits(Vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

// Scale in two halves, so that each factor is a normal number whenever the product is one.
inline Vec vscale(Vec a, Vec n) {
  IVec whole = ito_int(vmin(vset(250.f), vmax(vset(-250.f), n)));
  IVec half = {_mm256_srai_epi32(whole.lo, 1), _mm256_srai_epi32(whole.hi, 1)}, one = iset(127);
  a = vmul(a, vbits(ishl<23>(iadd(half, one))));
  return vmul(a, vbits(ishl<23>(iadd(isub(whole, half), one))));
}

inline Pairs bload(const bf16* p) { return iload(p); }
inline Pairs bdup(const bf16* p) {
  uint32_t pair;
  memcpy(&pair, p, 4);
  return iset(pair);
}
inline Pairs bdup_first(const bf16* p) { return iset(*p); }
inline Pairs bfirst(Pairs b) { return iand(b, iset(0xffff)); }
inline Vec vdot(Vec acc, Pairs a, Pairs b) {
  const IVec high = iset(0xffff0000);
  acc = vfma(vbits(iand(a, high)), vbits(iand(b, high)), acc);
  return vfma(vbits(ishl<16>(a)), vbits(ishl<16>(b)), acc);
}
inline Vec vwiden(const bf16* p) {
  auto q = reinterpret_cast<const __m128i*>(p);
  return vbits(ishl<16>(IVec{_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))}));
}
// The nearest bfloat16 of each lane, for numbers that are not denormal. A NaN's low bits must be 0.
inline Vec vrounded(Vec v) {
  const IVec bits = ibits(v);
  return vbits(iand(iadd(bits, iadd(iset(0x7fff), iand(ishr<16>(bits), iset(1)))), iset(0xffff0000)));
}
inline __m256i narrow16(Vec v) {
  IVec bits = ibits(v), top = ishr<16>(bits);
  IVec rounded = ishr<16>(iadd(bits, iadd(iset(0x7fff), iand(top, iset(1)))));
  IVec exponent = iand(bits, iset(0x7f800000)), zero = iset(0);
  IVec tiny = {_mm256_cmpeq_epi32(exponent.lo, zero.lo), _mm256_cmpeq_epi32(exponent.hi, zero.hi)};
  IVec flushed = iand(top, iset(0x8000)), nan = ior(top, iset(0x40));
  Mask bad = vnan(v);
  __m256i lo = _mm256_blendv_epi8(rounded.lo, flushed.lo, tiny.lo), hi = _mm256_blendv_epi8(rounded.hi, flushed.hi, tiny.hi);
  lo = _mm256_blendv_epi8(lo, nan.lo, lane_bits(bad)), hi = _mm256_blendv_epi8(hi, nan.hi, lane_bits(bad >> 8));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
}
inline void vnarrow(bf16* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(v)); }
inline void vnarrow2(bf16* p, Vec a, Vec b) { vnarrow(p, a), vnarrow(p + 16, b); }
inline void vnarrow_n(bf16* p, Vec v, int n) {
  bf16 all[LANES];
  vnarrow(all, v);
  if (n > 0) memcpy(p, all, 2 * size_t(n < LANES ? n : LANES));
}

}  // namespace nano
