// Vec, IVec, Pairs on NEON (aarch64), four registers each. simd.h lists the functions.
//
// FPCR.FZ, which FlushDenormals sets, flushes denormal inputs and outputs to zero like the modes of x86. There is one
// difference: a result below 2^-126 that rounds up to 2^-126 is 2^-126 on x86 and zero here, because here a result
// counts as too small before it is rounded. This requires a product or a quotient within 2^-151 of 2^-126.
#pragma once
#include <arm_neon.h>

namespace nano {

struct Vec {
  float32x4_t q0, q1, q2, q3;
};
struct IVec {
  uint32x4_t q0, q1, q2, q3;
};
using Pairs = IVec;

// Apply f to each quarter. Always inlined: a call would store the quarters in memory.
template <class Out, class F, class... In>
inline __attribute__((always_inline)) Out each(F f, const In&... in) {
  return {f(in.q0...), f(in.q1...), f(in.q2...), f(in.q3...)};
}

inline IVec lane_bits(Mask m) {  // all ones in the lanes that are set
  static const uint32_t bits[LANES] = {1u << 0, 1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                       1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};
  const uint32x4_t all = vdupq_n_u32(m);
  return {vtstq_u32(all, vld1q_u32(bits)), vtstq_u32(all, vld1q_u32(bits + 4)), vtstq_u32(all, vld1q_u32(bits + 8)),
          vtstq_u32(all, vld1q_u32(bits + 12))};
}
inline Mask mask_of(IVec lanes) {  // one bit per lane, for lanes that are all ones or zeros
  static const uint8_t bits[LANES] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(lanes.q0), vreinterpretq_u16_u32(lanes.q1));
  const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(lanes.q2), vreinterpretq_u16_u32(lanes.q3));
  uint8x16_t all = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), vld1q_u8(bits));
  all = vpaddq_u8(all, all), all = vpaddq_u8(all, all), all = vpaddq_u8(all, all);
  return vgetq_lane_u16(vreinterpretq_u16_u8(all), 0);
}

inline Vec vset(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec vload(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline Vec vload_n(const float* p, int n) {
  if (n >= LANES) return vload(p);
  float all[LANES] = {};
  for (int i = 0; i < n; i++) all[i] = p[i];
  return vload(all);
}
inline void vstore(float* p, Vec v) {
  vst1q_f32(p, v.q0), vst1q_f32(p + 4, v.q1), vst1q_f32(p + 8, v.q2), vst1q_f32(p + 12, v.q3);
}
inline void vstore_n(float* p, Vec v, int n) {
  if (n >= LANES) return vstore(p, v);
  float all[LANES];
  vstore(all, v);
  for (int i = 0; i < n; i++) p[i] = all[i];
}
inline float vfirst(Vec v) { return vgetq_lane_f32(v.q0, 0); }

// a > b ? a : b. The processor's own maximum differs for a NaN and for two zeros.
inline float32x4_t higher(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t lower(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

#define NANO_EACH(name, f) \
  inline Vec name(Vec a, Vec b) { return each<Vec>([](float32x4_t x, float32x4_t y) { return f(x, y); }, a, b); }
NANO_EACH(vadd, vaddq_f32)
NANO_EACH(vsub, vsubq_f32)
NANO_EACH(vmul, vmulq_f32)
NANO_EACH(vdiv, vdivq_f32)
NANO_EACH(vmax, higher)
NANO_EACH(vmin, lower)
#undef NANO_EACH
inline Vec vfma(Vec a, Vec b, Vec c) {
  return each<Vec>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline Vec vsqrt(Vec a) { return each<Vec>([](float32x4_t x) { return vsqrtq_f32(x); }, a); }
inline Vec vround(Vec a) { return each<Vec>([](float32x4_t x) { return vrndnq_f32(x); }, a); }

inline float vsum(Vec a) {
  const float32x4_t t = vaddq_f32(vaddq_f32(a.q0, a.q2), vaddq_f32(a.q1, a.q3));
  const float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
  return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
}
inline float vhighest(Vec a) {
  float32x4_t t = higher(higher(a.q0, a.q2), higher(a.q1, a.q3));
  t = higher(t, vextq_f32(t, t, 2));
  return vgetq_lane_f32(higher(t, vextq_f32(t, t, 1)), 0);
}

inline Mask vgt(Vec a, Vec b) {
  return mask_of(each<IVec>([](float32x4_t x, float32x4_t y) { return vcgtq_f32(x, y); }, a, b));
}
inline Mask vge(Vec a, Vec b) {
  return mask_of(each<IVec>([](float32x4_t x, float32x4_t y) { return vcgeq_f32(x, y); }, a, b));
}
inline Mask veq(Vec a, Vec b) {
  return mask_of(each<IVec>([](float32x4_t x, float32x4_t y) { return vceqq_f32(x, y); }, a, b));
}
inline Mask vnan(Vec a) { return veq(a, a) ^ 0xffffu; }
inline Vec vselect(Mask m, Vec a, Vec b) {
  return each<Vec>([](uint32x4_t set, float32x4_t x, float32x4_t y) { return vbslq_f32(set, x, y); }, lane_bits(m), a, b);
}

inline IVec iset(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x), vdupq_n_u32(x), vdupq_n_u32(x)}; }
inline uint32x4_t words_at(const void* p) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline IVec iload(const void* p) {  // by bytes: the compiler would assume that an address of words is aligned
  auto q = static_cast<const uint8_t*>(p);
  return {words_at(q), words_at(q + 16), words_at(q + 32), words_at(q + 48)};
}
inline void istore(void* p, IVec v) {
  auto q = static_cast<uint8_t*>(p);
  vst1q_u8(q, vreinterpretq_u8_u32(v.q0)), vst1q_u8(q + 16, vreinterpretq_u8_u32(v.q1));
  vst1q_u8(q + 32, vreinterpretq_u8_u32(v.q2)), vst1q_u8(q + 48, vreinterpretq_u8_u32(v.q3));
}
inline IVec ilanes() {
  static const uint32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return iload(lanes);
}

#define NANO_EACH(name, f) \
  inline IVec name(IVec a, IVec b) { return each<IVec>([](uint32x4_t x, uint32x4_t y) { return f(x, y); }, a, b); }
NANO_EACH(iadd, vaddq_u32)
NANO_EACH(isub, vsubq_u32)
NANO_EACH(imul, vmulq_u32)
NANO_EACH(ixor, veorq_u32)
NANO_EACH(iand, vandq_u32)
NANO_EACH(ior, vorrq_u32)
#undef NANO_EACH
template <int n>
inline IVec ishl(IVec a) { return each<IVec>([](uint32x4_t x) { return vshlq_n_u32(x, n); }, a); }
template <int n>
inline IVec ishr(IVec a) { return each<IVec>([](uint32x4_t x) { return vshrq_n_u32(x, n); }, a); }
inline Mask igt(IVec a, IVec b) {
  return mask_of(each<IVec>(
      [](uint32x4_t x, uint32x4_t y) { return vcgtq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(y)); }, a, b));
}
inline Vec vfrom_int(IVec a) {
  return each<Vec>([](uint32x4_t x) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x)); }, a);
}
inline IVec ito_int(Vec a) {  // if the value does not fit, the result is that of x86
  return each<IVec>(
      [](float32x4_t x) {
        const uint32x4_t fits = vcaltq_f32(x, vdupq_n_f32(2147483648.f));
        return vbslq_u32(fits, vreinterpretq_u32_s32(vcvtnq_s32_f32(x)), vdupq_n_u32(0x80000000u));
      },
      a);
}
inline Vec vbits(IVec a) { return each<Vec>([](uint32x4_t x) { return vreinterpretq_f32_u32(x); }, a); }
inline IVec ibits(Vec a) { return each<IVec>([](float32x4_t x) { return vreinterpretq_u32_f32(x); }, a); }

