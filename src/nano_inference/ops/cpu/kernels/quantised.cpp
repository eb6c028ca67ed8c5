#include "quantised.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <utility>
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
#elif defined(NANO_DOT)
constexpr int MOST_ROWS = 3;
#else
constexpr int MOST_ROWS = 1;
#endif

// Added to unpacked numbers of MXFP4, -12 to 12, if unsigned bytes take fewer instructions. The sums are exact either way.
#if (defined(NANO_AVX2) || defined(NANO_AVX512)) && !defined(NANO_VNNI)
constexpr int LIFT = 12, LIFTED_BITS = 5;
#else
constexpr int LIFT = 0, LIFTED_BITS = 8;
#endif

constexpr int MOST_HEIGHT = PADDED > 1 ? LANES : MOST_ROWS;  // rows of a tile, of either kind

// Columns [first, last) of each group. size 0: a group is a segment.
struct Groups {
  Groups(const Quantised& weight, int64_t size) : weight(weight), size(size), columns(weight.num_columns()) {}
  explicit Groups(const Quantised& weight) : Groups(weight, weight.group) {}
  int64_t first(int64_t g) const { return size ? g * size : weight.segments.bounds[g]; }
  int64_t last(int64_t g) const { return size ? std::min((g + 1) * size, columns) : weight.segments.bounds[g + 1]; }
  int64_t count() const { return size ? (columns + size - 1) / size : weight.segments.count; }
  const Quantised& weight;
  const int64_t size, columns;
};

template <class S>
void as_floats(const S* source, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += LANES) {
    const int n = int(std::min<int64_t>(LANES, count - k));
    vstore_n(out + k, load_as_float(source + k, n), n);
  }
}

// Rows of a product's input as codes, with the scale and the sum of each group. If the weight has steps, a scale belongs
// to 256 columns, and the sums are those of the weight's groups, an even number.
class Inputs {
 public:
  template <class T>
  void take(const T* x, int64_t ldx, int64_t num_rows, const Quantised& weight) {
    const Groups groups(weight, weight.input_group());
    quads_ = weight.num_quads(), groups_ = groups.count(), parts_ = (weight.num_groups() + 1) / 2 * 2;
    codes_.assign(size_t((num_rows + PADDED - 1) / PADDED * PADDED * quads_ * QUAD), 0);
    scales_.assign(size_t(num_rows * groups_), 0.f);
    totals_.assign(size_t(num_rows * groups_), 0);
    row_.resize(size_t(groups.columns));
    const bool steps = groups.size != weight.group;
    if (steps) part_totals_.assign(size_t(num_rows * parts_), 0);
    for (int64_t i = 0; i < num_rows; i++) {
      as_floats(x + i * ldx, groups.columns, row_.data());
      int8_t* codes = codes_.data() + i * quads_ * QUAD;
      for (int64_t g = 0; g < groups_; g++) {
        const int64_t first = groups.first(g), count = groups.last(g) - first;
        scales_[size_t(i * groups_ + g)] = encode(row_.data() + first, count, codes + first);
        if (!steps) totals_[size_t(i * groups_ + g)] = sum_of(codes + first, count);
      }
      for (int64_t g = 0; steps && g < weight.num_groups(); g++)  // codes are padded with zeros
        part_totals_[size_t(i * parts_ + g)] = int16_t(sum_of(codes + g * weight.group, weight.group));
    }
  }

  const int8_t* codes(int64_t row) const { return codes_.data() + row * quads_ * QUAD; }
  float scale(int64_t row, int64_t group) const { return scales_[size_t(row * groups_ + group)]; }
  int32_t total(int64_t row, int64_t group) const { return totals_[size_t(row * groups_ + group)]; }  // sum of codes
  const int16_t* part_totals(int64_t row) const { return part_totals_.data() + row * parts_; }
  int64_t num_quads() const { return quads_; }

 private:
  static int32_t sum_of(const int8_t* codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t k = 0; k < count; k++) sum += codes[k];
    return sum;
  }

  int64_t quads_ = 0, groups_ = 0, parts_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> scales_, row_;
  std::vector<int32_t> totals_;
  std::vector<int16_t> part_totals_;
};

// Add the products of HEIGHT rows and a quad to sums: codes with a sign, of 8 bits.
template <int HEIGHT>
INLINE inline void add_quad(Sums (&sums)[HEIGHT], Line line, const int8_t* x, int64_t ldx) {
  const Line bytes = lbytes(line);
  UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sdot8(sums[i], line, bytes, qdup(x + i * ldx));
}

// Add the products over `count` quads of one panel.
template <int HEIGHT>
INLINE inline void add_quads(Sums (&sums)[HEIGHT], const int8_t* w, const int8_t* x, int64_t ldx, int64_t count) {
  UNROLL for (int64_t k = 0; k < count; k++) {
    const Line line = lload(w + k * LINE);
    fetch(w + (k + LINES_AHEAD) * LINE);
    add_quad<HEIGHT>(sums, line, x + k * QUAD, ldx);
  }
}

