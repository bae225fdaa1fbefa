// Inputs of a linear layer as 8-bit integers: each block of QUANT_BLOCK consecutive inputs of a row has a scale of its own,
// the least power of 2^(1/4) that brings the largest of them to 127 or below. So few different mantissas mean that the
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

// Bytes of a float32 for each output of a panel.
constexpr int64_t LIMIT_BYTES = LINEAR_PANEL * 4;

// Mantissas of scales: 2^(i / SCALE_STEPS).
constexpr int SCALE_STEPS = 4;
constexpr float STEP[SCALE_STEPS] = {1.0f, 1.1892071150f, 1.4142135624f, 1.6817928305f};
constexpr float INVERSE_STEP[SCALE_STEPS] = {1.0f, 0.8408964153f, 0.7071067812f, 0.5946035575f};

// A block of inputs, with all that its multiplication needs side by side: it is read through one pointer.
struct alignas(32) QuantBlock {
  uint32_t words[GROUPS * GROUP_WORDS];
  int32_t correction;  // what a sum of products begins with, because integers of weights are all too large by `zero_of`
  int32_t step_at;     // of the scale's mantissa: where in `Prepared` the products with it are, in bytes
  int32_t exponent;    // of the scale, in place within a float32: added to the bits of a normal number it multiplies it
  float scale;
  float scaled_sum;  // the sum of the numbers times the scale: what an offset of the weights is multiplied with
};

// Rows of QuantBlocks, each with a float behind them that is added to all results of the row.
struct QuantRows {
  int64_t num_blocks, stride;
  char* rows;

  QuantRows(int64_t cols, void* memory)
      : num_blocks(ceil_div(cols, QUANT_BLOCK)),
        stride(round_up(num_blocks * (int64_t)sizeof(QuantBlock) + (int64_t)sizeof(float), 64)),
        rows((char*)memory) {}

  QuantBlock* blocks(int64_t row) const { return (QuantBlock*)(rows + row * stride); }
  // 0, or NaN for a row with an input that is not finite: integers cannot carry that.
  float* poison(int64_t row) const { return (float*)(blocks(row) + num_blocks); }
};

// Biased exponents of the largest input of a block that scales are made from. Within them, a product of the scale with a
// 16-bit float stays a normal float32; inputs below 2^-57 become zero, inputs above 2^100 are cut off.
constexpr int32_t LOWEST_EXPONENT = 70, HIGHEST_EXPONENT = 227;

// By the 7 bits of the largest input's mantissa: the scale's own mantissa, and the exponent that comes with one of 2^0.
struct StepTable {
  struct Entry {
    int32_t step_at;  // as in QuantBlock
    int32_t power;
    float mantissa, inverse;
  } entries[128] = {};

  constexpr StepTable() {
    for (int m = 0; m < 128; ++m) {
      int quarters = 0;
      while (quarters < SCALE_STEPS && (128 + m) > STEP[quarters] * 127.49f) ++quarters;
      const int step = quarters % SCALE_STEPS;
      entries[m] = {step * (int32_t)LIMIT_BYTES, quarters / SCALE_STEPS - 127 - 7, STEP[step], INVERSE_STEP[step]};
    }
  }
};
constexpr StepTable STEP_TABLE;

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
  const __m512 scaled = _mm512_min_ps((__m512)(load(x) * inverse), _mm512_set1_ps(127.0f));
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_max_ps(scaled, _mm512_set1_ps(-127.0f))));
}

PM_INLINE void store_numbers(__m256i numbers, uint32_t* words) {
#if defined(PM_DOT_PAIRS)
  // The second and third byte of every four change places; then bytes become numbers of 16 bits.
  const __m256i order = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0f0d0e0c0b090a08, 0x0705060403010200));
  const __m256i paired = _mm256_shuffle_epi8(numbers, order);
  _mm512_storeu_si512(words, _mm512_cvtepi8_epi16(paired));
#else
  _mm256_storeu_si256((__m256i*)words, numbers);
#endif
}

PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, uint32_t* words) {
  const __m256i numbers = _mm256_set_m128i(quantize_half(x + LANES, inverse), quantize_half(x, inverse));
  store_numbers(numbers, words);
  // Sums of unsigned bytes: 128 more than each number.
  const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(numbers, _mm256_set1_epi8((char)0x80)), _mm256_setzero_si256());
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return _mm_cvtsi128_si32(both) + _mm_extract_epi32(both, 2) - 128 * (int32_t)QUANT_BLOCK;
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

PM_INLINE void store_group(const int8_t* q, uint32_t* words) {
#if defined(PM_DOT_PAIRS)
  words[0] = (uint16_t)q[0] | (uint32_t)(uint16_t)q[2] << 16;
  words[1] = (uint16_t)q[1] | (uint32_t)(uint16_t)q[3] << 16;
#else
  memcpy(words, q, 4);
#endif
}

PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, uint32_t* words) {
  int8_t quants[QUANT_BLOCK];
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
  for (int g = 0; g < GROUPS; ++g) store_group(quants + 4 * g, words + g * GROUP_WORDS);
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += total[i];
  return sum;
}
#endif

// x times a power of two, given in place within a float32; both and the result are normal numbers.
PM_INLINE float times_power(float x, int32_t exponent) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits += exponent;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Returns the bits of the largest magnitude. `zero` is the integer that stands for 0 in the weights.
PM_INLINE uint16_t quantize_block(const bf16* x, int32_t zero, QuantBlock& block) {
  const uint16_t largest = largest_of(x);
  int32_t exponent = largest >> 7;
  exponent = exponent < LOWEST_EXPONENT ? LOWEST_EXPONENT : exponent > HIGHEST_EXPONENT ? HIGHEST_EXPONENT : exponent;
  const StepTable::Entry& entry = STEP_TABLE.entries[largest & 127];
  exponent = (exponent + entry.power) * (1 << 23);
  const int32_t sum = quantize_values(x, splat(times_power(entry.inverse, -exponent)), block.words);
  block.correction = -zero * sum;
  block.step_at = entry.step_at;
  block.exponent = exponent;
  block.scale = times_power(entry.mantissa, exponent);
  block.scaled_sum = (float)sum * block.scale;
  return largest;
}

// What rounding took from the numbers of a block, in 16 bits.
PM_INLINE void rest_of_block(const bf16* x, const QuantBlock& block, bf16* rest) {
  // The one that the numbers were made with, to the last bit.
  const float inverse_step = INVERSE_STEP[block.step_at / LIMIT_BYTES];
  const vf scale = splat(block.scale), inverse = splat(times_power(inverse_step, -block.exponent));
  for (int i = 0; i < QUANT_BLOCK; i += LANES) {
    const vf value = load(x + i);
    vf t = value * inverse;
    t = t < splat(127.0f) ? t : splat(127.0f);
    t = t > splat(-127.0f) ? t : splat(-127.0f);
    const vf rounded = (t + splat(12582912.0f)) - splat(12582912.0f);
    store(rest + i, fma(rounded, -scale, value));
  }
}

// One row of x to row `row` of what is quantized, and what that leaves to the next row where inputs are wide.
template <bool WIDE>
void quantize_row(const bf16* x, int64_t cols, int32_t zero, const QuantRows& to, int64_t row) {
  uint16_t largest = 0;
  bf16 padded[QUANT_BLOCK] = {};
  for (int64_t b = 0; b < to.num_blocks; ++b) {
    const bf16* from = x + b * QUANT_BLOCK;
    if (cols < (b + 1) * QUANT_BLOCK) {
      memcpy((void*)padded, from, (cols - b * QUANT_BLOCK) * sizeof(bf16));
      from = padded;
    }
    QuantBlock& block = to.blocks(row)[b];
    const uint16_t bits = quantize_block(from, zero, block);
    largest = bits > largest ? bits : largest;
    if constexpr (WIDE) {
      bf16 rest[QUANT_BLOCK];
      rest_of_block(from, block, rest);
      quantize_block(rest, zero, to.blocks(row + 1)[b]);
    }
  }
  const float poison = largest < 0x7f80 ? 0.0f : __builtin_nanf("");
  *to.poison(row) = poison;
  if constexpr (WIDE) *to.poison(row + 1) = poison;
}

// Rows [begin, end) of x, to their places in args.quantized.
void quantize_integers(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.linear.cols;
  const int32_t zero = zero_of(args.linear.format);
  const QuantRows to(cols, args.quantized);
  for (int64_t r = begin; r < end; ++r) {
    const bf16* x = (const bf16*)args.x + r * args.x_stride;
    if (args.linear.format & PM_WIDE_INPUTS)
      quantize_row<true>(x, cols, zero, to, 2 * r);
    else
      quantize_row<false>(x, cols, zero, to, r);
  }
}

}  // namespace
