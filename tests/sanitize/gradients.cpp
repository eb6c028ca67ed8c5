// The backward pass's kernels for the sanitizers: the same inputs on 1, 2 and 3 threads, all memory of exact size.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "digest.h"
#include "gradients.h"
#include "linear.h"

namespace {

using namespace nano;
std::mt19937 random_bits(4);

int64_t below(int64_t n) { return int64_t(random_bits() % unsigned(n)); }

template <class T>
std::vector<T> numbers(int64_t count, float size = 1.f) {
  std::vector<T> out(static_cast<size_t>(count));
  for (auto& v : out) {
    const float x = (float(below(2001)) / 1000.f - 1.f) * size;
    if constexpr (sizeof(T) == 2) v = narrow1(x);
    else v = x;
  }
  return out;
}
template <class T>
std::vector<T> room(int64_t count) { return std::vector<T>(static_cast<size_t>(count)); }

// Compute with each number of threads. All results must be equal and finite.
template <class F>
void by_threads(const char* name, Digest& all, F compute) {
  const std::vector<float> one = compute(1);
  for (float x : one)
    if (!std::isfinite(x)) std::printf("%s: %g\n", name, double(x)), std::exit(1);
  for (int64_t threads : {2, 3})
    if (compute(threads) != one) std::printf("%s on %ld threads: other bits\n", name, long(threads)), std::exit(1);
  all.add(one);
}
std::vector<float> joined(std::initializer_list<std::vector<float>> parts) {
  std::vector<float> out;
  for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}
template <class T>
std::vector<float> wide(const std::vector<T>& x) {
  std::vector<float> out;
  for (T v : x) {
    if constexpr (sizeof(T) == 2) out.push_back(widen1(v));
    else out.push_back(v);
  }
  return out;
}

template <class T>
void products(Digest& all) {
  const int64_t n = 1 + below(90), in = 1 + below(100), out = 1 + below(300);
  const auto x = numbers<T>(n * in), w = numbers<T>(out * in);
  const auto d = numbers<float>(n * out), total = numbers<float>(out * in);
  by_threads("products", all, [&](int64_t threads) {
    const Matrix<T> forward{nullptr, in, n}, back{nullptr, in, out};
    auto packed_x = room<T>(forward.num_panels() * forward.panel_size()), packed_w = room<T>(back.num_panels() * back.panel_size());
    auto turned = room<T>(out * (n + 3)), rounded = room<T>(n * out);
    auto d_w = total, d_x = room<float>(n * in);
    nano_pack_turned(x.data(), n, in, packed_x.data(), sizeof(T) == 2, threads);
    nano_pack_turned(w.data(), out, in, packed_w.data(), sizeof(T) == 2, threads);
    nano_turn(d.data(), n, out, turned.data(), n + 3, sizeof(T) == 2, threads);
    if constexpr (sizeof(T) == 2) nano_round_rows(d.data(), n * out, rounded.data(), threads);
    else rounded = d;
    const GradientProduct weight{turned.data(), packed_x.data(), nullptr, d_w.data(), n + 3, out, in, n, in, 1, sizeof(T) == 2, threads, 0.5f};
    const GradientProduct rows{rounded.data(), packed_w.data(), nullptr, d_x.data(), out, n, in, out, in, 0, sizeof(T) == 2, threads, 1.f};
    nano_gradient_product(&weight), nano_gradient_product(&rows);
    return joined({d_w, d_x});
  });
}

template <class T>
void rows(Digest& all) {
  const int64_t n = 1 + below(50), kv_heads = 1 + below(3), heads = kv_heads * (1 + below(3)), size = 2 * (1 + below(40));
  const int64_t turning = 2 * (1 + below(size / 2)), columns = (heads + 2 * kv_heads) * size, positions = 30;
  const auto x = numbers<float>(n * columns), cos = numbers<float>(positions * turning / 2), sin = numbers<float>(positions * turning / 2);
  const auto scales = numbers<float>(positions), d_q = numbers<float>(n * heads * size), d_k = numbers<float>(n * kv_heads * size);
  const auto head_weight = numbers<T>(size), full_weight = numbers<T>(columns);
  const NormWeight head_norm{head_weight.data(), size, sizeof(T) == 4, 1e-5f, 0.f}, full{full_weight.data(), columns, sizeof(T) == 4, 1e-5f, 1.f};
  std::vector<int64_t> at(static_cast<size_t>(n));
  for (auto& position : at) position = below(positions);
  by_threads("rows", all, [&](int64_t threads) {
    auto q = room<T>(n * heads * size), k = room<T>(n * kv_heads * size), v = k, normed = room<T>(n * columns);
    auto grads_q = d_q, grads_k = d_k, grads_v = d_k, d_rows = room<float>(n * columns), d_x = x;
    auto d_head = room<float>(size), d_full = room<float>(columns), added = room<float>(columns);
    RotatedHeads turned{x.data(), cos.data(), sin.data(), scales.data(), at.data(), &head_norm, nullptr, q.data(), k.data(), v.data(), nullptr,
                        n, heads, kv_heads, size, turning, below(2), sizeof(T) == 2, threads};
    turned.interleaved = n % 2;
    nano_rotate(&turned);
    turned.queries = grads_q.data(), turned.keys = grads_k.data(), turned.values = grads_v.data(), turned.d_rows = d_rows.data();
    nano_rotate_gradient(&turned);
    const NormGradient in_place{x.data(), d_rows.data(), &head_norm, d_rows.data(), d_head.data(), columns, columns, n, heads, 0, threads, 1.f};
    const NormGradient to_others{x.data(), d_rows.data(), &full, d_x.data(), d_full.data(), columns, columns, n, 1, 1, threads, 0.7f};
    nano_norm_gradient(&in_place), nano_norm_gradient(&to_others);
    nano_norm_rows(x.data(), n, &full, normed.data(), sizeof(T) == 2, threads);
    nano_add_columns(x.data(), n, columns, added.data(), threads);
    auto table = room<float>(positions * columns);
    nano_add_rows(x.data(), at.data(), n, columns, 0.3f, table.data(), threads);
    return joined({wide(q), wide(k), wide(v), d_rows, d_x, d_head, d_full, wide(normed), added, table});
  });
  for (int64_t activation = 2; activation <= 4; activation++)
    by_threads("gates", all, [&](int64_t threads) {
      const int64_t inner = columns / 2;
      auto out = room<T>(n * inner);
      auto d_x = room<float>(n * 2 * inner);
      nano_gate_rows(x.data(), n, inner, activation, out.data(), sizeof(T) == 2, threads);
      nano_gate_gradient(x.data(), x.data(), n, inner, activation, d_x.data(), threads);
      return joined({wide(out), d_x});
    });
}

template <class T>
void attention(Digest& all) {
  const int64_t kv_heads = 1 + below(2), heads = kv_heads * (1 + below(3)), size = 1 + below(70);
  const int64_t before = below(2) ? below(200) : 0, n = 1 + below(150), others = below(5), total = before + others + n;
  std::vector<int64_t> path(static_cast<size_t>(before + n));
  for (int64_t i = 0; i < before; i++) path[size_t(i)] = i;
  std::iota(path.begin() + before, path.end(), before + others);  // other rows lie between
  const auto q = numbers<T>(total * heads * size), k = numbers<T>(total * kv_heads * size), v = numbers<T>(total * kv_heads * size);
  const auto d_out = numbers<T>(total * heads * size);
  const auto sinks = numbers<float>(heads);
  const bool has_sinks = below(2);
  const int64_t window = below(2) ? 1 + below(180) : 0;
  const float cap = below(2) ? 3.f : 0.f;
  by_threads("attention", all, [&](int64_t threads) {
    auto out = room<T>(total * heads * size);
    auto d_q = room<float>(total * heads * size), d_k = room<float>(total * kv_heads * size), d_v = d_k, d_sinks = room<float>(heads);
    AttentionGradient job{q.data(), k.data(), v.data(), path.data(), has_sinks ? sinks.data() : nullptr, out.data(), d_out.data(), nullptr,
                          d_k.data(), d_v.data(), has_sinks ? d_sinks.data() : nullptr, n, before + n, heads, kv_heads, size, window,
                          sizeof(T) == 2, threads, 0.2f, cap};
    nano_attention_gradient(&job);
    job.d_q = d_q.data();
    nano_attention_gradient(&job);
    return joined({wide(out), d_q, d_k, d_v, d_sinks});
  });
}

void logits(Digest& all) {
  const int64_t n = 1 + below(8), vocab = 1 + below(1300), width = (vocab + 31) / 32;
  const auto z = numbers<float>(n * vocab, 9.f);
  std::vector<int64_t> first{0}, targets, mask_rows;
  std::vector<float> gradients;
  std::vector<int32_t> words(static_cast<size_t>(width), 0x6db6db6d);
  for (int64_t i = 0; i < n; i++) {
    for (int64_t token = below(20); token < vocab; token += 1 + below(vocab)) targets.push_back(token), gradients.push_back(float(below(9)) - 4.f);
    first.push_back(int64_t(targets.size())), mask_rows.push_back(i % 3 - 1 > 0 ? 0 : -1);
  }
  by_threads("logits", all, [&](int64_t threads) {
    auto d = z;
    const LogitGradient job{d.data(), first.data(), targets.data(), gradients.data(), mask_rows.data(), words.data(), width, n, vocab, threads,
                            1.3f, vocab % 2 ? 5.f : 0.f, 0.8f};
    nano_logit_gradient(&job);
    return d;
  });
}

void routes(Digest& all) {
  const int64_t n = 1 + below(20), per_token = 1 + below(4), count = per_token + below(70), shared = below(3), columns = count + (shared == 2);
  const auto z = numbers<float>(n * columns, 3.f), d = numbers<float>(n * (per_token + 1));
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; i++)
    for (int64_t k = 0; k < per_token; k++) ids.push_back(count - per_token + k);
  for (int64_t kind = 0; kind < 4; kind++)
    by_threads("routes", all, [&](int64_t threads) {
      auto weights = room<float>(n * (per_token + (shared != 0))), d_z = room<float>(n * columns), sums = room<float>(n);
      RouteGradient job{z.data(), ids.data(), weights.data(), nullptr, d_z.data(), n, count, columns, per_token, kind % 2, kind / 2, shared, threads,
                        1.5f, 1e-3f};
      nano_route_gradient(&job);
      job.d_weights = d.data();
      nano_route_gradient(&job);
      nano_row_products(z.data(), d_z.data(), n, columns, sums.data(), threads);
      return joined({weights, d_z, sums});
    });
}

