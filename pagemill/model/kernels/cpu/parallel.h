// Sharing work between threads. The pool is the OpenMP one that torch uses, so the two never compete for cores.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

// Below this many bytes of traffic a kernel ends sooner than the other threads wake up.
constexpr int64_t MIN_PARALLEL_BYTES = 128 * 1024;

// body(begin, end) over equal shares of [0, count). One team size besides 1: a changing one makes OpenMP rebuild its pool.
template <class F>
void share_evenly(int64_t count, int64_t bytes, int64_t threads, F body) {
  if (threads <= 1 || count <= 1 || bytes < MIN_PARALLEL_BYTES) return body((int64_t)0, count);
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
    const int64_t begin = count * rank / size, end = count * (rank + 1) / size;
    if (begin < end) body(begin, end);
  }
}

// Equal shares of [0, count), one for each thread, handed out in pieces: who is done with his own takes from the others,
// whose cores may be slower, or busy with something else.
class Shares {
 public:
  // Pieces that are gone; one for each thread, 0 before anybody begins.
  struct alignas(64) Counter {
    std::atomic<int64_t> gone{0};
  };

  Shares(Counter* counters, int64_t count, int64_t team, int64_t piece)
      : counters_(counters), count_(count), team_(team), piece_(piece) {}

  // body(begin, end) until nothing is left.
  template <class F>
  void run(int64_t rank, F body) const {
    for (int64_t i = 0; i < team_; ++i) {
      const int64_t owner = (rank + i) % team_, end = begin(owner + 1);
      for (int64_t at; (at = begin(owner) + piece_ * counters_[owner].gone.fetch_add(1, std::memory_order_relaxed)) < end;)
        body(at, at + piece_ < end ? at + piece_ : end);
    }
  }

 private:
  int64_t begin(int64_t rank) const { return count_ * rank / team_; }

  Counter* counters_;
  int64_t count_, team_, piece_;
};

// Hands out 0, 1, 2, ... to whichever thread asks next.
class WorkQueue {
 public:
  explicit WorkQueue(int64_t count) : count_(count) {}

  template <class F>
  void run(F body) {
    for (int64_t i; (i = take()) >= 0;) body(i);
  }

  // body(i, what the same thread gets after it; -1: nothing).
  template <class F>
  void run_ahead(F body) {
    for (int64_t i = take(), next; i >= 0; i = next) {
      next = take();
      body(i, next);
    }
  }

 private:
  int64_t take() {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    return i < count_ ? i : -1;
  }

  std::atomic<int64_t> next_{0};
  int64_t count_;
};
