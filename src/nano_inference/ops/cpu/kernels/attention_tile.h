// The inner part of attention: a few lines over one tile of 64 keys, in registers. Only attention.cpp includes this
// file.
#pragma once
#include <algorithm>

#include "attention.h"
#include "tiles.h"

namespace nano {
namespace {

#if defined(NANO_TILES)
template <class T>
constexpr bool BY_TILES = sizeof(T) == 2;  // under the law of tiles
#else
template <class T>
constexpr bool BY_TILES = false;
#endif
// Number of keys weighed together: one float, a pair of bfloat16, or under the law of tiles a group, whose 8 pairs form
// a chunk.
template <class T>
constexpr int UNIT = BY_TILES<T> ? LANES : DEPTH<T>;

// Distance between lines of q: a constant, and not a power of two, which would map lines to few cache sets.
constexpr int NARROW = 256, Q_STRIDE = NARROW + 32, WIDE_STRIDE = MAX_HEAD_DIM + 32;
// score of a masked key, whose weight is 0; finite, since exp2 subtracts it from itself
constexpr float MASKED = -1e30f;

// Lines and vectors per product: as many sums as registers hold.
#if defined(NANO_AVX512)
template <class T>
constexpr int MOST_LINES = BY_TILES<T> ? 2 : 6;
constexpr int MOST_VECS = 4;
#elif defined(NANO_AVX2)
template <class T>
constexpr int MOST_LINES = BY_TILES<T> ? 2 : 4;
constexpr int MOST_VECS = 1;
#elif defined(NANO_NEON)  // the halves of pairs take as many registers as two lines' sums
template <class T>
constexpr int MOST_LINES = BY_TILES<T> ? 2 : 3;
constexpr int MOST_VECS = 1;
#else
template <class T>
constexpr int MOST_LINES = 2;
constexpr int MOST_VECS = 1;
#endif
static_assert(GROUPS % MOST_VECS == 0);
// Type of queries and of values' weights. AVX2 repeats floats only, so bfloat16 is widened once instead of at each use.
#if defined(NANO_AVX2) && !defined(NANO_TILES)
#define NANO_LEFT_FLOATS
template <class T>
using Left = float;
#else
template <class T>
using Left = T;
#endif
#if defined(NANO_AMX)
template <>
constexpr int MOST_LINES<bf16> = 16;  // rows of an AMX tile
#endif

#define NANO_INLINE inline __attribute__((always_inline))
#define NANO_APART __attribute__((noinline))  // so that a function has all registers to itself

NANO_INLINE Pairs load_lanes(const bf16* p) { return bload(p); }
NANO_INLINE Vec load_lanes(const float* p) { return vload(p); }
NANO_INLINE Pairs repeat(const bf16* p) { return bdup(p); }
NANO_INLINE Vec repeat(const float* p) { return vset(*p); }
NANO_INLINE Vec add_product(Vec acc, Pairs a, Pairs b) { return vdot(acc, a, b); }
NANO_INLINE Vec add_product(Vec acc, Vec a, Vec b) { return vfma(a, b, acc); }

NANO_INLINE void store_two(bf16* p, Vec a, Vec b) { vnarrow2(p, a, b); }
NANO_INLINE void store_two(float* p, Vec a, Vec b) { vstore(p, a), vstore(p + LANES, b); }
NANO_INLINE void store_one(bf16* p, Vec a) { vnarrow(p, a); }
NANO_INLINE void store_one(float* p, Vec a) { vstore(p, a); }

// acc[i][j] += a[i][k] * b[j][k] for each k in order. A step of k is a pair of bf16, or one float. Memory at `ahead` is
// prefetched into the L2 cache, because L1 has too few outstanding requests to wait for memory. LDA is a constant, so
// that one register addresses all rows of a.
template <int LDA, class T, int R, int C>
NANO_INLINE void multiply(Vec (&acc)[R][C], const T* a, const T* const (&b)[C], int64_t ldb, int64_t num_steps,
                          const T* const (&ahead)[C]) {
  for (int64_t k = 0; k < num_steps; k++) {
    decltype(load_lanes(b[0])) lanes[C];
    for (int j = 0; j < C; j++) lanes[j] = load_lanes(b[j] + k * ldb), fetch2(ahead[j] + k * ldb);
    for (int i = 0; i < R; i++) {
      auto one = repeat(a + i * LDA + k * DEPTH<T>);
      for (int j = 0; j < C; j++) acc[i][j] = add_product(acc[i][j], one, lanes[j]);
    }
  }
}

#if defined(NANO_LEFT_FLOATS)
// Multiply widened numbers: the second of a pair before the first, as in `vdot`.
template <int LDA, int R, int C>
NANO_INLINE void multiply(Vec (&acc)[R][C], const float* a, const bf16* const (&b)[C], int64_t ldb, int64_t num_steps,
                          const bf16* const (&ahead)[C]) {
  for (int64_t k = 0; k < num_steps; k++) {
    Vec firsts[C], seconds[C];
    for (int j = 0; j < C; j++) {
      const IVec pairs = iload(b[j] + k * ldb);
      firsts[j] = vbits(ishl<16>(pairs)), seconds[j] = vbits(iand(pairs, iset(0xffff0000)));
      fetch2(ahead[j] + k * ldb);
    }
    for (int i = 0; i < R; i++) {
      const Vec one = vset(a[i * LDA + 2 * k + 1]);
      for (int j = 0; j < C; j++) acc[i][j] = vfma(one, seconds[j], acc[i][j]);
    }
    for (int i = 0; i < R; i++) {
      const Vec one = vset(a[i * LDA + 2 * k]);
      for (int j = 0; j < C; j++) acc[i][j] = vfma(one, firsts[j], acc[i][j]);
    }
  }
}
#endif

#if defined(NANO_TILES)
// Multiply in chunks, under the law of tiles.
template <int LDA, int R, int C>
NANO_INLINE void multiply(Vec (&acc)[R][C], const bf16* a, const bf16* const (&b)[C], int64_t ldb, int64_t num_steps,
                          const bf16* const (&ahead)[C]) {
  for (int64_t from = 0; from < num_steps; from += CHUNK) {
    Vec firsts[R][C], seconds[R][C];
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) firsts[i][j] = seconds[i][j] = vset(0);
    for (int64_t k = from; k < std::min(from + CHUNK, num_steps); k++) {
      IVec pairs[C];
      for (int j = 0; j < C; j++) pairs[j] = iload(b[j] + k * ldb), fetch2(ahead[j] + k * ldb);
      for (int i = 0; i < R; i++)
        for (int j = 0; j < C; j++) {
          firsts[i][j] = vfma(vset(widen1(a[i * LDA + 2 * k])), firsts_of(pairs[j]), firsts[i][j]);
          seconds[i][j] = vfma(vset(widen1(a[i * LDA + 2 * k + 1])), seconds_of(pairs[j]), seconds[i][j]);
        }
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) acc[i][j] = vadd(acc[i][j], vadd(firsts[i][j], seconds[i][j]));
  }
}
#endif

// 64 keys and values, in groups of 16.
template <class T>
struct Tile {
  const T *keys[GROUPS], *values[GROUPS];
  const float *key_scales = nullptr, *value_scales = nullptr;  // [KEY_TILE] scales of codes, or null
};

// State of a line, stored as a row of floats (AttentionPlan::state_size).
struct State {
  float* at;

