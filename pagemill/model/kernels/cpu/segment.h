// Finds the keys and values of one segment in the blocks of the cache, as gemm_block reads them.
// Knows block tables and the layouts of the cache; nothing about softmax.
//
// What a head has in a block is its keys in one piece and its values in another, in one of these layouts:
// - Where block_size and head_size are multiples of MAX_LANES (nearly always), as the products read them. float32: keys
//   [head_size][block_size], values [block_size][head_size]. bfloat16, whose dot products take pairs: keys
//   [head_size / 2][block_size][2], values [block_size / 2][head_size][2].
//   int8: keys [head_size / 4][block_size][4], values [block_size / 4][head_size][4]; behind either [block_size] float32,
//   the scales of the tokens.
// - Otherwise, and where keys are values too, rows, [block_size][head_size] both, which are packed every time. Not for
//   int8.
#pragma once

#include "kv_bytes.h"
#include "pack.h"

namespace {

// Lanes of the widest vectors: the layout is the same for all instruction sets.
constexpr int64_t MAX_LANES = 16;

inline bool in_rows(const AttentionArgs& args) {
  return args.batch.block_size % MAX_LANES != 0 || args.layer.head_size % MAX_LANES != 0 || !args.tensors.values_offset;
}

// Elements of T that a head has in a block, of keys or of values: int8 has scales behind them.
template <class T>
int64_t head_elements(const AttentionArgs& args) {
  const int64_t scale_bytes = sizeof(T) == 1 ? (int64_t)sizeof(float) : 0;
  return args.batch.block_size * (args.layer.head_size + scale_bytes);
}

// Half-open range of keys, relative to a segment.
struct KeyRange {
  int64_t begin, end;
};

constexpr int64_t SEGMENT_VECTORS = SEGMENT_KEYS / LANES;

// What the products of a segment read.
struct SegmentView {
  const uint32_t* keys[SEGMENT_VECTORS];                              // of each vector of keys
  const uint32_t* ahead[SEGMENT_VECTORS];                             // what to fetch meanwhile
  const uint32_t* values[SEGMENT_KEYS + RowPointers::STEPS_AHEAD];  // of each step
  int64_t key_stride;
  // Of each vector of keys, where the cache has int8.
  const float* key_scales[SEGMENT_VECTORS];
  const float* value_scales[SEGMENT_VECTORS];
};

// The same of the blocks themselves: a lane is one element of float32, a pair of bfloat16 or four of int8.
struct BlockView : SegmentView {
  // Keys and values of each vector of keys, in one piece each, where a block is one vector; else about there.
  const uint32_t* key_pieces[SEGMENT_VECTORS];
  const uint32_t* value_pieces[SEGMENT_VECTORS];
  int64_t first, last;  // vectors
};

// Working space: packed keys and values, a row of zeros, two steps of values.
struct SegmentMemory {
  uint32_t *keys, *values, *edges;
  float* zeros;
  int64_t value_stride;
};

// The segments of one tile and KV head, in order. `Dot` is what they are multiplied with, T their type in the cache.
template <class Dot, class T>
class SegmentReader {
 public:
  // `next` is read by another reader after this one, and its beginning fetched meanwhile.
  SegmentReader(const AttentionArgs& args, TileHead of, TileHead next, const SegmentMemory& memory)
      : args_(args), of_(of), next_(next), memory_(memory), in_rows_(in_rows(args)), size_(args.layer.head_size) {
    if (in_rows_) memset(memory_.zeros, 0, size_ * sizeof(float));
  }

  // Valid until the next call; segments are read one after the other.
  const SegmentView& read(int64_t segment) {
    if constexpr (sizeof(T) > 1)
      if (in_rows_) return read_rows(segment);
    BlockView& view = blocks_[segment % 2];
    BlockView& next = blocks_[(segment + 1) % 2];
    if (found_ != segment) find_blocks(of_, segment, view);
    found_ = segment + 1;
    const bool is_last = found_ * SEGMENT_KEYS >= of_.tile->key_end;
    if (is_last && next_.tile) find_blocks(next_, next_.tile->key_begin / SEGMENT_KEYS, next);
    else find_blocks(of_, found_, next);
    look_ahead(view, next);
    if constexpr (Dot::PACK != CACHE_PACK) return widen(view);
    hide_edges(segment, view);
    return view;
  }

 private:
  // Elements of the cache in a lane.
  static constexpr int64_t CACHE_PACK = 4 / sizeof(T);

