// Inputs of a linear layer as 8-bit integers: each block of QUANT_BLOCK consecutive inputs of a row has a scale of its own,
// the power of two that brings the largest of them between 64 and 128. A row is quantized by itself, so that its numbers
// do not depend on its company; bfloat16 has 8 significant bits, so that the largest lose next to nothing.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

constexpr int64_t QUANT_BLOCK = 32;
// Four inputs of a group are multiplied at once with those of LANES outputs. A group is one 32-bit word, or two where
// products of 16 bits have to do: inputs 0 and 2, then 1 and 3.
constexpr int64_t GROUPS = QUANT_BLOCK / 4;
#if defined(__AVX512VNNI__)
#define PM_DOT_VNNI 1
constexpr int64_t GROUP_WORDS = 1;
#elif defined(__SSE2__)
#define PM_DOT_PAIRS 1
constexpr int64_t GROUP_WORDS = 2;
#else
constexpr int64_t GROUP_WORDS = 1;
#endif

// What a block of inputs has beside its numbers.
struct QuantBlock {
  int32_t exponent;  // of the scale, in place within a float32: added to the bits of a normal number it multiplies it
  int32_t sum;
  float scaled_sum;  // sum times the scale: what an offset of the weights is multiplied with
};

// Blocks of a row: words, then the QuantBlocks, then a float that is added to all results of the row.
struct QuantRows {
  int64_t num_blocks, stride;
  char* rows;

  QuantRows(int64_t cols, void* memory)
      : num_blocks(ceil_div(cols, QUANT_BLOCK)), stride(round_up(num_blocks * BLOCK_BYTES + 4, 64)), rows((char*)memory) {}

  const uint32_t* words(int64_t row) const { return (const uint32_t*)(rows + row * stride); }
  const QuantBlock* blocks(int64_t row) const {
    return (const QuantBlock*)(rows + row * stride + num_blocks * GROUPS * GROUP_WORDS * 4);
  }
  // 0, or NaN for a row with an input that is not finite: integers cannot carry that.
  const float* poison(int64_t row) const { return (const float*)(blocks(row) + num_blocks); }

 private:
  static constexpr int64_t BLOCK_BYTES = GROUPS * GROUP_WORDS * 4 + (int64_t)sizeof(QuantBlock);
};

// Biased exponents of the largest input of a block that scales are made from. Within them, a product of the scale with a
// 16-bit float stays a normal float32; inputs below 2^-57 become zero, inputs above 2^100 are cut off.
constexpr int32_t LOWEST_EXPONENT = 70, HIGHEST_EXPONENT = 227;
constexpr int32_t LARGEST_BITS = 6;  // the largest input becomes 2^6 or more

#if defined(PM_DOT_PAIRS)
PM_INLINE void store_group(const int8_t* q, uint32_t* words) {
  words[0] = (uint16_t)q[0] | (uint32_t)(uint16_t)q[2] << 16;
  words[1] = (uint16_t)q[1] | (uint32_t)(uint16_t)q[3] << 16;
}
#else
PM_INLINE void store_group(const int8_t* q, uint32_t* words) { memcpy(words, q, 4); }
#endif

// Returns the bits of the largest magnitude.
PM_INLINE uint16_t quantize_block(const bf16* x, uint32_t* words, QuantBlock& block) {
  uint16_t largest = 0;
  for (int i = 0; i < QUANT_BLOCK; ++i) {
    const uint16_t bits = x[i].bits & 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  int32_t exponent = largest >> 7;
  exponent = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent > HIGHEST_EXPONENT ? HIGHEST_EXPONENT : exponent;
  const int32_t scale = exponent - 127 - LARGEST_BITS;
  const vf inverse = (vf)(vi{} + ((127 - scale) << 23));
  int8_t quants[QUANT_BLOCK];
  typedef int8_t vb __attribute__((vector_size(LANES)));
  vi total = {};
  for (int i = 0; i < QUANT_BLOCK; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits.
    vf t = load(x + i) * inverse;
    t = t < splat(127.0f) ? t : splat(127.0f);
    t = t > splat(-127.0f) ? t : splat(-127.0f);
    const vi q = (vi)(t + splat(12582912.0f)) - 0x4b400000;
    total += q;
    const vb narrowed = __builtin_convertvector(q, vb);
    memcpy(quants + i, &narrowed, sizeof narrowed);
  }
  for (int g = 0; g < GROUPS; ++g) store_group(quants + 4 * g, words + g * GROUP_WORDS);
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += total[i];
  const int32_t bits = (127 + scale) << 23;
  float factor;
  memcpy(&factor, &bits, sizeof factor);
  block = {scale * (1 << 23), sum, (float)sum * factor};
  return largest;
}

// Rows [begin, end) of x, to their places in args.quantized.
void quantize_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.linear.cols;
  const QuantRows to(cols, args.quantized);
  for (int64_t r = begin; r < end; ++r) {
    const bf16* x = (const bf16*)args.x + r * args.x_stride;
    uint32_t* words = (uint32_t*)to.words(r);
    QuantBlock* blocks = (QuantBlock*)to.blocks(r);
    uint16_t largest = 0;
    for (int64_t b = 0; b < to.num_blocks; ++b) {
      const int64_t left = cols - b * QUANT_BLOCK;
      bf16 padded[QUANT_BLOCK] = {};
      if (left < QUANT_BLOCK) memcpy((void*)padded, x + b * QUANT_BLOCK, left * sizeof(bf16));
      const bf16* from = left < QUANT_BLOCK ? padded : x + b * QUANT_BLOCK;
      const uint16_t bits = quantize_block(from, words + b * GROUPS * GROUP_WORDS, blocks[b]);
      largest = bits > largest ? bits : largest;
    }
    *(float*)to.poison(r) = largest < 0x7f80 ? 0.0f : __builtin_nanf("");
  }
}

int64_t quantized_bytes(const LinearArgs& args) {
  if (args.linear.format == PM_BF16_PANELS) return 0;
  return args.num_rows * QuantRows(args.linear.cols, nullptr).stride;
}

}  // namespace
