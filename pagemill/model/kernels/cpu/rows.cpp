// Norms, rotary embedding and gated activations: one pass over the rows each, rounded where torch would round.
#include <cmath>

#include "vector.h"

using namespace pagemill;

namespace {

// Below this many elements a second thread costs more than it saves.
constexpr int64_t WORTH_A_THREAD = 16384;

int64_t threads_for(int64_t elements, int64_t threads) { return elements < WORTH_A_THREAD ? 1 : threads; }

// scale_first: x * rms, rounded, times a weight of type T (Llama); else times a float weight, rounded once (Gemma).
template <class T>
void norm_row(T* out, const T* x, T* residual, const void* weight, int64_t cols, float eps, bool scale_first) {
  vf squares = {};
  for (int64_t c = 0; c < cols; c += LANES) {
    vf value = load_part(x + c, cols - c);
    if (residual) {
      value = rounded(value + load_part(residual + c, cols - c), x);
      store_part(residual + c, value, cols - c);
    }
    squares += value * value;
  }
  const T* from = residual ? residual : x;
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / (float)cols + eps);
  for (int64_t c = 0; c < cols; c += LANES) {
    vf value = load_part(from + c, cols - c) * factor;
    if (scale_first) value = rounded(value, x) * load_part((const T*)weight + c, cols - c);
    else value = value * load_part((const float*)weight + c, cols - c);
    store_part(out + c, value, cols - c);
  }
}

template <class T>
void norm(void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t cols, int64_t inner,
          int64_t stride, float eps, bool scale_first, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = (const T*)x + r / inner * stride + r % inner * cols;
    norm_row((T*)out + r * cols, row, residual ? (T*)residual + r * cols : nullptr, weight, cols, eps, scale_first);
  }
}

template <class T>
void rotate_head(T* x, const T* cos, const T* sin, int64_t half) {
  for (int64_t d = 0; d < half; d += LANES) {
    const int64_t n = half - d;
    vf a = load_part(x + d, n), b = load_part(x + half + d, n);
    vf c = load_part(cos + d, n), s = load_part(sin + d, n);
    vf first = rounded(a * c, x) - rounded(b * s, x), second = rounded(b * c, x) + rounded(a * s, x);
    store_part(x + d, first, n);
    store_part(x + half + d, second, n);
  }
}

template <class T>
void rotate(void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t dim, int64_t stride,
            int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      rotate_head((T*)x + t * stride + h * dim, (const T*)cos + t * dim, (const T*)sin + t * dim, dim / 2);
}

template <class T>
void gated_row(T* out, const T* gate, const T* up, int64_t cols, bool gelu) {
  for (int64_t c = 0; c < cols; c += LANES) {
    vf g = load_part(gate + c, cols - c), activated;
    if (gelu) activated = 0.5f * g * (1.0f + tanh_of(0.7978845608028654f * (g + 0.044715f * g * g * g)));
    else activated = g / (1.0f + exp_of(-g));
    store_part(out + c, rounded(activated, out) * load_part(up + c, cols - c), cols - c);
  }
}

template <class T>
void gated(void* out, const void* x, int64_t rows, int64_t cols, bool gelu, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = (const T*)x + r * 2 * cols;
    gated_row((T*)out + r * cols, gate, gate + cols, cols, gelu);
  }
}

}  // namespace

// Row r begins at (r / inner) * stride + (r % inner) * cols. residual may be null; else it becomes x + residual.
PM_EXPORT void pm_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t cols,
                           int64_t inner, int64_t stride, double eps, int64_t scale_first, int64_t dtype,
                           int64_t threads) {
  threads = threads_for(rows * cols, threads);
  if (dtype == BFLOAT16) norm<bf16>(out, x, residual, weight, rows, cols, inner, stride, eps, scale_first, threads);
  else norm<float>(out, x, residual, weight, rows, cols, inner, stride, eps, scale_first, threads);
}

// In place on [tokens, heads, dim], stride elements between tokens; cos and sin [tokens, dim].
PM_EXPORT void pm_rotate(void* x, const void* cos, const void* sin, int64_t tokens, int64_t heads, int64_t dim,
                         int64_t stride, int64_t dtype, int64_t threads) {
  threads = threads_for(tokens * heads * dim, threads);
  if (dtype == BFLOAT16) rotate<bf16>(x, cos, sin, tokens, heads, dim, stride, threads);
  else rotate<float>(x, cos, sin, tokens, heads, dim, stride, threads);
}

// [rows, 2 * cols] to [rows, cols].
PM_EXPORT void pm_gated(void* out, const void* x, int64_t rows, int64_t cols, int64_t gelu, int64_t dtype,
                        int64_t threads) {
  threads = threads_for(rows * cols, threads);
  if (dtype == BFLOAT16) gated<bf16>(out, x, rows, cols, gelu, threads);
  else gated<float>(out, x, rows, cols, gelu, threads);
}
