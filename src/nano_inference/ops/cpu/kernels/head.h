// The end of a step: logits, and the tokens drawn from them without storing the logits.
//
// A row's statistics have one definition wherever they are needed: the vocabulary is cut into blocks of VOCAB_BLOCK; in
// each block exp((z - block maximum) / T) is added up in 16 lanes; the blocks are added up in 16 lanes as well. So the
// logprobs of a draw, of a greedy choice and of scoring agree to the bit.
#pragma once
#include <cstdint>

#include "filters.h"
#include "quantised.h"

namespace nano::head {

// Rows of logits: products of hidden rows with a packed weight, or `logits` where that is not null.
struct HeadInput {
  const void* hidden;     // [num_rows, columns], bf16 or float
  const void* weight;     // packed as linear.h says, of the same type
  const float* logits;    // [num_rows, vocab]
  int64_t hidden_stride;  // from row to row
  int64_t logits_stride;
  int64_t num_rows, vocab, columns;
  int64_t element_size;  // of hidden and weight: 2 or 4
  int64_t num_threads;
  float divisor, cap;  // of the products: z / divisor, and then cap * tanh(z / cap), unless that is 0; `logits` have both
  // A part of a vocabulary: tokens [first, first + vocab) of `whole`. Only the functions that say so take one; first is
  // a multiple of VOCAB_BLOCK. whole 0: it is all there is.
  int64_t first, whole;
  const Quantised* codes;  // how the weight is stored instead, or null

  int64_t num_tokens() const { return whole ? whole : vocab; }
};

// Single entries of a matrix [num_samples, vocab]; rows rise, ids of a row come in any order, each once.
struct Entries {
  const int64_t *rows, *ids;
  const float* values;
  int64_t count;
};

// The columns of `SamplingBatch` by their names, and those of `Draw` to be filled.
struct DrawBatch {
  int64_t num_samples;
  const int64_t* rows;
  const double* temperature;
  Filters filters;
  const float *presence, *frequency, *repetition;
  const int64_t* noise_keys;  // [num_samples, 2]
  Entries bias, banned, counts;
  const int64_t* mask_rows;    // [num_samples] of mask_words, -1 for none
  const int32_t* mask_words;   // [num_masks, mask_width] bit i % 32 of word i / 32: token i may be drawn
  int64_t num_masks, mask_width;
  int64_t wants_raw;  // for all samples; greedy ones have it anyway
  int64_t num_top;
  int64_t* token_ids;
  float *logprobs, *raw_logprobs, *log_kept_mass;
  uint8_t* kept;  // [num_samples, vocab] or null
  int64_t* top_ids;
  float* top_logprobs;

  // The words of a sample's mask, or null.
  const int32_t* mask_of(int64_t sample) const {
    return mask_rows[sample] < 0 ? nullptr : mask_words + mask_rows[sample] * mask_width;
  }
};

// Targets to be scored under softmax(logits / temperature).
struct ScoreBatch {
  int64_t num_samples;
  const int64_t *rows, *token_ids;
  const double* temperatures;
  float* logprobs;
};

// What a rank finds in its part of the vocabulary, for the others.
struct HeadPart {
  float *maxima, *sums;  // [num_views, blocks], of each block; room for three views a sample
  struct Best* best;     // [num_samples]; of several parts: [parts, num_samples]
  int64_t num_views;
};

enum HeadError { HEAD_OK = 0, HEAD_NO_MEMORY = 1, HEAD_BAD_ROW = 2, HEAD_BAD_ID = 3 };

}  // namespace nano::head

// Each returns a HeadError. A row that is not finite gives token 0 and logprob NaN.
extern "C" int nano_draw(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch);
extern "C" int nano_score(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch);
extern "C" int nano_logits(const nano::head::HeadInput* input, float* out);  // out: [num_rows, vocab]
// Draws without filters, masks and best tokens where each rank has a part of the vocabulary, in two calls: each rank's
// own part, then (from the input's sizes alone) what the parts of all ranks give together. Blocks of `parts` stand in
// the order of the vocabulary. The bits are those of `nano_draw` of the whole.
extern "C" int nano_draw_part(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch,
                              nano::head::HeadPart* out);
extern "C" int nano_draw_whole(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch,
                               const nano::head::HeadPart* parts, int64_t num_parts);
extern "C" int nano_score_part(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch,
                               nano::head::HeadPart* out);
extern "C" int nano_score_whole(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch,
                                const nano::head::HeadPart* parts, int64_t num_parts);
