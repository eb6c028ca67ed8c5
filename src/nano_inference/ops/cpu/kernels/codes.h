// Integers: sixteen sums of products of codes. The sums are exact, so each machine uses its own instructions for the
// same numbers.
//
//   Sums   sadd(a, b)   sdot8(sums, w, b, x): lane i += the sum over j < 4 of w[4 i + j] * x[j], codes of 8 bits, where b
//          is lbytes(w); the sums must start at sstart(total of all codes x)
//   Line   lload(p): 64 codes   lstore(p, w)   lbytes(w): unsigned bytes   llow(w), lhigh(w): the halves of their bytes, 0 to 15
//          lor(a, b)   lbits<shift, mask>(w): bits of each byte, moved left by shift (right if negative), under a mask
//   Quad   qdup(x): four input codes, -127 to 127, in all lanes
//   Table  tload(p): 16 numbers   Line tlook(table, w): the numbers of 64 codes of 4 bits
//   Halves hzero()   hdot4(halves, w, x): like sdot8 with w of 0 to 63, at most MOST_QUADS<bits of w> times
//   Line   at_once(w): w, computed here
//   Counts  nload(p): 16 int8
//   Sums   add_times(sums, halves, n): sums + halves * n, where n is Counts, or One()
//   Sums   stimes(sums, p): lane i * p[i], 16 int8
//   Couples  pload(p, q): 16 int8 of each   pdot2(sums, couples, t): lane i += p[i] * t[0] + q[i] * t[1], of 16 bits
//   Sums   sminus(a, b): a - b   sshift<bits>(a)
//   Vec    vof(sums)   vof_half(p): 16 float16   vof_exponents(p): 16 exponents of floats
#pragma once
#include "simd.h"

