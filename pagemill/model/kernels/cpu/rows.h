// Row-wise kernels: RMS norm, LayerNorm, activations, sums, rotary embedding, argmax. Arithmetic is float32; results are rounded to
// the storage type where torch's composition of single operations rounds them, so that both give the same tokens.
#pragma once

#include "kernels.h"
#include "logits_row.h"
#include "vec_math.h"

namespace {

// x + residual in the storage type, kept in sum. Returns the row to be normalised.
template <class T>
const T* add_residual(const T* x, const T* residual, T* sum, int64_t cols) {
  for_vectors(cols, [&](int64_t d, int64_t n) { store(sum + d, load(x + d, n) + load(residual + d, n), n); });
  return sum;
}

template <class T>
float mean_of_squares(const T* x, int64_t cols) {
  vf acc[4] = {};
  int64_t d = 0;
  for (; d + 4 * LANES <= cols; d += 4 * LANES)
    for (int i = 0; i < 4; ++i) {
      const vf v = load(x + d + i * LANES);
      acc[i] = fma(v, v, acc[i]);
    }
  for_vectors(cols - d, [&](int64_t rest, int64_t n) {
    const vf v = load(x + d + rest, n);
    acc[0] = fma(v, v, acc[0]);
  });
  return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3])) / (float)cols;
}

// The mean of `of` of each element, a function of vectors and of floats.
template <class T, class F>
PM_INLINE float mean_of(const T* x, int64_t cols, F of) {
  vf acc[4] = {};
  int64_t d = 0;
  for (; d + 4 * LANES <= cols; d += 4 * LANES)
    for (int i = 0; i < 4; ++i) acc[i] += of(load(x + d + i * LANES));
  float rest = 0;
  for (; d < cols; ++d) rest += of(splat(element(x + d)))[0];
  return (sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3])) + rest) / (float)cols;
}

template <class T>
const T* norm_input(const NormArgs& args, int64_t r) {
  const T* x = (const T*)args.x + r / args.inner * args.x_stride + r % args.inner * args.cols;
  if (!args.residual) return x;
  const int64_t at = r * args.cols;
  return add_residual(x, (const T*)args.residual + at, (T*)args.sum + at, args.cols);
}

// (x - mean) / sqrt(variance + eps) * weight + bias, rounded once, as torch's layer_norm.
template <class T, class W>
void centered_norm_as(const NormArgs& args, int64_t begin, int64_t end) {
  const W *weight = (const W*)args.weight, *bias = (const W*)args.bias;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = norm_input<T>(args, r);
    const vf mean = splat(mean_of(x, args.cols, [](vf v) { return v; }));
    const float variance = mean_of(x, args.cols, [&](vf v) { return (v - mean) * (v - mean); });
    const vf factor = splat(1.0f / __builtin_sqrtf(variance + args.eps));
    T* out = (T*)args.out + r * args.cols;
    for_vectors(args.cols, [&](int64_t d, int64_t n) {
      const vf normed = (load(x + d, n) - mean) * factor * load(weight + d, n);
      store(out + d, bias ? normed + load(bias + d, n) : normed, n);
    });
  }
}

// A weight of the storage type multiplies the rounded normalised row; a float32 weight multiplies before rounding.
template <class T, class W>
void norm_as(const NormArgs& args, int64_t begin, int64_t end) {
  const W* weight = (const W*)args.weight;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = norm_input<T>(args, r);
    const vf factor = splat(1.0f / __builtin_sqrtf(mean_of_squares(x, args.cols) + args.eps));
    T* out = (T*)args.out + r * args.cols;
    for_vectors(args.cols, [&](int64_t d, int64_t n) {
      store(out + d, rounded_to<W>(load(x + d, n) * factor) * load(weight + d, n), n);
    });
  }
}

void norm(const NormArgs& args, int64_t begin, int64_t end) {
  if (args.centers) {
    if (args.dtype == PM_FLOAT32) return centered_norm_as<float, float>(args, begin, end);
    if (args.weight_dtype == PM_FLOAT32) return centered_norm_as<bf16, float>(args, begin, end);
    return centered_norm_as<bf16, bf16>(args, begin, end);
  }
  if (args.dtype == PM_FLOAT32) return norm_as<float, float>(args, begin, end);
  if (args.weight_dtype == PM_FLOAT32) return norm_as<bf16, float>(args, begin, end);
  norm_as<bf16, bf16>(args, begin, end);
}

