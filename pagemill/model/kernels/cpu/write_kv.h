// Writes keys and values of tokens to their slots of the cache, in the layouts that segment.h describes.
// Knows nothing about attention.
#pragma once

#include "segment.h"

namespace {

// Elements of the longest head that an int8 cache takes: the backend refuses longer ones.
constexpr int64_t MAX_BYTES_HEAD = 1024;

// Two tokens of a pair may be written by two threads: only the elements of the token itself are stored, never the lanes.

// One head of one token: keys and values point at what the head has in the block.
PM_INLINE void write_token(const float* key, const float* value, int64_t offset, int64_t block_size, int64_t size,
                           float* keys, float* values) {
  for (int64_t d = 0; d < size; ++d) keys[d * block_size + offset] = key[d];
  memcpy(values + offset * size, value, size * sizeof(float));
}

PM_INLINE void write_token(const bf16* key, const bf16* value, int64_t offset, int64_t block_size, int64_t size,
                           bf16* keys, bf16* values) {
  for (int64_t p = 0; p < size / 2; ++p) memcpy((void*)(keys + (p * block_size + offset) * 2), key + 2 * p, 4);
  bf16* at = values + offset / 2 * 2 * size + offset % 2;
  for (int64_t d = 0; d < size; ++d) at[2 * d] = value[d];
}

// Keys of LANES tokens at once, from `offset` on: a lane is an element of float32 or a pair of bfloat16, and a key is
// whole vectors of them.
template <class T>
void write_keys_together(const T* key, int64_t key_stride, int64_t offset, int64_t block_size, int64_t size, T* keys) {
  constexpr int64_t PER_LANE = 4 / sizeof(T);
  for (int64_t k = 0; k < size / PER_LANE; k += LANES) {
    vu square[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) square[i] = load_raw<vu>(key + i * key_stride + k * PER_LANE);
    transpose(square);
    for (int i = 0; i < LANES; ++i)
      memcpy((void*)(keys + ((k + i) * block_size + offset) * PER_LANE), &square[i], sizeof(vu));
  }
}

PM_INLINE void write_values_together(const float* value, int64_t value_stride, int64_t offset, int64_t size,
                                     float* values) {
  for (int i = 0; i < LANES; ++i) memcpy(values + (offset + i) * size, value + i * value_stride, size * sizeof(float));
}

PM_INLINE void write_values_together(const bf16* value, int64_t value_stride, int64_t offset, int64_t size,
                                     bf16* values) {
  for (int i = 0; i < LANES; i += 2) {
    const bf16 *even = value + i * value_stride, *odd = even + value_stride;
    uint32_t* pairs = (uint32_t*)(values + (offset + i) * size);
    for (int64_t d = 0; d < size; ++d) pairs[d] = even[d].bits | (uint32_t)odd[d].bits << 16;
  }
}

// Of int8, with the scales behind them. `bytes`: room for a row.
template <class T>
PM_INLINE void write_token_bytes(const T* key, const T* value, int64_t offset, int64_t block_size, int64_t size,
                                 int8_t* keys, int8_t* values, int8_t* bytes) {
  const float key_scale = to_bytes(key, size, bytes);
  for (int64_t k = 0; k < size / 4; ++k) memcpy(keys + (k * block_size + offset) * 4, bytes + 4 * k, 4);
  memcpy(keys + block_size * size + offset * 4, &key_scale, 4);
  const float value_scale = to_bytes(value, size, bytes);
  int8_t* at = values + offset / 4 * 4 * size + offset % 4;
  for (int64_t d = 0; d < size; ++d) at[4 * d] = bytes[d];
  memcpy(values + block_size * size + offset * 4, &value_scale, 4);
}

template <class T>
void write_bytes_as(const AttentionArgs& args, int64_t begin, int64_t end) {
  const PmTensors& t = args.tensors;
  const int64_t block_size = args.batch.block_size, heads = args.layer.num_kv_heads, size = args.layer.head_size;
  int8_t bytes[MAX_BYTES_HEAD];
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = args.batch.slot_mapping[token];
    int8_t* keys = (int8_t*)t.kv_cache + slot / block_size * t.block_stride;
    const T* key = (const T*)t.key + token * t.key_stride;
    const T* value = (const T*)t.value + token * t.value_stride;
    for (int64_t h = 0; h < heads; ++h, key += size, value += size, keys += head_elements<int8_t>(args))
      write_token_bytes(key, value, slot % block_size, block_size, size, keys, keys + t.values_offset, bytes);
  }
}

// Whether LANES tokens from here on fill as many slots of one block, from a multiple of LANES on.
inline bool are_together(const AttentionArgs& args, int64_t token, int64_t end) {
  const int64_t* slots = args.batch.slot_mapping + token;
  if (end - token < LANES || slots[0] % LANES != 0) return false;
  for (int i = 1; i < LANES; ++i)
    if (slots[i] != slots[0] + i) return false;
  return true;
}

template <class T>
void write_kv_as(const AttentionArgs& args, int64_t begin, int64_t end) {
  const PmTensors& t = args.tensors;
  const int64_t block_size = args.batch.block_size, heads = args.layer.num_kv_heads, size = args.layer.head_size;
  const bool rows = in_rows(args), whole = !rows && size * (int64_t)sizeof(T) % PM_VEC_BYTES == 0;
  for (int64_t token = begin, count; token < end; token += count) {
    const int64_t slot = args.batch.slot_mapping[token], offset = slot % block_size;
    count = whole && are_together(args, token, end) ? LANES : 1;
    T* keys = (T*)t.kv_cache + slot / block_size * t.block_stride;
    const T* key = (const T*)t.key + token * t.key_stride;
    const T* value = (const T*)t.value + token * t.value_stride;
    for (int64_t h = 0; h < heads; ++h, key += size, value += size, keys += block_size * size) {
      T* values = keys + t.values_offset;
      if (count > 1) {
        write_keys_together(key, t.key_stride, offset, block_size, size, keys);
        write_values_together(value, t.value_stride, offset, size, values);
      } else if (rows) {
        memcpy((void*)(keys + offset * size), key, size * sizeof(T));
        memcpy((void*)(values + offset * size), value, size * sizeof(T));
      } else {
        write_token(key, value, offset, block_size, size, keys, values);
      }
    }
  }
}

void write_kv(const AttentionArgs& args, int64_t begin, int64_t end) {
  if (args.tensors.kv_dtype == PM_INT8) {
    if (args.tensors.dtype == PM_BFLOAT16) return write_bytes_as<bf16>(args, begin, end);
    return write_bytes_as<float>(args, begin, end);
  }
  if (args.tensors.dtype == PM_BFLOAT16) return write_kv_as<bf16>(args, begin, end);
  write_kv_as<float>(args, begin, end);
}

}  // namespace