template <class T>
void optimizer(Digest& all) {
  const int64_t count = 1 + below(9000);
  const auto param = numbers<T>(count), gradient = numbers<T>(count), mean = numbers<T>(count);
  auto square = numbers<T>(count);
  for (auto& x : square) x = sizeof(T) == 2 ? T(uint32_t(x) & 0x7fff) : T(std::fabs(float(x)));
  by_threads("optimizer", all, [&](int64_t threads) {
    auto p = param, m = mean, s = square, largest = square;
    const AdamStep step{p.data(), m.data(), s.data(), count % 2 ? largest.data() : nullptr, gradient.data(), count, sizeof(T) == 2, threads,
                        0.99f, 0.1f, 0.999f, 0.001f, 0.02f, 0.3f, 1e-8f, -0.5f};
    nano_adamw(&step);
    std::vector<double> blocks(static_cast<size_t>((count + 4095) / 4096));
    const float sum = float(nano_sum_of_squares(p.data(), count, sizeof(T) == 2, blocks.data(), threads));
    return joined({wide(p), wide(m), wide(s), wide(largest), {sum}});
  });
}

template <class T>
void round(Digest& all) { products<T>(all), rows<T>(all), attention<T>(all), optimizer<T>(all); }

}  // namespace

void gradients_round(nano::Digest& all) { round<bf16>(all), round<float>(all), logits(all), routes(all); }
