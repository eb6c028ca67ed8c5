#include <algorithm>
#include <new>

#include "attention.h"

namespace nano {
namespace {

// Most lines per task: their states (a few hundred bytes each) stay in the L2 cache together with the tiles.
constexpr int64_t MOST_LINES = 96;
// Items per thread: enough that all threads finish at about the same time.
constexpr int64_t ITEMS_A_THREAD = 4;
// Fixed cost of a tile, in lines.
constexpr int64_t TILE_COST = 3;
// Most floats for results of segments that wait for their merge. Beyond this, tasks are not split.
constexpr int64_t MOST_PARTIALS = int64_t(4) << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void AlignedMemory::Free::operator()(unsigned char* memory) const { ::operator delete(memory, std::align_val_t(64)); }

unsigned char* AlignedMemory::reserve(size_t bytes) {
  if (bytes > size_) {
    memory_.reset();
    memory_.reset(static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(64))));
    size_ = bytes;
  }
  return memory_.get();
}

void AttentionPlan::build(const BatchRows& batch, const AttentionShape& shape, int num_threads,
                          const int64_t* row_cuts, const int64_t* begins) {
  batch_ = batch, shape_ = shape, begins_ = begins;
  members_.clear(), jobs_.clear(), tasks_.clear(), segments_.clear(), items_.clear(), first_items_.clear();
  most_lines_ = 0;
  int64_t whole[2] = {0, batch.num_rows}, group = shape.group();
  int num_cuts = row_cuts ? num_threads : 1, sharers = row_cuts ? 1 : num_threads;
  const int64_t* cuts = row_cuts ? row_cuts : whole;
  for (int cut = 0; cut < num_cuts; cut++) {
    int64_t begin = cuts[cut], end = cuts[cut + 1], first_task = int64_t(tasks_.size()), cost = 0;
    // Small batches get small tasks, so that every thread gets some.
    int64_t wanted = sharers == 1 ? 1 : ceil_div(ITEMS_A_THREAD * sharers, shape.num_kv_heads);
    most_rows_ = std::max<int64_t>(1, std::min(MOST_LINES / group, ceil_div(end - begin, wanted)));
    most_members_ = std::max<int64_t>(1, std::min(MOST_LINES / group, batch.num_chunks / wanted));
    first_items_.push_back(num_items());
    if (begin < end) add_range(begin, end);
    for (size_t task = size_t(first_task); task < tasks_.size(); task++) cost += tasks_[task].cost;
    add_items(first_task, cost * shape.num_kv_heads, sharers, sharers > 1);
  }
  first_items_.push_back(num_items());
}

// Cut rows [begin, end) into tasks.
void AttentionPlan::add_range(int64_t begin, int64_t end) {
  int64_t chunk = batch_.row_chunks[begin], row = begin;
  while (row < end) {
    int64_t stop = std::min(end, batch_.cu_seqlens_q[chunk + 1]), num_rows = stop - row;
    int64_t first_member = int64_t(members_.size()), shared = 0;
    if (num_rows > most_rows_) {
      for (int64_t i = 0, pieces = ceil_div(num_rows, most_rows_); i < pieces; i++) {
        add_chunk(chunk, row + num_rows * i / pieces, row + num_rows * (i + 1) / pieces);
        add_task(first_member + i, 0);
      }
      chunk++, row = stop;
      continue;
    }
    if (num_rows > 0) add_chunk(chunk, row, stop);
    chunk++, row = stop;
    if (num_rows == 0) continue;
    // Add the following chunks to the task as long as they share about as many tiles. A chunk that shares more with its
    // own successor may start a new task.
    int64_t rows = num_rows, link = shared_with_next(chunk - 1, stop - num_rows, end);
    for (int64_t members = 1; link > 0 && 2 * link >= shared; members++) {
      int64_t next_stop = std::min(end, batch_.cu_seqlens_q[chunk + 1]);
      rows += next_stop - row;
      // segments can be distributed
      bool long_enough = std::min(link, members == 1 ? link : shared) * KEY_TILE >= SEGMENT;
      if (rows * shape_.group() > MOST_LINES || (members >= most_members_ && !long_enough)) break;
      int64_t next_link = shared_with_next(chunk, row, end);
      if (2 * link < next_link) break;
      shared = members == 1 ? link : std::min(shared, link);
      add_chunk(chunk, row, next_stop);
      chunk++, row = next_stop, link = next_link;
    }
    add_task(first_member, shared);
  }
}

// Count leading tiles that a chunk and the next one read from the same blocks, all before the rows of either chunk.
int64_t AttentionPlan::shared_with_next(int64_t chunk, int64_t row, int64_t end) const {
  int64_t next_row = batch_.cu_seqlens_q[chunk + 1];
  if (has_windows() || next_row >= end || batch_.cu_seqlens_q[chunk + 2] == next_row) return 0;
  const int64_t *table = batch_.block_tables + chunk * batch_.table_stride, *next = table + batch_.table_stride;
  int64_t most = std::min(batch_.positions[row], batch_.positions[next_row]) / KEY_TILE;
  int64_t num_blocks = most * KEY_TILE / shape_.block_size, same = 0;
  while (same < num_blocks && table[same] == next[same]) same++;
  return std::min(most, same * shape_.block_size / KEY_TILE);
}

void AttentionPlan::add_chunk(int64_t chunk, int64_t begin, int64_t end) {
  members_.push_back({chunk, begin, end - begin, first_key(begin) / KEY_TILE, batch_.positions[end - 1] / KEY_TILE});
}

