// Brings the keys and values of one segment from the blocks of the cache into the panels that gemm_block reads.
// Knows block tables and layouts; nothing about softmax.
#pragma once

#include "gemm_block.h"
#include "kernels.h"

namespace {

// Pointers to the key and value rows of a segment. A key that no row may see points at zeros, so that its memory,
// which may be freed or never written, is not read.
template <class T>
struct SegmentRows {
  const T* keys[SEGMENT_KEYS];
  const T* values[SEGMENT_KEYS];
};

// Segment-relative keys [begin, end) come from the cache, the others of [0, SEGMENT_KEYS) are zero rows.
template <class T>
void find_rows(const AttentionArgs& args, const Tile& tile, int64_t kv_head, int64_t base, int64_t begin, int64_t end,
               const T* zeros, SegmentRows<T>& rows) {
  const PmLayer& layer = args.layer;
  const int64_t block_size = args.batch.block_size;
  const int64_t head_stride = block_size * layer.head_size;
  const int64_t block_stride = args.tensors.block_stride, values_offset = args.tensors.values_offset;
  const T* cache = (const T*)args.tensors.kv_cache;
  const int32_t* table = args.batch.block_table + tile.request * args.batch.block_table_stride;
  for (int64_t i = 0; i < begin; ++i) rows.keys[i] = rows.values[i] = zeros;
  int64_t i = begin;
  while (i < end) {
    const int64_t block = (base + i) / block_size, offset = (base + i) % block_size;
    const int64_t stop = min_of(end, i + block_size - offset);
    const T* key = cache + table[block] * block_stride + kv_head * head_stride + offset * layer.head_size;
    for (; i < stop; ++i, key += layer.head_size) {
      rows.keys[i] = key;
      rows.values[i] = key + values_offset;
    }
  }
  for (; i < SEGMENT_KEYS; ++i) rows.keys[i] = rows.values[i] = zeros;
}

// Blocks lie anywhere, so the CPU does not guess which comes next; it is told this many bytes early, to bring them to the
// second-level cache: on the way to the first they would take up the few slots for loads that miss.
constexpr int64_t PREFETCH_BYTES = 8192;

template <class T>
int64_t keys_ahead(int64_t head_size) {
  return round_up(ceil_div(PREFETCH_BYTES, head_size * (int64_t)sizeof(T)), LANES);
}

template <class T>
PM_INLINE void prefetch_row(const T* row, int64_t head_size) {
  for (int64_t d = 0; d < head_size; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// LANES lanes of a row from element d on, zero beyond the row: float32 each, or pairs of bfloat16.
template <class Dot, class T>
PM_INLINE vu load_lanes(const T* row, int64_t d, int64_t size) {
  constexpr int64_t elements = LANES * Dot::PACK;
  if constexpr (Dot::PACK == 1) return (vu)load(row + d, min_of(LANES, size - d));
  if (d + elements <= size) return load_raw<vu>(row + d);
  vu lanes = {};
  memcpy((void*)&lanes, row + d, (size - d) * sizeof(T));
  return lanes;
}

// Keys as B of the score product: lane n of step k holds element(s) k of key n. Keys [begin, end), whole vectors.
template <class Dot, class T>
void pack_keys(const SegmentRows<T>& rows, int64_t head_size, int64_t begin, int64_t end, uint32_t* out) {
  const int64_t steps = ceil_div(head_size, Dot::PACK);
  const int64_t ahead = keys_ahead<T>(head_size);
  for (int64_t first = begin; first < end; first += LANES) {
    // Behind the last key come the first values.
    const int64_t next = first + ahead;
    const T* const* upcoming = next < end ? rows.keys + next : rows.values + min_of(begin + next - end, end - LANES);
    for (int i = 0; i < LANES; ++i) prefetch_row(upcoming[i], head_size);
    uint32_t* column = out + first / PANEL * steps * PANEL + first % PANEL;
    for (int64_t k = 0; k < steps; k += LANES) {
      vu square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) square[i] = load_lanes<Dot>(rows.keys[first + i], k * Dot::PACK, head_size);
      transpose(square);
      const int64_t count = min_of(LANES, steps - k);
      for (int64_t i = 0; i < count; ++i) memcpy(column + (k + i) * PANEL, &square[i], sizeof(vu));
    }
  }
}

// Values as B of the output product: lane n of step k holds element n of key k (of keys 2k and 2k + 1 when paired).
// `upcoming`: the keys that are packed next, as many as values here.
template <class Dot, class T>
void pack_values(const SegmentRows<T>& rows, int64_t head_size, int64_t begin, int64_t end, const T* const* upcoming,
                 uint32_t* out) {
  constexpr int64_t panel_stride = SEGMENT_KEYS / Dot::PACK * PANEL;
  const int64_t ahead = keys_ahead<T>(head_size);
  for (int64_t key = begin; key < end; key += Dot::PACK) {
    for (int64_t i = key + ahead; i < key + ahead + Dot::PACK; ++i)
      prefetch_row(i < end ? rows.values[i] : upcoming[min_of(i - end, SEGMENT_KEYS - 1)], head_size);
    uint32_t* row = out + key / Dot::PACK * PANEL;
    for (int64_t d = 0; d < head_size; d += LANES * Dot::PACK) {
      uint32_t* to = row + d / PANEL * panel_stride + d % PANEL;
      Dot::store_values(load_lanes<Dot>(rows.values[key], d, head_size),
                        load_lanes<Dot>(rows.values[key + Dot::PACK - 1], d, head_size), to);
    }
  }
}

}  // namespace
