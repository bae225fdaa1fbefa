// Plans the attention of one step and layer and shares it between threads. Compiled for the baseline.
//
// The plan decides who computes what, never the result: see attention.h.
#include <cstdlib>
#include <cstring>

#include "parallel.h"
#include "selected.h"

namespace {

// Multiply-adds below which one thread is done before a second one has started.
constexpr int64_t MIN_PARALLEL_WORK = 1 << 19;
// Fewer items than this per thread leave threads idle at the end: then the keys are split as well.
constexpr int64_t MIN_ITEMS_PER_THREAD = 4;
// Partial results beyond this are not worth their memory traffic.
constexpr int64_t MAX_PARTIAL_BYTES = 64 << 20;

// Memory that grows and is kept by the calling thread: no allocation in the steady state.
class Buffer {
 public:
  ~Buffer() { free(memory_); }

  // Null when there is no memory.
  void* reserve(int64_t bytes) {
    if (bytes <= bytes_) return memory_;
    free(memory_);
    bytes_ = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    memory_ = aligned_alloc(4096, (size_t)bytes_);
    if (!memory_) bytes_ = 0;
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t bytes_ = 0;
};

thread_local Buffer tile_memory, scratch_memory, partial_memory;

int64_t first_segment(const Tile& tile) { return tile.key_begin / SEGMENT_KEYS; }
int64_t num_segments(const Tile& tile) {
  return (tile.key_end + SEGMENT_KEYS - 1) / SEGMENT_KEYS - first_segment(tile);
}

class Plan {
 public:
  explicit Plan(const AttentionArgs& args) : args_(args) {
    group_ = args.layer.num_heads / args.layer.num_kv_heads;
    tile_tokens_ = group_ < TILE_ROWS ? TILE_ROWS / group_ : 1;
  }

  // False: out of memory.
  bool build() {
    const PmBatch& batch = args_.batch;
    const int64_t most = batch.num_tokens / tile_tokens_ + batch.num_requests;
    tiles = (Tile*)tile_memory.reserve(most * (int64_t)sizeof(Tile));
    if (!tiles) return false;
    // Prompts first, their last (longest) tiles first: what is handed out last should be short.
    for (int64_t r = 0; r < batch.num_requests; ++r)
      if (query_len(r) > 1) add_request(r);
    for (int64_t r = 0; r < batch.num_requests; ++r)
      if (query_len(r) == 1) add_request(r);
    return true;
  }

  int64_t partial_floats(const Tile& tile) const { return tile.num_tokens * group_ * (2 + args_.layer.head_size); }

  Tile* tiles = nullptr;
  int64_t count = 0;
  int64_t segments = 0;  // of all tiles, for one KV head
  int64_t partials = 0;  // floats of all partial results, for one KV head
  int64_t work = 0;      // multiply-adds, roughly

 private:
  int64_t query_len(int64_t r) const { return args_.batch.query_start[r + 1] - args_.batch.query_start[r]; }

  void add_request(int64_t r) {
    const int64_t tokens = query_len(r), context = args_.batch.seq_lens[r] - tokens;
    for (int64_t first = (tokens - 1) / tile_tokens_ * tile_tokens_; first >= 0; first -= tile_tokens_) {
      const int64_t number = tokens - first < tile_tokens_ ? tokens - first : tile_tokens_;
      const int64_t position = context + first, begin = first_seen(args_.layer, position);
      Tile& tile = tiles[count++];
      tile = {r, args_.batch.query_start[r] + first, number, position, begin, position + number, partials};
      segments += num_segments(tile);
      partials += num_segments(tile) * partial_floats(tile);
      // Four rows' worth for packing the keys and values.
      work += (tile.key_end - begin) * (number * group_ + 4) * args_.layer.head_size * args_.layer.num_kv_heads;
    }
  }

