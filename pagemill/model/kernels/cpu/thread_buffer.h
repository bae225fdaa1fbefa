// Memory that a thread keeps from call to call. Knows nothing about what it is for.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

class ThreadBuffer {
 public:
  ~ThreadBuffer() { free(memory_); }

  // Aligned to a cache line; what was in it is lost when it grows.
  void* at_least(int64_t bytes) {
    if (bytes <= bytes_) return memory_;
    free(memory_);
    bytes_ = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    memory_ = aligned_alloc(64, (size_t)bytes_);
    // Kernels cannot report: this is where the process would be out of memory anyway.
    if (!memory_) abort();
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace
