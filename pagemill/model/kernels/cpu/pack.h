// Packs the keys and values of one segment for gemm_block, where the cache does not have them as it reads them.
// Knows about rows of keys and values; nothing about softmax.
#pragma once

#include "gemm_block.h"
#include "kernels.h"

namespace {

// Pointers to the key and value rows of a segment.
template <class T>
struct SegmentRows {
  const T* keys[SEGMENT_KEYS];
  const T* values[SEGMENT_KEYS];
};

// Blocks lie anywhere, so the CPU does not guess which comes next; it is told this many bytes early.
constexpr int64_t PREFETCH_BYTES = 8192;

template <class T>
int64_t keys_ahead(int64_t head_size) {
  return round_up(ceil_div(PREFETCH_BYTES, head_size * (int64_t)sizeof(T)), LANES);
}

template <class T>
PM_INLINE void prefetch_row(const T* row, int64_t head_size) {
  for (int64_t d = 0; d < head_size; d += 64 / (int64_t)sizeof(T)) prefetch_line(row + d);
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

// Keys as B of the score product: lane n of step k holds element(s) k of key n. Keys [begin, end), whole vectors, each
// [steps][LANES].
template <class Dot, class T>
void pack_keys(const SegmentRows<T>& rows, int64_t head_size, int64_t begin, int64_t end, uint32_t* out) {
  const int64_t steps = ceil_div(head_size, Dot::PACK);
  const int64_t ahead = keys_ahead<T>(head_size);
  for (int64_t first = begin; first < end; first += LANES) {
    // Behind the last key come the first values.
    const int64_t next = first + ahead;
    const T* const* upcoming = next < end ? rows.keys + next : rows.values + min_of(begin + next - end, end - LANES);
    for (int i = 0; i < LANES; ++i) prefetch_row(upcoming[i], head_size);
    uint32_t* column = out + first * steps;
    for (int64_t k = 0; k < steps; k += LANES) {
      vu square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) square[i] = load_lanes<Dot>(rows.keys[first + i], k * Dot::PACK, head_size);
      transpose(square);
      const int64_t count = min_of(LANES, steps - k);
      for (int64_t i = 0; i < count; ++i) memcpy(column + (k + i) * LANES, &square[i], sizeof(vu));
    }
  }
}

// Values as B of the output product: lane n of step k holds element n of key k (of keys 2k and 2k + 1 when paired).
// A step is `stride` lanes. `upcoming`: the keys that are packed next, as many as values here.
template <class Dot, class T>
void pack_values(const SegmentRows<T>& rows, int64_t head_size, int64_t begin, int64_t end, const T* const* upcoming,
                 uint32_t* out, int64_t stride) {
  const int64_t ahead = keys_ahead<T>(head_size);
  for (int64_t key = begin; key < end; key += Dot::PACK) {
    for (int64_t i = key + ahead; i < key + ahead + Dot::PACK; ++i)
      prefetch_row(i < end ? rows.values[i] : upcoming[min_of(i - end, SEGMENT_KEYS - 1)], head_size);
    uint32_t* row = out + key / Dot::PACK * stride;
    for (int64_t d = 0; d < head_size; d += LANES * Dot::PACK)
      Dot::store_values(load_lanes<Dot>(rows.values[key], d, head_size),
                        load_lanes<Dot>(rows.values[key + Dot::PACK - 1], d, head_size), row + d);
  }
}

// Pairs of bfloat16 as two vectors of float32: the elements that lie first, and those that lie second.
PM_INLINE void widen_pairs(const uint32_t* pairs, uint32_t* first, uint32_t* second) {
  const vu both = load_raw<vu>(pairs), low = both << 16, high = both & 0xffff0000u;
  memcpy(first, &low, sizeof low);
  memcpy(second, &high, sizeof high);
}

}  // namespace
