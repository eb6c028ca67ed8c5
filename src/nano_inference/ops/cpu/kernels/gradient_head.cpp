// Gradients of logprobs with respect to logits.
#include <algorithm>

#include "gradients.h"
#include "pool.h"
#include "row_parts.h"

namespace nano {
namespace {

constexpr int64_t TERMS = 512;  // of a sum in lanes; these sums are added in double
constexpr float UNSEEN = -1e30f;

Mask drawable(const LogitGradient& p, const int32_t* words, int64_t j) {
  const Mask inside = first_lanes(int(std::min<int64_t>(LANES, p.vocab - j)));
  if (!words) return inside;
  const int64_t word = j / 32;
  return word < p.mask_width ? inside & (uint32_t(words[word]) >> (j % 32)) : 0u;
}

// The scaled and capped logit over the temperature, and the slope of the cap.
inline Vec level(const LogitGradient& p, Vec z, Vec* slope) {
  z = vdiv(z, vset(p.divisor));
  if (p.cap) {
    const Vec part = vtanh(vdiv(z, vset(p.cap)));
    z = vmul(vset(p.cap), part);
    if (slope) *slope = vsub(vset(1.f), vmul(part, part));
  }
  return vdiv(z, vset(p.temperature));
}

void differentiate(const LogitGradient& p, int64_t row) {
  float* z = p.logits + row * p.vocab;
  const int32_t* words = p.mask_rows[row] < 0 ? nullptr : p.mask_words + p.mask_rows[row] * p.mask_width;
  Vec highest = vset(UNSEEN);
  for (int64_t j = 0; j < p.vocab; j += LANES)
    highest = vmax(vselect(drawable(p, words, j), level(p, vload_n(z + j, left(p.vocab, j)), nullptr), vset(UNSEEN)), highest);
  const Vec most = vset(vhighest(highest));
  auto odds = [&](int64_t j, Vec* slope) {
    const Vec x = vsub(level(p, vload_n(z + j, left(p.vocab, j)), slope), most);
    return vselect(drawable(p, words, j), vexp(vmax(vset(-100.f), x)), vset(0.f));
  };
  double total = 0, gradient = 0;
  for (int64_t from = 0; from < p.vocab; from += TERMS) {
    Vec sum = vset(0.f);
    for (int64_t j = from; j < std::min(p.vocab, from + TERMS); j += LANES) sum = vadd(sum, odds(j, nullptr));
    total += double(vsum(sum));
  }
  const int64_t first = p.first_targets[row], last = p.first_targets[row + 1];
  for (int64_t t = first; t < last; t++) gradient += double(p.gradients[t]);
  const float divisor = p.divisor * p.temperature;
  const Vec share = vset(float(-gradient / total / double(divisor)));
  int64_t target = first;
  for (int64_t j = 0; j < p.vocab; j += LANES) {
    Vec slope = vset(1.f);
    Vec d = vmul(odds(j, &slope), share);
    if (target < last && p.targets[target] < j + LANES) {  // targets rise
      alignas(64) float some[LANES];
      vstore(some, d);
      for (; target < last && p.targets[target] < j + LANES; target++) some[p.targets[target] - j] += p.gradients[target] / divisor;
      d = vload(some);
    }
    vstore_n(z + j, p.cap ? vmul(d, slope) : d, left(p.vocab, j));
  }
}

}  // namespace
}  // namespace nano

extern "C" void nano_logit_gradient(const nano::LogitGradient* p) {
  auto work = [&](nano::Team& team) {
    for (int64_t i = team.begin(p->num_rows); i < team.end(p->num_rows); i++) nano::differentiate(*p, i);
  };
  nano::run_team(int(p->num_threads), work);
}
