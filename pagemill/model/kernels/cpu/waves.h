// How threads share a step of many rows: as tasks that they take in order, with no barrier between layers. What lies
// between two layers of attention needs no other row, so a task is all of it for one chunk of rows, whose activations
// stay with one core; of attention, a task is a tile and KV head. Knows who needs whom; nothing about what tasks do.
//
// A tile needs the chunks that its keys of this step come from, a chunk the tiles with its rows. Whatever a task needs
// comes before it, so that the first one that is not done never waits, and the others hardly do: a thread that is ahead
// goes on to the attention, then to the next layer, of rows that are done.
#pragma once

#include <sched.h>

#include <atomic>
#include <new>

#include "attention_plan.h"

namespace {

// Of a chunk, at most; and rows that kernels take at a time, of which chunks but the last are multiples.
constexpr int64_t WAVE_ROWS = 132, ROWS_TOGETHER = 12;
constexpr int SPINS_BEFORE_YIELD = 6000;

// Operations [first, last) for every chunk, or one operation of attention for every tile and head of `plan`.
struct WaveStage {
  int64_t first, last;
  const AttentionPlan* plan;  // null: rows
  const int32_t* query_start;
  int64_t heads;
};

struct WaveTask {
  int64_t stage = -1;  // negative: none is left
  int64_t index = 0;   // of the chunk, or tile x head
};

// Where a thread is in the order of tasks.
struct WaveCursor {
  int64_t stage = 0, before = 0;
};

class Waves {
 public:
  // Stages by turns: rows, attention, rows, and so on, rows at the end. `memory` holds what is done. False: out of memory.
  bool prepare(const WaveStage* stages, int64_t num_stages, int64_t num_rows, int64_t threads, ThreadBuffer& memory) {
    stages_ = stages;
    num_stages_ = num_stages;
    num_rows_ = num_rows;
    const int64_t least = (num_rows + WAVE_ROWS - 1) / WAVE_ROWS, most = (num_rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    num_chunks_ = least > threads ? least : threads < most ? threads : most;
    missing_ = (std::atomic<int32_t>*)memory.reserve(num_stages * num_chunks_ * (int64_t)sizeof *missing_);
    if (!missing_) return false;
    for (int64_t i = 0; i < num_stages * num_chunks_; ++i) new (missing_ + i) std::atomic<int32_t>(0);
    for (int64_t s = 0; s < num_stages; ++s) count_missing(s);
    return true;
  }

  WaveTask take(WaveCursor& at) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    while (at.stage < num_stages_ && i >= at.before + num_tasks(at.stage)) at.before += num_tasks(at.stage++);
    return at.stage < num_stages_ ? WaveTask{at.stage, i - at.before} : WaveTask();
  }

  // Returns when everything that the task needs is done.
  void wait_for_needs(const WaveTask& task) const {
    if (task.stage == 0) return;
    int64_t first = task.index, last = task.index;
    if (const WaveStage& stage = stages_[task.stage]; stage.plan) {
      const Tile& tile = tile_of(task);
      first = chunk_of(stage.query_start[tile.request]);
      last = chunk_of(tile.token + tile.num_tokens - 1);
    }
    for (int64_t chunk = first; chunk <= last; ++chunk) wait_for(missing(task.stage - 1, chunk));
  }

  void finish(const WaveTask& task) {
    int64_t first = task.index, last = task.index;
    if (stages_[task.stage].plan) {
      const Tile& tile = tile_of(task);
      first = chunk_of(tile.token);
      last = chunk_of(tile.token + tile.num_tokens - 1);
    }
    for (int64_t chunk = first; chunk <= last; ++chunk) missing(task.stage, chunk).fetch_sub(1, std::memory_order_release);
  }

  // Whether nothing but the result needs the task: rows at the end, or the attention before them.
  bool is_last(const WaveTask& task) const { return task.stage >= num_stages_ - 2; }
  const WaveStage& stage(const WaveTask& task) const { return stages_[task.stage]; }
  // First row of a chunk.
  int64_t begin(int64_t chunk) const {
    const int64_t row = (num_rows_ * chunk / num_chunks_ + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
    return row < num_rows_ ? row : num_rows_;
  }
  const Tile& tile_of(const WaveTask& task) const { return stage(task).plan->tiles[task.index / stage(task).heads]; }

 private:
  int64_t num_tasks(int64_t s) const { return stages_[s].plan ? stages_[s].plan->count * stages_[s].heads : num_chunks_; }
  std::atomic<int32_t>& missing(int64_t s, int64_t chunk) const { return missing_[s * num_chunks_ + chunk]; }

  int64_t chunk_of(int64_t row) const {
    int64_t chunk = row * num_chunks_ / num_rows_;
    while (begin(chunk) > row) --chunk;
    while (begin(chunk + 1) <= row) ++chunk;
    return chunk;
  }

  // Tasks of the stage that a chunk is in.
  void count_missing(int64_t s) {
    const WaveStage& stage = stages_[s];
    for (int64_t chunk = 0; !stage.plan && chunk < num_chunks_; ++chunk) missing(s, chunk) = 1;
    for (int64_t i = 0; stage.plan && i < stage.plan->count; ++i) {
      const Tile& tile = stage.plan->tiles[i];
      const int64_t last = chunk_of(tile.token + tile.num_tokens - 1);
      for (int64_t chunk = chunk_of(tile.token); chunk <= last; ++chunk) missing(s, chunk) += (int32_t)stage.heads;
    }
  }

  static void wait_for(const std::atomic<int32_t>& missing) {
    for (int spins = 0; missing.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins > SPINS_BEFORE_YIELD) sched_yield();
#if defined(__x86_64__)
      else __builtin_ia32_pause();
#endif
    }
  }

  const WaveStage* stages_ = nullptr;
  int64_t num_stages_ = 0, num_rows_ = 0, num_chunks_ = 0;
  std::atomic<int32_t>* missing_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace
