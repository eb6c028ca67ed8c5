#include "attention_tile.h"

namespace nano {
namespace {

using Plan = AttentionPlan;

// Merge the state of a segment into the total of the segments before it. The first segment becomes the total.
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
Tile<T> locate(const Plan& plan, const Plan::Job& job, int64_t head, const Walk<T>& walk, const KvLayer<T>& layer) {
  const AttentionShape& shape = plan.shape();
  int64_t group_size = LANES * shape.head_dim;
  Tile<T> tile;
  if (is_packed(shape.block_size)) {
    for (int j = 0; j < GROUPS; j++) {
      int64_t at = layer.start(head, job.blocks[j]) + job.groups[j] * group_size;
      tile.keys[j] = layer.keys + at, tile.values[j] = layer.values + at;
    }
    return tile;
  }
  T *packed_keys = walk.gathered, *packed_values = walk.gathered + GROUPS * group_size;
  const int64_t* table = plan.batch().block_tables + job.chunk * plan.batch().table_stride;
  for (int64_t key = job.begin; key < job.end; key++) {
    int64_t block = key / shape.block_size, in_tile = key - job.start;
    int64_t at = layer.start(head, table[block]) + key % shape.block_size * shape.head_dim;
    int64_t group = in_tile / LANES * group_size;
    pack_key<T>(packed_keys + group, shape.head_dim, in_tile % LANES, layer.keys + at);
    pack_value<T>(packed_values + group, shape.head_dim, in_tile % LANES, layer.values + at);
  }
  for (int j = 0; j < GROUPS; j++)
    tile.keys[j] = packed_keys + j * group_size, tile.values[j] = packed_values + j * group_size;
  return tile;
}

// Codes are widened, and the tile points to their scales.
template <class T>
Tile<T> locate(const Plan& plan, const Plan::Job& job, int64_t head, const Walk<T>& walk, const KvLayer<int8_t>& layer) {
  const int64_t head_dim = plan.shape().head_dim, size = plan.shape().block_size, group_size = LANES * head_dim;
  T *keys = walk.gathered, *values = keys + GROUPS * group_size;
  float *key_scales = walk.scales, *value_scales = key_scales + KEY_TILE;
  if (is_packed(size)) {
    for (int j = 0; j < GROUPS; j++) {
      const int64_t start = layer.start(head, job.blocks[j]), at = start + job.groups[j] * group_size;
      const int64_t token = job.groups[j] * LANES;
      widen_codes(layer.keys + at, group_size, keys + j * group_size);
      widen_codes(layer.values + at, group_size, values + j * group_size);
      memcpy(key_scales + j * LANES, scale_at(layer.keys + start, size, head_dim, token), LANES * sizeof(float));
      memcpy(value_scales + j * LANES, scale_at(layer.values + start, size, head_dim, token), LANES * sizeof(float));
    }
  } else {
    T row[MAX_HEAD_DIM];
    const int64_t* table = plan.batch().block_tables + job.chunk * plan.batch().table_stride;
    for (int64_t key = job.begin; key < job.end; key++) {
      const int64_t start = layer.start(head, table[key / size]), offset = key % size;
      const int64_t at = start + offset * row_size<int8_t>(head_dim);
      const int64_t in_tile = key - job.start, group = in_tile / LANES * group_size;
      widen_codes(layer.keys + at, head_dim, row);
      pack_key<T>(keys + group, head_dim, in_tile % LANES, row);
      widen_codes(layer.values + at, head_dim, row);
      pack_value<T>(values + group, head_dim, in_tile % LANES, row);
      memcpy(key_scales + in_tile, scale_at(layer.keys + start, size, head_dim, offset), sizeof(float));
      memcpy(value_scales + in_tile, scale_at(layer.values + start, size, head_dim, offset), sizeof(float));
    }
  }
  Tile<T> tile;
  for (int j = 0; j < GROUPS; j++) tile.keys[j] = keys + j * group_size, tile.values[j] = values + j * group_size;
  tile.key_scales = key_scales, tile.value_scales = value_scales;
  return tile;
}

// True if products read keys directly from the cache.
template <class T, class S>
bool in_place(int64_t block_size) {
  return std::is_same_v<T, S> && is_packed(block_size);
}

// Return the tile with values made from its keys, for layers whose values are the keys.
template <class T>
Tile<T> with_values(Tile<T> tile, const Walk<T>& walk) {
  for (int j = 0; j < GROUPS; j++) {
    T* values = walk.gathered + j * LANES * walk.head_dim;
    values_of_keys(tile.keys[j], walk.head_dim, values);
    tile.values[j] = values;
  }
  return tile;
}

// Copy a query, widened if products read floats.
template <class T>
void copy_line(T* to, const T* from, int64_t head_dim) {
  memcpy(to, from, size_t(head_dim) * sizeof(T));
}
[[maybe_unused]] void copy_line(float* to, const bf16* from, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += LANES) vstore(to + d, vwiden(from + d));
}

// Call use(row, first line) for each row of a task.
template <class F>
void each_row(const Plan& plan, const Plan::Task& task, F use) {
  int64_t line = 0;
  for (int64_t m = task.first_member; m < task.last_member; m++) {
    const Plan::Member& member = plan.member(m);
    for (int64_t row = member.row; row < member.row + member.num_rows; row++, line += plan.shape().group())
      use(row, line);
  }
}

// Run the jobs of an item in order. Call end_segment(segment number) after each segment but the last.
template <class T, class S, class F>
void walk_jobs(const Plan& plan, int64_t index, int64_t next_index, const Walk<T>& walk, const KvLayer<S>& layer,
               F end_segment) {
  const Plan::Item& item = plan.item(index);
  bool packed = in_place<T, S>(plan.shape().block_size), turned = packed && layer.keys_are_values();
  Tile<T> tile = locate(plan, plan.job(item.first_job), item.head, walk, layer);
  LineTiles tiles;
  for (int32_t number = item.first_job; number < item.last_job; number++) {
    const Plan::Job& job = plan.job(number);
    bool last = number + 1 == item.last_job;
    Tile<T> next = tile;  // prefetched tile
    if (packed && !last) next = locate(plan, plan.job(number + 1), item.head, walk, layer);
    if (packed && last && next_index < plan.num_items()) {
      const Plan::Item& other = plan.item(next_index);
      next = locate(plan, plan.job(other.first_job), other.head, walk, layer);
    }
    if (turned) tile = with_values(tile, walk);
    int64_t lines = job.last - job.first, parts = (lines + MOST_LINES<T> - 1) / MOST_LINES<T>;
    for (int64_t part = 0; part < parts; part++) {  // the first part fetches the next tile
      int64_t from = job.first + lines * part / parts, to = job.first + lines * (part + 1) / parts;
      attend_lines(walk, from, to - from, job.start, tile, part == 0 ? next : tile, tiles);
    }
    if (last) return;
    const Plan::Job& following = plan.job(number + 1);
    tile = packed ? next : locate(plan, following, item.head, walk, layer);
    if (following.start / SEGMENT != job.start / SEGMENT) end_segment(job.start / SEGMENT);
  }
}

// Lay out the scratch memory of an item: totals, states, q, a gathered tile, its scales, and the visible range of
// lines. Each part but the last is a multiple of 32 bytes. Copy the lines' queries and visible ranges, and clear the
// states.
template <class T, class S>
Walk<T> begin(const Plan& plan, const Plan::Item& item, const T* q, int64_t ldq, const KvLayer<S>& layer,
              float* own_states, AttentionScratch& scratch) {
  const Plan::Task& task = plan.task(item.task);
  const AttentionShape& shape = plan.shape();
  int64_t head_dim = shape.head_dim, group = shape.group(), state_size = plan.state_size();
  int64_t states = plan.most_lines() * state_size;
  int64_t tile = !in_place<T, S>(shape.block_size) ? 2 * KEY_TILE * head_dim : layer.keys_are_values() ? KEY_TILE * head_dim : 0;
  int64_t scales = std::is_same_v<T, S> ? 0 : 2 * KEY_TILE;
  Walk<T> walk{};
  walk.head_dim = head_dim, walk.state_size = state_size;
  int64_t q_stride = walk.q_stride(), queries = plan.most_lines() * q_stride;
  unsigned char* memory = scratch.reserve(size_t(2 * (states + plan.most_lines()) + scales) * sizeof(float) +
                                          size_t(queries) * sizeof(Left<T>) + size_t(tile) * sizeof(T));
  walk.scale = shape.cap ? shape.scale / shape.cap : shape.scale * LOG2E, walk.cap = shape.cap * LOG2E;
  walk.totals = reinterpret_cast<float*>(memory), walk.states = walk.totals + states;
  walk.q = reinterpret_cast<Left<T>*>(walk.states + states), walk.gathered = reinterpret_cast<T*>(walk.q + queries);
  walk.scales = reinterpret_cast<float*>(walk.gathered + tile);
  walk.positions = reinterpret_cast<int32_t*>(walk.scales + scales), walk.begins = walk.positions + plan.most_lines();
  if (own_states) walk.states = own_states;
  each_row(plan, task, [&](int64_t row, int64_t line) {
    const T* from = q + row * ldq + item.head * group * head_dim;
    for (int64_t i = 0; i < group; i++, from += head_dim) {
      copy_line(walk.q + (line + i) * q_stride, from, head_dim);
      walk.positions[line + i] = int32_t(plan.batch().positions[row]);
      walk.begins[line + i] = int32_t(plan.first_key(row));
    }
  });
  for (int64_t line = 0; line < task.num_lines; line++) {
    clear(walk.state(line), state_size);
    walk.total(line).seen() = 0;
  }
  return walk;
}

// Compute a row's output from its total. The sink is the last term of the sum.
template <class T>
void finish(State total, const float* sink, T* to, int64_t head_dim) {
  float sum = vsum(vload(total.total()));
  // bounded, so that 2^x is finite: if the sink is far above all scores, the output vanishes
  if (sink) sum += exp2_1(std::min(*sink * LOG2E - total.highest(), 126.f));
  Vec inverse = vdiv(vset(1), vset(sum));
  for (int64_t d = 0; d < head_dim; d += LANES) store_one(to + d, vmul(vload(total.out() + d), inverse));
}

}  // namespace

