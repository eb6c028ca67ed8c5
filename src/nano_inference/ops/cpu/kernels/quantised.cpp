#include "quantised.h"

#include <algorithm>
#include <vector>

#include "codes.h"
#include "linear_tiles.h"
#include "pool.h"

namespace nano {
namespace {

constexpr float MOST = 127.f;   // of a code of 8 bits
constexpr float TINY = 1e-30f;  // a group whose largest number is no larger counts as zeros
constexpr int64_t QUAD = 4, LINE = 64;
constexpr int LINES_AHEAD = 24;  // of codes, which are fetched before they are used
constexpr int MOST_ROWS = 4;     // of a tile: their sums fit into registers

// The largest magnitude, and 0, or NaN where something is not finite.
struct Range {
  float largest, known;
};

Range range_of(const float* x, int64_t count) {
  Vec largest = vset(0.f), known = vset(0.f);
  const IVec magnitude = iset(0x7fffffff);
  for (int64_t k = 0; k < count; k += LANES) {
    const Vec v = vload_n(x + k, int(std::min<int64_t>(LANES, count - k)));
    largest = vmax(vbits(iand(ibits(v), magnitude)), largest);
    known = vadd(known, vmul(v, vset(0.f)));
  }
  return {vhighest(largest), vsum(known)};
}

// Codes of x / scale, nearest, ties to even.
void round_codes(const float* x, int64_t count, float inverse, float low, float high, int8_t* codes) {
  const Vec factor = vset(inverse), least = vset(low), most = vset(high);
  int32_t whole[LANES];
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = int(std::min<int64_t>(LANES, count - k));
    istore(whole, ito_int(vmin(most, vmax(least, vround(vmul(vload_n(x + k, n), factor))))));
    for (int i = 0; i < n; i++) codes[k + i] = int8_t(whole[i]);
  }
}

// Columns [first, last) of each group.
struct Groups {
  explicit Groups(const Quantised& weight) : weight(weight), columns(weight.segments.bounds[weight.segments.count]) {}
  int64_t first(int64_t g) const { return weight.group ? g * weight.group : weight.segments.bounds[g]; }
  int64_t last(int64_t g) const {
    return weight.group ? std::min((g + 1) * weight.group, columns) : weight.segments.bounds[g + 1];
  }
  const Quantised& weight;
  const int64_t columns;
};

template <class S>
void as_floats(const S* source, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = int(std::min<int64_t>(LANES, count - k));
    vstore_n(out + k, load_as_float(source + k, n), n);
  }
}

// Rows of a product's input as codes, with the scale of each group.
class Inputs {
 public:
  template <class T>
  void take(const T* x, int64_t ldx, int64_t num_rows, const Quantised& weight) {
    const Groups groups(weight);
    quads_ = weight.num_quads(), groups_ = weight.num_groups();
    codes_.assign(size_t(num_rows * quads_ * QUAD), 0);
    scales_.assign(size_t(num_rows * groups_), 0.f);
    offsets_.assign(size_t(num_rows * groups_), 0.f);
    row_.resize(size_t(groups.columns));
    for (int64_t i = 0; i < num_rows; i++) {
      as_floats(x + i * ldx, groups.columns, row_.data());
      for (int64_t g = 0; g < groups_; g++) take_group(i, g, groups.first(g), groups.last(g));
    }
  }

  const int8_t* codes(int64_t row) const { return codes_.data() + row * quads_ * QUAD; }
  float scale(int64_t row, int64_t group) const { return scales_[size_t(row * groups_ + group)]; }
  // What codes of 4 bits, which are 8 too large, add to a sum.
  float offset(int64_t row, int64_t group) const { return offsets_[size_t(row * groups_ + group)]; }
  int64_t num_quads() const { return quads_; }
  int64_t num_groups() const { return groups_; }

