// What every weight format shares: the size of a panel in vectors, and the end of a row - bias, gate, rounding.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace {

// Vectors that hold the outputs of a panel.
constexpr int LINEAR_VECS = (int)(LINEAR_PANEL / LANES);
// What will be read in a moment is brought to the second-level cache, so many bytes early: memory is waited for, and on
// the way to the first level it would take up the few slots for loads that miss.
PM_INLINE void prefetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }
constexpr int64_t LINEAR_PREFETCH = 4096, LINEAR_INT_PREFETCH = 8192;

template <class T>
PM_INLINE void store_outputs(T* out, const vf* values, int64_t count, int first, int last) {
  for (int v = first; v < last; ++v) {
    const int64_t left = count - (int64_t)(v - first) * LANES;
    if (left > 0) store(out + (v - first) * LANES, values[v], min_of(left, LANES));
  }
}

// One row of a panel: bias, gate and rounding, where the composition of single operations in torch rounds.
template <class T>
void finish_row_as(const LinearArgs& args, int64_t panel, int64_t row, vf* acc) {
  const PmLinear& linear = args.linear;
  T* out = (T*)args.out + row * args.out_stride;
  if (!linear.gate) {
    const int64_t first = panel * LINEAR_PANEL, count = min_of(LINEAR_PANEL, linear.rows - first);
    if (linear.bias)
      for (int v = 0; v < LINEAR_VECS; ++v) {
        const int64_t left = count - v * LANES;
        if (left > 0) acc[v] += load(linear.bias + first + v * LANES, min_of(left, LANES));
      }
    return store_outputs(out + first, acc, count, 0, LINEAR_VECS);
  }
  constexpr int HALF = LINEAR_VECS / 2;
  const int64_t first = panel * (LINEAR_PANEL / 2), count = min_of(LINEAR_PANEL / 2, linear.rows / 2 - first);
  for (int v = 0; v < HALF; ++v) {
    const vf gate = rounded_to<bf16>(acc[v]), up = rounded_to<bf16>(acc[HALF + v]);
    const vf active = linear.gate == PM_SILU ? Silu::apply(gate) : GeluTanh::apply(gate);
    acc[v] = rounded_to<bf16>(active) * up;
  }
  store_outputs(out + first, acc, count, 0, HALF);
}

PM_INLINE void finish_row(const LinearArgs& args, int64_t panel, int64_t row, vf* acc) {
  args.out_dtype == PM_FLOAT32 ? finish_row_as<float>(args, panel, row, acc) : finish_row_as<bf16>(args, panel, row, acc);
}

}  // namespace
