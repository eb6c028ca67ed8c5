// A digest of each operation of the kernels on numbers that are the same everywhere, NaN, infinities, denormals and huge
// ones among them: builds for all instruction sets print the same lines. For tests/ops/test_cpu_neon.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "attention.h"
#include "digest.h"
#include "head.h"
#include "linear.h"
#include "moe.h"
#include "rows.h"
#include "state.h"

namespace {
using namespace nano;
struct Problem;  // of attention
}  // namespace

extern "C" {
void nano_store(const Problem* problem, const void* keys, const void* values);
int nano_attention(const Problem* problem, const void* q, const float* sinks, void* out, int num_threads,
                   const int64_t* row_cuts);
void nano_sigmoid_gate(const void* x, const float* gate, int64_t gate_stride, int64_t num_rows, int64_t columns,
                       int64_t is_bf16, void* out, int64_t num_threads);
}

void codes_round(nano::Digest& all);  // codes.cpp

namespace {

uint64_t state = 88172645463325252ull;
uint32_t random32() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return uint32_t(state >> 16);
}
int64_t below(int64_t n) { return int64_t(random32() % uint32_t(n)); }
float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
float tame() { return float(int32_t(random32())) * 0x1p-31f; }
float wild() {
  const uint32_t sign = random32() & 0x80000000u;
  switch (below(10)) {
    case 0: return of_bits(sign);
    case 1: return of_bits(sign | 0x7f800000);                             // infinite
    case 2: return of_bits(sign | 0x7fc00000 | (random32() & 0xffff));     // NaN
    case 3: return of_bits(sign | (random32() & 0x7fffff));                // denormal
    case 4: return of_bits(sign | 0x00800000 | (random32() & 0xffffff));   // barely normal
    case 5: return of_bits(sign | 0x7f000000 | (random32() & 0x7fffff));   // huge
    case 6: return of_bits(sign | 0x4b000000 | (random32() & 0x3ffffff));  // about the end of halves and integers
    case 7: return float(below(2000) - 1000) * 0.5f;                       // ties
    default: return of_bits(random32());
  }
}

template <class T>
T number(float x) {
  if constexpr (sizeof(T) == 2) {  // without narrow1: denormals shall stay
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return T(bits >> 16);
  } else {
    return x;
  }
}

// Rows, most of them tame. Every fifth or so is spoiled: one number in ten wild; the next is tiny, the next huge.
template <class T>
std::vector<T> matrix(int64_t rows, int64_t columns, float size = 1.f, bool spoiled = true) {
  std::vector<T> out(size_t(rows * columns));
  for (int64_t i = 0; i < rows; i++) {
    const int64_t kind = spoiled ? i % 11 : 0;
    for (int64_t k = 0; k < columns; k++) {
      float x = tame() * size;
      if (kind == 5 && below(10) == 0) x = wild();
      if (kind == 7) x *= 1e-37f;
      if (kind == 9) x *= 3e37f;
      out[size_t(i * columns + k)] = number<T>(x);
    }
  }
  return out;
}

template <class T>
std::vector<T> packed(const std::vector<T>& plain, int64_t rows, int64_t columns) {
  Matrix<T> m{nullptr, rows, columns};
  std::vector<T> out(size_t(m.num_panels() * m.panel_size()));
  pack(plain.data(), out.data(), 0, rows, columns);
  return out;
}
template <class T>
std::vector<T> weight(int64_t rows, int64_t columns, float size = 1.f, bool spoiled = true) {
  return packed(matrix<T>(rows, columns, size, spoiled), rows, columns);
}

template <class T>
const char* name_of() { return sizeof(T) == 2 ? "bf16" : "float"; }
void say(const char* name, const Digest& digest) { std::printf("%-28s %016llx\n", name, digest.value()); }
template <class T>
void say(const char* name, const Digest& digest) { std::printf("%s %-*s %016llx\n", name, int(27 - strlen(name)), name_of<T>(), digest.value()); }
void require(int problem) {
  if (problem) std::printf("refused: %d\n", problem), std::exit(1);
}

void add(Digest& digest, Vec v) {
  float all[LANES];
  vstore(all, v);
  digest.add(all, LANES);
}
void add(Digest& digest, IVec v) {
  uint32_t all[LANES];
  istore(all, v);
  digest.add(all, LANES);
}
void add(Digest& digest, uint32_t mask) { digest.add(&mask, 1); }
void add(Digest& digest, float x) { digest.add(&x, 1); }

// What `f` gives of many vectors.
template <class F>
void vectors(const char* name, F f) {
  Digest digest;
  for (int n = 0; n < 4000; n++) {
    float a[LANES], b[LANES], c[LANES];
    for (int i = 0; i < LANES; i++) a[i] = n % 4 ? wild() : tame(), b[i] = n % 8 ? wild() : tame(), c[i] = n % 3 ? wild() : tame();
    if (n % 16 == 1) memcpy(b, a, sizeof a);
    f(digest, vload(a), vload(b), vload(c));
  }
  say(name, digest);
}
// A result that no arithmetic made: whether a denormal is copied or becomes zero is left open.
Vec flushed(Vec v) {
  static volatile float one = 1.f;  // which the compiler may not leave out
  return vmul(v, vset(one));
}

void vocabulary() {
  vectors("add", [](Digest& d, Vec a, Vec b, Vec) { add(d, vadd(a, b)), add(d, vsub(a, b)); });
  vectors("multiply", [](Digest& d, Vec a, Vec b, Vec) { add(d, vmul(a, b)); });
  vectors("divide", [](Digest& d, Vec a, Vec b, Vec) { add(d, vdiv(a, b)); });
  vectors("fma", [](Digest& d, Vec a, Vec b, Vec c) { add(d, vfma(a, b, c)), add(d, vfma(b, a, vmul(a, b))); });
  vectors("sqrt", [](Digest& d, Vec a, Vec, Vec) { add(d, vsqrt(a)); });
  vectors("round", [](Digest& d, Vec a, Vec b, Vec) { add(d, vround(a)), add(d, vround(vmul(b, vset(8.f)))); });
  vectors("max min", [](Digest& d, Vec a, Vec b, Vec) { add(d, flushed(vmax(a, b))), add(d, flushed(vmin(a, b))); });
  vectors("sum highest", [](Digest& d, Vec a, Vec b, Vec) {
    add(d, vsum(a)), add(d, vsum(vmul(b, vset(1e-20f))));
    add(d, vfirst(flushed(vset(vhighest(a)))));
  });
  vectors("compare", [](Digest& d, Vec a, Vec b, Vec) {
    add(d, vgt(a, b)), add(d, vge(a, b)), add(d, veq(a, b)), add(d, vnan(a)), add(d, igt(ibits(a), ibits(b)));
  });
  vectors("select", [](Digest& d, Vec a, Vec b, Vec c) { add(d, vselect(vgt(a, b), b, c)), add(d, vselect(0x9ac5, a, b)); });
  vectors("integers", [](Digest& d, Vec v, Vec w, Vec) {
    const IVec a = ibits(v), b = ibits(w);
    add(d, iadd(a, b)), add(d, isub(a, b)), add(d, imul(a, b)), add(d, ixor(a, b)), add(d, iand(a, b)), add(d, ior(a, b));
    add(d, ishl<5>(a)), add(d, ishr<7>(a)), add(d, ilanes()), add(d, vfrom_int(a)), add(d, ito_int(v)), add(d, ito_int(vmul(w, vset(1e3f))));
  });
  vectors("scale", [](Digest& d, Vec a, Vec b, Vec c) {
    c = vmin(vset(2.f), vmax(vset(-2.f), vselect(vnan(c), vset(1.f), c)));
    add(d, vscale(a, vround(vselect(vnan(b), vset(3.f), b))));
    add(d, vscale(a, vround(vmul(c, vset(100.f)))));
  });
  vectors("exp", [](Digest& d, Vec a, Vec b, Vec) {
    const Vec x = vmin(vset(88.f), vmax(vset(-100.f), vmul(vadd(a, vset(0.f)), vset(3.f))));
    add(d, vexp(x)), add(d, vexp2(x)), add(d, vexp(a)), add(d, vexp2(a)), add(d, vtanh(a)), add(d, vtanh(vmul(b, vset(1e-3f))));
  });
  vectors("log", [](Digest& d, Vec a, Vec, Vec) {
    float all[LANES];
    vstore(all, a);
    for (float x : all)
      if (std::isnormal(x)) {
        const double y = log1(std::fabs(x));
        d.bytes(&y, 8);
      }
  });
  vectors("loads and stores", [](Digest& d, Vec a, Vec b, Vec) {
    float from[2 * LANES], to[2 * LANES];
    bf16 half[2 * LANES];
    vstore(from + 1, a);
    for (int n = -1; n <= LANES + 1; n++) {
      vstore(to, b), vstore(to + LANES, b), vnarrow2(half, b, b);
      vstore_n(to + 1, vload_n(from + 1, n), n), vnarrow_n(half + 1, a, n);
      d.add(to, 2 * LANES), d.add(half, 2 * LANES), add(d, vload_n(from + 1, n));
    }
  });
  vectors("halves", [](Digest& d, Vec a, Vec b, Vec c) {
    bf16 half[5 * LANES];
    vnarrow(half, a), vnarrow2(half + 16, b, c);
    float all[LANES];
    vstore(all, b);
    for (int i = 0; i < LANES; i++) half[3 * LANES + i] = narrow1(all[i]);
    memcpy(half + 4 * LANES, all, 2 * LANES);
    d.add(half, 5 * LANES), add(d, vwiden(half)), add(d, vwiden(half + 4 * LANES));
    const Pairs x = bload(half), y = bload(half + 33), z = bload(half + 3 * LANES);
    add(d, vdot(c, x, y)), add(d, vdot(vset(0.f), bdup(half + 3), y)), add(d, vdot(a, bdup_first(half + 5), z)), add(d, bfirst(y));
    add(d, vdot(vset(1.f), z, y));
  });
  // A product that lies below the least normal number and rounds up to it: see simd_neon.h.
  volatile float factor = (1.f + 0x1p-23f) * 0x1p-63f, other = (1.f - 0x1p-23f) * 0x1p-63f;
  float product[LANES];
  vstore(product, vmul(vset(factor), vset(other)));
  std::printf("edge %.9g\n", double(product[0]) * 0x1p126);
}

