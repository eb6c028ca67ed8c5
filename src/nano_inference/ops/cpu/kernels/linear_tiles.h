// The register tiles of `linear`, for both kinds of numbers.
#pragma once
#include "linear.h"

namespace nano {
namespace {

constexpr int AHEAD = 48;  // steps of k that a panel is fetched before it is used

template <class T>
struct Steps;
template <>
struct Steps<bf16> {  // a step is a pair of columns
  using Wide = Pairs;
  static int64_t count(int64_t columns) { return columns / 2; }
  static Wide weights(const bf16* w, int64_t k) { return bload(w + k * 2 * LANES); }
  static Wide value(const bf16* x, int64_t k) { return bdup(x + 2 * k); }
  static Vec add(Vec sum, Wide x, Wide w) { return vdot(sum, x, w); }
  static constexpr int SIZE = 2 * LANES;
};
template <>
struct Steps<float> {
  using Wide = Vec;
  static int64_t count(int64_t columns) { return columns; }
  static Wide weights(const float* w, int64_t k) { return vload(w + k * LANES); }
  static Wide value(const float* x, int64_t k) { return vset(x[k]); }
  static Vec add(Vec sum, Wide x, Wide w) { return vfma(x, w, sum); }
  static constexpr int SIZE = LANES;
};

enum class Fetch { NONE, STREAMS, PANEL };  // nothing; ahead in every panel of this tile; one panel of the next tile

template <int WIDTH, class T>
inline const T* panel_of(const Panels<T>& w, int j) {
  constexpr int half = (WIDTH + 1) / 2;
  return j < half ? w.low + j * w.size : w.high + (j - half) * w.size;
}

template <class T, int HEIGHT, int WIDTH, Fetch FETCH>
inline void tile(const T* x, int64_t ldx, Panels<T> w, const Segments& segments, Panels<T> next, int next_panel,
                 float* sums) {
  using S = Steps<T>;
  Vec acc[HEIGHT][WIDTH];
  auto span = [&](int64_t from, int64_t to, Panels<T> ahead, int64_t distance) {
    for (int64_t k = from; k < to; k++) {
      typename S::Wide b[WIDTH];
      for (int j = 0; j < WIDTH; j++) {
        b[j] = S::weights(panel_of<WIDTH>(w, j), k);
        if (FETCH == Fetch::STREAMS) fetch(panel_of<WIDTH>(ahead, j) + (k + distance) * S::SIZE);
      }
      if (FETCH == Fetch::PANEL) fetch2(panel_of<WIDTH>(next, next_panel) + k * S::SIZE);
      for (int i = 0; i < HEIGHT; i++) {
        auto a = S::value(x + i * ldx, k);
        for (int j = 0; j < WIDTH; j++) acc[i][j] = S::add(acc[i][j], a, b[j]);
      }
    }
  };
  const int64_t columns = segments.bounds[segments.count], count = S::count(columns);
  const int64_t distance = AHEAD < count ? AHEAD : count, turn = count - distance;  // from there on the next panels come
  alignas(64) float waiting[Segments::DEPTH][HEIGHT * WIDTH * LANES];  // sums of finished pieces, for their partners
  int depth = 0;
  for (int64_t s = 0; s < segments.count; s++) {
    const int64_t from = S::count(segments.bounds[s]), to = S::count(segments.bounds[s + 1]);
    for (int i = 0; i < HEIGHT; i++)
      for (int j = 0; j < WIDTH; j++) acc[i][j] = vset(0.f);
    if (FETCH == Fetch::STREAMS) {
      const int64_t middle = turn < from ? from : turn < to ? turn : to;
      span(from, middle, w, distance);
      span(middle, to, next, -turn);
    } else {
      span(from, to, next, 0);
    }
    if constexpr (sizeof(T) == 2) {
      if ((columns & 1) && s + 1 == segments.count)
        for (int i = 0; i < HEIGHT; i++)
          for (int j = 0; j < WIDTH; j++)
            acc[i][j] = vdot(acc[i][j], bdup_first(x + i * ldx + columns - 1), S::weights(panel_of<WIDTH>(w, j), count));
    }
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      const float* partner = waiting[--depth];
      for (int i = 0; i < HEIGHT; i++)
        for (int j = 0; j < WIDTH; j++) acc[i][j] = vadd(vload(partner + (i * WIDTH + j) * LANES), acc[i][j]);
    }
    float* place = s + 1 < segments.count ? waiting[depth++] : sums;
    for (int i = 0; i < HEIGHT; i++)
      for (int j = 0; j < WIDTH; j++) vstore(place + (i * WIDTH + j) * LANES, acc[i][j]);
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

template <class T, int WIDTH, Fetch FETCH>
inline void tile_of(const Linear<T>& job, int64_t row, int height, int64_t panel, Panels<T> w, Panels<T> next,
                    int next_panel) {
  alignas(64) float sums[ROWS * WIDE * LANES];
  const T* x = job.x + row * job.ldx;
  const Segments segments = job.segments.count ? job.segments : Segments{1, {0, job.w.columns}};
  switch (height) {
    case 1: tile<T, 1, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums); break;
    case 2: tile<T, 2, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums); break;
    case 3: tile<T, 3, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums); break;
#if defined(NANO_AVX512)
    case 4: tile<T, 4, WIDTH, FETCH>(x, job.ldx, w, segments, next, next_panel, sums); break;
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
