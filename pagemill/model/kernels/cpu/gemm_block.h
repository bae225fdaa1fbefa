// The register-tiled product at the heart of attention: C[m][n] = sum over k of A[m][k] * B[k][n], for a few rows m.
// Knows nothing about attention. Each element of C is summed in the order of k, whatever the tile it is part of.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

// Vectors side by side in one pass. 6 x 4 (or 6 x 2) accumulators and their operands fill the register file; rows of
// which two stand for one are better taken 8 x 2.
constexpr int MAX_ROWS = 6;
constexpr int MAX_PART_ROWS = 8;
constexpr int MAX_VECTORS = PM_VEC_BYTES == 64 ? 4 : 2;

// A `Dot` says what a lane holds and how a step of k is added. `PACK` elements of the sum go into one lane; to make B of
// rows, `store_values` brings the elements of PACK rows side by side. PARTS rows of A and C stand for one. ROWS
// are taken in one pass.

struct FloatDot {
  using Stored = float;
  static constexpr int PACK = 1;
  static constexpr int PARTS = 1;
  static constexpr int ROWS = MAX_ROWS;
  static PM_INLINE vf add(vf acc, uint32_t a, vu b) { return fma((vf)(vu{} + a), (vf)b, acc); }
  static PM_INLINE void store_values(vu row, vu, uint32_t* to) { memcpy(to, &row, sizeof row); }
};

#if defined(__AVX512BF16__)
struct PairDot {
  using Stored = bf16;
  static constexpr int PACK = 2;
  static constexpr int PARTS = 1;
  static constexpr int ROWS = MAX_ROWS;
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

// B lies where the cache has it and is reached through pointers. `ahead` is what will be read soon: brought to the
// second-level cache, because on the way to the first it would take up the few slots for loads that miss.

// Each vector of columns has a place of its own, with its steps `stride` lanes apart.
struct ColumnPointers {
  const uint32_t* const* vectors;
  const uint32_t* const* ahead;  // for each vector, as many lanes as it has, in one piece
  int64_t stride;

  PM_INLINE const uint32_t* at(int64_t k, int v) const { return vectors[v] + k * stride; }
  PM_INLINE const uint32_t* ahead_of(int64_t k, int v) const { return ahead[v] + k * LANES; }
};

// Each step has a place of its own, with its columns side by side. There are STEPS_AHEAD more pointers than steps.
struct RowPointers {
  static constexpr int64_t STEPS_AHEAD = 32;
  const uint32_t* const* steps;
  int64_t first_lane;

  PM_INLINE const uint32_t* at(int64_t k, int v) const { return steps[k] + first_lane + v * LANES; }
  PM_INLINE const uint32_t* ahead_of(int64_t k, int v) const { return at(k + STEPS_AHEAD, v); }
};

// a: rows of lda lanes; c: rows of ldc floats.
template <class Dot, int ROWS, int VECTORS, class Pointers>
void gemm_block(const uint32_t* a, int64_t lda, const Pointers& pointers, int64_t steps, float* c, int64_t ldc) {
  const Pointers b = pointers;
  vf acc[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < steps; ++k) {
    vu cols[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      cols[v] = load_raw<vu>(b.at(k, v));
      prefetch_line(b.ahead_of(k, v));
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      uint32_t lane = a[m * lda + k];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) acc[m][v] = Dot::add(acc[m][v], lane, cols[v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) store(c + m * ldc + v * LANES, acc[m][v]);
}

template <class Pointers>
using GemmBlock = void (*)(const uint32_t*, int64_t, const Pointers&, int64_t, float*, int64_t);

template <class Dot, int ROWS, class Pointers>
GemmBlock<Pointers> gemm_block_of(int64_t vectors) {
  if constexpr (MAX_VECTORS == 4) {
    if (vectors == 4) return gemm_block<Dot, ROWS, 4, Pointers>;
    if (vectors == 3) return gemm_block<Dot, ROWS, 3, Pointers>;
  }
  return vectors == 2 ? gemm_block<Dot, ROWS, 2, Pointers> : gemm_block<Dot, ROWS, 1, Pointers>;
}

template <class Dot, class Pointers>
GemmBlock<Pointers> gemm_block_of(int64_t rows, int64_t vectors) {
  switch (rows) {
    case 1: return gemm_block_of<Dot, 1, Pointers>(vectors);
    case 2: return gemm_block_of<Dot, 2, Pointers>(vectors);
    case 3: return gemm_block_of<Dot, 3, Pointers>(vectors);
    case 4: return gemm_block_of<Dot, 4, Pointers>(vectors);
    case 5: return gemm_block_of<Dot, 5, Pointers>(vectors);
    case MAX_PART_ROWS: return vectors == 2 ? gemm_block<Dot, 8, 2, Pointers> : gemm_block<Dot, 8, 1, Pointers>;
    default: return gemm_block_of<Dot, 6, Pointers>(vectors);
  }
}

inline int64_t vectors_at_once(int64_t rows) { return rows > MAX_ROWS ? 2 : MAX_VECTORS; }

// A: rows of `stride` lanes.
struct Operand {
  const uint32_t* lanes;
  int64_t stride;
};

// C for the columns of vectors [first, last). c points at column 0; so do the pointers.
template <class Dot>
void gemm_columns(Operand a, ColumnPointers b, int64_t rows, int64_t steps, int64_t first, int64_t last, float* c,
                  int64_t ldc) {
  const int64_t most = vectors_at_once(rows);
  for (int64_t v = first; v < last; v += most) {
    const int64_t vectors = min_of(most, last - v);
    const ColumnPointers part = {b.vectors + v, b.ahead + v, b.stride};
    gemm_block_of<Dot, ColumnPointers>(rows, vectors)(a.lanes, a.stride, part, steps, c + v * LANES, ldc);
  }
}

// C for `vectors` vectors of columns.
template <class Dot>
void gemm_steps(Operand a, const uint32_t* const* b, int64_t rows, int64_t steps, int64_t vectors, float* c,
                int64_t ldc) {
  const int64_t most = vectors_at_once(rows);
  for (int64_t v = 0; v < vectors; v += most) {
    const RowPointers part = {b, v * LANES};
    gemm_block_of<Dot, RowPointers>(rows, min_of(most, vectors - v))(a.lanes, a.stride, part, steps, c + v * LANES,
                                                                    ldc);
  }
}

}  // namespace
