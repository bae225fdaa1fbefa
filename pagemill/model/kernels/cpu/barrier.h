// Where the threads of a step wait for each other, and what they fetch meanwhile. Compiled for the baseline.
#pragma once

#include <sched.h>

#include <atomic>

#include "kernels.h"
#include "waves.h"

namespace {

// Brings what a thread reads next to its second-level cache while it has nothing else to do; by default nothing.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const char* begin, int64_t bytes) : at_(begin), end_(begin + bytes) {}

  void operator()() {
    if (at_ < end_) {
      prefetch_line(at_);
      at_ += 64;
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
};

class Barrier {
 public:
  // Called before anybody waits.
  void set_team(int64_t threads) { threads_ = threads; }

  // `idle` is called over and over meanwhile.
  void wait(Prefetch idle = {}) {
    if (threads_ == 1) return;
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < SPINS_BEFORE_YIELD) {
        idle();
      } else {
        sched_yield();  // another process has the core of whom we wait for
      }
    }
  }

 private:
  int64_t threads_ = 1;
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

}  // namespace
