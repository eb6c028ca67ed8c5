// The end of a step: logits, and tokens drawn from them without storing the logits.
//
// A row's statistics have a single definition. The vocabulary is cut into blocks of VOCAB_BLOCK. In each block exp((z -
// block maximum) / T) is added up in 16 lanes, and the blocks are added up in 16 lanes as well. The logprobs of a draw,
// of a greedy choice and of scoring therefore agree bit for bit.
#pragma once
#include <cstdint>

#include "filters.h"
#include "quantised.h"

namespace nano::head {

// Rows of logits: products of hidden rows with a packed weight, or `logits` if it is not null.
struct HeadInput {
  const void* hidden;     // [num_rows, columns], bf16 or float
  const void* weight;     // packed as in linear.h, of the same type
  const float* logits;    // [num_rows, vocab]
  int64_t hidden_stride;  // from row to row
  int64_t logits_stride;
  int64_t num_rows, vocab, columns;
  int64_t element_size;  // of hidden and weight: 2 or 4
  int64_t num_threads;
  float divisor, cap;  // of products: z / divisor, then cap * tanh(z / cap) unless cap is 0; `logits` include both
  // A part of a vocabulary: tokens [first, first + vocab) of `whole`. Only functions that say so accept a part. `first`
  // is a multiple of VOCAB_BLOCK. whole 0: the input is the whole vocabulary.
  int64_t first, whole;
  const Quantised* codes;  // the weight in codes, instead of `weight`; or null

  int64_t num_tokens() const { return whole ? whole : vocab; }
};

// Single entries of a matrix [num_samples, vocab]. Rows rise. The ids of a row are unique, in any order.
struct Entries {
  const int64_t *rows, *ids;
  const float* values;
  int64_t count;
};

// Columns of `SamplingBatch` by name, and columns of `Draw` to fill.
struct DrawBatch {
  int64_t num_samples;
  const int64_t* rows;
  const double* temperature;
  Filters filters;
  const float *presence, *frequency, *repetition;
  const int64_t* noise_keys;  // [num_samples, 2]
  Entries bias, banned, counts;
  Entries named;               // ids whose logprobs are wanted; values are not read
  const int64_t* mask_rows;    // [num_samples] of mask_words, -1 for none
  const int32_t* mask_words;   // [num_masks, mask_width] bit i % 32 of word i / 32: token i may be drawn
  int64_t num_masks, mask_width;
  int64_t wants_raw;  // for all samples; greedy samples always have it
  int64_t num_top;
  int64_t* token_ids;
  float *logprobs, *raw_logprobs, *log_kept_mass;
  uint8_t* kept;  // [num_samples, vocab] or null
  int64_t* top_ids;
  float* top_logprobs;
  float* named_logprobs;  // [named.count, 2]: as drawn, and the model's own (0 without `wants_raw`)

  // Words of a sample's mask, or null.
  const int32_t* mask_of(int64_t sample) const {
    return mask_rows[sample] < 0 ? nullptr : mask_words + mask_rows[sample] * mask_width;
  }
};

// Targets to score under softmax(logits / temperature).
struct ScoreBatch {
  int64_t num_samples;
  const int64_t *rows, *token_ids;
  const double* temperatures;
  float* logprobs;
};

// A rank's results for its part of the vocabulary, to send to the other ranks.
struct HeadPart {
  float *maxima, *sums;  // [num_views, blocks]; room for three views per sample
  struct Best* best;     // [num_samples], or [parts, num_samples] for several parts
  int64_t num_views;
};

enum HeadError { HEAD_OK = 0, HEAD_NO_MEMORY = 1, HEAD_BAD_ROW = 2, HEAD_BAD_ID = 3 };

}  // namespace nano::head

// Each function returns a HeadError. A row that is not finite yields token 0 and logprob NaN.
extern "C" int nano_draw(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch);
extern "C" int nano_score(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch);
extern "C" int nano_logits(const nano::head::HeadInput* input, float* out);  // out: [num_rows, vocab]
// Draws without filters, masks and best tokens if each rank has a part of the vocabulary, in two calls. The first
// computes the rank's own part. The second only reads the input's sizes and combines the parts of all ranks. Blocks of
// `parts` are in the order of the vocabulary. The result has the bits of `nano_draw` on the whole vocabulary.
extern "C" int nano_draw_part(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch,
                              nano::head::HeadPart* out);
extern "C" int nano_draw_whole(const nano::head::HeadInput* input, const nano::head::DrawBatch* batch,
                               const nano::head::HeadPart* parts, int64_t num_parts);
extern "C" int nano_score_part(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch,
                               nano::head::HeadPart* out);
extern "C" int nano_score_whole(const nano::head::HeadInput* input, const nano::head::ScoreBatch* batch,
                                const nano::head::HeadPart* parts, int64_t num_parts);