template <class T, class S>
void packing(Digest& digest) {
  for (int64_t rows : {5, 16, 47, 64})
    for (int64_t columns : {1, 31, 32, 63, 96})
      for (int64_t start : {0, 16, 3}) {
        std::vector<S> plain(size_t(rows * columns));
        for (auto& x : plain) x = number<S>(below(2) ? wild() : tame());
        Matrix<T> m{nullptr, start + rows, columns};
        std::vector<T> out(size_t(m.num_panels() * m.panel_size()), number<T>(7.f)), back(size_t(rows * columns));
        pack(plain.data(), out.data(), start, rows, columns);
        unpack(out.data(), back.data(), start, rows, columns);
        digest.add(out), digest.add(back);
      }
}

// All heights and widths of tiles, and what stands at their edges.
template <class T>
void products(Finish finish) {
  Digest digest;
  const bool gated = finish >= Finish::SILU;
  for (int64_t columns : {1, 33, 64, 200})
    for (int64_t panels = 1; panels <= 9; panels++)
      for (int64_t m : {1, 2, 3, 4, 5, 7, 13}) {
        const int64_t rows = gated ? 2 * LANES * panels : LANES * panels - (panels + m) % 3 * 5;
        const auto x = matrix<T>(m + panels % 2 * 6, columns), w = weight<T>(rows, columns, 0.3f), bias = matrix<T>(1, rows);
        Linear<T> job{x.data() + panels % 2 * 6 * columns, columns, {w.data(), rows, columns}, m % 2 ? bias.data() : nullptr, finish, 0.7f,
                      nullptr, LANES * panels, false, {}};
        if (columns == 200) {
          const int64_t count = m % 2 ? 8 : 3;
          job.segments.count = count;
          for (int64_t i = 0; i < count; i++) job.segments.bounds[i] = columns * i / count / 2 * 2;
          job.segments.bounds[count] = columns;
        }
        std::vector<float> out(size_t(m * LANES * panels), 0.25f);
        std::vector<T> narrow(out.size());
        job.out = gated ? static_cast<void*>(narrow.data()) : out.data();
        const int64_t cut = panels / 3, middle = m / 2;
        linear(job, 0, m, cut, panels, {nullptr, nullptr, 0});
        linear(job, 0, middle, 0, cut, {nullptr, nullptr, 0}), linear(job, middle, m, 0, cut, {nullptr, nullptr, 0});
        gated ? digest.add(narrow) : digest.add(out);
      }
  const char* names[] = {"linear", "linear that adds", "linear silu", "linear gelu", "linear clamped"};
  say<T>(names[int(finish)], digest);
}

template <class T>
void by_rows() {
  Digest embedded, normed, heads, turned, gates, rounded, met;
  const auto table = weight<T>(40, 50);
  for (int64_t id : {0, 5, 7, 15, 16, 39, 40, -1}) {
    std::vector<float> out(50);
    embed<T>({table.data(), 40, 50}, id, 1.5f, out.data());
    embedded.add(out);
  }
  for (int64_t size : {1, 15, 16, 33, 64, 200})
    for (int64_t row = 0; row < 11; row++) {
      const auto rows = matrix<float>(row + 1, size, 3.f), adds = matrix<float>(row + 1, size);
      const auto w = matrix<T>(1, size), halves = matrix<T>(row + 1, size);
      const auto floats = matrix<float>(1, size);
      const float *x = rows.data() + row * size, *y = adds.data() + row * size;
      std::vector<float> residual(x, x + size), wide(x, x + size);
      std::vector<T> out(static_cast<size_t>(size));
      const NormWeight own{w.data(), size, sizeof(T) == 4, 1e-5f, 0.f}, other{floats.data(), size, true, 1e-6f, 1.f};
      rms_norm<T, T>(y, 0.5f, residual.data(), own, size, out.data());
      normed.add(residual), normed.add(out);
      rms_norm<T, T>(nullptr, 1.f, residual.data(), other, size, out.data());
      normed.add(out);
      std::vector<float> as_float(out.size());
      rms_norm<T, float>(y, 1.f, residual.data(), own, size, as_float.data());
      normed.add(as_float);
      norm_heads<T>(wide.data(), 1, own);
      heads.add(wide);
      round_row(x, size, out.data());
      rounded.add(out);
      if (size % 2 == 0) {
        const auto angles = matrix<float>(2, size / 2, 1.f, false);
        for (bool interleaved : {false, true})
          for (int64_t turning : {size, size / 2 / 2 * 2}) {
            rope(x, angles.data(), angles.data() + size / 2, Turn{size, turning, interleaved}, 0.3f, out.data());
            turned.add(out);
          }
      }
      for (Finish activation : {Finish::SILU, Finish::GELU, Finish::CLAMPED}) {
        auto pair = rows;
        pair.insert(pair.end(), adds.begin(), adds.end());
        for (auto& v : pair) v *= 20.f;
        std::vector<T> all(rows.size());
        gate(pair.data(), int64_t(rows.size()), activation, all.data());
        gates.add(all);
      }
    }
  for (int64_t rank : {16, 50}) {
    const LatentHeads size{3, 40, 16 + rank, 16, rank};
    const auto q = matrix<float>(1, 3 * 40);
    auto c = matrix<float>(1, 16 + rank);
    const auto w = matrix<T>(1, rank);
    std::vector<float> out(size_t(5 * size.key), 0.f);
    meet<T>(q.data(), c.data(), size, {w.data(), rank, sizeof(T) == 4, 1e-5f, 0.f}, out.data());
    met.add(out);
  }
  say<T>("embed", embedded), say<T>("norm", normed), say<T>("norm of heads", heads), say<T>("round rows", rounded);
  say<T>("rope", turned), say<T>("gate", gates), say<T>("meet", met);
}

struct Problem {
  AttentionShape shape;
  int64_t is_bf16, kv_codes, num_units;
  const int64_t* units;
  void *keys, *values;
  BatchRows batch;
};

template <class T>
void attention() {
  struct Case {
    int64_t heads, kv_heads, head_dim, block_size, window;
    float cap;
    bool latent, spoiled, codes = false;
  };
  Digest digest;
  for (const Case& c : {Case{4, 1, 64, 16, 0, 0, false, false}, Case{6, 2, 48, 32, 40, 0, false, true}, Case{7, 1, 16, 4, 0, 5.f, false, false},
                        Case{10, 2, 128, 64, 100, 0, false, true}, Case{3, 3, 256, 24, 0, 30.f, false, false}, Case{5, 1, 288, 16, 0, 0, true, false},
                        Case{6, 1, 576, 16, 0, 0, true, true}, Case{6, 2, 80, 32, 40, 0, false, true, true},
                        Case{4, 4, 64, 24, 0, 5.f, false, false, true}})
    for (int threads : {1, 3}) {
      const std::vector<int64_t> lengths = {1, 30, 13, 50}, contexts = {200, 30, 530, 70};  // the rows of each chunk, and all it sees
      const int64_t chunks = int64_t(lengths.size()), stride = (530 + c.block_size - 1) / c.block_size;
      const int64_t units = chunks * stride + 1;
      const size_t rows = size_t(c.kv_heads * units * c.block_size), size = c.codes ? 0 : rows * size_t(c.head_dim);
      std::vector<T> keys(size, number<T>(NAN)), values(size, number<T>(NAN));
      std::vector<int8_t> key_codes(c.codes ? rows * size_t(c.head_dim + 4) : 0, -1), value_codes(key_codes);  // scales are NaN
      void* const own_keys = c.codes ? static_cast<void*>(key_codes.data()) : keys.data();
      void* const own_values = c.codes ? static_cast<void*>(value_codes.data()) : values.data();
      std::vector<int64_t> tables;
      for (int64_t i = 0; i < chunks * stride; i++) tables.push_back(1 + (i * 7 + 3) % (chunks * stride));
      if ((chunks * stride) % 7 == 0) for (int64_t i = 0; i < chunks * stride; i++) tables[size_t(i)] = 1 + i;
      Problem problem{{c.heads, c.kv_heads, c.head_dim, c.block_size, c.window, 0.3f / std::sqrt(float(c.head_dim)), c.cap},
                      sizeof(T) == 2, c.codes, units, nullptr, own_keys, c.latent ? own_keys : own_values, {}};
      for (bool ask : {false, true}) {  // first all is stored, then the last rows ask
        std::vector<int64_t> positions, slots, row_chunks, starts{0};
        for (int64_t k = 0; k < chunks; k++) {
          for (int64_t i = ask ? contexts[size_t(k)] - lengths[size_t(k)] : 0; i < contexts[size_t(k)]; i++) {
            positions.push_back(i), row_chunks.push_back(k);
            slots.push_back(tables[size_t(k * stride + i / c.block_size)] * c.block_size + i % c.block_size);
          }
          starts.push_back(int64_t(positions.size()));
        }
        const int64_t n = int64_t(positions.size());
        problem.batch = {n, chunks, positions.data(), slots.data(), row_chunks.data(), starts.data(), contexts.data(), tables.data(), stride};
        if (!ask) {
          const auto k = matrix<T>(n, c.kv_heads * c.head_dim, 2.f, false), v = matrix<T>(n, c.kv_heads * c.head_dim, 1.f, c.spoiled);
          nano_store(&problem, k.data(), c.latent ? k.data() : v.data());
          digest.add(keys), digest.add(values), digest.add(key_codes), digest.add(value_codes);
        } else {
          const auto q = matrix<T>(n, c.heads * c.head_dim, 6.f, c.spoiled);
          const auto sinks = matrix<float>(1, c.heads);
          std::vector<T> out(size_t(n * c.heads * c.head_dim));
          require(nano_attention(&problem, q.data(), c.cap ? sinks.data() : nullptr, out.data(), threads, nullptr));
          digest.add(out);
        }
      }
    }
  say<T>("attention", digest);
}

template <class T>
void heads() {
  using namespace nano::head;
  Digest logits, drawn, scored;
  for (int64_t vocab : {100, 385, 1000})
    for (float cap : {0.f, 20.f}) {
      constexpr int64_t N = 9, COLUMNS = 70, R = 12;
      const auto hidden = matrix<T>(N, COLUMNS, 3.f), w = weight<T>(vocab, COLUMNS, 1.f, false);
      const HeadInput input{hidden.data(), w.data(), nullptr, COLUMNS, 0, N, vocab, COLUMNS, sizeof(T), 2, cap ? 1.3f : 1.f, cap};
      std::vector<float> all(size_t(N * vocab));
      require(nano_logits(&input, all.data()));
      logits.add(all);
      std::vector<int64_t> rows, top_k, keys, tokens(R), top(3 * R), entry_rows{1, 3, 6}, entry_ids{7, vocab - 1, 5}, targets, mask_rows(R, -1);
      std::vector<double> temperature;
      std::vector<float> top_p, min_p, presence, frequency, repetition, values{3, -2, 1}, logprobs(R), raw(R), mass(R), best(3 * R), named(6);
      for (int64_t i = 0; i < R; i++) {
        rows.push_back(i % N), top_k.push_back(i % 4 == 2 ? 5 + i : 0), temperature.push_back(i % 5 == 1 ? 0 : 0.3 + 0.2 * double(i));
        top_p.push_back(i % 3 ? 1.f : 0.8f), min_p.push_back(i % 6 == 4 ? 0.05f : 0.f), presence.push_back(i == 3 ? 0.5f : 0.f);
        frequency.push_back(i == 3 ? 0.2f : 0.f), repetition.push_back(i == 6 ? 1.3f : 1.f), targets.push_back(below(vocab));
        keys.push_back(random32()), keys.push_back(random32());
      }
      mask_rows[5] = 0;
      std::vector<int32_t> mask_words(size_t((vocab + 31) / 32), 0x55555555);
      mask_words.back() &= int32_t((1ull << (vocab - (int64_t(mask_words.size()) - 1) * 32)) - 1);
      std::vector<uint8_t> kept(size_t(R * vocab));
      const Entries some{entry_rows.data(), entry_ids.data(), values.data(), 3}, none{nullptr, nullptr, nullptr, 0};
      const DrawBatch batch{R, rows.data(), temperature.data(), {top_k.data(), top_p.data(), min_p.data()}, presence.data(), frequency.data(),
                            repetition.data(), keys.data(), some, none, some, some, mask_rows.data(), mask_words.data(), 1,
                            int64_t(mask_words.size()), 1, 3, tokens.data(), logprobs.data(), raw.data(), mass.data(), kept.data(),
                            top.data(), best.data(), named.data()};
      require(nano_draw(&input, &batch));
      drawn.add(tokens), drawn.add(logprobs), drawn.add(raw), drawn.add(mass), drawn.add(kept), drawn.add(top), drawn.add(best), drawn.add(named);
      std::vector<double> warm;
      for (double t : temperature) warm.push_back(t + 0.5);
      const ScoreBatch score{R, rows.data(), targets.data(), warm.data(), logprobs.data()};
      require(nano_score(&input, &score));
      scored.add(logprobs);
    }
  say<T>("logits", logits), say<T>("draw", drawn), say<T>("score", scored);
}

template <class T>
void states() {
  Digest convolved, ruled, gates;
  for (int64_t size : {1, 5, 16})
    for (bool rule : {false, true}) {
      const int64_t key_heads = 2, value_heads = 4, deep = 32, wide = 48, taps = 4, n = 40, blocks = (n + size - 1) / size;
      const int64_t channels = rule ? 2 * key_heads * deep + value_heads * wide : 80;
      const int64_t columns = rule ? channels + value_heads * wide + 2 * value_heads : 3 * channels;
      std::vector<int64_t> positions, slots, row_chunks, starts{0, n}, tables;
      for (int64_t b = 0; b < blocks; b++) tables.push_back(blocks - 1 - b);
      for (int64_t i = 0; i < n; i++)
        positions.push_back(i), row_chunks.push_back(0), slots.push_back(tables[size_t(i / size)] * size + i % size);
      const StateStep step{n, 1, size, blocks, blocks, blocks, std::max(size + 1, taps), positions.data(), slots.data(), row_chunks.data(),
                           starts.data(), tables.data(), nullptr};
      const auto projected = matrix<float>(n, columns, 2.f, !rule), log_decay = matrix<float>(1, value_heads), decay_bias = matrix<float>(1, value_heads);
      const auto w = matrix<T>(1, channels * taps), bias = matrix<T>(1, channels), norm = matrix<T>(1, wide);
      std::vector<T> inputs(size_t(blocks * size * channels));
      const Convolution conv{inputs.data(), w.data(), rule ? nullptr : bias.data(), channels, taps};
      if (rule) {
        std::vector<float> mixed(size_t(n * channels)), keys(size_t(blocks * size * key_heads * deep)), values(size_t(blocks * size * value_heads * wide)),
            decays(size_t(blocks * size * value_heads)), state(size_t(blocks * value_heads * deep * wide));
        std::vector<T> out(size_t(n * value_heads * wide));
        const DeltaRule delta{projected.data(), columns, mixed.data(), keys.data(), values.data(), decays.data(), state.data(), log_decay.data(),
                              decay_bias.data(), norm.data(), key_heads, value_heads, deep, wide, 1e-6f};
        require(nano_delta_net(&step, &conv, &delta, sizeof(T) == 2, out.data(), 2));
        ruled.add(out), ruled.add(state), ruled.add(inputs);
      } else {
        std::vector<T> out(size_t(n * channels));
        require(nano_short_conv(&step, &conv, projected.data(), sizeof(T) == 2, out.data(), 2));
        convolved.add(out), convolved.add(inputs);
        const auto x = matrix<T>(n, channels);
        nano_sigmoid_gate(x.data(), projected.data(), columns, n, channels, sizeof(T) == 2, out.data(), 2);
        gates.add(out);
      }
    }
  say<T>("short convolution", convolved), say<T>("delta rule", ruled), say<T>("sigmoid gate", gates);
}

