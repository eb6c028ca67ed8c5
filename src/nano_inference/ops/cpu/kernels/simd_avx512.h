// Vec, IVec, Pairs on AVX-512. simd.h lists the functions.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers use "_mm512_undefined" intentionally
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

namespace nano {

using Vec = __m512;
using IVec = __m512i;
using Pairs = __m512i;

inline Vec vset(float x) { return _mm512_set1_ps(x); }
inline Vec vload(const float* p) { return _mm512_loadu_ps(p); }
inline Vec vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16(first_lanes(n)), p); }
inline void vstore(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void vstore_n(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, __mmask16(first_lanes(n)), v); }
inline float vfirst(Vec v) { return _mm512_cvtss_f32(v); }
inline Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec vdiv(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec vsqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec vround(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Clamp n to [-250, 250], where any number is already zero or infinite: vscalefps turns NaN and an infinite n into 0 or
// infinity.
inline Vec vscale(Vec a, Vec n) { return _mm512_scalef_ps(a, _mm512_range_ps(n, vset(250), 2)); }

inline __m128 sum_to4(Vec a) {
  __m256 t = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}
inline float vsum(Vec a) {
  __m128 t = sum_to4(a);
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
// Not _mm512_reduce_max_ps, which takes halves in another order: the maximum of a number and a NaN is the second
// operand.
inline float vhighest(Vec a) {
  __m256 t = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 u = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_max_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_max_ss(u, _mm_shuffle_ps(u, u, 1)));
}

inline Mask vgt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask vge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask veq(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask vnan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Vec vselect(Mask m, Vec a, Vec b) { return _mm512_mask_mov_ps(b, __mmask16(m), a); }

inline IVec iset(uint32_t x) { return _mm512_set1_epi32(int(x)); }
inline IVec iload(const void* p) { return _mm512_loadu_si512(p); }
inline void istore(void* p, IVec v) { _mm512_storeu_si512(p, v); }
inline IVec ilanes() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
inline IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
inline IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
inline IVec imul(IVec a, IVec b) { return _mm512_mullo_epi32(a, b); }
inline IVec ixor(IVec a, IVec b) { return _mm512_xor_si512(a, b); }
inline IVec iand(IVec a, IVec b) { return _mm512_and_si512(a, b); }
inline IVec ior(IVec a, IVec b) { return _mm512_or_si512(a, b); }
template <int n>
inline IVec ishl(IVec a) { return _mm512_slli_epi32(a, n); }
template <int n>
inline IVec ishr(IVec a) { return _mm512_srli_epi32(a, n); }
inline Mask igt(IVec a, IVec b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Vec vfrom_int(IVec a) { return _mm512_cvtepi32_ps(a); }
inline IVec ito_int(Vec a) { return _mm512_cvtps_epi32(a); }
inline Vec vbits(IVec a) { return _mm512_castsi512_ps(a); }
inline IVec ibits(Vec a) { return _mm512_castps_si512(a); }

inline Pairs bload(const bf16* p) { return _mm512_loadu_si512(p); }
inline Pairs bdup(const bf16* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
inline Pairs bdup_first(const bf16* p) { return _mm512_set1_epi32(*p); }
inline Pairs bfirst(Pairs b) { return _mm512_and_si512(b, _mm512_set1_epi32(0xffff)); }
inline Vec vwiden(const bf16* p) {
  return vbits(ishl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}

#if defined(NANO_BF16)
inline Vec vdot(Vec acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
inline __m256i narrow16(Vec v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline void vnarrow2(bf16* p, Vec a, Vec b) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a)); }
#else
inline Vec vdot(Vec acc, Pairs a, Pairs b) {
  const IVec high = _mm512_set1_epi32(int(0xffff0000));
  acc = vfma(vbits(iand(a, high)), vbits(iand(b, high)), acc);
  return vfma(vbits(ishl<16>(a)), vbits(ishl<16>(b)), acc);
}
inline __m256i narrow16(Vec v) {
  IVec bits = ibits(v), top = ishr<16>(bits);
  IVec rounded = ishr<16>(iadd(bits, iadd(iset(0x7fff), iand(top, iset(1)))));
  __mmask16 tiny = _mm512_testn_epi32_mask(bits, iset(0x7f800000));
  rounded = _mm512_mask_and_epi32(rounded, tiny, top, iset(0x8000));
  rounded = _mm512_mask_or_epi32(rounded, __mmask16(vnan(v)), top, iset(0x40));
  return _mm512_cvtepi32_epi16(rounded);
}
inline void vnarrow2(bf16* p, Vec a, Vec b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), narrow16(b));
}
#endif
inline void vnarrow(bf16* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(v)); }
inline void vnarrow_n(bf16* p, Vec v, int n) { _mm256_mask_storeu_epi16(p, __mmask16(first_lanes(n)), narrow16(v)); }

}  // namespace nano