 private:
  void take_group(int64_t i, int64_t g, int64_t first, int64_t last) {
    const Range range = range_of(row_.data() + first, last - first);
    float& scale = scales_[size_t(i * groups_ + g)];
    if (range.known != 0.f) {
      scale = range.known;
    } else if (range.largest > TINY) {
      int8_t* codes = codes_.data() + i * quads_ * QUAD + first;
      scale = range.largest / MOST;
      round_codes(row_.data() + first, last - first, MOST / range.largest, -MOST, MOST, codes);
      int32_t sum = 0;
      for (int64_t k = 0; k < last - first; k++) sum += codes[k];
      offsets_[size_t(i * groups_ + g)] = float(8 * sum);
    }
  }

  int64_t quads_ = 0, groups_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> scales_, offsets_, row_;
};

// Sums of HEIGHT rows by one panel over `count` quads: codes of 8 bits.
template <int HEIGHT, bool FETCH>
INLINE inline void add_quads(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx, int64_t count) {
  UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = szero();
  UNROLL for (int64_t k = 0; k < count; k++) {
    const Line line = lload(w + k * LINE), magnitude = lmagnitude(line);
    if (FETCH) fetch(w + (k + LINES_AHEAD) * LINE);
    UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sdot8(sums[i], line, magnitude, qdup(x + i * ldx + k * QUAD));
  }
}

// The same over a group of 32 columns: codes of 4 bits.
template <int HEIGHT, bool FETCH>
INLINE inline void add_group(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx) {
  Halves halves[HEIGHT];
  UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hzero();
  UNROLL for (int j = 0; j < 4; j++) {
    const Line both = lload(w + j * LINE);
    if (FETCH) fetch(w + (j + LINES_AHEAD) * LINE);
    const Line low = llow(both);
    UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hdot4(halves[i], low, qdup(x + i * ldx + 2 * j * QUAD));
    const Line high = lhigh(both);
    UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hdot4(halves[i], high, qdup(x + i * ldx + (2 * j + 1) * QUAD));
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = hsums(halves[i]);
}

// HEIGHT rows from `row` on by one panel; the sums of a row are `stride` apart. GROUPED: in groups of 32.
template <int HEIGHT, int BITS, bool GROUPED, bool FETCH>
void tile(const Quantised& w, int64_t panel, const Inputs& inputs, int64_t row, float* out, int stride) {
  constexpr int64_t GROUP = 32;
  const int64_t quads = inputs.num_quads(), ldx = quads * QUAD, groups = inputs.num_groups();
  const int8_t *codes = static_cast<const int8_t*>(w.codes) + panel * quads * LINE * BITS / 8, *x = inputs.codes(row);
  const int64_t first_scale = panel * groups * LANES;
  const auto* halves = static_cast<const uint16_t*>(w.scales) + first_scale;
  const auto* floats = static_cast<const float*>(w.scales) + first_scale;
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * LANES];  // sums of finished segments, for their partners
  int depth = 0;
  for (int64_t s = 0; s < w.segments.count; s++) {
    const int64_t start = w.segments.bounds[s], end = w.segments.bounds[s + 1];
    const int64_t first = GROUPED ? start / GROUP : s, last = GROUPED ? (end + GROUP - 1) / GROUP : s + 1;
    Vec total[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) total[i] = vset(0.f);
    for (int64_t g = first; g < last; g++) {
      Sums sums[HEIGHT];
      if constexpr (BITS == 4) {
        add_group<HEIGHT, FETCH>(sums, codes + g * (GROUP / 8) * LINE, x + g * GROUP, ldx);
      } else if constexpr (GROUPED) {
        add_quads<HEIGHT, FETCH>(sums, codes + g * (GROUP / QUAD) * LINE, x + g * GROUP, ldx, GROUP / QUAD);
      } else {
        add_quads<HEIGHT, FETCH>(sums, codes + start / QUAD * LINE, x + start, ldx, (end - start + QUAD - 1) / QUAD);
      }
      const Vec scales = GROUPED ? vof_half(halves + g * LANES) : vload(floats + g * LANES);
      UNROLL for (int i = 0; i < HEIGHT; i++) {
        Vec whole = vof(sums[i]);
        if (BITS == 4) whole = vsub(whole, vset(inputs.offset(row + i, g)));  // exact: below 2^24
        total[i] = vadd(total[i], vmul(whole, vmul(vset(inputs.scale(row + i, g)), scales)));
      }
    }
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      depth--;
      UNROLL for (int i = 0; i < HEIGHT; i++) total[i] = vadd(vload(waiting[depth] + i * LANES), total[i]);
    }
    const bool is_last = s + 1 == w.segments.count;
    float* place = is_last ? out : waiting[depth++];
    UNROLL for (int i = 0; i < HEIGHT; i++) vstore(place + i * (is_last ? stride : LANES), total[i]);
  }
}

