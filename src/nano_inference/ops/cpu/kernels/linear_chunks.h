// `linear` of bfloat16 under the law of tiles.
#pragma once
#include "linear_tiles.h"
#include "tiles.h"

namespace nano {
namespace {

constexpr int64_t HALF = 16, BLOCK = 2 * HALF;  // rows of one AMX tile, and of two
constexpr int64_t BLOCKS_AT_ONCE = 8;           // their inputs stay in the L2 cache while panels pass
constexpr int64_t PAIRS_AHEAD = 48;             // prefetch distance for few rows, which wait for memory

// Rows processed together: `x` is the first 16, `lower` the rest, each ldx apart.
struct Rows {
  const bf16 *x, *lower;
  int64_t ldx;
  int height;
  const bf16* row(int64_t i) const { return i < HALF ? x + i * ldx : lower + (i - HALF) * ldx; }
};

// acc[i] += x[i] . panel over the pairs [from, to) of one chunk. An odd last pair has a second number of zero.
template <int HEIGHT>
INLINE inline void add_chunk(Vec (&acc)[HEIGHT], const bf16* x, int64_t ldx, const bf16* panel, int64_t from, int64_t to,
                             int64_t columns) {
  Vec firsts[HEIGHT], seconds[HEIGHT];
  UNROLL for (int i = 0; i < HEIGHT; i++) firsts[i] = seconds[i] = vset(0.f);
  for (int64_t k = from; k < to; k++) {
    const IVec pairs = iload(panel + k * 2 * LANES);
    const Vec first = firsts_of(pairs), second = seconds_of(pairs);
    UNROLL for (int i = 0; i < HEIGHT; i++) firsts[i] = vfma(vset(widen1(x[i * ldx + 2 * k])), first, firsts[i]);
    if (2 * k + 1 < columns)
      UNROLL for (int i = 0; i < HEIGHT; i++) seconds[i] = vfma(vset(widen1(x[i * ldx + 2 * k + 1])), second, seconds[i]);
  }
  UNROLL for (int i = 0; i < HEIGHT; i++) acc[i] = vadd(acc[i], vadd(firsts[i], seconds[i]));
}

// Call add_chunk for all rows and panels. Sums are [height][WIDTH][16].
template <int WIDTH>
void add_chunks(const Rows& rows, const Panels<bf16>& w, int64_t from, int64_t to, int64_t columns, float* sums) {
  for (int64_t k = from; k < to; k += CHUNK)
    for (int j = 0; j < WIDTH; j++) {
      auto add = [&](auto height, int64_t i) INLINE {
        constexpr int HEIGHT = decltype(height)::value;
        Vec acc[HEIGHT];
        float* at = sums + (i * WIDTH + j) * LANES;
        UNROLL for (int h = 0; h < HEIGHT; h++) acc[h] = vload(at + h * WIDTH * LANES);
        add_chunk<HEIGHT>(acc, rows.row(i), rows.ldx, panel_of<WIDTH>(w, j), k, std::min(k + CHUNK, to), columns);
        UNROLL for (int h = 0; h < HEIGHT; h++) vstore(at + h * WIDTH * LANES, acc[h]);
      };
      int64_t i = 0;
      for (; i + 4 <= rows.height; i += 4) add(std::integral_constant<int, 4>(), i);
      for (; i < rows.height; i++) add(std::integral_constant<int, 1>(), i);
    }
}

#if defined(NANO_AMX)
// Add up whole chunks of one row, for which vectors read memory faster than AMX tiles.
template <int WIDTH>
int64_t whole_chunks_of_one(const bf16* x, const Panels<bf16>& w, const Panels<bf16>& next, int64_t from, int64_t to, float* sums) {
  const int64_t size = 2 * LANES, turn = w.size / size - PAIRS_AHEAD;
  Vec acc[WIDTH];
  UNROLL for (int j = 0; j < WIDTH; j++) acc[j] = vset(0.f);
  int64_t k = from;
  for (; k + CHUNK <= to; k += CHUNK) {
    const bf16* ahead[WIDTH];
    UNROLL for (int j = 0; j < WIDTH; j++)
      ahead[j] = k < turn ? panel_of<WIDTH>(w, j) + (k + PAIRS_AHEAD) * size : panel_of<WIDTH>(next, j) + (k - turn) * size;
    Vec firsts[WIDTH], seconds[WIDTH];
    UNROLL for (int j = 0; j < WIDTH; j++) firsts[j] = seconds[j] = vset(0.f);
    for (int64_t pair = 0; pair < CHUNK; pair++) {
      const Vec one = vset(widen1(x[2 * (k + pair)])), two = vset(widen1(x[2 * (k + pair) + 1]));
      UNROLL for (int j = 0; j < WIDTH; j++) {
        const IVec pairs = iload(panel_of<WIDTH>(w, j) + (k + pair) * size);
        fetch(ahead[j] + pair * size);
        firsts[j] = vfma(one, firsts_of(pairs), firsts[j]);
        seconds[j] = vfma(two, seconds_of(pairs), seconds[j]);
      }
    }
    UNROLL for (int j = 0; j < WIDTH; j++) acc[j] = vadd(acc[j], vadd(firsts[j], seconds[j]));
  }
  UNROLL for (int j = 0; j < WIDTH; j++) vstore(sums + j * LANES, acc[j]);
  return k;
}

// Add up whole chunks from pair `from` on, and return the pair after them. Tiles 0 to 3 are sums: one half of the rows
// by four panels, or two halves by two panels. Tiles 4 and 5 are inputs, 6 and 7 weights.
template <int HALVES, int WIDTH>
int64_t whole_chunks(const Rows& rows, const Panels<bf16>& w, const Panels<bf16>& next, int64_t from, int64_t to, bool wait,
                     float* sums) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  const int64_t ldx = rows.ldx * int64_t(sizeof(bf16)), size = 2 * LANES, turn = w.size / size - PAIRS_AHEAD;
  int64_t k = from;
  for (; k + CHUNK <= to; k += CHUNK) {
    if (wait)
      for (int j = 0; j < WIDTH; j++) {
        const bf16* ahead = k < turn ? panel_of<WIDTH>(w, j) + (k + PAIRS_AHEAD) * size : panel_of<WIDTH>(next, j) + (k - turn) * size;
        UNROLL for (int64_t line = 0; line < CHUNK; line++) fetch(ahead + line * size);
      }
    TILE_LOAD(4, rows.x + 2 * k, ldx);
    if constexpr (HALVES == 2) TILE_LOAD(5, rows.lower + 2 * k, ldx);
    TILE_LOAD(6, panel_of<WIDTH>(w, 0) + k * size, 64);
    TILE_PAIRS(0, 4, 6);
    if constexpr (HALVES == 2) TILE_PAIRS(2, 5, 6);
    if constexpr (WIDTH > 1) {
      TILE_LOAD(7, panel_of<WIDTH>(w, 1) + k * size, 64);
      TILE_PAIRS(1, 4, 7);
      if constexpr (HALVES == 2) TILE_PAIRS(3, 5, 7);
    }
    if constexpr (WIDTH == 4) {
      TILE_LOAD(6, panel_of<WIDTH>(w, 2) + k * size, 64);
      TILE_PAIRS(2, 4, 6);
      TILE_LOAD(7, panel_of<WIDTH>(w, 3) + k * size, 64);
      TILE_PAIRS(3, 4, 7);
    }
  }
  constexpr int64_t A_ROW = WIDTH * LANES * sizeof(float);
  TILE_STORE(0, sums, A_ROW);
  if constexpr (WIDTH > 1) TILE_STORE(1, sums + LANES, A_ROW);
  if constexpr (WIDTH == 4) {
    TILE_STORE(2, sums + 2 * LANES, A_ROW);
    TILE_STORE(3, sums + 3 * LANES, A_ROW);
  }
  if constexpr (HALVES == 2) {
    TILE_STORE(2, sums + HALF * WIDTH * LANES, A_ROW);
    if constexpr (WIDTH > 1) TILE_STORE(3, sums + (HALF * WIDTH + 1) * LANES, A_ROW);
  }
  return k;
}
#endif

// Multiply some rows by the panels of one tile. `wait`: these rows are the first to read the panels, and wait for
// memory.
template <int HALVES, int WIDTH>
void block_of(const Linear<bf16>& job, const Rows& rows, int64_t row, int64_t panel, const Panels<bf16>& w,
              const Panels<bf16>& next, bool wait) {
  constexpr int64_t SIZE = HALVES * HALF * WIDTH * LANES;
  alignas(64) float sums[SIZE], waiting[Segments::DEPTH][SIZE];  // waiting: of finished segments, for their partners
  const Segments segments = job.segments.count ? job.segments : Segments{1, {0, job.w.columns}};
  const int64_t used = rows.height * WIDTH * LANES, columns = job.w.columns;
  int depth = 0;
  for (int64_t s = 0; s < segments.count; s++) {
    int64_t from = segments.bounds[s] / 2;
    const int64_t to = (segments.bounds[s + 1] + 1) / 2;
#if defined(NANO_AMX)
    if (WIDTH == 6 || (HALVES == 1 && rows.height == 1))
      from = whole_chunks_of_one<WIDTH>(rows.x, w, next, from, to - (to * 2 > columns), sums);
    else if constexpr (WIDTH < 6)
      from = whole_chunks<HALVES, WIDTH>(rows, w, next, from, to - (to * 2 > columns), wait, sums);
#else
    memset(sums, 0, size_t(used) * sizeof(float));
#endif
    add_chunks<WIDTH>(rows, w, from, to, columns, sums);
    for (int64_t pairs = s; pairs & 1; pairs >>= 1) {  // as a binary counter carries
      const float* partner = waiting[--depth];
      for (int64_t i = 0; i < used; i += LANES) vstore(sums + i, vadd(vload(partner + i), vload(sums + i)));
    }
    if (s + 1 < segments.count) memcpy(waiting[depth++], sums, size_t(used) * sizeof(float));
  }
  finish_tile(job, row, rows.height, panel, WIDTH, sums);
}

// Rows [row, end_row) in blocks. A partial block is copied and padded with zeros, so that all tiles have one shape.
class Blocks {
 public:
  Blocks(const Linear<bf16>& job, int64_t row, int64_t end_row) : job_(job), row_(row), num_rows_(end_row - row) {
    const int64_t left = num_rows_ % BLOCK;
    if (num_rows_ < BLOCK || left == 0) return;
    static thread_local std::vector<bf16> copy;
    copy.assign(size_t(BLOCK * job.w.columns), 0);
    for (int64_t i = 0; i < left; i++)
      memcpy(copy.data() + i * job.w.columns, job.x + (end_row - left + i) * job.ldx, size_t(job.w.columns) * sizeof(bf16));
    left_ = copy.data();
  }
  int64_t count() const { return (num_rows_ + BLOCK - 1) / BLOCK; }
  int64_t row(int64_t index) const { return row_ + index * BLOCK; }
  Rows at(int64_t index) const {
    const int height = int(std::min(BLOCK, num_rows_ - index * BLOCK));
    if (left_ && height < BLOCK) return {left_, left_ + HALF * job_.w.columns, job_.w.columns, height};
    const bf16* x = job_.x + row(index) * job_.ldx;
    return {x, x + HALF * job_.ldx, job_.ldx, height};
  }

