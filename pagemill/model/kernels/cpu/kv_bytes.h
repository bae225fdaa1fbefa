// Keys and values of 8 bits: how a row becomes integers and a scale, and products of such rows with finer ones.
// Knows nothing about blocks or softmax.
//
// A key or value of a token and KV head is integers of -127..127 and one float32 scale, its largest element / 127. What
// meets them - a query; the weights of a segment, with the scales of the values in them - is rounded to 16 bits for
// instruction sets that multiply bytes: a high and a low byte, which are two rows of A. The sums are exact integers, so
// that they do not depend on any order.
#pragma once

#include "gemm_block.h"

namespace {

constexpr float LARGEST_BYTE = 127.0f;
// Rows below are taken for zeros: dividing by less would overflow.
constexpr float SMALLEST_ROW = 1e-30f;

typedef int8_t vsb __attribute__((vector_size(LANES)));
typedef uint8_t vub __attribute__((vector_size(LANES)));

// Half to even, for numbers below 2^22.
PM_INLINE vi rounded(vf x) {
  const vf magic = splat(12582912.0f);
  return (vi)(x + magic) - (vi)magic;
}

PM_INLINE vf abs_of(vf x) { return (vf)((vi)x & 0x7fffffff); }

struct RowScale {
  float scale, inverse;
};

// What makes the largest element `largest`. The scale of a row with a NaN or an infinity is NaN, its integers are zeros.
PM_INLINE RowScale row_scale(float highest, float poison, float largest) {
  if (poison != 0) return {__builtin_nanf(""), 0.0f};
  if (highest < SMALLEST_ROW) return {0.0f, 0.0f};
  return {highest / largest, largest / highest};
}

template <class T>
RowScale row_scale(const T* row, int64_t size, float largest) {
  vf highest = {}, poison = {};
  for_vectors(size, [&](int64_t d, int64_t n) {
    const vf x = load(row + d, n);
    highest = max_of(abs_of(x), highest);
    poison += x * splat(0.0f);
  });
  return row_scale(max_lanes(highest), sum_lanes(poison), largest);
}

// Rounds a row to bytes. Returns its scale.
template <class T>
float to_bytes(const T* row, int64_t size, int8_t* out) {
  const RowScale found = row_scale(row, size, LARGEST_BYTE);
  for_vectors(size, [&](int64_t d, int64_t n) {
    vf x = load(row + d, n) * splat(found.inverse);
    x = select((vi)(x == x), x, vf{});
    const vsb bytes = __builtin_convertvector(rounded(x), vsb);
    memcpy(out + d, &bytes, n);
  });
  return found.scale;
}

// LANES lanes of four bytes as float32: of byte 0, 1, 2 or 3 of each.
PM_INLINE vf byte_of_lanes(vu lanes, int byte) {
  return __builtin_convertvector((vi)(lanes << (24 - 8 * byte)) >> 24, vf);
}

#if defined(__AVX512VNNI__)
// A is signed. The instruction wants one factor without a sign: B is taken 128 too high, which is corrected later.
struct KeyBytesDot {
  static PM_INLINE vf add(vf acc, uint32_t a, vu b) {
    return (vf)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)(b ^ 0x80808080u), _mm512_set1_epi32((int)a));
  }
};

// A is unsigned: weights are not negative.
struct ValueBytesDot {
  static PM_INLINE vf add(vf acc, uint32_t a, vu b) {
    return (vf)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32((int)a), (__m512i)b);
  }
};

// Four elements in a lane, two rows of A for each one. The accumulators of both products are int32.
struct ByteDot {
  using Keys = KeyBytesDot;
  using Values = ValueBytesDot;
  static constexpr int PACK = 4;
  static constexpr int PARTS = 2;
  static constexpr int ROWS = MAX_PART_ROWS;
};
#endif

// A query: x = scale * (256 * high + low). What its products with keys are too high by: 128 * the sums of its bytes.
struct QueryBytes {
  float scale;
  int32_t high_excess, low_excess;
};

constexpr float LARGEST_QUERY = 127 * 256 + 127;

template <class T>
QueryBytes to_query_bytes(const T* row, int64_t size, int8_t* high, int8_t* low) {
  const RowScale found = row_scale(row, size, LARGEST_QUERY);
  vi high_sum = {}, low_sum = {};
  for_vectors(size, [&](int64_t d, int64_t n) {
    vf x = load(row + d, n) * splat(found.inverse);
    x = select((vi)(x == x), x, vf{});
    const vi whole = rounded(x), upper = (whole + 128) >> 8, lower = whole - (upper << 8);
    high_sum += upper;
    low_sum += lower;
    const vsb high_bytes = __builtin_convertvector(upper, vsb), low_bytes = __builtin_convertvector(lower, vsb);
    memcpy(high + d, &high_bytes, n);
    memcpy(low + d, &low_bytes, n);
  });
  QueryBytes query = {found.scale, 0, 0};
  for (int i = 0; i < LANES; ++i) {
    query.high_excess += 128 * high_sum[i];
    query.low_excess += 128 * low_sum[i];
  }
  return query;
}

// The sums of a query with keys to scores, in place of the high ones.
PM_INLINE vf score_of(const float* high, const float* low, const QueryBytes& query, vf key_scales) {
  const vf upper = __builtin_convertvector(load_raw<vi>(high) - query.high_excess, vf);
  const vf lower = __builtin_convertvector(load_raw<vi>(low) - query.low_excess, vf);
  return fma(upper, splat(256.0f), lower) * (splat(query.scale) * key_scales);
}

constexpr float LARGEST_WEIGHT = 65535.0f;

// Weights, with the scales of the values in them already, as multiples of theirs: 256 * high + low.
PM_INLINE void to_weight_bytes(vf multiples, uint8_t* high, uint8_t* low) {
  const vi whole = rounded(multiples);
  const vub high_bytes = __builtin_convertvector(whole >> 8, vub);
  const vub low_bytes = __builtin_convertvector(whole & 255, vub);
  memcpy(high, &high_bytes, sizeof high_bytes);
  memcpy(low, &low_bytes, sizeof low_bytes);
}

// The sums of weights with values to floats, in place of the high ones.
PM_INLINE void to_products(float* high, const float* low, int64_t size, float scale) {
  for (int64_t d = 0; d < size; d += LANES) {
    const vf upper = __builtin_convertvector(load_raw<vi>(high + d), vf);
    const vf lower = __builtin_convertvector(load_raw<vi>(low + d), vf);
    store(high + d, fma(upper, splat(256.0f), lower) * splat(scale));
  }
}

}  // namespace
