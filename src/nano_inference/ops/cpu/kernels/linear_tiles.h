// The register tiles of `linear`, for both kinds of numbers.
#pragma once
#include "linear.h"

namespace nano {
namespace {

constexpr int AHEAD = 48;  // steps of k that a panel is fetched before it is used

template <int WIDTH, class T>
inline const T* panel_of(const Panels<T>& w, int j) {
  constexpr int half = (WIDTH + 1) / 2;
  return j < half ? w.low + j * w.size : w.high + (j - half) * w.size;
}

// Sums that a variable looks up, or that a function gets by their address, would lie in memory.
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline))

#if defined(NANO_NEON)
// acc[i][j] += a[i] * b for all i, where load(p) is a quarter of b; two quarters at a time. Beside 24 sums there is no
// room for more, and a compiler that loads as early as it can would put sums into memory for it: so the next address
// waits, in its eyes, for the sums before it. The processor itself sees no such thing.
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
  static int64_t count(int64_t columns) { return columns / 2; }

  template <int HEIGHT, int WIDTH>
  INLINE static void add(Vec (&acc)[HEIGHT][WIDTH], const bf16* x, int64_t ldx, const Panels<bf16>& w, int64_t k) {
#if defined(NANO_AVX2) || defined(NANO_NEON)
    half<0>(acc, x, ldx, w, k);
    asm("" : "+r"(k));  // the second half loads anew: what the first one has loaded would take its registers
    half<1>(acc, x, ldx, w, k);
#else
    Pairs b[WIDTH];
    for (int j = 0; j < WIDTH; j++) b[j] = bload(panel_of<WIDTH>(w, j) + k * SIZE);
    for (int i = 0; i < HEIGHT; i++) {
      const Pairs a = bdup(x + i * ldx + 2 * k);
      for (int j = 0; j < WIDTH; j++) acc[i][j] = vdot(acc[i][j], a, b[j]);
    }
#endif
  }

 private:
  // `vdot` in two halves. The registers hold the sums, and the numbers of one half only.
  template <int HALF>
  static Vec part(Pairs b) {
    return vbits(HALF ? ishl<16>(b) : iand(b, iset(0xffff0000)));
  }
  template <int HALF, int HEIGHT, int WIDTH>
  INLINE static void half(Vec (&acc)[HEIGHT][WIDTH], const bf16* x, int64_t ldx, const Panels<bf16>& w, int64_t& k) {
    Vec a[HEIGHT];
    UNROLL for (int i = 0; i < HEIGHT; i++) a[i] = part<HALF>(bdup(x + i * ldx + 2 * k));
    UNROLL for (int j = 0; j < WIDTH; j++) {
#if defined(NANO_NEON)
      by_quarters(acc, j, a, panel_of<WIDTH>(w, j), SIZE, k, [](const bf16* p) INLINE {
        const uint32x4_t pairs = words_at(p);
        return vreinterpretq_f32_u32(HALF ? vshlq_n_u32(pairs, 16) : vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
      });
#else
      const Vec b = part<HALF>(bload(panel_of<WIDTH>(w, j) + k * SIZE));
      UNROLL for (int i = 0; i < HEIGHT; i++) acc[i][j] = vfma(a[i], b, acc[i][j]);
#endif
    }
  }
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
#else
    Vec b[WIDTH];
    UNROLL for (int j = 0; j < WIDTH; j++) {
      b[j] = vload(panel_of<WIDTH>(w, j) + k * SIZE);
#if defined(NANO_AVX2)
      asm("" : "+x"(b[j].lo), "+x"(b[j].hi));  // loaded once, not by the product of every row
#endif
    }
    UNROLL for (int i = 0; i < HEIGHT; i++) {
      const Vec a = vset(x[i * ldx + k]);
      UNROLL for (int j = 0; j < WIDTH; j++) acc[i][j] = vfma(a, b[j], acc[i][j]);
    }
#endif
  }
};

// Nothing; ahead in every panel of this tile; a panel of the next tile; half of one, a line in every second step.
enum class Fetch { NONE, STREAMS, PANEL, HALF };

