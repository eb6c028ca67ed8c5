// Random decoder steps through the kernels, without Python: for the sanitizers (`make sanitize`).
//
// Each round draws a shape, cuts the same token ids into other chunks for 1, 2 and 3 threads, and compares the bits of
// the hidden rows and of the tokens drawn. All memory is of exact size, and what may not be read is NaN.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "digest.h"
#include "head.h"
#include "linear.h"
#include "noise.h"
#include "program.h"

extern "C" {
void* nano_program_new(const nano::ProgramSpec* spec);
void nano_program_free(void* program);
int nano_program_run(void* program, const nano::Step* step);
}

void codes_round(nano::Digest& all);    // codes.cpp
void experts_round(nano::Digest& all);  // experts.cpp
void states_round(nano::Digest& all);  // states.cpp
void gradients_round(nano::Digest& all);  // gradients.cpp

namespace {

using namespace nano;
using nano::head::DrawBatch, nano::head::Entries, nano::head::HeadInput;
std::mt19937 random_bits(1);

int64_t pick(std::initializer_list<int64_t> choices) { return *(choices.begin() + random_bits() % choices.size()); }
float uniform() { return float(random_bits() % 2001) / 1000.f - 1.f; }

template <class T>
T number(float x) {
  if constexpr (sizeof(T) == 2) return narrow1(x);
  else return x;
}

template <class T>
std::vector<T> packed(int64_t rows, int64_t columns) {
  std::vector<T> plain(size_t(rows * columns));
  for (auto& v : plain) v = number<T>(uniform() * 0.2f);
  Matrix<T> m{nullptr, rows, columns};
  std::vector<T> out(size_t(m.num_panels() * m.panel_size()));
  pack(plain.data(), out.data(), 0, rows, columns);
  return out;
}

struct Sizes {
  int64_t heads, kv_heads, head_dim, hidden, inner, vocab, block_size, window, layers;
  bool kv_codes;
};

struct Result {
  std::vector<char> hidden;
  std::vector<int64_t> tokens;
  std::vector<float> logprobs;
};

constexpr int64_t RANK = 6;  // of the adapter that every row has

template <class T>
class Model {
 public:
  explicit Model(const Sizes& s) : s(s), embedding(packed<T>(s.vocab, s.hidden)), positions(200) {
    const int64_t qkv = (s.heads + 2 * s.kv_heads) * s.head_dim;
    for (int64_t l = 0; l < s.layers; l++) {
      weights.push_back(packed<T>(qkv, s.hidden));
      weights.push_back(packed<T>(s.hidden, s.heads * s.head_dim));
      weights.push_back(packed<T>(2 * s.inner, s.hidden));
      weights.push_back(packed<T>(s.hidden, s.inner));
    }
    const int64_t first = s.heads * s.head_dim - 3;  // neither begins nor ends with a vector
    for (int64_t i = 0; i < 2 * RANK * std::max(s.hidden, qkv); i++) matrices.push_back(0.01f * float(i % 37 - 18));
    lora_parts = {{matrices.data(), matrices.data() + 5, RANK, 0, first, 0.5f},
                  {matrices.data() + 7, matrices.data(), RANK - 2, first, qkv - first, 2.f}};
    norm.assign(size_t(s.hidden), number<T>(1.f));
    head_norm.assign(size_t(s.head_dim), number<T>(0.9f));
    cos.resize(size_t(positions * s.head_dim / 2)), sin.resize(cos.size());
    for (size_t i = 0; i < cos.size(); i++) cos[i] = float(std::cos(double(i))), sin[i] = float(std::sin(double(i)));
  }