  float& highest() const { return at[0]; }
  float& seen() const { return at[1]; }  // 0: no key seen yet, and the other numbers are undefined
  float* total() const { return at + LANES; }
  float* out() const { return at + 2 * LANES; }
};

// A task for one head during its run.
template <class T>
struct Walk {
  int64_t head_dim, state_size;
  float scale, cap;    // scores in base 2: scale * s, or cap * tanh(scale * s)
  Left<T>* q;          // [lines][q_stride()]
  float *states, *totals;  // [lines][state_size]: of the current segment, and of the segments before it
  int32_t *begins, *positions;  // [lines] first and last key that a line sees
  T* gathered;         // memory for a tile: packed from plain rows, widened from codes, or values made from keys
  float* scales;       // [2][KEY_TILE] scales of codes: keys, then values

  int64_t q_stride() const { return head_dim <= NARROW ? Q_STRIDE : WIDE_STRIDE; }
  State state(int64_t line) const { return {states + line * state_size}; }
  State total(int64_t line) const { return {totals + line * state_size}; }
};

// Range of keys of a tile that a line sees: [begin, end) of 64.
struct Sight {
  int begin, end;
};
template <class T>
NANO_INLINE Sight sight(const Walk<T>& walk, int64_t line, int32_t start) {
  return {std::max(0, walk.begins[line] - start), std::min(walk.positions[line] - start + 1, int32_t(KEY_TILE))};
}

// Weights of values for the lines of a register tile, computed from their scores.
template <class T, int R>
struct Weights {
  alignas(64) Left<T> p[R][KEY_TILE];
  alignas(64) float rescale[LANES] = {};  // per line, the factor of its earlier sums
  Sight sights[R];
};

// Scale and cap the scores of one line, and mask the keys that it does not see. Return the highest score.
NANO_INLINE float mask(Vec (&s)[GROUPS], Vec scale, float cap, Sight sight) {
  for (int j = 0; j < GROUPS; j++) s[j] = vmul(s[j], scale);
  if (cap)
    for (int j = 0; j < GROUPS; j++) s[j] = vmul(vset(cap), vtanh(s[j]));
  if (sight.begin > 0 || sight.end < KEY_TILE) {
    uint64_t visible = (~uint64_t(0) << sight.begin) & (~uint64_t(0) >> (KEY_TILE - sight.end));
    for (int j = 0; j < GROUPS; j++) s[j] = vselect(Mask(visible >> (j * LANES)) & 0xffff, s[j], vset(MASKED));
  }
  return vhighest(vmax(vmax(s[0], s[1]), vmax(s[2], s[3])));
}

// Store the weights of a line, rounded to T.
template <class T>
NANO_INLINE void keep(Left<T>* p, const Vec (&s)[GROUPS]) {
#if defined(NANO_LEFT_FLOATS)
  for (int j = 0; j < GROUPS; j++) vstore(p + j * LANES, sizeof(T) == sizeof(bf16) ? vrounded(s[j]) : s[j]);
#else
  store_two(p, s[0], s[1]), store_two(p + 2 * LANES, s[2], s[3]);
#endif
}

// Turn scores q * k of `num_lines` lines into weights of values, and update the lines' states.
template <class T, int R>
NANO_INLINE void soften(const Walk<T>& walk, int64_t line, int num_lines, int32_t start, const Tile<T>& tile,
                        Vec (&s)[R][GROUPS], Weights<T, R>& weights) {
  const Vec scale = vset(walk.scale);
  float highest[R];
  for (int i = 0; i < num_lines; i++) {
    State state = walk.state(line + i);
    weights.sights[i] = sight(walk, line + i, start);
    if (tile.key_scales)
      for (int j = 0; j < GROUPS; j++) s[i][j] = vmul(s[i][j], vload(tile.key_scales + j * LANES));
    float found = mask(s[i], scale, walk.cap, weights.sights[i]), before = state.highest();
    state.highest() = highest[i] = found > before ? found : before;
    weights.rescale[i] = before - highest[i];
    state.seen() = 1;
  }
  vstore(weights.rescale, vexp2_low(vload(weights.rescale)));
  for (int i = 0; i < num_lines; i++) {
    float* total = walk.state(line + i).total();
    for (int j = 0; j < GROUPS; j++) s[i][j] = vexp2_low(vsub(s[i][j], vset(highest[i])));
    Vec sum = vadd(vadd(s[i][0], s[i][1]), vadd(s[i][2], s[i][3]));
    vstore(total, vfma(vload(total), vset(weights.rescale[i]), sum));
    if (tile.value_scales)
      for (int j = 0; j < GROUPS; j++) s[i][j] = vmul(s[i][j], vload(tile.value_scales + j * LANES));
    keep<T>(weights.p[i], s[i]);
  }
}

template <int STRIDE, class T, int R>
NANO_APART void score(const Walk<T>& walk, int64_t line, int32_t start, const Tile<T>& tile, const Tile<T>& next,
                      Weights<T, R>& weights) {
  Vec s[R][GROUPS];
  for (int first = 0; first < GROUPS; first += MOST_VECS) {
    Vec acc[R][MOST_VECS];
    for (auto& row : acc)
      for (Vec& v : row) v = vset(0);
    const T *keys[MOST_VECS], *ahead[MOST_VECS];
    for (int j = 0; j < MOST_VECS; j++) keys[j] = tile.keys[first + j], ahead[j] = next.keys[first + j];
    multiply<STRIDE>(acc, walk.q + line * STRIDE, keys, LANES * DEPTH<T>, walk.head_dim / DEPTH<T>, ahead);
    for (int i = 0; i < R; i++)
      for (int j = 0; j < MOST_VECS; j++) s[i][first + j] = acc[i][j];
  }
  soften(walk, line, R, start, tile, s, weights);
}

// out = out * rescale + p * values for keys [begin, end), whole units that all lines see; C vectors from `column` on.
template <class T, int R, int C>
NANO_APART void weigh(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const Tile<T>& next, const Weights<T, R>& weights,
           int64_t column, int begin, int end) {
  const int64_t ldb = walk.head_dim * DEPTH<T>, stride = walk.state_size;
  float* out = walk.state(line).out() + column;
  Vec acc[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) acc[i][j] = vmul(vload(out + i * stride + j * LANES), vset(weights.rescale[i]));
#pragma GCC unroll 1
  for (int from = begin; from < end;) {
    int group = from / LANES, to = std::min(end, (group + 1) * LANES);
    int64_t skip = from % LANES * walk.head_dim + column * DEPTH<T>;
    const T *values[C], *ahead[C];
    for (int j = 0; j < C; j++) values[j] = tile.values[group] + skip + j * LANES * DEPTH<T>;
    for (int j = 0; j < C; j++) ahead[j] = next.values[group] + skip + j * LANES * DEPTH<T>;
    multiply<KEY_TILE>(acc, weights.p[0] + from, values, ldb, (to - from) / DEPTH<T>, ahead);
    from = to;
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) vstore(out + i * stride + j * LANES, acc[i][j]);
}

template <class T, int R>
void weigh_all(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const Tile<T>& next,
               const Weights<T, R>& weights, int begin, int end) {
  for (int64_t column = 0; column < walk.head_dim;) {
    int64_t left = (walk.head_dim - column) / LANES, vecs = std::min<int64_t>(left, MOST_VECS);
    // 3 + 2 and 3 + 3 keep more sums busy than 4 + 1 and 4 + 2
    if (MOST_VECS == 4 && (left == 5 || left == 6)) vecs = 3;
    auto run = [&](auto width) {
      if constexpr (decltype(width)::value <= MOST_VECS)
        weigh<T, R, decltype(width)::value>(walk, line, tile, next, weights, column, begin, end);
    };
    if (vecs == 4) run(std::integral_constant<int, 4>());
    if (vecs == 3) run(std::integral_constant<int, 3>());
    if (vecs == 2) run(std::integral_constant<int, 2>());
    if (vecs == 1) run(std::integral_constant<int, 1>());
    column += vecs * LANES;
  }
}

// One step of a single line: keys [begin, end) of a pair or of a group of 16. Other values of the pair count as zero,
// because their memory may contain anything.
NANO_INLINE Vec add_edge(Vec acc, const bf16* p, const bf16* values, [[maybe_unused]] int64_t head_dim, int begin, int end) {
#if defined(NANO_TILES)
  Vec firsts = vset(0), seconds = vset(0);
  for (int key = begin / 2 * 2; key < end; key += 2) {
    const IVec pairs = iload(values + key * head_dim);
    if (key >= begin) firsts = vfma(vset(widen1(p[key])), firsts_of(pairs), firsts);
    if (key + 1 < end) seconds = vfma(vset(widen1(p[key + 1])), seconds_of(pairs), seconds);
  }
  return vadd(acc, vadd(firsts, seconds));
#else
  const IVec halves = iset((begin == 0 ? 0xffffu : 0) | (end == 2 ? 0xffff0000u : 0));
  return vdot(acc, iand(bdup(p), halves), iand(bload(values), halves));
#endif
}
#if defined(NANO_LEFT_FLOATS)
NANO_INLINE Vec add_edge(Vec acc, const float* p, const bf16* values, int64_t, int begin, int end) {
  const IVec pairs = iload(values);
  acc = vfma(vset(end == 2 ? p[1] : 0), end == 2 ? vbits(iand(pairs, iset(0xffff0000))) : vset(0), acc);
  return vfma(vset(begin == 0 ? p[0] : 0), begin == 0 ? vbits(ishl<16>(pairs)) : vset(0), acc);
}
#endif
NANO_INLINE Vec add_edge(Vec acc, const float* p, const float* values, int64_t, int, int) {
  return vfma(vset(*p), vload(values), acc);
}

// Weigh keys [begin, end) for one line.
template <class T>
void weigh_edge(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const Left<T>* p, int begin, int end) {
  constexpr int unit = UNIT<T>;
  float* out = walk.state(line).out();
  for (int64_t d = 0; d < walk.head_dim && begin < end; d += LANES) {
    Vec acc = vload(out + d);
    for (int key = begin / unit * unit; key < end; key += unit) {
      const T* values = tile.values[key / LANES] + key % LANES * walk.head_dim + d * DEPTH<T>;
      acc = add_edge(acc, p + key, values, walk.head_dim, std::max(begin - key, 0), std::min(end - key, unit));
    }
    vstore(out + d, acc);
  }
}

#if defined(NANO_AMX)
// AMX tiles for up to 16 lines. Tiles 0 to 3 are sums, 4 and 5 a chunk of q and of keys. Tiles 6 and 7 are half a
// chunk: the last one of a head whose size is not a multiple of 32, or weights and 16 values.
class LineTiles {
 public:
  void shape(int num_lines) {
    if (num_lines == num_lines_) return;
    num_lines_ = num_lines;
    for (int i = 0; i < 5; i++) shapes_.set(i, num_lines, 64);
    shapes_.set(5, 16, 64), shapes_.set(6, num_lines, 32), shapes_.set(7, 8, 64);
    shapes_.load();
  }

