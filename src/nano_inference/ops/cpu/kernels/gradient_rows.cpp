// The backward pass between products: norms, rotations, gates, and sums over rows.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "gradients.h"
#include "pool.h"
#include "row_parts.h"

namespace nano {
namespace {

const NormWeight& norm_of(const void* p) { return *static_cast<const NormWeight*>(p); }

// d_x of one run, from 1 / rms: r * (g - x * r^2 * mean(g * x)), where g = d_out * weight.
void norm_run(const float* x, const float* d_out, const NormWeight& norm, float r, float scale, bool adds, float* d_x) {
  const int64_t size = norm.size;
  const Vec factor = vset(scale);
  Vec sum = vset(0.f);
  for (int64_t i = 0; i < size; i += LANES) {
    const int n = left(size, i);
    const Vec g = vmul(vmul(vload_n(d_out + i, n), factor), weight_at(norm, i, n));
    sum = vfma(g, vload_n(x + i, n), sum);
  }
  const Vec share = vset(float(double(vsum(sum)) * double(r) * double(r) / double(size))), root = vset(r);
  for (int64_t i = 0; i < size; i += LANES) {
    const int n = left(size, i);
    const Vec g = vmul(vmul(vload_n(d_out + i, n), factor), weight_at(norm, i, n));
    const Vec d = vmul(root, vsub(g, vmul(vload_n(x + i, n), share)));
    vstore_n(d_x + i, adds ? vadd(vload_n(d_x + i, n), d) : d, n);
  }
}

void norm_gradient(const NormGradient& p, Team& team, std::vector<float>& roots) {
  const NormWeight& norm = norm_of(p.norm);
  for (int64_t i = team.begin(p.num_rows); i < team.end(p.num_rows); i++)
    for (int64_t run = 0; run < p.runs; run++)
      roots[size_t(i * p.runs + run)] = inverse_rms(p.x + i * p.ldx + run * norm.size, norm.size, norm.eps);
  team.wait();
  if (p.d_weight) {
    const int64_t vectors = (norm.size + LANES - 1) / LANES;
    for (int64_t v = team.begin(vectors); v < team.end(vectors); v++) {
      const int n = left(norm.size, v * LANES);
      Vec sum = vset(0.f);
      for (int64_t i = 0; i < p.num_rows; i++)
        for (int64_t run = 0; run < p.runs; run++) {
          const int64_t at = run * norm.size + v * LANES;
          const Vec normed = vmul(vload_n(p.x + i * p.ldx + at, n), vset(roots[size_t(i * p.runs + run)]));
          sum = vfma(vmul(vload_n(p.d_out + i * p.ldd + at, n), vset(p.scale)), normed, sum);
        }
      float* out = p.d_weight + v * LANES;
      vstore_n(out, vadd(vload_n(out, n), sum), n);
    }
    team.wait();  // d_x may overwrite d_out
  }
  for (int64_t i = team.begin(p.num_rows); i < team.end(p.num_rows); i++)
    for (int64_t run = 0; run < p.runs; run++) {
      const int64_t at = i * p.ldd + run * norm.size;
      norm_run(p.x + i * p.ldx + run * norm.size, p.d_out + at, norm, roots[size_t(i * p.runs + run)], p.scale, p.adds, p.d_x + at);
    }
}

template <class T>
void rotate(const RotatedHeads& p, int64_t row) {
  static thread_local std::vector<float> normed;
  const Turn own{p.head_dim, p.turning, bool(p.interleaved)};
  const int64_t position = p.positions[row], columns = (p.heads + 2 * p.kv_heads) * p.head_dim, half = p.turning / 2;
  const float *cos = p.cos + position * half, *sin = p.sin + position * half;
  auto turned = [&](const float* x, int64_t heads, const void* norm, float scale, T* out) {
    const int64_t size = heads * p.head_dim;
    if (norm) {
      normed.assign(x, x + size);
      norm_heads<T>(normed.data(), size / norm_of(norm).size, norm_of(norm));
      x = normed.data();
    }
    for (int64_t h = 0; h < heads; h++) rope(x + h * p.head_dim, cos, sin, own, scale, out + h * p.head_dim);
  };
  const float* x = p.rows + row * columns;
  const int64_t wide = p.heads * p.head_dim, narrow = p.kv_heads * p.head_dim;
  turned(x, p.heads, p.query_norm, p.query_scales ? p.query_scales[position] : 1.f, static_cast<T*>(p.queries) + row * wide);
  turned(x + wide, p.kv_heads, p.key_norm, 1.f, static_cast<T*>(p.keys) + row * narrow);
  round_row(x + wide + narrow, narrow, static_cast<T*>(p.values) + row * narrow);
}

// The inverse rotation is the one by the negative angle.
void rotate_back(const RotatedHeads& p, int64_t row) {
  alignas(64) float negative[MAX_HEAD_DIM / 2];
  const Turn own{p.head_dim, p.turning, bool(p.interleaved)};
  const int64_t position = p.positions[row], columns = (p.heads + 2 * p.kv_heads) * p.head_dim, half = p.turning / 2;
  for (int64_t i = 0; i < half; i++) negative[i] = -p.sin[position * half + i];
  auto turned = [&](const void* x, int64_t heads, float scale, float* out) {
    const float* from = static_cast<const float*>(x) + row * heads * p.head_dim;
    for (int64_t h = 0; h < heads; h++)
      rope(from + h * p.head_dim, p.cos + position * half, negative, own, scale, out + h * p.head_dim);
  };
  float* out = p.d_rows + row * columns;
  const int64_t wide = p.heads * p.head_dim, narrow = p.kv_heads * p.head_dim;
  turned(p.queries, p.heads, p.query_scales ? p.query_scales[position] : 1.f, out);
  turned(p.keys, p.kv_heads, 1.f, out + wide);
  memcpy(out + wide + narrow, static_cast<const float*>(p.values) + row * narrow, size_t(narrow) * sizeof(float));
}

// Gradients of x * sigmoid(y(x)) * up, as `gated` defines y.
void gate_vectors(Vec gate, Vec up, Vec d_out, Finish activation, Vec& d_gate, Vec& d_up) {
  Vec y = gate, slope = vset(1.f), inside = vset(1.f), up_inside = vset(1.f);
  if (activation == Finish::GELU) {
    const Vec square = vmul(gate, gate);
    y = vmul(vfma(vmul(square, vset(0.044715f)), gate, gate), vset(1.5957691216f));
    slope = vmul(vfma(square, vset(0.134145f), vset(1.f)), vset(1.5957691216f));
  } else if (activation == Finish::CLAMPED) {
    inside = vselect(vgt(gate, vset(7.f)), vset(0.f), inside);
    up_inside = vselect(vgt(up, vset(7.f)) | vgt(vset(-7.f), up), vset(0.f), up_inside);
    gate = vmin(vset(7.f), gate);
    up = vadd(vmax(vset(-7.f), vmin(vset(7.f), up)), vset(1.f));
    y = vmul(gate, vset(1.702f)), slope = vset(1.702f);
  }
  const Vec e = vexp(vmax(vset(-100.f), vmin(vset(88.f), vsub(vset(0.f), y))));
  const Vec sigmoid = vdiv(vset(1.f), vadd(vset(1.f), e));
  const Vec other = vmul(sigmoid, e);  // 1 - sigmoid, without cancellation
  const Vec rise = vfma(vmul(vmul(gate, sigmoid), other), slope, sigmoid);
  d_gate = vmul(vmul(vmul(d_out, up), rise), inside);
  d_up = vmul(vmul(d_out, vmul(gate, sigmoid)), up_inside);
}

template <class T>
void norm_rows(const float* x, const NormWeight& norm, int64_t from, int64_t to, T* out) {
  for (int64_t i = from; i < to; i++)  // without an addend, the row is only read
    rms_norm<T, T>(nullptr, 1.f, const_cast<float*>(x) + i * norm.size, norm, norm.size, out + i * norm.size);
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

void nano_norm_rows(const float* x, int64_t num_rows, const void* norm, void* out, int64_t is_bf16, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t from = team.begin(num_rows), to = team.end(num_rows);
    if (is_bf16) norm_rows(x, norm_of(norm), from, to, static_cast<bf16*>(out));
    else norm_rows(x, norm_of(norm), from, to, static_cast<float*>(out));
  };
  run_team(int(num_threads), work);
}

void nano_norm_gradient(const NormGradient* p) {
  std::vector<float> roots(size_t(p->num_rows * p->runs));
  auto work = [&](Team& team) { norm_gradient(*p, team, roots); };
  run_team(int(p->num_threads), work);
}

void nano_rotate(const RotatedHeads* p) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(p->num_rows); i < team.end(p->num_rows); i++) p->is_bf16 ? rotate<bf16>(*p, i) : rotate<float>(*p, i);
  };
  run_team(int(p->num_threads), work);
}

