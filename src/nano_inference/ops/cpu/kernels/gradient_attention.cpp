// Attention without a cache, and its gradient, with probabilities that are computed again for blocks of queries.
//
// A unit is a query head of one segment. Scores of a block of queries are rows over all keys that the block sees, so a
// softmax is one pass. Products run by tiles of keys at absolute multiples of KEYS.
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.h"
#include "gradients.h"
#include "pool.h"
#include "row_parts.h"

namespace nano {
namespace {

constexpr int64_t QUERIES = 64, KEYS = 128;
constexpr int64_t SPARE = LANES;  // numbers between rows, which a power of two apart would map to few cache sets
constexpr float UNSEEN = -1e30f;

inline int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Memory of one thread for a block of queries.
template <class T>
struct BlockMemory {
  std::vector<float> scores, d_scores, slopes;
  std::vector<T> rows, turned, packed_q, packed_d;
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionGradient& p)
      : p_(p), size_(p.head_dim), wide_(p.heads * p.head_dim), narrow_(p.kv_heads * p.head_dim), group_(p.heads / p.kv_heads),
        tiles_((p.length + KEYS - 1) / KEYS), slot_(KEYS * (whole(size_) + LANES)), backward_(p.d_q != nullptr) {
    const size_t all = size_t(p.kv_heads * tiles_ * slot_);
    keys_.resize(all), values_.resize(all);
    if (!backward_) return;
    turned_keys_.resize(all);
    d_keys_.assign(size_t(p.heads * p.length * size_), 0.f), d_values_ = d_keys_;
    d_sinks_.assign(size_t(p.heads), 0.f);
  }

  void run(Team& team) {
    for (int64_t unit; (unit = next_pack_++) < p_.kv_heads * tiles_;) pack_tile(unit / tiles_, unit % tiles_);
    team.wait();
    for (int64_t head; (head = next_head_++) < p_.heads;)
      for (int64_t first = 0; first < p_.num_rows; first += QUERIES) block(head, first, std::min(p_.num_rows, first + QUERIES));
    if (!backward_) return;
    team.wait();
    for (int64_t i = team.begin(p_.length); i < team.end(p_.length); i++) merge(i);
    if (p_.d_sinks && team.thread == 0)
      for (int64_t h = 0; h < p_.heads; h++) p_.d_sinks[h] += d_sinks_[size_t(h)];
  }

 private:
  int64_t keys_in(int64_t tile) const { return std::min(KEYS, p_.length - tile * KEYS); }
  T* slot(std::vector<T>& of, int64_t kv_head, int64_t tile) { return of.data() + (kv_head * tiles_ + tile) * slot_; }

  void pack_tile(int64_t kv_head, int64_t tile) {
    static thread_local std::vector<T> gathered;
    const int64_t count = keys_in(tile), panels = whole(size_) / LANES;
    gathered.resize(size_t(KEYS * size_));
    auto gather = [&](const void* from) {
      for (int64_t i = 0; i < count; i++)
        memcpy(gathered.data() + i * size_, static_cast<const T*>(from) + p_.path[tile * KEYS + i] * narrow_ + kv_head * size_,
               size_t(size_) * sizeof(T));
      return gathered.data();
    };
    pack(gather(p_.k), slot(keys_, kv_head, tile), 0, count, size_);
    if (backward_) {
      pack_turned(gathered.data(), size_, count, size_, 0, panels, slot(turned_keys_, kv_head, tile));
      pack(gather(p_.v), slot(values_, kv_head, tile), 0, count, size_);
    } else {
      pack_turned(gather(p_.v), size_, count, size_, 0, panels, slot(values_, kv_head, tile));
    }
  }

  // Columns of a block's scores: tiles [first, last), and the distance between rows.
  struct Span {
    int64_t first, last, columns, stride;
  };

  // out = x . rows of the tiles in `packs`, for all keys of the span.
  void products_with(std::vector<T>& packs, int64_t kv_head, const Span& span, const T* x, int64_t ldx, int64_t count, float* out) {
    for (int64_t t = span.first; t < span.last; t++)
      multiply(x, ldx, count, slot(packs, kv_head, t), keys_in(t), size_, out + (t - span.first) * KEYS, span.stride, false);
  }
  // out [count][size_] = rows [count][span] . the turned tiles in `packs`.
  void sum_over_keys(std::vector<T>& packs, int64_t kv_head, const Span& span, const T* rows, int64_t count, float* out, int64_t ldo) {
    for (int64_t t = span.first; t < span.last; t++)
      multiply(rows + (t - span.first) * KEYS, span.stride, count, slot(packs, kv_head, t), size_, keys_in(t), out, ldo, t > span.first);
  }
  static void multiply(const T* x, int64_t ldx, int64_t count, const T* weight, int64_t rows, int64_t columns, float* out, int64_t ldo, bool adds) {
    const Linear<T> job{x, ldx, {weight, rows, columns}, nullptr, adds ? Finish::ADD : Finish::STORE, 1.f, out, ldo, false, {}};
    linear(job, 0, count, 0, job.num_panels(), {nullptr, nullptr, 0});
  }