// Add the products over a unit whose codes stand for numbers of a table.
template <int HEIGHT>
INLINE inline void add_numbers(Sums (&sums)[HEIGHT], const int8_t* unit, Table table, const int8_t* x, int64_t ldx) {
  UNROLL for (int64_t j = 0; j < 4; j++) {
    const Line both = lload(unit + j * LINE);
    fetch(unit + (j + LINES_AHEAD) * LINE);
    add_quad<HEIGHT>(sums, tlook(table, llow(both)), x + 2 * j * QUAD, ldx);
    add_quad<HEIGHT>(sums, tlook(table, lhigh(both)), x + (2 * j + 1) * QUAD, ldx);
  }
}

// Return the high bits of quad Q of a unit, in place: codes of 5 or 6 bits.
template <int BITS, int Q>
INLINE inline Line high_bits(const int8_t* unit) {
  if constexpr (BITS == 5) return lbits<4 - Q, 16>(lload(unit + 4 * LINE));
  else return lbits<4 - 2 * (Q % 4), 48>(lload(unit + (4 + Q / 4) * LINE));
}

// Return quad Q of a unit: codes of fewer than 8 bits, or bytes that were unpacked from them.
template <int BITS, bool UNPACKED, int Q>
INLINE inline Line quad_of(const int8_t* unit) {
  if constexpr (UNPACKED) return lload(unit + Q * LINE);
  const Line both = lload(unit + Q / 2 * LINE), low = Q % 2 ? lhigh(both) : llow(both);
  if constexpr (BITS == 4) return low;
  else return lor(low, high_bits<BITS, Q>(unit));
}

// Add the products over the quads 2 J and 2 J + 1 of a unit.
template <int HEIGHT, int BITS, bool UNPACKED, int J>
INLINE inline void add_pair(Halves (&halves)[HEIGHT], const int8_t* unit, const int8_t* x, int64_t ldx) {
  const Line low = at_once(quad_of<BITS, UNPACKED, 2 * J>(unit)), high = at_once(quad_of<BITS, UNPACKED, 2 * J + 1>(unit));
  UNROLL for (int i = 0; i < HEIGHT; i++) {
    const Quad first = qdup(x + i * ldx + 2 * J * QUAD), second = qdup(x + i * ldx + (2 * J + 1) * QUAD);
    halves[i] = hdot4(hdot4(halves[i], low, first), high, second);
  }
}

