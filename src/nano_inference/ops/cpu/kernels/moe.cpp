// Layers of experts: which experts a row goes through, their products, and the sum over a row's experts.
#include <algorithm>
#include <atomic>
#include <vector>

#include "linear.h"
#include "pool.h"
#include "simd.h"

namespace nano {
namespace {

enum Problem { NONE = 0, BAD_ROW = 1, BAD_EXPERT = 2 };

constexpr int64_t ROW_CHUNK = 64;       // rows of an expert that a thread takes at once
constexpr int64_t PANELS_OF_GATE = 12;  // and panels of its outputs
constexpr int64_t PANELS_OF_DOWN = 24;

int64_t up_to_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The experts of one row and their weights. `z`: logits, with room for whole panels; they become exp(z - highest).
void choose(float* z, int64_t num_experts, int64_t per_token, bool renormalized, std::vector<uint8_t>& taken, int64_t* ids,
            float* weights) {
  taken.assign(size_t(num_experts), 0);
  for (int64_t k = 0; k < per_token; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; e++)
      if (!taken[size_t(e)] && (best < 0 || z[e] > z[best])) best = e;  // of equal ones the lower id
    taken[size_t(best)] = 1;
  }
  float highest = z[0];
  for (int64_t e = 1; e < num_experts; e++) highest = z[e] > highest ? z[e] : highest;
  Vec lanes = vset(0.f);
  for (int64_t e = 0; e < num_experts; e += LANES) {
    const int n = int(std::min<int64_t>(LANES, num_experts - e));
    const Vec v = vexp(vsub(vload_n(z + e, n), vset(highest)));
    lanes = vadd(lanes, vselect(first_lanes(n), v, vset(0.f)));
    vstore_n(z + e, v, n);
  }
  float total = renormalized ? 0.f : vsum(lanes);
  int64_t k = 0;
  for (int64_t e = 0; e < num_experts; e++)
    if (taken[size_t(e)]) {
      ids[k++] = e;
      if (renormalized) total += z[e];
    }
  for (k = 0; k < per_token; k++) weights[k] = z[ids[k]] / total;
}

template <class T>
void route(const T* x, int64_t num_rows, Matrix<T> router, int64_t per_token, bool renormalized, int64_t* ids,
           float* weights, Team& team) {
  const int64_t width = up_to_lanes(router.rows);
  static thread_local std::vector<float> logits;
  static thread_local std::vector<uint8_t> taken;
  const int64_t end = team.end(num_rows);
  for (int64_t from = team.begin(num_rows); from < end; from += ROW_CHUNK) {
    const int64_t count = std::min(ROW_CHUNK, end - from);
    logits.resize(size_t(count * width));
    products<T>(x + from * router.columns, router.columns, count, router, 0, router.num_panels(), logits.data(), width,
                nullptr);
    for (int64_t i = 0; i < count; i++)
      choose(logits.data() + i * width, router.rows, per_token, renormalized, taken, ids + (from + i) * per_token,
             weights + (from + i) * per_token);
  }
}

// Some rows of an expert and some panels of its outputs.
struct Item {
  int64_t expert, row, end_row, panel, end_panel;
};

// Weights stay in the cache while the rows of their expert pass.
void cut(const std::vector<int64_t>& starts, int64_t num_panels, int64_t chunk, std::vector<Item>& items) {
  items.clear();
  for (int64_t e = 0; e + 1 < int64_t(starts.size()); e++)
    for (int64_t panel = 0; panel < num_panels && starts[e] < starts[e + 1]; panel += chunk)
      for (int64_t row = starts[e]; row < starts[e + 1]; row += ROW_CHUNK)
        items.push_back({e, row, std::min(row + ROW_CHUNK, starts[e + 1]), panel, std::min(panel + chunk, num_panels)});
}

// Rows of x with the experts that they go through.
struct Chosen {
  const int64_t *rows, *experts;  // [count]
  int64_t count;
};

template <class T>
struct Scratch {
  std::vector<int64_t> starts, order;  // first place of each expert; who stands at a place
  std::vector<Item> ups, downs;
  std::vector<T> inputs, gated;  // rows by expert
  std::vector<float> sums;
};

// Rows by expert, and within one as they came.
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
void product(const Item& item, const T* x, Matrix<T> all, Finish finish, void* out) {
  const Matrix<T> own{all.panel(item.expert * all.num_panels()), all.rows, all.columns};
  const int64_t width = finish == Finish::STORE ? all.rows : all.rows / 2;
  linear({x, all.columns, own, nullptr, finish, 1.f, out, width, false}, item.row, item.end_row, item.panel,
         item.end_panel, {nullptr, nullptr, 0});
}

// out[i] = down(gate(gate_up(x[row of i]))), by the expert of i. The weights are those of the first expert; the others
// follow.
template <class T>
void run_experts(const T* x, const Chosen& chosen, int64_t num_experts, Matrix<T> gate_up, Matrix<T> down, Finish gate,
                 float* out, int num_threads) {
  static thread_local Scratch<T> of_this_thread;
  Scratch<T>& s = of_this_thread;  // which others work on too
  sort(chosen, num_experts, s);
  const int64_t count = chosen.count, hidden = down.rows, inner = down.columns;
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
      product(s.ups[size_t(i)], s.inputs.data(), gate_up, gate, s.gated.data());
    team.wait();
    for (int64_t i; (i = low.fetch_add(1, std::memory_order_relaxed)) < int64_t(s.downs.size());)
      product(s.downs[size_t(i)], s.gated.data(), down, Finish::STORE, s.sums.data());
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

// The experts [num_rows, per_token] of rows x [num_rows, hidden], rising, and their weights.
void nano_moe_route(const void* x, int64_t num_rows, int64_t hidden, const void* router, int64_t num_experts,
                    int64_t is_bf16, int64_t per_token, int64_t renormalized, int64_t* ids, float* weights,
                    int64_t num_threads) {
  auto work = [&](Team& team) {
    if (is_bf16)
      route<bf16>(static_cast<const bf16*>(x), num_rows, {static_cast<const bf16*>(router), num_experts, hidden},
                  per_token, renormalized, ids, weights, team);
    else
      route<float>(static_cast<const float*>(x), num_rows, {static_cast<const float*>(router), num_experts, hidden},
                   per_token, renormalized, ids, weights, team);
  };
  run_team(int(num_threads), work);
}

// See run_experts. gate_up and down are packed, all experts one below the other; hidden and inner are multiples of 16.
int nano_moe_products(const void* x, int64_t num_rows, const int64_t* rows, const int64_t* experts, int64_t count,
                      int64_t num_experts, int64_t hidden, int64_t inner, const void* gate_up, const void* down,
                      int64_t is_bf16, int64_t gelu, float* out, int64_t num_threads) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= num_rows) return BAD_ROW;
    if (experts[i] < 0 || experts[i] >= num_experts) return BAD_EXPERT;
  }
  const Chosen chosen{rows, experts, count};
  const Finish gate = gelu ? Finish::GELU : Finish::SILU;
  if (is_bf16)
    run_experts<bf16>(static_cast<const bf16*>(x), chosen, num_experts,
                      {static_cast<const bf16*>(gate_up), 2 * inner, hidden},
                      {static_cast<const bf16*>(down), hidden, inner}, gate, out, int(num_threads));
  else
    run_experts<float>(static_cast<const float*>(x), chosen, num_experts,
                       {static_cast<const float*>(gate_up), 2 * inner, hidden},
                       {static_cast<const float*>(down), hidden, inner}, gate, out, int(num_threads));
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