  void block(int64_t head, int64_t first, int64_t last) {
    static thread_local BlockMemory<T> memory;
    const int64_t kv_head = head / group_, count = last - first, before = p_.length - p_.num_rows;
    const int64_t begin = first_key(before + first), end = before + last;
    Span span{begin / KEYS, (end + KEYS - 1) / KEYS, 0, 0};
    span.columns = std::min(p_.length, span.last * KEYS) - span.first * KEYS, span.stride = whole(span.columns) + SPARE;
    const size_t numbers = size_t(QUERIES * span.stride);
    const int64_t row = p_.path[before + first];  // a segment's rows are adjacent
    const T* q = static_cast<const T*>(p_.q) + row * wide_ + head * size_;
    memory.scores.resize(numbers), memory.rows.resize(numbers);
    if (p_.cap) memory.slopes.resize(numbers);
    products_with(keys_, kv_head, span, q, wide_, count, memory.scores.data());
    float sink_shares[QUERIES];
    for (int64_t i = 0; i < count; i++) soften(memory, span, head, i, before + first + i, sink_shares[i]);
    if (backward_) return differentiate(memory, span, head, row, count, before + first, sink_shares);
    for (int64_t i = 0; i < count; i++) round_row(memory.scores.data() + i * span.stride, span.columns, memory.rows.data() + i * span.stride);
    memory.d_scores.resize(size_t(QUERIES * size_));
    sum_over_keys(values_, kv_head, span, memory.rows.data(), count, memory.d_scores.data(), size_);
    for (int64_t i = 0; i < count; i++)
      round_row(memory.d_scores.data() + i * size_, size_, static_cast<T*>(p_.out) + (row + i) * wide_ + head * size_);
  }

  int64_t first_key(int64_t position) const { return p_.window ? std::max<int64_t>(0, position - p_.window + 1) : 0; }

  // Lanes from column j on that a row sees: keys [begin, end), counted from the span's first column.
  static Mask visible(int64_t j, int64_t begin, int64_t end) {
    return first_lanes(int(std::min<int64_t>(LANES, end - j))) & ~first_lanes(int(std::clamp<int64_t>(begin - j, 0, LANES)));
  }

  // Turn a row's products into probabilities. Keys that it does not see get 0.
  void soften(BlockMemory<T>& memory, const Span& span, int64_t head, int64_t i, int64_t position, float& sink_share) {
    float* s = memory.scores.data() + i * span.stride;
    float* slopes = p_.cap ? memory.slopes.data() + i * span.stride : nullptr;
    const int64_t base = span.first * KEYS, begin = first_key(position) - base, end = position + 1 - base;
    const Vec scale = vset(p_.scale), cap = vset(p_.cap), unseen = vset(UNSEEN);
    Vec highest = unseen;
    for (int64_t j = 0; j < span.columns; j += LANES) {
      Vec score = vmul(vload(s + j), scale);
      if (slopes) {
        const Vec part = vtanh(vdiv(score, cap));
        score = vmul(cap, part);
        vstore(slopes + j, vsub(vset(1.f), vmul(part, part)));
      }
      score = vselect(visible(j, begin, end), score, unseen);
      vstore(s + j, score);
      highest = vmax(highest, score);
    }
    float most = vhighest(highest);
    if (p_.sinks && p_.sinks[head] > most) most = p_.sinks[head];
    Vec sum = vset(0.f);
    for (int64_t j = 0; j < span.columns; j += LANES) {
      Vec odd = vexp(vmax(vset(-100.f), vsub(vload(s + j), vset(most))));
      odd = vselect(visible(j, begin, end), odd, vset(0.f));
      vstore(s + j, odd);
      sum = vadd(sum, odd);
    }
    const float sink = p_.sinks ? vfirst(vexp(vmax(vset(-100.f), vset(p_.sinks[head] - most)))) : 0.f;
    const float inverse = 1.f / (vsum(sum) + sink);
    for (int64_t j = 0; j < span.columns; j += LANES) vstore(s + j, vmul(vload(s + j), vset(inverse)));
    sink_share = sink * inverse;
  }

