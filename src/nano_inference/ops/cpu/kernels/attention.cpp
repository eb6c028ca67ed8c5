#include "attention.h"

#include <algorithm>

namespace nano {
namespace {

using Plan = AttentionPlan;

constexpr float MASKED = -1e30f;  // a score that weighs nothing; finite, since exp2 subtracts it from itself

// Lines by vectors of a product: as many sums as there are registers for.
#if defined(NANO_AVX512)
constexpr int MOST_LINES = 6, MOST_VECS = 4;
#elif defined(NANO_AVX2)
constexpr int MOST_LINES = 3, MOST_VECS = 1;
#else
constexpr int MOST_LINES = 2, MOST_VECS = 1;
#endif
static_assert(GROUPS % MOST_VECS == 0);

#define NANO_INLINE inline __attribute__((always_inline))

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

// acc[i][j] += a[i][k] * b[j][k] for each k in order; a step of k is a pair of bf16, or one float.
template <class T, int R, int C>
NANO_INLINE void multiply(Vec (&acc)[R][C], const T* a, int64_t lda, const T* const (&b)[C], int64_t ldb,
                          int64_t num_steps) {
#pragma GCC unroll 1
  for (int64_t k = 0; k < num_steps; k++) {
    decltype(load_lanes(b[0])) lanes[C];
    for (int j = 0; j < C; j++) lanes[j] = load_lanes(b[j] + k * ldb);
    for (int i = 0; i < R; i++) {
      auto one = repeat(a + i * lda + k * DEPTH<T>);
      for (int j = 0; j < C; j++) acc[i][j] = add_product(acc[i][j], one, lanes[j]);
    }
  }
}

template <class T, int C>
NANO_INLINE void fetch_ahead(const T* const (&b)[C], int64_t ldb, int num_steps) {
  for (int k = 0; k < num_steps; k++)
    for (int j = 0; j < C; j++) fetch(b[j] + k * ldb);
}

// 64 keys and values, in groups of 16.
template <class T>
struct Tile {
  const T *keys[GROUPS], *values[GROUPS];
};

// The state of a line; its place in memory is a row of floats (AttentionPlan::state_size).
struct State {
  float* at;

  float& highest() const { return at[0]; }
  float& seen() const { return at[1]; }  // 0: no key yet, and the rest says nothing
  float* total() const { return at + LANES; }
  float* out() const { return at + 2 * LANES; }
};

// A task for one head while it runs.
template <class T>
struct Walk {
  int64_t head_dim, state_size, window;
  float scale;         // of scores in base 2
  T* q;                // [lines][head_dim]
  float *states, *totals;  // [lines][state_size]: of the segment, and of the segments before
  int32_t* positions;  // [lines]
  T* gathered;         // where a tile is packed, if blocks are not