// Add n times the products over COUNT pairs of quads from pair FIRST on.
template <int HEIGHT, int BITS, bool UNPACKED, int FIRST, int COUNT, class N>
INLINE inline void add_pairs(Sums (&sums)[HEIGHT], const int8_t* unit, const int8_t* x, int64_t ldx, N n) {
  constexpr int MOST_PAIRS = MOST_QUADS<BITS> / 2, PAIRS = COUNT < MOST_PAIRS ? COUNT : MOST_PAIRS;
  Halves halves[HEIGHT];
  UNROLL for (int i = 0; i < HEIGHT; i++) halves[i] = hzero();
  add_pair<HEIGHT, BITS, UNPACKED, FIRST>(halves, unit, x, ldx);
  if constexpr (PAIRS > 1) add_pair<HEIGHT, BITS, UNPACKED, FIRST + 1>(halves, unit, x, ldx);
  if constexpr (PAIRS > 2) {
    add_pair<HEIGHT, BITS, UNPACKED, FIRST + 2>(halves, unit, x, ldx);
    add_pair<HEIGHT, BITS, UNPACKED, FIRST + 3>(halves, unit, x, ldx);
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = add_times(sums[i], halves[i], n);
  if constexpr (COUNT > PAIRS) add_pairs<HEIGHT, BITS, UNPACKED, FIRST + PAIRS, COUNT - PAIRS>(sums, unit, x, ldx, n);
}

// Add n times the products over a group of codes of fewer than 8 bits.
template <int HEIGHT, int BITS, bool UNPACKED, int64_t GROUP, class N>
INLINE inline void add_group(Sums (&sums)[HEIGHT], const int8_t* codes, int64_t g, const int8_t* x, int64_t ldx, N n) {
  constexpr int64_t UNIT = (UNPACKED ? 8 : BITS) * LINE;
  if constexpr (GROUP == 16) {
    const int8_t* unit = codes + g / 2 * UNIT;
    if (g % 2) return add_pairs<HEIGHT, BITS, UNPACKED, 2, 2>(sums, unit, x - 4 * QUAD, ldx, n);
    if (!UNPACKED) UNROLL for (int j = 0; j < BITS; j++) fetch(unit + (j + LINES_AHEAD) * LINE);
    add_pairs<HEIGHT, BITS, UNPACKED, 0, 2>(sums, unit, x, ldx, n);
  } else {
    for (int64_t k = 0; k < GROUP; k += 32) {
      const int8_t* unit = codes + (g * GROUP + k) / 32 * UNIT;
      if (!UNPACKED) UNROLL for (int j = 0; j < BITS; j++) fetch(unit + (j + LINES_AHEAD) * LINE);
      add_pairs<HEIGHT, BITS, UNPACKED, 0, 4>(sums, unit, x + k, ldx, n);
    }
  }
}

// Storage format of a weight as compile-time constants.
template <int BITS_, int64_t GROUP_, Scales SCALES_, bool MINS_, bool TABLE_ = false>
struct Format {
  static constexpr bool TABLE = TABLE_, SIGNED = BITS_ == 8 || TABLE;
  static constexpr bool LIFTED = TABLE && SCALES_ == Scales::EXPONENTS && LIFT;  // its numbers, once unpacked
  static constexpr int BITS = BITS_, MIDDLE = SIGNED ? 0 : 1 << (BITS - 1);
  static constexpr int64_t GROUP = GROUP_;
  static constexpr Scales SCALES = SCALES_;
  static constexpr bool MINS = MINS_;
};

// Add the products over group g of codes with a sign.
template <int HEIGHT, class F, bool UNPACKED>
INLINE inline void add_signed(Sums (&sums)[HEIGHT], const int8_t* codes, Table table, int64_t g, const int8_t* x, int64_t ldx) {
  static_assert(!F::TABLE || (F::BITS == 4 && F::GROUP == 32), "a group is a unit");
  if constexpr (F::TABLE && !UNPACKED) add_numbers<HEIGHT>(sums, codes + g * F::BITS * LINE, table, x, ldx);
  else add_quads<HEIGHT>(sums, codes + g * (F::GROUP / QUAD) * LINE, x, ldx, F::GROUP / QUAD);
}

// Scales or minima of a panel, one per group.
template <class F>
class PanelScales {
 public:
  PanelScales(const void* scales, int64_t panel, const Quantised& w)
      : at_(static_cast<const char*>(scales) + panel * w.num_groups() * LANES * SIZE) {}
  INLINE inline Vec operator()(int64_t g) const {
    if constexpr (F::SCALES == Scales::FLOAT) return vload(reinterpret_cast<const float*>(at_) + g * LANES);
    else if constexpr (F::SCALES == Scales::EXPONENTS) return vof_exponents(reinterpret_cast<const uint8_t*>(at_) + g * LANES);
    else return vof_half(reinterpret_cast<const uint16_t*>(at_) + g * LANES);
  }

 private:
  static constexpr int64_t SIZE = F::SCALES == Scales::FLOAT ? 4 : F::SCALES == Scales::EXPONENTS ? 1 : 2;
  const char* at_;
};

// Steps of a panel, and the numbers of steps of its groups.
template <class F>
class PanelSteps {
 public:
  static constexpr int64_t EACH = STEP / F::GROUP;  // groups per step
  PanelSteps(const void* scales, int64_t panel, const Quantised& w)
      : at_(static_cast<const char*>(scales) + panel * ((w.num_groups() + EACH - 1) / EACH) * RECORD) {}
  INLINE inline Vec step(int64_t t) const { return vof_half(reinterpret_cast<const uint16_t*>(at_ + t * RECORD)); }
  INLINE inline const int8_t* numbers(int64_t g) const {
    return reinterpret_cast<const int8_t*>(at_ + g / EACH * RECORD) + (2 + g % EACH) * LANES;
  }

 private:
  static constexpr int64_t RECORD = (2 + EACH) * LANES;
  const char* at_;
};

// Return total + the scaled value of the integers of a row and group, whose codes are MIDDLE above their numbers.
template <class F, int MIDDLE = F::MIDDLE>
INLINE inline Vec add_scaled(Vec total, Vec whole, const Inputs& inputs, int64_t row, int64_t g, Vec scales, const PanelScales<F>& mins) {
  const float sum = float(inputs.total(row, g));
  const Vec own = vset(inputs.scale(row, g));
  if (MIDDLE && !F::MINS) whole = vsub(whole, vset(MIDDLE * sum));  // exact: below 2^24
  total = vadd(total, vmul(whole, vmul(own, scales)));
  if constexpr (F::MINS) total = vsub(total, vmul(vset(sum), vmul(own, mins(g))));
  return total;
}

// Compute the products of a segment: groups [first, last), which begin at column `start`.
template <int HEIGHT, class F, bool UNPACKED>
INLINE inline void add_groups(Vec (&totals)[HEIGHT], const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs,
                              int64_t row, int64_t first, int64_t last, int64_t start, int64_t end) {
  constexpr int64_t GROUP = F::GROUP;
  constexpr bool LIFTED = UNPACKED && F::LIFTED;
  constexpr int BITS = LIFTED ? LIFTED_BITS : F::BITS, MIDDLE = LIFTED ? LIFT : F::MIDDLE;
  const int64_t ldx = inputs.num_quads() * QUAD;
  const int8_t* x = inputs.codes(row);
  const PanelScales<F> scales(w.scales, panel, w), mins(w.mins, panel, w);
  [[maybe_unused]] const Table table = tload(w.values);
  for (int64_t g = first; g < last; g++) {
    Sums sums[HEIGHT];
    if constexpr (!F::SIGNED || LIFTED) {
      UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = Sums(hzero());
      add_group<HEIGHT, BITS, UNPACKED, GROUP>(sums, codes, g, x + g * GROUP, ldx, One());
    } else {
      UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sstart(inputs.total(row + i, g));
      if constexpr (GROUP > 0) add_signed<HEIGHT, F, UNPACKED>(sums, codes, table, g, x + g * GROUP, ldx);
      else add_quads<HEIGHT>(sums, codes + start / QUAD * LINE, x + start, ldx, (end - start + QUAD - 1) / QUAD);
    }
    const Vec factors = scales(g);
    UNROLL for (int i = 0; i < HEIGHT; i++) totals[i] = add_scaled<F, MIDDLE>(totals[i], vof(sums[i]), inputs, row + i, g, factors, mins);
  }
}

// Add the value of the sums of `height` rows over step t to their totals.
template <class F>
INLINE inline void add_step(Vec* totals, const Sums* sums, int height, const Inputs& inputs, int64_t row, int64_t t, int64_t groups,
                            const PanelSteps<F>& scales, const PanelSteps<F>& mins) {
  constexpr int64_t EACH = PanelSteps<F>::EACH;
  const PanelSteps<F>& numbers = F::MINS ? mins : scales;
  Sums least[MOST_HEIGHT];  // sums of the input's codes, times minima or scales
  UNROLL for (int i = 0; i < height; i++) least[i] = Sums(hzero());
  for (int64_t g = t * EACH; (F::MINS || F::MIDDLE) && g < std::min((t + 1) * EACH, groups); g += 2) {
    const Couples couples = pload(numbers.numbers(g), numbers.numbers(g + 1));
    UNROLL for (int i = 0; i < height; i++) least[i] = pdot2(least[i], couples, inputs.part_totals(row + i) + g);
  }
  const Vec step = scales.step(t), min_step = numbers.step(t);
  UNROLL for (int i = 0; i < height; i++) {
    const Vec own = vset(inputs.scale(row + i, t));
    const Sums whole = F::MINS || !F::MIDDLE ? sums[i] : sminus(sums[i], sshift<F::BITS - 1>(least[i]));
    totals[i] = vadd(totals[i], vmul(vof(whole), vmul(own, step)));
    if constexpr (F::MINS) totals[i] = vsub(totals[i], vmul(vof(least[i]), vmul(own, min_step)));
  }
}

// Compute the products of a segment of a weight with steps.
template <int HEIGHT, class F, bool UNPACKED>
INLINE inline void add_steps(Vec (&totals)[HEIGHT], const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs,
                             int64_t row, int64_t first, int64_t last) {
  constexpr int64_t GROUP = F::GROUP, EACH = PanelSteps<F>::EACH;
  const int64_t ldx = inputs.num_quads() * QUAD, groups = w.num_groups();
  const int8_t* x = inputs.codes(row);
  const PanelSteps<F> scales(w.scales, panel, w), mins(w.mins, panel, w);
  [[maybe_unused]] const Table table = tload(w.values);
  for (int64_t t = first / EACH; t < (last + EACH - 1) / EACH; t++) {
    Sums sums[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = Sums(hzero());
    for (int64_t g = t * EACH; g < std::min((t + 1) * EACH, last); g++) {
      if constexpr (F::SIGNED) {
        Sums own[HEIGHT];
        UNROLL for (int i = 0; i < HEIGHT; i++) own[i] = sstart(inputs.part_totals(row + i)[g]);
        add_signed<HEIGHT, F, UNPACKED>(own, codes, table, g, x + g * GROUP, ldx);
        UNROLL for (int i = 0; i < HEIGHT; i++) sums[i] = sadd(sums[i], stimes(own[i], scales.numbers(g)));
      } else {
        add_group<HEIGHT, F::BITS, UNPACKED, GROUP>(sums, codes, g, x + g * GROUP, ldx, nload(scales.numbers(g)));
      }
    }
    add_step<F>(totals, sums, HEIGHT, inputs, row, t, groups, scales, mins);
  }
}

// Multiply HEIGHT rows from `row` on by one panel, whose codes are `codes`. The sums of a row are `stride` apart.
template <int HEIGHT, class F, bool UNPACKED>
void tile(const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs, int64_t row, float* out, int stride) {
  constexpr int64_t GROUP = F::GROUP;
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * LANES];  // sums of finished segments, for their partners
  int depth = 0;
  for (int64_t s = 0; s < w.segments.count; s++) {
    const int64_t start = w.segments.bounds[s], end = w.segments.bounds[s + 1];
    const int64_t first = GROUP ? start / (GROUP ? GROUP : 1) : s, last = GROUP ? (end + GROUP - 1) / (GROUP ? GROUP : 1) : s + 1;
    Vec total[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) total[i] = vset(0.f);
    if constexpr (F::SCALES == Scales::STEPS) add_steps<HEIGHT, F, UNPACKED>(total, w, panel, codes, inputs, row, first, last);
    else add_groups<HEIGHT, F, UNPACKED>(total, w, panel, codes, inputs, row, first, last, start, end);
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      depth--;
      UNROLL for (int i = 0; i < HEIGHT; i++) total[i] = vadd(vload(waiting[depth] + i * LANES), total[i]);
    }
    const bool is_last = s + 1 == w.segments.count;
    float* place = is_last ? out : waiting[depth++];
    UNROLL for (int i = 0; i < HEIGHT; i++) vstore(place + i * (is_last ? stride : LANES), total[i]);
  }
}

