// A pool of threads that all kernels share, with a barrier for the threads of a team.
#pragma once
#include <atomic>

namespace nano {

// One of the threads that run a piece of work together.
class Team {
 public:
  Team(int thread, int size, std::atomic<int>& arrived, std::atomic<int>& round)
      : thread(thread), size(size), arrived_(arrived), round_(round) {}
  const int thread, size;

  // Wait until all threads of the team have arrived. Their earlier writes are visible afterwards.
  void wait();

  // This thread's share of n things: [begin(n), end(n)).
  template <class T>
  T begin(T n) const { return n * thread / size; }
  template <class T>
  T end(T n) const { return n * (thread + 1) / size; }

 private:
  std::atomic<int>&arrived_, &round_;
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
