// Register tiles of `linear`, for both types.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear.h"

namespace nano {
namespace {

// Prefetch distance in steps of k. With two panels, 48 steps are more lines than a Zen 3 can have in flight.
#if defined(NANO_AVX2)
template <int WIDTH>
constexpr int64_t AHEAD = WIDTH == 1 ? 48 : 16;
#else
template <int WIDTH>
constexpr int64_t AHEAD = 48;
#endif

template <int WIDTH, class T>
inline const T* panel_of(const Panels<T>& w, int j) {
  constexpr int half = (WIDTH + 1) / 2;
  return j < half ? w.low + j * w.size : w.high + (j - half) * w.size;
}

// Input type of tiles. If bfloat16 is multiplied as floats, rows are widened once for all panels. A tile then
// broadcasts their numbers from memory without extra instructions.
template <class T>
struct InputOf {
  using Type = T;
};
#if defined(NANO_AVX2) || defined(NANO_NEON) || (defined(NANO_AVX512) && !defined(NANO_BF16))
#define NANO_WIDENED
template <>
struct InputOf<bf16> {
  using Type = float;
};
#endif
template <class T>
using Input = typename InputOf<T>::Type;
constexpr int64_t WIDENED_ROWS = 64;  // widened together: they stay in the L2 cache while panels pass

// Rows of x from row `first` on, `stride` apart.
template <class T>
struct InputRows {
  const Input<T>* x;
  int64_t stride, first;
  const Input<T>* row(int64_t index) const { return x + (index - first) * stride; }
};

// Sums that are indexed by a variable, or passed to a function by address, would be stored in memory.
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline))

