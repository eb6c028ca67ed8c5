// AdamW, number by number, and the sum of squares for clipping.
#include <algorithm>
#include <cmath>

#include "gradients.h"
#include "pool.h"
#include "row_parts.h"

namespace nano {
namespace {

constexpr int64_t BLOCK = 4096;  // numbers of a sum in lanes; blocks are added in double, in order

inline Vec load_as(const float* p, int n) { return vload_n(p, n); }
inline Vec load_as(const bf16* p, int n) {
  if (n >= LANES) return vwiden(p);
  bf16 some[LANES] = {};
  memcpy(some, p, 2 * size_t(n));
  return vwiden(some);
}

template <class T>
void step(const AdamStep& p, int64_t from, int64_t to) {
  auto at = [](void* memory, int64_t i) { return static_cast<T*>(memory) + i; };
  for (int64_t i = from; i < to; i += LANES) {
    const int n = left(to, i);
    const Vec gradient = vmul(load_as(static_cast<const T*>(p.gradient) + i, n), vset(p.factor));
    Vec mean = load_as(at(p.mean, i), n);
    mean = vfma(vsub(gradient, mean), vset(p.mean_share), mean);
    const Vec square = vfma(vmul(gradient, vset(p.square_share)), gradient, vmul(load_as(at(p.square, i), n), vset(p.square_decay)));
    Vec largest = square;
    if (p.largest) {
      largest = vmax(square, load_as(at(p.largest, i), n));
      store_as(at(p.largest, i), largest, n);
    }
    const Vec root = vadd(vdiv(vsqrt(largest), vset(p.root_divisor)), vset(p.eps));
    const Vec param = vmul(load_as(at(p.param, i), n), vset(p.decay));
    store_as(at(p.param, i), vfma(vdiv(mean, root), vset(-p.step_size), param), n);
    store_as(at(p.mean, i), mean, n), store_as(at(p.square, i), square, n);
  }
}

template <class T>
double sum_of_squares(const T* x, int64_t count) {
  Vec sum = vset(0.f);
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec v = load_as(x + i, left(count, i));
    sum = vfma(v, v, sum);
  }
  return double(vsum(sum));
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

void nano_adamw(const AdamStep* p) {
  auto work = [&](Team& team) {
    const int64_t vectors = (p->count + LANES - 1) / LANES;
    const int64_t from = team.begin(vectors) * LANES, to = std::min(p->count, team.end(vectors) * LANES);
    p->is_bf16 ? step<bf16>(*p, from, to) : step<float>(*p, from, to);
  };
  run_team(int(p->num_threads), work);
}

// `blocks`: memory for ceil(count / 4096) numbers.
double nano_sum_of_squares(const void* x, int64_t count, int64_t is_bf16, double* blocks, int64_t num_threads) {
  const int64_t number = (count + BLOCK - 1) / BLOCK;
  auto work = [&](Team& team) {
    for (int64_t b = team.begin(number); b < team.end(number); b++) {
      const int64_t size = std::min(BLOCK, count - b * BLOCK);
      blocks[b] = is_bf16 ? sum_of_squares(static_cast<const bf16*>(x) + b * BLOCK, size)
                          : sum_of_squares(static_cast<const float*>(x) + b * BLOCK, size);
    }
  };
  run_team(int(num_threads), work);
  double total = 0;
  for (int64_t b = 0; b < number; b++) total += blocks[b];
  return total;
}
}
