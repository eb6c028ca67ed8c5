// Layers of experts: the selection of a row's experts, their products, and the sum over a row's experts. One call runs
// all three if all experts are in memory.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "linear.h"
#include "moe.h"
#include "pool.h"
#include "row_parts.h"
#include "simd.h"

namespace nano {
namespace {

enum Problem { NONE = 0, BAD_ROW = 1, BAD_EXPERT = 2 };

constexpr int64_t ROW_BLOCK = 512;      // rows of a layer whose products are in memory together
constexpr int64_t ROW_CHUNK = 64;       // rows of an expert that a thread takes at a time
constexpr int64_t PANELS_OF_GATE = 12;  // and panels of its outputs
constexpr int64_t PANELS_OF_DOWN = 24;
// With at most this many rows, an expert's weights are read once, so its items are as large as all threads' work allows.
// With fewer rows a thread, threads share the router by columns.
constexpr int64_t FEW_ROWS = 4;
constexpr int64_t ITEMS_OF_A_THREAD = 8;

int64_t up_to_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Memory for the selection of a row's experts, with room for whole panels of experts.
struct Choice {
  std::vector<float> sizes, keys, groups;
  std::vector<uint8_t> taken, kept;
};

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
  const float whole = expert_scores(z, r.num_experts, r.sigmoid, c.sizes.data());
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

// Compute the router's logits of some rows and panels, and leave out[i] of row i.
template <class T>
void logits_of(const T* x, int64_t row, int64_t end_row, Matrix<T> router, int64_t panel, int64_t end_panel, float* out) {
  const int64_t width = up_to_lanes(router.rows);
  if (row < end_row && panel < end_panel)
    products<T>(x + row * router.columns, router.columns, end_row - row, router, panel, end_panel,
                out + row * width + panel * LANES, width, nullptr);
}

// Select the experts of rows [row, end_row) from the router's logits, which change.
void choose_rows(float* logits, int64_t width, const Routing& r, const float* scales, int64_t row, int64_t end_row,
                 int64_t* ids, float* weights) {
  static thread_local Choice choice;
  const int64_t num_weights = r.per_token + (r.shared != 0);
  for (int64_t i = row; i < end_row; i++) {
    float* z = logits + i * width;
    if (r.logit_scale != 1.f)
      for (int64_t e = 0; e < width; e++) z[e] *= r.logit_scale;
    if (r.logits)
      for (int64_t e = 0; e < r.num_experts; e++) z[e] += r.logits[e];
    choose(z, r, choice, ids + i * r.per_token, weights + i * num_weights);
    if (scales)
      for (int64_t k = 0; k < r.per_token; k++) weights[i * num_weights + k] *= scales[ids[i * r.per_token + k]];
  }
}

// Some rows of an expert and some panels of its outputs.
struct Item {
  int64_t expert, row, end_row, panel, end_panel;
};

// Rows of x, each with an expert: index i of `experts` is row `rows[i]`, or row i / per_token.
struct Chosen {
  const int64_t *rows, *experts;  // [count]
  int64_t count, per_token;
  int64_t row(int64_t i) const { return rows ? rows[i] : i / per_token; }
};

template <class T>
struct Weights {
  Matrix<T> gate_up, down;  // of the first expert
  const T *gate_up_bias, *down_bias;
  Finish gate;

  Weights(const ExpertWeights& w, int64_t activation)
      : gate_up{static_cast<const T*>(w.gate_up), 2 * w.inner, w.hidden, w.gate_up_codes},
        down{static_cast<const T*>(w.down), w.hidden, w.inner, w.down_codes},
        gate_up_bias(static_cast<const T*>(w.gate_up_bias)), down_bias(static_cast<const T*>(w.down_bias)),
        gate(Finish(activation)) {}
  int64_t hidden() const { return down.rows; }
  int64_t inner() const { return down.columns; }
};

// The products of some rows with their experts, by the threads of a team.
template <class T>
class Products {
 public:
  // Sort the rows by expert, in their original order within an expert, and cut the work into items. One thread calls it.
  void arrange(const Chosen& chosen, int64_t num_experts, const Weights<T>& weights, int num_threads) {
    starts_.assign(size_t(num_experts) + 1, 0);
    for (int64_t i = 0; i < chosen.count; i++) starts_[size_t(chosen.experts[i]) + 1]++;
    int64_t active = 0, most = 0;
    for (int64_t e = 0; e < num_experts; e++) {
      const int64_t count = starts_[size_t(e) + 1];
      active += count > 0, most = std::max(most, count);
      starts_[size_t(e) + 1] += starts_[size_t(e)];
    }
    order_.resize(size_t(chosen.count)), places_.resize(size_t(chosen.count));
    next_.assign(starts_.begin(), starts_.end());
    for (int64_t i = 0; i < chosen.count; i++) {
      const int64_t place = next_[size_t(chosen.experts[i])]++;
      order_[size_t(place)] = i, places_[size_t(i)] = place;
    }
    const int64_t hidden = weights.hidden(), inner = weights.inner();
    inputs_.resize(size_t(chosen.count * hidden)), gated_.resize(size_t(chosen.count * inner));
    sums_.resize(size_t(chosen.count * hidden));
    const int64_t pieces = active ? (ITEMS_OF_A_THREAD * num_threads + active - 1) / active : 1;
    auto chunk = [&](int64_t panels, int64_t usual) { return most > FEW_ROWS ? usual : (panels + pieces - 1) / pieces; };
    cut(inner / LANES, chunk(inner / LANES, PANELS_OF_GATE), ups_);
    cut(hidden / LANES, chunk(hidden / LANES, PANELS_OF_DOWN), downs_);
    up_.store(0, std::memory_order_relaxed), low_.store(0, std::memory_order_relaxed);
  }

