#include "lora.h"

#include <algorithm>
#include <vector>

namespace nano {
namespace {

constexpr int64_t TOGETHER = 4;  // sums computed together, so that none waits for another

inline Vec widened(const float* x, int n) { return vload_n(x, n); }
inline Vec widened(const bf16* x, int n) {
  if (n >= LANES) return vwiden(x);
  alignas(64) bf16 part[LANES] = {};
  std::copy(x, x + n, part);
  return vwiden(part);
}

// out[r] = scale * sum of a[r][k] * x[k]
void inner(const float* a, const float* x, int64_t in, int64_t rank, float scale, float* out) {
  for (int64_t r = 0; r < rank; r += TOGETHER) {
    const int64_t count = std::min(TOGETHER, rank - r);
    Vec sums[TOGETHER] = {vset(0.f), vset(0.f), vset(0.f), vset(0.f)};
    for (int64_t k = 0; k < in; k += LANES) {
      const int n = int(std::min<int64_t>(LANES, in - k));
      const Vec own = n == LANES ? vload(x + k) : vload_n(x + k, n);
      for (int64_t i = 0; i < count; i++) {
        const float* row = a + (r + i) * in + k;
        sums[i] = vfma(n == LANES ? vload(row) : vload_n(row, n), own, sums[i]);
      }
    }
    for (int64_t i = 0; i < count; i++) out[r + i] = vsum(sums[i]) * scale;
  }
}

// y[j] += sum of inner[r] * b[r][j], over columns [from, to)
void outer(const LoraPart& part, const float* inner, int64_t from, int64_t to, float* y) {
  for (int64_t j = from; j < to; j += TOGETHER * LANES) {
    Vec sums[TOGETHER] = {vset(0.f), vset(0.f), vset(0.f), vset(0.f)};
    const int64_t vectors = std::min(TOGETHER, (to - j + LANES - 1) / LANES);
    for (int64_t r = 0; r < part.rank; r++) {
      const float* row = part.b + r * part.columns + j;
      const Vec factor = vset(inner[r]);
      for (int64_t i = 0; i < vectors; i++) {
        const int64_t left = to - j - i * LANES;
        const Vec b = left >= LANES ? vload(row + i * LANES) : vload_n(row + i * LANES, int(left));
        sums[i] = vfma(factor, b, sums[i]);
      }
    }
    for (int64_t i = 0; i < vectors; i++) {
      const int n = int(std::min<int64_t>(LANES, to - j - i * LANES));
      float* out = y + j + i * LANES;
      vstore_n(out, vadd(vload_n(out, n), sums[i]), n);
    }
  }
}

}  // namespace

template <class T>
void lora(const T* x, int64_t in, const LoraParts& own, int64_t from, int64_t to, float* y) {
  static thread_local std::vector<float> wide, sums;
  bool is_wide = false;
  for (const LoraPart* part = own.parts; part != own.parts + own.count; part++) {
    const int64_t first = std::max<int64_t>(from - part->first, 0);
    const int64_t last = std::min(to - part->first, part->columns);
    if (first >= last) continue;
    if (!is_wide) {
      wide.resize(size_t(in));
      for (int64_t k = 0; k < in; k += LANES) {
        const int n = int(std::min<int64_t>(LANES, in - k));
        vstore_n(wide.data() + k, widened(x + k, n), n);
      }
      is_wide = true;
    }
    sums.resize(size_t(part->rank));
    inner(part->a, wide.data(), in, part->rank, part->scale, sums.data());
    outer(*part, sums.data(), first, last, y + part->first);
  }
}

template void lora<bf16>(const bf16*, int64_t, const LoraParts&, int64_t, int64_t, float*);
template void lora<float>(const float*, int64_t, const LoraParts&, int64_t, int64_t, float*);

}  // namespace nano
