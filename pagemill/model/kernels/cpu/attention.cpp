// Shares the attention of one step and layer between threads. Compiled for the baseline.
#include "attention_plan.h"
#include "parallel.h"
#include "selected.h"

namespace {

thread_local ThreadBuffer tile_memory, scratch_memory, partial_memory;

void write_first(const AttentionArgs& args, int64_t threads) {
  if (!args.tensors.key) return;
  const int64_t bytes = args.batch.num_tokens * args.layer.num_kv_heads * args.layer.head_size * 8;
  share_evenly(args.batch.num_tokens, bytes, threads,
               [&](int64_t begin, int64_t end) { selected->write_kv(args, begin, end); });
}

int attend_whole_tiles(const AttentionArgs& args, const AttentionPlan& plan, int64_t threads) {
  const int64_t bytes = scratch_stride(selected->attention_scratch_bytes(args));
  char* scratch = (char*)scratch_memory.reserve(bytes * threads);
  if (!scratch) return 1;
  const int64_t heads = args.layer.num_kv_heads;
  WorkQueue items(plan.count * heads);
  const auto work = [&](int64_t rank) {
    items.run_ahead([&](int64_t i, int64_t next) {
      selected->attend(args, plan.tiles[i / heads], i % heads, plan.tile_head(next, heads), scratch + rank * bytes);
    });
  };
  if (threads == 1) {
    work(0);
    return 0;
  }
#pragma omp parallel num_threads((int)threads)
  work(omp_get_thread_num());
  return 0;
}

int attend_split_keys(const AttentionArgs& args, const AttentionPlan& plan, int64_t threads) {
  const int64_t bytes = scratch_stride(selected->attention_scratch_bytes(args));
  char* scratch = (char*)scratch_memory.reserve(bytes * threads);
  float* partials = (float*)partial_memory.reserve(plan.partials * args.layer.num_kv_heads * (int64_t)sizeof(float));
  if (!scratch || !partials) return 1;
  const int64_t heads = args.layer.num_kv_heads;
  WorkQueue segments(plan.segments * heads), merges(plan.count * heads);
#pragma omp parallel num_threads((int)threads)
  {
    char* own = scratch + omp_get_thread_num() * bytes;
    SegmentCursor at(plan, heads);
    segments.run([&](int64_t i) {
      at.seek(i);
      selected->attend_segment(args, at.tile(), at.head, first_segment(at.tile()) + at.segment, own,
                               partials + at.offset(plan));
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
                 int64_t kv_dtype, const PmBatch* batch, const PmLayer* layer, int64_t threads) {
  const PmTensors tensors = {out,        query,        key,           value,        kv_cache, query_stride,
                             key_stride, value_stride, values_offset, block_stride, dtype, kv_dtype};
  const AttentionArgs args = {tensors, *batch, *layer};
  write_first(args, threads);
  AttentionPlan plan(args, tile_memory);
  if (!plan.build()) return 1;
  if (threads < 1 || plan.work < MIN_PARALLEL_WORK) threads = 1;
  return splits_keys(plan, *layer, threads) ? attend_split_keys(args, plan, threads)
                                            : attend_whole_tiles(args, plan, threads);
}