template <class T, class Activation>
void activation_as(const ActivationArgs& args, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gate = (const T*)args.x + r * args.x_stride;
    const T* up = gate + args.cols;
    T* out = (T*)args.out + r * args.cols;
    for_vectors(args.cols, [&](int64_t d, int64_t n) {
      store(out + d, rounded_to<T>(Activation::apply(load(gate + d, n))) * load(up + d, n), n);
    });
  }
}

template <class T>
void activation_of(const ActivationArgs& args, int64_t begin, int64_t end) {
  if (args.gate == PM_GELU) return activation_as<T, GeluTanh>(args, begin, end);
  if (args.gate == PM_GELU_ERF) return activation_as<T, GeluOf<T>>(args, begin, end);
  activation_as<T, Silu>(args, begin, end);
}

void activation(const ActivationArgs& args, int64_t begin, int64_t end) {
  args.dtype == PM_FLOAT32 ? activation_of<float>(args, begin, end) : activation_of<bf16>(args, begin, end);
}

template <class T, class Activation>
void activate_as(const ElementArgs& args, int64_t begin, int64_t end) {
  const T* x = (const T*)args.x + begin;
  T* out = (T*)args.out + begin;
  for_vectors(end - begin, [&](int64_t d, int64_t n) { store(out + d, Activation::apply(load(x + d, n)), n); });
}

template <class T>
void activate_elements(const ElementArgs& args, int64_t begin, int64_t end) {
  with_activation<T>(args.activation, [&](auto activation) { activate_as<T, decltype(activation)>(args, begin, end); });
}

void activate(const ElementArgs& args, int64_t begin, int64_t end) {
  args.dtype == PM_FLOAT32 ? activate_elements<float>(args, begin, end) : activate_elements<bf16>(args, begin, end);
}

template <class T>
void add_as(const ElementArgs& args, int64_t begin, int64_t end) {
  add_residual((const T*)args.x + begin, (const T*)args.y + begin, (T*)args.out + begin, end - begin);
}

void add(const ElementArgs& args, int64_t begin, int64_t end) {
  args.dtype == PM_FLOAT32 ? add_as<float>(args, begin, end) : add_as<bf16>(args, begin, end);
}

template <class T>
void scale_as(const ElementArgs& args, int64_t begin, int64_t end) {
  const T* x = (const T*)args.x + begin;
  T* out = (T*)args.out + begin;
  const vf factor = splat(args.factor);
  for_vectors(end - begin, [&](int64_t d, int64_t n) { store(out + d, load(x + d, n) * factor, n); });
}

void scale(const ElementArgs& args, int64_t begin, int64_t end) {
  args.dtype == PM_FLOAT32 ? scale_as<float>(args, begin, end) : scale_as<bf16>(args, begin, end);
}

void soft_cap(const ElementArgs& args, int64_t begin, int64_t end) {
  const float* x = (const float*)args.x + begin;
  float* out = (float*)args.out + begin;
  const vf limit = splat(args.factor);
  for_vectors(end - begin, [&](int64_t d, int64_t n) { store(out + d, tanh_of(load(x + d, n) / limit) * limit, n); });
}

template <class T>
void multiply_as(const ElementArgs& args, int64_t begin, int64_t end) {
  const T *x = (const T*)args.x + begin, *y = (const T*)args.y + begin;
  T* out = (T*)args.out + begin;
  for_vectors(end - begin, [&](int64_t d, int64_t n) { store(out + d, load(x + d, n) * load(y + d, n), n); });
}

void multiply(const ElementArgs& args, int64_t begin, int64_t end) {
  args.dtype == PM_FLOAT32 ? multiply_as<float>(args, begin, end) : multiply_as<bf16>(args, begin, end);
}

// A piece of columns at a time, whose sums stay in registers.
template <class T>
void sum_rows_as(const SumArgs& args, int64_t request) {
  constexpr int VECTORS = 4;
  const int64_t cols = args.cols;
  const T *first = (const T*)args.x + args.starts[request] * cols, *last = (const T*)args.x + args.starts[request + 1] * cols;
  float* sums = args.sums + args.slots[request] * cols;
  int64_t d = 0;
  for (; d + VECTORS * LANES <= cols; d += VECTORS * LANES) {
    vf acc[VECTORS];
    for (int v = 0; v < VECTORS; ++v) acc[v] = load(sums + d + v * LANES);
    for (const T* row = first + d; row < last; row += cols)
      for (int v = 0; v < VECTORS; ++v) acc[v] += load(row + v * LANES);
    for (int v = 0; v < VECTORS; ++v) store(sums + d + v * LANES, acc[v]);
  }
  for_vectors(cols - d, [&](int64_t rest, int64_t n) {
    vf acc = load(sums + d + rest, n);
    for (const T* row = first + d; row < last; row += cols) acc += load(row + rest, n);
    store(sums + d + rest, acc, n);
  });
}

void sum_rows(const SumArgs& args, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    if (args.slots[r] < 0) continue;
    args.dtype == PM_FLOAT32 ? sum_rows_as<float>(args, r) : sum_rows_as<bf16>(args, r);
  }
}

// Rotates pairs (d, d + half). With a table of the storage type each product is rounded, as x * cos + y * sin is in torch;
// with a float32 table the sum is rounded once.
template <class T, class C>
void rope_as(const RopeArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const C* cos = (const C*)args.cos + t * args.table_stride;
    const C* sin = (const C*)args.sin + t * args.table_stride;
    for (int64_t h = 0; h < args.num_heads; ++h) {
      T* x = (T*)args.x + t * args.x_stride + h * args.head_size;
      T* y = x + args.half;
      for_vectors(args.half, [&](int64_t d, int64_t n) {
        const vf a = load(x + d, n), b = load(y + d, n), c = load(cos + d, n), s = load(sin + d, n);
        store(x + d, rounded_to<C>(a * c) - rounded_to<C>(b * s), n);
        store(y + d, rounded_to<C>(b * c) + rounded_to<C>(a * s), n);
      });
    }
  }
}

void rope(const RopeArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == PM_FLOAT32) return rope_as<float, float>(args, begin, end);
  if (args.table_dtype == PM_FLOAT32) return rope_as<bf16, float>(args, begin, end);
  rope_as<bf16, bf16>(args, begin, end);
}

template <class Row>
ArgmaxResult first_nan(const Row& row, int64_t at) {
  while (row.one(at) == row.one(at)) ++at;
  return {row.one(at), at};
}

// First index of the largest element in [begin, end) of a row; the first NaN, if there is one, as torch has it.
// The maximum of each stretch is found with vectors; the element is looked up only in the stretch that won.
template <class Row>
ArgmaxResult argmax_of(const Row& row, int64_t begin, int64_t end) {
  constexpr int64_t STRETCH = 32 * LANES;
  float best = -__builtin_inff();
  int64_t best_begin = begin;
  for (int64_t at = begin; at < end; at += STRETCH) {
    const int64_t stop = min_of(end, at + STRETCH);
    if (row.refuses_all(at, stop)) continue;
    vf highest[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())};
    vi unordered = {};
    int64_t d = at;
    for (; d + 2 * LANES <= stop; d += 2 * LANES)
      for (int i = 0; i < 2; ++i) {
        const vf v = row.lanes(d + i * LANES);
        unordered |= v != v;
        highest[i] = max_of(v, highest[i]);
      }
    float found = max_lanes(max_of(highest[0], highest[1]));
    float nan_sum = sum_lanes(select(unordered, splat(1.0f), vf{}));
    for (; d < stop; ++d) {
      const float v = row.one(d);
      nan_sum += v != v ? 1.0f : 0.0f;
      found = v > found ? v : found;
    }
    if (nan_sum > 0) return first_nan(row, at);
    if (found > best) {
      best = found;
      best_begin = at;
    }
  }
  for (int64_t d = best_begin; d < end; ++d)
    if (row.one(d) == best) return {best, d};
  return {best, begin};
}

ArgmaxResult argmax(const ArgmaxArgs& args, int64_t row, int64_t begin, int64_t end) {
  const int64_t at = row * args.stride;
  if (args.dtype == PM_BFLOAT16) return argmax_of(WholeRow<bf16>{(const bf16*)args.logits + at}, begin, end);
  const float* logits = (const float*)args.logits + at;
  const uint32_t* words = args.masks ? args.masks[row] : nullptr;
  if (words) return argmax_of(MaskedRow{logits, words}, begin, end);
  return argmax_of(WholeRow<float>{logits}, begin, end);
}

}  // namespace
