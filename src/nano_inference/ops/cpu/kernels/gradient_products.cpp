// Products of the backward pass. Their weights are packed on the way: a turned matrix needs no transposition, because
// panels already hold columns one below the other.
#include <algorithm>

#include "gradients.h"
#include "linear.h"
#include "pool.h"
#include "row_parts.h"
#include "transpose.h"

namespace nano {
namespace {

constexpr int64_t PANELS = 12;           // a multiple of all widths of tiles
constexpr int64_t INPUT_NUMBERS = 65536;  // of rows that pass all panels together: they stay in the L2 cache

template <class T>
void product(const GradientProduct& p, const Team& team) {
  const Linear<T> job{static_cast<const T*>(p.x), p.ldx, {static_cast<const T*>(p.weight), p.rows, p.columns},
                      static_cast<const T*>(p.bias), p.adds ? Finish::ADD : Finish::STORE, p.scale, p.out, p.ldo, false, {}};
  const int64_t height = std::clamp<int64_t>(INPUT_NUMBERS / p.columns / 12 * 12, 24, 240);
  const int64_t blocks = (p.num_rows + height - 1) / height, groups = (job.num_panels() + PANELS - 1) / PANELS;
  const int64_t last = team.end(blocks * groups);
  for (int64_t unit = team.begin(blocks * groups); unit < last;) {
    const int64_t block = unit / groups, group = unit % groups, end = std::min(groups, group + last - unit);
    linear(job, block * height, std::min(p.num_rows, (block + 1) * height), group * PANELS,
           std::min(job.num_panels(), end * PANELS), {nullptr, nullptr, 0});
    unit += end - group;
  }
}

// Two rows as pairs: the first of each pair from `first`, the second from `second`, or 0 if that is null.
inline IVec pairs_of(const bf16* first, const bf16* second, int n) {
  bf16 some[2][LANES] = {};
  if (n < LANES) {
    memcpy(some[0], first, 2 * size_t(n));
    if (second) memcpy(some[1], second, 2 * size_t(n));
    first = some[0], second = some[1];
  } else if (!second) {
    second = some[1];
  }
  return ior(ishr<16>(ibits(vwiden(first))), ibits(vwiden(second)));
}

}  // namespace

template <class T>
void pack_turned(const T* source, int64_t ld, int64_t rows, int64_t columns, int64_t first, int64_t last, T* packed) {
  const Matrix<T> out{packed, columns, rows};
  constexpr int64_t TALL = 64;  // rows whose panels are written together: they stay in the cache
  for (int64_t from = 0; from < rows; from += TALL)
    for (int64_t panel = first; panel < last; panel++) {
      const int n = left(columns, panel * LANES);
      const T* p = source + panel * LANES;
      T* to = packed + panel * out.panel_size();
      for (int64_t r = from; r < std::min(rows, from + TALL); r++) {
        if constexpr (sizeof(T) == 4) {
          vstore(to + r * LANES, vload_n(p + r * ld, n));
        } else if (r % 2 == 0) {
          istore(to + r * LANES, pairs_of(p + r * ld, r + 1 < rows ? p + (r + 1) * ld : nullptr, n));
        }
      }
    }
}

template <class T>
void turn(const float* source, int64_t ld, int64_t rows, int64_t from, int64_t to, T* out, int64_t ldo) {
  IVec words[LANES];
  for (int64_t c = from; c < to; c += LANES)
    for (int64_t r = 0; r < rows; r += LANES) {
      const int wide = left(to, c), tall = left(rows, r);
      for (int i = 0; i < LANES; i++) words[i] = i < tall ? ibits(vload_n(source + (r + i) * ld + c, wide)) : iset(0);
      transpose(words);
      for (int i = 0; i < wide; i++) store_as(out + (c + i) * ldo + r, vbits(words[i]), tall);
    }
}

#define NANO_TURNED(T)                                                                         \
  template void pack_turned(const T*, int64_t, int64_t, int64_t, int64_t, int64_t, T*);        \
  template void turn(const float*, int64_t, int64_t, int64_t, int64_t, T*, int64_t);
NANO_TURNED(bf16)
NANO_TURNED(float)

}  // namespace nano

using namespace nano;

extern "C" {

void nano_gradient_product(const GradientProduct* p) {
  auto work = [&](Team& team) { p->is_bf16 ? product<bf16>(*p, team) : product<float>(*p, team); };
  run_team(int(p->num_threads), work);
}

// source [rows][columns] -> a packed weight [columns, rows].
void nano_pack_turned(const void* source, int64_t rows, int64_t columns, void* packed, int64_t is_bf16, int64_t num_threads) {
  const int64_t panels = (columns + LANES - 1) / LANES;
  auto work = [&](Team& team) {
    const int64_t first = team.begin(panels), last = team.end(panels);
    if (is_bf16) pack_turned(static_cast<const bf16*>(source), columns, rows, columns, first, last, static_cast<bf16*>(packed));
    else pack_turned(static_cast<const float*>(source), columns, rows, columns, first, last, static_cast<float*>(packed));
  };
  run_team(int(num_threads), work);
}

// source [rows][columns] -> out [columns][ldo].
void nano_turn(const float* source, int64_t rows, int64_t columns, void* out, int64_t ldo, int64_t is_bf16,
               int64_t num_threads) {
  const int64_t panels = (columns + LANES - 1) / LANES;
  auto work = [&](Team& team) {
    const int64_t from = team.begin(panels) * LANES, to = std::min(columns, team.end(panels) * LANES);
    if (is_bf16) turn(source, columns, rows, from, to, static_cast<bf16*>(out), ldo);
    else turn(source, columns, rows, from, to, static_cast<float*>(out), ldo);
  };
  run_team(int(num_threads), work);
}

// out = source [count], rounded to bf16.
void nano_round_rows(const float* source, int64_t count, void* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t units = (count + LANES - 1) / LANES;
    const int64_t from = team.begin(units) * LANES, to = std::min(count, team.end(units) * LANES);
    if (from < to) round_row(source + from, to - from, static_cast<bf16*>(out) + from);
  };
  run_team(int(num_threads), work);
}
}