 private:
  const Linear<bf16>& job_;
  const int64_t row_, num_rows_;
  const bf16* left_ = nullptr;
};

void walk_chunks(const Linear<bf16>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<bf16> after) {
  if (row >= end_row || panel >= end_panel) return;
  const Blocks blocks(job, row, end_row);
  const int64_t num_rows = end_row - row;
  const bool one_half = num_rows <= HALF;
#if defined(NANO_AMX)
  TileShapes shapes;
  const int64_t upper = std::min(num_rows, HALF), lower = std::min(num_rows - upper, HALF);
  for (int i = 0; i < 4; i++) shapes.set(i, one_half || i < 2 ? upper : lower, 64);
  shapes.set(4, upper, 64), shapes.set(5, one_half ? upper : lower, 64), shapes.set(6, HALF, 64), shapes.set(7, HALF, 64);
  if (num_rows > 1) shapes.load();
#endif
  for (int64_t first = 0; first < blocks.count(); first += BLOCKS_AT_ONCE) {
    int64_t at = panel;
    auto run = [&](auto width) {
      constexpr int WIDTH = decltype(width)::value;
      const int64_t step = job.gated() ? WIDTH / 2 : WIDTH;
      for (; at + step <= end_panel; at += step) {
        const Panels<bf16> w = panels_at(job, at, WIDTH);
        const bool more = at + 2 * step <= end_panel;
        const Panels<bf16> next = more ? panels_at(job, at + step, WIDTH) : after.low ? after : w;
        for (int64_t b = first; b < std::min(first + BLOCKS_AT_ONCE, blocks.count()); b++) {
          const Rows rows = blocks.at(b);
          if constexpr (WIDTH <= 2)
            if (rows.height > HALF) {
              block_of<2, WIDTH>(job, rows, blocks.row(b), at, w, next, b == first);
              continue;
            }
          block_of<1, WIDTH>(job, rows, blocks.row(b), at, w, next, b == first);
        }
      }
    };
    if (num_rows == 1) run(std::integral_constant<int, 6>());
    if (one_half) run(std::integral_constant<int, 4>());
    run(std::integral_constant<int, 2>());
    if (!job.gated()) run(std::integral_constant<int, 1>());
  }
}

}  // namespace
}  // namespace nano