 private:
  TileShapes shapes_;
  int num_lines_ = 0;
};

inline void fetch_all(const bf16* const (&groups)[GROUPS], int64_t head_dim) {
  for (const bf16* group : groups)
    for (int64_t i = 0; i < head_dim * LANES; i += 32) fetch2(group + i);
}

NANO_APART inline void score_in_tiles(const Walk<bf16>& walk, int64_t line, int num_lines, int32_t start, const Tile<bf16>& tile,
                               Weights<bf16, 16>& weights) {
  const int64_t stride = walk.q_stride(), a_row = stride * int64_t(sizeof(bf16)), chunk = 32 * LANES;
  const bf16 *q = walk.q + line * stride, *const(&keys)[GROUPS] = tile.keys;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  const int64_t whole = walk.head_dim / 32;
  for (int64_t c = 0; c < whole; c++) {
    TILE_LOAD(4, q + 32 * c, a_row);
    TILE_LOAD(5, keys[0] + c * chunk, 64);
    TILE_PAIRS(0, 4, 5);
    TILE_LOAD(5, keys[1] + c * chunk, 64);
    TILE_PAIRS(1, 4, 5);
    TILE_LOAD(5, keys[2] + c * chunk, 64);
    TILE_PAIRS(2, 4, 5);
    TILE_LOAD(5, keys[3] + c * chunk, 64);
    TILE_PAIRS(3, 4, 5);
  }
  if (walk.head_dim % 32) {
    TILE_LOAD(6, q + 32 * whole, a_row);
    TILE_LOAD(7, keys[0] + whole * chunk, 64);
    TILE_PAIRS(0, 6, 7);
    TILE_LOAD(7, keys[1] + whole * chunk, 64);
    TILE_PAIRS(1, 6, 7);
    TILE_LOAD(7, keys[2] + whole * chunk, 64);
    TILE_PAIRS(2, 6, 7);
    TILE_LOAD(7, keys[3] + whole * chunk, 64);
    TILE_PAIRS(3, 6, 7);
  }
  Vec s[16][GROUPS];
  TILE_STORE(0, &s[0][0], sizeof(s[0]));
  TILE_STORE(1, &s[0][1], sizeof(s[0]));
  TILE_STORE(2, &s[0][2], sizeof(s[0]));
  TILE_STORE(3, &s[0][3], sizeof(s[0]));
  soften(walk, line, num_lines, start, tile, s, weights);
}

// Weigh values like `weigh`, for all columns. `begin` and `end` are multiples of 16.
NANO_APART inline void weigh_in_tiles(const Walk<bf16>& walk, int64_t line, int num_lines, const Tile<bf16>& tile,
                               const Weights<bf16, 16>& weights, int begin, int end) {
  const int64_t head_dim = walk.head_dim, a_row = walk.state_size * int64_t(sizeof(float)), pair_row = head_dim * 4;
  for (int i = 0; i < num_lines; i++) {
    float* out = walk.state(line + i).out();
    for (int64_t d = 0; d < head_dim; d += LANES) vstore(out + d, vmul(vload(out + d), vset(weights.rescale[i])));
  }
  for (int64_t column = 0; column < head_dim && begin < end; column += 4 * LANES) {
    float* out = walk.state(line).out() + column;
    const int64_t vecs = (head_dim - column) / LANES;
    TILE_LOAD(0, out, a_row);
    if (vecs > 1) TILE_LOAD(1, out + LANES, a_row);
    if (vecs > 2) TILE_LOAD(2, out + 2 * LANES, a_row);
    if (vecs > 3) TILE_LOAD(3, out + 3 * LANES, a_row);
    for (int key = begin; key < end; key += LANES) {
      const bf16* values = tile.values[key / LANES] + 2 * column;
      TILE_LOAD(6, weights.p[0] + key, sizeof(weights.p[0]));
      TILE_LOAD(7, values, pair_row);
      TILE_PAIRS(0, 6, 7);
      if (vecs > 1) {
        TILE_LOAD(7, values + 2 * LANES, pair_row);
        TILE_PAIRS(1, 6, 7);
      }
      if (vecs > 2) {
        TILE_LOAD(7, values + 4 * LANES, pair_row);
        TILE_PAIRS(2, 6, 7);
      }
      if (vecs > 3) {
        TILE_LOAD(7, values + 6 * LANES, pair_row);
        TILE_PAIRS(3, 6, 7);
      }
    }
    TILE_STORE(0, out, a_row);
    if (vecs > 1) TILE_STORE(1, out + LANES, a_row);
    if (vecs > 2) TILE_STORE(2, out + 2 * LANES, a_row);
    if (vecs > 3) TILE_STORE(3, out + 3 * LANES, a_row);
  }
}
#else
struct LineTiles {};
#endif

// Attend `num_lines` lines from `line` on to one tile. The order of keys of each line does not depend on the others.
template <class T, int R>
void attend(const Walk<T>& walk, int64_t line, int num_lines, int32_t start, const Tile<T>& tile, const Tile<T>& next) {
  constexpr int unit = UNIT<T>;
  Weights<T, R> weights;
  if constexpr (R == 16) {
    score_in_tiles(walk, line, num_lines, start, tile, weights);
  } else {
    walk.head_dim <= NARROW ? score<Q_STRIDE>(walk, line, start, tile, next, weights)
                            : score<WIDE_STRIDE>(walk, line, start, tile, next, weights);
  }
  // keys that all lines see, in whole units; first key that any line sees
  int begin = 0, end = KEY_TILE, first = KEY_TILE;
  for (int i = 0; i < num_lines; i++) {
    const Sight sight = weights.sights[i];
    begin = std::max(begin, (sight.begin + unit - 1) / unit * unit);
    end = std::min(end, sight.end / unit * unit);
    first = std::min(first, sight.begin);
  }
  if (begin > end) begin = end = KEY_TILE;
  if (first < begin) {  // some lines begin earlier
    for (int i = 0; i < num_lines; i++) {
      float* out = walk.state(line + i).out();
      for (int64_t d = 0; d < walk.head_dim; d += LANES) vstore(out + d, vmul(vload(out + d), vset(weights.rescale[i])));
      weights.rescale[i] = 1;
      weigh_edge<T>(walk, line + i, tile, weights.p[i], weights.sights[i].begin, std::min(begin, weights.sights[i].end));
    }
  }
  if constexpr (R == 16) weigh_in_tiles(walk, line, num_lines, tile, weights, begin, end);
  else weigh_all<T, R>(walk, line, tile, next, weights, begin, end);
  for (int i = 0; i < num_lines; i++)
    weigh_edge<T>(walk, line + i, tile, weights.p[i], std::max(end, weights.sights[i].begin), weights.sights[i].end);
}

template <class T>
void attend_lines(const Walk<T>& walk, int64_t line, int64_t num_lines, int32_t start, const Tile<T>& tile,
                  const Tile<T>& next, [[maybe_unused]] LineTiles& tiles) {
#if defined(NANO_AMX)
  if constexpr (BY_TILES<T>) {
    tiles.shape(int(num_lines));
    if (next.keys[0] != tile.keys[0]) fetch_all(next.keys, walk.head_dim), fetch_all(next.values, walk.head_dim);
    return attend<T, 16>(walk, line, int(num_lines), start, tile, next);
  } else
#endif
  {
    auto run = [&](auto lines) {
      constexpr int R = decltype(lines)::value;
      if constexpr (R <= MOST_LINES<T>) attend<T, R>(walk, line, R, start, tile, next);
    };
    switch (num_lines) {
      case 1: return run(std::integral_constant<int, 1>());
      case 2: return run(std::integral_constant<int, 2>());
      case 3: return run(std::integral_constant<int, 3>());
      case 4: return run(std::integral_constant<int, 4>());
      case 5: return run(std::integral_constant<int, 5>());
      case 6: return run(std::integral_constant<int, 6>());
    }
  }
}

}  // namespace
}  // namespace nano