template <class F, bool UNPACKED>
void tile_of(int height, const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs, int64_t row, float* out, int stride) {
  switch (height) {
    case 1: return tile<1, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
#if defined(NANO_AVX2) || defined(NANO_AVX512) || defined(NANO_DOT)
    case 2: return tile<2, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
    case 3: return tile<3, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
#endif
#if defined(NANO_AVX2) || defined(NANO_AVX512)
    case 4: return tile<4, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
#endif
#if defined(NANO_AVX512) && defined(NANO_VNNI)
    case 5: return tile<5, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
    case 6: return tile<6, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
    case 7: return tile<7, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
    case 8: return tile<8, F, UNPACKED>(w, panel, codes, inputs, row, out, stride);
#endif
  }
}

template <class F>
bool has_format(const Quantised& w) {
  return w.bits == F::BITS && w.group == F::GROUP && w.scaling == int64_t(F::SCALES) && (w.mins != nullptr) == F::MINS &&
         w.has_table() == F::TABLE;
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
  constexpr Scales HALF = Scales::HALF, FLOAT = Scales::FLOAT, STEPS = Scales::STEPS, EXPONENTS = Scales::EXPONENTS;
  using Known = Formats<Format<4, 128, FLOAT, true>, Format<4, 128, FLOAT, false>, Format<4, 64, FLOAT, true>,
                        Format<4, 64, FLOAT, false>, Format<4, 32, FLOAT, true>, Format<4, 32, FLOAT, false>,
                        Format<4, 32, HALF, true>, Format<4, 32, HALF, false>, Format<4, 32, STEPS, true>,
                        Format<4, 32, HALF, false, true>, Format<4, 32, STEPS, false, true>, Format<4, 32, EXPONENTS, false, true>,
                        Format<5, 32, HALF, true>, Format<5, 32, HALF, false>, Format<5, 32, STEPS, true>,
                        Format<6, 16, STEPS, false>, Format<8, 128, FLOAT, false>, Format<8, 16, FLOAT, true>,
                        Format<8, 16, FLOAT, false>, Format<8, 32, FLOAT, true>, Format<8, 32, HALF, false>,
                        Format<8, 0, FLOAT, false>>;
  return Known::with(w, use);
}

