// The register-tiled product at the heart of attention: C[m][n] = sum over k of A[m][k] * B[k][n], for a few rows m.
// Knows nothing about attention. Each element of C is summed in the order of k, whatever the tile it is part of.
#pragma once

#include "vec.h"

namespace {

// Vectors side by side in one pass. 6 x 4 (or 6 x 2) accumulators and their operands fill the register file.
constexpr int MAX_ROWS = 6;
constexpr int MAX_VECTORS = PM_VEC_BYTES == 64 ? 4 : 2;
constexpr int64_t PANEL = MAX_VECTORS * LANES;

// B is packed in panels of PANEL lanes: panel p holds B[k][p * PANEL ...] for all k, one after the other.
// A `Dot` says what a lane holds and how a step of k is added. `PACK` elements of the sum go into one lane; to make B of
// rows, `store_values` brings the elements of PACK rows side by side.

struct FloatDot {
  using Stored = float;
  static constexpr int PACK = 1;
  static PM_INLINE vf add(vf acc, uint32_t a, vu b) { return fma((vf)(vu{} + a), (vf)b, acc); }
  static PM_INLINE void store_values(vu row, vu, uint32_t* to) { memcpy(to, &row, sizeof row); }
};

#if defined(__AVX512BF16__)
struct PairDot {
  using Stored = bf16;
  static constexpr int PACK = 2;
  static PM_INLINE vf add(vf acc, uint32_t a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
  static PM_INLINE void store_values(vu even, vu odd, uint32_t* to) {
    const vu low = zip16_low(even, odd), high = zip16_high(even, odd);
    memcpy(to, &low, sizeof low);
    memcpy(to + LANES, &high, sizeof high);
  }
};
#endif

// a: rows of lda lanes; b: one panel, PANEL lanes per step; c: rows of ldc floats. All strides in 32-bit lanes.
template <class Dot, int ROWS, int VECTORS>
void gemm_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t steps, float* c, int64_t ldc) {
  vf acc[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < steps; ++k) {
    vu cols[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) cols[v] = load_raw<vu>(b + k * PANEL + v * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; ++m) {
      uint32_t lane = a[m * lda + k];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[m][v] = Dot::add(acc[m][v], lane, cols[v]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(c + m * ldc + v * LANES, acc[m][v]);
}

using GemmBlock = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, float*, int64_t);

template <class Dot, int ROWS>
GemmBlock gemm_block_of(int64_t vectors) {
  if constexpr (MAX_VECTORS == 4) {
    if (vectors == 4) return gemm_block<Dot, ROWS, 4>;
    if (vectors == 3) return gemm_block<Dot, ROWS, 3>;
  }
  return vectors == 2 ? gemm_block<Dot, ROWS, 2> : gemm_block<Dot, ROWS, 1>;
}

template <class Dot>
GemmBlock gemm_block_of(int64_t rows, int64_t vectors) {
  switch (rows) {
    case 1: return gemm_block_of<Dot, 1>(vectors);
    case 2: return gemm_block_of<Dot, 2>(vectors);
    case 3: return gemm_block_of<Dot, 3>(vectors);
    case 4: return gemm_block_of<Dot, 4>(vectors);
    case 5: return gemm_block_of<Dot, 5>(vectors);
    default: return gemm_block_of<Dot, 6>(vectors);
  }
}

struct Operand {
  const uint32_t* lanes;
  int64_t stride;  // A: between rows; B: between panels
};

// C for columns [first_vector, last_vector), where first_vector begins a panel. c points at column 0.
template <class Dot>
void gemm_rows(Operand a, Operand b, int64_t rows, int64_t steps, int64_t first_vector, int64_t last_vector, float* c,
               int64_t ldc) {
  for (int64_t v = first_vector; v < last_vector; v += MAX_VECTORS) {
    int64_t vectors = min_of(MAX_VECTORS, last_vector - v);
    const uint32_t* panel = b.lanes + v / MAX_VECTORS * b.stride;
    gemm_block_of<Dot>(rows, vectors)(a.lanes, a.stride, panel, steps, c + v * LANES, ldc);
  }
}

}  // namespace