template <class T>
void experts() {
  Digest routed, multiplied, combined;
  for (int64_t activation = 2; activation <= 4; activation++)
    for (int64_t sigmoid : {0, 1}) {
      const int64_t n = 30, hidden = 64, inner = 48, count = 12, k = 4;
      const auto x = matrix<T>(n, hidden, 1.f, false), spoiled = matrix<T>(n, hidden), router = weight<T>(count, hidden, 0.5f, false);
      const auto gate_up = weight<T>(count * 2 * inner, hidden, 0.3f, false), down = weight<T>(count * hidden, inner, 0.3f);
      const auto up_bias = matrix<T>(1, count * 2 * inner), down_bias = matrix<T>(1, count * hidden);
      const auto bias = matrix<float>(1, count), added = matrix<float>(1, count);
      const Routing routing{count, k, sigmoid, 1, sigmoid ? 4 : 1, sigmoid ? 2 : 1, sigmoid ? 2 : 1, 0,
                            sigmoid ? bias.data() : nullptr, added.data(), 1.5f, 1e-20f};
      std::vector<int64_t> ids(size_t(n * k)), of;
      for (int64_t i = 0; i < n * k; i++) of.push_back(i / k);
      std::vector<float> weights(ids.size()), products(ids.size() * size_t(hidden)), out(size_t(n * hidden));
      nano_moe_route(x.data(), n, hidden, router.data(), count, sizeof(T) == 2, &routing, ids.data(), weights.data(), 2);
      routed.add(ids), routed.add(weights);
      const ExpertWeights own{gate_up.data(), up_bias.data(), down.data(), down_bias.data(), nullptr, nullptr, hidden, inner};
      require(nano_moe_products(spoiled.data(), n, of.data(), ids.data(), n * k, count, &own, sizeof(T) == 2, activation,
                                products.data(), 2));
      multiplied.add(products);
      nano_moe_combine(products.data(), weights.data(), n, k, hidden, out.data(), 2);
      combined.add(out);
    }
  say<T>("route", routed), say<T>("products of experts", multiplied), say<T>("combine experts", combined);
}

template <class T>
void all_of() {
  for (Finish finish : {Finish::STORE, Finish::ADD, Finish::SILU, Finish::GELU, Finish::CLAMPED}) products<T>(finish);
  by_rows<T>(), attention<T>(), heads<T>(), states<T>(), experts<T>();
}

}  // namespace

int main() {
  const FlushDenormals flush;
  vocabulary();
  Digest moved;
  packing<bf16, bf16>(moved), packing<bf16, float>(moved), packing<float, bf16>(moved), packing<float, float>(moved);
  say("pack and unpack", moved);
  Digest codes;
  for (int i = 0; i < 20; i++) codes_round(codes);
  say("codes", codes);
  all_of<bf16>();
  all_of<float>();
}