// Add a task with the members from `first_member` on. Jobs are in order of segments, with shared tiles first in each.
void AttentionPlan::add_task(int64_t first_member, int64_t shared_tiles) {
  Task task{};
  task.first_member = first_member, task.last_member = shared_tiles ? int64_t(members_.size()) : first_member + 1;
  task.split = -1;
  for (int64_t m = task.first_member; m < task.last_member; m++) task.num_lines += member(m).num_rows * shape_.group();
  most_lines_ = std::max(most_lines_, task.num_lines);
  add_jobs(task, shared_tiles);
  tasks_.push_back(task);
}

void AttentionPlan::add_jobs(Task& task, int64_t shared_tiles) {
  constexpr int64_t tiles = SEGMENT / KEY_TILE;
  int64_t first_tile = member(task.first_member).first_tile, last_tile = 0;
  for (int64_t m = task.first_member; m < task.last_member; m++) last_tile = std::max(last_tile, member(m).last_tile);
  int64_t first_job = int64_t(jobs_.size());
  task.first_segment = int64_t(segments_.size());
  for (int64_t segment = first_tile / tiles; segment <= last_tile / tiles; segment++) {
    segments_.push_back(int64_t(jobs_.size()));
    int64_t from = segment * tiles, to = from + tiles, line = 0;
    for (int64_t tile = from; tile < std::min(to, shared_tiles); tile++)
      add_job(member(task.first_member), tile, 0, task.num_lines, tile * KEY_TILE, (tile + 1) * KEY_TILE);
    for (int64_t m = task.first_member; m < task.last_member; m++) {
      const Member& one = member(m);
      int64_t position = batch_.positions[one.row], last = position + one.num_rows - 1, group = shape_.group();
      for (int64_t tile = std::max(from, std::max(one.first_tile, shared_tiles)); tile < std::min(to, one.last_tile + 1);
           tile++) {
        int64_t start = tile * KEY_TILE, begin = start, end = std::min(start + KEY_TILE, last + 1);
        int64_t first_row = std::max<int64_t>(0, start - position), last_row = one.num_rows;
        if (has_windows()) {
          begin = std::max(start, first_key(one.row + first_row));
          while (first_key(one.row + last_row - 1) >= start + KEY_TILE) last_row--;  // the window starts after the tile
        }
        add_job(one, tile, line + first_row * group, line + last_row * group, begin, end);
      }
      line += one.num_rows * group;
    }
  }
  task.num_segments = int64_t(segments_.size()) - task.first_segment;
  segments_.push_back(int64_t(jobs_.size()));
  for (size_t j = size_t(first_job); j < jobs_.size(); j++) task.cost += jobs_[j].last - jobs_[j].first + TILE_COST;
}

void AttentionPlan::add_job(const Member& member, int64_t tile, int64_t first, int64_t last, int64_t begin,
                            int64_t end) {
  int64_t start = tile * KEY_TILE, size = shape_.block_size;
  Job job{int32_t(member.chunk), int32_t(first), int32_t(last), int32_t(begin), int32_t(end), int32_t(start), {}, {}};
  if (is_packed(size)) {
    const int64_t* table = batch_.block_tables + member.chunk * batch_.table_stride;
    for (int j = 0; j < GROUPS; j++) {
      // A group that no line sees may have no block. Read the keys of another group instead; their scores are masked.
      int64_t key = start + j * LANES;
      if (key >= end || key + LANES <= begin) key = begin / LANES * LANES;
      job.blocks[j] = int32_t(table[key / size]), job.groups[j] = int32_t(key % size / LANES);
    }
  }
  jobs_.push_back(job);
}

// Add items of the tasks from `first_task` on, longest first.
void AttentionPlan::add_items(int64_t first_task, int64_t total_cost, int num_threads, bool may_split) {
  order_.clear();
  int64_t num_split = 0, num_partials = 0;
  for (int64_t index = first_task; index < int64_t(tasks_.size()); index++) {
    Task& task = tasks_[size_t(index)];
    int64_t size = shape_.num_kv_heads * task.num_segments * task.num_lines * state_size();
    if (may_split && task.num_segments > 1 && task.cost * ITEMS_A_THREAD * num_threads > total_cost &&
        num_partials + size <= MOST_PARTIALS) {
      task.split = num_split++, task.partials = num_partials;
      num_partials += size;
    }
    order_.push_back({task.split < 0 ? task.cost : task.cost / task.num_segments, int32_t(index)});
  }
  std::sort(order_.begin(), order_.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  for (auto [cost, index] : order_) {
    const Task& task = tasks_[size_t(index)];
    const int64_t* segments = segments_.data() + task.first_segment;
    bool split = task.split >= 0;
    for (int64_t head = 0; head < shape_.num_kv_heads; head++)
      for (int64_t i = 0, n = split ? task.num_segments : 1; i < n; i++)
        items_.push_back({index, int32_t(head), int32_t(segments[i]),
                          int32_t(segments[split ? i + 1 : task.num_segments]), split ? int32_t(i) : -1});
  }
  if (!num_split) return;
  partials_ = reinterpret_cast<float*>(partial_memory_.reserve(size_t(num_partials) * sizeof(float)));
  size_t num_done = size_t(num_split * shape_.num_kv_heads);
  if (num_done > num_done_) done_.reset(new std::atomic<int>[num_done]), num_done_ = num_done;
  for (size_t i = 0; i < num_done; i++) done_[i].store(0, std::memory_order_relaxed);
}

}  // namespace nano
