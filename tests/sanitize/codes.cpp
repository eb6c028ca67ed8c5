// Weights in codes of 8 to 4 bits: every format, rows by themselves and together, all memory of exact size.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "digest.h"
#include "linear.h"

extern "C" void nano_store_codes(const int8_t* source, int64_t stride, const float* scales, const float* mins,
                                 const float* steps, const float* min_steps, const nano::Quantised* weight, int64_t start, int64_t count, int64_t columns, int64_t num_threads);

#if defined(NANO_AMX)
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((constructor)) static void ask_for_tiles() { syscall(SYS_arch_prctl, 0x1023, 18); }
#endif

namespace {

using namespace nano;
std::mt19937 random_bits(3);

template <class T>
std::vector<T> rows_of(int64_t rows, int64_t columns) {
  std::vector<T> out(size_t(rows * columns));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < columns; k++) {
      float x = float(random_bits() % 2001) / 4000.f - 0.25f;
      if (i % 7 == 3) x *= 1e-33f;                                          // counts as zeros
      if (i % 7 == 5 && k == columns / 2) x = i % 2 ? INFINITY : NAN;
      if constexpr (sizeof(T) == 2) out[size_t(i * columns + k)] = narrow1(x);
      else out[size_t(i * columns + k)] = x;
    }
  return out;
}

struct Form {
  int64_t bits, group;
  Scales scales;
  bool mins;
  const int8_t* table = nullptr;
};
constexpr Scales HALF = Scales::HALF, FLOAT = Scales::FLOAT, STEPS = Scales::STEPS, EXPONENTS = Scales::EXPONENTS;
constexpr int8_t WIDE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t NARROW[16] = {-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 12};
constexpr Form FORMS[] = {{8, 0, FLOAT, false}, {8, 32, HALF, false}, {4, 32, HALF, false}, {8, 16, FLOAT, false},
                          {4, 32, FLOAT, true}, {8, 32, FLOAT, true}, {8, 16, FLOAT, true}, {4, 32, HALF, true},
                          {5, 32, HALF, false}, {5, 32, HALF, true},  {4, 32, STEPS, true}, {5, 32, STEPS, true},
                          {6, 16, STEPS, false}, {4, 32, HALF, false, WIDE},  {4, 32, STEPS, false, WIDE},
                          {4, 32, EXPONENTS, false, NARROW}};

// Bytes of the scales of whole panels.
size_t scale_bytes(const Form& form, int64_t panels, int64_t groups) {
  const int64_t each = form.scales == STEPS ? 256 / form.group : 1;
  const int64_t row = form.scales == STEPS ? (groups + each - 1) / each * (2 + each) : groups * (form.scales == EXPONENTS ? 1 : form.scales == HALF ? 2 : 4);
  return size_t(panels * LANES * row);
}

template <class T>
void round(const Form& form, Digest& all) {
  const int64_t unit = form.scales == STEPS ? STEP : form.group ? form.group : 4, panels = 2 * (1 + random_bits() % 4), rows = panels * LANES;
  const int64_t columns = unit * (form.scales == STEPS ? 1 : 8) * (1 + random_bits() % 3) + (random_bits() % 2 ? random_bits() % unit : 0);
  Quantised w{form.bits, form.group, int64_t(form.scales), nullptr, nullptr, nullptr, {}, 0, nullptr, {}};
  if (form.table) memcpy(w.values, form.table, sizeof(w.values));
  w.segments.count = random_bits() % 2 ? 8 : 1;
  for (int64_t s = 0; s <= w.segments.count; s++)
    w.segments.bounds[s] = s == w.segments.count ? columns : columns * s / w.segments.count / unit * unit;
  std::vector<int8_t> codes(size_t(panels * w.num_quads() * 64 * form.bits / 8));
  std::vector<int8_t> scales(scale_bytes(form, panels, w.num_groups())), mins(scales.size());
  w.codes = codes.data(), w.scales = scales.data(), w.mins = form.mins ? mins.data() : nullptr;
  const auto plain = rows_of<T>(rows, columns);
  const int64_t cut = random_bits() % rows;
  quantise(plain.data(), w, 0, cut, columns), quantise(plain.data() + cut * columns, w, cut, rows - cut, columns);
  std::vector<float> numbers(size_t(rows * columns));
  for (int64_t i = 0; i < rows; i++) dequantise(w, i, columns, i % 2 ? 1.f : 0.5f, numbers.data() + i * columns);
  all.add(numbers);

  const int64_t n = 1 + random_bits() % 11;
  const auto x = rows_of<T>(n, columns);
  for (const Finish finish : {Finish::STORE, Finish::ADD, Finish::SILU}) {
    const bool gated = finish == Finish::SILU;
    const int64_t outputs = gated ? rows / 2 : rows;
    auto run = [&](int64_t from, int64_t to, int64_t first, int64_t last, std::vector<float>& out, std::vector<T>& narrow) {
      Linear<T> job{x.data(), columns, {nullptr, rows, columns, &w}, nullptr, finish, 0.7f, nullptr, outputs, false, {}};
      job.out = gated ? static_cast<void*>(narrow.data()) : out.data();
      linear(job, from, to, first, last, {nullptr, nullptr, 0});
    };
    std::vector<float> out(size_t(n * outputs), 0.25f), other = out;
    std::vector<T> narrow(out.size()), narrow_too(out.size());
    const int64_t width = outputs / LANES, middle = random_bits() % (width + 1), row = random_bits() % (n + 1);
    run(0, n, 0, width, out, narrow);
    run(0, row, 0, width, other, narrow_too), run(row, n, 0, middle, other, narrow_too), run(row, n, middle, width, other, narrow_too);
    Digest whole, parts;  // of which any NaN is like another
    whole.add(out), whole.add(narrow), parts.add(other), parts.add(narrow_too);
    if (whole.value() != parts.value())
      std::printf("codes: rows in parts have other bits\n"), std::exit(1);
    gated ? all.add(narrow) : all.add(out);
  }
}