  // Turn a row's probabilities p and their gradients d into p * (d - sum(p * d)) * slope * scale. Return the sum.
  float soften_back(BlockMemory<T>& memory, const Span& span, int64_t i, int64_t position) {
    const float *s = memory.scores.data() + i * span.stride, *slopes = p_.cap ? memory.slopes.data() + i * span.stride : nullptr;
    float* d = memory.d_scores.data() + i * span.stride;
    const int64_t base = span.first * KEYS, begin = first_key(position) - base, end = position + 1 - base;
    Vec sum = vset(0.f);
    for (int64_t j = 0; j < span.columns; j += LANES) {
      const Vec own = vselect(visible(j, begin, end), vload(d + j), vset(0.f));
      vstore(d + j, own);
      sum = vfma(vload(s + j), own, sum);
    }
    const float total = vsum(sum);
    for (int64_t j = 0; j < span.columns; j += LANES) {
      Vec own = vmul(vmul(vload(s + j), vsub(vload(d + j), vset(total))), vset(p_.scale));
      if (slopes) own = vselect(visible(j, begin, end), vmul(own, vload(slopes + j)), vset(0.f));
      vstore(d + j, own);
    }
    return total;
  }

  void differentiate(BlockMemory<T>& memory, const Span& span, int64_t head, int64_t row, int64_t count, int64_t position,
                     const float* sink_shares) {
    const int64_t kv_head = head / group_, panels = whole(size_) / LANES, ldt = QUERIES + SPARE;
    const T *q = static_cast<const T*>(p_.q) + row * wide_ + head * size_, *d_out = static_cast<const T*>(p_.d_out) + row * wide_ + head * size_;
    memory.d_scores.resize(size_t(QUERIES * span.stride)), memory.turned.resize(size_t(span.columns * ldt));
    memory.packed_q.resize(size_t(whole(size_) * (QUERIES + 1))), memory.packed_d.resize(memory.packed_q.size());
    float *s = memory.scores.data(), *d = memory.d_scores.data();
    products_with(values_, kv_head, span, d_out, wide_, count, d);
    for (int64_t i = 0; i < count; i++) {
      const float total = soften_back(memory, span, i, position + i);
      d_sinks_[size_t(head)] -= sink_shares[i] * total;
      round_row(d + i * span.stride, span.columns, memory.rows.data() + i * span.stride);
    }
    sum_over_keys(turned_keys_, kv_head, span, memory.rows.data(), count, p_.d_q + row * wide_ + head * size_, wide_);
    const int64_t place = (head * p_.length + span.first * KEYS) * size_;
    auto sum_over_queries = [&](const float* rows, const T* x, std::vector<T>& packed, float* out) {
      turn(rows, span.stride, count, 0, span.columns, memory.turned.data(), ldt);
      pack_turned(x, wide_, count, size_, 0, panels, packed.data());
      multiply(memory.turned.data(), ldt, span.columns, packed.data(), size_, count, out, size_, true);
    };
    sum_over_queries(s, d_out, memory.packed_d, d_values_.data() + place);
    sum_over_queries(d, q, memory.packed_q, d_keys_.data() + place);
  }

  // Add the gradients of key and value i of all heads, in order, to those of its row.
  void merge(int64_t i) {
    for (int64_t kv_head = 0; kv_head < p_.kv_heads; kv_head++)
      for (int64_t c = 0; c < size_; c += LANES) {
        const int n = left(size_, c);
        const int64_t out = p_.path[i] * narrow_ + kv_head * size_ + c;
        Vec d_key = vload_n(p_.d_k + out, n), d_value = vload_n(p_.d_v + out, n);
        for (int64_t h = kv_head * group_; h < (kv_head + 1) * group_; h++) {
          const size_t at = size_t((h * p_.length + i) * size_ + c);
          d_key = vadd(d_key, vload_n(d_keys_.data() + at, n)), d_value = vadd(d_value, vload_n(d_values_.data() + at, n));
        }
        vstore_n(p_.d_k + out, d_key, n), vstore_n(p_.d_v + out, d_value, n);
      }
  }

  const AttentionGradient& p_;
  const int64_t size_, wide_, narrow_, group_, tiles_, slot_;
  const bool backward_;
  std::vector<T> keys_, values_, turned_keys_;  // packed tiles by KV head; values are turned in the forward pass
  std::vector<float> d_keys_, d_values_, d_sinks_;  // by query head
  std::atomic<int64_t> next_pack_{0}, next_head_{0};
};

template <class T>
void attend(const AttentionGradient& p) {
  Attention<T> attention(p);
  auto work = [&](Team& team) { attention.run(team); };
  run_team(int(p.num_threads), work);
}

}  // namespace
}  // namespace nano

extern "C" void nano_attention_gradient(const nano::AttentionGradient* p) {
  p->is_bf16 ? nano::attend<nano::bf16>(*p) : nano::attend<float>(*p);
}
