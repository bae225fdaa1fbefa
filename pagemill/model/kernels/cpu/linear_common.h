// What every weight format shares: the size of a panel in vectors, and the end of a row - bias, activation or gate,
// rounding.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec_math.h"

namespace {

// Vectors that hold the outputs of a panel.
constexpr int LINEAR_VECS = (int)(LINEAR_PANEL / LANES);
// How early weights are fetched, in bytes.
constexpr int64_t LINEAR_PREFETCH = 4096, LINEAR_INT_PREFETCH = 8192;

// acc[lane] += low(w) * low(x) + high(w) * high(x), for pairs of bfloat16.
PM_INLINE vf dot_pairs(vf acc, vu w, uint32_t x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
  const uint32_t low = x << 16, high = x & 0xffff0000u;
  float a, b;
  memcpy(&a, &low, sizeof a);
  memcpy(&b, &high, sizeof b);
  acc = fma((vf)(w << 16), splat(a), acc);
  return fma((vf)(w & 0xffff0000u), splat(b), acc);
#endif
}

template <class T>
PM_INLINE void store_outputs(T* out, const vf* values, int64_t count, int first, int last) {
  for (int v = first; v < last; ++v) {
    const int64_t left = count - (int64_t)(v - first) * LANES;
    if (left > 0) store(out + (v - first) * LANES, values[v], min_of(left, LANES));
  }
}

// One row of a panel: bias, gate and rounding, where the composition of single operations in torch rounds.
template <class T, class Gate>
PM_INLINE void finish_gated_row(T* out, int64_t count, const vf* acc) {
  constexpr int HALF = LINEAR_VECS / 2;
  vf results[HALF];
  for (int v = 0; v < HALF; ++v) {
    const vf gate = rounded_to<bf16>(acc[v]), up = rounded_to<bf16>(acc[HALF + v]);
    results[v] = rounded_to<bf16>(Gate::apply(gate)) * up;
  }
  store_outputs(out, results, count, 0, HALF);
}

// As the activation of what has been stored and read again. Not inlined: few layers have one.
__attribute__((noinline)) void activate_outputs(vf* values, int64_t activation) {
  with_activation<bf16>(activation, [&](auto chosen) {
    for (int v = 0; v < LINEAR_VECS; ++v) values[v] = decltype(chosen)::apply(rounded_to<bf16>(values[v]));
  });
}

struct Unchanged {
  template <int N>
  static PM_INLINE void apply_to(vf (&)[N]) {}
};

// ROWS rows of which the panel holds all outputs there are places for, so that nothing is to be asked for each of them.
template <class Activation, int ROWS>
PM_INLINE void finish_whole(bf16* out, int64_t stride, const vf (&bias)[LINEAR_VECS], const vf (*acc)[LINEAR_VECS]) {
  constexpr bool changes = !std::is_same<Activation, Unchanged>::value;
  vf values[ROWS * LINEAR_VECS];
  for (int i = 0; i < ROWS * LINEAR_VECS; ++i) {
    const vf sum = acc[i / LINEAR_VECS][i % LINEAR_VECS] + bias[i % LINEAR_VECS];
    values[i] = changes ? rounded_to<bf16>(sum) : sum;
  }
  Activation::apply_to(values);
  for (int i = 0; i < ROWS * LINEAR_VECS; ++i)
    store(out + i / LINEAR_VECS * stride + i % LINEAR_VECS * LANES, values[i]);
}

template <class Activation>
void finish_whole_rows(bf16* out, int64_t stride, const float* bias, int64_t count, const vf (*acc)[LINEAR_VECS]) {
  constexpr int TOGETHER = 4;
  vf added[LINEAR_VECS];
  // Minus zero is what changes no number.
  for (int v = 0; v < LINEAR_VECS; ++v) added[v] = bias ? load(bias + v * LANES) : -vf{};
  int64_t r = 0;
  for (; r + TOGETHER <= count; r += TOGETHER)
    finish_whole<Activation, TOGETHER>(out + r * stride, stride, added, acc + r);
  for (; r < count; ++r) finish_whole<Activation, 1>(out + r * stride, stride, added, acc + r);
}

// Rows [row, row + count) of a panel.
template <class T>
void finish_rows_as(const LinearArgs& args, int64_t panel, int64_t row, int64_t count, vf (*acc)[LINEAR_VECS]) {
  const PmLinear& linear = args.linear;
  T* out = (T*)args.out + row * args.out_stride;
  if (!linear.gate) {
    const int64_t first = panel * LINEAR_PANEL, outputs = min_of(LINEAR_PANEL, linear.rows - first);
    if constexpr (std::is_same<T, bf16>::value) {
      const float* bias = linear.bias ? linear.bias + first : nullptr;
      const bool whole = outputs == LINEAR_PANEL;
      if (whole && !linear.activation)
        return finish_whole_rows<Unchanged>(out + first, args.out_stride, bias, count, acc);
      if (whole && linear.activation == PM_ACT_GELU)
        return finish_whole_rows<GeluOf<bf16>>(out + first, args.out_stride, bias, count, acc);
    }
    for (int64_t r = 0; r < count; ++r) {
      for (int v = 0; linear.bias && v < LINEAR_VECS; ++v) {
        const int64_t left = outputs - v * LANES;
        if (left > 0) acc[r][v] += load(linear.bias + first + v * LANES, min_of(left, LANES));
      }
      if (linear.activation) activate_outputs(acc[r], linear.activation);
      store_outputs(out + r * args.out_stride + first, acc[r], outputs, 0, LINEAR_VECS);
    }
    return;
  }
  const int64_t first = panel * (LINEAR_PANEL / 2), outputs = min_of(LINEAR_PANEL / 2, linear.rows / 2 - first);
  for (int64_t r = 0; r < count; ++r) {
    T* to = out + r * args.out_stride + first;
    linear.gate == PM_SILU ? finish_gated_row<T, Silu>(to, outputs, acc[r])
                           : finish_gated_row<T, GeluTanh>(to, outputs, acc[r]);
  }
}

template <int ROWS>
PM_INLINE void finish_rows(const LinearArgs& args, int64_t panel, int64_t row, int64_t count,
                           vf (&acc)[ROWS][LINEAR_VECS]) {
  args.out_dtype == PM_FLOAT32 ? finish_rows_as<float>(args, panel, row, count, acc)
                               : finish_rows_as<bf16>(args, panel, row, count, acc);
}

}  // namespace
