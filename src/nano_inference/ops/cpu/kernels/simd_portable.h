// Vec, IVec, Pairs in portable C++. simd.h lists the functions. Clear, but slow if fmaf is a function call.
#pragma once
#include <algorithm>

namespace nano {

struct Vec {
  float at[LANES];
};
struct IVec {
  uint32_t at[LANES];
};
using Pairs = IVec;

template <class Out, class F>
inline Out each(F f) {
  Out out;
  for (int i = 0; i < LANES; i++) out.at[i] = f(i);
  return out;
}
template <class F>
inline Mask mask_of(F f) {
  Mask out = 0;
  for (int i = 0; i < LANES; i++) out |= Mask(f(i)) << i;
  return out;
}
inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline Vec vset(float x) { return each<Vec>([=](int) { return x; }); }
inline Vec vload_n(const float* p, int n) { return each<Vec>([=](int i) { return i < n ? p[i] : 0.f; }); }
inline Vec vload(const float* p) { return each<Vec>([=](int i) { return p[i]; }); }
inline void vstore_n(float* p, Vec v, int n) {
  for (int i = 0; i < n && i < LANES; i++) p[i] = v.at[i];
}
inline void vstore(float* p, Vec v) { vstore_n(p, v, LANES); }
inline float vfirst(Vec v) { return v.at[0]; }
inline Vec vadd(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] + b.at[i]; }); }
inline Vec vsub(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] - b.at[i]; }); }
inline Vec vmul(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] * b.at[i]; }); }
inline Vec vdiv(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] / b.at[i]; }); }
inline Vec vfma(Vec a, Vec b, Vec c) { return each<Vec>([&](int i) { return __builtin_fmaf(a.at[i], b.at[i], c.at[i]); }); }
inline Vec vmax(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
inline Vec vmin(Vec a, Vec b) { return each<Vec>([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; }); }
inline Vec vsqrt(Vec a) { return each<Vec>([&](int i) { return std::sqrt(a.at[i]); }); }
inline Vec vround(Vec a) { return each<Vec>([&](int i) { return std::nearbyint(a.at[i]); }); }

inline float vsum(Vec a) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) a.at[i] += a.at[i + half];
  return a.at[0];
}
inline float vhighest(Vec a) {
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) a.at[i] = a.at[i] > a.at[i + half] ? a.at[i] : a.at[i + half];
  return a.at[0];
}

inline Mask vgt(Vec a, Vec b) { return mask_of([&](int i) { return a.at[i] > b.at[i]; }); }
inline Mask vge(Vec a, Vec b) { return mask_of([&](int i) { return a.at[i] >= b.at[i]; }); }
inline Mask veq(Vec a, Vec b) { return mask_of([&](int i) { return a.at[i] == b.at[i]; }); }
inline Mask vnan(Vec a) { return mask_of([&](int i) { return a.at[i] != a.at[i]; }); }
inline Vec vselect(Mask m, Vec a, Vec b) { return each<Vec>([&](int i) { return m >> i & 1 ? a.at[i] : b.at[i]; }); }

inline IVec iset(uint32_t x) { return each<IVec>([=](int) { return x; }); }
inline IVec iload(const void* p) {
  IVec v;
  memcpy(v.at, p, sizeof v.at);
  return v;
}
inline void istore(void* p, IVec v) { memcpy(p, v.at, sizeof v.at); }
inline IVec ilanes() { return each<IVec>([](int i) { return uint32_t(i); }); }
inline IVec iadd(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] + b.at[i]; }); }
inline IVec isub(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] - b.at[i]; }); }
inline IVec imul(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] * b.at[i]; }); }
inline IVec ixor(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] ^ b.at[i]; }); }
inline IVec iand(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] & b.at[i]; }); }
inline IVec ior(IVec a, IVec b) { return each<IVec>([&](int i) { return a.at[i] | b.at[i]; }); }
template <int n>
inline IVec ishl(IVec a) { return each<IVec>([&](int i) { return a.at[i] << n; }); }
template <int n>
inline IVec ishr(IVec a) { return each<IVec>([&](int i) { return a.at[i] >> n; }); }
inline Mask igt(IVec a, IVec b) { return mask_of([&](int i) { return int32_t(a.at[i]) > int32_t(b.at[i]); }); }
inline Vec vfrom_int(IVec a) { return each<Vec>([&](int i) { return float(int32_t(a.at[i])); }); }
inline IVec ito_int(Vec a) {  // if the value does not fit, the result is that of a machine instruction
  return each<IVec>([&](int i) {
    return std::fabs(a.at[i]) < 2147483648.f ? uint32_t(int32_t(std::nearbyint(a.at[i]))) : 0x80000000u;
  });
}
inline Vec vbits(IVec a) { return each<Vec>([&](int i) { return float_of(a.at[i]); }); }
inline IVec ibits(Vec a) { return each<IVec>([&](int i) { return bits_of(a.at[i]); }); }

// Scale in two halves, so that each factor is a normal number whenever the product is one.
inline Vec vscale(Vec a, Vec n) {
  return each<Vec>([&](int i) {
    float within = n.at[i] > -250.f ? (n.at[i] < 250.f ? n.at[i] : 250.f) : -250.f;
    int32_t whole = int32_t(within), half = whole >> 1;
    float scaled = a.at[i] * float_of(uint32_t(half + 127) << 23);
    return scaled * float_of(uint32_t(whole - half + 127) << 23);
  });
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
inline Vec vwiden(const bf16* p) { return each<Vec>([=](int i) { return widen1(p[i]); }); }
inline void vnarrow_n(bf16* p, Vec v, int n) {
  for (int i = 0; i < n && i < LANES; i++) p[i] = narrow1(v.at[i]);
}
inline void vnarrow(bf16* p, Vec v) { vnarrow_n(p, v, LANES); }
inline void vnarrow2(bf16* p, Vec a, Vec b) { vnarrow(p, a), vnarrow(p + 16, b); }

}  // namespace nano
