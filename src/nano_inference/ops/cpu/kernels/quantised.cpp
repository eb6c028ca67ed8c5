#include "quantised.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "codes.h"
#include "linear_tiles.h"
#include "pool.h"
#include "round_codes.h"
#include "tiles.h"

namespace nano {
namespace {

constexpr int64_t QUAD = 4, LINE = 64;
#if defined(NANO_AMX)
constexpr int64_t PADDED = 32;  // rows of two tiles
#else
constexpr int64_t PADDED = 1;
#endif
constexpr int LINES_AHEAD = 24;  // prefetch distance in lines of codes
// Rows per tile: their sums fit into registers.
#if defined(NANO_AVX512) && defined(NANO_VNNI)
constexpr int MOST_ROWS = 8;
#elif defined(NANO_AVX2) || defined(NANO_AVX512)
constexpr int MOST_ROWS = 4;
#else
constexpr int MOST_ROWS = 1;
#endif

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

// Rows of a product's input as codes, with the scale and the sum of each group.
class Inputs {
 public:
  template <class T>
  void take(const T* x, int64_t ldx, int64_t num_rows, const Quantised& weight) {
    const Groups groups(weight);
    quads_ = weight.num_quads(), groups_ = weight.num_groups();
    codes_.assign(size_t((num_rows + PADDED - 1) / PADDED * PADDED * quads_ * QUAD), 0);
    scales_.assign(size_t(num_rows * groups_), 0.f);
    totals_.assign(size_t(num_rows * groups_), 0);
    row_.resize(size_t(groups.columns));
    for (int64_t i = 0; i < num_rows; i++) {
      as_floats(x + i * ldx, groups.columns, row_.data());
      for (int64_t g = 0; g < groups_; g++) take_group(i, g, groups.first(g), groups.last(g));
    }
  }

  const int8_t* codes(int64_t row) const { return codes_.data() + row * quads_ * QUAD; }
  float scale(int64_t row, int64_t group) const { return scales_[size_t(row * groups_ + group)]; }
  int32_t total(int64_t row, int64_t group) const { return totals_[size_t(row * groups_ + group)]; }  // sum of codes
  int64_t num_quads() const { return quads_; }
  int64_t num_groups() const { return groups_; }

 private:
  void take_group(int64_t i, int64_t g, int64_t first, int64_t last) {
    int8_t* codes = codes_.data() + i * quads_ * QUAD + first;
    scales_[size_t(i * groups_ + g)] = encode(row_.data() + first, last - first, codes);
    int32_t sum = 0;
    for (int64_t k = 0; k < last - first; k++) sum += codes[k];
    totals_[size_t(i * groups_ + g)] = sum;
  }

  int64_t quads_ = 0, groups_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> scales_, row_;
  std::vector<int32_t> totals_;
};

// Add the products of HEIGHT rows and `count` quads of one panel to sums: codes of 8 bits.
template <int HEIGHT>
INLINE inline void add_quads(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx, int64_t count) {
  UNROLL for (int64_t k = 0; k < count; k++) {
    const Line line = lload(w + k * LINE), bytes = lbytes(line);
    fetch(w + (k + LINES_AHEAD) * LINE);
    UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sdot8(sums[i], line, bytes, qdup(x + i * ldx + k * QUAD));
  }
}

// Compute the products over 32 columns: codes of 4 bits.
template <int HEIGHT>
INLINE inline void add_32(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx) {
  Halves halves[HEIGHT];
  UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hzero();
  UNROLL for (int j = 0; j < 4; j++) {
    const Line both = lload(w + j * LINE);
    fetch(w + (j + LINES_AHEAD) * LINE);
    const Line low = llow(both);
    UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hdot4(halves[i], low, qdup(x + i * ldx + 2 * j * QUAD));
    const Line high = lhigh(both);
    UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hdot4(halves[i], high, qdup(x + i * ldx + (2 * j + 1) * QUAD));
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = hsums(halves[i]);
}

template <int HEIGHT, int64_t GROUP>
INLINE inline void add_group(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx) {
  add_32<HEIGHT>(sums, w, x, ldx);
  for (int64_t k = 32; k < GROUP; k += 32) {
    Sums more[HEIGHT];
    add_32<HEIGHT>(more, w + k / 8 * LINE, x + k, ldx);
    UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sadd(sums[i], more[i]);
  }
}

// Storage format of a weight as compile-time constants.
template <int BITS_, int64_t GROUP_, bool WIDE_, bool MINS_>
struct Format {
  static constexpr int BITS = BITS_;
  static constexpr int64_t GROUP = GROUP_;
  static constexpr bool WIDE = WIDE_, MINS = MINS_;
};

// Return total + the scaled value of the integers of a row and group.
template <class F>
INLINE inline Vec add_scaled(Vec total, Vec whole, const Inputs& inputs, int64_t row, int64_t g, Vec scales, const float* mins) {
  const float sum = float(inputs.total(row, g));
  const Vec own = vset(inputs.scale(row, g));
  if (F::BITS == 4 && !F::MINS) whole = vsub(whole, vset(8 * sum));  // exact: below 2^24
  total = vadd(total, vmul(whole, vmul(own, scales)));
  return F::MINS ? vsub(total, vmul(vset(sum), vmul(own, vload(mins)))) : total;
}

// Multiply HEIGHT rows from `row` on by one panel. The sums of a row are `stride` apart.
template <int HEIGHT, class F>
void tile(const Quantised& w, int64_t panel, const Inputs& inputs, int64_t row, float* out, int stride) {
  constexpr int64_t GROUP = F::GROUP;
  const int64_t quads = inputs.num_quads(), ldx = quads * QUAD, groups = inputs.num_groups();
  const int8_t *codes = static_cast<const int8_t*>(w.codes) + panel * quads * LINE * F::BITS / 8, *x = inputs.codes(row);
  const int64_t first_scale = panel * groups * LANES;
  const auto* halves = static_cast<const uint16_t*>(w.scales) + first_scale;
  const auto* floats = static_cast<const float*>(w.scales) + first_scale;
  const float* mins = w.mins + first_scale;
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * LANES];  // sums of finished segments, for their partners
  int depth = 0;
  for (int64_t s = 0; s < w.segments.count; s++) {
    const int64_t start = w.segments.bounds[s], end = w.segments.bounds[s + 1];
    const int64_t first = GROUP ? start / (GROUP ? GROUP : 1) : s, last = GROUP ? (end + GROUP - 1) / (GROUP ? GROUP : 1) : s + 1;
    Vec total[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) total[i] = vset(0.f);
    for (int64_t g = first; g < last; g++) {
      Sums sums[HEIGHT];
      UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sstart(inputs.total(row + i, g));
      if constexpr (F::BITS == 4) {
        add_group<HEIGHT, GROUP>(sums, codes + g * (GROUP / 8) * LINE, x + g * GROUP, ldx);
      } else if constexpr (GROUP > 0) {
        add_quads<HEIGHT>(sums, codes + g * (GROUP / QUAD) * LINE, x + g * GROUP, ldx, GROUP / QUAD);
      } else {
        add_quads<HEIGHT>(sums, codes + start / QUAD * LINE, x + start, ldx, (end - start + QUAD - 1) / QUAD);
      }
      const Vec scales = F::WIDE ? vload(floats + g * LANES) : vof_half(halves + g * LANES);
      UNROLL for (int i = 0; i < HEIGHT; i++) {
        total[i] = add_scaled<F>(total[i], vof(sums[i]), inputs, row + i, g, scales, F::MINS ? mins + g * LANES : mins);
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

template <class F>
void tile_of(int height, const Quantised& w, int64_t panel, const Inputs& inputs, int64_t row, float* out, int stride) {
  switch (height) {
    case 1: return tile<1, F>(w, panel, inputs, row, out, stride);
#if defined(NANO_AVX2) || defined(NANO_AVX512)
    case 2: return tile<2, F>(w, panel, inputs, row, out, stride);
    case 3: return tile<3, F>(w, panel, inputs, row, out, stride);
    case 4: return tile<4, F>(w, panel, inputs, row, out, stride);
#endif
#if defined(NANO_AVX512) && defined(NANO_VNNI)
    case 5: return tile<5, F>(w, panel, inputs, row, out, stride);
    case 6: return tile<6, F>(w, panel, inputs, row, out, stride);
    case 7: return tile<7, F>(w, panel, inputs, row, out, stride);
    case 8: return tile<8, F>(w, panel, inputs, row, out, stride);
#endif
  }
}

template <class F>
bool has_format(const Quantised& w) {
  return w.bits == F::BITS && w.group == F::GROUP && (w.wide != 0) == F::WIDE && (w.mins != nullptr) == F::MINS;
}

// Call use(format) with the weight's format, one of these. Return false for any other format.
template <class... F>
struct Formats {
  template <class Use>
  static bool with(const Quantised& w, Use use) {
    return ((has_format<F>(w) && (use(F()), true)) || ...);
  }
};
template <class Use>
bool with_format(const Quantised& w, Use use) {
  using Known = Formats<Format<4, 128, true, true>, Format<4, 128, true, false>, Format<4, 64, true, true>,
                        Format<4, 64, true, false>, Format<4, 32, true, true>, Format<4, 32, true, false>,
                        Format<4, 32, false, false>, Format<8, 128, true, false>, Format<8, 16, true, true>,
                        Format<8, 16, true, false>, Format<8, 32, true, true>, Format<8, 32, false, false>,
                        Format<8, 0, true, false>>;
  return Known::with(w, use);
}

using Tile = void (*)(int height, const Quantised& w, int64_t panel, const Inputs& inputs, int64_t row, float* out, int stride);

#if defined(NANO_AMX)
// Like `tile`, for up to 16 rows and a panel with groups, whose codes are bytes. Tiles 0 and 1 are the sums of
// alternate groups, 2 and 3 their inputs, 4 and 5 their weights.
template <class F>
void tile_in_tiles(const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs, int64_t row, int height,
                   float* out, int stride) {
  constexpr int64_t GROUP = F::GROUP, PART = GROUP < LINE ? GROUP : LINE;  // columns of a tile
  const int64_t ldx = inputs.num_quads() * QUAD, groups = inputs.num_groups(), first_scale = panel * groups * LANES;
  const int8_t* x = inputs.codes(row);
  const auto* halves = static_cast<const uint16_t*>(w.scales) + first_scale;
  const auto* floats = static_cast<const float*>(w.scales) + first_scale;
  const float* mins = w.mins + first_scale;
  alignas(64) int32_t whole[2][LANES * LANES];
  alignas(64) float waiting[Segments::DEPTH][LANES * LANES];  // sums of finished segments, for their partners
  auto multiply = [&](int64_t g) INLINE {
    const int8_t *from = x + g * GROUP, *weights = codes + g * (GROUP / QUAD) * LINE;
    if (g % 2 == 0) {
      TILE_ZERO(0);
      for (int64_t k = 0; k < GROUP; k += PART) {
        TILE_LOAD(2, from + k, ldx);
        TILE_LOAD(4, weights + k / QUAD * LINE, LINE);
        TILE_CODES(0, 2, 4);
      }
      TILE_STORE(0, whole[0], LINE);
    } else {
      TILE_ZERO(1);
      for (int64_t k = 0; k < GROUP; k += PART) {
        TILE_LOAD(3, from + k, ldx);
        TILE_LOAD(5, weights + k / QUAD * LINE, LINE);
        TILE_CODES(1, 3, 5);
      }
      TILE_STORE(1, whole[1], LINE);
    }
  };
  int depth = 0;
  for (int64_t s = 0; s < w.segments.count; s++) {
    const int64_t first = w.segments.bounds[s] / GROUP, last = (w.segments.bounds[s + 1] + GROUP - 1) / GROUP;
    Vec total[LANES];
    for (int i = 0; i < height; i++) total[i] = vset(0.f);
    if (first < last) multiply(first);
    for (int64_t g = first; g < last; g++) {
      if (g + 1 < last) multiply(g + 1);
      const Vec scales = F::WIDE ? vload(floats + g * LANES) : vof_half(halves + g * LANES);
      for (int i = 0; i < height; i++) {
        total[i] = add_scaled<F>(total[i], vof(iload(whole[g % 2] + i * LANES)), inputs, row + i, g, scales, F::MINS ? mins + g * LANES : mins);
      }
    }
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      depth--;
      for (int i = 0; i < height; i++) total[i] = vadd(vload(waiting[depth] + i * LANES), total[i]);
    }
    const bool is_last = s + 1 == w.segments.count;
    float* place = is_last ? out : waiting[depth++];
    for (int i = 0; i < height; i++) vstore(place + i * (is_last ? stride : LANES), total[i]);
  }
}
#endif

// A panel of codes stays in the cache while all rows pass.
template <class T>
void walk_codes(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  const int64_t num_tiles = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  const int width = job.gated() ? 2 : 1;
  Tile compute = nullptr;
  if (!with_format(*job.w.codes, [&](auto format) { compute = tile_of<decltype(format)>; })) std::abort();
  alignas(64) float sums[MOST_ROWS * 2 * LANES];
  for (; panel < end_panel; panel++)
    for (int64_t t = 0; t < num_tiles; t++) {
      const int64_t from = num_rows * t / num_tiles, to = num_rows * (t + 1) / num_tiles;
      for (int j = 0; j < width; j++) {
        const int64_t at = job.w.first + panel + j * job.num_panels();
        compute(int(to - from), *job.w.codes, at, inputs, from, sums + j * LANES, width * LANES);
      }
      finish_tile(job, row + from, int(to - from), panel, width, sums);
    }
}

#if defined(NANO_AMX)
constexpr int64_t VECTOR_ROWS = 4;  // up to this many rows, vectors read weights as fast as AMX tiles

// Sums over `quads` of 32 rows by two panels, [32][2][16] integers. Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7
// weights. Quads after the last whole tile of 16 are added up in lines.
void code_sums(const int8_t* x, int64_t ldx, int height, const int8_t* const (&w)[2], int64_t quads, bool wait, int32_t* sums) {
  constexpr int64_t AT_ONCE = 16, A_ROW = 2 * LANES * sizeof(int32_t);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  int64_t q = 0;
  for (; q + AT_ONCE <= quads; q += AT_ONCE) {
    if (wait)
      for (const int8_t* panel : w)
        UNROLL for (int64_t line = 0; line < AT_ONCE; line++) fetch(panel + (q + line + 2 * LINES_AHEAD) * LINE);
    TILE_LOAD(4, x + q * QUAD, ldx);
    TILE_LOAD(6, w[0] + q * LINE, LINE);
    TILE_CODES(0, 4, 6);
    TILE_LOAD(7, w[1] + q * LINE, LINE);
    TILE_CODES(1, 4, 7);
    if (height > LANES) {
      TILE_LOAD(5, x + LANES * ldx + q * QUAD, ldx);
      TILE_CODES(2, 5, 6);
      TILE_CODES(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, A_ROW);
  TILE_STORE(1, sums + LANES, A_ROW);
  if (height > LANES) {
    TILE_STORE(2, sums + 2 * LANES * LANES, A_ROW);
    TILE_STORE(3, sums + (2 * LANES + 1) * LANES, A_ROW);
  }
  if (q == quads) return;
  for (int i = 0; i < height; i++) {
    int32_t total = 0;
    for (int64_t k = q * QUAD; k < quads * QUAD; k++) total += x[i * ldx + k];
    for (int j = 0; j < 2; j++) {
      int32_t* at = sums + (2 * i + j) * LANES;
      Sums more[1] = {sadd(iload(at), sstart(total))};
      add_quads<1>(more, w[j] + q * LINE, x + i * ldx + q * QUAD, ldx, quads - q);
      istore(at, more[0]);
    }
  }
}

// Return the codes of a panel as bytes. Codes of 4 bits are unpacked to `memory`.
inline const int8_t* bytes_of(const Quantised& w, int64_t panel, std::vector<int8_t>& memory) {
  const int64_t quads = w.num_quads();
  const auto* codes = static_cast<const int8_t*>(w.codes) + panel * quads * LINE * w.bits / 8;
  if (w.bits == 8) return codes;
  memory.resize(size_t(quads * LINE));
  for (int64_t line = 0; line < quads / 2; line++) {
    const Line both = lload(codes + line * LINE);
    fetch(codes + (line + LINES_AHEAD) * LINE);
    istore(memory.data() + 2 * line * LINE, llow(both));
    istore(memory.data() + (2 * line + 1) * LINE, lhigh(both));
  }
  return memory.data();
}

// Like `walk_codes`, for formats with groups.
template <class T>
void walk_groups(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  const Quantised& w = *job.w.codes;
  const int64_t columns = std::min<int64_t>(w.group, LINE);
  TileShapes shapes;
  for (int i = 0; i < 4; i++) shapes.set(i, 16, i < 2 ? 64 : columns);
  for (int i = 4; i < 6; i++) shapes.set(i, columns / QUAD, 64);
  shapes.load();
  static thread_local std::vector<int8_t> memory[2];
  const int width = job.gated() ? 2 : 1;
  alignas(64) float sums[LANES * 2 * LANES];
  for (; panel < end_panel; panel++) {
    const int8_t* codes[2];
    int64_t at[2];
    for (int j = 0; j < width; j++) {
      at[j] = job.w.first + panel + j * job.num_panels();
      codes[j] = bytes_of(w, at[j], memory[j]);
    }
    for (int64_t from = 0; from < num_rows; from += LANES) {
      const int height = int(std::min<int64_t>(LANES, num_rows - from));
      for (int j = 0; j < width; j++)
        if (!with_format(w, [&](auto format) {
              if constexpr (decltype(format)::GROUP > 0)
                tile_in_tiles<decltype(format)>(w, at[j], codes[j], inputs, from, height, sums + j * LANES, width * LANES);
            }))
          std::abort();
      finish_tile(job, row + from, height, panel, width, sums);
    }
  }
}

// Like `walk_codes`, for codes of 8 bits with one scale per segment.
template <class T>
void walk_tiles(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  TileShapes shapes;
  for (int i = 0; i < 8; i++) shapes.set(i, 16, 64);
  shapes.load();
  const Quantised& w = *job.w.codes;
  const int64_t ldx = inputs.num_quads() * QUAD, groups = inputs.num_groups(), panel_size = inputs.num_quads() * LINE;
  const auto* codes = static_cast<const int8_t*>(w.codes);
  alignas(64) int32_t whole[PADDED * 2 * LANES];
  alignas(64) float sums[PADDED * 2 * LANES], waiting[Segments::DEPTH][PADDED * 2 * LANES];
  for (; panel < end_panel; panel += job.gated() ? 1 : 2) {
    const int width = job.gated() || panel + 1 < end_panel ? 2 : 1;
    const int64_t first = job.w.first + panel, second = job.gated() ? first + job.num_panels() : first + width - 1;
    const int8_t* const from[2] = {codes + first * panel_size, codes + second * panel_size};
    for (int64_t at = 0; at < num_rows; at += PADDED) {
      const int height = int(std::min(PADDED, num_rows - at));
      int depth = 0;
      for (int64_t s = 0; s < w.segments.count; s++) {
        const int64_t start = w.segments.bounds[s] / QUAD, quads = (w.segments.bounds[s + 1] + QUAD - 1) / QUAD - start;
        const int8_t* const parts[2] = {from[0] + start * LINE, from[1] + start * LINE};
        code_sums(inputs.codes(at) + start * QUAD, ldx, height, parts, quads, at == 0, whole);
        for (int j = 0; j < width; j++) {
          const Vec scales = vload(static_cast<const float*>(w.scales) + ((j ? second : first) * groups + s) * LANES);
          for (int i = 0; i < height; i++) {
            const Vec product = vmul(vof(iload(whole + (2 * i + j) * LANES)), vmul(vset(inputs.scale(at + i, s)), scales));
            vstore(sums + (i * width + j) * LANES, vadd(vset(0.f), product));
          }
        }
        const int64_t used = height * width * LANES;
        for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
          const float* partner = waiting[--depth];
          for (int64_t i = 0; i < used; i += LANES) vstore(sums + i, vadd(vload(partner + i), vload(sums + i)));
        }
        if (s + 1 < w.segments.count) memcpy(waiting[depth++], sums, size_t(used) * sizeof(float));
      }
      finish_tile(job, row + at, height, panel, width, sums);
    }
  }
}
#endif

}  // namespace

template <class T>
void quantised_linear(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  if (row >= end_row || panel >= end_panel) return;
  static thread_local Inputs inputs;
  inputs.take(job.x + row * job.ldx, job.ldx, end_row - row, *job.w.codes);
#if defined(NANO_AMX)
  if (end_row - row > VECTOR_ROWS)
    return job.w.codes->group ? walk_groups(job, inputs, row, end_row - row, panel, end_panel)
                              : walk_tiles(job, inputs, row, end_row - row, panel, end_panel);
#endif
  walk_codes(job, inputs, row, end_row - row, panel, end_panel);
}
template void quantised_linear(const Linear<bf16>&, int64_t, int64_t, int64_t, int64_t);
template void quantised_linear(const Linear<float>&, int64_t, int64_t, int64_t, int64_t);

// Store a scale, and return it as stored, possibly rounded to 16 bits.
static float store_scale(const Quantised& weight, int64_t place, float scale) {
  if (weight.wide) return static_cast<float*>(const_cast<void*>(weight.scales))[place] = scale;
  const uint16_t half = to_half(scale);
  static_cast<uint16_t*>(const_cast<void*>(weight.scales))[place] = half;
  return of_half(half);
}

// Store row n in the panel that holds it. `codes` are whole quads; `base` is added to codes of 4 bits.
static void store_codes(const Quantised& weight, int64_t n, const int8_t* codes, int base) {
  const int64_t quads = weight.num_quads(), panel = n / LANES, lane = n % LANES;
  auto* out = static_cast<uint8_t*>(const_cast<void*>(weight.codes));
  if (weight.bits == 8) {
    for (int64_t q = 0; q < quads; q++) memcpy(out + ((panel * quads + q) * LANES + lane) * QUAD, codes + q * QUAD, QUAD);
    return;
  }
  for (int64_t q = 0; q < quads; q += 2)
    for (int64_t c = 0; c < QUAD; c++) {
      const int low = codes[q * QUAD + c] + base, high = codes[(q + 1) * QUAD + c] + base;
      out[((panel * quads / 2 + q / 2) * LANES + lane) * QUAD + c] = uint8_t(low | high << 4);
    }
}

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
        float largest = 0.f;  // with its sign; the first of several equal ones
        for (int64_t k = 0; k < size && largest == 0.f; k++)
          if (std::fabs(part[k]) == range.largest) largest = part[k];
        scale = range.largest > TINY ? largest / -8.f : 0.f, low = -8.f, high = 7.f;
      }
      scale += range.known;
      const int64_t place = (panel * num_groups + g) * LANES + lane;
      if (weight.mins) const_cast<float*>(weight.mins)[place] = weight.bits == 4 ? scale * 8.f : 0.f;
      scale = store_scale(weight, place, scale);
      if (range.known == 0.f) round_codes(part, size, scale == 0.f ? 0.f : 1.f / scale, low, high, codes.data() + first);
    }
    store_codes(weight, n, codes.data(), 8);
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
    const float own = weight.wide ? static_cast<const float*>(weight.scales)[place]
                                  : of_half(static_cast<const uint16_t*>(weight.scales)[place]);
    for (int64_t k = groups.first(g); k < groups.last(g); k++) {
      const int64_t quad = k / QUAD;
      int code;
      if (weight.bits == 8) {
        code = int8_t(codes[((panel * quads + quad) * LANES + lane) * QUAD + k % QUAD]);
      } else {
        const int both = codes[((panel * quads / 2 + quad / 2) * LANES + lane) * QUAD + k % QUAD];
        code = (quad % 2 ? both >> 4 : both & 15) - (weight.mins ? 0 : 8);
      }
      out[k] = float(code) * own;
      if (weight.mins) out[k] -= weight.mins[place];
      if (scale != 1.f) out[k] *= scale;
    }
  }
}

}  // namespace nano