// sum += a * b in the sum's own register. With intrinsics, compilers put sums into the registers of a or b and run out
// of registers.
#if defined(NANO_EMULATED)  // AVX-512 in tests, on a processor without it
INLINE inline void add_product(__m512& sum, __m512 a, __m512 b) { sum = _mm512_fmadd_ps(a, b, sum); }
#elif defined(NANO_AVX512) && defined(NANO_WIDENED)
INLINE inline void add_product(__m512& sum, __m512 a, __m512 b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
#elif defined(NANO_AVX2)
INLINE inline void add_product(__m256& sum, __m256 a, __m256 b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

alignas(32) constexpr uint32_t UPPER[] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                          0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// The second numbers of eight pairs. Three rows of two panels leave no register for the mask.
template <bool MASK_IN_MEMORY>
INLINE inline __m256i seconds(__m256i pairs) {
  if constexpr (!MASK_IN_MEMORY) return _mm256_and_si256(pairs, _mm256_set1_epi32(int(UPPER[0])));
  asm("vpand %1, %0, %0" : "+x"(pairs) : "m"(UPPER));
  return pairs;
}

// acc[i][j] += x[i * ldx] * b for all i, where load(0) and load(1) are the halves of b. Up to four rows process one
// half after the other, because with so few sums no sum may wait for its row's number. More rows leave no registers for
// all these numbers.
template <int HEIGHT, int WIDTH, class F>
INLINE inline void by_halves(Vec (&acc)[HEIGHT][WIDTH], int j, const float* x, int64_t ldx, F load) {
  if constexpr (HEIGHT <= 4) {
    __m256 a[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) a[i] = _mm256_broadcast_ss(x + i * ldx);
    const __m256 low = load(0);
    UNROLL for (int i = 0; i < HEIGHT; i++) add_product(acc[i][j].lo, a[i], low);
    const __m256 high = load(1);
    UNROLL for (int i = 0; i < HEIGHT; i++) add_product(acc[i][j].hi, a[i], high);
  } else {
    const __m256 low = load(0), high = load(1);
    UNROLL for (int i = 0; i < HEIGHT; i++) {
      const __m256 a = _mm256_broadcast_ss(x + i * ldx);
      add_product(acc[i][j].lo, a, low);
      add_product(acc[i][j].hi, a, high);
    }
  }
}
#endif
#if defined(NANO_NEON)
// acc[i][j] += a[i] * b for all i, where load(p) is a quarter of b, two quarters at a time: 24 sums leave no room for
// more. A compiler that loads as early as possible would spill sums to memory. The asm statement makes the next address
// depend on the sums before it, for the compiler only: the processor sees no such dependency.
template <class T, int HEIGHT, int WIDTH, class F>
INLINE inline void by_quarters(Vec (&acc)[HEIGHT][WIDTH], int j, const Vec (&a)[HEIGHT], const T* panel, int64_t size,
                               int64_t& k, F load) {
  constexpr int STEP = 16 / sizeof(T);
  const T* p = panel + k * size;
  float32x4_t b = load(p), next = load(p + STEP);
  UNROLL for (int i = 0; i < HEIGHT; i++) {
    acc[i][j].q0 = vfmaq_f32(acc[i][j].q0, a[i].q0, b);
    acc[i][j].q1 = vfmaq_f32(acc[i][j].q1, a[i].q1, next);
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) asm("" : "+r"(p), "+w"(acc[i][j].q0), "+w"(acc[i][j].q1));
  b = load(p + 2 * STEP), next = load(p + 3 * STEP);
  UNROLL for (int i = 0; i < HEIGHT; i++) {
    acc[i][j].q2 = vfmaq_f32(acc[i][j].q2, a[i].q2, b);
    acc[i][j].q3 = vfmaq_f32(acc[i][j].q3, a[i].q3, next);
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) asm("" : "+r"(k), "+w"(acc[i][j].q2), "+w"(acc[i][j].q3));
}
#endif

template <class T>
struct Steps;
template <>
struct Steps<bf16> {  // a step is a pair of columns
  static constexpr int SIZE = 2 * LANES;
  // Widened rows may have a zero after the last column.
  static int64_t count(int64_t columns) { return (columns + (sizeof(Input<bf16>) == 4)) / 2; }

  template <int HEIGHT, int WIDTH>
  INLINE static void add(Vec (&acc)[HEIGHT][WIDTH], const Input<bf16>* x, int64_t ldx, const Panels<bf16>& w, int64_t k) {
#if defined(NANO_AVX2) || defined(NANO_NEON)
    half<0>(acc, x + 2 * k + 1, ldx, w, k);
#if defined(NANO_AVX2)
    // For the compiler, the loads of the second half depend on the first: it has no free registers before that.
    UNROLL for (int i = 0; i < HEIGHT; i++)
      UNROLL for (int j = 0; j < WIDTH; j++) asm("" : "+r"(k), "+x"(acc[i][j].lo), "+x"(acc[i][j].hi));
#endif
    half<1>(acc, x + 2 * k, ldx, w, k);
#elif defined(NANO_WIDENED)
    half<0>(acc, x + 2 * k + 1, ldx, w, k);
    half<1>(acc, x + 2 * k, ldx, w, k);
#else
    Pairs b[WIDTH];
    for (int j = 0; j < WIDTH; j++) b[j] = bload(panel_of<WIDTH>(w, j) + k * SIZE);
    for (int i = 0; i < HEIGHT; i++) {
      const Pairs a = bdup(x + i * ldx + 2 * k);
      for (int j = 0; j < WIDTH; j++) acc[i][j] = vdot(acc[i][j], a, b[j]);
    }
#endif
  }

#if defined(NANO_WIDENED)
 private:
  // `vdot` in two halves, the second number of each pair first. Registers hold the sums and the numbers of one half
  // only.
  template <int HALF, int HEIGHT, int WIDTH>
  INLINE static void half(Vec (&acc)[HEIGHT][WIDTH], const float* x, int64_t ldx, const Panels<bf16>& w, int64_t& k) {
#if defined(NANO_AVX512)
    Vec a[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) a[i] = vset(x[i * ldx]);
#endif
    UNROLL for (int j = 0; j < WIDTH; j++) {
#if defined(NANO_NEON)
      Vec a[HEIGHT];
      UNROLL for (int i = 0; i < HEIGHT; i++) a[i] = vset(x[i * ldx]);
      by_quarters(acc, j, a, panel_of<WIDTH>(w, j), SIZE, k, [](const bf16* p) INLINE {
        const uint32x4_t pairs = words_at(p);
        return vreinterpretq_f32_u32(HALF ? vshlq_n_u32(pairs, 16) : vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
      });
#elif defined(NANO_AVX512)
      const IVec pairs = iload(panel_of<WIDTH>(w, j) + k * SIZE);
      const Vec b = vbits(HALF ? ishl<16>(pairs) : iand(pairs, iset(0xffff0000)));
      UNROLL for (int i = 0; i < HEIGHT; i++) add_product(acc[i][j], a[i], b);
#else
      const auto* p = reinterpret_cast<const __m256i*>(panel_of<WIDTH>(w, j) + k * SIZE);
      by_halves(acc, j, x, ldx, [&](int part) INLINE {
        const __m256i pairs = _mm256_loadu_si256(p + part);
        return _mm256_castsi256_ps(HALF ? _mm256_slli_epi32(pairs, 16) : seconds<HEIGHT == 3>(pairs));
      });
#endif
    }
  }
#endif
};
template <>
struct Steps<float> {
  static constexpr int SIZE = LANES;
  static int64_t count(int64_t columns) { return columns; }

  template <int HEIGHT, int WIDTH>
  INLINE static void add(Vec (&acc)[HEIGHT][WIDTH], const float* x, int64_t ldx, const Panels<float>& w, int64_t k) {
#if defined(NANO_NEON)
    Vec a[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) a[i] = vset(x[i * ldx + k]);
    UNROLL for (int j = 0; j < WIDTH; j++)
      by_quarters(acc, j, a, panel_of<WIDTH>(w, j), SIZE, k, [](const float* p) INLINE { return vld1q_f32(p); });
#elif defined(NANO_AVX2)
    UNROLL for (int j = 0; j < WIDTH; j++) {
      const float* p = panel_of<WIDTH>(w, j) + k * SIZE;
      by_halves(acc, j, x + k, ldx, [&](int part) INLINE { return _mm256_loadu_ps(p + 8 * part); });
    }
#else
    Vec b[WIDTH];
    UNROLL for (int j = 0; j < WIDTH; j++) b[j] = vload(panel_of<WIDTH>(w, j) + k * SIZE);
    UNROLL for (int i = 0; i < HEIGHT; i++) {
      const Vec a = vset(x[i * ldx + k]);
      UNROLL for (int j = 0; j < WIDTH; j++) acc[i][j] = vfma(a, b[j], acc[i][j]);
    }
#endif
  }
};

// Prefetch nothing; ahead in every panel of this tile; a panel of the next tile; half of one, a line in every second
// step.
enum class Fetch { NONE, STREAMS, PANEL, HALF };

// `stride`: sums per row. Never inlined, so that it has all registers to itself.
template <class T, int HEIGHT, int WIDTH, Fetch FETCH>
__attribute__((noinline)) void tile(const Input<T>* x, int64_t ldx, Panels<T> w, const Segments& segments,
                                    Panels<T> next, int next_panel, float* sums, int stride) {
  using S = Steps<T>;
  Vec acc[HEIGHT][WIDTH];
  auto span = [&](int64_t from, int64_t to, Panels<T> ahead, int64_t distance) INLINE {
    for (int64_t k = from; k < to; k++) {
      if (FETCH == Fetch::STREAMS)
        UNROLL for (int j = 0; j < WIDTH; j++) fetch(panel_of<WIDTH>(ahead, j) + (k + distance) * S::SIZE);
      if (FETCH == Fetch::PANEL) fetch2(panel_of<WIDTH>(next, next_panel) + k * S::SIZE);
      if (FETCH == Fetch::HALF) fetch2(next.low + k / 2 * S::SIZE);
      S::template add<HEIGHT, WIDTH>(acc, x, ldx, w, k);
    }
  };
  const int64_t columns = segments.bounds[segments.count], count = S::count(columns);
  const int64_t distance = AHEAD<WIDTH> < count ? AHEAD<WIDTH> : count, turn = count - distance;  // from `turn` on: the next panels
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * WIDTH * LANES];  // sums of finished segments, for their partners
  int depth = 0;
  for (int64_t s = 0; s < segments.count; s++) {
    const int64_t from = S::count(segments.bounds[s]), to = S::count(segments.bounds[s + 1]);
    UNROLL for (int i = 0; i < HEIGHT; i++)
      UNROLL for (int j = 0; j < WIDTH; j++) acc[i][j] = vset(0.f);
    if (FETCH == Fetch::STREAMS) {
      const int64_t middle = turn < from ? from : turn < to ? turn : to;
      span(from, middle, w, distance);
      span(middle, to, next, -turn);
    } else {
      span(from, to, next, 0);
    }
    if constexpr (sizeof(Input<T>) == 2) {
      if ((columns & 1) && s + 1 == segments.count)
        UNROLL for (int i = 0; i < HEIGHT; i++)
          UNROLL for (int j = 0; j < WIDTH; j++)
            acc[i][j] = vdot(acc[i][j], bdup_first(x + i * ldx + columns - 1), bload(panel_of<WIDTH>(w, j) + count * S::SIZE));
    }
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      const float* partner = waiting[--depth];
      UNROLL for (int i = 0; i < HEIGHT; i++)
        UNROLL for (int j = 0; j < WIDTH; j++) acc[i][j] = vadd(vload(partner + (i * WIDTH + j) * LANES), acc[i][j]);
    }
    const bool is_last = s + 1 == segments.count;
    float* place = is_last ? sums : waiting[depth++];
    const int a_row = is_last ? stride : WIDTH;
    UNROLL for (int i = 0; i < HEIGHT; i++)
      UNROLL for (int j = 0; j < WIDTH; j++) vstore(place + (i * a_row + j) * LANES, acc[i][j]);
  }
}

template <class T>
inline Vec load_as_float(const T* p, int n) {
  if constexpr (sizeof(T) == 4) {
    return vload_n(p, n);
  } else {
    if (n >= LANES) return vwiden(p);
    bf16 some[LANES] = {};
    memcpy(some, p, 2 * size_t(n));
    return vwiden(some);
  }
}

template <class T>
inline void finish_tile(const Linear<T>& job, int64_t row, int height, int64_t panel, int width, const float* sums) {
  if (job.gated()) {
    const int half = width / 2;
    for (int i = 0; i < height; i++)
      for (int j = 0; j < half; j++) {
        const float* s = sums + (i * width + j) * LANES;
        const int64_t column = (panel + j) * LANES;
        Vec first = vload(s), second = vload(s + half * LANES);
        if (job.bias) {
          first = vadd(first, load_as_float(job.bias + column, LANES));
          second = vadd(second, load_as_float(job.bias + job.w.rows / 2 + column, LANES));
        }
        Vec v = gated(first, second, job.finish);
        T* out = static_cast<T*>(job.out) + (row + i) * job.ldo + column;
        if constexpr (sizeof(T) == 2)
          vnarrow(out, v);
        else
          vstore(out, v);
      }
    return;
  }
  for (int i = 0; i < height; i++)
    for (int j = 0; j < width; j++) {
      const int64_t column = (panel + j) * LANES;
      const int n = job.padded || job.w.rows - column >= LANES ? LANES : int(job.w.rows - column);
      float* out = static_cast<float*>(job.out) + (row + i) * job.ldo + column;
      Vec v = vload(sums + (i * width + j) * LANES);
      if (job.bias) v = vadd(v, load_as_float(job.bias + column, n));
      if (job.finish == Finish::ADD) v = vfma(v, vset(job.scale), vload_n(out, n));
      vstore_n(out, v, n);
    }
}

// Process the panels of a tile one by one. Each prefetches the following panel, or its part of the next tile's panel.
template <class T, int HEIGHT, int WIDTH, Fetch FETCH>
inline void one_by_one(const Input<T>* x, int64_t ldx, Panels<T> w, const Segments& segments, Panels<T> next, int next_panel,
                       float* sums) {
  constexpr Fetch OWN = FETCH == Fetch::PANEL && WIDTH == 2 ? Fetch::HALF : FETCH;
  for (int j = 0; j < WIDTH; j++) {
    const T* after = FETCH == Fetch::PANEL ? panel_of<WIDTH>(next, next_panel) + j * (w.size / WIDTH)
                     : j + 1 < WIDTH       ? panel_of<WIDTH>(w, j + 1)
                                           : panel_of<WIDTH>(next, 0);
    tile<T, HEIGHT, 1, OWN>(x, ldx, {panel_of<WIDTH>(w, j), nullptr, w.size}, segments, {after, nullptr, w.size}, 0,
                            sums + j * LANES, WIDTH);
  }
}

template <class T, int WIDTH, Fetch FETCH>
inline void tile_of(const Linear<T>& job, const InputRows<T>& inputs, int64_t row, int height, int64_t panel, Panels<T> w, Panels<T> next,
                    int next_panel) {
  alignas(64) float sums[ROWS * WIDE * LANES];
  const Input<T>* x = inputs.row(row);
  const int64_t ldx = inputs.stride;
  const Segments segments = job.segments.count ? job.segments : Segments{1, {0, job.w.columns}};
  switch (height) {
    case 1: tile<T, 1, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
    case 2: tile<T, 2, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
    case 3: tile<T, 3, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
#if defined(NANO_AVX2)  // more rows leave registers for the sums of one panel only
    case 4: one_by_one<T, 4, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums); break;
    case 5: one_by_one<T, 5, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums); break;
    case 6: one_by_one<T, 6, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums); break;
#elif defined(NANO_AVX512)
    case 4: tile<T, 4, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
#if !defined(NANO_BF16)
    case 5: tile<T, 5, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
    case 6: tile<T, 6, WIDTH, FETCH>(x, ldx, w, segments, next, next_panel, sums, WIDTH); break;
#endif
#endif
  }
  finish_tile(job, row, height, panel, WIDTH, sums);
}

// Process all rows of one tile's panels. Few rows wait for memory, so they prefetch. The last of many rows prefetch
// `next`.
template <class T, int WIDTH>
inline void column_of_tiles(const Linear<T>& job, const InputRows<T>& inputs, int64_t row, int64_t end_row, int64_t panel, Panels<T> w,
                            Panels<T> next, bool more) {
  const int64_t num_rows = end_row - row, num_tiles = (num_rows + ROWS - 1) / ROWS;
  for (int64_t t = 0; t < num_tiles; t++) {
    const int64_t from = row + num_rows * t / num_tiles, to = row + num_rows * (t + 1) / num_tiles;
    const int height = int(to - from);
    const int64_t next_panel = t - (num_tiles - WIDTH);
    if (num_tiles < WIDTH && t == 0)
      tile_of<T, WIDTH, Fetch::STREAMS>(job, inputs, from, height, panel, w, next, 0);
    else if (num_tiles >= WIDTH && next_panel >= 0 && more)
      tile_of<T, WIDTH, Fetch::PANEL>(job, inputs, from, height, panel, w, next, int(next_panel));
    else
      tile_of<T, WIDTH, Fetch::NONE>(job, inputs, from, height, panel, w, next, 0);
  }
}

template <class T>
class Walk {
 public:
  Walk(const Linear<T>& job, const InputRows<T>& inputs, int64_t end_row, int64_t panel, int64_t end_panel, Panels<T> after)
      : job_(job), inputs_(inputs), end_row_(end_row), panel_(panel), end_(end_panel), after_(after) {}

  template <int WIDTH>
  void run() {  // process as many tiles of this width as possible
    const int step = job_.gated() ? WIDTH / 2 : WIDTH;
    for (; panel_ + step <= end_; panel_ += step) {
      const bool more = panel_ + 2 * step <= end_;
      const Panels<T> w = panels_at(job_, panel_, WIDTH);
      column_of_tiles<T, WIDTH>(job_, inputs_, inputs_.first, end_row_, panel_, w,
                                more ? panels_at(job_, panel_ + step, WIDTH) : after_.low ? after_ : w, more || after_.low);
    }
  }

 private:
  const Linear<T>& job_;
  const InputRows<T>& inputs_;
  const int64_t end_row_;
  int64_t panel_;
  const int64_t end_;
  const Panels<T> after_;
};

template <class T>
void walk_panels(const Linear<T>& job, const InputRows<T>& inputs, int64_t end_row, int64_t panel, int64_t end_panel,
                 Panels<T> next) {
  Walk<T> walk(job, inputs, end_row, panel, end_panel, next);
#if defined(NANO_AVX512)
  if constexpr (WIDE == 6) walk.template run<6>();
  walk.template run<4>();
#endif
  walk.template run<2>();
  if (!job.gated()) walk.template run<1>();
}

template <class T>
void walk(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<T> next) {
  if (row >= end_row || panel >= end_panel) return;
  if constexpr (std::is_same_v<Input<T>, T>) {
    walk_panels<T>(job, {job.x + row * job.ldx, job.ldx, row}, end_row, panel, end_panel, next);
  } else {
    static thread_local std::vector<float> wide;
    // Rows a power of two apart would map to few cache sets.
    const int64_t columns = job.w.columns, stride = (columns / LANES + 2) * LANES;
    for (int64_t from = row, to; from < end_row; from = to) {
      to = std::min(from + WIDENED_ROWS, end_row);
      wide.resize(size_t((to - from) * stride));
      for (int64_t i = from; i < to; i++)
        for (int64_t k = 0; k < columns; k += LANES)  // zeros after the last column
          vstore(wide.data() + (i - from) * stride + k,
                 load_as_float(job.x + i * job.ldx + k, int(std::min<int64_t>(LANES, columns - k))));
      walk_panels<T>(job, {wide.data(), stride, from}, to, panel, end_panel, next);
    }
  }
}

}  // namespace
}  // namespace nano
