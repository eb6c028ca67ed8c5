// A pool of threads that all kernels share, with a barrier for the threads of a team.
#pragma once
#include <atomic>

namespace nano {

// A barrier for the threads of a team. Groups of eight threads count their arrivals in a cache line of their own, and the
// last of a group arrives for it. A single line would pass through the cores of all threads, one by one.
class Barrier {
 public:
  void wait(int thread, int size);

 private:
  static constexpr int GROUP = 8, MOST_GROUPS = 64;
  struct alignas(64) Count {
    std::atomic<int> arrived{0};
    bool is_last(int size);
  };
  Count groups_[MOST_GROUPS], all_;
  alignas(64) std::atomic<int> round_{0};
};

// One of the threads that run a piece of work together.
class Team {
 public:
  Team(int thread, int size, Barrier& barrier) : thread(thread), size(size), barrier_(barrier) {}
  const int thread, size;

  // Wait until all threads of the team have arrived. Their earlier writes are visible afterwards.
  void wait() {
    if (size > 1) barrier_.wait(thread, size);
  }

  // This thread's share of n things: [begin(n), end(n)).
  template <class T>
  T begin(T n) const { return n * thread / size; }
  template <class T>
  T end(T n) const { return n * (thread + 1) / size; }

 private:
  Barrier& barrier_;
};

using Work = void (*)(Team& team, void* context);

// Run `work` on num_threads threads, the caller included, with denormals flushed. Return when all are done. Calls from
// several threads wait for each other. Exceptions must not leave `work`.
void run_team(int num_threads, Work work, void* context);

// Run a callable.
template <class F>
void run_team(int num_threads, F& work) {
  run_team(num_threads, [](Team& team, void* context) { (*static_cast<F*>(context))(team); }, &work);
}

}  // namespace nano
