// The work of a call of the head: views of rows, with their samples and edits.
#pragma once
#include <cstdint>
#include <vector>

#include "head.h"
#include "noise.h"

namespace nano::head {

enum class Choice : uint8_t { draw, filter, greedy, score };

// One distribution over the vocabulary: a row of logits at one temperature, with the edits of one sample or none.
struct View {
  int64_t row;
  float inv_t;
  int64_t edits;  // index into the edits, or -1
  bool masked;    // edits include masks
  int64_t slot;   // slot of its edited logits, or -1; a view without edits uses the row's slot
  int64_t next;   // next view of the row, or -1
  int64_t first;  // first sample of the view, or -1
};

struct Sample {
  Choice choice;
  int64_t view, raw;  // raw: the view at temperature 1 without edits, or -1
  int64_t uncut;      // `view` without masks; -1 if it has none, or if it is not needed
  int64_t next;       // next sample of the view, or -1
  int64_t target;     // target token of a score
  int64_t named, num_named;  // entries of `DrawBatch.named`
  NoiseKey key;
};

struct Edit {
  enum Type : int32_t { bias, penalty, ban };
  int32_t column;  // within the block
  Type type;
  float value;
};

class Plan {
 public:
  HeadError make(const HeadInput& input, const DrawBatch& batch);
  HeadError make(const HeadInput& input, const ScoreBatch& batch);

  int64_t num_edited() const { return int64_t(edited_.size()); }
  // Sort the entries of edited sample `index` by block; within a block: bias, penalties, bans.
  void sort_edits(const DrawBatch& batch, int64_t index);
  // True if a view's mask excludes all tokens of a block.
  bool cuts_all(const DrawBatch& batch, const View& view, int64_t block) const;
  // Return the view without its mask if the view has no other edits in this block, otherwise -1.
  int64_t unmasked(const View& view, int64_t block) const;
  // Edit one block of a view. out: [num_columns]
  void edit(const DrawBatch& batch, const View& view, int64_t block, const float* raw, int num_columns, float* out) const;

  std::vector<View> views;
  std::vector<Sample> samples;
  std::vector<int64_t> first_plain, first_edited;  // views of each row without and with edits, or -1
  std::vector<int64_t> row_slot;                   // slot of each row's logits, or -1
  int64_t num_slots = 0, num_blocks = 0;

 private:
  void start(const HeadInput& input, int64_t num_samples);
  int64_t view_of(int64_t row, float inv_t);
  int64_t edited_view(int64_t row, float inv_t, bool masked);
  HeadError entry_bounds(const HeadInput& input, const Entries& entries, int64_t num_samples, std::vector<int64_t>& out);
  HeadError check_masks(const HeadInput& input, const DrawBatch& batch) const;
  void keep_rows(const DrawBatch& batch);

  std::vector<int64_t> edited_;               // edited samples
  std::vector<int64_t> named_;                // [num_samples + 1]: first named entry of each sample
  std::vector<int64_t> starts_[3];            // [num_samples + 1] for each type of edit
  // first edit of each edited sample; bounds of the edits of its blocks: [num_edited, num_blocks + 1]
  std::vector<int64_t> first_edit_, bounds_;
  std::vector<Edit> edits_;
  int64_t first_ = 0, vocab_ = 0;  // tokens of the part
};

}  // namespace nano::head
