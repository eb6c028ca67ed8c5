// Sixteen float lanes with the same bits on every machine: the functions that all kernels are written in.
//
// A build flag selects one of four implementations: NANO_AVX512 (with NANO_BF16 if the machine multiplies bf16 itself),
// NANO_AVX2, NANO_NEON, or portable C++ without a flag. Each function below rounds once per named operation, to nearest
// even, and flushes denormals (FlushDenormals), so all give the same bits. Compile with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace nano {

using bf16 = uint16_t;
using Mask = uint32_t;  // bit i: lane i
constexpr int LANES = 16;

inline float widen1(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even. Denormals become zero and NaN stays NaN, as in vcvtneps2bf16.
inline bf16 narrow1(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  if ((bits & 0x7f800000) == 0) return bf16((bits >> 16) & 0x8000);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Mask first_lanes(int n) { return n >= LANES ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1; }

}  // namespace nano

// Vec: 16 floats.  IVec: 16 32-bit integers.  Pairs: 16 pairs of bf16.
//
//   Vec   vset(x)  vload(p)  vload_n(p, n)  vstore(p, v)  vstore_n(p, v, n)      _n: first n lanes only, the rest is
//         0 and its memory is not accessed; pointers need no alignment
//   Vec   vadd vsub vmul vdiv  vfma(a, b, c) = a * b + c  vmax(a, b) = a > b ? a : b  vmin likewise
//   Vec   vround(a) to the nearest integer  vscale(a, n) = a * 2^n  vsqrt
//   float vsum(a)  halves added to halves: lane i + lane i + 8, then + 4, + 2, + 1    vhighest(a) likewise, by vmax
//   Mask  vgt(a, b)  vge(a, b)  veq(a, b)  vnan(a)      Vec vselect(mask, a, b): a where the mask is set
//   IVec  iset iload istore iadd isub imul ixor iand ior  ishl<n> ishr<n> (logical)  igt(a, b) signed, a Mask
//   Vec   vfrom_int(i)  vbits(i)      IVec ito_int(v)  ibits(v)      IVec ilanes() = 0 .. 15
//   Pairs bload(p)  bdup(p): one pair in all lanes  bdup_first(p): (p[0], 0)  bfirst(b): the second of each pair is 0
//   Vec   vdot(acc, a, b) = fma(a.first, b.first, fma(a.second, b.second, acc))      the definition of vdpbf16ps
//   Vec   vwiden(p) of 16 bf16     vnarrow(p, v)  vnarrow_n(p, v, n)  vnarrow2(p, a, b): 32 bf16
//   void  fetch(p) into the first cache, fetch2(p) into the second
#if defined(NANO_AVX512)
#include "simd_avx512.h"
#elif defined(NANO_AVX2)
#include "simd_avx2.h"
#elif defined(NANO_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace nano {

inline void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void fetch2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Flushes denormals to zero in this thread during its lifetime, like vdpbf16ps. Then the old mode is restored.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : mode_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(mode_ | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(mode_); }

 private:
  unsigned mode_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(mode_));
    asm volatile("msr fpcr, %0" ::"r"(mode_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(mode_)); }

 private:
  uint64_t mode_;
#else
  FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
};

// The coefficients are the minimax polynomial of 2^x on [-1/2, 1/2]; relative error below 2^-28 before rounding.
inline Vec exp2_of_part(Vec part) {
  Vec p = vset(1.535336189e-4f);
  p = vfma(p, part, vset(1.339887442e-3f));
  p = vfma(p, part, vset(9.618437358e-3f));
  p = vfma(p, part, vset(5.550332471e-2f));
  p = vfma(p, part, vset(2.402264791e-1f));
  p = vfma(p, part, vset(6.931472029e-1f));
  return vfma(p, part, vset(1.0f));
}
inline Vec vexp2(Vec x) {
  Vec whole = vround(x);
  return vscale(exp2_of_part(vsub(x, whole)), whole);
}
// Equals vexp2 if x is at most 0 and denormal numbers are flushed. It multiplies once, by 0 if 2^x is below 2^-126.
inline Vec vexp2_low(Vec x) {
#if defined(NANO_AVX512)
  return vexp2(x);  // scales by one instruction
#else
  Vec whole = vround(x);
  IVec exponent = iadd(ito_int(vmax(vset(-127.f), whole)), iset(127));
  return vmul(exp2_of_part(vsub(x, whole)), vbits(ishl<23>(exponent)));
#endif
}
constexpr float LOG2E = 1.44269504f;

// e^x with a reduction in two steps, so that a large |x| loses no digits. The error is below 1 ulp.
inline Vec vexp(Vec x) {
  Vec whole = vround(vmul(x, vset(LOG2E)));
  Vec part = vfma(whole, vset(-0.693359375f), x);
  part = vfma(whole, vset(2.12194440e-4f), part);
  Vec p = vset(1.381453999e-3f);
  p = vfma(p, part, vset(8.368745116e-3f));
  p = vfma(p, part, vset(4.166839079e-2f));
  p = vfma(p, part, vset(1.666652040e-1f));
  p = vfma(p, part, vset(4.999999343e-1f));
  p = vfma(p, part, vset(1.0f));
  p = vfma(p, part, vset(1.0f));
  return vscale(p, whole);
}

// 1 - 2 / (1 + e^2x), with an error of an ulp of 1 near 0. A minimum whose second operand is NaN is NaN.
inline Vec vtanh(Vec x) {
  Vec e = vexp(vmax(vset(-88.f), vmin(vset(88.f), vadd(x, x))));
  return vsub(vset(1.f), vdiv(vset(2.f), vadd(vset(1.f), e)));
}
inline float exp2_1(float x) { return vfirst(vexp2(vset(x))); }

// log of a positive normal number, in double and by our own series: a library's log may change with its version.
inline double log1(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  int exponent = int(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double m;
  memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) m *= 0.5, exponent++;
  double s = (m - 1) / (m + 1), t = s * s, p = 1.0 / 19;
  for (int k = 17; k >= 1; k -= 2) p = p * t + 1.0 / k;
  return 2 * s * p + exponent * 0.6931471805599453;
}

}  // namespace nano
