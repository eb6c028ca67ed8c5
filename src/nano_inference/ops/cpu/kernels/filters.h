// top_k, top_p, min_p and the best tokens of one row, without sorting many more tokens than remain.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "noise.h"
#include "simd.h"

namespace nano::head {

constexpr int VOCAB_BLOCK = 384;

// `FilterColumns` of sampling/filters.py: one number per sample. top_k = 0, top_p = 1 and min_p = 0 disable a filter.
struct Filters {
  const int64_t* top_k;
  const float *top_p, *min_p;
};

inline bool is_filtered(const Filters& f, int64_t sample, int64_t vocab) {
  return (f.top_k[sample] > 0 && f.top_k[sample] < vocab) || f.top_p[sample] < 1 || f.min_p[sample] > 0;
}

// A row whose logits are stored after edits, padded with -inf to whole vectors.
struct KeptRow {
  const float* logits;
  const float* maxima;  // maximum of each block
  int64_t vocab, num_blocks;
  float highest, inv_t;
  float total;  // sum of exp((z - highest) * inv_t)
};

// Return a key that rises as the logit falls. -0 and +0 are equal.
inline uint64_t key_of(float logit, int64_t id) {
  logit += 0.f;
  uint32_t bits;
  memcpy(&bits, &logit, 4);
  return uint64_t(bits >> 31 ? bits : ~bits & 0x7fffffff) << 32 | uint64_t(id);
}

// Tokens by (logit descending, id ascending). Owned by one thread; only `reserve` allocates.
class Ranking {
 public:
  void reserve(int64_t vocab, int64_t num_blocks);

  // Rank the tokens that the filters of a sample keep.
  void filter(const KeptRow& row, const Filters& filters, int64_t sample);
  // Rank the k best tokens, or all unmasked tokens if there are fewer.
  void best(const KeptRow& row, int64_t k);

  int64_t size() const { return size_; }
  float total() const { return total_; }  // odds of the kept tokens; of the whole row if nothing was cut
  const int32_t* ids() const { return ids_.data(); }
  const float* logits() const { return logits_.data(); }
  const float* odds() const { return odds_.data(); }  // padded with zeros to a whole vector
  // True if a token of the row is among them.
  bool has(float logit, int64_t id) const {
    return std::binary_search(keys_.begin(), keys_.begin() + size_, key_of(logit, id));
  }

 private:
  float kth_bound(const KeptRow& row, int64_t k);
  void collect(const KeptRow& row, float least);
  void sort();
  void expand(const KeptRow& row);
  float collected_mass(const KeptRow& row) const;
  void rank_all(const KeptRow& row, float top_p, float min_p);
  bool cut_top_p(float top_p, float mass);

