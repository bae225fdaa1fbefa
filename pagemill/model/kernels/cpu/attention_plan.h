// Plans the attention of one step and layer: who computes what. It never decides the result: see attention.h.
// Compiled for the baseline, by every unit that shares attention between threads.
#pragma once

#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "thread_buffer.h"

namespace {

// Multiply-adds below which one thread is done before a second one has started.
constexpr int64_t MIN_PARALLEL_WORK = 1 << 19;
// Fewer items than this per thread leave threads idle at the end: then the keys are split as well.
constexpr int64_t MIN_ITEMS_PER_THREAD = 4;
// Partial results beyond this are not worth their memory traffic.
constexpr int64_t MAX_PARTIAL_BYTES = 64 << 20;

int64_t first_segment(const Tile& tile) { return tile.key_begin / SEGMENT_KEYS; }
int64_t num_segments(const Tile& tile) {
  return (tile.key_end + SEGMENT_KEYS - 1) / SEGMENT_KEYS - first_segment(tile);
}

enum TileOrder {
  // Prompts first, their last (longest) tiles first: what is handed out last should be short.
  LONGEST_FIRST,
  AS_IN_BATCH,
};

class AttentionPlan {
 public:
  // `memory` holds the tiles, as long as the plan is used.
  AttentionPlan(const AttentionArgs& args, ThreadBuffer& memory) : args_(args), memory_(memory) {
    group_ = args.layer.num_heads / args.layer.num_kv_heads;
    tile_tokens_ = group_ < TILE_ROWS ? TILE_ROWS / group_ : 1;
  }

  // False: out of memory.
  bool build(TileOrder order = LONGEST_FIRST) {
    const PmBatch& batch = args_.batch;
    const int64_t most = batch.num_tokens / tile_tokens_ + batch.num_requests;
    tiles = (Tile*)memory_.reserve(most * (int64_t)sizeof(Tile));
    if (!tiles) return false;
    for (int64_t r = 0; r < batch.num_requests; ++r)
      if (query_len(r) > 1 || order == AS_IN_BATCH) add_request(r, order);
    for (int64_t r = 0; r < batch.num_requests; ++r)
      if (query_len(r) == 1 && order == LONGEST_FIRST) add_request(r, order);
    return true;
  }

  int64_t partial_floats(const Tile& tile) const { return tile.num_tokens * group_ * (2 + args_.layer.head_size); }

  // Item i of count x heads; negative: none.
  TileHead tile_head(int64_t i, int64_t heads) const {
    return i < 0 ? TileHead() : TileHead{&tiles[i / heads], i % heads};
  }

  Tile* tiles = nullptr;
  int64_t count = 0;
  int64_t segments = 0;  // of all tiles, for one KV head
  int64_t partials = 0;  // floats of all partial results, for one KV head
  int64_t work = 0;      // multiply-adds, roughly

  const PmBatch& batch() const { return args_.batch; }
  bool sees_ahead() const { return args_.layer.ahead > 0; }

 private:
  int64_t query_len(int64_t r) const { return args_.batch.query_start[r + 1] - args_.batch.query_start[r]; }

  void add_request(int64_t r, TileOrder order) {
    const int64_t tokens = query_len(r), context = args_.batch.seq_lens[r] - tokens;
    const int64_t num_tiles = (tokens + tile_tokens_ - 1) / tile_tokens_;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const int64_t first = (order == AS_IN_BATCH ? i : num_tiles - 1 - i) * tile_tokens_;
      const int64_t number = tokens - first < tile_tokens_ ? tokens - first : tile_tokens_;
      const int64_t position = context + first, begin = first_seen(args_.layer, position);
      const int64_t end = seen_end(args_.layer, position + number - 1, args_.batch.seq_lens[r]);
      Tile& tile = tiles[count++];
      tile = {r, args_.batch.query_start[r] + first, number, position, begin, end, partials};
      segments += num_segments(tile);
      partials += num_segments(tile) * partial_floats(tile);
      // Four rows' worth for reading the keys and values.
      work += (tile.key_end - begin) * (number * group_ + 4) * args_.layer.head_size * args_.layer.num_kv_heads;
    }
  }

  const AttentionArgs& args_;
  ThreadBuffer& memory_;
  int64_t group_, tile_tokens_;
};

// Whether there are too few tiles to keep all threads busy, so that keys should be split too.
bool splits_keys(const AttentionPlan& plan, const PmLayer& layer, int64_t threads) {
  const int64_t heads = layer.num_kv_heads;
  const bool few = plan.count * heads < MIN_ITEMS_PER_THREAD * threads && plan.segments > plan.count;
  return threads > 1 && few && plan.partials * heads * (int64_t)sizeof(float) <= MAX_PARTIAL_BYTES;
}

int64_t scratch_stride(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Item i of plan.segments x heads: the segment that it is, counting through all tiles. Items only grow.
class SegmentCursor {
 public:
  SegmentCursor(const AttentionPlan& plan, int64_t heads) : tile_(plan.tiles), heads_(heads) {}

  void seek(int64_t i) {
    const int64_t item = i / heads_;
    head = i % heads_;
    while (item >= before_ + num_segments(*tile_)) before_ += num_segments(*tile_++);
    segment = item - before_;
  }

  const Tile& tile() const { return *tile_; }

  // Where the partial result goes.
  int64_t offset(const AttentionPlan& plan) const {
    return tile_->partial * heads_ + (head * num_segments(*tile_) + segment) * plan.partial_floats(*tile_);
  }

  int64_t head = 0;
  int64_t segment = 0;

 private:
  const Tile* tile_;
  int64_t heads_;
  int64_t before_ = 0;  // segments of the tiles before this one
};


}  // namespace
