// Which chunks of a step's rows the keys of each tile of attention come from. Those of its own request, and of another
// where both share blocks that this very step fills, in whichever order they stand in the batch. Knows nothing about
// threads.
#pragma once

#include <algorithm>

#include "attention_plan.h"

namespace {

// Consecutive rows of a step, cut into chunks that begin at multiples of ROWS_TOGETHER, which kernels take at a time.
struct RowChunks {
  static constexpr int64_t ROWS_TOGETHER = 12;
  int64_t num_rows, count;

  int64_t begin(int64_t chunk) const {
    const int64_t row = (num_rows * chunk / count + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
    return row < num_rows ? row : num_rows;
  }

  int64_t of(int64_t row) const {
    int64_t chunk = row * count / num_rows;
    while (begin(chunk) > row) --chunk;
    while (begin(chunk + 1) <= row) ++chunk;
    return chunk;
  }

  int64_t first_of(const Tile& tile) const { return of(tile.token); }
  int64_t last_of(const Tile& tile) const { return of(tile.token + tile.num_tokens - 1); }
};

// The chunk that fills each block of the cache in this step.
class BlockWriters {
 public:
  // False: out of memory.
  bool prepare(const PmBatch& batch, const RowChunks& chunks, ThreadBuffer& memory) {
    int64_t last = -1;
    for (int64_t t = 0; t < batch.num_tokens; ++t) last = std::max(last, batch.slot_mapping[t]);
    num_blocks_ = last / batch.block_size + 1;
    writer_ = (int32_t*)memory.reserve(num_blocks_ * (int64_t)sizeof(int32_t) + 1);
    if (!writer_) return false;
    std::fill(writer_, writer_ + num_blocks_, -1);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk)
      for (int64_t t = chunks.begin(chunk); t < chunks.begin(chunk + 1); ++t)
        if (batch.slot_mapping[t] >= 0) writer_[batch.slot_mapping[t] / batch.block_size] = (int32_t)chunk;
    return true;
  }

  bool is_prepared() const { return writer_ != nullptr; }
  // Negative: none.
  int32_t of(int32_t block) const { return block < num_blocks_ ? writer_[block] : -1; }

 private:
  int64_t num_blocks_ = 0;
  int32_t* writer_ = nullptr;
};

// Chunks that write what a request finds in the cache: what its first tile sees before its own tokens.
struct CachedNeeds {
  int32_t first = INT32_MAX, last = -1;

  CachedNeeds(const PmBatch& batch, const Tile& tile, const BlockWriters& writers) {
    const int32_t* blocks = batch.block_table + tile.request * batch.block_table_stride;
    for (int64_t i = tile.key_begin / batch.block_size; i * batch.block_size < tile.position; ++i) {
      const int32_t writer = writers.of(blocks[i]);
      if (writer < 0) continue;
      first = std::min(first, writer);
      last = std::max(last, writer);
    }
  }
};

// Writes what the tiles of a plan, as in the batch, need into them, and brings them into the order of the last chunk of
// that. Returns by how many chunks a tile needs one beyond that of its first row, at most; negative: out of memory.
int64_t find_tile_needs(const AttentionPlan& plan, const RowChunks& chunks, ThreadBuffer& memory) {
  const PmBatch& batch = plan.batch();
  BlockWriters writers;
  int64_t most = 0;
  for (int64_t i = 0, next; i < plan.count; i = next) {
    const int64_t request = plan.tiles[i].request;
    // The first request that finds anything in the cache.
    if (plan.tiles[i].position > 0 && !writers.is_prepared() && !writers.prepare(batch, chunks, memory)) return -1;
    const CachedNeeds cached(batch, plan.tiles[i], writers);
    const int32_t own = (int32_t)chunks.of(batch.query_start[request]);
    for (next = i; next < plan.count && plan.tiles[next].request == request; ++next) {
      Tile& tile = plan.tiles[next];
      tile.need_first = std::min(own, cached.first);
      // Where tokens see others behind them, all of a request: layers then take turns with one another's memory.
      const int64_t last = plan.sees_ahead() ? batch.query_start[request + 1] - 1 : tile.token + tile.num_tokens - 1;
      tile.need_last = std::max((int32_t)chunks.of(last), cached.last);
      most = std::max(most, tile.need_last - chunks.first_of(tile));
    }
  }
  std::sort(plan.tiles, plan.tiles + plan.count, [](const Tile& a, const Tile& b) {
    return a.need_last != b.need_last ? a.need_last < b.need_last : a.token < b.token;
  });
  return most;
}

}  // namespace
