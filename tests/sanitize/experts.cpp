// A layer of experts for the sanitizers: rows in other orders and numbers, 1, 2 and 3 threads, all memory of exact size.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "digest.h"
#include "linear.h"
#include "moe.h"

namespace {

using namespace nano;
std::mt19937 random_bits(2);

template <class T>
std::vector<T> rows_of(int64_t rows, int64_t columns) {
  std::vector<T> out(size_t(rows * columns));
  for (auto& v : out) {
    const float x = float(random_bits() % 2001) / 4000.f - 0.25f;
    if constexpr (sizeof(T) == 2) v = narrow1(x);
    else v = x;
  }
  return out;
}

template <class T>
std::vector<T> packed(int64_t rows, int64_t columns) {
  const std::vector<T> plain = rows_of<T>(rows, columns);
  Matrix<T> m{nullptr, rows, columns};
  std::vector<T> out(size_t(m.num_panels() * m.panel_size()));
  pack(plain.data(), out.data(), 0, rows, columns);
  return out;
}

template <class T>
void round(Digest& all) {
  const int64_t hidden = 16 * (1 + random_bits() % 5), inner = 16 * (1 + random_bits() % 8), n = 1 + random_bits() % 90;
  const int64_t experts = 1 + random_bits() % 20, k = 1 + random_bits() % experts;
  const int64_t activation = 2 + random_bits() % 3;  // a Finish
  const auto x = rows_of<T>(n, hidden), router = packed<T>(experts, hidden);
  const auto gate_up = packed<T>(experts * 2 * inner, hidden), down = packed<T>(experts * hidden, inner);
  const auto up_bias = rows_of<T>(1, experts * 2 * inner), down_bias = rows_of<T>(1, experts * hidden);
  const auto logits = rows_of<float>(1, experts);
  const Routing routing{experts, k, 0, random_bits() % 2, 1, 1, 1, 0, nullptr, logits.data(), 1.f, 0.f};

  const ExpertWeights own{gate_up.data(), up_bias.data(), down.data(), down_bias.data(), nullptr, nullptr, hidden, inner};

  auto run = [&](const std::vector<T>& some, int64_t count, int64_t threads) {
    std::vector<int64_t> ids(size_t(count * k)), of(ids.size());
    std::vector<float> weights(ids.size()), products(ids.size() * size_t(hidden)), out(size_t(count * hidden));
    nano_moe_route(some.data(), count, hidden, router.data(), experts, sizeof(T) == 2, &routing, ids.data(),
                   weights.data(), threads);
    for (size_t i = 0; i < of.size(); i++) of[i] = int64_t(i) / k;
    if (nano_moe_products(some.data(), count, of.data(), ids.data(), count * k, experts, &own, sizeof(T) == 2, activation,
                          products.data(), threads))
      std::printf("experts: refused\n"), std::exit(1);
    nano_moe_combine(products.data(), weights.data(), count, k, hidden, out.data(), threads);
    const MoeLayer layer{routing, own, own, router.data(), experts, nullptr, sizeof(T) == 2, activation};
    std::vector<int64_t> chosen(ids.size());
    std::vector<float> at_once(out.size());
    nano_moe_layer(&layer, some.data(), some.data(), count, chosen.data(), at_once.data(), threads);
    if (chosen != ids || at_once != out) std::printf("experts: other bits in one call\n"), std::exit(1);
    return out;
  };
  const auto whole = run(x, n, 1);
  all.add(whole);
  for (int64_t threads = 2; threads <= 3; threads++)
    if (run(x, n, threads) != whole) std::printf("experts on %ld threads: other bits\n", long(threads)), std::exit(1);
  const int64_t first = random_bits() % n, count = 1 + random_bits() % (n - first);
  const std::vector<T> some(x.begin() + first * hidden, x.begin() + (first + count) * hidden);
  const auto part = run(some, count, 2);
  if (memcmp(part.data(), whole.data() + first * hidden, part.size() * 4)) std::printf("experts: other bits\n"), std::exit(1);
}

}  // namespace

void experts_round(nano::Digest& all) { round<bf16>(all), round<float>(all); }