template <int BITS, bool GROUPED, bool FETCH>
void tile_of(int height, const Quantised& w, int64_t panel, const Inputs& inputs, int64_t row, float* out, int stride) {
  switch (height) {
    case 1: return tile<1, BITS, GROUPED, FETCH>(w, panel, inputs, row, out, stride);
    case 2: return tile<2, BITS, GROUPED, FETCH>(w, panel, inputs, row, out, stride);
    case 3: return tile<3, BITS, GROUPED, FETCH>(w, panel, inputs, row, out, stride);
    case 4: return tile<4, BITS, GROUPED, FETCH>(w, panel, inputs, row, out, stride);
  }
}

// A panel of codes stays in the cache while all rows pass; the first of them fetch it.
template <class T, int BITS, bool GROUPED>
void walk_codes(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  const int64_t num_tiles = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  const int width = job.gated() ? 2 : 1;
  alignas(64) float sums[MOST_ROWS * 2 * LANES];
  for (; panel < end_panel; panel++)
    for (int64_t t = 0; t < num_tiles; t++) {
      const int64_t from = num_rows * t / num_tiles, to = num_rows * (t + 1) / num_tiles;
      for (int j = 0; j < width; j++) {
        const int64_t at = job.w.first + panel + j * job.num_panels();
        const auto compute = t ? tile_of<BITS, GROUPED, false> : tile_of<BITS, GROUPED, true>;
        compute(int(to - from), *job.w.codes, at, inputs, from, sums + j * LANES, width * LANES);
      }
      finish_tile(job, row + from, int(to - from), panel, width, sums);
    }
}

}  // namespace

template <class T>
void quantised_linear(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  if (row >= end_row || panel >= end_panel) return;
  static thread_local Inputs inputs;
  inputs.take(job.x + row * job.ldx, job.ldx, end_row - row, *job.w.codes);
  const auto walk = job.w.codes->bits == 4 ? walk_codes<T, 4, true>
                    : job.w.codes->group   ? walk_codes<T, 8, true>
                                           : walk_codes<T, 8, false>;
  walk(job, inputs, row, end_row - row, panel, end_panel);
}
template void quantised_linear(const Linear<bf16>&, int64_t, int64_t, int64_t, int64_t);
template void quantised_linear(const Linear<float>&, int64_t, int64_t, int64_t, int64_t);