// Codes that a file has, stored in two parts, come back as what they stand for.
void store(const Form& form) {
  const int64_t rows = LANES * (1 + random_bits() % 3), columns = (form.group ? form.group : 4) * (1 + random_bits() % 5);
  Quantised w{form.bits, form.group, int64_t(form.scales), nullptr, nullptr, nullptr, {}, 0, nullptr, {}};
  if (form.table) memcpy(w.values, form.table, sizeof(w.values));
  w.segments.count = 1, w.segments.bounds[0] = 0, w.segments.bounds[1] = columns;
  const int64_t groups = w.num_groups(), stride = columns + random_bits() % 3, least = form.mins ? 0 : -(1 << (form.bits - 1));
  std::vector<int8_t> codes(size_t(rows / LANES * w.num_quads() * 64 * form.bits / 8)), source(size_t(rows * stride));
  std::vector<int8_t> scales(scale_bytes(form, rows / LANES, groups)), mins(scales.size());
  std::vector<float> own(size_t(rows * groups)), own_mins(own.size()), row(size_t(columns), 0.f);
  const std::vector<float> steps(own.size(), 1.f / 64.f), min_steps(own.size(), 1.f);
  w.codes = codes.data(), w.scales = scales.data(), w.mins = form.mins ? mins.data() : nullptr;
  for (auto& code : source) code = int8_t(form.bits < 8 ? least + int64_t(random_bits() % (1u << form.bits)) : int64_t(random_bits() % 255) - 127);
  for (auto& code : source)
    if (form.table) code = form.table[uint8_t(code) % 16];
  for (auto& scale : own) scale = form.scales == EXPONENTS ? std::ldexp(1.f, int(random_bits() % 64) - 32) : float(random_bits() % 64) / 64.f;  // a float16
  for (auto& min : own_mins) min = float(random_bits() % 64);
  const int64_t cut = random_bits() % rows;
  nano_store_codes(source.data(), stride, own.data(), own_mins.data(), steps.data(), min_steps.data(), &w, 0, cut, columns, 2);
  nano_store_codes(source.data() + cut * stride, stride, own.data() + cut * groups, own_mins.data() + cut * groups, steps.data(), min_steps.data(), &w, cut, rows - cut, columns, 2);
  for (int64_t i = 0; i < rows; i++) {
    dequantise(w, i, columns, 1.f, row.data());
    for (int64_t k = 0; k < columns; k++) {
      const size_t place = size_t(i * groups + (form.group ? k / form.group : 0));
      if (row[size_t(k)] != float(source[size_t(i * stride + k)]) * own[place] - (form.mins ? own_mins[place] : 0.f))
        std::printf("codes: stored ones are others\n"), std::exit(1);
    }
  }
}

}  // namespace

void codes_round(nano::Digest& all) {
  for (const Form& form : FORMS) round<bf16>(form, all), round<float>(form, all), store(form);
}