void nano_rotate_gradient(const RotatedHeads* p) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(p->num_rows); i < team.end(p->num_rows); i++) rotate_back(*p, i);
  };
  run_team(int(p->num_threads), work);
}

// x [num_rows][2 * inner]: gates, then ups -> out [num_rows][inner].
void nano_gate_rows(const float* x, int64_t num_rows, int64_t inner, int64_t activation, void* out, int64_t is_bf16,
                    int64_t num_threads) {
  auto work = [&](Team& team) {
    for (int64_t i = team.begin(num_rows); i < team.end(num_rows); i++) {
      const float* row = x + i * 2 * inner;
      if (is_bf16) gate(row, inner, Finish(activation), static_cast<bf16*>(out) + i * inner);
      else gate(row, inner, Finish(activation), static_cast<float*>(out) + i * inner);
    }
  };
  run_team(int(num_threads), work);
}

void nano_gate_gradient(const float* x, const float* d_out, int64_t num_rows, int64_t inner, int64_t activation, float* d_x,
                        int64_t num_threads) {
  auto work = [&](Team& team) {
    for (int64_t row = team.begin(num_rows); row < team.end(num_rows); row++)
      for (int64_t i = 0; i < inner; i += LANES) {
        const int n = left(inner, i);
        const int64_t at = row * 2 * inner + i;
        Vec d_gate, d_up;
        gate_vectors(vload_n(x + at, n), vload_n(x + at + inner, n), vload_n(d_out + row * inner + i, n), Finish(activation), d_gate, d_up);
        vstore_n(d_x + at, d_gate, n), vstore_n(d_x + at + inner, d_up, n);
      }
  };
  run_team(int(num_threads), work);
}