using Tile = void (*)(int height, const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs, int64_t row,
                      float* out, int stride);

const int8_t* codes_of(const Quantised& w, int64_t panel) {
  return static_cast<const int8_t*>(w.codes) + panel * w.num_quads() * LINE * w.bits / 8;
}

template <int BITS, int... Q>
inline void unpack_unit(const int8_t* unit, int8_t* bytes, std::integer_sequence<int, Q...>) {
  (lstore(bytes + Q * LINE, quad_of<BITS, false, Q>(unit)), ...);
}

template <int... Q>
inline void look_up_unit(const int8_t* unit, int8_t* bytes, Table table, std::integer_sequence<int, Q...>) {
  (lstore(bytes + Q * LINE, tlook(table, quad_of<4, false, Q>(unit))), ...);
}

struct alignas(64) Unit {
  int8_t bytes[8 * LINE];
};

// Return the table of a weight, LIFT higher if its scales are exponents.
inline Table lifted_table(const Quantised& w) {
  int8_t values[16];
  const int lift = w.scaling == int64_t(Scales::EXPONENTS) ? LIFT : 0;
  for (int i = 0; i < 16; i++) values[i] = int8_t(w.values[i] + lift);
  return tload(values);
}

// Return the codes of a panel, or their numbers, as bytes. Codes of fewer than 8 bits are unpacked to `memory`.
inline const int8_t* bytes_of(const Quantised& w, int64_t panel, std::vector<Unit>& memory) {
  const int64_t quads = w.num_quads();
  const int8_t* codes = codes_of(w, panel);
  if (w.bits == 8) return codes;
  memory.resize(size_t(quads / 8));
  const Table table = w.has_table() ? lifted_table(w) : Table();
  for (int64_t unit = 0; unit < quads / 8; unit++) {
    const int8_t* from = codes + unit * w.bits * LINE;
    int8_t* bytes = memory[size_t(unit)].bytes;
    for (int64_t j = 0; j < w.bits; j++) fetch(from + (j + LINES_AHEAD) * LINE);
    constexpr auto EIGHT = std::make_integer_sequence<int, 8>();
    if (w.has_table()) look_up_unit(from, bytes, table, EIGHT);
    else if (w.bits == 4) unpack_unit<4>(from, bytes, EIGHT);
    if (w.bits == 5) unpack_unit<5>(from, bytes, EIGHT);
    if (w.bits == 6) unpack_unit<6>(from, bytes, EIGHT);
  }
  return memory[0].bytes;
}

#if defined(NANO_AMX)
// Like `tile`, for up to 16 rows and a panel with groups, whose codes are bytes. Tiles 0 and 1 are the sums of
// alternate groups, 2 and 3 their inputs, 4 and 5 their weights.
template <class F>
void tile_in_tiles(const Quantised& w, int64_t panel, const int8_t* codes, const Inputs& inputs, int64_t row, int height,
                   float* out, int stride) {
  constexpr int64_t GROUP = F::GROUP, PART = GROUP < LINE ? GROUP : LINE;  // columns of a tile
  using Panel = std::conditional_t<F::SCALES == Scales::STEPS, PanelSteps<F>, PanelScales<F>>;
  const int64_t ldx = inputs.num_quads() * QUAD, groups = w.num_groups();
  const int8_t* x = inputs.codes(row);
  const Panel scales(w.scales, panel, w), mins(w.mins, panel, w);
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
    [[maybe_unused]] Sums sums[LANES];  // of a step
    if (first < last) multiply(first);
    for (int64_t g = first; g < last; g++) {
      if (g + 1 < last) multiply(g + 1);
      const int32_t* at = whole[g % 2];
      if constexpr (F::SCALES == Scales::STEPS) {
        constexpr int64_t EACH = PanelSteps<F>::EACH;
        const Counts n = nload(scales.numbers(g));
        for (int i = 0; i < height; i++) sums[i] = add_times(g % EACH ? sums[i] : hzero(), iload(at + i * LANES), n);
        if ((g + 1) % EACH == 0 || g + 1 == last) add_step<F>(total, sums, height, inputs, row, g / EACH, groups, scales, mins);
      } else {
        const Vec factors = scales(g);
        for (int i = 0; i < height; i++)
          total[i] = add_scaled<F>(total[i], vof(iload(at + i * LANES)), inputs, row + i, g, factors, mins);
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

constexpr int64_t FEW_TILES = 2;  // up to this many tiles, unpacking codes once takes longer than in each tile

// A panel of codes stays in the cache while all rows pass.
template <class T>
void walk_codes(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  const Quantised& w = *job.w.codes;
  const int64_t num_tiles = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  const bool unpacked = w.bits < 8 && num_tiles > FEW_TILES;
  const int width = job.gated() ? 2 : 1;
  Tile compute = nullptr;
  if (!with_format(w, [&](auto format) {
        using F = decltype(format);
        compute = tile_of<F, false>;
        if constexpr (F::BITS < 8)
          if (unpacked) compute = tile_of<F, true>;
      }))
    std::abort();
  static thread_local std::vector<Unit> memory[2];
  alignas(64) float sums[MOST_ROWS * 2 * LANES];
  for (; panel < end_panel; panel++) {
    int64_t at[2];
    const int8_t* codes[2];
    for (int j = 0; j < width; j++) {
      at[j] = job.w.first + panel + j * job.num_panels();
      codes[j] = unpacked ? bytes_of(w, at[j], memory[j]) : codes_of(w, at[j]);
    }
    for (int64_t t = 0; t < num_tiles; t++) {
      const int64_t from = num_rows * t / num_tiles, to = num_rows * (t + 1) / num_tiles;
      for (int j = 0; j < width; j++) compute(int(to - from), w, at[j], codes[j], inputs, from, sums + j * LANES, width * LANES);
      finish_tile(job, row + from, int(to - from), panel, width, sums);
    }
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

// Like `walk_codes`, for formats with groups.
template <class T>
void walk_groups(const Linear<T>& job, const Inputs& inputs, int64_t row, int64_t num_rows, int64_t panel, int64_t end_panel) {
  const Quantised& w = *job.w.codes;
  const int64_t columns = std::min<int64_t>(w.group, LINE);
  TileShapes shapes;
  for (int i = 0; i < 4; i++) shapes.set(i, 16, i < 2 ? 64 : columns);
  for (int i = 4; i < 6; i++) shapes.set(i, columns / QUAD, 64);
  shapes.load();
  static thread_local std::vector<Unit> memory[2];
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
  const int64_t ldx = inputs.num_quads() * QUAD, groups = w.num_groups(), panel_size = inputs.num_quads() * LINE;
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

// Compute a product with a weight of one format.
template <class T>
static void linear_in_format(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  static thread_local Inputs inputs;
  inputs.take(job.x + row * job.ldx, job.ldx, end_row - row, *job.w.codes);
#if defined(NANO_AMX)
  if (end_row - row > VECTOR_ROWS)
    return job.w.codes->group ? walk_groups(job, inputs, row, end_row - row, panel, end_panel)
                              : walk_tiles(job, inputs, row, end_row - row, panel, end_panel);
#endif
  walk_codes(job, inputs, row, end_row - row, panel, end_panel);
}

template <class T>
void quantised_linear(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  if (row >= end_row) return;
  int64_t first = -job.w.first;  // output panel at which the format begins
  for (const Quantised* w = job.w.codes; w; first += w->num_panels, w = w->next) {
    const int64_t end = w->next ? std::min(end_panel, first + w->num_panels) : end_panel;
    if (panel >= end) continue;
    Linear<T> own = job;
    own.w.codes = w, own.w.first = -first;
    linear_in_format(own, row, end_row, panel, end);
    panel = end;
  }
}
template void quantised_linear(const Linear<bf16>&, int64_t, int64_t, int64_t, int64_t);
template void quantised_linear(const Linear<float>&, int64_t, int64_t, int64_t, int64_t);

namespace {

// Groups per record, or 1.
int64_t groups_per_step(const Quantised& weight) { return weight.scaling == int64_t(Scales::STEPS) ? STEP / weight.group : 1; }

// Return the record of a row's group. Steps of the row are at halves [lane], whole numbers at bytes [2 + group][lane].
char* record_of(const Quantised& weight, const void* scales, int64_t row, int64_t g) {
  const int64_t each = groups_per_step(weight), records = (weight.num_groups() + each - 1) / each;
  return static_cast<char*>(const_cast<void*>(scales)) + (row / LANES * records + g / each) * (2 + each) * LANES;
}

float load_scale(const Quantised& weight, const void* scales, int64_t row, int64_t g) {
  const int64_t lane = row % LANES, place = (row / LANES * weight.num_groups() + g) * LANES + lane;
  if (weight.scaling == int64_t(Scales::FLOAT)) return static_cast<const float*>(scales)[place];
  if (weight.scaling == int64_t(Scales::HALF)) return of_half(static_cast<const uint16_t*>(scales)[place]);
  if (weight.scaling == int64_t(Scales::EXPONENTS)) return widen1(bf16(static_cast<const uint8_t*>(scales)[place] << 7));
  const char* record = record_of(weight, scales, row, g);
  return of_half(reinterpret_cast<const uint16_t*>(record)[lane]) * float(int8_t(record[(2 + g % groups_per_step(weight)) * LANES + lane]));
}

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// Store the scales or minima of a row. With steps, each must be a multiple of its step.
void store_scales(const Quantised& weight, const void* scales, int64_t row, const float* values, const float* steps) {
  const int64_t lane = row % LANES, num_groups = weight.num_groups();
  for (int64_t g = 0; g < num_groups; g++) {
    const int64_t place = (row / LANES * num_groups + g) * LANES + lane;
    if (weight.scaling == int64_t(Scales::FLOAT)) {
      static_cast<float*>(const_cast<void*>(scales))[place] = values[g];
    } else if (weight.scaling == int64_t(Scales::HALF)) {
      static_cast<uint16_t*>(const_cast<void*>(scales))[place] = to_half(values[g]);
    } else if (weight.scaling == int64_t(Scales::EXPONENTS)) {
      static_cast<uint8_t*>(const_cast<void*>(scales))[place] = uint8_t(bits_of(values[g]) >> 23);
    } else {
      const float step = steps[g / groups_per_step(weight)];
      char* record = record_of(weight, scales, row, g);
      const bool usable = step * 0.f == 0.f && step != 0.f;
      reinterpret_cast<uint16_t*>(record)[lane] = to_half(step);
      record[(2 + g % groups_per_step(weight)) * LANES + lane] = char(usable ? int8_t(std::nearbyint(values[g] / step)) : 0);
    }
  }
}

// Store row n in the panel that holds it. `codes` are whole quads, of numbers if there is a table; `base` is added to codes
// of fewer than 8 bits.
void store_codes(const Quantised& weight, int64_t n, const int8_t* codes, int base) {
  const int64_t quads = weight.num_quads(), panel = n / LANES, lane = n % LANES, bits = weight.bits;
  auto* out = static_cast<uint8_t*>(const_cast<void*>(weight.codes));
  if (bits == 8) {
    for (int64_t q = 0; q < quads; q++) memcpy(out + ((panel * quads + q) * LANES + lane) * QUAD, codes + q * QUAD, QUAD);
    return;
  }
  uint8_t places[256] = {};  // of numbers in the table
  for (int i = 15; weight.has_table() && i >= 0; i--) places[uint8_t(weight.values[i])] = uint8_t(i);
  for (int64_t unit = 0; unit < quads / 8; unit++) {
    uint8_t* lines = out + (panel * quads / 8 + unit) * bits * LINE + lane * QUAD;
    for (int64_t c = 0; c < QUAD; c++) {
      int each[8];
      for (int64_t q = 0; q < 8; q++) {
        const int8_t code = codes[(unit * 8 + q) * QUAD + c];
        each[q] = weight.has_table() ? places[uint8_t(code)] : code + base;
      }
      for (int64_t j = 0; j < 4; j++) lines[j * LINE + c] = uint8_t((each[2 * j] & 15) | (each[2 * j + 1] & 15) << 4);
      for (int64_t line = 4; line < bits; line++) {
        int high = 0;
        for (int q = 0; q < 8; q++) {
          if (bits == 5) high |= (each[q] >> 4) << q;
          else if (q / 4 == line - 4) high |= (each[q] >> 4) << 2 * (q % 4);
        }
        lines[line * LINE + c] = uint8_t(high);
      }
    }
  }
}

// Return the code at column k of a row, as stored.
int load_code(const Quantised& weight, int64_t row, int64_t k) {
  const int64_t quads = weight.num_quads(), panel = row / LANES, place = row % LANES * QUAD + k % QUAD, quad = k / QUAD;
  auto* codes = static_cast<const uint8_t*>(weight.codes);
  if (weight.bits == 8) return int8_t(codes[(panel * quads + quad) * LINE + place]);
  const int q = int(quad % 8);
  const uint8_t* lines = codes + (panel * quads / 8 + quad / 8) * weight.bits * LINE + place;
  const int low = lines[q / 2 * LINE] >> (q % 2 ? 4 : 0) & 15;
  if (weight.bits == 5) return low | (lines[4 * LINE] >> q & 1) << 4;
  return weight.bits == 6 ? low | (lines[(4 + q / 4) * LINE] >> 2 * (q % 4) & 3) << 4 : low;
}

int middle_of(const Quantised& weight) { return weight.bits == 8 || weight.has_table() ? 0 : 1 << (weight.bits - 1); }

// Return the largest power of two up to the magnitude of x.
float power_below(float x) {
  const uint32_t bits = bits_of(x) & 0x7f800000;
  memcpy(&x, &bits, 4);
  return x;
}

// Round numbers times `inverse` to the nearest values of a table, the lower one of two.
void round_to_values(const float* x, int64_t count, float inverse, const int8_t* values, int8_t* codes) {
  for (int64_t k = 0; k < count; k++) {
    const float number = x[k] * inverse;
    codes[k] = values[0];
    for (int i = 0; i < 15; i++)
      if (number > float(values[i] + values[i + 1]) / 2.f) codes[k] = values[i + 1];
  }
}

// Round the scales of a row away from 0 to whole steps, and compute these.
void in_steps(const Quantised& weight, std::vector<float>& scales, std::vector<float>& steps) {
  const size_t each = size_t(groups_per_step(weight));
  for (size_t at = 0; at < steps.size(); at++) {
    const size_t first = at * each, last = std::min(first + each, scales.size());
    float largest = 0.f, known = 0.f;
    for (size_t g = first; g < last; g++) largest = std::max(largest, std::fabs(scales[g])), known += scales[g] * 0.f;
    const float step = steps[at] = of_half(to_half(largest / MOST + known));
    const float inverse = step == 0.f ? 0.f : 1.f / step;
    for (size_t g = first; g < last; g++) {
      const float size = std::min(std::ceil(std::fabs(scales[g]) * inverse), MOST);
      scales[g] = (step * 0.f == 0.f ? std::copysign(size, scales[g]) : 0.f) * step;
    }
  }
}

}  // namespace

template <class S>
void quantise(const S* source, const Quantised& weight, int64_t start, int64_t count, int64_t columns) {
  const Groups groups(weight);
  const int64_t quads = weight.num_quads(), num_groups = weight.num_groups(), each = groups_per_step(weight);
  const int middle = middle_of(weight);
  const float low = weight.has_table() ? weight.values[0] : middle ? float(-middle) : -MOST;
  const float high = middle ? float(middle - 1) : MOST;
  std::vector<float> row(size_t(columns), 0.f), scales(size_t(num_groups), 0.f);
  std::vector<float> steps(size_t((num_groups + each - 1) / each), 0.f);
  std::vector<int8_t> codes(size_t(quads * QUAD));
  for (int64_t n = start; n < start + count; n++) {
    as_floats(source + (n - start) * columns, columns, row.data());
    std::fill(codes.begin(), codes.end(), 0);
    for (int64_t g = 0; g < num_groups; g++) {
      const int64_t first = groups.first(g), size = groups.last(g) - first;
      const float* part = row.data() + first;
      const Range range = range_of(part, size);
      float scale = range.largest > TINY ? range.largest / MOST : 0.f;
      if (weight.scaling == int64_t(Scales::EXPONENTS)) {
        scale = range.largest > TINY ? power_below(range.largest) / power_below(weight.values[15]) : 0.f;
      } else if (weight.bits < 8) {
        float largest = 0.f;  // with its sign; the first of several equal ones
        for (int64_t k = 0; k < size && largest == 0.f; k++)
          if (std::fabs(part[k]) == range.largest) largest = part[k];
        scale = range.largest > TINY ? largest / low : 0.f;
      }
      scale += range.known;
      scales[size_t(g)] = weight.scaling == int64_t(Scales::HALF) ? of_half(to_half(scale)) : scale;
    }
    if (each > 1) in_steps(weight, scales, steps);
    for (int64_t g = 0; g < num_groups; g++) {
      const int64_t first = groups.first(g), size = groups.last(g) - first;
      const float scale = scales[size_t(g)];
      const float inverse = scale == 0.f ? 0.f : 1.f / scale;
      if (scale * 0.f != 0.f) continue;
      if (weight.has_table()) round_to_values(row.data() + first, size, inverse, weight.values, codes.data() + first);
      else round_codes(row.data() + first, size, inverse, low, high, codes.data() + first);
    }
    store_scales(weight, weight.scales, n, scales.data(), steps.data());
    if (weight.mins) {
      std::vector<float> mins(scales), min_steps(steps);
      for (float& min : mins) min *= float(middle);
      for (float& step : min_steps) step = of_half(to_half(step * float(middle)));
      store_scales(weight, weight.mins, n, mins.data(), min_steps.data());
    }
    store_codes(weight, n, codes.data(), middle);
  }
}
template void quantise(const bf16*, const Quantised&, int64_t, int64_t, int64_t);
template void quantise(const float*, const Quantised&, int64_t, int64_t, int64_t);

void dequantise(const Quantised& weight, int64_t row, int64_t columns, float scale, float* out) {
  const Groups groups(weight);
  const int base = weight.mins ? 0 : middle_of(weight);
  for (int64_t g = 0; g < weight.num_groups(); g++) {
    const float own = load_scale(weight, weight.scales, row, g);
    const float least = weight.mins ? load_scale(weight, weight.mins, row, g) : 0.f;
    for (int64_t k = groups.first(g); k < groups.last(g); k++) {
      const int code = load_code(weight, row, k);
      out[k] = float(weight.has_table() ? weight.values[code] : code - base) * own;
      if (weight.mins) out[k] -= least;
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

// Store codes [count, columns] unchanged, with scales and minima [count, groups] and their steps [count, steps]. Rows of
// codes are `stride` apart.
void nano_store_codes(const int8_t* source, int64_t stride, const float* scales, const float* mins, const float* steps,
                      const float* min_steps, const Quantised* weight, int64_t start, int64_t count, int64_t columns,
                      int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t num_groups = weight->num_groups(), each = groups_per_step(*weight), num_steps = (num_groups + each - 1) / each;
    std::vector<int8_t> row(size_t(weight->num_quads() * QUAD), 0);
    for (int64_t i = team.begin(count); i < team.end(count); i++) {
      memcpy(row.data(), source + i * stride, size_t(columns));
      store_codes(*weight, start + i, row.data(), weight->mins ? 0 : middle_of(*weight));
      store_scales(*weight, weight->scales, start + i, scales + i * num_groups, steps + i * num_steps);
      if (weight->mins) store_scales(*weight, weight->mins, start + i, mins + i * num_groups, min_steps + i * num_steps);
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