namespace nano {

inline float of_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
  if (exponent == 0) {  // fraction * 2^-24
    const float value = float(fraction) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even.
inline uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above: infinity
  if (size < 0x33000001) return uint16_t(sign);            // at most 2^-25: zero
  if (size < 0x38800000) {                                 // denormal: a multiple of 2^-24
    const uint32_t shift = 126 - (size >> 23), fraction = (size & 0x7fffff) | 0x800000;
    const uint32_t whole = fraction >> shift, rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    return uint16_t(sign | (whole + (rest > half || (rest == half && (whole & 1)))));
  }
  return uint16_t(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

inline Vec vof_exponents(const uint8_t* p) {
  bf16 halves[LANES];
  for (int i = 0; i < LANES; i++) halves[i] = bf16(p[i] << 7);
  return vwiden(halves);
}

struct One {};

#if defined(NANO_AVX512) && defined(NANO_VNNI)

using Sums = __m512i;
using Line = __m512i;
using Halves = __m512i;  // sums of 32 bits directly
using Quad = __m512i;

// The instruction needs one unsigned factor, so 128 is added to the weight's codes; sstart subtracts the excess.
inline Sums sstart(int32_t total) { return _mm512_set1_epi32(-128 * total); }
inline Sums sadd(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Halves hzero() { return _mm512_setzero_si512(); }
inline Line lload(const void* p) { return _mm512_loadu_si512(p); }
inline void lstore(void* p, Line w) { _mm512_storeu_si512(p, w); }
inline Line lbytes(Line w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Line llow(Line w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline Line lhigh(Line w) { return llow(_mm512_srli_epi16(w, 4)); }
inline Line lor(Line a, Line b) { return _mm512_or_si512(a, b); }
using Table = __m512i;
inline Table tload(const int8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Line tlook(Table table, Line w) { return _mm512_shuffle_epi8(table, w); }
template <int shift, int mask>
inline Line lbits(Line w) {
  if constexpr (shift > 0) w = _mm512_slli_epi16(w, shift);
  if constexpr (shift < 0) w = _mm512_srli_epi16(w, -shift);
  return _mm512_and_si512(w, _mm512_set1_epi8(mask));
}
inline Quad qdup(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
inline Sums sdot8(Sums sums, Line, Line bytes, Quad x) { return _mm512_dpbusd_epi32(sums, bytes, x); }
inline Halves hdot4(Halves sums, Line w, Quad x) { return _mm512_dpbusd_epi32(sums, w, x); }
template <int bits>
constexpr int MOST_QUADS = 8;
inline Line at_once(Line w) { return w; }
inline Vec vof(Sums sums) { return _mm512_cvtepi32_ps(sums); }
using Counts = __m512i;
inline Counts nload(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Sums stimes(Sums sums, const int8_t* p) { return _mm512_mullo_epi32(sums, nload(p)); }
inline Sums add_times(Sums sums, Halves halves, Counts n) { return sadd(sums, _mm512_mullo_epi32(halves, n)); }
inline Sums add_times(Sums sums, Halves halves, One) { return sadd(sums, halves); }
using Couples = __m512i;
inline Couples pload(const int8_t* p, const int8_t* q) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}
inline Sums pdot2(Sums sums, Couples pairs, const int16_t* t) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, qdup(reinterpret_cast<const int8_t*>(t))));
}
inline Sums sminus(Sums a, Sums b) { return _mm512_sub_epi32(a, b); }
template <int bits>
inline Sums sshift(Sums a) { return _mm512_slli_epi32(a, bits); }
inline Vec vof_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

#elif defined(NANO_AVX2) || defined(NANO_AVX512)

struct Sums {
  __m256i lo, hi;
};
using Line = Sums;
using Halves = Sums;  // 32 sums of 16 bits
using Quad = __m256i;

inline Sums sstart(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Sums sadd(Sums a, Sums b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Halves hzero() { return sstart(0); }
inline Line lload(const void* p) {
  auto q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void lstore(void* p, Line w) {
  auto q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, w.lo), _mm256_storeu_si256(q + 1, w.hi);
}
inline Line lbytes(Line w) { return {_mm256_abs_epi8(w.lo), _mm256_abs_epi8(w.hi)}; }
inline Line llow(Line w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
inline Line lhigh(Line w) { return llow({_mm256_srli_epi16(w.lo, 4), _mm256_srli_epi16(w.hi, 4)}); }
inline Line lor(Line a, Line b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
using Table = __m256i;
inline Table tload(const int8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Line tlook(Table table, Line w) { return {_mm256_shuffle_epi8(table, w.lo), _mm256_shuffle_epi8(table, w.hi)}; }
template <int shift, int mask>
inline Line lbits(Line w) {
  if constexpr (shift > 0) w = {_mm256_slli_epi16(w.lo, shift), _mm256_slli_epi16(w.hi, shift)};
  if constexpr (shift < 0) w = {_mm256_srli_epi16(w.lo, -shift), _mm256_srli_epi16(w.hi, -shift)};
  const __m256i bytes = _mm256_set1_epi8(mask);
  return {_mm256_and_si256(w.lo, bytes), _mm256_and_si256(w.hi, bytes)};
}
inline Quad qdup(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
// Compute this value here: GCC puts additions off, stores the products of all rows until then, and loads lines again.
inline Sums at_once(Sums sums) {
  asm("" : "+x"(sums.lo), "+x"(sums.hi));
  return sums;
}
inline __m256i widened(__m256i halves) { return _mm256_madd_epi16(halves, _mm256_set1_epi16(1)); }

// Multiply unsigned by signed bytes, and add in fours. Both products of a pair fit into 16 bits: 2 * 128 * 127.
inline __m256i fours(__m256i sums, __m256i bytes, __m256i x) {
#if defined(NANO_VNNI)
  return _mm256_dpbusd_epi32(sums, bytes, x);
#else
  return _mm256_add_epi32(sums, widened(_mm256_maddubs_epi16(bytes, x)));
#endif
}
inline Sums sdot8(Sums sums, Line w, Line bytes, Quad x) {
  return at_once({fours(sums.lo, bytes.lo, _mm256_sign_epi8(x, w.lo)), fours(sums.hi, bytes.hi, _mm256_sign_epi8(x, w.hi))});
}
#if defined(NANO_VNNI)  // sums of 32 bits directly
template <int bits>
constexpr int MOST_QUADS = 8;
inline Halves hdot4(Halves sums, Line w, Quad x) { return {fours(sums.lo, w.lo, x), fours(sums.hi, w.hi, x)}; }
using Counts = Sums;
inline Counts nload(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Sums add_times(Sums sums, Halves halves, Counts n) {
  return sadd(sums, {_mm256_mullo_epi32(halves.lo, n.lo), _mm256_mullo_epi32(halves.hi, n.hi)});
}
inline Sums add_times(Sums sums, Halves halves, One) { return sadd(sums, halves); }
#else
template <int bits>
constexpr int MOST_QUADS = bits == 4 ? 8 : bits == 5 ? 4 : 2;  // 8 * 2 * 15 * 127, 4 * 2 * 31 * 127 and 2 * 2 * 63 * 127 fit into 16 bits
inline Halves hdot4(Halves sums, Line w, Quad x) {
  return at_once({_mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(w.lo, x)), _mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(w.hi, x))});
}
using Counts = Sums;  // each number twice, in 16 bits
inline Counts nload(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes, bytes)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(bytes, bytes))};
}
inline Sums add_times(Sums sums, Halves halves, Counts n) {
  return sadd(sums, {_mm256_madd_epi16(halves.lo, n.lo), _mm256_madd_epi16(halves.hi, n.hi)});
}
inline Sums add_times(Sums sums, Halves halves, One) { return sadd(sums, {widened(halves.lo), widened(halves.hi)}); }
#endif

inline Sums stimes(Sums sums, const int8_t* p) {
  const __m128i n = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_mullo_epi32(sums.lo, _mm256_cvtepi8_epi32(n)), _mm256_mullo_epi32(sums.hi, _mm256_cvtepi8_epi32(_mm_srli_si128(n, 8)))};
}
using Couples = Sums;
inline Couples pload(const int8_t* p, const int8_t* q) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}
inline Sums pdot2(Sums sums, Couples pairs, const int16_t* t) {
  const Quad both = qdup(reinterpret_cast<const int8_t*>(t));
  return sadd(sums, {_mm256_madd_epi16(pairs.lo, both), _mm256_madd_epi16(pairs.hi, both)});
}
inline Sums sminus(Sums a, Sums b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
template <int bits>
inline Sums sshift(Sums a) { return {_mm256_slli_epi32(a.lo, bits), _mm256_slli_epi32(a.hi, bits)}; }

#if defined(NANO_AVX512)
inline Vec vof(Sums sums) {
  return _mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(sums.lo), sums.hi, 1));
}
inline Vec vof_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#else
inline Vec vof(Sums sums) { return {_mm256_cvtepi32_ps(sums.lo), _mm256_cvtepi32_ps(sums.hi)}; }
inline Vec vof_half(const uint16_t* p) {
  auto q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
#endif

#elif defined(NANO_DOT)

// Dot products of NEON (FEAT_DotProd), four registers each. Not SMMLA: it reads eight codes of a column from one register,
// and a line has four codes of each of sixteen columns.
struct Sums {
  int32x4_t q0, q1, q2, q3;
};
struct Line {
  int8x16_t q0, q1, q2, q3;
};
using Halves = Sums;  // sums of 32 bits directly
using Quad = int8x16_t;
using Table = int8x16_t;
using Counts = Sums;
struct Couples {
  int16x8_t first_low, first_high, second_low, second_high;
};

inline int8x16_t shifted_right(int8x16_t x, int n) { return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(x), vdupq_n_s8(int8_t(-n)))); }

inline Sums sstart(int32_t) { return {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline Sums sadd(Sums a, Sums b) {
  return each<Sums>([](int32x4_t x, int32x4_t y) { return vaddq_s32(x, y); }, a, b);
}
inline Halves hzero() { return sstart(0); }
inline Line lload(const void* p) {
  auto q = static_cast<const int8_t*>(p);
  return {vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48)};
}
inline void lstore(void* p, Line w) {
  auto q = static_cast<int8_t*>(p);
  vst1q_s8(q, w.q0), vst1q_s8(q + 16, w.q1), vst1q_s8(q + 32, w.q2), vst1q_s8(q + 48, w.q3);
}
inline Line lbytes(Line w) { return w; }
inline Line llow(Line w) {
  return each<Line>([](int8x16_t x) { return vandq_s8(x, vdupq_n_s8(15)); }, w);
}
inline Line lhigh(Line w) {
  return each<Line>([](int8x16_t x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }, w);
}
inline Line lor(Line a, Line b) {
  return each<Line>([](int8x16_t x, int8x16_t y) { return vorrq_s8(x, y); }, a, b);
}
inline Table tload(const int8_t* p) { return vld1q_s8(p); }
inline Line tlook(Table table, Line w) {
  return each<Line>([table](int8x16_t x) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(x)); }, w);
}
template <int shift, int mask>
inline Line lbits(Line w) {
  return each<Line>(
      [](int8x16_t x) {
        if constexpr (shift > 0) x = vshlq_n_s8(x, shift);
        if constexpr (shift < 0) x = shifted_right(x, -shift);
        return vandq_s8(x, vdupq_n_s8(int8_t(mask)));
      },
      w);
}
inline Quad qdup(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}
inline Halves hdot4(Halves sums, Line w, Quad x) {
  return {vdotq_s32(sums.q0, w.q0, x), vdotq_s32(sums.q1, w.q1, x), vdotq_s32(sums.q2, w.q2, x), vdotq_s32(sums.q3, w.q3, x)};
}
inline Sums sdot8(Sums sums, Line w, Line, Quad x) { return hdot4(sums, w, x); }
template <int bits>
constexpr int MOST_QUADS = 8;
inline Line at_once(Line w) { return w; }
inline Counts nload(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
inline Sums stimes(Sums sums, const int8_t* p) {
  return each<Sums>([](int32x4_t x, int32x4_t y) { return vmulq_s32(x, y); }, sums, nload(p));
}
inline Sums add_times(Sums sums, Halves halves, Counts n) {
  return each<Sums>([](int32x4_t sum, int32x4_t x, int32x4_t y) { return vmlaq_s32(sum, x, y); }, sums, halves, n);
}
inline Sums add_times(Sums sums, Halves halves, One) { return sadd(sums, halves); }
inline Couples pload(const int8_t* p, const int8_t* q) {
  const int8x16_t a = vld1q_s8(p), b = vld1q_s8(q);
  return {vmovl_s8(vget_low_s8(a)), vmovl_high_s8(a), vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b)};
}
inline Sums pdot2(Sums sums, const Couples& pairs, const int16_t* t) {
  const int16x8_t one = vdupq_n_s16(t[0]), two = vdupq_n_s16(t[1]);
  auto low = [&](int32x4_t sum, int16x8_t a, int16x8_t b) {
    return vmlal_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(one)), vget_low_s16(b), vget_low_s16(two));
  };
  auto high = [&](int32x4_t sum, int16x8_t a, int16x8_t b) { return vmlal_high_s16(vmlal_high_s16(sum, a, one), b, two); };
  return {low(sums.q0, pairs.first_low, pairs.second_low), high(sums.q1, pairs.first_low, pairs.second_low),
          low(sums.q2, pairs.first_high, pairs.second_high), high(sums.q3, pairs.first_high, pairs.second_high)};
}
inline Sums sminus(Sums a, Sums b) {
  return each<Sums>([](int32x4_t x, int32x4_t y) { return vsubq_s32(x, y); }, a, b);
}
template <int bits>
inline Sums sshift(Sums a) { return each<Sums>([](int32x4_t x) { return vshlq_n_s32(x, bits); }, a); }
inline Vec vof(Sums sums) { return each<Vec>([](int32x4_t x) { return vcvtq_f32_s32(x); }, sums); }
inline Vec vof_half(const uint16_t* p) {
  auto quarter = [](const uint16_t* q) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(q))); };
  return {quarter(p), quarter(p + 4), quarter(p + 8), quarter(p + 12)};
}

