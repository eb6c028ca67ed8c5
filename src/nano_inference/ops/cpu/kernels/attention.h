// Causal attention over paged keys and values, for any mix of chunks.
//
// A row's arithmetic depends only on its own context. Online softmax runs over tiles of 64 keys at absolute multiples
// of 64. The state restarts at every multiple of 512 keys, and these segments are merged in order. Neither the rest of
// the batch, nor the cuts between items, nor the thread that computes a row changes any bit.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kv_store.h"

namespace nano {

constexpr int64_t KEY_TILE = 64, SEGMENT = 512;
constexpr int GROUPS = KEY_TILE / LANES;

// The rows of one step. The caller owns the arrays, which must outlive the plans made from them.
struct BatchRows {
  int64_t num_rows, num_chunks;
  const int64_t* positions;   // [num_rows] position in the sequence, rising by one within a chunk
  const int64_t* slot_mapping;  // [num_rows] block * block_size + offset
  const int64_t* row_chunks;  // [num_rows]
  const int64_t* cu_seqlens_q;  // [num_chunks + 1] first row of each chunk, and num_rows
  const int64_t* seq_lens;    // [num_chunks] context length after the step
  const int64_t* block_tables;  // [num_chunks][table_stride] block ids
  int64_t table_stride;
};

struct AttentionShape {
  int64_t num_heads, num_kv_heads;
  int64_t head_dim;  // a multiple of 16, at most MAX_HEAD_DIM
  int64_t block_size;
  int64_t window;  // a row at position p sees keys above p - window; 0: all
  float scale, cap;  // a score is s = scale * q * k; with a cap other than 0, cap * tanh(s / cap)

  int64_t group() const { return num_heads / num_kv_heads; }
  // If keys are the values, all query heads share one KV head. Return the shape with several equal KV heads instead,
  // for threads to share. Each has enough lines to amortize the conversion of its keys to values.
  AttentionShape with_equal_heads() const {
    AttentionShape shape = *this;
    for (shape.num_kv_heads = 1; shape.group() > 32 && shape.group() % 2 == 0;) shape.num_kv_heads *= 2;
    return shape;
  }
};

// Growing memory, aligned to cache lines and never initialized.
class AlignedMemory {
 public:
  unsigned char* reserve(size_t bytes);

 private:
  struct Free {
    void operator()(unsigned char* memory) const;
  };
  std::unique_ptr<unsigned char, Free> memory_;
  size_t size_ = 0;
};

// The work items of attention. One plan serves all layers of a step that have the same window.
//
// A line is one row and one query head of a KV head. A task holds the lines of some rows of one chunk, or of several
// chunks whose block tables begin alike and which walk their shared tiles together. An item is a task for one KV head,
// or one segment of it.
class AttentionPlan {
 public:
  // Rows [row_cuts[t], row_cuts[t + 1]), t < num_threads, get their own items, which thread t can run without the
  // others. Null: all threads share all items. Memory is reused from step to step. `begins`: first key that each row
  // sees, non-decreasing within a chunk. Null: derived from the window.
  void build(const BatchRows& batch, const AttentionShape& shape, int num_threads, const int64_t* row_cuts,
             const int64_t* begins = nullptr);

  int64_t num_items() const { return int64_t(items_.size()); }
  // Items of the rows of cut t: [first_item(t), first_item(t + 1)).
  int64_t first_item(int cut) const { return first_items_[size_t(cut)]; }

  // The rest of the public part is for run_item.
  struct Member {
    int64_t chunk, row, num_rows;  // rows [row, row + num_rows) of the batch
    int64_t first_tile, last_tile;
  };
  // Lines [first, last) see some key of the tile at key `start`. Its 16-token groups are `groups[j]` of `blocks[j]`.
  struct Job {
    int32_t chunk, first, last;
    int32_t begin, end;  // range of keys that some line sees
    int32_t start;
    int32_t blocks[GROUPS], groups[GROUPS];
  };
  struct Task {
    int64_t first_member, last_member, num_lines, cost;
    int64_t first_segment, num_segments;  // in segments_
    int64_t split;                        // number among the split tasks, or -1
    int64_t partials;                     // offset of its segments' results in partials_, for a split task
  };
  struct Item {
    int32_t task, head, first_job, last_job;
    int32_t segment;  // -1: all segments
  };