  const AttentionArgs& args_;
  int64_t group_, tile_tokens_;
};

void write_first(const AttentionArgs& args, int64_t threads) {
  if (!args.tensors.key) return;
  const int64_t bytes = args.batch.num_tokens * args.layer.num_kv_heads * args.layer.head_size * 8;
  share_evenly(args.batch.num_tokens, bytes, threads,
               [&](int64_t begin, int64_t end) { selected->write_kv(args, begin, end); });
}

int attend_whole_tiles(const AttentionArgs& args, const Plan& plan, int64_t threads) {
  const int64_t bytes = (selected->attention_scratch_bytes(args) + 4095) / 4096 * 4096;
  char* scratch = (char*)scratch_memory.reserve(bytes * threads);
  if (!scratch) return 1;
  const int64_t heads = args.layer.num_kv_heads;
  WorkQueue items(plan.count * heads);
  const auto work = [&](int64_t rank) {
    items.run([&](int64_t i) { selected->attend(args, plan.tiles[i / heads], i % heads, scratch + rank * bytes); });
  };
  if (threads == 1) {
    work(0);
    return 0;
  }
#pragma omp parallel num_threads((int)threads)
  work(omp_get_thread_num());
  return 0;
}

// Item i of plan.segments: the i-th segment, counting through all tiles.
int attend_split_keys(const AttentionArgs& args, const Plan& plan, int64_t threads) {
  const int64_t bytes = (selected->attention_scratch_bytes(args) + 4095) / 4096 * 4096;
  char* scratch = (char*)scratch_memory.reserve(bytes * threads);
  float* partials = (float*)partial_memory.reserve(plan.partials * args.layer.num_kv_heads * (int64_t)sizeof(float));
  if (!scratch || !partials) return 1;
  const int64_t heads = args.layer.num_kv_heads;
  WorkQueue segments(plan.segments * heads), merges(plan.count * heads);
#pragma omp parallel num_threads((int)threads)
  {
    char* own = scratch + omp_get_thread_num() * bytes;
    const Tile* tile = plan.tiles;
    int64_t before = 0;  // segments of the tiles before `tile`; items only grow, so both move forward
    segments.run([&](int64_t i) {
      const int64_t item = i / heads, head = i % heads;
      while (item >= before + num_segments(*tile)) before += num_segments(*tile++);
      const int64_t segment = item - before, floats = plan.partial_floats(*tile);
      float* to = partials + tile->partial * heads + (head * num_segments(*tile) + segment) * floats;
      selected->attend_segment(args, *tile, head, first_segment(*tile) + segment, own, to);
    });
#pragma omp barrier
    merges.run([&](int64_t i) {
      const Tile& merged = plan.tiles[i / heads];
      const int64_t head = i % heads, floats = plan.partial_floats(merged);
      const float* from = partials + merged.partial * heads + head * num_segments(merged) * floats;
      selected->merge_segments(args, merged, head, from, own);
    });
  }
  return 0;
}

}  // namespace

int pm_attention(void* out, const void* query, const void* key, const void* value, void* kv_cache, int64_t query_stride,
                 int64_t key_stride, int64_t value_stride, int64_t values_offset, int64_t block_stride, int64_t dtype,
                 const PmBatch* batch, const PmLayer* layer, int64_t threads) {
  const PmTensors tensors = {out,        query,        key,           value,        kv_cache, query_stride,
                             key_stride, value_stride, values_offset, block_stride, dtype};
  const AttentionArgs args = {tensors, *batch, *layer};
  write_first(args, threads);
  Plan plan(args);
  if (!plan.build()) return 1;
  if (threads < 1 || plan.work < MIN_PARALLEL_WORK) threads = 1;
  const int64_t heads = layer->num_kv_heads;
  const bool few = plan.count * heads < MIN_ITEMS_PER_THREAD * threads && plan.segments > plan.count;
  if (threads > 1 && few && plan.partials * heads * (int64_t)sizeof(float) <= MAX_PARTIAL_BYTES)
    return attend_split_keys(args, plan, threads);
  return attend_whole_tiles(args, plan, threads);
}
