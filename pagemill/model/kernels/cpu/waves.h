// How threads share a step of many rows: as tasks that they take in order, with no barrier between layers. What lies
// between two layers of attention needs no other row, so a task is all of it for one chunk of rows, whose activations
// stay with one core; of attention, a task is a tile and KV head. Knows who needs whom; nothing about what tasks do.
//
// A tile needs the chunks that its keys of this step come from, a chunk the tiles with its rows. The order is one of
// rounds: in each, the tiles whose last chunk was that of `lag_` rounds before, then a chunk, and after the last chunk
// the first one of the next layer. Whatever a task needs comes before it, so that the first one that is not done never
// waits; and it comes some rounds before it, so that the others hardly do, even when a thread loses its core for a while.
#pragma once

#include <sched.h>

#include <atomic>
#include <new>

#include "tile_needs.h"

namespace {

// Of a chunk, at most.
constexpr int64_t WAVE_ROWS = 132;
// Rounds between a chunk and its tiles, for each thread, at most: what a chunk wrote should still be in a cache.
constexpr int64_t LAG_OF_THREAD = 2;
constexpr int SPINS_BEFORE_YIELD = 6000;

// Operations [first, last) for every chunk, or one operation of attention for every tile and head of `plan`.
struct WaveStage {
  int64_t first, last;
  const AttentionPlan* plan;  // null: rows
  int64_t heads;
};

struct WaveTask {
  int64_t stage = -1;  // negative: none is left
  int64_t index = 0;   // of the chunk, or tile x head
};

// Where a thread is in the order of tasks: in a round, whose tiles are [tile, tiles_end).
struct WaveCursor {
  int64_t round = 0, before = 0, tile = 0, tiles_end = 0;
};

class Waves {
 public:
  // Stages by turns: rows, attention, rows, and so on, rows at the end. `memory` holds what is done. False: out of memory.
  bool prepare(const WaveStage* stages, int64_t num_stages, int64_t num_rows, int64_t threads, ThreadBuffer& memory,
               ThreadBuffer& writers) {
    stages_ = stages;
    num_stages_ = num_stages;
    constexpr int64_t together = RowChunks::ROWS_TOGETHER;
    const int64_t least = (num_rows + WAVE_ROWS - 1) / WAVE_ROWS, most = (num_rows + together - 1) / together;
    chunks_ = {num_rows, least > threads ? least : threads < most ? threads : most};
    missing_ = (std::atomic<int32_t>*)memory.reserve(num_stages * chunks_.count * (int64_t)sizeof *missing_);
    if (!missing_) return false;
    for (int64_t i = 0; i < num_stages * chunks_.count; ++i) new (missing_ + i) std::atomic<int32_t>(0);
    int64_t beyond = 0;
    for (int64_t s = 0; s < num_stages; ++s) {
      if (stages[s].plan && is_first_with_plan(s)) {
        const int64_t most_beyond = find_tile_needs(*stages[s].plan, chunks_, writers);
        if (most_beyond < 0) return false;
        beyond = std::max(beyond, most_beyond);
      }
      count_missing(s);
    }
    // Tiles with rows of a chunk come before that chunk in the next layer.
    lag_ = std::max<int64_t>(1, std::min({LAG_OF_THREAD * threads, chunks_.count / 2, chunks_.count - beyond}));
    return true;
  }

  WaveTask take(WaveCursor& at) {
    const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    while (at.round < num_rounds() && i >= at.before + num_tiles(at) + 1) go_on(at);
    if (at.round == num_rounds()) return WaveTask();
    const int64_t n = chunks_.count, in_round = i - at.before;
    if (in_round == num_tiles(at)) return {at.round / n * 2, at.round % n};
    const int64_t stage = tile_stage(at);
    return {stage, at.tile * stages_[stage].heads + in_round};
  }

  // Returns when everything that the task needs is done.
  void wait_for_needs(const WaveTask& task) const {
    if (task.stage == 0) return;
    int64_t first = task.index, last = task.index;
    if (stage(task).plan) {
      first = tile_of(task).need_first;
      last = tile_of(task).need_last;
    }
    for (int64_t chunk = first; chunk <= last; ++chunk) wait_for(missing(task.stage - 1, chunk));
  }

  void finish(const WaveTask& task) {
    int64_t first = task.index, last = task.index;
    if (stage(task).plan) {
      first = chunks_.first_of(tile_of(task));
      last = chunks_.last_of(tile_of(task));
    }
    for (int64_t chunk = first; chunk <= last; ++chunk) missing(task.stage, chunk).fetch_sub(1, std::memory_order_release);
  }

  // Whether nothing but the result needs the task: rows at the end, or the attention before them.
  bool is_last(const WaveTask& task) const { return task.stage >= num_stages_ - 2; }
  const WaveStage& stage(const WaveTask& task) const { return stages_[task.stage]; }
  const RowChunks& chunks() const { return chunks_; }
  const Tile& tile_of(const WaveTask& task) const { return stage(task).plan->tiles[task.index / stage(task).heads]; }

 private:
  int64_t num_rounds() const { return (num_stages_ + 1) / 2 * chunks_.count; }
  // Of the tiles of a round, if it has any.
  int64_t tile_stage(const WaveCursor& at) const { return (at.round - lag_) / chunks_.count * 2 + 1; }
  int64_t num_tiles(const WaveCursor& at) const {
    return at.tile == at.tiles_end ? 0 : (at.tiles_end - at.tile) * stages_[tile_stage(at)].heads;
  }

  void go_on(WaveCursor& at) const {
    at.before += num_tiles(at) + 1;
    ++at.round;
    at.tile = at.tiles_end;
    if (at.round < lag_ || tile_stage(at) >= num_stages_) return;
    const int64_t chunk = (at.round - lag_) % chunks_.count;
    if (chunk == 0) at.tile = at.tiles_end = 0;
    const AttentionPlan& plan = *stages_[tile_stage(at)].plan;
    while (at.tiles_end < plan.count && plan.tiles[at.tiles_end].need_last == chunk) ++at.tiles_end;
  }

  std::atomic<int32_t>& missing(int64_t s, int64_t chunk) const { return missing_[s * chunks_.count + chunk]; }

  bool is_first_with_plan(int64_t s) const {
    for (int64_t i = 1; i < s; i += 2)
      if (stages_[i].plan == stages_[s].plan) return false;
    return true;
  }

  // Tasks of the stage that a chunk is in.
  void count_missing(int64_t s) {
    const WaveStage& stage = stages_[s];
    for (int64_t chunk = 0; !stage.plan && chunk < chunks_.count; ++chunk) missing(s, chunk) = 1;
    for (int64_t i = 0; stage.plan && i < stage.plan->count; ++i) {
      const Tile& tile = stage.plan->tiles[i];
      for (int64_t chunk = chunks_.first_of(tile); chunk <= chunks_.last_of(tile); ++chunk)
        missing(s, chunk) += (int32_t)stage.heads;
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
  int64_t num_stages_ = 0, lag_ = 1;
  RowChunks chunks_ = {0, 1};
  std::atomic<int32_t>* missing_ = nullptr;
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace
