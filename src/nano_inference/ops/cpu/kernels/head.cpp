#include "head.h"

#include <algorithm>
#include <memory>
#include <new>

#include "filters.h"
#include "head_plan.h"
#include "head_source.h"
#include "noise.h"
#include "pool.h"

namespace nano::head {
namespace {

constexpr int64_t ROW_TILE = 64;  // rows whose logits are adjacent in a thread's buffer
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

// Memory that only one thread writes.
struct alignas(64) Scratch {
  float tile[ROW_TILE * VOCAB_BLOCK], edited[VOCAB_BLOCK], odds[VOCAB_BLOCK];
  uint32_t stirred[VOCAB_BLOCK];
  std::vector<Best> best;  // per sample
  Ranking ranking;
};

struct Total {
  float highest, sum;
  double log_sum;
  bool finite;

  float logprob(float logit, float inv_t) const { return logprob(logit, inv_t, log_sum); }
  float logprob(float logit, float inv_t, double log_of_sum) const {
    return float((double(logit) - double(highest)) * inv_t - log_of_sum);
  }
  // Log of the share of `uncut` that remains, given the log of the sum. Maxima are subtracted separately, since e^-300
  // would underflow.
  double log_mass(double log_of_sum, const Total& uncut, float inv_t) const {
    constexpr double least = -std::numeric_limits<float>::max();
    double mass = (double(highest) - double(uncut.highest)) * inv_t + (log_of_sum - uncut.log_sum);
    return std::max(least, std::min(0.0, mass));
  }
};

class Head {
 public:
  int draw(const HeadInput& input, const DrawBatch& batch) {
    if (HeadError error = plan_.make(input, batch)) return error;
    reserve(input);
    for (Scratch* scratch : scratch_of(input))
      if (batch.num_top > 0 || plan_.num_slots > 0) scratch->ranking.reserve(input.vocab, plan_.num_blocks);
    std::atomic<int64_t> edits{0}, blocks{0}, samples{0};
    auto work = [&](Team& team) {
      if (plan_.num_edited() > 0) {
        for (int64_t e; (e = edits++) < plan_.num_edited();) plan_.sort_edits(batch, e);
        team.wait();
      }
      stream(team, input, &batch, blocks);
      team.wait();
      for (int64_t i; (i = samples++) < batch.num_samples;) finish(input, batch, i, *scratch_[size_t(team.thread)]);
    };
    run_team(int(input.num_threads), work);
    return HEAD_OK;
  }

  int score(const HeadInput& input, const ScoreBatch& batch) {
    if (HeadError error = plan_.make(input, batch)) return error;
    reserve(input);
    std::atomic<int64_t> blocks{0};
    auto work = [&](Team& team) {
      stream(team, input, nullptr, blocks);
      team.wait();
      for (int64_t i = team.begin(batch.num_samples); i < team.end(batch.num_samples); i++) finish(input, batch, i, *scratch_[0]);
    };
    run_team(int(input.num_threads), work);
    return HEAD_OK;
  }

  // Compute statistics of a part of the vocabulary. Batch: a score, or draws without filters, masks and best tokens.
  template <class Batch>
  int part(const HeadInput& input, const Batch& batch, HeadPart& out) {
    if (HeadError error = plan_.make(input, batch)) return error;
    reserve(input);
    std::atomic<int64_t> edits{0}, blocks{0};
    const DrawBatch* draws = draws_of(batch);
    auto work = [&](Team& team) {
      for (int64_t e; (e = edits++) < plan_.num_edited();) plan_.sort_edits(*draws, e);
      team.wait();
      stream(team, input, draws, blocks);
    };
    run_team(int(input.num_threads), work);
    out.num_views = int64_t(plan_.views.size());
    each_view([&](float* maxima, float* sums, int64_t at) {
      std::copy(maxima, maxima + plan_.num_blocks, out.maxima + at);
      std::copy(sums, sums + plan_.num_blocks, out.sums + at);
    });
    for (int64_t i = 0; i < batch.num_samples; i++) out.best[i] = winner(i);
    return HEAD_OK;
  }

