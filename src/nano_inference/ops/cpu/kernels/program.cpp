#include "program.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <vector>

#include "pool.h"

namespace nano {
namespace {

constexpr int64_t ROWS_OF_A_THREAD = 32;  // with this many rows per thread, a thread keeps its rows across operations
// rows that pass through a layer together: intermediate results stay in the cache
constexpr int64_t BLOCK_OF_ROWS = 256;
constexpr int64_t FEW_ROWS = 4;           // so few that each thread normalizes all of them instead of waiting
constexpr double UNEVEN = 1.08;           // most rows of a thread, relative to an equal share, to own whole sequences

enum Problem {
  NONE = 0, BAD_TOKEN = 1, BAD_POSITION = 2, BAD_SLOT = 3, BAD_TABLE = 4, BAD_LENGTHS = 5, BAD_ADAPTER = 6, BAD_KIND = 7
};

// How threads share a step. COLUMNS: each product is cut by columns, with a barrier after every operation. ROWS: each
// thread has the same rows in every operation, with barriers around attention. SEQUENCES: each thread has the rows of
// whole sequences, so that no thread waits for another.
enum class Sharing { COLUMNS, ROWS, SEQUENCES };

}  // namespace

// A recorded step. Not re-entrant: one call at a time.
class Program {
 public:
  explicit Program(const ProgramSpec& spec)
      : spec_(spec), ops_(spec.ops, spec.ops + spec.num_ops), layers_(spec.layers, spec.layers + spec.num_layers),
        windows_(spec.windows, spec.windows + spec.num_windows), plans_(spec.num_windows),
        taken_(new std::atomic<int64_t>[size_t(spec.num_ops)]) {
    spec_.ops = nullptr, spec_.layers = nullptr, spec_.windows = nullptr;
  }

  int run(const Step& step) {
    if (step.first < 0 || step.last > int64_t(ops_.size())) return BAD_LENGTHS;
    if (step.first == 0)
      if (int problem = begin(step)) return problem;
    step_ = &step;
    auto work = [this](Team& team) { spec_.is_bf16 ? perform<bf16>(team) : perform<float>(team); };
    has_bad_kind_.store(false, std::memory_order_relaxed);
    run_team(int(step.num_threads), work);
    return has_bad_kind_.load(std::memory_order_relaxed) ? BAD_KIND : NONE;
  }

 private:
  // Prepare the state that all runs of a step share.
  int begin(const Step& step) {
    if (int problem = check(step)) return problem;
    step_ = &step;
    share();
    for (int64_t w = 0; w < spec_.num_windows; w++) {
      const Window& own = windows_[w];
      AttentionShape shape{own.num_heads, own.num_kv_heads, own.head_dim, spec_.block_size, own.size, own.scale, own.cap};
      if (keys_are_values()) shape = shape.with_equal_heads();
      plans_[w].build(step.rows, shape, int(step.num_threads), sharing_ == Sharing::SEQUENCES ? cuts_.data() : nullptr);
    }
    for (int64_t i = 0; i < spec_.num_ops; i++) taken_[i].store(0, std::memory_order_relaxed);
    return NONE;
  }

  int check(const Step& step) const {
    const BatchRows& b = step.rows;
    const int64_t slots = spec_.num_blocks * spec_.block_size;
    if (spec_.num_windows || spec_.num_layers) {
      for (int64_t i = 0; i < b.num_rows; i++) {
        if (b.positions[i] < 0 || b.positions[i] >= spec_.num_positions) return BAD_POSITION;
        if (b.slot_mapping[i] < 0 || b.slot_mapping[i] >= slots) return BAD_SLOT;
      }
    }
    if (spec_.num_windows) {
      if (b.num_chunks < 1 || b.cu_seqlens_q[0] != 0 || b.cu_seqlens_q[b.num_chunks] != b.num_rows) return BAD_LENGTHS;
      for (int64_t c = 0; c < b.num_chunks; c++) {
        const int64_t begin = b.cu_seqlens_q[c], end = b.cu_seqlens_q[c + 1], context = b.seq_lens[c];
        if (end <= begin || end > b.num_rows) return BAD_LENGTHS;
        if (context < end - begin || context > b.table_stride * spec_.block_size) return BAD_LENGTHS;
        for (int64_t i = begin; i < end; i++)
          if (b.positions[i] != context - end + i || b.row_chunks[i] != c) return BAD_LENGTHS;
        for (int64_t i = 0; i * spec_.block_size < context; i++) {
          const int64_t block = b.block_tables[c * b.table_stride + i];
          if (block < 0 || block >= spec_.num_blocks) return BAD_TABLE;
        }
      }
    }
    for (int64_t i = 0; step.row_adapters && i < b.num_rows; i++)
      if (step.row_adapters[i] >= step.num_adapters) return BAD_ADAPTER;
    for (const Op& op : ops_)
      if (op.kind == Kind::EMBED)
        for (int64_t i = 0; i < b.num_rows; i++)
          if (step.input_ids[i] < 0 || step.input_ids[i] >= (op.vocab ? op.vocab : op.rows)) return BAD_TOKEN;
    return NONE;
  }