template <class S>
void quantise(const S* source, const Quantised& weight, int64_t start, int64_t count, int64_t columns) {
  const Groups groups(weight);
  const int64_t quads = weight.num_quads(), num_groups = weight.num_groups();
  std::vector<float> row(size_t(columns), 0.f);
  std::vector<int8_t> codes(size_t(quads * QUAD));
  for (int64_t n = start; n < start + count; n++) {
    const int64_t panel = n / LANES, lane = n % LANES;
    as_floats(source + (n - start) * columns, columns, row.data());
    std::fill(codes.begin(), codes.end(), 0);
    for (int64_t g = 0; g < num_groups; g++) {
      const int64_t first = groups.first(g), size = groups.last(g) - first;
      const float* part = row.data() + first;
      const Range range = range_of(part, size);
      float scale = range.largest > TINY ? range.largest / MOST : 0.f, low = -MOST, high = MOST;
      if (weight.bits == 4) {
        float largest = 0.f;  // with its sign, of the first of equal ones
        for (int64_t k = 0; k < size && largest == 0.f; k++)
          if (std::fabs(part[k]) == range.largest) largest = part[k];
        scale = range.largest > TINY ? largest / -8.f : 0.f, low = -8.f, high = 7.f;
      }
      scale += range.known;
      const int64_t place = (panel * num_groups + g) * LANES + lane;
      if (weight.group) {
        const uint16_t half = to_half(scale);
        static_cast<uint16_t*>(const_cast<void*>(weight.scales))[place] = half;
        scale = of_half(half);
      } else {
        static_cast<float*>(const_cast<void*>(weight.scales))[place] = scale;
      }
      if (range.known == 0.f) round_codes(part, size, scale == 0.f ? 0.f : 1.f / scale, low, high, codes.data() + first);
    }
    auto* out = static_cast<uint8_t*>(const_cast<void*>(weight.codes));
    if (weight.bits == 8) {
      for (int64_t q = 0; q < quads; q++) memcpy(out + ((panel * quads + q) * LANES + lane) * QUAD, codes.data() + q * QUAD, QUAD);
    } else {
      for (int64_t q = 0; q < quads; q += 2)
        for (int64_t c = 0; c < QUAD; c++) {
          const int low = codes[size_t(q * QUAD + c)] + 8, high = codes[size_t((q + 1) * QUAD + c)] + 8;
          out[((panel * quads / 2 + q / 2) * LANES + lane) * QUAD + c] = uint8_t(low | high << 4);
        }
    }
  }
}
template void quantise(const bf16*, const Quantised&, int64_t, int64_t, int64_t);
template void quantise(const float*, const Quantised&, int64_t, int64_t, int64_t);

void dequantise(const Quantised& weight, int64_t row, int64_t columns, float scale, float* out) {
  const Groups groups(weight);
  const int64_t quads = weight.num_quads(), panel = row / LANES, lane = row % LANES;
  auto* codes = static_cast<const uint8_t*>(weight.codes);
  for (int64_t g = 0; g < weight.num_groups(); g++) {
    const int64_t place = (panel * weight.num_groups() + g) * LANES + lane;
    const float own = weight.group ? of_half(static_cast<const uint16_t*>(weight.scales)[place])
                                   : static_cast<const float*>(weight.scales)[place];
    for (int64_t k = groups.first(g); k < groups.last(g); k++) {
      const int64_t quad = k / QUAD;
      int code;
      if (weight.bits == 8) {
        code = int8_t(codes[((panel * quads + quad) * LANES + lane) * QUAD + k % QUAD]);
      } else {
        const int both = codes[((panel * quads / 2 + quad / 2) * LANES + lane) * QUAD + k % QUAD];
        code = (quad % 2 ? both >> 4 : both & 15) - 8;
      }
      out[k] = float(code) * own;
      if (scale != 1.f) out[k] *= scale;
    }
  }
}

}  // namespace nano

using namespace nano;

extern "C" {

void nano_quantise(const void* source, int64_t source_is_bf16, const Quantised* weight, int64_t start, int64_t count,
                   int64_t columns, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t from = team.begin(count), end = team.end(count);
    if (source_is_bf16) quantise(static_cast<const bf16*>(source) + from * columns, *weight, start + from, end - from, columns);
    else quantise(static_cast<const float*>(source) + from * columns, *weight, start + from, end - from, columns);
  };
  run_team(int(num_threads), work);
}

void nano_dequantise(const Quantised* weight, int64_t start, int64_t count, int64_t columns, float* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(count); i < team.end(count); i++)
      dequantise(*weight, start + i, columns, 1.f, out + i * columns);
  };
  run_team(int(num_threads), work);
}
}
