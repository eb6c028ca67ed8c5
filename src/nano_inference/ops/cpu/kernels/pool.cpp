#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace nano {
namespace {

// How long a waiting thread spins before it yields its core. Waking a sleeping thread takes 0.1 ms or more, so threads
// spin for the next call of the same step, and for the next step.
constexpr int LOOKS_IN_TEAM = 4000;
constexpr double SECONDS_FOR_WORK = 2e-3;

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  void run(int size, Work work, void* context) {
    std::lock_guard<std::mutex> one_at_a_time(running_);
    left_.store(size - 1, std::memory_order_relaxed);
    while (int(threads_.size()) < size - 1) {
      int index = int(threads_.size()) + 1;
      threads_.emplace_back([this, index] { serve(index); });
    }
    if (size > 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      size_ = size, work_ = work, context_ = context;
      job_.fetch_add(1, std::memory_order_release);
    }
    if (size > 1 && sleeping_.load() > 0) wake_.notify_all();
    perform(0, size, work, context);
    for (int looks = 0; left_.load(std::memory_order_acquire) > 0; looks++)
      looks < LOOKS_IN_TEAM ? pause() : std::this_thread::yield();
  }

 private:
  void serve(int index) {
    int seen = 0;
    while (true) {
      const double until = now() + SECONDS_FOR_WORK;
      for (int looks = 1; job_.load(std::memory_order_acquire) == seen; looks++) {
        pause();
        if (looks % 256 == 0 && now() > until) break;
      }
      int size;
      Work work;
      void* context;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_++;
        wake_.wait(lock, [&] { return job_.load() != seen; });
        sleeping_--;
        seen = job_.load(), size = size_, work = work_, context = context_;
      }
      if (index >= size) continue;
      perform(index, size, work, context);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  void perform(int index, int size, Work work, void* context) {
    FlushDenormals mode;
    Team team(index, size, barrier_);
    work(team, context);
  }

  std::mutex running_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;  // live as long as the process
  alignas(64) std::atomic<int> job_{0};
  alignas(64) std::atomic<int> left_{0};
  Barrier barrier_;
  std::atomic<int> sleeping_{0};
  int size_ = 0;
  Work work_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace

// Count one more of `size`. Return true for the last, which starts the count of the next round.
bool Barrier::Count::is_last(int size) {
  if (arrived.fetch_add(1, std::memory_order_acq_rel) != size - 1) return false;
  arrived.store(0, std::memory_order_relaxed);
  return true;
}

void Barrier::wait(int thread, int size) {
  const int group = std::max(GROUP, (size + MOST_GROUPS - 1) / MOST_GROUPS), number = thread / group;
  const int round = round_.load(std::memory_order_acquire), num_groups = (size + group - 1) / group;
  if (groups_[number].is_last(std::min(group, size - number * group)) && (num_groups == 1 || all_.is_last(num_groups))) {
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int looks = 0; round_.load(std::memory_order_acquire) == round; looks++)
    looks < LOOKS_IN_TEAM ? pause() : std::this_thread::yield();
}

void run_team(int num_threads, Work work, void* context) {
  // Threads do not survive a fork: the child gets its own pool. A pool is never destroyed, since its threads may
  // outlive static objects at exit.
  static std::mutex choosing;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  {
    std::lock_guard<std::mutex> lock(choosing);
    if (owner != getpid()) pool = new Pool, owner = getpid();
  }
  pool->run(num_threads, work, context);
}

}  // namespace nano