// `stride`: sums of a row.
template <class T, int HEIGHT, int WIDTH, Fetch FETCH>
inline void tile(const T* x, int64_t ldx, Panels<T> w, const Segments& segments, Panels<T> next, int next_panel,
                 float* sums, int stride) {
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
  const int64_t distance = AHEAD < count ? AHEAD : count, turn = count - distance;  // from there on the next panels come
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * WIDTH * LANES];  // sums of finished pieces, for their partners
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
    if constexpr (sizeof(T) == 2) {
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

// The panels of a tile after each other. Each fetches what comes behind it, or its part of the next tile's panel.
template <class T, int HEIGHT, int WIDTH, Fetch FETCH>
inline void one_by_one(const T* x, int64_t ldx, Panels<T> w, const Segments& segments, Panels<T> next, int next_panel,
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
inline void tile_of(const Linear<T>& job, int64_t row, int height, int64_t panel, Panels<T> w, Panels<T> next,
                    int next_panel) {
  alignas(64) float sums[ROWS * WIDE * LANES];
  const T* x = job.x + row * job.ldx;
  const Segments segments = job.segments.count ? job.segments : Segments{1, {0, job.w.columns}};
  switch (height) {
    case 1: tile<T, 1, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums, WIDTH); break;
    case 2: tile<T, 2, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums, WIDTH); break;
#if defined(NANO_AVX2)  // more rows leave registers for the sums of one panel
    case 3:
      if constexpr (FETCH == Fetch::STREAMS && sizeof(T) == 4)  // two streams bring more than one
        tile<T, 3, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums, WIDTH);
      else
        one_by_one<T, 3, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums);
      break;
    case 4: one_by_one<T, 4, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums); break;
#else
    case 3: tile<T, 3, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums, WIDTH); break;
#endif
#if defined(NANO_AVX512)
    case 4: tile<T, 4, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums, WIDTH); break;
#endif
  }
  finish_tile(job, row, height, panel, WIDTH, sums);
}

// All rows of one tile's panels. Few rows wait for memory, so they fetch ahead; the last of many rows fetch what comes.
template <class T, int WIDTH>
inline void column_of_tiles(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, Panels<T> w,
                            Panels<T> next, bool more) {
  const int64_t num_rows = end_row - row, num_tiles = (num_rows + ROWS - 1) / ROWS;
  for (int64_t t = 0; t < num_tiles; t++) {
    const int64_t from = row + num_rows * t / num_tiles, to = row + num_rows * (t + 1) / num_tiles;
    const int height = int(to - from);
    const int64_t next_panel = t - (num_tiles - WIDTH);
    if (num_tiles < WIDTH && t == 0)
      tile_of<T, WIDTH, Fetch::STREAMS>(job, from, height, panel, w, next, 0);
    else if (num_tiles >= WIDTH && next_panel >= 0 && more)
      tile_of<T, WIDTH, Fetch::PANEL>(job, from, height, panel, w, next, int(next_panel));
    else
      tile_of<T, WIDTH, Fetch::NONE>(job, from, height, panel, w, next, 0);
  }
}

template <class T>
class Walk {
 public:
  Walk(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<T> after)
      : job_(job), row_(row), end_row_(end_row), panel_(panel), end_(end_panel), after_(after) {}

  template <int WIDTH>
  void run() {  // panels in tiles of this width, as many as there are
    const int step = job_.gated() ? WIDTH / 2 : WIDTH;
    for (; panel_ + step <= end_; panel_ += step) {
      const bool more = panel_ + 2 * step <= end_;
      const Panels<T> w = panels_at(job_, panel_, WIDTH);
      column_of_tiles<T, WIDTH>(job_, row_, end_row_, panel_, w,
                                more ? panels_at(job_, panel_ + step, WIDTH) : after_.low ? after_ : w, more || after_.low);
    }
  }

 private:
  const Linear<T>& job_;
  const int64_t row_, end_row_;
  int64_t panel_;
  const int64_t end_;
  const Panels<T> after_;
};

template <class T>
void walk(const Linear<T>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<T> next) {
  if (row >= end_row || panel >= end_panel) return;
  Walk<T> walk(job, row, end_row, panel, end_panel, next);
#if defined(NANO_AVX512)
  walk.template run<6>();
  walk.template run<4>();
#endif
  walk.template run<2>();
  if (!job.gated()) walk.template run<1>();
}

}  // namespace
}  // namespace nano