  // The token ids in chunks of such lengths, sequence 0 beside a copy of itself; draws from every last row.
  Result run(const std::vector<int64_t>& ids, const std::vector<int64_t>& chunks, int64_t threads) {
    const int64_t blocks_of_one = (int64_t(ids.size()) + s.block_size - 1) / s.block_size, num_blocks = 2 * blocks_of_one + 1;
    const int64_t row = s.kv_codes ? s.head_dim + 4 : s.head_dim * int64_t(sizeof(T));
    const size_t kv_size = size_t(s.layers * s.kv_heads * num_blocks * s.block_size * row);
    std::vector<char> keys(kv_size, char(0xff)), values(kv_size, char(0xff));  // NaN, and NaN as a scale
    std::vector<Layer> layers;
    const int64_t unit = s.block_size * (s.kv_codes ? row : s.head_dim);  // in numbers
    for (int64_t l = 0; l < s.layers; l++) {
      const size_t at = kv_size / size_t(s.layers) * size_t(l);
      layers.push_back({keys.data() + at, values.data() + at, nullptr, num_blocks * unit, unit});
    }
    const std::vector<int64_t> row_bytes = {s.hidden * 4, s.hidden * int64_t(sizeof(T)),
                                            (s.heads + 2 * s.kv_heads) * s.head_dim * 4,
                                            s.heads * s.head_dim * int64_t(sizeof(T)),
                                            s.heads * s.head_dim * int64_t(sizeof(T)), s.inner * int64_t(sizeof(T)),
                                            2 * s.inner * 4};
    const std::vector<Op> ops = operations();
    const Window window{s.window, 1.f / std::sqrt(float(s.head_dim)), 0.f, s.heads, s.kv_heads, s.head_dim};
    const ProgramSpec spec{int64_t(ops.size()), s.layers, 1, ops.data(), layers.data(), &window, sizeof(T) == 2,
                           s.block_size, num_blocks, positions, s.kv_codes};
    void* program = nano_program_new(&spec);
    const std::vector<LoraParts> adapted(size_t(s.layers), {lora_parts.data(), int64_t(lora_parts.size())});
    const LoraParts* adapter = adapted.data();
    Result result;
    int64_t start = 0;
    for (int64_t length : chunks) {
      const int64_t copies = 2, n = copies * length;
      std::vector<int64_t> at, slots, row_chunks, starts{0}, lens, tables, tokens;
      for (int64_t c = 0; c < copies; c++) {
        for (int64_t b = 0; b < blocks_of_one; b++) tables.push_back(1 + c + copies * (blocks_of_one - 1 - b));
        for (int64_t i = start; i < start + length; i++) {
          at.push_back(i), row_chunks.push_back(c), tokens.push_back(ids[size_t(i)]);
          slots.push_back(tables[size_t(c * blocks_of_one + i / s.block_size)] * s.block_size + i % s.block_size);
        }
        starts.push_back(int64_t(at.size())), lens.push_back(start + length);
      }
      std::vector<std::vector<char>> memory;
      std::vector<void*> buffers;
      const std::vector<int64_t> row_adapters(size_t(n), 0);
      for (int64_t bytes : row_bytes) memory.emplace_back(size_t(bytes * n)), buffers.push_back(memory.back().data());
      Step step{{n, copies, at.data(), slots.data(), row_chunks.data(), starts.data(), lens.data(), tables.data(), blocks_of_one},
                tokens.data(), buffers.data(), row_bytes.data(), row_adapters.data(), &adapter, 1, threads, 0,
                int64_t(ops.size())};
      if (int problem = nano_program_run(program, &step)) std::printf("problem %d\n", problem), std::exit(1);
      result.hidden.insert(result.hidden.end(), memory[1].begin(), memory[1].begin() + row_bytes[1] * length);
      draw(memory[1].data(), n, length - 1, threads, start + length, result);
      start += length;
    }
    nano_program_free(program);
    return result;
  }

  const Sizes s;

