// Layers with a state for the sanitizers: the same tokens in other chunks, by 1, 2 and 3 threads. All memory is of exact
// size and NaN until it is written; blocks that nothing reads any more have no unit.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "digest.h"
#include "simd.h"
#include "state.h"

namespace {

using namespace nano;
std::mt19937 random_bits(3);

int64_t below(int64_t n) { return int64_t(random_bits() % unsigned(n)); }

template <class T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  for (auto& v : out) {
    const float x = float(below(2001)) / 1000.f - 1.f;
    if constexpr (sizeof(T) == 2) v = narrow1(x);
    else v = x;
  }
  return out;
}

template <class T>
std::vector<T> unwritten(int64_t count) {
  if constexpr (sizeof(T) == 2) return std::vector<T>(size_t(count), narrow1(NAN));
  else return std::vector<T>(size_t(count), NAN);
}

// A layer of either kind; a convolution alone has no heads.
template <class T>
class StateLayer {
 public:
  explicit StateLayer(bool rule)
      : rule(rule), size(1 + below(24)), taps(1 + below(4)), key_heads(1 + below(3)), group(1 + below(3)),
        deep(16 * (1 + below(4))), wide(16 * (1 + below(4))), heads(key_heads * group),
        channels(rule ? 2 * key_heads * deep + heads * wide : 16 * (1 + below(5))),
        columns(rule ? channels + heads * wide + 2 * heads : 3 * channels),
        out_columns(rule ? heads * wide : channels),
        window(rule ? std::max(size + 1, taps) : taps),
        weight(numbers<T>(channels * taps)), bias(numbers<T>(channels)), norm(numbers<T>(wide)),
        log_decay(numbers<float>(heads)), decay_bias(numbers<float>(heads)) {}

  // Two sequences in chunks of such lengths, the second of the first one's rows from the last on: what comes of each.
  std::vector<T> run(const std::vector<float>& projected, const std::vector<int64_t>& chunks, int64_t threads) const {
    const int64_t sequences = 2, total = int64_t(projected.size()) / columns, blocks = (total + size - 1) / size;
    const int64_t units = sequences * blocks, num_blocks = units + 1;  // block 0 is nobody's
    std::vector<int64_t> unit(size_t(num_blocks), -1), tables;
    std::iota(unit.begin() + 1, unit.end(), 0);
    std::shuffle(unit.begin() + 1, unit.end(), random_bits);
    for (int64_t i = 0; i < units; i++) tables.push_back(1 + i);
    std::shuffle(tables.begin(), tables.end(), random_bits);
    auto inputs = unwritten<T>(units * size * channels);
    auto keys = unwritten<float>(units * size * key_heads * deep), values = unwritten<float>(units * size * heads * wide);
    auto decays = unwritten<float>(units * size * heads), state = unwritten<float>(units * heads * deep * wide);
    std::vector<T> result[2];
    int64_t start = 0;
    for (int64_t length : chunks) {
      const int64_t n = sequences * length;
      std::vector<int64_t> positions, slots, row_chunks, starts{0};
      std::vector<float> rows;
      for (int64_t c = 0; c < sequences; c++) {
        for (int64_t i = start; i < start + length; i++) {
          positions.push_back(i), row_chunks.push_back(c);
          slots.push_back(tables[size_t(c * blocks + i / size)] * size + i % size);
        }
        starts.push_back(int64_t(positions.size()));
        for (int64_t i = start; i < start + length; i++) {
          const auto row = projected.begin() + (c ? total - 1 - i : i) * columns;
          rows.insert(rows.end(), row, row + columns);
        }
        for (int64_t b = 0; b < std::max<int64_t>(0, start - window + 1) / size; b++) unit[size_t(tables[size_t(c * blocks + b)])] = -1;
      }
      const StateStep step{n, sequences, size, blocks, num_blocks, units, window, positions.data(), slots.data(),
                           row_chunks.data(), starts.data(), tables.data(), unit.data()};
      const Convolution conv{inputs.data(), weight.data(), rule ? nullptr : bias.data(), channels, taps};
      std::vector<T> out(size_t(n * out_columns));
      auto mixed = unwritten<float>(n * channels);
      const DeltaRule delta{rows.data(), columns, mixed.data(), keys.data(), values.data(), decays.data(), state.data(),
                            log_decay.data(), decay_bias.data(), norm.data(), key_heads, heads, deep, wide, 1e-6f};
      if (rule ? nano_delta_net(&step, &conv, &delta, sizeof(T) == 2, out.data(), threads)
               : nano_short_conv(&step, &conv, rows.data(), sizeof(T) == 2, out.data(), threads))
        std::printf("states: refused\n"), std::exit(1);
      const auto middle = out.begin() + length * out_columns;
      result[0].insert(result[0].end(), out.begin(), middle), result[1].insert(result[1].end(), middle, out.end());
      start += length;
    }
    result[0].insert(result[0].end(), result[1].begin(), result[1].end());
    return result[0];
  }

  const bool rule;
  const int64_t size, taps, key_heads, group, deep, wide, heads, channels, columns, out_columns, window;

 private:
  std::vector<T> weight, bias, norm;
  std::vector<float> log_decay, decay_bias;
};

float wide_of(float x) { return x; }
float wide_of(bf16 x) { return widen1(x); }

template <class T>
void round(bool rule, Digest& all) {
  const StateLayer<T> layer(rule);
  const int64_t n = 1 + below(90);
  const auto projected = numbers<float>(n * layer.columns);
  const auto whole = layer.run(projected, {n}, 1);
  all.add(whole);
  for (T x : whole)
    if (!std::isfinite(wide_of(x))) std::printf("states: a row read what nobody wrote\n"), std::exit(1);
  for (int64_t threads : {1, 2, 3}) {
    std::vector<int64_t> chunks;
    for (int64_t left = n; left; left -= chunks.back()) chunks.push_back(std::min(left, 1 + below(40)));
    if (layer.run(projected, chunks, threads) != whole)
      std::printf("states in %zu chunks on %ld threads: other bits\n", chunks.size(), long(threads)), std::exit(1);
  }
}

}  // namespace

void states_round(nano::Digest& all) {
  for (bool rule : {false, true}) round<bf16>(rule, all), round<float>(rule, all);
}