  // The keys of a segment that any row of the tile sees. May be empty.
  static KeyRange seen(const Tile& tile, int64_t segment) {
    const int64_t base = segment * SEGMENT_KEYS;
    return {max_of(tile.key_begin - base, 0), min_of(tile.key_end - base, SEGMENT_KEYS)};
  }
  KeyRange seen(int64_t segment) const { return seen(*of_.tile, segment); }

  const int32_t* table_of(TileHead of) const {
    return args_.batch.block_table + of.tile->request * args_.batch.block_table_stride;
  }
  const T* cache_of(TileHead of) const {
    return (const T*)args_.tensors.kv_cache + of.kv_head * head_elements<T>(args_);
  }

  void find_blocks(TileHead of, int64_t segment, BlockView& view) const {
    const KeyRange keys = seen(*of.tile, segment);
    const int32_t* table = table_of(of);
    const T* cache = cache_of(of);
    const int64_t block_size = args_.batch.block_size, base = segment * SEGMENT_KEYS;
    view.key_stride = block_size;
    view.first = keys.begin / LANES;
    view.last = max_of(view.first, ceil_div(keys.end, LANES));
    int64_t v = view.first;
    while (v < view.last) {
      const int64_t block = (base + v * LANES) / block_size, offset = (base + v * LANES) % block_size;
      const T* part = cache + table[block] * args_.tensors.block_stride;
      const T* value_part = part + args_.tensors.values_offset;
      for (int64_t at = offset; at < block_size && v < view.last; at += LANES, ++v) {
        view.keys[v] = (const uint32_t*)part + at;
        view.key_pieces[v] = (const uint32_t*)(part + at * size_);
        view.value_pieces[v] = (const uint32_t*)(value_part + at * size_);
        constexpr int64_t STEPS = LANES / CACHE_PACK;
        for (int64_t k = 0; k < STEPS; ++k) view.values[v * STEPS + k] = view.value_pieces[v] + k * size_;
        if constexpr (sizeof(T) == 1) {
          view.key_scales[v] = (const float*)(part + block_size * size_) + at;
          view.value_scales[v] = (const float*)(value_part + block_size * size_) + at;
          prefetch_line(view.key_scales[v]);
          prefetch_line(view.value_scales[v]);
        }
      }
    }
  }

  // While keys are multiplied the next ones are fetched, then the first values; while values are, the next ones, then
  // the first keys of the next segment.
  void look_ahead(BlockView& view, const BlockView& next) const {
    for (int64_t v = view.first; v < view.last; ++v) {
      const int64_t later = v + MAX_VECTORS;
      view.ahead[v] = later < view.last ? view.key_pieces[later]
                                        : view.value_pieces[min_of(view.first + later - view.last, view.last - 1)];
    }
    constexpr int64_t STEPS = LANES / CACHE_PACK;
    const uint32_t** rest = view.values + view.last * STEPS;
    for (int64_t k = 0; k < RowPointers::STEPS_AHEAD; ++k) {
      const int64_t v = next.first + k / STEPS;
      rest[k] = v < next.last ? next.key_pieces[v] + k % STEPS * size_ : rest[-1];
    }
  }

  // A pair of which one key is not seen by the tile becomes a copy without it: it may be anything, and zero times NaN is
  // NaN.
  void hide_edges(int64_t segment, BlockView& view) const {
    if constexpr (CACHE_PACK == 2) {
      const KeyRange keys = seen(segment);
      if (keys.begin % 2) hide_half(view.values[keys.begin / 2], 0xffff0000u, memory_.edges);
      if (keys.end % 2) hide_half(view.values[keys.end / 2], 0x0000ffffu, memory_.edges + size_);
    }
  }

  void hide_half(const uint32_t*& step, uint32_t kept, uint32_t* copy) const {
    for (int64_t d = 0; d < size_; d += LANES) {
      const vu lanes = load_raw<vu>(step + d) & kept;
      memcpy(copy + d, &lanes, sizeof lanes);
    }
    step = copy;
  }

  // To float32, where there is no product of pairs or bytes.
  const SegmentView& widen(const BlockView& view) {
    if constexpr (sizeof(T) == 1) widen_bytes(view);
    if constexpr (sizeof(T) == 2) widen_pairs(view);
    return point_at_packed(view.first, view.last);
  }

