// What a call of the head has to compute: which views of which rows, for which samples, with which edits.
#pragma once
#include <cstdint>
#include <vector>

#include "head.h"
#include "noise.h"

namespace nano::head {

enum class Choice : uint8_t { draw, filter, greedy, score };

// One distribution over the vocabulary: a row of logits, edited for one sample or not at all, at one temperature.
struct View {
  int64_t row;
  float inv_t;
  int64_t edits;  // index into the edits, or -1
  bool masked;    // edits: with masks, else without
  int64_t slot;   // where its edited logits are kept, or -1; without edits the row's slot counts
  int64_t next;   // of the row, or -1
  int64_t first;  // sample, or -1
};

struct Sample {
  Choice choice;
  int64_t view, raw;  // raw: the view at temperature 1 without edits, or -1
  int64_t uncut;      // what `view` is without masks, or -1: it has none, or none is asked for
  int64_t next;       // of the view, or -1
  int64_t target;     // of a score
  NoiseKey key;
};

struct Edit {
  enum Type : int32_t { bias, penalty, ban };
  int32_t column;  // in the block
  Type type;
  float value;
};

class Plan {
 public:
  HeadError make(const HeadInput& input, const DrawBatch& batch);
  HeadError make(const HeadInput& input, const ScoreBatch& batch);

  int64_t num_edited() const { return int64_t(edited_.size()); }
  // Put the entries of edited sample `index` in the order of blocks; of a block: bias, penalties, bans.
  void sort_edits(const DrawBatch& batch, int64_t index);
  // Whether the mask of a view leaves nothing of a block.
  bool cuts_all(const DrawBatch& batch, const View& view, int64_t block) const;
  // The view that a view is but for its mask, if it is no more than that in a block; or -1.
  int64_t unmasked(const View& view, int64_t block) const;
  // One block of a view with edits. [num_columns]
  void edit(const DrawBatch& batch, const View& view, int64_t block, const float* raw, int num_columns, float* out) const;

  std::vector<View> views;
  std::vector<Sample> samples;
  std::vector<int64_t> first_plain, first_edited;  // views of each row without and with edits, or -1
  std::vector<int64_t> row_slot;                   // where a row's logits are kept, or -1
  int64_t num_slots = 0, num_blocks = 0;

 private:
  void start(const HeadInput& input, int64_t num_samples);
  int64_t view_of(int64_t row, float inv_t);
  int64_t edited_view(int64_t row, float inv_t, bool masked);
  HeadError entry_bounds(const HeadInput& input, const Entries& entries, int64_t num_samples, std::vector<int64_t>& out);
  HeadError check_masks(const HeadInput& input, const DrawBatch& batch) const;
  void keep_rows(const DrawBatch& batch);

  std::vector<int64_t> edited_;               // samples
  std::vector<int64_t> starts_[3];            // of each type of edit: [num_samples + 1]
  std::vector<int64_t> first_edit_, bounds_;  // of each edited sample; of each block of it: [num_edited, num_blocks + 1]
  std::vector<Edit> edits_;
  int64_t first_ = 0, vocab_ = 0;  // of the part
};

}  // namespace nano::head