  const BatchRows& batch() const { return batch_; }
  const AttentionShape& shape() const { return shape_; }
  const Item& item(int64_t index) const { return items_[size_t(index)]; }
  const Task& task(int64_t index) const { return tasks_[size_t(index)]; }
  const Member& member(int64_t index) const { return members_[size_t(index)]; }
  const Job& job(int64_t index) const { return jobs_[size_t(index)]; }
  int64_t most_lines() const { return most_lines_; }
  int64_t first_key(int64_t row) const {  // first key that the row sees
    if (begins_) return begins_[row];
    return shape_.window ? std::max<int64_t>(0, batch_.positions[row] - shape_.window + 1) : 0;
  }
  // A line's state: highest score, whether it has seen a key, 16 sums of probabilities from index 16 on, then its
  // output.
  int64_t state_size() const { return 2 * LANES + shape_.head_dim; }

  // Memory for the states [lines][state_size] of one segment of a split task and head.
  float* partial(const Task& task, int64_t head, int64_t segment) const {
    return partials_ + task.partials + (head * task.num_segments + segment) * task.num_lines * state_size();
  }
  // Count a finished segment of a split task and head. True for the last one, whose caller sees all segments' results.
  bool finish_segment(const Task& task, int64_t head) const {
    std::atomic<int>& done = done_[size_t(task.split * shape_.num_kv_heads + head)];
    return (done.fetch_add(1, std::memory_order_acq_rel) + 1) % int(task.num_segments) == 0;
  }

 private:
  void add_range(int64_t begin, int64_t end);
  void add_chunk(int64_t chunk, int64_t begin, int64_t end);
  void add_task(int64_t first_member, int64_t shared_tiles);
  void add_jobs(Task& task, int64_t shared_tiles);
  void add_job(const Member& member, int64_t tile, int64_t first, int64_t last, int64_t begin, int64_t end);
  void add_items(int64_t first_task, int64_t total_cost, int num_threads, bool may_split);
  int64_t shared_with_next(int64_t chunk, int64_t row, int64_t end) const;

  bool has_windows() const { return begins_ || shape_.window; }

  BatchRows batch_{};
  const int64_t* begins_ = nullptr;
  AttentionShape shape_{};
  int64_t most_rows_ = 1, most_members_ = 1, most_lines_ = 0;
  std::vector<Member> members_;
  std::vector<Job> jobs_;
  std::vector<Task> tasks_;
  std::vector<int64_t> segments_;  // first job of each segment of each task, and the end of the last segment
  std::vector<std::pair<int64_t, int32_t>> order_;
  std::vector<Item> items_;
  std::vector<int64_t> first_items_;
  AlignedMemory partial_memory_;
  float* partials_ = nullptr;
  std::unique_ptr<std::atomic<int>[]> done_;
  size_t num_done_ = 0;
};

// Memory of one thread while it runs items.
class AttentionScratch {
 public:
  unsigned char* reserve(size_t bytes) { return memory_.reserve(bytes); }

 private:
  AlignedMemory memory_;
};

// Compute one item. q and out are [num_rows][num_heads * head_dim], with rows ldq and ldo apart, and q is rotated. The
// keys and values of the batch's rows must be stored already. `sinks` [num_heads] or null: per head, a score without a
// key that is the last term of the softmax's sum. `next`: the item that this thread will probably run next, whose first
// tile is prefetched; num_items() or more: none. Denormals must be flushed (run_team does).
//
// With codes, scores are multiplied by the scales of keys, and the weights of values by the scales of values.
template <class T, class S>
void run_item(const AttentionPlan& plan, int64_t item, int64_t next, const T* q, int64_t ldq, const KvLayer<S>& layer,
              const float* sinks, T* out, int64_t ldo, AttentionScratch& scratch);

// Compute one item without the merge. The state of a row's query head in each segment is stored as its highest score,
// 16 sums of probabilities, and the output before the division: states[first_states[row] + segment][num_heads] [1 + 16
// + head_dim]. Segments are counted from the first that the row sees.
template <class T, class S>
void run_item_states(const AttentionPlan& plan, int64_t item, int64_t next, const T* q, int64_t ldq,
                     const KvLayer<S>& layer, const int64_t* first_states, float* states, AttentionScratch& scratch);

// Compute attention of one row and query head from all its states, in order of keys and `stride` numbers apart, and its
// sink.
template <class T>
void merge_row(const float* states, int64_t num_states, int64_t stride, int64_t head_dim, const float* sink, T* out);

}  // namespace nano