  std::vector<uint64_t> keys_, other_;  // falling logit in the high half, id in the low one
  std::vector<float> maxima_, logits_, odds_;
  std::vector<int32_t> ids_;
  int64_t size_ = 0, alive_ = -1;  // alive: number of unmasked tokens, -1 if not counted
  float total_ = 0;
};

constexpr float LOWEST = -std::numeric_limits<float>::max();  // below every unmasked token
constexpr int64_t RADIX_FROM = 1024;                          // from here on counting is faster than comparing

inline float logit_of(uint64_t key) {
  uint32_t bits = uint32_t(key >> 32);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  float logit;
  memcpy(&logit, &bits, 4);
  return logit;
}

inline Vec odds_in(const KeptRow& row, Vec logits) {
  return odds_of(logits, vset(row.highest), vset(row.inv_t * LOG2E));
}

// Return the logit below which odds are lower than `odds`. Rounding to nearest preserves the order of logits.
inline float logit_at(const KeptRow& row, double odds, double slack) {
  double logit = row.highest + (log1(odds) - slack) / row.inv_t;
  return logit > LOWEST ? float(logit) : LOWEST;
}

// Return the k-th largest number. Reorders the array.
inline float kth_largest(std::vector<float>& values, int64_t count, int64_t k) {
  std::nth_element(values.begin(), values.begin() + (k - 1), values.begin() + count, std::greater<float>());
  return std::max(values[size_t(k - 1)], LOWEST);
}

inline void Ranking::reserve(int64_t vocab, int64_t num_blocks) {
  size_t size = size_t(vocab) + LANES;
  if (keys_.size() >= size && maxima_.size() >= size_t(num_blocks * LANES)) return;
  keys_.resize(size), other_.resize(size), logits_.resize(size), odds_.resize(size), ids_.resize(size);
  maxima_.resize(size_t(num_blocks * LANES));
}

// Return a logit that at least k tokens reach, and rarely many more: the k-th largest maximum of disjoint token sets.
inline float Ranking::kth_bound(const KeptRow& row, int64_t k) {
  if (k <= row.num_blocks) {
    std::copy(row.maxima, row.maxima + row.num_blocks, maxima_.begin());
    return kth_largest(maxima_, row.num_blocks, k);
  }
  if (k > row.num_blocks * LANES) return LOWEST;
  for (int64_t block = 0; block < row.num_blocks; block++) {
    const float* z = row.logits + block * VOCAB_BLOCK;
    int64_t count = std::min<int64_t>(row.vocab - block * VOCAB_BLOCK, VOCAB_BLOCK);
    Vec highest = vload(z);
    for (int64_t j = LANES; j < count; j += LANES) highest = vmax(highest, vload(z + j));
    vstore(&maxima_[size_t(block * LANES)], highest);
  }
  return kth_largest(maxima_, row.num_blocks * LANES, k);
}

// Collect all tokens whose logit is at least this, by rising id.
inline void Ranking::collect(const KeptRow& row, float least) {
  uint64_t* out = keys_.data();
  for (int64_t block = 0; block < row.num_blocks; block++) {
    if (!(row.maxima[block] >= least)) continue;
    int64_t start = block * VOCAB_BLOCK, end = std::min<int64_t>(start + VOCAB_BLOCK, row.vocab);
    for (int64_t j = start; j < end; j += LANES)
      for (Mask found = vge(vload(row.logits + j), vset(least)); found; found &= found - 1) {
        int64_t id = j + __builtin_ctz(found);
        *out++ = key_of(row.logits[id], id);
      }
  }
  size_ = out - keys_.data();
  alive_ = least == LOWEST ? size_ : -1;
}

inline void Ranking::sort() {
  if (size_ < RADIX_FROM) {
    std::sort(keys_.begin(), keys_.begin() + size_);
    return;
  }
  // Ids rise already, and counting preserves the order of equals: three digits of the logit are enough.
  constexpr int BITS = 11, DIGITS = 1 << BITS;
  static_assert(3 * BITS >= 32, "three digits");
  uint32_t counts[3][DIGITS] = {};
  for (int64_t j = 0; j < size_; j++)
    for (int pass = 0; pass < 3; pass++) counts[pass][keys_[size_t(j)] >> (32 + pass * BITS) & (DIGITS - 1)]++;
  for (int pass = 0; pass < 3; pass++) {
    uint32_t before = 0;
    for (uint32_t& count : counts[pass]) before += count, count = before - count;
    for (int64_t j = 0; j < size_; j++) {
      uint64_t key = keys_[size_t(j)];
      other_[counts[pass][key >> (32 + pass * BITS) & (DIGITS - 1)]++] = key;
    }
    keys_.swap(other_);
  }
}

// Fill in ids, logits and odds of the tokens, in order.
inline void Ranking::expand(const KeptRow& row) {
  for (int64_t j = 0; j < size_; j++) ids_[size_t(j)] = int32_t(keys_[size_t(j)]), logits_[size_t(j)] = logit_of(keys_[size_t(j)]);
  for (int64_t j = 0; j < size_; j += LANES)
    vstore(&odds_[size_t(j)], odds_in(row, vload_n(&logits_[size_t(j)], int(std::min<int64_t>(size_ - j, LANES)))));
}

inline float Ranking::collected_mass(const KeptRow& row) const {
  float logits[LANES];
  Vec sum = vset(0.f);
  for (int64_t j = 0; j < size_; j += LANES) {
    for (int lane = 0; lane < LANES; lane++)
      logits[lane] = j + lane < size_ ? logit_of(keys_[size_t(j + lane)]) : -std::numeric_limits<float>::infinity();
    sum = vadd(sum, odds_in(row, vload(logits)));
  }
  return vsum(sum);
}

// Cut after the shortest prefix that reaches the mass. Return false if all tokens together do not reach it.
inline bool Ranking::cut_top_p(float top_p, float mass) {
  float need = top_p * mass, before = 0;
  for (int64_t j = 0; j < size_; j++) {
    before += odds_[size_t(j)];
    if (before >= need) {
      size_ = j + 1;
      return true;
    }
  }
  return false;
}

// Without top_k, the number of tokens that top_p needs is unknown until their mass is added up, so the bound is lowered
// step by step. The tail below (1 - top_p) / vocab is only needed because of rounding. min_p may end the search sooner.
inline void Ranking::rank_all(const KeptRow& row, float top_p, float min_p) {
  float least = min_p > 0 ? logit_at(row, min_p, 1e-3) : LOWEST;
  if (top_p < 1) {
    double spare = (1.0 - double(top_p)) * row.total;
    for (double share : {1.0 / 64, 1.0 / 512, 1.0 / 4096, 1.0 / 16384, 1.0 / double(row.vocab)}) {
      if (spare * share >= 0.5) continue;
      float bound = logit_at(row, spare * share, 0);
      if (!(bound > least)) break;
      collect(row, bound);
      if (collected_mass(row) < top_p * row.total) continue;
      sort(), expand(row);
      if (cut_top_p(top_p, row.total)) return;
    }
  }
  collect(row, least), sort(), expand(row);
  if (top_p < 1) cut_top_p(top_p, row.total);
}

inline void Ranking::filter(const KeptRow& row, const Filters& filters, int64_t sample) {
  const int64_t top_k = filters.top_k[sample];
  const float top_p = filters.top_p[sample], min_p = filters.min_p[sample];
  if (top_k > 0 && top_k < row.vocab) {
    best(row, top_k);
    if (top_p < 1) {
      float mass = 0;
      for (int64_t j = 0; j < size_; j++) mass += odds_[size_t(j)];
      cut_top_p(top_p, mass);
    }
  } else {
    rank_all(row, top_p, min_p);
  }
  size_ = std::max<int64_t>(size_, 1);
  if (min_p > 0) {
    int64_t kept = 1;
    while (kept < size_ && odds_[size_t(kept)] >= min_p) kept++;
    size_ = kept;
  }
  for (int64_t j = size_; j % LANES; j++) odds_[size_t(j)] = 0;
  Vec sum = vset(0.f);
  for (int64_t j = 0; j < size_; j += LANES) sum = vadd(sum, vload(&odds_[size_t(j)]));
  total_ = size_ == alive_ ? row.total : std::min(vsum(sum), row.total);
}

inline void Ranking::best(const KeptRow& row, int64_t k) {
  collect(row, kth_bound(row, k));
  sort();
  if (size_ > k) size_ = k;
  expand(row);
}

}  // namespace nano::head