  // All threads call it after `arrange`, and wait before they read results by `of`.
  void run(Team& team, const T* x, const Chosen& chosen, const Weights<T>& weights) {
    const int64_t hidden = weights.hidden(), count = chosen.count;
    for (int64_t i = team.begin(count); i < team.end(count); i++)
      std::copy_n(x + chosen.row(order_[size_t(i)]) * hidden, hidden, inputs_.data() + i * hidden);
    team.wait();
    for (int64_t i; (i = up_.fetch_add(1, std::memory_order_relaxed)) < int64_t(ups_.size());)
      product(ups_[size_t(i)], inputs_.data(), weights.gate_up, weights.gate_up_bias, weights.gate, gated_.data());
    team.wait();
    for (int64_t i; (i = low_.fetch_add(1, std::memory_order_relaxed)) < int64_t(downs_.size());)
      product(downs_[size_t(i)], gated_.data(), weights.down, weights.down_bias, Finish::STORE, sums_.data());
  }

  // The product of entry i of the chosen rows: [hidden].
  const float* of(int64_t i, int64_t hidden) const { return sums_.data() + places_[size_t(i)] * hidden; }

 private:
  // Weights stay in the cache while the rows of their expert pass.
  void cut(int64_t num_panels, int64_t chunk, std::vector<Item>& items) const {
    items.clear();
    for (int64_t e = 0; e + 1 < int64_t(starts_.size()); e++) {
      const int64_t first = starts_[size_t(e)], last = starts_[size_t(e) + 1];
      for (int64_t panel = 0; panel < num_panels && first < last; panel += chunk)
        for (int64_t row = first; row < last; row += ROW_CHUNK)
          items.push_back({e, row, std::min(row + ROW_CHUNK, last), panel, std::min(panel + chunk, num_panels)});
    }
  }

  static void product(const Item& item, const T* x, Matrix<T> all, const T* biases, Finish finish, void* out) {
    const Matrix<T> own = all.part(item.expert * all.num_panels(), all.rows);
    const int64_t width = finish == Finish::STORE ? all.rows : all.rows / 2;
    const T* bias = biases ? biases + item.expert * all.rows : nullptr;
    linear({x, all.columns, own, bias, finish, 1.f, out, width, false, {}}, item.row, item.end_row, item.panel,
           item.end_panel, {nullptr, nullptr, 0});
  }

  std::vector<int64_t> starts_, next_;    // first place of each expert
  std::vector<int64_t> order_, places_;  // entries by place, and places by entry
  std::vector<Item> ups_, downs_;
  std::vector<T> inputs_, gated_;  // rows by place
  std::vector<float> sums_;
  std::atomic<int64_t> up_{0}, low_{0};
};

template <class T>
void run_experts(const T* x, const Chosen& chosen, int64_t num_experts, const Weights<T>& weights, float* out,
                 int num_threads) {
  static thread_local Products<T> of_this_thread;
  Products<T>& products = of_this_thread;  // the other threads use it too
  products.arrange(chosen, num_experts, weights, num_threads);
  const int64_t hidden = weights.hidden();
  auto work = [&](Team& team) {
    products.run(team, x, chosen, weights);
    team.wait();
    for (int64_t i = team.begin(chosen.count); i < team.end(chosen.count); i++)
      std::copy_n(products.of(i, hidden), hidden, out + i * hidden);
  };
  run_team(num_threads, work);
}

template <class T>
struct LayerScratch {
  std::vector<float> logits, weights;
  std::vector<int64_t> ids, none;
  Products<T> experts, shared;
};

template <class T>
void run_layer(const MoeLayer& layer, const T* x, const T* routed, int64_t num_rows, int64_t* ids, float* out,
               int num_threads) {
  static thread_local LayerScratch<T> of_this_thread;
  LayerScratch<T>& s = of_this_thread;
  const Routing& r = layer.routing;
  const Matrix<T> router{static_cast<const T*>(layer.router), layer.router_rows, layer.experts.hidden};
  const int64_t width = up_to_lanes(router.rows), panels = router.num_panels(), hidden = layer.experts.hidden;
  const int64_t num_weights = r.per_token + (r.shared != 0);
  const Weights<T> experts(layer.experts, layer.activation), shared(layer.shared_expert, layer.activation);
  s.logits.resize(size_t(num_rows * width)), s.weights.resize(size_t(num_rows * num_weights));
  s.ids.resize(size_t(num_rows * r.per_token)), s.none.assign(size_t(num_rows), 0);
  const Chosen chosen{nullptr, s.ids.data(), num_rows * r.per_token, r.per_token}, all{nullptr, s.none.data(), num_rows, 1};
  auto work = [&](Team& team) {
    const int64_t row = team.begin(num_rows), end_row = team.end(num_rows);
    if (num_rows < FEW_ROWS * team.size) logits_of(routed, 0, num_rows, router, team.begin(panels), team.end(panels), s.logits.data());
    else logits_of(routed, row, end_row, router, 0, panels, s.logits.data());
    team.wait();
    choose_rows(s.logits.data(), width, r, layer.scales, row, end_row, s.ids.data(), s.weights.data());
    team.wait();
    if (team.thread == 0) {
      s.experts.arrange(chosen, r.num_experts, experts, team.size);
      if (r.shared) s.shared.arrange(all, 1, shared, team.size);
    }
    team.wait();
    s.experts.run(team, x, chosen, experts);
    if (r.shared) s.shared.run(team, x, all, shared);
    team.wait();
    for (int64_t i = row; i < end_row; i++) {
      const float* weights = s.weights.data() + i * num_weights;
      for (int64_t j = 0; j < hidden; j += LANES) {
        Vec sum = vset(0.f);
        for (int64_t k = 0; k < r.per_token; k++)
          sum = vfma(vload(s.experts.of(i * r.per_token + k, hidden) + j), vset(weights[k]), sum);
        if (r.shared) sum = vfma(vload(s.shared.of(i, hidden) + j), vset(weights[r.per_token]), sum);
        vstore(out + i * hidden + j, sum);
      }
    }
  };
  run_team(num_threads, work);
  if (ids) std::copy(s.ids.begin(), s.ids.end(), ids);
}

template <class T>
void run_blocks(const MoeLayer& layer, const T* x, const T* routed, int64_t num_rows, int64_t* ids, float* out,
                int num_threads) {
  const int64_t hidden = layer.experts.hidden;
  for (int64_t row = 0; row < num_rows; row += ROW_BLOCK)
    run_layer(layer, x + row * hidden, routed + row * hidden, std::min(ROW_BLOCK, num_rows - row),
              ids ? ids + row * layer.routing.per_token : nullptr, out + row * hidden, num_threads);
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

// Compute the experts [num_rows, per_token] of rows x [num_rows, hidden], rising, and their weights, with a router
// [rows, hidden].
void nano_moe_route(const void* x, int64_t num_rows, int64_t hidden, const void* router, int64_t rows, int64_t is_bf16,
                    const Routing* routing, int64_t* ids, float* weights, int64_t num_threads) {
  const int64_t width = up_to_lanes(rows);
  std::vector<float> logits(size_t(num_rows * width));
  auto work = [&](Team& team) {
    const int64_t row = team.begin(num_rows), end_row = team.end(num_rows);
    auto compute = [&](auto* typed) {
      const Matrix<std::decay_t<decltype(*typed)>> all{typed, rows, hidden};
      logits_of(static_cast<decltype(typed)>(x), row, end_row, all, 0, all.num_panels(), logits.data());
    };
    is_bf16 ? compute(static_cast<const bf16*>(router)) : compute(static_cast<const float*>(router));
    choose_rows(logits.data(), width, *routing, nullptr, row, end_row, ids, weights);
  };
  run_team(int(num_threads), work);
}

// out[i] = down(gate(gate_up(x[rows[i]]))), by expert experts[i]. `activation`: a Finish.
int nano_moe_products(const void* x, int64_t num_rows, const int64_t* rows, const int64_t* experts, int64_t count,
                      int64_t num_experts, const ExpertWeights* weights, int64_t is_bf16, int64_t activation,
                      float* out, int64_t num_threads) {
  for (int64_t i = 0; i < count; i++) {
    if (rows[i] < 0 || rows[i] >= num_rows) return BAD_ROW;
    if (experts[i] < 0 || experts[i] >= num_experts) return BAD_EXPERT;
  }
  const Chosen chosen{rows, experts, count, 1};
  if (is_bf16) run_experts<bf16>(static_cast<const bf16*>(x), chosen, num_experts, {*weights, activation}, out, int(num_threads));
  else run_experts<float>(static_cast<const float*>(x), chosen, num_experts, {*weights, activation}, out, int(num_threads));
  return NONE;
}

// Compute a whole layer: x [num_rows, hidden] -> out [num_rows, hidden]. The router reads `routed`. ids [num_rows,
// per_token] receives the experts of each row, or is null.
void nano_moe_layer(const MoeLayer* layer, const void* x, const void* routed, int64_t num_rows, int64_t* ids, float* out,
                    int64_t num_threads) {
  if (layer->is_bf16)
    run_blocks(*layer, static_cast<const bf16*>(x), static_cast<const bf16*>(routed), num_rows, ids, out, int(num_threads));
  else
    run_blocks(*layer, static_cast<const float*>(x), static_cast<const float*>(routed), num_rows, ids, out, int(num_threads));
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