#else

struct Sums {
  int32_t at[LANES];
};
struct Line {
  int8_t at[4 * LANES];
};
using Halves = Sums;
struct Quad {
  int8_t at[4];
};

inline Sums sstart(int32_t) { return {}; }
inline Sums sadd(Sums a, const Sums& b) {
  for (int i = 0; i < LANES; i++) a.at[i] += b.at[i];
  return a;
}
inline Halves hzero() { return {}; }
inline Line lload(const void* p) {
  Line out;
  memcpy(out.at, p, sizeof(out.at));
  return out;
}
inline void lstore(void* p, const Line& w) { memcpy(p, w.at, sizeof(w.at)); }
inline Line lbytes(Line w) { return w; }
inline Line llow(Line w) {
  for (auto& each : w.at) each &= 15;
  return w;
}
inline Line lhigh(Line w) {
  for (auto& each : w.at) each = int8_t(uint8_t(each) >> 4);
  return w;
}
inline Line lor(Line a, const Line& b) {
  for (int i = 0; i < 4 * LANES; i++) a.at[i] |= b.at[i];
  return a;
}
struct Table {
  int8_t at[16];
};
inline Table tload(const int8_t* p) {
  Table out;
  memcpy(out.at, p, sizeof(out.at));
  return out;
}
inline Line tlook(const Table& table, Line w) {
  for (auto& each : w.at) each = table.at[each & 15];
  return w;
}
template <int shift, int mask>
inline Line lbits(Line w) {
  for (auto& each : w.at) each = int8_t((shift > 0 ? uint8_t(each) << (shift > 0 ? shift : 0) : uint8_t(each) >> (shift < 0 ? -shift : 0)) & mask);
  return w;
}
inline Quad qdup(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
inline Halves hdot4(Halves sums, Line w, Quad x) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < 4; j++) sums.at[i] += w.at[4 * i + j] * x.at[j];
  return sums;
}
inline Sums sdot8(Sums sums, Line w, Line, Quad x) { return hdot4(sums, w, x); }
template <int bits>
constexpr int MOST_QUADS = 8;
inline Line at_once(Line w) { return w; }
using Counts = Sums;
inline Counts nload(const int8_t* p) {
  Counts out;
  for (int i = 0; i < LANES; i++) out.at[i] = p[i];
  return out;
}
inline Sums stimes(Sums sums, const int8_t* p) {
  for (int i = 0; i < LANES; i++) sums.at[i] *= p[i];
  return sums;
}
inline Sums add_times(Sums sums, const Halves& halves, const Counts& n) {
  for (int i = 0; i < LANES; i++) sums.at[i] += halves.at[i] * n.at[i];
  return sums;
}
inline Sums add_times(Sums sums, const Halves& halves, One) { return sadd(sums, halves); }
struct Couples {
  Sums first, second;
};
inline Couples pload(const int8_t* p, const int8_t* q) { return {nload(p), nload(q)}; }
inline Sums pdot2(Sums sums, const Couples& pairs, const int16_t* t) {
  for (int i = 0; i < LANES; i++) sums.at[i] += pairs.first.at[i] * t[0] + pairs.second.at[i] * t[1];
  return sums;
}
inline Sums sminus(Sums a, const Sums& b) {
  for (int i = 0; i < LANES; i++) a.at[i] -= b.at[i];
  return a;
}
template <int bits>
inline Sums sshift(Sums a) {
  for (int& sum : a.at) sum *= 1 << bits;
  return a;
}
inline Vec vof(Sums sums) {
  float out[LANES];
  for (int i = 0; i < LANES; i++) out[i] = float(sums.at[i]);
  return vload(out);
}
inline Vec vof_half(const uint16_t* p) {
  float out[LANES];
  for (int i = 0; i < LANES; i++) out[i] = of_half(p[i]);
  return vload(out);
}

#endif

}  // namespace nano