// out [columns] += the sum of the rows [num_rows][columns].
void nano_add_columns(const float* rows, int64_t num_rows, int64_t columns, float* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t vectors = (columns + LANES - 1) / LANES;
    for (int64_t v = team.begin(vectors); v < team.end(vectors); v++) {
      const int n = left(columns, v * LANES);
      Vec sum = vset(0.f);
      for (int64_t i = 0; i < num_rows; i++) sum = vadd(sum, vload_n(rows + i * columns + v * LANES, n));
      vstore_n(out + v * LANES, vadd(vload_n(out + v * LANES, n), sum), n);
    }
  };
  run_team(int(num_threads), work);
}

// out[ids[i]] += scale * rows[i], in the order of the rows. Threads own columns.
void nano_add_rows(const float* rows, const int64_t* ids, int64_t num_rows, int64_t columns, float scale, float* out,
                   int64_t num_threads) {
  auto work = [&](Team& team) {
    const int64_t vectors = (columns + LANES - 1) / LANES, from = team.begin(vectors), to = team.end(vectors);
    for (int64_t i = 0; i < num_rows; i++)
      for (int64_t v = from; v < to; v++) {
        const int n = left(columns, v * LANES);
        float* p = out + ids[i] * columns + v * LANES;
        vstore_n(p, vfma(vload_n(rows + i * columns + v * LANES, n), vset(scale), vload_n(p, n)), n);
      }
  };
  run_team(int(num_threads), work);
}
}