  // Combine the parts of all ranks into the result of one rank with the whole vocabulary.
  template <class Batch>
  int whole(const HeadInput& input, const Batch& batch, const HeadPart& parts, int64_t num_parts) {
    if (HeadError error = plan_.make(input, batch)) return error;
    reserve(input);
    each_view([&](float* maxima, float* sums, int64_t at) {
      std::copy(parts.maxima + at, parts.maxima + at + plan_.num_blocks, maxima);
      std::copy(parts.sums + at, parts.sums + at + plan_.num_blocks, sums);
    });
    for (int64_t i = 0; i < batch.num_samples; i++) {
      for (int64_t p = 0; p < num_parts; p++) scratch_[0]->best[size_t(i)].offer(parts.best[p * batch.num_samples + i]);
      finish(input, batch, i, *scratch_[0]);
    }
    return HEAD_OK;
  }

  int logits(const HeadInput& input, float* out) {
    plan_.samples.clear();
    plan_.views.clear();
    plan_.num_slots = 0, plan_.num_blocks = (input.vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    reserve(input);
    std::atomic<int64_t> blocks{0};
    auto work = [&](Team& team) {
      each_block(team, input, blocks, [&](int64_t row, int64_t block, const float* z, int count) {
        std::copy(z, z + count, out + row * input.vocab + block * VOCAB_BLOCK);
      });
    };
    run_team(int(input.num_threads), work);
    return HEAD_OK;
  }

 private:
  std::vector<Scratch*> scratch_of(const HeadInput& input) const {
    std::vector<Scratch*> all;
    for (int64_t t = 0; t < input.num_threads; t++) all.push_back(scratch_[size_t(t)].get());
    return all;
  }

  // Reserve all memory that is written later: nothing may throw inside the team.
  void reserve(const HeadInput& input) {
    while (int64_t(scratch_.size()) < input.num_threads) scratch_.push_back(std::make_unique<Scratch>());
    num_threads_ = input.num_threads;
    for (Scratch* scratch : scratch_of(input)) scratch->best.assign(plan_.samples.size(), Best());
    stats_stride_ = (plan_.num_blocks + LANES - 1) / LANES * LANES;
    maxima_.assign(plan_.views.size() * size_t(stats_stride_), -INF);
    sums_.assign(plan_.views.size() * size_t(stats_stride_), 0.f);
    slot_stride_ = (input.vocab + LANES - 1) / LANES * LANES;
    size_t size = size_t(plan_.num_slots * slot_stride_);
    if (slots_size_ < size) slots_.reset(new float[size]), slots_size_ = size;
  }

  static const DrawBatch* draws_of(const DrawBatch& batch) { return &batch; }
  static const DrawBatch* draws_of(const ScoreBatch&) { return nullptr; }

  // Visit the statistics of each view, with their indices in [views, blocks].
  template <class F>
  void each_view(const F& visit) {
    for (size_t v = 0; v < plan_.views.size(); v++)
      visit(&maxima_[v * size_t(stats_stride_)], &sums_[v * size_t(stats_stride_)], int64_t(v) * plan_.num_blocks);
  }

  // Threads take whole blocks of the vocabulary for all rows, so that each weight is read once.
  template <class F>
  void each_block(Team& team, const HeadInput& input, std::atomic<int64_t>& blocks, const F& consume) {
    Source source(input);
    Scratch& s = *scratch_[size_t(team.thread)];
    for (int64_t next, block = blocks++; block < plan_.num_blocks; block = next) {
      next = blocks++;
      IVec first = iset(uint32_t(input.first + block * VOCAB_BLOCK));
      for (uint32_t j = 0; j < VOCAB_BLOCK; j += LANES)
        istore(s.stirred + j, stir(iadd(first, iadd(iset(j), ilanes()))));
      for (int64_t row = 0; row < input.num_rows; row += ROW_TILE) {
        int64_t count = std::min(input.num_rows - row, ROW_TILE);
        source.fill(row, count, block, next, s.tile);
        for (int64_t i = 0; i < count; i++)
          consume(row + i, block, s.tile + i * VOCAB_BLOCK, Source::num_columns(input, block));
      }
    }
  }

  void stream(Team& team, const HeadInput& input, const DrawBatch* batch, std::atomic<int64_t>& blocks) {
    Scratch& s = *scratch_[size_t(team.thread)];
    each_block(team, input, blocks, [&](int64_t row, int64_t block, const float* raw, int count) {
      if (plan_.row_slot[size_t(row)] >= 0) keep(plan_.row_slot[size_t(row)], block, raw, count);
      int64_t newest = -1;  // view whose odds are in the scratch
      for (int64_t v = plan_.first_plain[size_t(row)]; v >= 0; newest = v, v = plan_.views[size_t(v)].next)
        run_block(v, input.first, block, raw, raw, count, s);
      for (int64_t v = plan_.first_edited[size_t(row)]; v >= 0; v = plan_.views[size_t(v)].next) {
        const View& view = plan_.views[size_t(v)];
        if (view.slot < 0 && plan_.cuts_all(*batch, view, block)) continue;  // has the statistics of an empty block
        plan_.edit(*batch, view, block, raw, (count + LANES - 1) / LANES * LANES, s.edited);
        if (view.slot >= 0) keep(view.slot, block, s.edited, count);
        const int64_t same = plan_.unmasked(view, block);
        run_block(v, input.first, block, raw, s.edited, count, s, same == newest ? same : -1);
        newest = v;
      }
    });
  }

  float* slot(int64_t index) { return slots_.get() + index * slot_stride_; }
  void keep(int64_t index, int64_t block, const float* z, int count) {
    float* out = slot(index) + block * VOCAB_BLOCK;
    for (int j = 0; j < count; j += LANES) vstore(out + j, vload(z + j));
  }

  // Compute one block of a view: its statistics, and the races of its samples. The sum is NaN if a logit is NaN or
  // +inf. `unmasked`: this view without its mask, if the scratch holds its odds; otherwise -1.
  void run_block(int64_t v, int64_t first, int64_t block, const float* raw, const float* z, int count, Scratch& s,
                 int64_t unmasked = -1) {
    const View& view = plan_.views[size_t(v)];
    float highest = highest_of(z, count);
    if (!(highest > -INF)) highest = -INF;
    float base = highest > -INF ? highest : 0.f;
    maxima_[size_t(v * stats_stride_ + block)] = highest;
#if defined(NANO_NO_LOGPROBS)  // benchmark build: saves the time of logprobs, whose values are wrong
    sums_[size_t(v * stats_stride_ + block)] = 1;
    if (plan_.samples[size_t(view.first)].choice == Choice::draw) exponentials(z, count, base, view.inv_t, s.odds);
#else
    const bool same_base = unmasked >= 0 && highest > -INF && highest == maxima_[size_t(unmasked * stats_stride_ + block)];
    sums_[size_t(v * stats_stride_ + block)] =
        same_base ? odds_left(z, count, s.odds) : exponentials(z, count, base, view.inv_t, s.odds);
#endif
    const int64_t start = first + block * VOCAB_BLOCK;
    const Runners runners{s.odds, z, raw, s.stirred, nullptr, start, count, base, view.inv_t};
    for (int64_t i = view.first; i >= 0; i = plan_.samples[size_t(i)].next) {
      const Sample& sample = plan_.samples[size_t(i)];
      Best& best = s.best[size_t(i)];
      if (sample.choice == Choice::draw) {
        race(runners, sample.key, best);
      } else if (sample.choice == Choice::greedy) {
        int64_t j = highest >= best.high || best.id < 0 ? std::find(z, z + count, highest) - z : count;
        if (j < count) best.offer({highest, 0, highest, raw[j], start + j});
      } else if (sample.choice == Choice::score && sample.target >= start && sample.target < start + count) {
        best.logit = raw[sample.target - start], best.id = sample.target;
      }
    }
  }

  // Add up the blocks of a view, always in the same order.
  Total total(int64_t v) const {
    const float *maxima = &maxima_[size_t(v * stats_stride_)], *sums = &sums_[size_t(v * stats_stride_)];
    float inv_t = plan_.views[size_t(v)].inv_t, highest = highest_of(maxima, int(stats_stride_));
    Vec sum = vset(0.f);
    for (int64_t b = 0; b < stats_stride_; b += LANES) {
      sum = vadd(sum, vmul(vload(sums + b), odds_of(vload(maxima + b), vset(highest), vset(inv_t * LOG2E))));
    }
    float all = vsum(sum);
    bool finite = highest > -INF && highest < INF && all >= 1 && all < INF;
    return {highest, all, finite ? log1(all) : 0, finite};
  }

  Best winner(int64_t i) const {
    Best best;
    for (int64_t t = 0; t < num_threads_; t++) best.offer(scratch_[size_t(t)]->best[size_t(i)]);
    return best;
  }

  // Run the race of the tokens that the filters kept.
  Best race_kept(const Sample& sample, const KeptRow& row, const float* raw, Scratch& s) {
    Best best;
    const Ranking& r = s.ranking;
    for (int64_t j = 0; j < r.size(); j += VOCAB_BLOCK) {
      int count = int(std::min<int64_t>(r.size() - j, VOCAB_BLOCK));
      for (int k = 0; k < count; k += LANES) istore(s.stirred + k, stir(iload(r.ids() + j + k)));
      race({r.odds() + j, r.logits() + j, r.logits() + j, s.stirred, r.ids() + j, 0, count, row.highest, row.inv_t},
           sample.key, best);
    }
    if (raw && best.id >= 0) best.raw = raw[best.id];
    return best;
  }

  // Compute token, logprobs, mass, mask and best tokens of one sample, after all blocks.
  void finish(const HeadInput& input, const DrawBatch& b, int64_t i, Scratch& s) {
    const Sample& sample = plan_.samples[size_t(i)];
    const View& view = plan_.views[size_t(sample.view)];
    bool greedy = sample.choice == Choice::greedy, filtered = sample.choice == Choice::filter;
    Total all = total(sample.view), raw = sample.raw >= 0 ? total(sample.raw) : all;
    const Total uncut = sample.uncut >= 0 ? total(sample.uncut) : all;
    Best best = filtered ? Best() : winner(i);
    double log_sum = all.log_sum, mass = 0;
    const KeptRow row = kept_row(input, sample.view, all);
    if (filtered && all.finite) {
      s.ranking.filter(row, b.filters, i);
      best = race_kept(sample, row, sample.raw >= 0 ? kept_row(input, sample.raw, raw).logits : nullptr, s);
      log_sum = log1(s.ranking.total());
    }
    if (!greedy) mass = all.log_mass(log_sum, uncut, view.inv_t);
    bool sound = all.finite && raw.finite && uncut.finite && best.id >= 0;
    float raw_logprob = sample.raw < 0 ? 0.f : sound ? raw.logprob(best.raw, 1) : NOT_A_NUMBER;
    b.token_ids[i] = sound ? best.id : 0;
    b.raw_logprobs[i] = raw_logprob;
    b.logprobs[i] = greedy ? raw_logprob : sound ? all.logprob(best.logit, view.inv_t, log_sum) : NOT_A_NUMBER;
    b.log_kept_mass[i] = sound ? float(mass) : NOT_A_NUMBER;
    if (b.kept) show_mask(input, b, i, sound, s);
    if (sample.num_named > 0) show_named(input, b, sample, sound, all, raw, log_sum, s.ranking);
    if (b.num_top == 0) return;
    if (!sound) {
      for (int64_t k = 0; k < b.num_top; k++) b.top_ids[i * b.num_top + k] = k, b.top_logprobs[i * b.num_top + k] = NOT_A_NUMBER;
      return;
    }
    if (greedy) {
      s.ranking.best(kept_row(input, sample.raw, raw), b.num_top);
      show_best(b, i, raw, 1, raw.log_sum, s.ranking);
    } else {
      if (!filtered) s.ranking.best(row, b.num_top);
      show_best(b, i, all, view.inv_t, log_sum, s.ranking);
    }
  }

  void finish(const HeadInput&, const ScoreBatch& b, int64_t i, const Scratch&) {
    const int64_t view = plan_.samples[size_t(i)].view;
    const Total all = total(view);
    b.logprobs[i] = all.finite ? all.logprob(winner(i).logit, plan_.views[size_t(view)].inv_t) : NOT_A_NUMBER;
  }

  KeptRow kept_row(const HeadInput& input, int64_t v, const Total& all) {
    const View& view = plan_.views[size_t(v)];
    int64_t index = view.edits < 0 ? plan_.row_slot[size_t(view.row)] : view.slot;
    return {index < 0 ? nullptr : slot(index), &maxima_[size_t(v * stats_stride_)], input.vocab, plan_.num_blocks,
            all.highest, view.inv_t, all.sum};
  }

  void show_mask(const HeadInput& input, const DrawBatch& b, int64_t i, bool sound, Scratch& s) {
    uint8_t* kept = b.kept + i * input.vocab;
    const Sample& sample = plan_.samples[size_t(i)];
    if (sample.choice == Choice::greedy || !sound) {
      std::fill(kept, kept + input.vocab, uint8_t(1));
    } else if (sample.choice == Choice::filter) {
      std::fill(kept, kept + input.vocab, uint8_t(0));
      for (int64_t j = 0; j < s.ranking.size(); j++) kept[s.ranking.ids()[j]] = 1;
    } else {
      const float* z = kept_row(input, sample.view, {}).logits;
      for (int64_t j = 0; j < input.vocab; j++) kept[j] = z[j] > -INF;
    }
  }

  // Tokens that masks or filters cut have logprob -inf.
  void show_named(const HeadInput& input, const DrawBatch& b, const Sample& sample, bool sound, const Total& all,
                  const Total& raw, double log_sum, const Ranking& r) {
    const bool greedy = sample.choice == Choice::greedy, filtered = sample.choice == Choice::filter;
    const float inv_t = plan_.views[size_t(sample.view)].inv_t;
    const float* own = sample.raw >= 0 ? kept_row(input, sample.raw, raw).logits : nullptr;
    const float* drawn = greedy ? own : kept_row(input, sample.view, all).logits;
    for (int64_t e = sample.named; e < sample.named + sample.num_named; e++) {
      const int64_t id = b.named.ids[e];
      const float raw_logprob = !own ? 0.f : sound ? raw.logprob(own[id], 1) : NOT_A_NUMBER;
      const bool kept = !filtered || r.has(drawn[id], id);
      b.named_logprobs[2 * e] = greedy ? raw_logprob : !sound ? NOT_A_NUMBER : kept ? all.logprob(drawn[id], inv_t, log_sum) : -INF;
      b.named_logprobs[2 * e + 1] = raw_logprob;
    }
  }

  // If fewer tokens remain than are shown, the lowest other ids follow, with the logprob of a token that cannot be
  // drawn.
  void show_best(const DrawBatch& b, int64_t i, const Total& all, float inv_t, double log_sum, const Ranking& r) {
    int64_t* ids = b.top_ids + i * b.num_top;
    float* logprobs = b.top_logprobs + i * b.num_top;
    int64_t count = std::min(b.num_top, r.size());
    for (int64_t k = 0; k < count; k++) {
      ids[k] = r.ids()[k];
      logprobs[k] = all.logprob(r.logits()[k], inv_t, log_sum);
    }
    for (int64_t id = 0; count < b.num_top; id++)
      if (std::find(r.ids(), r.ids() + r.size(), id) == r.ids() + r.size()) ids[count] = id, logprobs[count++] = -INF;
  }

  Plan plan_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<float> maxima_, sums_;  // [views, blocks in whole vectors]
  std::unique_ptr<float[]> slots_;
  size_t slots_size_ = 0;
  int64_t stats_stride_ = 0, slot_stride_ = 0, num_threads_ = 0;
};

// Reused by later calls for its memory; one per calling thread.
thread_local Head own_head;

template <class F>
int with_head(F call) {
  try {
    return call(own_head);
  } catch (const std::bad_alloc&) {
    return HEAD_NO_MEMORY;
  }
}

}  // namespace
}  // namespace nano::head

using namespace nano::head;

extern "C" int nano_draw(const HeadInput* input, const DrawBatch* batch) {
  return with_head([=](Head& head) { return head.draw(*input, *batch); });
}

extern "C" int nano_score(const HeadInput* input, const ScoreBatch* batch) {
  return with_head([=](Head& head) { return head.score(*input, *batch); });
}

extern "C" int nano_draw_part(const HeadInput* input, const DrawBatch* batch, HeadPart* out) {
  return with_head([=](Head& head) { return head.part(*input, *batch, *out); });
}

extern "C" int nano_draw_whole(const HeadInput* input, const DrawBatch* batch, const HeadPart* parts, int64_t count) {
  return with_head([=](Head& head) { return head.whole(*input, *batch, *parts, count); });
}

extern "C" int nano_score_part(const HeadInput* input, const ScoreBatch* batch, HeadPart* out) {
  return with_head([=](Head& head) { return head.part(*input, *batch, *out); });
}

extern "C" int nano_score_whole(const HeadInput* input, const ScoreBatch* batch, const HeadPart* parts, int64_t count) {
  return with_head([=](Head& head) { return head.whole(*input, *batch, *parts, count); });
}

extern "C" int nano_logits(const HeadInput* input, float* out) {
  return with_head([=](Head& head) { return head.logits(*input, out); });
}
