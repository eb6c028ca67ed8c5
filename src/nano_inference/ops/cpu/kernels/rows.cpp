#include "rows.h"

#include "attention.h"
#include "row_parts.h"

namespace nano {

Vec gated(Vec gate, Vec up, Finish activation) {
  // All activations are x * sigmoid(y). GELU with tanh (arXiv:1606.08415) has y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
  // gpt-oss has y = 1.702 x and clamps both sides. A minimum whose second operand is NaN is NaN.
  Vec y = gate;
  if (activation == Finish::GELU) {
    Vec cubic = vfma(vmul(vmul(gate, gate), vset(0.044715f)), gate, gate);
    y = vmul(cubic, vset(1.5957691216f));
  } else if (activation == Finish::CLAMPED) {
    gate = vmin(vset(7.f), gate);
    up = vadd(vmax(vset(-7.f), vmin(vset(7.f), up)), vset(1.f));
    y = vmul(gate, vset(1.702f));
  }
  Vec e = vexp(vmax(vset(-100.f), vmin(vset(88.f), vsub(vset(0.f), y))));
  return vmul(vdiv(gate, vadd(vset(1.f), e)), up);
}

template <class T>
void embed(Matrix<T> w, int64_t id, float scale, float* out) {
  if (id < 0 || id >= w.rows) {
    for (int64_t k = 0; k < w.columns; k++) out[k] = -0.f;
    return;
  }
  if (w.codes) return dequantise(*w.codes, id, w.columns, scale, out);
  const T* p = w.panel(id / LANES) + id % LANES * (sizeof(T) == 2 ? 2 : 1);
  for (int64_t k = 0; k < w.columns; k++) {
    if constexpr (sizeof(T) == 2) out[k] = widen1(p[k / 2 * 2 * LANES + k % 2]) * scale;
    else out[k] = p[k * LANES] * scale;
  }
}

template <class T, class Out>
void rms_norm(const float* x, float scale, float* residual, const NormWeight& norm, int64_t size, Out* out) {
  if (x)
    for (int64_t i = 0; i < size; i += LANES) {
      const int n = left(size, i);
      vstore_n(residual + i, vfma(vload_n(x + i, n), vset(scale), vload_n(residual + i, n)), n);
    }
  if (!norm.data) return round_row(residual, size, out);
  const Vec r = vset(inverse_rms(residual, size, norm.eps));
  for (int64_t i = 0; i < size; i += LANES) {
    const int n = left(size, i);
    store_as(out + i, vmul(vmul(vload_n(residual + i, n), r), weight_at(norm, i, n)), n);
  }
}

template <class T>
void norm_heads(float* x, int64_t num_runs, const NormWeight& norm) {
  for (int64_t run = 0; run < num_runs; run++, x += norm.size) {
    const Vec r = vset(inverse_rms(x, norm.size, norm.eps));
    for (int64_t i = 0; i < norm.size; i += LANES) {
      const int n = left(norm.size, i);
      vstore_n(x + i, vmul(vmul(vload_n(x + i, n), r), weight_at(norm, i, n)), n);
    }
  }
}

template <class T>
void rope(const float* x, const float* cos, const float* sin, const Turn& turn, float scale, T* out) {
  const int64_t half = turn.turning / 2;
  alignas(64) float firsts[MAX_HEAD_DIM / 2], seconds[MAX_HEAD_DIM / 2];
  const float *first = x, *second = x + half;
  if (turn.interleaved) {
    for (int64_t i = 0; i < half; i++) firsts[i] = x[2 * i], seconds[i] = x[2 * i + 1];
    first = firsts, second = seconds;
  }
  alignas(64) T turned[MAX_HEAD_DIM];
  T* target = turn.interleaved ? turned : out;
  const Vec factor = vset(scale);
  for (int64_t i = 0; i < half; i += LANES) {
    const int n = left(half, i);
    Vec a = vload_n(first + i, n), b = vload_n(second + i, n), c = vload_n(cos + i, n), s = vload_n(sin + i, n);
    store_as(target + i, vmul(vsub(vmul(a, c), vmul(b, s)), factor), n);
    store_as(target + half + i, vmul(vadd(vmul(b, c), vmul(a, s)), factor), n);
  }
  if (turn.interleaved)
    for (int64_t i = 0; i < half; i++) out[2 * i] = turned[i], out[2 * i + 1] = turned[half + i];
  for (int64_t i = turn.turning; i < turn.head_dim; i += LANES) {
    const int n = left(turn.head_dim, i);
    store_as(out + i, vmul(vload_n(x + i, n), factor), n);
  }
}

template <class T>
void meet(const float* q, float* c, const LatentHeads& size, const NormWeight& norm, float* out) {
  const size_t turning = size_t(size.turning) * sizeof(float);
  for (int64_t h = 0; h < size.heads; h++)
    memcpy(out + h * size.key, q + (h + 1) * size.query - size.turning, turning);
  float* key = out + size.heads * size.key;
  memcpy(key, c + size.rank, turning);
  rms_norm<T>(nullptr, 1.f, c, norm, size.rank, key + size.turning);
  memcpy(key + size.key, key, size_t(size.key) * sizeof(float));
}

template <class T>
void gate(const float* x, int64_t size, Finish activation, T* out) {
  for (int64_t i = 0; i < size; i += LANES) {
    const int n = left(size, i);
    store_as(out + i, gated(vload_n(x + i, n), vload_n(x + size + i, n), activation), n);
  }
}

template <class T>
void round_row(const float* x, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += LANES) store_as(out + i, vload_n(x + i, left(size, i)), left(size, i));
}

#define NANO_ROWS(T)                                                                          \
  template void embed(Matrix<T>, int64_t, float, float*);                                     \
  template void norm_heads<T>(float*, int64_t, const NormWeight&);                            \
  template void meet<T>(const float*, float*, const LatentHeads&, const NormWeight&, float*);  \
  template void rope(const float*, const float*, const float*, const Turn&, float, T*);       \
  template void gate(const float*, int64_t, Finish, T*);                                      \
  template void rms_norm<T, T>(const float*, float, float*, const NormWeight&, int64_t, T*);
NANO_ROWS(bf16)
NANO_ROWS(float)
template void rms_norm<bf16, float>(const float*, float, float*, const NormWeight&, int64_t, float*);
template void round_row(const float*, int64_t, bf16*);
template void round_row(const float*, int64_t, float*);

}  // namespace nano
