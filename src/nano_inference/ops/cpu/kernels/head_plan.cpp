#include "head_plan.h"

#include <algorithm>
#include <array>

namespace nano::head {
namespace {

// 1 / temperature, limited to float32 with room for log2(e): 0 times -inf and infinity times 0 would be NaN.
float inverse(double temperature) {
  double inverse = 1 / temperature;
  constexpr double low = std::numeric_limits<float>::min(), high = std::numeric_limits<float>::max() / 2;
  return float(inverse > low ? inverse < high ? inverse : high : low);
}

// Entries in the order of `Edit::Type`.
constexpr int KINDS = 3;
std::array<const Entries*, KINDS> kinds_of(const DrawBatch& b) { return {&b.bias, &b.counts, &b.banned}; }

constexpr int WORD = 32;  // tokens per word of a mask

}  // namespace

void Plan::start(const HeadInput& input, int64_t num_samples) {
  vocab_ = input.vocab, first_ = input.first, num_blocks = (input.vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK, num_slots = 0;
  views.clear(), samples.clear(), edited_.clear(), edits_.clear();
  samples.reserve(size_t(num_samples));
  first_plain.assign(size_t(input.num_rows), -1);
  first_edited.assign(size_t(input.num_rows), -1);
  row_slot.assign(size_t(input.num_rows), -1);
}

int64_t Plan::view_of(int64_t row, float inv_t) {
  for (int64_t v = first_plain[row]; v >= 0; v = views[v].next)
    if (views[v].inv_t == inv_t) return v;
  views.push_back({row, inv_t, -1, false, -1, first_plain[row], -1});
  return first_plain[row] = int64_t(views.size()) - 1;
}

// Add a view of the sample whose edits come next.
int64_t Plan::edited_view(int64_t row, float inv_t, bool masked) {
  views.push_back({row, inv_t, num_edited(), masked, -1, first_edited[row], -1});
  return first_edited[row] = int64_t(views.size()) - 1;
}

HeadError Plan::entry_bounds(const HeadInput& input, const Entries& entries, int64_t num_samples,
                             std::vector<int64_t>& out) {
  out.assign(size_t(num_samples) + 1, 0);
  for (int64_t e = 0; e < entries.count; e++) {
    if (entries.rows[e] < (e ? entries.rows[e - 1] : 0) || entries.rows[e] >= num_samples) return HEAD_BAD_ROW;
    if (entries.ids[e] < 0 || entries.ids[e] >= input.num_tokens()) return HEAD_BAD_ID;
    out[entries.rows[e] + 1]++;
  }
  for (int64_t i = 0; i < num_samples; i++) out[i + 1] += out[i];
  return HEAD_OK;
}

// Check that masks exist and allow no token outside the vocabulary.
HeadError Plan::check_masks(const HeadInput& input, const DrawBatch& b) const {
  for (int64_t i = 0; i < b.num_samples; i++)
    if (b.mask_rows[i] >= b.num_masks) return HEAD_BAD_ROW;
  const int64_t vocab = input.num_tokens();
  for (int64_t m = 0; m < b.num_masks; m++)
    for (int64_t w = vocab / WORD; w < b.mask_width; w++) {
      const uint32_t word = uint32_t(b.mask_words[m * b.mask_width + w]);
      if (word >> (w == vocab / WORD ? vocab % WORD : 0)) return HEAD_BAD_ID;
    }
  return HEAD_OK;
}

HeadError Plan::make(const HeadInput& input, const DrawBatch& b) {
  start(input, b.num_samples);
  if (HeadError error = check_masks(input, b)) return error;
  const auto all = kinds_of(b);
  for (int kind = 0; kind < KINDS; kind++)
    if (HeadError error = entry_bounds(input, *all[kind], b.num_samples, starts_[kind])) return error;
  if (HeadError error = entry_bounds(input, b.named, b.num_samples, named_)) return error;
  first_edit_.clear();
  int64_t num_edits = 0;
  for (int64_t i = 0; i < b.num_samples; i++) {
    int64_t row = b.rows[i], count = 0;
    auto number = [&](Edit::Type kind) { return starts_[kind][i + 1] - starts_[kind][i]; };
    if (row < 0 || row >= input.num_rows) return HEAD_BAD_ROW;
    bool greedy = b.temperature[i] == 0;
    float inv_t = greedy ? 1.f : inverse(b.temperature[i]);
    for (int kind = 0; kind < KINDS; kind++) count += number(Edit::Type(kind));
    Sample s;
    s.choice = greedy ? Choice::greedy : is_filtered(b.filters, i, input.num_tokens()) ? Choice::filter : Choice::draw;
    s.raw = greedy || b.wants_raw ? view_of(row, 1) : -1;
    s.key = {uint32_t(b.noise_keys[2 * i]), uint32_t(b.noise_keys[2 * i + 1])};
    s.target = s.uncut = -1;
    s.named = named_[size_t(i)], s.num_named = named_[size_t(i) + 1] - s.named;
    if (count > 0 || b.mask_of(i)) {
      const bool masked = b.mask_of(i) || number(Edit::ban) > 0;
      s.view = edited_view(row, inv_t, masked);
      if (masked && !greedy)  // samples of a row share the view without edits
        s.uncut = number(Edit::bias) + number(Edit::penalty) ? edited_view(row, inv_t, false) : view_of(row, inv_t);
      edited_.push_back(i);
      first_edit_.push_back(num_edits);
      num_edits += count;
    } else {
      s.view = view_of(row, inv_t);
    }
    s.next = views[s.view].first;
    views[s.view].first = i;
    samples.push_back(s);
  }
  edits_.resize(size_t(num_edits));
  bounds_.assign(size_t(num_edited() * (num_blocks + 1)), 0);
  keep_rows(b);
  return HEAD_OK;
}

HeadError Plan::make(const HeadInput& input, const ScoreBatch& b) {
  start(input, b.num_samples);
  for (int64_t i = 0; i < b.num_samples; i++) {
    if (b.rows[i] < 0 || b.rows[i] >= input.num_rows) return HEAD_BAD_ROW;
    if (b.token_ids[i] < 0 || b.token_ids[i] >= input.num_tokens()) return HEAD_BAD_ID;
    int64_t view = view_of(b.rows[i], inverse(b.temperatures[i]));
    samples.push_back({Choice::score, view, view, -1, views[view].first, b.token_ids[i], 0, 0, {}});
    views[view].first = i;
  }
  return HEAD_OK;
}

// Store logits only if filters, best tokens, masks or named tokens are read after all blocks.
void Plan::keep_rows(const DrawBatch& b) {
  auto keep = [&](int64_t view) {
    int64_t& slot = views[view].edits < 0 ? row_slot[views[view].row] : views[view].slot;
    if (slot < 0) slot = num_slots++;
  };
  for (const Sample& s : samples) {
    if (s.choice == Choice::greedy) {
      if (b.num_top > 0 || s.num_named > 0) keep(s.raw);
    } else if (s.choice == Choice::filter || b.num_top > 0 || b.kept || s.num_named > 0) {
      keep(s.view);
      if ((s.choice == Choice::filter || s.num_named > 0) && s.raw >= 0) keep(s.raw);
    }
  }
}

void Plan::sort_edits(const DrawBatch& b, int64_t index) {
  const auto all = kinds_of(b);
  int64_t sample = edited_[index], *bounds = &bounds_[index * (num_blocks + 1)];
  for (int kind = 0; kind < KINDS; kind++)
    for (int64_t e = starts_[kind][sample]; e < starts_[kind][sample + 1]; e++)
      if (const int64_t id = all[kind]->ids[e] - first_; id >= 0 && id < vocab_) bounds[id / VOCAB_BLOCK]++;
  int64_t end = first_edit_[index];
  for (int64_t block = 0; block < num_blocks; block++) bounds[block] = end += bounds[block];
  bounds[num_blocks] = end;
  // Filled from the back: afterwards each bound is the start of its block.
  for (int kind = KINDS - 1; kind >= 0; kind--)
    for (int64_t e = starts_[kind][sample + 1] - 1; e >= starts_[kind][sample]; e--) {
      const int64_t id = all[kind]->ids[e] - first_;
      if (id >= 0 && id < vocab_) edits_[--bounds[id / VOCAB_BLOCK]] = {int32_t(id % VOCAB_BLOCK), Edit::Type(kind), all[kind]->values[e]};
    }
}

bool Plan::cuts_all(const DrawBatch& b, const View& view, int64_t block) const {
  const int32_t* words = view.masked ? b.mask_of(edited_[size_t(view.edits)]) : nullptr;
  if (!words) return false;
  const int64_t first = (first_ + block * VOCAB_BLOCK) / WORD;
  const int64_t end = std::min<int64_t>(first + VOCAB_BLOCK / WORD, b.mask_width);
  return std::all_of(words + std::min(first, end), words + end, [](int32_t word) { return word == 0; });
}

int64_t Plan::unmasked(const View& view, int64_t block) const {
  const int64_t* bounds = &bounds_[size_t(view.edits * (num_blocks + 1) + block)];
  return bounds[0] == bounds[1] ? samples[size_t(edited_[size_t(view.edits)])].uncut : -1;
}

void Plan::edit(const DrawBatch& b, const View& view, int64_t block, const float* raw, int num_columns,
                float* out) const {
  const int64_t i = edited_[size_t(view.edits)], first = first_ + block * VOCAB_BLOCK;
  std::copy(raw, raw + num_columns, out);
  constexpr float nothing = -std::numeric_limits<float>::infinity();
  if (const int32_t* words = view.masked ? b.mask_of(i) : nullptr)
    for (int column = 0; column < num_columns; column += WORD) {  // a block begins at a word
      const int64_t at = (first + column) / WORD;
      const uint32_t word = at < b.mask_width ? uint32_t(words[at]) : 0;
      const int count = std::min(WORD, num_columns - column);
      if (word == ~uint32_t(0)) continue;
      for (int bit = 0; bit < count; bit++)
        if (!(word >> bit & 1)) out[column + bit] = nothing;
    }
  const int64_t* bounds = &bounds_[view.edits * (num_blocks + 1) + block];
  for (int64_t e = bounds[0]; e < bounds[1]; e++) {
    const Edit& edit = edits_[e];
    float& z = out[edit.column];
    if (edit.type == Edit::ban) {
      if (view.masked) z = nothing;
    } else if (edit.type == Edit::bias) {
      z += edit.value;
    } else {
      z = z > 0 ? z / b.repetition[i] : z * b.repetition[i];
      z -= b.frequency[i] * edit.value + (edit.value > 0 ? b.presence[i] : 0.f);
    }
  }
}

}  // namespace nano::head
