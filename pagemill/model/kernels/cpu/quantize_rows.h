// Inputs of a linear layer as 8-bit integers: each block of QUANT_BLOCK consecutive inputs of a row has a scale of its own,
// the least power of 2^(1/8) that brings the largest of them to 127 or below. So few different mantissas mean that the
// products of the scales of weights with all of them can be made ahead, and only an exponent is left to be added: a
// multiplication less where every one counts, at next to no loss. A row is quantized by itself: its numbers do not
// depend on its company.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

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

// Mantissas of scales: 2^(i / SCALE_STEPS).
constexpr int SCALE_STEPS = 8;
constexpr float STEP[SCALE_STEPS] = {1.0f,          1.0905077457f, 1.1892071150f, 1.2968395547f,
                                     1.4142135624f, 1.5422108254f, 1.6817928305f, 1.8340080864f};
constexpr float INVERSE_STEP[SCALE_STEPS] = {1.0f,          0.9170040432f, 0.8408964153f, 0.7711054127f,
                                             0.7071067812f, 0.6484197773f, 0.5946035575f, 0.5452538663f};

// What a block of inputs has beside its numbers.
struct QuantBlock {
  int32_t step;      // number of the scale's mantissa
  int32_t exponent;  // of the scale, in place within a float32: added to the bits of a normal number it multiplies it
  float scale;
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

// By the 7 bits of the largest input's mantissa: eighths of an octave that the scale is above 2^-7 times its power of two.
struct StepTable {
  uint8_t eighths[128] = {};
  constexpr StepTable() {
    for (int m = 0; m < 128; ++m)
      while (eighths[m] < SCALE_STEPS && (128 + m) > STEP[eighths[m]] * 127.49f) ++eighths[m];
  }
};
constexpr StepTable STEP_TABLE;

#if defined(PM_DOT_PAIRS)
PM_INLINE void store_group(const int8_t* q, uint32_t* words) {
  words[0] = (uint16_t)q[0] | (uint32_t)(uint16_t)q[2] << 16;
  words[1] = (uint16_t)q[1] | (uint32_t)(uint16_t)q[3] << 16;
}
#else
PM_INLINE void store_group(const int8_t* q, uint32_t* words) { memcpy(words, q, 4); }
#endif

// The numbers of a block, and their sum, with `inverse` of its scale. Halves round to even.
#if PM_VEC_BYTES == 64
PM_INLINE uint16_t largest_of(const bf16* x) {
  const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // There is an instruction for the smallest of eight; the complement of the largest is the smallest.
  const __m128i found = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi32(-1)));
  return (uint16_t)~_mm_cvtsi128_si32(found);
}

PM_INLINE __m128i quantize_half(const bf16* x, vf inverse) {
  const __m512i q = _mm512_cvtps_epi32((__m512)(load(x) * inverse));
  return _mm512_cvtepi32_epi8(_mm512_max_epi32(_mm512_min_epi32(q, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127)));
}

PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, int8_t* quants) {
  const __m128i low = quantize_half(x, inverse), high = quantize_half(x + LANES, inverse);
  _mm_storeu_si128((__m128i*)quants, low);
  _mm_storeu_si128((__m128i*)(quants + LANES), high);
  // Sums of unsigned bytes: 128 more than each number.
  const __m128i flip = _mm_set1_epi8((char)0x80), none = _mm_setzero_si128();
  const __m128i sums = _mm_add_epi64(_mm_sad_epu8(_mm_xor_si128(low, flip), none),
                                     _mm_sad_epu8(_mm_xor_si128(high, flip), none));
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * (int32_t)QUANT_BLOCK;
}
#else
PM_INLINE uint16_t largest_of(const bf16* x) {
  uint16_t largest = 0;
  for (int i = 0; i < QUANT_BLOCK; ++i) {
    const uint16_t bits = x[i].bits & 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, int8_t* quants) {
  vi total = {};
  for (int i = 0; i < QUANT_BLOCK; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits.
    vf t = load(x + i) * inverse;
    t = t < splat(127.0f) ? t : splat(127.0f);
    t = t > splat(-127.0f) ? t : splat(-127.0f);
    const vi q = (vi)(t + splat(12582912.0f)) - 0x4b400000;
    total += q;
    for (int lane = 0; lane < LANES; ++lane) quants[i + lane] = (int8_t)q[lane];
  }
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += total[i];
  return sum;
}
#endif

PM_INLINE float power_of_two(int32_t exponent) {
  const int32_t bits = (127 + exponent) * (1 << 23);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the bits of the largest magnitude.
PM_INLINE uint16_t quantize_block(const bf16* x, uint32_t* words, QuantBlock& block) {
  const uint16_t largest = largest_of(x);
  int32_t exponent = largest >> 7;
  exponent = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent > HIGHEST_EXPONENT ? HIGHEST_EXPONENT : exponent;
  const int32_t eighths = STEP_TABLE.eighths[largest & 127];
  const int32_t step = eighths % SCALE_STEPS, power = exponent - 127 - 7 + eighths / SCALE_STEPS;
  int8_t quants[QUANT_BLOCK];
  const int32_t sum = quantize_values(x, splat(INVERSE_STEP[step] * power_of_two(-power)), quants);
  for (int g = 0; g < GROUPS; ++g) store_group(quants + 4 * g, words + g * GROUP_WORDS);
  const float scale = STEP[step] * power_of_two(power);
  block = {step, power * (1 << 23), scale, sum, (float)sum * scale};
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