  // Choose how to share, and the rows of each thread.
  void share() {
    const int64_t n = step_->rows.num_rows, threads = step_->num_threads;
    cuts_.assign(size_t(threads) + 1, 0);
    if (threads > 1 && n < ROWS_OF_A_THREAD * threads) {
      sharing_ = Sharing::COLUMNS;
      return;
    }
    // Cut where sequences begin, each cut as close as possible to an equal share.
    const int64_t* starts = step_->rows.cu_seqlens_q;
    const int64_t chunks = spec_.num_windows ? step_->rows.num_chunks : 0;
    bool even = chunks > 0;
    for (int64_t t = 1; t <= threads && even; t++) {
      const int64_t wanted = n * t / threads;
      const int64_t* after = std::lower_bound(starts, starts + chunks, wanted);
      if (after != starts && wanted - after[-1] < *after - wanted) after--;
      cuts_[t] = t == threads ? n : *after;
      even = cuts_[t] > cuts_[t - 1] && double(cuts_[t] - cuts_[t - 1]) * double(threads) <= UNEVEN * double(n);
    }
    sharing_ = even || threads == 1 ? Sharing::SEQUENCES : Sharing::ROWS;
    if (threads == 1) cuts_[1] = n;
    if (sharing_ == Sharing::ROWS)
      for (int64_t t = 0; t <= threads; t++) cuts_[t] = n * t / threads;
  }

  template <class T>
  void perform(Team& team) {
    if (sharing_ == Sharing::COLUMNS) return perform_by_columns<T>(team);
    const int64_t row = cuts_[team.thread], end_row = cuts_[team.thread + 1];
    const size_t last = size_t(step_->last);
    for (size_t i = size_t(step_->first); i < last;) {
      size_t end = i;
      while (end < last && ops_[end].kind != Kind::ATTENTION) end++;
      for (int64_t from = row; from < end_row; from += BLOCK_OF_ROWS)
        for (size_t k = i; k < end; k++) {
          const int64_t to = std::min(from + BLOCK_OF_ROWS, end_row);
          if (ops_[k].kind == Kind::LINEAR) product<T>(k, from, to, 0, 1);
          else if (ops_[k].kind == Kind::LORA) adapt<T>(ops_[k], from, to, 0, 1);
          else by_rows<T>(ops_[k], from, to);
        }
      if (end < last) {
        if (sharing_ == Sharing::ROWS) team.wait();
        attend<T>(end, team);
        if (sharing_ == Sharing::ROWS) team.wait();
      }
      i = end + 1;
    }
  }

  template <class T>
  void perform_by_columns(Team& team) {
    const int64_t n = step_->rows.num_rows;
    static thread_local std::vector<T> own;  // normalized rows of this thread
    bool has_own = false;
    for (size_t i = size_t(step_->first); i < size_t(step_->last); i++) {
      const Op& op = ops_[i];
      if (op.kind == Kind::NORM && op.read_once && op.input < 0 && n <= FEW_ROWS) {
        own.resize(size_t(n * op.columns));
        for (int64_t row = 0; row < n; row++)
          rms_norm<T>(nullptr, 1.f, at<float>(op.residual, row), op.norm, op.columns, own.data() + row * op.columns);
        has_own = true;
        continue;
      }
      if (op.kind == Kind::ATTENTION) attend<T>(i, team);
      else if (op.kind == Kind::LINEAR) product<T>(i, 0, n, team.thread, team.size, has_own ? own.data() : nullptr);
      else if (op.kind == Kind::LORA) adapt<T>(op, 0, n, team.thread, team.size);
      else if (op.kind == Kind::ROPE_AND_STORE && can_go_by_heads(op)) rope_by_heads<T>(op, team);
      else by_rows<T>(op, team.begin(n), team.end(n));
      has_own = false;
      team.wait();
    }
  }

  template <class T>
  T* at(int32_t buffer, int64_t row) const {
    return reinterpret_cast<T*>(static_cast<char*>(step_->buffers[buffer]) + row * step_->row_bytes[buffer]);
  }
  template <class T>
  int64_t stride(int32_t buffer) const { return step_->row_bytes[buffer] / int64_t(sizeof(T)); }