using namespace nano;

extern "C" {

// 1 if products support the weight's format, otherwise 0. Products of any other format end the process.
int nano_has_format(const Quantised* weight) { return with_format(*weight, [](auto) {}); }

void nano_quantise(const void* source, int64_t source_is_bf16, const Quantised* weight, int64_t start, int64_t count,
                   int64_t columns, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t from = team.begin(count), end = team.end(count);
    if (source_is_bf16) quantise(static_cast<const bf16*>(source) + from * columns, *weight, start + from, end - from, columns);
    else quantise(static_cast<const float*>(source) + from * columns, *weight, start + from, end - from, columns);
  };
  run_team(int(num_threads), work);
}

// Store codes [count, columns] unchanged, with scales and minima [count, groups]. Rows of codes are `stride` apart.
void nano_store_codes(const int8_t* source, int64_t stride, const float* scales, const float* mins, const Quantised* weight,
                      int64_t start, int64_t count, int64_t columns, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t num_groups = weight->num_groups();
    std::vector<int8_t> row(size_t(weight->num_quads() * QUAD), 0);
    for (int64_t i = team.begin(count); i < team.end(count); i++) {
      memcpy(row.data(), source + i * stride, size_t(columns));
      store_codes(*weight, start + i, row.data(), weight->mins ? 0 : 8);
      for (int64_t g = 0; g < num_groups; g++) {
        const int64_t place = ((start + i) / LANES * num_groups + g) * LANES + (start + i) % LANES;
        store_scale(*weight, place, scales[i * num_groups + g]);
        if (weight->mins) const_cast<float*>(weight->mins)[place] = mins[i * num_groups + g];
      }
    }
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
