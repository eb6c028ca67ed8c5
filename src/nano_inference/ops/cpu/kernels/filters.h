// top_k, top_p, min_p and the best tokens of one row, without sorting more of the vocabulary than stays.
#pragma once
#include <cstdint>
#include <vector>

#include "simd.h"

namespace nano::head {

// A row whose logits are kept, after edits, padded with -inf to whole vectors.
struct KeptRow {
  const float* logits;
  const float* maxima;  // of each block
  int64_t vocab, num_blocks;
  float highest, inv_t;
  float total;  // sum of exp((z - highest) * inv_t)
};

// Tokens by (logit descending, id ascending). Owned by one thread; `reserve` once, nothing else allocates.
class Ranking {
 public:
  void reserve(int64_t vocab, int64_t num_blocks);

  // The tokens that the filters keep: 0, 1 and 0 are off.
  void filter(const KeptRow& row, int64_t top_k, float top_p, float min_p);
  // The k best tokens, or as many as are not masked.
  void best(const KeptRow& row, int64_t k);

  int64_t size() const { return size_; }
  float total() const { return total_; }  // of the odds of those kept; of the row itself where nothing was cut
  const int32_t* ids() const { return ids_.data(); }
  const float* logits() const { return logits_.data(); }
  const float* odds() const { return odds_.data(); }  // zeros up to a whole vector

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
  int64_t size_ = 0, alive_ = -1;  // alive: number of tokens that are not masked, where it was counted
  float total_ = 0;
};

}  // namespace nano::head
