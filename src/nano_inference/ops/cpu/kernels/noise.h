// The exponential race with the noise of sampling/noise.py: a pure function of a sample's key and the token id.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace nano::head {

template <int n>
inline IVec xorshift(IVec x) { return ixor(x, ishr<n>(x)); }

// The 32-bit mixer after its first step, xorshift<16>.
inline IVec mix_rest(IVec x) {
  x = xorshift<15>(imul(x, iset(0x21F0AAAD)));
  return xorshift<15>(imul(x, iset(0xD35A2D97)));
}

// The part of the hash that all samples share: the mixed ids, and the first step of the next mixing.
inline IVec stir(IVec ids) { return xorshift<16>(mix_rest(xorshift<16>(ids))); }

// exp((z - base) / T) with scale = log2(e) / T. Subtracting first loses no digits near the base. NaN stays NaN.
inline Vec odds_of(Vec logits, Vec base, Vec scale) {
  return vexp2(vmax(vset(-160.f), vmul(vsub(logits, base), scale)));
}

struct NoiseKey {
  NoiseKey() = default;
  NoiseKey(uint32_t first, uint32_t second) : first(first ^ first >> 16), second(second) {}
  uint32_t first = 0, second = 0;  // `first` already includes the step that `stir` ends with
};

// 31 bits for each of 16 stirred ids.
inline IVec noise_bits(IVec stirred, NoiseKey key) {
  IVec x = ixor(mix_rest(ixor(stirred, iset(key.first))), iset(key.second));
  return iand(mix_rest(xorshift<16>(x)), iset(0x7fffffff));
}

// Log of the exponential noise of these bits. -log(1 - v) is 2 atanh(v / (2 - v)), which loses no digits for small v.
inline double log_noise(uint32_t bits) {
  float v = (float(bits < 0x7fffff80u ? bits : 0x7fffff80u) + 0.5f) * 0x1p-31f;
  if (v > 0.25f) return log1(-log1(1.0 - double(v)));
  double s = double(v) / (2 - double(v)), t = s * s, p = 1.0 / 15;
  for (int k = 13; k >= 1; k -= 2) p = p * t + 1.0 / k;
  return log1(2 * s * p);
}

// The leading token. Tokens are compared by logit / temperature - log(noise), stored exactly as the sum high + low,
// then by the lower id. The winner depends neither on the order of tokens nor on the thread that compares them.
struct Best {
  double high = -std::numeric_limits<double>::infinity(), low = 0;
  float logit = 0, raw = 0;
  int64_t id = -1;

  void offer(const Best& other) {
    if (other.id < 0) return;
    bool more = other.high > high || (other.high == high && other.low > low);
    bool same = other.high == high && other.low == low;
    if (id < 0 || more || (same && other.id < id)) *this = other;
  }
};

// Tokens of a race: exp((logit - base) * inv_t), 0 after the last one, in whole vectors.
struct Runners {
  const float *odds, *logits, *raw;  // raw: before bias and penalties
  const uint32_t* stirred;
  const int32_t* ids;  // null: ids count from `first`
  int64_t first;
  int count;
  float base, inv_t;
};

// Return a factor such that a token can only win if its noise bits are below odds * factor. This holds because noise is
// at least (bits + 1/2) / 2^31, and the odds are accurate to 2e-5. A bound that is too generous only costs time, because
// `offer` decides.
inline float reach_of(const Best& best, const Runners& r) {
  if (best.id < 0) return std::numeric_limits<float>::infinity();
  double x = double(r.base) * r.inv_t - best.high;
  return vfirst(vexp(vset(float(x > -80 ? x < 100 ? x : 100 : -80)))) * 2147700000.f;
}

inline void run_exactly(const Runners& r, int j, uint32_t bits, Best& best) {
  double scaled = double(r.logits[j]) * r.inv_t, log_of_noise = log_noise(bits);  // the product is exact
  Best other;
  other.high = scaled - log_of_noise;
  double back = other.high - scaled;
  other.low = (scaled - (other.high - back)) - (log_of_noise + back);
  other.logit = r.logits[j], other.raw = r.raw[j], other.id = r.ids ? r.ids[j] : r.first + j;
  best.offer(other);
}

inline float run_hopeful(const Runners& r, int j, Mask hopeful, IVec bits, float reach, Best& best) {
  uint32_t all[LANES];
  istore(all, bits);
  for (; hopeful; hopeful &= hopeful - 1) {
    int lane = __builtin_ctz(hopeful);
    if (!(r.odds[j + lane] * reach > float(all[lane]))) continue;
    run_exactly(r, j + lane, all[lane], best);
    reach = reach_of(best, r);
  }
  return reach;
}

inline void race(const Runners& r, NoiseKey key, Best& best) {
  float reach = reach_of(best, r);
  if (reach <= 0.5f) return;  // even the best odds lose with the smallest noise
  auto hopeful = [&](int j, IVec bits) { return vgt(vmul(vload(r.odds + j), vset(reach)), vfrom_int(bits)); };
  int j = 0;
  for (; j + LANES < r.count; j += 2 * LANES) {
    IVec bits = noise_bits(iload(r.stirred + j), key), more = noise_bits(iload(r.stirred + j + LANES), key);
    Mask here = hopeful(j, bits), there = hopeful(j + LANES, more);
    if (!(here | there)) continue;
    reach = run_hopeful(r, j, here, bits, reach, best);
    reach = run_hopeful(r, j + LANES, there, more, reach, best);
  }
  if (j < r.count) {
    IVec bits = noise_bits(iload(r.stirred + j), key);
    run_hopeful(r, j, hopeful(j, bits), bits, reach, best);
  }
}

}  // namespace nano::head
