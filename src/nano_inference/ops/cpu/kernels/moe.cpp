// Layers of experts: the selection of a row's experts, their products, and the sum over a row's experts.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "linear.h"
#include "moe.h"
#include "pool.h"
#include "simd.h"

namespace nano {
namespace {

enum Problem { NONE = 0, BAD_ROW = 1, BAD_EXPERT = 2 };

constexpr int64_t ROW_CHUNK = 64;       // rows of an expert that a thread takes at a time
constexpr int64_t PANELS_OF_GATE = 12;  // and panels of its outputs
constexpr int64_t PANELS_OF_DOWN = 24;

int64_t up_to_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Memory for the selection of a row's experts, with room for whole panels of experts.
struct Choice {
  std::vector<float> sizes, keys, groups;
  std::vector<uint8_t> taken, kept;
};

Vec vsigmoid(Vec x) {
  return vdiv(vset(1.f), vadd(vset(1.f), vexp(vmax(vset(-100.f), vmin(vset(88.f), vsub(vset(0.f), x))))));
}

// Compute the scores of a row's experts. The caller must divide them by the returned sum.
float score(const float* z, const Routing& r, std::vector<float>& sizes) {
  float highest = z[0];
  for (int64_t e = 1; e < r.num_experts; e++) highest = z[e] > highest ? z[e] : highest;
  Vec lanes = vset(0.f);
  for (int64_t e = 0; e < r.num_experts; e += LANES) {
    const int n = int(std::min<int64_t>(LANES, r.num_experts - e));
    const Vec x = vload_n(z + e, n), v = r.sigmoid ? vsigmoid(x) : vexp(vsub(x, vset(highest)));
    lanes = vadd(lanes, vselect(first_lanes(n), v, vset(0.f)));
    vstore_n(sizes.data() + e, v, n);
  }
  return r.sigmoid ? 1.f : vsum(lanes);
}

// Mark the `count` highest unmarked keys in [first, last), the first of equal keys first. Return the sum of these keys.
float take(const float* keys, int64_t first, int64_t last, int64_t count, std::vector<uint8_t>& taken) {
  float sum = 0.f;
  for (int64_t k = 0; k < count; k++) {
    int64_t best = -1;
    for (int64_t e = first; e < last; e++)
      if (!taken[size_t(e)] && (best < 0 || keys[e] > keys[best])) best = e;
    taken[size_t(best)] = 1;
    sum = k ? sum + keys[best] : keys[best];
  }
  return sum;
}

// Set the keys of experts outside the row's best groups to -inf.
void keep_best_groups(const Routing& r, Choice& c) {
  const int64_t size = r.num_experts / r.groups;
  c.groups.resize(size_t(r.groups));
  for (int64_t g = 0; g < r.groups; g++)
    c.groups[size_t(g)] = take(c.keys.data(), g * size, (g + 1) * size, r.group_best, c.taken);
  c.taken.assign(size_t(r.num_experts), 0);
  c.kept.assign(size_t(r.groups), 0);
  take(c.groups.data(), 0, r.groups, r.groups_kept, c.kept);
  for (int64_t e = 0; e < r.num_experts; e++)
    if (!c.kept[size_t(e / size)]) c.keys[size_t(e)] = -INFINITY;
}

// Select the experts of one row, with their weights, from its logits.
void choose(const float* z, const Routing& r, Choice& c, int64_t* ids, float* weights) {
  c.sizes.resize(size_t(up_to_lanes(r.num_experts)));
  const float whole = score(z, r, c.sizes);
  c.keys.assign(z, z + r.num_experts);
  if (r.bias)
    for (int64_t e = 0; e < r.num_experts; e++) c.keys[size_t(e)] = c.sizes[size_t(e)] / whole + r.bias[e];
  c.taken.assign(size_t(r.num_experts), 0);
  if (r.groups > 1) keep_best_groups(r, c);
  take(c.keys.data(), 0, r.num_experts, r.per_token, c.taken);
  float total = r.renormalized ? 0.f : whole;
  int64_t k = 0;
  for (int64_t e = 0; e < r.num_experts; e++)
    if (c.taken[size_t(e)]) {
      ids[k++] = e;
      if (r.renormalized) total += c.sizes[size_t(e)];
    }
  if (total < r.floor * whole) total = r.floor * whole;
  for (k = 0; k < r.per_token; k++) weights[k] = c.sizes[size_t(ids[k])] / total * r.scale;
  if (r.shared) weights[r.per_token] = r.shared == 2 ? vfirst(vsigmoid(vset(z[r.num_experts]))) : 1.f;
}

template <class T>
void route(const T* x, int64_t num_rows, Matrix<T> router, const Routing& routing, int64_t* ids, float* weights,
           Team& team) {
  const int64_t width = up_to_lanes(router.rows), per_token = routing.per_token;
  const int64_t num_weights = per_token + (routing.shared != 0);
  static thread_local std::vector<float> logits;
  static thread_local Choice choice;
  const int64_t end = team.end(num_rows);
  for (int64_t from = team.begin(num_rows); from < end; from += ROW_CHUNK) {
    const int64_t count = std::min(ROW_CHUNK, end - from);
    logits.resize(size_t(count * width));
    products<T>(x + from * router.columns, router.columns, count, router, 0, router.num_panels(), logits.data(), width,
                nullptr);
    if (routing.logit_scale != 1.f)
      for (size_t i = 0; i < size_t(count * width); i++) logits[i] *= routing.logit_scale;
    if (routing.logits)
      for (int64_t i = 0; i < count; i++)
        for (int64_t e = 0; e < routing.num_experts; e++) logits[size_t(i * width + e)] += routing.logits[e];
    for (int64_t i = 0; i < count; i++)
      choose(logits.data() + i * width, routing, choice, ids + (from + i) * per_token, weights + (from + i) * num_weights);
  }
}

// Some rows of an expert and some panels of its outputs.
struct Item {
  int64_t expert, row, end_row, panel, end_panel;
};

// Cut the work into items. Weights stay in the cache while the rows of their expert pass.
void cut(const std::vector<int64_t>& starts, int64_t num_panels, int64_t chunk, std::vector<Item>& items) {
  items.clear();
  for (int64_t e = 0; e + 1 < int64_t(starts.size()); e++)
    for (int64_t panel = 0; panel < num_panels && starts[e] < starts[e + 1]; panel += chunk)
      for (int64_t row = starts[e]; row < starts[e + 1]; row += ROW_CHUNK)
        items.push_back({e, row, std::min(row + ROW_CHUNK, starts[e + 1]), panel, std::min(panel + chunk, num_panels)});
}

// Rows of x, each with an expert.
struct Chosen {
  const int64_t *rows, *experts;  // [count]
  int64_t count;
};

template <class T>
struct Scratch {
  std::vector<int64_t> starts, order;  // first index of each expert in `order`; entries sorted by expert
  std::vector<Item> ups, downs;
  std::vector<T> inputs, gated;  // rows by expert
  std::vector<float> sums;
};

// Sort the rows by expert, in their original order within an expert.
template <class T>
void sort(const Chosen& chosen, int64_t num_experts, Scratch<T>& s) {
  s.starts.assign(size_t(num_experts) + 1, 0);
  for (int64_t i = 0; i < chosen.count; i++) s.starts[size_t(chosen.experts[i]) + 1]++;
  for (int64_t e = 0; e < num_experts; e++) s.starts[size_t(e) + 1] += s.starts[size_t(e)];
  s.order.resize(size_t(chosen.count));
  std::vector<int64_t> next(s.starts);
  for (int64_t i = 0; i < chosen.count; i++) s.order[size_t(next[size_t(chosen.experts[i])]++)] = i;
}

template <class T>
void product(const Item& item, const T* x, Matrix<T> all, const T* biases, Finish finish, void* out) {
  const Matrix<T> own = all.part(item.expert * all.num_panels(), all.rows);
  const int64_t width = finish == Finish::STORE ? all.rows : all.rows / 2;
  const T* bias = biases ? biases + item.expert * all.rows : nullptr;
  linear({x, all.columns, own, bias, finish, 1.f, out, width, false}, item.row, item.end_row, item.panel,
         item.end_panel, {nullptr, nullptr, 0});
}

// Weights, and biases or null, of the first expert, followed by the other experts.
template <class T>
struct Stack {
  Matrix<T> weight;
  const T* bias;
};

// out[i] = down(gate(gate_up(x[row of i]))), by the expert of i.
template <class T>
void run_experts(const T* x, const Chosen& chosen, int64_t num_experts, Stack<T> gate_up, Stack<T> down, Finish gate,
                 float* out, int num_threads) {
  static thread_local Scratch<T> of_this_thread;
  Scratch<T>& s = of_this_thread;  // the other threads use it too
  sort(chosen, num_experts, s);
  const int64_t count = chosen.count, hidden = down.weight.rows, inner = down.weight.columns;
  s.inputs.resize(size_t(count * hidden));
  s.gated.resize(size_t(count * inner));
  s.sums.resize(size_t(count * hidden));
  cut(s.starts, inner / LANES, PANELS_OF_GATE, s.ups);
  cut(s.starts, hidden / LANES, PANELS_OF_DOWN, s.downs);
  std::atomic<int64_t> up{0}, low{0};
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(count); i < team.end(count); i++)
      std::copy_n(x + chosen.rows[s.order[size_t(i)]] * hidden, hidden, s.inputs.data() + i * hidden);
    team.wait();
    for (int64_t i; (i = up.fetch_add(1, std::memory_order_relaxed)) < int64_t(s.ups.size());)
      product(s.ups[size_t(i)], s.inputs.data(), gate_up.weight, gate_up.bias, gate, s.gated.data());
    team.wait();
    for (int64_t i; (i = low.fetch_add(1, std::memory_order_relaxed)) < int64_t(s.downs.size());)
      product(s.downs[size_t(i)], s.gated.data(), down.weight, down.bias, Finish::STORE, s.sums.data());
    team.wait();
    for (int64_t i = team.begin(count); i < team.end(count); i++)
      std::copy_n(s.sums.data() + i * hidden, hidden, out + s.order[size_t(i)] * hidden);
  };
  run_team(num_threads, work);
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

// Compute the experts [num_rows, per_token] of rows x [num_rows, hidden], rising, and their weights, with a router
// [rows, hidden].
void nano_moe_route(const void* x, int64_t num_rows, int64_t hidden, const void* router, int64_t rows, int64_t is_bf16,
                    const Routing* routing, int64_t* ids, float* weights, int64_t num_threads) {
  auto work = [&](Team& team) {
    if (is_bf16)
      route<bf16>(static_cast<const bf16*>(x), num_rows, {static_cast<const bf16*>(router), rows, hidden}, *routing, ids,
                  weights, team);
    else
      route<float>(static_cast<const float*>(x), num_rows, {static_cast<const float*>(router), rows, hidden}, *routing,
                   ids, weights, team);
  };
  run_team(int(num_threads), work);
}

// Call run_experts. gate_up and down are packed, with all experts one below the other. hidden and inner are multiples
// of 16. Biases have the weights' type or are null. `activation`: a Finish.
int nano_moe_products(const void* x, int64_t num_rows, const int64_t* rows, const int64_t* experts, int64_t count,
                      int64_t num_experts, int64_t hidden, int64_t inner, const void* gate_up, const void* gate_up_bias,
                      const void* down, const void* down_bias, const Quantised* gate_up_codes,
                      const Quantised* down_codes, int64_t is_bf16, int64_t activation, float* out,
                      int64_t num_threads) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= num_rows) return BAD_ROW;
    if (experts[i] < 0 || experts[i] >= num_experts) return BAD_EXPERT;
  }
  const Chosen chosen{rows, experts, count};
  const Finish gate = Finish(activation);
  if (is_bf16)
    run_experts<bf16>(static_cast<const bf16*>(x), chosen, num_experts,
                      {{static_cast<const bf16*>(gate_up), 2 * inner, hidden, gate_up_codes}, static_cast<const bf16*>(gate_up_bias)},
                      {{static_cast<const bf16*>(down), hidden, inner, down_codes}, static_cast<const bf16*>(down_bias)}, gate, out,
                      int(num_threads));
  else
    run_experts<float>(static_cast<const float*>(x), chosen, num_experts,
                       {{static_cast<const float*>(gate_up), 2 * inner, hidden, gate_up_codes}, static_cast<const float*>(gate_up_bias)},
                       {{static_cast<const float*>(down), hidden, inner, down_codes}, static_cast<const float*>(down_bias)}, gate, out,
                       int(num_threads));
  return NONE;
}

// out [num_rows, hidden] = the sum over k of weights [num_rows, k] * products [num_rows, k, hidden], in order.
void nano_moe_combine(const float* products, const float* weights, int64_t num_rows, int64_t per_token, int64_t hidden,
                      float* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(num_rows); i < team.end(num_rows); i++)
      for (int64_t j = 0; j < hidden; j += LANES) {
        const int n = int(std::min<int64_t>(LANES, hidden - j));
        Vec sum = vset(0.f);
        for (int64_t k = i * per_token; k < (i + 1) * per_token; k++)
          sum = vfma(vload_n(products + k * hidden + j, n), vset(weights[k]), sum);
        vstore_n(out + i * hidden + j, sum, n);
      }
  };
  run_team(int(num_threads), work);
}
}