  void widen_bytes(const BlockView& view) {
    const int64_t stride = memory_.value_stride;
    constexpr int64_t STEPS = LANES / CACHE_PACK;
    for (int64_t v = view.first; v < view.last; ++v) {
      uint32_t* column = memory_.keys + v * LANES * size_;
      const vf scales = load(view.key_scales[v]);
      for (int64_t k = 0; k < size_ / 4; ++k) {
        prefetch_line(view.ahead[v] + k * LANES);
        const vu lanes = load_raw<vu>(view.keys[v] + k * view.key_stride);
        for (int i = 0; i < 4; ++i) store((float*)column + (4 * k + i) * LANES, byte_of_lanes(lanes, i) * scales);
      }
    }
    for (int64_t k = view.first * STEPS; k < view.last * STEPS; ++k) {
      float* row = (float*)memory_.values + 4 * k * stride;
      const float* scales = view.value_scales[k / STEPS] + k % STEPS * 4;
      for (int64_t d = 0; d < size_; d += LANES) {
        prefetch_line(view.values[k + RowPointers::STEPS_AHEAD] + d);
        const vu lanes = load_raw<vu>(view.values[k] + d);
        for (int i = 0; i < 4; ++i) store(row + i * stride + d, byte_of_lanes(lanes, i) * splat(scales[i]));
      }
    }
  }

  void widen_pairs(const BlockView& view) {
    for (int64_t v = view.first; v < view.last; ++v) {
      uint32_t* column = memory_.keys + v * LANES * size_;
      for (int64_t k = 0; k < size_ / 2; ++k) {
        prefetch_line(view.ahead[v] + k * LANES);
        ::widen_pairs(view.keys[v] + k * view.key_stride, column + 2 * k * LANES, column + (2 * k + 1) * LANES);
      }
    }
    const int64_t stride = memory_.value_stride;
    for (int64_t k = view.first * LANES / 2; k < view.last * LANES / 2; ++k) {
      uint32_t* row = memory_.values + 2 * k * stride;
      for (int64_t d = 0; d < size_; d += LANES) {
        prefetch_line(view.values[k + RowPointers::STEPS_AHEAD] + d);
        ::widen_pairs(view.values[k] + d, row + d, row + stride + d);
      }
    }
  }

  const SegmentView& read_rows(int64_t segment) {
    SegmentRows<T>& rows = rows_[segment % 2];
    SegmentRows<T>& next = rows_[(segment + 1) % 2];
    if (found_ != segment) find_rows(segment, rows);
    // Beyond the last segment all rows are zeros, and fetching those again costs nothing.
    find_rows(segment + 1, next);
    found_ = segment + 1;
    const KeyRange keys = seen(segment);
    const int64_t first = keys.begin / LANES * LANES, last = round_up(keys.end, LANES);
    pack_keys<Dot>(rows, size_, first, last, memory_.keys);
    pack_values<Dot>(rows, size_, first, last, next.keys, memory_.values, memory_.value_stride);
    return point_at_packed(first / LANES, last / LANES);
  }

  // Keys that no row of the tile sees are rows of zeros: their memory, which may be free or never written, is not read.
  void find_rows(int64_t segment, SegmentRows<T>& rows) const {
    const KeyRange keys = seen(segment);
    const int64_t block_size = args_.batch.block_size, base = segment * SEGMENT_KEYS;
    const int32_t* table = table_of(of_);
    const T* cache = cache_of(of_);
    int64_t i = 0;
    for (; i < keys.begin; ++i) rows.keys[i] = rows.values[i] = (const T*)memory_.zeros;
    while (i < keys.end) {
      const int64_t block = (base + i) / block_size, offset = (base + i) % block_size;
      const int64_t stop = min_of(keys.end, i + block_size - offset);
      const T* key = cache + table[block] * args_.tensors.block_stride + offset * size_;
      for (; i < stop; ++i, key += size_) {
        rows.keys[i] = key;
        rows.values[i] = key + args_.tensors.values_offset;
      }
    }
    for (; i < SEGMENT_KEYS; ++i) rows.keys[i] = rows.values[i] = (const T*)memory_.zeros;
  }

  // Vectors [first, last) are packed. They have been brought here, so there is nothing to fetch.
  const SegmentView& point_at_packed(int64_t first, int64_t last) {
    constexpr int64_t STEPS = LANES / Dot::PACK;
    packed_.key_stride = LANES;
    for (int64_t v = first; v < last; ++v)
      packed_.keys[v] = packed_.ahead[v] = memory_.keys + v * LANES * ceil_div(size_, Dot::PACK);
    for (int64_t k = first * STEPS; k < last * STEPS + RowPointers::STEPS_AHEAD; ++k)
      packed_.values[k] = memory_.values + min_of(k, last * STEPS - 1) * memory_.value_stride;
    return packed_;
  }

  const AttentionArgs& args_;
  const TileHead of_, next_;
  const SegmentMemory memory_;
  const bool in_rows_;
  const int64_t size_;
  int64_t found_ = -1;
  // Of one segment and of the next, by turns.
  BlockView blocks_[2];
  SegmentRows<T> rows_[2];
  SegmentView packed_;
};

}  // namespace
