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

// Integers of 16 bits are multiplied as such, or as two of 8 bits: the upper bytes, rounded to nearest, and the lower.
#if defined(PM_DOT_PAIRS)
constexpr int WIDE_PLANES = 1;
#else
constexpr int WIDE_PLANES = 2;
#endif
constexpr int planes_of(bool wide) { return wide ? WIDE_PLANES : 1; }

// A block of inputs, with all that its multiplication needs side by side: it is read through one pointer.
template <bool WIDE>
struct alignas(32) QuantBlock {
  static constexpr int PLANES = planes_of(WIDE);
  uint32_t words[PLANES * GROUPS * GROUP_WORDS];
  int32_t correction;  // what a sum of products begins with, because integers of weights are all too large by `zero_of`
  int32_t step_at;     // of the scale's mantissa: where in `Prepared` the products with it are, in bytes
  int32_t exponent;    // of the scale, in place within a float32: added to the bits of a normal number it multiplies it
  float scale;
  float scaled_sum;  // the sum of the numbers times the scale: what an offset of the weights is multiplied with
};

// Rows of QuantBlocks, each with a float behind them that is added to all results of the row.
template <bool WIDE>
struct QuantRows {
  typedef QuantBlock<WIDE> Block;
  int64_t num_blocks, stride;
  char* rows;

  QuantRows(int64_t cols, void* memory)
      : num_blocks(ceil_div(cols, QUANT_BLOCK)),
        stride(round_up(num_blocks * (int64_t)sizeof(Block) + (int64_t)sizeof(float), 64)),
        rows((char*)memory) {}

  Block* blocks(int64_t row) const { return (Block*)(rows + row * stride); }
  // 0, or NaN for a row with an input that is not finite: integers cannot carry that.
  float* poison(int64_t row) const { return (float*)(blocks(row) + num_blocks); }
};

// Biased exponents of the largest input of a block that scales are made from. Within them, a product of the scale with a
// 16-bit float stays a normal float32; inputs below 2^-57 become zero, inputs above 2^100 are cut off.
constexpr int32_t LOWEST_EXPONENT = 70, HIGHEST_EXPONENT = 227;
// Bits of wide inputs beyond those of others: their scales are so many powers of two smaller.
constexpr int32_t WIDE_BITS = 8;
// The largest number; of 16 bits, the largest whose upper byte, rounded, is such a number.
constexpr float largest_number(bool wide) { return wide ? 127.0f * (1 << WIDE_BITS) + 127.0f : 127.0f; }

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

template <bool WIDE>
PM_INLINE __m512i quantize_half(const bf16* x, vf inverse) {
  constexpr float LARGEST = largest_number(WIDE);
  const __m512 scaled = _mm512_min_ps((__m512)(load(x) * inverse), _mm512_set1_ps(LARGEST));
  return _mm512_cvtps_epi32(_mm512_max_ps(scaled, _mm512_set1_ps(-LARGEST)));
}

PM_INLINE __m256i bytes_of(__m512i first, __m512i second) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(second), _mm512_cvtepi32_epi8(first));
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

PM_INLINE void store_wide_numbers(__m512i first, __m512i second, uint32_t* words) {
#if defined(PM_DOT_PAIRS)
  const __m512i order = _mm512_broadcast_i32x4(_mm_set_epi64x(0x0f0e0b0a0d0c0908, 0x0706030205040100));
  const __m256i low = _mm512_cvtepi32_epi16(first), high = _mm512_cvtepi32_epi16(second);
  _mm512_storeu_si512(words, _mm512_shuffle_epi8(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), order));
#else
  const auto upper = [](__m512i x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8); };
  _mm256_storeu_si256((__m256i*)words, bytes_of(upper(first), upper(second)));
  _mm256_storeu_si256((__m256i*)(words + GROUPS), bytes_of(first, second));
#endif
}

template <bool WIDE>
PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, uint32_t* words) {
  const __m512i first = quantize_half<WIDE>(x, inverse), second = quantize_half<WIDE>(x + LANES, inverse);
  if constexpr (WIDE) {
    store_wide_numbers(first, second, words);
    return _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
  }
  const __m256i numbers = bytes_of(first, second);
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

template <bool WIDE>
PM_INLINE void store_group(const int16_t* q, uint32_t* words) {
#if defined(PM_DOT_PAIRS)
  words[0] = (uint16_t)q[0] | (uint32_t)(uint16_t)q[2] << 16;
  words[1] = (uint16_t)q[1] | (uint32_t)(uint16_t)q[3] << 16;
#else
  *words = 0;
  for (int i = 0; i < 4; ++i) *words |= (uint32_t)(uint8_t)(WIDE ? (q[i] + 128) >> 8 : q[i]) << 8 * i;
  if (!WIDE) return;
  words[GROUPS] = 0;
  for (int i = 0; i < 4; ++i) words[GROUPS] |= (uint32_t)(uint8_t)q[i] << 8 * i;
#endif
}

template <bool WIDE>
PM_INLINE int32_t quantize_values(const bf16* x, vf inverse, uint32_t* words) {
  constexpr float LARGEST = largest_number(WIDE);
  int16_t quants[QUANT_BLOCK];
  vi total = {};
  for (int i = 0; i < QUANT_BLOCK; i += LANES) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, and leaves it in the low bits.
    vf t = load(x + i) * inverse;
    t = t < splat(LARGEST) ? t : splat(LARGEST);
    t = t > splat(-LARGEST) ? t : splat(-LARGEST);
    const vi q = (vi)(t + splat(12582912.0f)) - 0x4b400000;
    total += q;
    for (int lane = 0; lane < LANES; ++lane) quants[i + lane] = (int16_t)q[lane];
  }
  for (int g = 0; g < GROUPS; ++g) store_group<WIDE>(quants + 4 * g, words + g * GROUP_WORDS);
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
template <bool WIDE>
PM_INLINE uint16_t quantize_block(const bf16* x, int32_t zero, QuantBlock<WIDE>& block) {
  constexpr int32_t MORE_BITS = WIDE ? WIDE_BITS : 0, LOWEST = LOWEST_EXPONENT + MORE_BITS;
  const uint16_t largest = largest_of(x);
  int32_t exponent = largest >> 7;
  exponent = exponent < LOWEST ? LOWEST : exponent > HIGHEST_EXPONENT ? HIGHEST_EXPONENT : exponent;
  const StepTable::Entry& entry = STEP_TABLE.entries[largest & 127];
  exponent = (exponent + entry.power - MORE_BITS) * (1 << 23);
  const int32_t sum = quantize_values<WIDE>(x, splat(times_power(entry.inverse, -exponent)), block.words);
  block.correction = -zero * sum;
  block.step_at = entry.step_at;
  block.exponent = exponent;
  block.scale = times_power(entry.mantissa, exponent);
  block.scaled_sum = (float)sum * block.scale;
  return largest;
}

// One row of x to its place.
template <bool WIDE>
void quantize_row(const bf16* x, int64_t cols, int32_t zero, const QuantRows<WIDE>& to, int64_t row) {
  uint16_t largest = 0;
  bf16 padded[QUANT_BLOCK] = {};
  for (int64_t b = 0; b < to.num_blocks; ++b) {
    const bf16* from = x + b * QUANT_BLOCK;
    if (cols < (b + 1) * QUANT_BLOCK) {
      memcpy((void*)padded, from, (cols - b * QUANT_BLOCK) * sizeof(bf16));
      from = padded;
    }
    const uint16_t bits = quantize_block(from, zero, to.blocks(row)[b]);
    largest = bits > largest ? bits : largest;
  }
  *to.poison(row) = largest < 0x7f80 ? 0.0f : __builtin_nanf("");
}

template <bool WIDE>
void quantize_integers_of(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.linear.cols;
  const QuantRows<WIDE> to(cols, args.quantized);
  for (int64_t r = begin; r < end; ++r)
    quantize_row((const bf16*)args.x + r * args.x_stride, cols, zero_of(args.linear.format), to, r);
}

// Rows [begin, end) of x, to their places in args.quantized.
void quantize_integers(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.linear.format & PM_WIDE_INPUTS) return quantize_integers_of<true>(args, begin, end);
  quantize_integers_of<false>(args, begin, end);
}

int64_t quantized_integers_bytes(const LinearArgs& args) {
  const int64_t cols = args.linear.cols;
  const bool wide = args.linear.format & PM_WIDE_INPUTS;
  return args.num_rows * (wide ? QuantRows<true>(cols, nullptr).stride : QuantRows<false>(cols, nullptr).stride);
}

}  // namespace