template <class T, class S>
void run_item(const AttentionPlan& plan, int64_t index, int64_t next, const T* q, int64_t ldq, const KvLayer<S>& layer,
              const float* sinks, T* out, int64_t ldo, AttentionScratch& scratch) {
  const Plan::Item& item = plan.item(index);
  const Plan::Task& task = plan.task(item.task);
  const AttentionShape& shape = plan.shape();
  int64_t group = shape.group(), state_size = plan.state_size(), lines = task.num_lines;
  bool split = item.segment >= 0;
  Walk<T> walk = begin(plan, item, q, ldq, layer, split ? plan.partial(task, item.head, item.segment) : nullptr, scratch);
  walk_jobs(plan, index, next, walk, layer, [&](int64_t) {
    for (int64_t line = 0; line < lines; line++) {
      merge(walk.total(line), walk.state(line), state_size);
      clear(walk.state(line), state_size);
    }
  });

  if (split) {
    if (!plan.finish_segment(task, item.head)) return;
    for (int64_t line = 0; line < lines; line++) walk.total(line).seen() = 0;
  }
  for (int64_t segment = 0; segment < (split ? task.num_segments : 1); segment++) {
    if (split) walk.states = plan.partial(task, item.head, segment);
    for (int64_t line = 0; line < lines; line++) merge(walk.total(line), walk.state(line), state_size);
  }
  each_row(plan, task, [&](int64_t row, int64_t first_line) {
    T* to = out + row * ldo + item.head * group * shape.head_dim;
    for (int64_t i = 0; i < group; i++, to += shape.head_dim)
      finish(walk.total(first_line + i), sinks ? sinks + item.head * group + i : nullptr, to, shape.head_dim);
  });
}