  template <class T>
  Linear<T> linear_of(const Op& op) const {
    const bool gates = op.finish >= Finish::SILU;
    const int64_t ldo = gates ? stride<T>(op.output) : stride<float>(op.output);
    return {at<const T>(op.input, 0) + op.first_column, stride<T>(op.input), {static_cast<const T*>(op.weight), op.rows, op.columns, op.codes},
            static_cast<const T*>(op.bias), op.finish, op.scale, at<void>(op.output, 0), ldo, false, op.segments};
  }

  template <class T>
  void product(size_t index, int64_t row, int64_t end_row, int part, int parts, const T* own = nullptr) const {
    const Op& op = ops_[index];
    Linear<T> job = linear_of<T>(op);
    if (own) job.x = own, job.ldx = job.w.columns;
    const int64_t panels = job.num_panels(), first = panels * part / parts, last = panels * (part + 1) / parts;
    const Panels<T> next = next_weights<T>(index, part, parts);
    if (!op.heads) return linear(job, row, end_row, first, last, next);
    const int64_t size = panels / op.heads;  // panels per head
    for (int64_t from = first, to; from < last; from = to) {
      const int64_t head = from / size;
      to = std::min(last, (head + 1) * size);
      Linear<T> own_job = job;
      own_job.x += head * op.input_step;
      own_job.w = job.w.part(head * size, size * LANES);
      own_job.out = static_cast<float*>(job.out) + op.first_output + head * op.output_step;
      linear(own_job, row, end_row, from - head * size, to - head * size, to < last ? panels_at(job, to) : next);
    }
  }

  // Add the adapters of rows to a product, for a part of its columns.
  template <class T>
  void adapt(const Op& op, int64_t row, int64_t end_row, int part, int parts) const {
    if (!step_->row_adapters) return;
    const int64_t width = stride<float>(op.output), from = width * part / parts, to = width * (part + 1) / parts;
    for (int64_t i = row; i < end_row; i++)
      if (const int64_t own = step_->row_adapters[i]; own >= 0)
        lora(at<const T>(op.input, i) + op.first_column, op.columns, step_->adapters[own][op.plan], from, to,
             at<float>(op.output, i));
  }

  // Return this thread's next weights after operation `index`: its first panels of the next product.
  template <class T>
  Panels<T> next_weights(size_t index, int part, int parts) const {
    for (size_t k = index + 1; k < ops_.size(); k++)
      if (ops_[k].kind == Kind::LINEAR) {
        const Linear<T> job = linear_of<T>(ops_[k]);
        if (job.w.codes) break;
        return panels_at(job, job.num_panels() * part / parts);
      }
    return {nullptr, nullptr, 0};
  }

  template <class T>
  void attend(size_t index, Team& team) {
    const Op& op = ops_[index];
    if (spec_.kv_codes) attend<T>(index, team, layer_of<int8_t>(op.layer));
    else attend<T>(index, team, layer_of<T>(op.layer));
  }

  template <class T, class S>
  void attend(size_t index, Team& team, const KvLayer<S>& layer) {
    const Op& op = ops_[index];
    AttentionPlan& plan = plans_[size_t(op.plan)];
    static thread_local AttentionScratch scratch;
    const int64_t count = plan.num_items();
    auto one = [&](int64_t item, int64_t next) {
      run_item<T>(plan, item, next, at<const T>(op.input, 0), stride<T>(op.input), layer,
                  static_cast<const float*>(op.bias), at<T>(op.output, 0), stride<T>(op.output), scratch);
    };
    if (sharing_ == Sharing::SEQUENCES) {
      const int64_t end = plan.first_item(team.thread + 1);
      for (int64_t item = plan.first_item(team.thread); item < end; item++) one(item, item + 1 < end ? item + 1 : count);
    } else {
      for (int64_t item; (item = taken_[index].fetch_add(1, std::memory_order_relaxed)) < count;)
        one(item, item + team.size);
    }
  }

  template <class S>
  KvLayer<S> layer_of(int32_t index) const {
    const Layer& layer = layers_[size_t(index)];
    return kv_layer<S>(layer.keys, layer.values, layer.head_stride, layer.unit_stride, layer.units);
  }
  bool keys_are_values() const { return !layers_.empty() && layers_[0].keys == layers_[0].values; }

  // Run an operation that processes one row after another.
  template <class T>
  void by_rows(const Op& op, int64_t row, int64_t end_row) const {
    for (int64_t i = row; i < end_row; i++) {
      const float* in = op.input >= 0 ? at<const float>(op.input, i) : nullptr;
      switch (op.kind) {
        case Kind::EMBED:
          embed<T>({static_cast<const T*>(op.weight), op.rows, op.columns, op.codes}, step_->input_ids[i] - op.first_token, op.scale,
                   at<float>(op.output, i));
          break;
        case Kind::NORM:
          if (op.wide) rms_norm<T>(in, op.scale, at<float>(op.residual, i), op.norm, op.columns, at<float>(op.output, i));
          else rms_norm<T>(in, op.scale, at<float>(op.residual, i), op.norm, op.columns, at<T>(op.output, i));
          break;
        case Kind::ROPE_AND_STORE: rope_and_store<T>(op, i); break;
        case Kind::MEET:
          meet<T>(at<const float>(op.residual, i), at<float>(op.input, i),
                  {op.heads, op.input_step, op.output_step, op.turning, op.columns}, op.norm, at<float>(op.output, i));
          break;
        case Kind::GATE: gate<T>(in, op.rows, op.finish, at<T>(op.output, i)); break;
        default: has_bad_kind_.store(true, std::memory_order_relaxed);
      }
    }
  }