 private:
  std::vector<Op> operations() const {
    std::vector<Op> ops;
    auto add = [&](Kind kind, int32_t in, int32_t out, int32_t residual = -1) -> Op& {
      ops.push_back({});
      Op& op = ops.back();
      op.kind = kind, op.input = in, op.output = out, op.residual = residual, op.scale = 1.f;
      return op;
    };
    auto product = [&](const std::vector<T>& w, int64_t rows, int64_t columns, int32_t in, int32_t out, Finish finish) {
      Op& op = add(Kind::LINEAR, in, out);
      op.weight = w.data(), op.rows = rows, op.columns = columns, op.finish = finish;
      if (finish != Finish::ADD) return;
      op.segments.count = Segments::MOST;
      for (int64_t i = 0; i <= Segments::MOST; i++) op.segments.bounds[i] = columns / 2 * i / Segments::MOST * 2;
      op.segments.bounds[Segments::MOST] = columns;
    };
    auto normed = [&](bool read_once) {
      Op& op = add(Kind::NORM, -1, 1, 0);
      op.columns = s.hidden, op.norm = {norm.data(), s.hidden, sizeof(T) == 4, 1e-5f, 0.f}, op.read_once = read_once;
    };
    Op& first = add(Kind::EMBED, -1, 0);
    first.weight = embedding.data(), first.rows = s.vocab, first.columns = s.hidden;
    for (int64_t l = 0; l < s.layers; l++) {
      const auto* w = &weights[size_t(4 * l)];
      normed(false);  // the adapter reads it too
      product(w[0], (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden, 1, 2, Finish::STORE);
      Op& own = add(Kind::LORA, 1, 2);
      own.plan = int32_t(l), own.columns = s.hidden;
      Op& rope = add(Kind::ROPE_AND_STORE, 2, 3);
      rope.query_heads = s.heads, rope.kv_heads = s.kv_heads, rope.head_dim = s.head_dim;
      rope.layer = int32_t(l), rope.cos = cos.data(), rope.sin = sin.data();
      rope.turning = l % 2 ? s.head_dim / 2 : s.head_dim, rope.interleaved = l % 2, rope.query_scales = l % 2 ? cos.data() : nullptr;
      rope.norm = rope.key_norm = {head_norm.data(), s.head_dim, sizeof(T) == 4, 1e-5f, 0.f};
      add(Kind::ATTENTION, 3, 4).layer = int32_t(l);
      product(w[1], s.hidden, s.heads * s.head_dim, 4, 0, Finish::ADD);
      normed(true);
      if (s.inner % 16 == 0) {
        product(w[2], 2 * s.inner, s.hidden, 1, 5, Finish::SILU);
      } else {
        product(w[2], 2 * s.inner, s.hidden, 1, 6, Finish::STORE);
        add(Kind::GATE, 6, 5).rows = s.inner;
      }
      product(w[3], s.hidden, s.inner, 5, 0, Finish::ADD);
    }
    normed(false);
    return ops;
  }

  void draw(const void* hidden, int64_t n, int64_t row, int64_t threads, int64_t position, Result& result) const {
    const HeadInput input{hidden, embedding.data(), nullptr, s.hidden, 0, n, s.vocab, s.hidden, sizeof(T), threads, 1.f};
    constexpr int64_t R = 5;
    std::vector<int64_t> rows(R, row), top_k{0, 0, 5, 0, 3}, keys, entry_rows{1, 3}, entry_ids{7, s.vocab - 1}, ban_rows{0, 3, 4}, ban_ids{2, 7, s.vocab - 1}, tokens(R), top(2 * R);
    std::vector<double> temperature{1, 0, 1, 0.7, 2};
    std::vector<float> top_p{1, 1, 1, 0.9f, 0.8f}, zero(R, 0.f), one(R, 1.f), values{3, -2}, logprobs(R), raw(R), mass(R), best(2 * R), named(4);
    std::vector<int64_t> mask_rows{-1, 0, -1, 0, -1};
    std::vector<int32_t> mask_words(size_t((s.vocab + 31) / 32), 0x55555555);
    mask_words.back() &= int32_t((1ull << (s.vocab - (int64_t(mask_words.size()) - 1) * 32)) - 1);
    std::vector<uint8_t> kept(size_t(R * s.vocab));
    for (int64_t i = 0; i < 2 * R; i++) keys.push_back((position * 7919 + i * 104729) & 0xffffffff);
    const Entries some{entry_rows.data(), entry_ids.data(), values.data(), 2}, none{nullptr, nullptr, nullptr, 0.f};
    const Entries bans{ban_rows.data(), ban_ids.data(), zero.data(), 3};
    const DrawBatch batch{R, rows.data(), temperature.data(), top_k.data(), top_p.data(), zero.data(), zero.data(), zero.data(),
                          one.data(), keys.data(), some, bans, none, some, mask_rows.data(), mask_words.data(), 1, int64_t(mask_words.size()), 1, 2, tokens.data(), logprobs.data(),
                          raw.data(), mass.data(), kept.data(), top.data(), best.data(), named.data()};
    if (int problem = nano_draw(&input, &batch)) std::printf("draw %d\n", problem), std::exit(1);
    for (int64_t token : tokens)
      if (token < 0 || token >= s.vocab) std::printf("token %ld\n", long(token)), std::exit(1);
    result.tokens = tokens, result.logprobs = logprobs;
    if (s.vocab > head::VOCAB_BLOCK) draw_by_parts(input, batch);
  }

  // The first block of the vocabulary on one rank, the rest on another: plain draws have the bits of one rank.
  void draw_by_parts(HeadInput input, DrawBatch batch) const {
    const size_t R = size_t(batch.num_samples);
    std::vector<int64_t> top_k(R, 0), tokens(R), other_tokens(R);
    std::vector<float> top_p(R, 1.f), logprobs(R), other_logprobs(R), unused(2 * R);
    batch.filters.top_k = top_k.data(), batch.filters.top_p = top_p.data(), batch.kept = nullptr, batch.num_top = 0, batch.named.count = 0;
    batch.raw_logprobs = unused.data(), batch.log_kept_mass = unused.data() + R;
    batch.token_ids = tokens.data(), batch.logprobs = logprobs.data();
    if (nano_draw(&input, &batch)) std::exit(1);
    const int64_t blocks = (s.vocab + head::VOCAB_BLOCK - 1) / head::VOCAB_BLOCK;
    std::vector<head::Best> best(2 * R);
    std::vector<float> all[2] = {std::vector<float>(3 * R * size_t(blocks)), std::vector<float>(3 * R * size_t(blocks))};
    head::HeadPart found{};
    for (int64_t p = 0, at = 0; p < 2; p++) {
      const int64_t own = p ? blocks - 1 : 1;
      HeadInput part = input;
      part.first = p * head::VOCAB_BLOCK, part.vocab = p ? s.vocab - head::VOCAB_BLOCK : head::VOCAB_BLOCK, part.whole = s.vocab;
      const Matrix<T> whole{embedding.data(), s.vocab, s.hidden};
      part.weight = whole.panel(part.first / LANES);
      std::vector<float> maxima(3 * R * size_t(own)), sums(maxima.size());
      found = {maxima.data(), sums.data(), best.data() + size_t(p) * R, 0.f};
      if (nano_draw_part(&part, &batch, &found)) std::exit(1);
      for (int64_t v = 0; v < found.num_views; v++)
        for (int64_t b = 0; b < own; b++)
          all[0][size_t(v * blocks + at + b)] = maxima[size_t(v * own + b)], all[1][size_t(v * blocks + at + b)] = sums[size_t(v * own + b)];
      at += own;
    }
    HeadInput together{};
    together.num_rows = input.num_rows, together.vocab = s.vocab, together.num_threads = 1;
    batch.token_ids = other_tokens.data(), batch.logprobs = other_logprobs.data();
    const head::HeadPart parts{all[0].data(), all[1].data(), best.data(), found.num_views};
    if (nano_draw_whole(&together, &batch, &parts, 2)) std::exit(1);
    if (tokens != other_tokens || logprobs != other_logprobs) std::printf("parts of the vocabulary: other bits\n"), std::exit(1);
  }

  std::vector<T> embedding, norm, head_norm;
  std::vector<std::vector<T>> weights;
  std::vector<float> matrices;
  std::vector<LoraPart> lora_parts;
  std::vector<float> cos, sin;
  const int64_t positions;
};

template <class T>
void round(Digest& all) {
  const int64_t kv_heads = pick({1, 2, 3});
  const Sizes s{kv_heads * pick({1, 2, 3}), kv_heads, pick({16, 32, 64}), pick({32, 48, 50, 96}), pick({32, 40, 64}),
                pick({100, 385, 800}), pick({1, 4, 16, 24, 64}), pick({0, 0, 5, 64}), pick({1, 2}), pick({0, 0, 1}) == 1};
  Model<T> model(s);
  std::vector<int64_t> ids(size_t(pick({1, 17, 70, 150})));
  for (auto& id : ids) id = int64_t(random_bits() % unsigned(s.vocab));
  const int64_t n = int64_t(ids.size());
  const Result whole = model.run(ids, {n}, 1);
  all.add(reinterpret_cast<const T*>(whole.hidden.data()), whole.hidden.size() / sizeof(T));
  all.add(whole.tokens), all.add(whole.logprobs);
  for (int64_t threads : {1, 2, 3}) {
    std::vector<int64_t> chunks;
    for (int64_t left = n; left;) {
      const int64_t length = std::min(left, pick({1, 1, 7, 33, 64, 100}));
      chunks.push_back(length), left -= length;
    }
    const Result other = model.run(ids, chunks, threads);
    if (other.hidden != whole.hidden || other.tokens != whole.tokens || other.logprobs != whole.logprobs) {
      std::printf("%ld tokens in %zu chunks on %ld threads: other bits\n", long(n), chunks.size(), long(threads));
      std::exit(1);
    }
    for (float x : other.logprobs)
      if (!std::isfinite(x)) std::printf("logprob %g\n", x), std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  Digest all;
  for (int i = 0; i < rounds; i++) {
    round<bf16>(all);
    round<float>(all);
    codes_round(all);
    experts_round(all);
    states_round(all);
    gradients_round(all);
  }
  std::printf("%d rounds of both dtypes: the same bits under every schedule\n", rounds);
  std::printf("digest %016llx\n", all.value());  // the same on every instruction set
}
