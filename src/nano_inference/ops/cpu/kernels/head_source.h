// Logits of some rows, block by block of the vocabulary, and statistics of a block.
#pragma once
#include <algorithm>
#include <limits>

#include "head.h"
#include "linear.h"
#include "noise.h"

namespace nano::head {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

class Source {
 public:
  explicit Source(const HeadInput& input) : in_(input) {}

  static int num_columns(const HeadInput& in, int64_t block) {
    return int(std::min<int64_t>(in.vocab - block * VOCAB_BLOCK, VOCAB_BLOCK));
  }

  // out: [num_rows, VOCAB_BLOCK], -inf from num_columns to the end of the last vector. `next`: the following block.
  void fill(int64_t row, int64_t num_rows, int64_t block, int64_t next, float* out) const {
    if (in_.logits) {
      copy(row, num_rows, block, out);
    } else if (in_.element_size == 2) {
      multiply<bf16>(row, num_rows, block, next, out);
    } else {
      multiply<float>(row, num_rows, block, next, out);
    }
    int count = num_columns(in_, block);
    for (int64_t i = 0; i < num_rows; i++) {
      float* z = out + i * VOCAB_BLOCK;
      if (!in_.logits && in_.divisor != 1)
        for (int j = 0; j < count; j += LANES) vstore(z + j, vdiv(vload(z + j), vset(in_.divisor)));
      if (!in_.logits && in_.cap)
        for (int j = 0; j < count; j += LANES) vstore(z + j, vmul(vset(in_.cap), vtanh(vdiv(vload(z + j), vset(in_.cap)))));
      for (int j = count; j % LANES; j++) z[j] = -INF;
    }
  }

 private:
  template <class T>
  void multiply(int64_t row, int64_t num_rows, int64_t block, int64_t next, float* out) const {
    constexpr int64_t PANELS = VOCAB_BLOCK / LANES;
    Matrix<T> w{static_cast<const T*>(in_.weight), in_.vocab, in_.columns, in_.codes};
    const T* x = static_cast<const T*>(in_.hidden) + row * in_.hidden_stride;
    int64_t first = block * PANELS, last = std::min(first + PANELS, w.num_panels());
    const T* ahead = !in_.codes && next * VOCAB_BLOCK < in_.vocab ? w.panel(next * PANELS) : nullptr;
    products(x, in_.hidden_stride, num_rows, w, first, last, out, VOCAB_BLOCK, ahead);
  }

  void copy(int64_t row, int64_t num_rows, int64_t block, float* out) const {
    for (int64_t i = 0; i < num_rows; i++) {
      const float* z = in_.logits + (row + i) * in_.logits_stride + block * VOCAB_BLOCK;
      std::copy(z, z + num_columns(in_, block), out + i * VOCAB_BLOCK);
    }
  }

  const HeadInput& in_;
};

float highest_of(const float* z, int count) {
  Vec highest = vload(z);
  for (int j = LANES; j < count; j += LANES) highest = vmax(highest, vload(z + j));
  return vhighest(highest);
}

// Zero the odds where z is -inf, and return their sum. It equals that of `exponentials` for odds of the same base.
float odds_left(const float* z, int count, float* odds) {
  Vec sum = vset(0.f), nothing = vset(-INF);
  for (int j = 0; j < count; j += LANES) {
    Vec odd = vselect(vgt(vload(z + j), nothing), vload(odds + j), vset(0.f));
    vstore(odds + j, odd);
    sum = vadd(sum, odd);
  }
  return vsum(sum);
}

// Compute exp((z - base) * inv_t), and return the sum, which is NaN if any z is NaN or +inf.
float exponentials(const float* z, int count, float base, float inv_t, float* odds) {
  Vec sum = vset(0.f), from = vset(base), scale = vset(inv_t * LOG2E);
  for (int j = 0; j < count; j += LANES) {
    Vec odd = odds_of(vload(z + j), from, scale);
    vstore(odds + j, odd);
    sum = vadd(sum, odd);
  }
  return vsum(sum);
}

}  // namespace
}  // namespace nano::head