template <class T, class S>
void run_item_states(const AttentionPlan& plan, int64_t index, int64_t next, const T* q, int64_t ldq,
                     const KvLayer<S>& layer, const int64_t* first_states, float* states, AttentionScratch& scratch) {
  const Plan::Item& item = plan.item(index);
  const Plan::Task& task = plan.task(item.task);
  const AttentionShape& shape = plan.shape();
  int64_t group = shape.group(), width = plan.state_size() - LANES + 1;
  Walk<T> walk = begin(plan, item, q, ldq, layer, nullptr, scratch);
  auto put = [&](int64_t segment) {
    each_row(plan, task, [&](int64_t row, int64_t first_line) {
      int64_t state = first_states[row] + segment - plan.first_key(row) / SEGMENT;
      float* to = states + (state * shape.num_heads + item.head * group) * width;
      for (int64_t i = 0; i < group; i++, to += width) {
        State found = walk.state(first_line + i);
        if (!found.seen()) continue;  // the row sees no key of this segment
        to[0] = found.highest();
        memcpy(to + 1, found.total(), size_t(width - 1) * sizeof(float));
        clear(found, walk.state_size);
      }
    });
  };
  walk_jobs(plan, index, next, walk, layer, put);
  put(plan.job(item.last_job - 1).start / SEGMENT);
}

template <class T>
void merge_row(const float* states, int64_t num_states, int64_t stride, int64_t head_dim, const float* sink, T* out) {
  alignas(64) float memory[2][2 * LANES + MAX_HEAD_DIM];
  State total{memory[0]}, found{memory[1]};
  total.seen() = 0, found.seen() = 1;
  for (int64_t i = 0; i < num_states; i++, states += stride) {
    found.highest() = states[0];
    memcpy(found.total(), states + 1, size_t(LANES + head_dim) * sizeof(float));
    merge(total, found, 2 * LANES + head_dim);
  }
  finish(total, sink, out, head_dim);
}

#define NANO_ATTENTION(T, S)                                                                                             \
  template void run_item(const AttentionPlan&, int64_t, int64_t, const T*, int64_t, const KvLayer<S>&, const float*, T*, \
                         int64_t, AttentionScratch&);                                                                    \
  template void run_item_states(const AttentionPlan&, int64_t, int64_t, const T*, int64_t, const KvLayer<S>&,            \
                                const int64_t*, float*, AttentionScratch&);
NANO_ATTENTION(bf16, bf16)
NANO_ATTENTION(bf16, int8_t)
NANO_ATTENTION(float, float)
NANO_ATTENTION(float, int8_t)
template void merge_row(const float*, int64_t, int64_t, int64_t, const float*, bf16*);
template void merge_row(const float*, int64_t, int64_t, int64_t, const float*, float*);

}  // namespace nano