// Scale in two halves, so that each factor is a normal number whenever the product is one.
inline Vec vscale(Vec a, Vec n) {
  return each<Vec>(
      [](float32x4_t x, float32x4_t by) {
        const int32x4_t whole = vcvtnq_s32_f32(lower(vdupq_n_f32(250.f), higher(vdupq_n_f32(-250.f), by)));
        const int32x4_t half = vshrq_n_s32(whole, 1), one = vdupq_n_s32(127);
        x = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, one), 23)));
        return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), one), 23)));
      },
      a, n);
}

inline Pairs bload(const bf16* p) { return iload(p); }
inline Pairs bdup(const bf16* p) {
  uint32_t pair;
  memcpy(&pair, p, 4);
  return iset(pair);
}
inline Pairs bdup_first(const bf16* p) { return iset(*p); }
inline Pairs bfirst(Pairs b) { return iand(b, iset(0xffff)); }
// Not BFDOT: it rounds the two products and their sum to odd, each separately, or with FEAT_EBF16 the pair together.
// Its sums have other bits than two fused products, which `vdot` requires.
inline Vec vdot(Vec acc, Pairs a, Pairs b) {
  const IVec high = iset(0xffff0000);
  acc = vfma(vbits(iand(a, high)), vbits(iand(b, high)), acc);
  return vfma(vbits(ishl<16>(a)), vbits(ishl<16>(b)), acc);
}
inline Vec vwiden(const bf16* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8), zero = vdupq_n_u16(0);
  return {vreinterpretq_f32_u16(vzip1q_u16(zero, low)), vreinterpretq_f32_u16(vzip2q_u16(zero, low)),
          vreinterpretq_f32_u16(vzip1q_u16(zero, high)), vreinterpretq_f32_u16(vzip2q_u16(zero, high))};
}
inline uint16x8_t narrow8(float32x4_t a, float32x4_t b) {
  // The upper halves of bits + 0x7fff + the lowest remaining bit.
  auto rounded = [](float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    return vaddhn_u32(bits, vsraq_n_u32(vdupq_n_u32(0x7fff), vshlq_n_u32(bits, 15), 31));
  };
  const uint16x8_t top = vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b));
  const uint16x8_t number = vuzp1q_u16(vreinterpretq_u16_u32(vceqq_f32(a, a)), vreinterpretq_u16_u32(vceqq_f32(b, b)));
  const uint16x8_t normal = vtstq_u16(top, vdupq_n_u16(0x7f80));
  uint16x8_t out = vcombine_u16(rounded(a), rounded(b));
  out = vbslq_u16(normal, out, vandq_u16(top, vdupq_n_u16(0x8000)));
  return vbslq_u16(number, out, vorrq_u16(top, vdupq_n_u16(0x40)));
}
inline void vnarrow(bf16* p, Vec v) { vst1q_u16(p, narrow8(v.q0, v.q1)), vst1q_u16(p + 8, narrow8(v.q2, v.q3)); }
inline void vnarrow2(bf16* p, Vec a, Vec b) { vnarrow(p, a), vnarrow(p + 16, b); }
inline void vnarrow_n(bf16* p, Vec v, int n) {
  if (n >= LANES) return vnarrow(p, v);
  bf16 all[LANES];
  vnarrow(all, v);
  for (int i = 0; i < n; i++) p[i] = all[i];
}

}  // namespace nano