  State state(int64_t line) const { return {states + line * state_size}; }
  State total(int64_t line) const { return {totals + line * state_size}; }
};

// The keys of a tile that a line sees: [begin, end) of 64.
struct Sight {
  int begin, end;
};
template <class T>
NANO_INLINE Sight sight(const Walk<T>& walk, int64_t line, int32_t start) {
  int64_t left = walk.positions[line] - start;
  int64_t begin = walk.window ? std::max<int64_t>(0, left - walk.window + 1) : 0;
  return {int(begin), int(std::min<int64_t>(left + 1, KEY_TILE))};
}

// What lines of a register tile hand from scores to values.
template <class T, int R>
struct Weights {
  alignas(64) T p[R][KEY_TILE];
  float rescale[R];
  Sight sights[R];
};

// Scores of one line to probabilities under its new highest score.
template <class T>
NANO_INLINE float softmax(Vec (&s)[GROUPS], float scale, Sight sight, State state, T* p) {
  for (int j = 0; j < GROUPS; j++) s[j] = vmul(s[j], vset(scale));
  if (sight.begin > 0 || sight.end < KEY_TILE)
    for (int j = 0; j < GROUPS; j++) {
      Mask visible = first_lanes(sight.end - j * LANES) & ~first_lanes(sight.begin - j * LANES);
      s[j] = vselect(visible, s[j], vset(MASKED));
    }
  float highest = vhighest(vmax(vmax(s[0], s[1]), vmax(s[2], s[3]))), before = state.highest();
  highest = highest > before ? highest : before;
  float rescale = highest == before ? 1.f : exp2_1(before - highest);
  for (int j = 0; j < GROUPS; j++) s[j] = vexp2(vsub(s[j], vset(highest)));
  Vec sum = vadd(vadd(s[0], s[1]), vadd(s[2], s[3]));
  vstore(state.total(), vfma(vload(state.total()), vset(rescale), sum));
  store_two(p, s[0], s[1]), store_two(p + 2 * LANES, s[2], s[3]);
  state.highest() = highest, state.seen() = 1;
  return rescale;
}

template <class T, int R>
void score(const Walk<T>& walk, int64_t line, int32_t start, const Tile<T>& tile, const Tile<T>* next,
           Weights<T, R>& weights) {
  constexpr int steps = LANES / DEPTH<T>, ldb = LANES * DEPTH<T>;
  Vec s[R][GROUPS];
  for (int first = 0; first < GROUPS; first += MOST_VECS) {
    Vec acc[R][MOST_VECS];
    for (auto& row : acc)
      for (Vec& v : row) v = vset(0);
    const T *keys[MOST_VECS], *ahead[MOST_VECS];
    for (int j = 0; j < MOST_VECS; j++) keys[j] = tile.keys[first + j], ahead[j] = next ? next->keys[first + j] : nullptr;
    for (int64_t d = 0; d < walk.head_dim; d += LANES) {
      if (next) fetch_ahead<T>(ahead, ldb, steps);
      multiply<T>(acc, walk.q + line * walk.head_dim + d, walk.head_dim, keys, ldb, steps);
      for (int j = 0; j < MOST_VECS; j++) keys[j] += LANES * LANES, ahead[j] += next ? LANES * LANES : 0;
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < MOST_VECS; j++) s[i][first + j] = acc[i][j];
  }
  for (int i = 0; i < R; i++) {
    weights.sights[i] = sight(walk, line + i, start);
    weights.rescale[i] = softmax<T>(s[i], walk.scale, weights.sights[i], walk.state(line + i), weights.p[i]);
  }
}

// out = out * rescale + p * values for keys [begin, end), whole pairs that all lines see; C vectors from `column` on.
template <class T, int R, int C>
void weigh(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const Tile<T>* next, const Weights<T, R>& weights,
           int64_t column, int begin, int end) {
  const int64_t ldb = walk.head_dim * DEPTH<T>;
  Vec acc[R][C];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++)
      acc[i][j] = vmul(vload(walk.state(line + i).out() + column + j * LANES), vset(weights.rescale[i]));
  for (int group = 0; group < GROUPS; group++) {
    int from = std::max(begin, group * LANES), to = std::min(end, (group + 1) * LANES);
    const T *values[C], *ahead[C];
    if (next) {
      for (int j = 0; j < C; j++) ahead[j] = next->values[group] + (column + j * LANES) * DEPTH<T>;
      fetch_ahead<T>(ahead, ldb, LANES / DEPTH<T>);
    }
    if (from >= to) continue;
    for (int j = 0; j < C; j++)
      values[j] = tile.values[group] + (from - group * LANES) * walk.head_dim + (column + j * LANES) * DEPTH<T>;
    multiply<T>(acc, weights.p[0] + from, KEY_TILE, values, ldb, (to - from) / DEPTH<T>);
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++) vstore(walk.state(line + i).out() + column + j * LANES, acc[i][j]);
}

template <class T, int R>
void weigh_all(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const Tile<T>* next,
               const Weights<T, R>& weights, int begin, int end) {
  for (int64_t column = 0; column < walk.head_dim;) {
    int64_t left = (walk.head_dim - column) / LANES, vecs = std::min<int64_t>(left, MOST_VECS);
    if (MOST_VECS == 4 && (left == 5 || left == 6)) vecs = 3;  // 3 + 2 and 3 + 3 keep more sums busy than 4 + 1, 4 + 2
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

// One step of a line on its own: where a pair holds one key that it sees and one that it does not, that one's value,
// which may be anything, is replaced by zero.
NANO_INLINE Vec add_edge(Vec acc, const bf16* p, const bf16* values, bool first, bool second) {
  const IVec halves = iset((first ? 0xffffu : 0) | (second ? 0xffff0000u : 0));
  return vdot(acc, iand(bdup(p), halves), iand(bload(values), halves));
}
NANO_INLINE Vec add_edge(Vec acc, const float* p, const float* values, bool, bool) {
  return vfma(vset(*p), vload(values), acc);
}

// Keys [begin, end) for one line.
template <class T>
void weigh_edge(const Walk<T>& walk, int64_t line, const Tile<T>& tile, const T* p, int begin, int end) {
  constexpr int depth = DEPTH<T>;
  float* out = walk.state(line).out();
  for (int64_t d = 0; d < walk.head_dim && begin < end; d += LANES) {
    Vec acc = vload(out + d);
    for (int key = begin / depth * depth; key < end; key += depth) {
      const T* values = tile.values[key / LANES] + key % LANES * walk.head_dim + d * depth;
      acc = add_edge(acc, p + key, values, key >= begin, key + 1 < end);
    }
    vstore(out + d, acc);
  }
}

// R lines from `line` on over one tile, each in the same order of keys as if it were alone.
template <class T, int R>
void attend(const Walk<T>& walk, int64_t line, int32_t start, const Tile<T>& tile, const Tile<T>* next) {
  constexpr int depth = DEPTH<T>;
  Weights<T, R> weights;
  score<T, R>(walk, line, start, tile, next, weights);
  int begin = 0, end = KEY_TILE, first = KEY_TILE;  // what all lines see, in whole pairs; the first key that any sees
  for (Sight sight : weights.sights) {
    begin = std::max(begin, (sight.begin + depth - 1) / depth * depth);
    end = std::min(end, sight.end / depth * depth);
    first = std::min(first, sight.begin);
  }
  if (begin > end) begin = end = KEY_TILE;
  if (first < begin) {  // some begin earlier
    for (int i = 0; i < R; i++) {
      float* out = walk.state(line + i).out();
      for (int64_t d = 0; d < walk.head_dim; d += LANES) vstore(out + d, vmul(vload(out + d), vset(weights.rescale[i])));
      weights.rescale[i] = 1;
      weigh_edge<T>(walk, line + i, tile, weights.p[i], weights.sights[i].begin, std::min(begin, weights.sights[i].end));
    }
  }
  weigh_all<T, R>(walk, line, tile, next, weights, begin, end);
  for (int i = 0; i < R; i++)
    weigh_edge<T>(walk, line + i, tile, weights.p[i], std::max(end, weights.sights[i].begin), weights.sights[i].end);
}

template <class T>
void attend_lines(const Walk<T>& walk, int64_t line, int64_t num_lines, int32_t start, const Tile<T>& tile,
                  const Tile<T>* next) {
  auto run = [&](auto lines) {
    if constexpr (decltype(lines)::value <= MOST_LINES)
      attend<T, decltype(lines)::value>(walk, line, start, tile, next);
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

// Merge what a segment found into the total of those before it; the first one is the total.
void merge(State total, State segment, int64_t state_size) {
  if (!segment.seen()) return;
  if (!total.seen()) {
    memcpy(total.at, segment.at, size_t(state_size) * sizeof(float));
    return;
  }
  float highest = total.highest() > segment.highest() ? total.highest() : segment.highest();
  Vec a = vset(exp2_1(total.highest() - highest)), b = vset(exp2_1(segment.highest() - highest));
  total.highest() = highest;
  for (int64_t i = LANES; i < state_size; i += LANES)  // the sums, then the output
    vstore(total.at + i, vfma(vload(segment.at + i), b, vmul(vload(total.at + i), a)));
}

void clear(State state, int64_t state_size) {
  memset(state.at, 0, size_t(state_size) * sizeof(float));
  state.highest() = MASKED;
}

template <class T>
Tile<T> locate(const Plan& plan, const Plan::Job& job, const Walk<T>& walk, const T* keys, const T* values,
               const KvLayer<T>& layer) {
  const AttentionShape& shape = plan.shape();
  int64_t group_size = LANES * shape.head_dim;
  Tile<T> tile;
  if (is_packed(shape.block_size)) {
    for (int j = 0; j < GROUPS; j++) {
      int64_t at = layer.unit(job.blocks[j]) * shape.block_size * shape.head_dim + job.groups[j] * group_size;
      tile.keys[j] = keys + at, tile.values[j] = values + at;
    }
    return tile;
  }
  T *packed_keys = walk.gathered, *packed_values = walk.gathered + GROUPS * group_size;
  const int64_t* table = plan.batch().tables + job.chunk * plan.batch().table_stride;
  for (int64_t key = job.begin; key < job.end; key++) {
    int64_t block = key / shape.block_size, in_tile = key - job.start;
    int64_t at = (layer.unit(table[block]) * shape.block_size + key % shape.block_size) * shape.head_dim;
    int64_t group = in_tile / LANES * group_size;
    pack_key(packed_keys + group, shape.head_dim, in_tile % LANES, keys + at);
    pack_value(packed_values + group, shape.head_dim, in_tile % LANES, values + at);
  }
  for (int j = 0; j < GROUPS; j++)
    tile.keys[j] = packed_keys + j * group_size, tile.values[j] = packed_values + j * group_size;
  return tile;
}

// The rows of a task that lines stand for, one call of use(row, first line) each.
template <class F>
void each_row(const Plan& plan, const Plan::Task& task, F use) {
  int64_t line = 0;
  for (int64_t m = task.first_member; m < task.last_member; m++) {
    const Plan::Member& member = plan.member(m);
    for (int64_t row = member.row; row < member.row + member.num_rows; row++, line += plan.shape().group())
      use(row, line);
  }
}

template <class T>
void walk_jobs(const Plan& plan, const Plan::Item& item, const Walk<T>& walk, const KvLayer<T>& layer) {
  const AttentionShape& shape = plan.shape();
  int64_t head_start = item.head * layer.num_units * shape.block_size * shape.head_dim;
  const T *keys = layer.keys + head_start, *values = layer.values + head_start;
  int64_t num_lines = plan.task(item.task).num_lines;
  bool packed = is_packed(shape.block_size);
  Tile<T> tile, next;
  for (int32_t index = item.first_job; index < item.last_job; index++) {
    const Plan::Job& job = plan.job(index);
    if (index > item.first_job && job.start / SEGMENT != plan.job(index - 1).start / SEGMENT)
      for (int64_t line = 0; line < num_lines; line++) {
        merge(walk.total(line), walk.state(line), walk.state_size);
        clear(walk.state(line), walk.state_size);
      }
    tile = packed && index > item.first_job ? next : locate(plan, job, walk, keys, values, layer);
    bool ahead = packed && index + 1 < item.last_job;
    if (ahead) next = locate(plan, plan.job(index + 1), walk, keys, values, layer);
    int64_t lines = job.last - job.first, parts = (lines + MOST_LINES - 1) / MOST_LINES;
    for (int64_t part = 0; part < parts; part++) {  // the first part fetches the next tile
      int64_t from = job.first + lines * part / parts, to = job.first + lines * (part + 1) / parts;
      attend_lines(walk, from, to - from, job.start, tile, ahead && part == 0 ? &next : nullptr);
    }
  }
}

}  // namespace

template <class T>
void run_item(const AttentionPlan& plan, int64_t index, const T* q, int64_t ldq, const KvLayer<T>& layer, T* out,
              int64_t ldo, AttentionScratch& scratch) {
  const Plan::Item& item = plan.item(index);
  const Plan::Task& task = plan.task(item.task);
  const AttentionShape& shape = plan.shape();
  int64_t head_dim = shape.head_dim, group = shape.group(), state_size = plan.state_size(), lines = task.num_lines;
  bool split = item.segment >= 0, packed = is_packed(shape.block_size);

  // Scratch: totals, states, q, a gathered tile, positions. Each part but the last is a multiple of 32 bytes.
  int64_t states = plan.most_lines() * state_size, tile = packed ? 0 : 2 * KEY_TILE * head_dim;
  unsigned char* memory = scratch.reserve(size_t(2 * states + plan.most_lines()) * sizeof(float) +
                                          size_t(plan.most_lines() * head_dim + tile) * sizeof(T));
  Walk<T> walk{};
  walk.head_dim = head_dim, walk.state_size = state_size, walk.window = shape.window;
  walk.scale = shape.scale * LOG2E;
  walk.totals = reinterpret_cast<float*>(memory), walk.states = walk.totals + states;
  walk.q = reinterpret_cast<T*>(walk.states + states), walk.gathered = walk.q + plan.most_lines() * head_dim;
  walk.positions = reinterpret_cast<int32_t*>(walk.gathered + tile);
  if (split) walk.states = plan.partial(task, item.head, item.segment);
  each_row(plan, task, [&](int64_t row, int64_t line) {
    memcpy(walk.q + line * head_dim, q + row * ldq + item.head * group * head_dim, size_t(group * head_dim) * sizeof(T));
    for (int64_t i = 0; i < group; i++) walk.positions[line + i] = int32_t(plan.batch().positions[row]);
  });
  for (int64_t line = 0; line < lines; line++) {
    clear(walk.state(line), state_size);
    walk.total(line).seen() = 0;
  }
  walk_jobs(plan, item, walk, layer);

  if (split) {
    if (!plan.finish_segment(task, item.head)) return;
    for (int64_t line = 0; line < lines; line++) walk.total(line).seen() = 0;
  }
  for (int64_t segment = 0; segment < (split ? task.num_segments : 1); segment++) {
    if (split) walk.states = plan.partial(task, item.head, segment);
    for (int64_t line = 0; line < lines; line++) merge(walk.total(line), walk.state(line), state_size);
  }
  each_row(plan, task, [&](int64_t row, int64_t first_line) {
    T* to = out + row * ldo + item.head * group * head_dim;
    for (int64_t i = 0; i < group; i++, to += head_dim) {
      State total = walk.total(first_line + i);
      Vec sum = vset(vsum(vload(total.total())));
      for (int64_t d = 0; d < head_dim; d += LANES) store_one(to + d, vdiv(vload(total.out() + d), sum));
    }
  });
}

template void run_item(const AttentionPlan&, int64_t, const bf16*, int64_t, const KvLayer<bf16>&, bf16*, int64_t,
                       AttentionScratch&);
template void run_item(const AttentionPlan&, int64_t, const float*, int64_t, const KvLayer<float>&, float*, int64_t,
                       AttentionScratch&);

}  // namespace nano
