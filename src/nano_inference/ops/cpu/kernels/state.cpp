// Layers with a state: a short convolution and the gated delta rule. ops/reference/state.py specifies them. Here the
// order of additions is fixed, independent of the rest of the batch.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"
#include "state.h"

namespace nano {
namespace {

enum Problem { NONE = 0, BAD_SLOT = 1, BAD_TABLE = 2, BAD_LENGTHS = 3, BAD_UNIT = 4 };

constexpr float L2_EPS = 1e-6f;
constexpr int64_t MOST_KEY_DIM = 256;
constexpr int COLUMNS = 2;  // vectors of a state that are read together

int64_t unit_of(const StateStep& s, int64_t block) { return s.units ? s.units[block] : block; }
int64_t slot_at(const StateStep& s, int64_t chunk, int64_t position) {
  const int64_t block = s.block_tables[chunk * s.table_stride + position / s.block_size];
  return unit_of(s, block) * s.block_size + position % s.block_size;
}

int check(const StateStep& s) {
  if (s.cu_seqlens_q[0] != 0 || s.cu_seqlens_q[s.num_chunks] != s.num_rows) return BAD_LENGTHS;
  for (int64_t c = 0; c < s.num_chunks; c++) {
    const int64_t begin = s.cu_seqlens_q[c], end = s.cu_seqlens_q[c + 1];
    if (end < begin || end > s.num_rows) return BAD_LENGTHS;
    if (end == begin) continue;
    const int64_t first = s.positions[begin], last = first + end - begin - 1;
    if (first < 0 || last >= s.table_stride * s.block_size) return BAD_LENGTHS;
    for (int64_t i = begin; i < end; i++) {
      if (s.positions[i] != first + i - begin || s.row_chunks[i] != c) return BAD_LENGTHS;
      const int64_t block = s.block_tables[c * s.table_stride + s.positions[i] / s.block_size];
      if (s.slot_mapping[i] != block * s.block_size + s.positions[i] % s.block_size) return BAD_SLOT;
    }
    for (int64_t i = std::max<int64_t>(0, first - s.window + 1) / s.block_size; i <= last / s.block_size; i++) {
      const int64_t block = s.block_tables[c * s.table_stride + i];
      if (block < 0 || block >= s.num_blocks) return BAD_TABLE;
      if (unit_of(s, block) < 0 || unit_of(s, block) >= s.num_units) return BAD_UNIT;
    }
  }
  return NONE;
}

inline Vec read(const float* p) { return vload(p); }
inline Vec read(const bf16* p) { return vwiden(p); }
inline void write(float* p, Vec v) { vstore(p, v); }
inline void write(bf16* p, Vec v) { vnarrow(p, v); }
inline float one(float x) { return x; }
inline float one(bf16 x) { return widen1(x); }

Vec vsigmoid(Vec x) {
  return vdiv(vset(1.f), vadd(vset(1.f), vexp(vmax(vset(-100.f), vmin(vset(88.f), vsub(vset(0.f), x))))));
}
float exp_1(float x) { return vfirst(vexp(vmax(vset(-100.f), vmin(vset(88.f), vset(x))))); }
// log(1 + e^x)
float softplus(float x) { return float((x > 0.f ? x : 0.f) + log1(1.0 + double(exp_1(x > 0.f ? -x : x)))); }

// Convolve channels [first, last) of all rows: in(row, channel) returns an input, out(row, channel, vector) takes an
// output.
template <class T, class In, class Out>
void convolve(const StateStep& s, const Convolution& conv, int64_t first, int64_t last, In in, Out out) {
  static thread_local std::vector<float> taps;  // [taps][channels of this thread]
  const int64_t width = last - first;
  const T *weight = static_cast<const T*>(conv.weight), *bias = static_cast<const T*>(conv.bias);
  T* inputs = static_cast<T*>(conv.inputs);
  taps.resize(size_t(conv.taps * width));
  for (int64_t c = 0; c < width; c++)
    for (int64_t k = 0; k < conv.taps; k++) taps[size_t(k * width + c)] = one(weight[(first + c) * conv.taps + k]);
  for (int64_t i = 0; i < s.num_rows; i++) {
    T* own = inputs + slot_at(s, s.row_chunks[i], s.positions[i]) * conv.channels;
    for (int64_t c = first; c < last; c += LANES) write(own + c, in(i, c));
  }
  for (int64_t i = 0; i < s.num_rows; i++)
    for (int64_t c = first; c < last; c += LANES) {
      Vec sum = vset(0.f);
      for (int64_t k = 0; k < conv.taps; k++) {
        const int64_t position = s.positions[i] - (conv.taps - 1 - k);
        if (position < 0) continue;
        const T* seen = inputs + slot_at(s, s.row_chunks[i], position) * conv.channels;
        sum = vfma(read(seen + c), vload(taps.data() + k * width + c - first), sum);
      }
      out(i, c, bias ? vadd(sum, read(bias + c)) : sum);
    }
}

// This thread's channels [begin, end), in whole vectors.
int64_t begin_of(const Team& team, int64_t channels) { return team.begin(channels / LANES) * LANES; }
int64_t end_of(const Team& team, int64_t channels) { return team.end(channels / LANES) * LANES; }

template <class T>
void short_conv(const StateStep& s, const Convolution& conv, const float* projected, T* out, const Team& team) {
  const int64_t n = conv.channels;
  convolve<T>(
      s, conv, begin_of(team, n), end_of(team, n),
      [&](int64_t i, int64_t c) {
        const float* row = projected + i * 3 * n + c;
        return vmul(vload(row), vload(row + 2 * n));
      },
      [&](int64_t i, int64_t c, Vec sum) { write(out + i * n + c, vmul(vload(projected + i * 3 * n + n + c), sum)); });
}

float dot(const float* a, const float* b, int64_t n) {
  Vec sum = vset(0.f);
  for (int64_t d = 0; d < n; d += LANES) sum = vfma(vload(a + d), vload(b + d), sum);
  return vsum(sum);
}

// Normalize to unit length, times scale.
void normalise(const float* x, int64_t n, float scale, float* out) {
  const float length = vfirst(vsqrt(vset(dot(x, x, n) + L2_EPS)));
  for (int64_t d = 0; d < n; d += LANES) vstore(out + d, vdiv(vmul(vload(x + d), vset(scale)), vset(length)));
}

// Memory of a thread for one row and key head.
struct RowScratch {
  alignas(64) float q[MOST_KEY_DIM], k[MOST_KEY_DIM], out[MOST_KEY_DIM];
  std::vector<float> by_key, by_query, since;  // [earlier tokens of the row's block]
};

// Compute one row of one value head. The keys of its block, and the row's q and k, are in the scratch memory.
template <class T>
void delta_row(const StateStep& s, const DeltaRule& r, int64_t row, int64_t head, float own, RowScratch& b, T* out) {
  const int64_t heads = r.value_heads, wide = r.value_dim, deep = r.key_dim, t = s.positions[row] % s.block_size;
  const int64_t chunk = s.row_chunks[row], slot = slot_at(s, chunk, s.positions[row]), first = slot - t;
  const int64_t channels = 2 * r.key_heads * deep + heads * wide, key_head = head / (heads / r.key_heads);
  const float* numbers = r.projected + row * r.stride + channels;
  const float* v = r.mixed + row * channels + 2 * r.key_heads * deep + head * wide;
  const float beta = vfirst(vsigmoid(vset(numbers[heads * wide + head])));
  const float rate = exp_1(r.log_decay[head]) * softplus(numbers[heads * wide + heads + head] + r.decay_bias[head]);
  const float decay = t ? r.decays[(slot - 1) * heads + head] - rate : -rate;
  const float whole = exp_1(decay);
  r.decays[slot * heads + head] = decay;
  for (int64_t j = 0; j < t; j++) b.since[size_t(j)] = exp_1(decay - r.decays[(first + j) * heads + head]);

  const int64_t size = deep * wide;
  const float* before = nullptr;  // state at the end of the previous block
  if (s.positions[row] >= s.block_size)
    before = r.state + (slot_at(s, chunk, s.positions[row] - t - 1) / s.block_size * heads + head) * size;
  float* u = r.values + (slot * heads + head) * wide;
  for (int64_t e = 0; e < wide; e += COLUMNS * LANES) {
    const int count = int(std::min<int64_t>(COLUMNS, (wide - e) / LANES));
    Vec by_key[COLUMNS], by_query[COLUMNS];
    for (int n = 0; n < COLUMNS; n++) by_key[n] = by_query[n] = vset(0.f);
    if (before)
      for (int64_t d = 0; d < deep; d++)
        for (int n = 0; n < count; n++) {
          const Vec column = vload(before + d * wide + e + n * LANES);
          by_key[n] = vfma(column, vset(b.k[d]), by_key[n]);
          by_query[n] = vfma(column, vset(b.q[d]), by_query[n]);
        }
    for (int n = 0; n < count; n++) {
      const int64_t at = e + n * LANES;
      Vec key = vmul(by_key[n], vset(whole)), query = vmul(by_query[n], vset(whole));
      for (int64_t j = 0; j < t; j++) {
        const Vec value = vload(r.values + ((first + j) * heads + head) * wide + at);
        key = vfma(value, vset(b.since[size_t(j)] * b.by_key[size_t(j)]), key);
        query = vfma(value, vset(b.since[size_t(j)] * b.by_query[size_t(j)]), query);
      }
      const Vec corrected = vmul(vset(beta), vsub(vload(v + at), key));
      vstore(u + at, corrected);
      vstore(b.out + at, vfma(corrected, vset(own), query));
    }
  }
  if (t == s.block_size - 1) {
    float* after = r.state + (slot / s.block_size * heads + head) * size;
    for (int64_t d = 0; d < deep; d++)
      for (int64_t e = 0; e < wide; e += LANES) {
        Vec sum = before ? vmul(vload(before + d * wide + e), vset(whole)) : vset(0.f);
        for (int64_t j = 0; j < t; j++) {
          const float key = r.keys[((first + j) * r.key_heads + key_head) * deep + d];
          sum = vfma(vload(r.values + ((first + j) * heads + head) * wide + e), vset(b.since[size_t(j)] * key), sum);
        }
        vstore(after + d * wide + e, vfma(vload(u + e), vset(b.k[d]), sum));
      }
  }
  const float mean = dot(b.out, b.out, wide) / float(wide);
  const Vec root = vsqrt(vset(mean + r.eps));
  const T* norm = static_cast<const T*>(r.norm);
  const int64_t group = heads / r.key_heads, place = r.in_tiles ? head % group * r.key_heads + key_head : head;
  for (int64_t e = 0; e < wide; e += LANES) {
    const Vec z = vload(numbers + head * wide + e);
    const Vec normed = vmul(vdiv(vload(b.out + e), root), read(norm + e));
    write(out + row * heads * wide + place * wide + e, vmul(normed, vmul(z, vsigmoid(z))));
  }
}

// Compute all rows of a chunk in order, for one key head and the value heads that it serves.
template <class T>
void delta_head(const StateStep& s, const DeltaRule& r, int64_t chunk, int64_t head, RowScratch& b, T* out) {
  const int64_t deep = r.key_dim, group = r.value_heads / r.key_heads;
  const int64_t channels = 2 * r.key_heads * deep + r.value_heads * r.value_dim;
  const float scale = 1.f / std::sqrt(float(deep));
  for (int64_t i = s.cu_seqlens_q[chunk]; i < s.cu_seqlens_q[chunk + 1]; i++) {
    const int64_t t = s.positions[i] % s.block_size, slot = slot_at(s, chunk, s.positions[i]);
    normalise(r.mixed + i * channels + head * deep, deep, scale, b.q);
    normalise(r.mixed + i * channels + (r.key_heads + head) * deep, deep, 1.f, b.k);
    std::copy_n(b.k, deep, r.keys + (slot * r.key_heads + head) * deep);
    for (int64_t j = 0; j < t; j++) {
      const float* key = r.keys + ((slot - t + j) * r.key_heads + head) * deep;
      b.by_key[size_t(j)] = dot(key, b.k, deep), b.by_query[size_t(j)] = dot(key, b.q, deep);
    }
    const float own = dot(b.q, b.k, deep);
    for (int64_t h = head * group; h < (head + 1) * group; h++) delta_row<T>(s, r, i, h, own, b, out);
  }
}

template <class T>
void delta_net(const StateStep& s, const Convolution& conv, const DeltaRule& r, T* out, int num_threads) {
  std::atomic<int64_t> taken{0};
  auto work = [&](Team& team) {
    const int64_t n = conv.channels;
    convolve<T>(
        s, conv, begin_of(team, n), end_of(team, n),
        [&](int64_t i, int64_t c) { return vload(r.projected + i * r.stride + c); },
        [&](int64_t i, int64_t c, Vec sum) { vstore(r.mixed + i * n + c, vmul(sum, vsigmoid(sum))); });
    team.wait();
    static thread_local RowScratch scratch;
    for (auto* each : {&scratch.by_key, &scratch.by_query, &scratch.since}) each->resize(size_t(s.block_size));
    for (int64_t item; (item = taken.fetch_add(1, std::memory_order_relaxed)) < s.num_chunks * r.key_heads;)
      delta_head<T>(s, r, item / r.key_heads, item % r.key_heads, scratch, out);
  };
  run_team(num_threads, work);
}

template <class T>
void sigmoid_gate(const T* x, const float* gate, int64_t gate_stride, int64_t num_rows, int64_t columns, T* out,
                  const Team& team) {
  for (int64_t i = team.begin(num_rows); i < team.end(num_rows); i++)
    for (int64_t c = 0; c < columns; c += LANES)
      write(out + i * columns + c, vmul(read(x + i * columns + c), vsigmoid(vload(gate + i * gate_stride + c))));
}

}  // namespace
}  // namespace nano

using namespace nano;

extern "C" {

// projected [rows, 3 * channels]: b, c, x -> out [rows, channels] = c * conv(b * x).
int nano_short_conv(const StateStep* step, const Convolution* conv, const float* projected, int64_t is_bf16, void* out,
                    int64_t num_threads) {
  if (int problem = check(*step)) return problem;
  auto work = [&](Team& team) {
    if (is_bf16) short_conv<bf16>(*step, *conv, projected, static_cast<bf16*>(out), team);
    else short_conv<float>(*step, *conv, projected, static_cast<float*>(out), team);
  };
  run_team(int(num_threads), work);
  return NONE;
}

// out [rows, value heads * value_dim]. The convolution's channels are queries, keys and values.
int nano_delta_net(const StateStep* step, const Convolution* conv, const DeltaRule* rule, int64_t is_bf16, void* out,
                   int64_t num_threads) {
  if (int problem = check(*step)) return problem;
  if (is_bf16) delta_net<bf16>(*step, *conv, *rule, static_cast<bf16*>(out), int(num_threads));
  else delta_net<float>(*step, *conv, *rule, static_cast<float*>(out), int(num_threads));
  return NONE;
}

// out = x * sigmoid(gate), all [rows, columns]; columns are a multiple of 16.
void nano_sigmoid_gate(const void* x, const float* gate, int64_t gate_stride, int64_t num_rows, int64_t columns,
                       int64_t is_bf16, void* out, int64_t num_threads) {
  auto work = [&](Team& team) {
    if (is_bf16)
      sigmoid_gate(static_cast<const bf16*>(x), gate, gate_stride, num_rows, columns, static_cast<bf16*>(out), team);
    else
      sigmoid_gate(static_cast<const float*>(x), gate, gate_stride, num_rows, columns, static_cast<float*>(out), team);
  };
  run_team(int(num_threads), work);
}
}
