// C entry points to attention and the KV store: for partial contexts and for tests. Other code of the engine calls the
// functions directly.
#include "attention.h"
#include "pool.h"

namespace {

using namespace nano;

// Filled in by Python, in this order. Numbers are int64, and arrays are addresses.
struct Problem {
  AttentionShape shape;  // its last fields, scale and cap, are floats
  int64_t is_bf16, kv_codes, num_units;
  const int64_t* units;
  void *keys, *values;
  BatchRows batch;
};

// Call use(layer) with a layer of T or of codes, stored as [kv heads][num_units][numbers of a unit].
template <class T, class F>
void with_layer(const Problem& problem, F use) {
  const AttentionShape& shape = problem.shape;
  auto layer_of = [&](auto stored) {
    using S = decltype(stored);
    const int64_t size = shape.block_size * row_size<S>(shape.head_dim);
    return kv_layer<S>(problem.keys, problem.values, problem.num_units * size, size, problem.units);
  };
  problem.kv_codes ? use(layer_of(int8_t())) : use(layer_of(T()));
}

AttentionShape shape_of(const Problem& problem) {
  return problem.keys == problem.values ? problem.shape.with_equal_heads() : problem.shape;
}

template <class F>
void each_slot(const Problem& problem, F use) {
  const AttentionShape& shape = problem.shape;
  for (int64_t row = 0; row < problem.batch.num_rows; row++)
    for (int64_t head = 0; head < shape.num_kv_heads; head++)
      use(head, problem.batch.slot_mapping[row], (row * shape.num_kv_heads + head) * shape.head_dim);
}

template <class T>
void store(const Problem& problem, const void* keys, const void* values) {
  const AttentionShape& shape = problem.shape;
  with_layer<T>(problem, [&](const auto& layer) {
    each_slot(problem, [&](int64_t head, int64_t slot, int64_t at) {
      store_kv(layer, shape.block_size, shape.head_dim, head, slot, static_cast<const T*>(keys) + at,
               static_cast<const T*>(values) + at);
    });
  });
}

template <class T>
void read(const Problem& problem, float* keys, float* values) {
  const AttentionShape& shape = problem.shape;
  with_layer<T>(problem, [&](const auto& layer) {
    each_slot(problem, [&](int64_t head, int64_t slot, int64_t at) {
      read_kv<T>(layer, shape.block_size, shape.head_dim, head, slot, keys + at, values + at);
    });
  });
}

template <class T>
void attend(const Problem& problem, const void* q, const float* sinks, void* out, int num_threads,
            const int64_t* row_cuts) {
  static AttentionPlan plan;  // not reentrant: tests call it from one thread
  plan.build(problem.batch, shape_of(problem), num_threads, row_cuts);
  int64_t stride = problem.shape.num_heads * problem.shape.head_dim;
  std::atomic<int64_t> next{0};
  auto work = [&](Team& team) {
    AttentionScratch scratch;
    auto run = [&](int64_t item, int64_t after) {
      with_layer<T>(problem, [&](const auto& layer) {
        run_item(plan, item, after, static_cast<const T*>(q), stride, layer, sinks, static_cast<T*>(out), stride, scratch);
      });
    };
    if (row_cuts)
      for (int64_t item = plan.first_item(team.thread); item < plan.first_item(team.thread + 1); item++)
        run(item, item + 1);
    else
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < plan.num_items();)
        run(item, item + team.size);
  };
  run_team(num_threads, work);
}

template <class T>
void find_states(const Problem& problem, const int64_t* begins, const void* q, const int64_t* first_states,
                 float* states, int num_threads) {
  static thread_local AttentionPlan plan;
  plan.build(problem.batch, shape_of(problem), num_threads, nullptr, begins);
  std::atomic<int64_t> next{0};
  const AttentionPlan& shared = plan;  // the caller's plan, shared by all threads
  auto work = [&](Team& team) {
    static thread_local AttentionScratch scratch;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < shared.num_items();)
      with_layer<T>(problem, [&](const auto& layer) {
        run_item_states(shared, item, item + team.size, static_cast<const T*>(q),
                        problem.shape.num_heads * problem.shape.head_dim, layer, first_states, states, scratch);
      });
  };
  run_team(num_threads, work);
}

template <class T>
void merge_states(const float* states, const int64_t* first_states, int64_t num_rows, int64_t num_heads,
                  int64_t head_dim, const float* sinks, T* out, int num_threads) {
  const int64_t width = 1 + LANES + head_dim, stride = num_heads * width;
  auto work = [&](Team& team) {
    for (int64_t row = team.begin(num_rows); row < team.end(num_rows); row++)
      for (int64_t head = 0; head < num_heads; head++)
        merge_row(states + first_states[row] * stride + head * width, first_states[row + 1] - first_states[row], stride,
                  head_dim, sinks ? sinks + head : nullptr, out + (row * num_heads + head) * head_dim);
  };
  run_team(num_threads, work);
}

}  // namespace

// Store the keys and values [num_rows, kv heads, head_dim] of the batch's rows at their slots.
extern "C" void nano_store(const Problem* problem, const void* keys, const void* values) {
  problem->is_bf16 ? store<bf16>(*problem, keys, values) : store<float>(*problem, keys, values);
}

// Read keys and values of the batch's rows, as floats.
extern "C" void nano_read_kv(const Problem* problem, float* keys, float* values) {
  problem->is_bf16 ? read<bf16>(*problem, keys, values) : read<float>(*problem, keys, values);
}

// Compute attention of q [num_rows, heads, head_dim] into `out` of the same shape. `sinks`: [heads] or null. Return 0,
// or 1 for an unsupported shape.
extern "C" int nano_attention(const Problem* problem, const void* q, const float* sinks, void* out, int num_threads,
                              const int64_t* row_cuts) {
  const AttentionShape& shape = problem->shape;
  if (shape.head_dim % LANES || shape.head_dim > MAX_HEAD_DIM || shape.num_heads % shape.num_kv_heads) return 1;
  problem->is_bf16 ? attend<bf16>(*problem, q, sinks, out, num_threads, row_cuts)
                   : attend<float>(*problem, q, sinks, out, num_threads, row_cuts);
  return 0;
}

// Compute the states of each row of q in each segment of the keys stored on this rank (run_item_states). `begins`:
// first key that each row sees, or null. Return 0, or 1 for an unsupported shape.
extern "C" int nano_attention_states(const Problem* problem, const int64_t* begins, const void* q,
                                     const int64_t* first_states, float* states, int num_threads) {
  const AttentionShape& shape = problem->shape;
  if (shape.head_dim % LANES || shape.head_dim > MAX_HEAD_DIM || shape.num_heads % shape.num_kv_heads) return 1;
  problem->is_bf16 ? find_states<bf16>(*problem, begins, q, first_states, states, num_threads)
                   : find_states<float>(*problem, begins, q, first_states, states, num_threads);
  return 0;
}

// Compute attention [num_rows, heads, head_dim] from states [..][heads][1 + 16 + head_dim]. Row r has states
// [first_states[r], first_states[r + 1]), in order of keys. `sinks`: [heads] or null.
extern "C" void nano_merge_states(const float* states, const int64_t* first_states, int64_t num_rows, int64_t num_heads,
                                  int64_t head_dim, int64_t is_bf16, const float* sinks, void* out,
                                  int num_threads) {
  if (is_bf16)
    merge_states(states, first_states, num_rows, num_heads, head_dim, sinks, static_cast<bf16*>(out), num_threads);
  else
    merge_states(states, first_states, num_rows, num_heads, head_dim, sinks, static_cast<float*>(out), num_threads);
}
