// Memory that a thread keeps from call to call. Knows nothing about what it is for.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

class ThreadBuffer {
 public:
  ~ThreadBuffer() { free(memory_); }

  // Null when there is no memory. Aligned to a page; what was in it is lost when it grows.
  void* reserve(int64_t bytes) {
    if (bytes <= bytes_) return memory_;
    free(memory_);
    bytes_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    memory_ = aligned_alloc(4096, (size_t)bytes_);
    if (!memory_) bytes_ = 0;
    return memory_;
  }

  // For kernels, which cannot report: where they have no memory the process has none either.
  void* at_least(int64_t bytes) {
    if (!reserve(bytes) && bytes) abort();
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace
