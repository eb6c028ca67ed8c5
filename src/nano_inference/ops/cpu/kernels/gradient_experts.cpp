// Weights of a row's experts, and their gradients with respect to the router's logits.
#include <vector>

#include "gradients.h"
#include "pool.h"
#include "row_parts.h"

namespace nano {
namespace {

constexpr int64_t GATED = 2;  // a shared expert with the weight sigmoid(last logit)

// A row's scores, and what divides those of its experts.
struct Scores {
  std::vector<float> sizes;
  double whole = 1, divisor = 1;
  bool is_sum = false;  // the divisor is the sum of the row's experts
};

void score(const RouteGradient& p, const float* z, const int64_t* ids, Scores& s) {
  s.sizes.resize(size_t(p.num_experts));
  s.whole = double(expert_scores(z, p.num_experts, p.sigmoid, s.sizes.data()));
  s.divisor = s.whole, s.is_sum = false;
  if (!p.renormalized) return;
  double sum = 0;
  for (int64_t k = 0; k < p.per_token; k++) sum += double(s.sizes[size_t(ids[k])]);
  const double least = double(p.floor) * s.whole;
  s.is_sum = sum >= least;
  s.divisor = s.is_sum ? sum : least;
}

float sigmoid(float x) { return vfirst(vsigmoid(vset(x))); }

void weigh(const RouteGradient& p, int64_t row, Scores& s) {
  const float* z = p.logits + row * p.columns;
  const int64_t* ids = p.ids + row * p.per_token;
  float* weights = p.weights + row * (p.per_token + (p.shared != 0));
  score(p, z, ids, s);
  for (int64_t k = 0; k < p.per_token; k++) weights[k] = float(double(s.sizes[size_t(ids[k])]) / s.divisor * double(p.scale));
  if (p.shared) weights[p.per_token] = p.shared == GATED ? sigmoid(z[p.num_experts]) : 1.f;
}

// With scores g, their divisor D and d = d_weights * scale / D, the gradient of a score is d, less sum(d * g) / D if D is
// the sum of the row's experts. That of a logit follows through the softmax or the sigmoid.
void differentiate(const RouteGradient& p, int64_t row, Scores& s) {
  const float* z = p.logits + row * p.columns;
  const int64_t* ids = p.ids + row * p.per_token;
  const float* d = p.d_weights + row * (p.per_token + (p.shared != 0));
  float* out = p.d_logits + row * p.columns;
  score(p, z, ids, s);
  for (int64_t e = 0; e < p.columns; e++) out[e] = 0.f;
  const double factor = double(p.scale) / s.divisor;
  double sum = 0;  // of gradients times scores
  for (int64_t k = 0; k < p.per_token; k++) sum += double(d[k]) * factor * double(s.sizes[size_t(ids[k])]);
  const double less = s.is_sum ? sum / s.divisor : 0;
  if (!p.sigmoid && !s.is_sum)  // the scores of all experts divide by their sum
    for (int64_t e = 0; e < p.num_experts; e++) out[e] = float(-double(s.sizes[size_t(e)]) / s.whole * sum);
  for (int64_t k = 0; k < p.per_token; k++) {
    const double g = double(s.sizes[size_t(ids[k])]), rise = p.sigmoid ? g * (1 - g) : g;
    out[ids[k]] = float(double(out[ids[k]]) + (double(d[k]) * factor - less) * rise);
  }
  if (p.shared == GATED) {
    const double g = double(sigmoid(z[p.num_experts]));
    out[p.num_experts] = float(double(d[p.per_token]) * g * (1 - g));
  }
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

void nano_route_gradient(const RouteGradient* p) {
  auto work = [&](Team& team) {
    Scores scores;
    for (int64_t i = team.begin(p->num_rows); i < team.end(p->num_rows); i++) {
      if (p->d_weights) differentiate(*p, i, scores);
      else weigh(*p, i, scores);
    }
  };
  run_team(int(p->num_threads), work);
}

// out[i] = a[i] . b[i] for rows [num_rows][columns].
void nano_row_products(const float* a, const float* b, int64_t num_rows, int64_t columns, float* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(num_rows); i < team.end(num_rows); i++) {
      Vec sum = vset(0.f);
      for (int64_t j = i * columns; j < (i + 1) * columns; j += LANES) {
        const int n = left((i + 1) * columns, j);
        sum = vfma(vload_n(a + j, n), vload_n(b + j, n), sum);
      }
      out[i] = vsum(sum);
    }
  };
  run_team(int(num_threads), work);
}
}
