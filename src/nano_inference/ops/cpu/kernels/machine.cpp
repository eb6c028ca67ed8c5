// Facts about the library and the machine: sizes of structures, and rates for benchmarks.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "linear.h"
#include "pool.h"
#include "program.h"

namespace {
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace

extern "C" {

// Sizes of Op, ProgramSpec and Step, so that Python notices a mismatch when it loads the library.
void nano_sizes(int64_t* out) {
  out[0] = sizeof(nano::Op), out[1] = sizeof(nano::ProgramSpec), out[2] = sizeof(nano::Step);
}

// Seconds per barrier of two threads, a measure of the distance between their cores.
double nano_ping(int64_t rounds) {
  double start = 0, end = 0;
  auto work = [&](nano::Team& team) {
    for (int i = 0; i < 1000; i++) team.wait();
    if (team.thread == 0) start = now();
    for (int64_t i = 0; i < rounds; i++) team.wait();
    if (team.thread == 0) end = now();
  };
  nano::run_team(2, work);
  return (end - start) / double(rounds);
}

// Bytes per second that threads read from `data` [count], each its own part.
double nano_read_rate(const float* data, int64_t count, int64_t num_threads) {
  static std::atomic<float> sink;
  double start = 0, end = 0;
  auto work = [&](nano::Team& team) {
    const float *p = data + team.begin(count / 128) * 128, *last = data + team.end(count / 128) * 128;
    team.wait();
    if (team.thread == 0) start = now();
    nano::Vec sums[8];
    for (auto& s : sums) s = nano::vset(0.f);
    for (; p < last; p += 128)
      for (int j = 0; j < 8; j++) {
        nano::fetch(p + j * 16 + 1024);
        sums[j] = nano::vadd(sums[j], nano::vload(p + j * 16));
      }
    for (auto& s : sums) sink.store(sink.load() + nano::vsum(s));
    team.wait();
    if (team.thread == 0) end = now();
  };
  nano::run_team(int(num_threads), work);
  return double(count / 128 * 512) / (end - start);
}

// bf16 operations per second of products whose weights and rows stay in the cache.
double nano_product_rate(int64_t num_threads) {
  constexpr int64_t ROWS_OF_ONE = 256, N = 576, K = 1536, ROUNDS = 40;
  using nano::bf16;
  std::vector<bf16> x(size_t(ROWS_OF_ONE * num_threads * K), 0x3f80), w(size_t(N * K), 0x3c00);
  std::vector<float> out(size_t(ROWS_OF_ONE * num_threads * N));
  double start = 0, end = 0;
  auto work = [&](nano::Team& team) {
    auto round = [&] {
      nano::products<bf16>(x.data() + team.thread * ROWS_OF_ONE * K, K, ROWS_OF_ONE, {w.data(), N, K}, 0, N / 16,
                           out.data() + team.thread * ROWS_OF_ONE * N, N, nullptr);
    };
    round();
    team.wait();
    if (team.thread == 0) start = now();
    for (int i = 0; i < ROUNDS; i++) round();
    team.wait();
    if (team.thread == 0) end = now();
  };
  nano::run_team(int(num_threads), work);
  return 2. * double(ROUNDS * ROWS_OF_ONE * num_threads * N * K) / (end - start);
}

int nano_pack(const void* source, int64_t source_is_bf16, void* packed, int64_t is_bf16, int64_t start, int64_t count,
              int64_t columns, int64_t num_threads) {
  using nano::bf16;
  auto work = [&](nano::Team& team) {
    // Cut at whole panels, so that no two threads write to the same panel.
    auto cut = [&](int64_t part) {
      const int64_t row = start + count * part / team.size;
      return part == team.size ? count : part == 0 ? 0 : std::max<int64_t>(0, row / 16 * 16 - start);
    };
    const int64_t from = cut(team.thread), rows = cut(team.thread + 1) - from;
    auto floats = static_cast<const float*>(source) + from * columns;
    auto halves = static_cast<const bf16*>(source) + from * columns;
    if (is_bf16)
      source_is_bf16 ? nano::pack(halves, static_cast<bf16*>(packed), start + from, rows, columns)
                     : nano::pack(floats, static_cast<bf16*>(packed), start + from, rows, columns);
    else
      source_is_bf16 ? nano::pack(halves, static_cast<float*>(packed), start + from, rows, columns)
                     : nano::pack(floats, static_cast<float*>(packed), start + from, rows, columns);
  };
  nano::run_team(int(num_threads), work);
  return 0;
}

void nano_unpack(const void* packed, void* out, int64_t is_bf16, int64_t start, int64_t count, int64_t columns) {
  using nano::bf16;
  is_bf16 ? nano::unpack(static_cast<const bf16*>(packed), static_cast<bf16*>(out), start, count, columns)
          : nano::unpack(static_cast<const float*>(packed), static_cast<float*>(out), start, count, columns);
}
}