  static bool can_go_by_heads(const Op& op) {
    return op.kv_heads && !op.norm.data && !op.key_norm.data && !op.value_norm.data;
  }

  // Process each key head with its queries separately, so that all threads have work if rows are few.
  template <class T>
  void rope_by_heads(const Op& op, Team& team) const {
    const int64_t kv_heads = op.kv_heads, group = op.query_heads / kv_heads, items = step_->rows.num_rows * kv_heads;
    for (int64_t item = team.begin(items); item < team.end(items); item++) {
      const int64_t row = item / kv_heads, head = item % kv_heads;
      rope_heads<T>(op, row, head * group, (head + 1) * group, head, head + 1, values_of(op, row));
    }
  }

  const float* values_of(const Op& op, int64_t row) const {
    const int64_t before = op.query_heads + (op.joint ? 0 : op.kv_heads);
    return at<const float>(op.input, row) + op.first_column + before * op.head_dim;
  }

  template <class T>
  void rope_and_store(const Op& op, int64_t row) const {
    const int64_t heads = op.query_heads, kv_heads = op.kv_heads, size = op.head_dim;
    float* query = at<float>(op.input, row) + op.first_column;
    const float* values = values_of(op, row);
    static thread_local std::vector<float> own;
    if (kv_heads && (op.joint || op.value_norm.data)) {  // copied before the norm of keys changes them
      own.assign(values, values + kv_heads * size);
      if (op.value_norm.data) norm_heads<T>(own.data(), kv_heads, op.value_norm);
      values = own.data();
    }
    if (op.norm.data) norm_heads<T>(query, heads * size / op.norm.size, op.norm);
    if (op.key_norm.data) norm_heads<T>(query + heads * size, kv_heads * size / op.key_norm.size, op.key_norm);
    rope_heads<T>(op, row, 0, heads, 0, kv_heads, values);
  }

  // Rotate queries [first, last) of a row, and rotate and store its key heads [from, to), with their values.
  template <class T>
  void rope_heads(const Op& op, int64_t row, int64_t first, int64_t last, int64_t from, int64_t to,
                  const float* values) const {
    const int64_t size = op.head_dim;
    const float *query = at<const float>(op.input, row) + op.first_column, *key = query + op.query_heads * size;
    const int64_t position = step_->rows.positions[row];
    const Turn turn{size, op.turning, op.interleaved != 0};
    const float *cos = op.cos + position * (op.turning / 2), *sin = op.sin + position * (op.turning / 2);
    const float scale = op.query_scales ? op.query_scales[position] : 1.f;
    T* out = at<T>(op.output, row);
    for (int64_t h = first; h < last; h++) rope<T>(query + h * size, cos, sin, turn, scale, out + h * size);
    alignas(64) T k[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
    for (int64_t h = from; h < to; h++) {
      rope<T>(key + h * size, cos, sin, turn, 1.f, k);
      round_row<T>(values + h * size, size, v);
      const int64_t slot = step_->rows.slot_mapping[row];
      if (spec_.kv_codes) store_kv(layer_of<int8_t>(op.layer), spec_.block_size, size, h, slot, k, v);
      else store_kv(layer_of<T>(op.layer), spec_.block_size, size, h, slot, k, v);
    }
  }

  ProgramSpec spec_;
  std::vector<Op> ops_;
  std::vector<Layer> layers_;
  std::vector<Window> windows_;
  std::vector<AttentionPlan> plans_;
  std::unique_ptr<std::atomic<int64_t>[]> taken_;  // items of each attention that threads have taken
  std::vector<int64_t> cuts_;                      // first row of each thread, and N
  Sharing sharing_ = Sharing::COLUMNS;
  const Step* step_ = nullptr;
  mutable std::atomic<bool> has_bad_kind_{false};  // an operation's kind has no kernel
};

}  // namespace nano

extern "C" {
void* nano_program_new(const nano::ProgramSpec* spec) { return new nano::Program(*spec); }
void nano_program_free(void* program) { delete static_cast<nano::Program*>(program); }
int nano_program_run(void* program, const nano::Step* step) { return static_cast<nano::Program*>(program)->run(*step); }
}
