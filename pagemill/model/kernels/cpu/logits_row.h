// A row of logits as it is read: as it is, or by a mask of the tokens that may come. Knows nothing about what is chosen.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

PM_INLINE float element(const float* p) { return *p; }
PM_INLINE float element(const bf16* p) {
  const uint32_t bits = (uint32_t)p->bits << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <class T>
struct WholeRow {
  const T* logits;

  PM_INLINE vf lanes(int64_t d) const { return load(logits + d); }
  PM_INLINE float one(int64_t d) const { return element(logits + d); }
  PM_INLINE bool refuses_all(int64_t, int64_t) const { return false; }
};

// Minus infinity for token t where bit t % 32 of word t / 32 is 0. Such logits are not read, or what is read is dropped.
struct MaskedRow {
  const float* logits;
  const uint32_t* words;

  // From a multiple of LANES on.
  PM_INLINE vf lanes(int64_t d) const {
    const uint32_t word = words[d / MASK_BITS] >> d % MASK_BITS;
    const vf values = load(logits + d), refused = splat(-__builtin_inff());
#if defined(__AVX512F__)
    return (vf)_mm512_mask_blend_ps((__mmask16)word, (__m512)refused, (__m512)values);
#else
    vi bits;
    for (int i = 0; i < LANES; ++i) bits[i] = 1 << i;
    return select(((vi{} + (int32_t)word) & bits) != 0, values, refused);
#endif
  }
  PM_INLINE float one(int64_t d) const { return words[d / MASK_BITS] >> d % MASK_BITS & 1 ? logits[d] : -__builtin_inff(); }
  // Whether none of [begin, end) may come, `begin` being a multiple of MASK_BITS. May say no where it is so.
  PM_INLINE bool refuses_all(int64_t begin, int64_t end) const {
    uint32_t any = 0;
    for (int64_t at = begin; at < end; at += MASK_BITS) any |= words[at / MASK_BITS];
    return !any;
  }
};

}  // namespace
