// exp, tanh and the activations on vectors. Accurate to a few units in the last place of float32.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

// exp(x): 0 below -105 at the latest (also for -inf) and at -87.3 at the earliest, infinity above 88.8 at the latest, NaN
// or infinity for NaN. exp(0) is exactly 1, which the online softmax relies on.
PM_INLINE vf exp_of(vf x) {
#if defined(__AVX512F__)
  // The last multiplication takes any exponent, so there is nothing to put right afterwards. NaN passes: it comes second.
  x = (vf)_mm512_max_ps((__m512)splat(-105.0f), _mm512_min_ps((__m512)splat(89.0f), (__m512)x));
#else
  const vf lowest = splat(-87.3f), highest = splat(88.7f);
  vi underflow = x < lowest;
  x = x < highest ? x : highest;
  x = x > lowest ? x : lowest;
#endif
  // Adding 1.5 * 2^23 leaves round(x / ln 2) in the low bits of the sum.
  const vf magic = splat(12582912.0f);
  vf shifted = fma(x, splat(1.44269504088896341f), magic);
  vf n = shifted - magic;
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi exponent = ((vi)shifted - (vi)magic + 127) << 23;
  return select(underflow, vf{}, p * (vf)exponent);
#endif
}

PM_INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

// 2^x: 0 below -150 at the latest and at -126 at the earliest, NaN for NaN and infinity. 2^0 is exactly 1. With AVX-512
// infinity above 128; elsewhere x is below 127.
PM_INLINE vf exp2_of(vf x) {
#if PM_VEC_BYTES == 64
  const __m512 t = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // NaN passes: it comes second
  const vf n = (vf)_mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = (vf)t - n;
#else
  // Adding 1.5 * 2^23 leaves round(x) in the low bits of the sum.
  const vi underflow = x < splat(-126.0f);
  x = select(underflow, splat(-126.0f), x);
  const vf magic = splat(12582912.0f), shifted = x + magic, n = shifted - magic, f = x - n;
#endif
  vf p = splat(1.3266970387e-3f);
  p = fma(p, f, splat(9.6754597455e-3f));
  p = fma(p, f, splat(5.5507426160e-2f));
  p = fma(p, f, splat(2.4022121754e-1f));
  p = fma(p, f, splat(6.9314694916e-1f));
  p = fma(p, f, splat(1.0f));
#if PM_VEC_BYTES == 64
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return select(underflow, vf{}, p * (vf)(((vi)shifted - (vi)magic + 127) << 23));
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

// From exp(-2|x|), which cannot overflow; the sign is put back at the end.
PM_INLINE vf tanh_of(vf x) {
  vi sign = (vi)x & (int32_t)0x80000000;
  vf t = exp_of(splat(-2.0f) * (vf)((vi)x & 0x7fffffff));
  vf y = (1.0f - t) / (1.0f + t);
  return (vf)((vi)y | sign);
}

struct Silu {
#if PM_VEC_BYTES == 64
  // Half the instructions of the other form. x / ln 2 is rounded before it is split, so that for a large |x| the
  // exponential is off by |x| / 2^24, relatively: far less than the 8 bits that results are rounded to.
  static PM_INLINE vf apply(vf x) { return x / (exp2_of(x * splat(-LOG2_E)) + 1.0f); }
#else
  static PM_INLINE vf apply(vf x) { return x / (1.0f + exp_of(-x)); }
#endif
};

// The tanh approximation of GELU, as torch has it: the cancellation of 1 + tanh in the tail is part of the result.
struct GeluTanh {
  static PM_INLINE vf apply(vf x) {
    const vf inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + tanh_of(inner));
  }
};

// x / 2 * (1 + erf(x / sqrt 2)). erf as Abramowitz and Stegun 7.1.26 has it, off by 1.5e-7 at most; from its complement,
// so that nothing cancels where x is far below 0.
struct Gelu {
  static PM_INLINE vf apply(vf x) {
    const vf z = 0.7071067811865476f * (vf)((vi)x & 0x7fffffff);
    const vf t = 1.0f / fma(z, splat(0.3275911f), splat(1.0f));
    vf p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const vf complement = p * t * exp_of(-z * z);
    return 0.5f * x * select(x < vf{}, complement, 2.0f - complement);
  }
};

// The same for what has been, and will be, rounded to bfloat16: x / (1 + 2^-y), where y is x times a polynomial of x^2.
// The factor of x is off by 1e-5 of itself, a hundredth of what rounding may take, down to x = -4, and by 3e-8 below.
#if PM_VEC_BYTES == 64
struct RoundedGelu {
  static PM_INLINE vf apply(vf x) {
    vf one[1] = {x};
    apply_to(one);
    return one[0];
  }

  // Each step for all vectors before the next one: of a single chain, a core has too few operations in sight.
  template <int N>
  static PM_INLINE void apply_to(vf (&x)[N]) {
    constexpr float P[] = {1.04931280e-1f, -1.29626234e-4f, -1.55642818e-4f, 1.16400997e-5f, -4.47333662e-7f,
                           9.14825193e-9f, -7.82174256e-11f};
    constexpr float E[] = {9.9999928e-1f, 6.9312179e-1f, 2.4024744e-1f, 5.5917859e-2f, 9.5701003e-3f};
    vf t[N], y[N], n[N], e[N];
    const auto each = [](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) step(i);
    };
    // Nothing is left below -20. NaN passes: it comes second.
    each([&](int i) __attribute__((always_inline)) { x[i] = (vf)_mm512_max_ps((__m512)splat(-20.0f), (__m512)x[i]); });
    each([&](int i) __attribute__((always_inline)) { t[i] = (vf)_mm512_min_ps((__m512)splat(30.25f), (__m512)(x[i] * x[i])); });
    each([&](int i) __attribute__((always_inline)) { y[i] = fma(splat(P[6]), t[i], splat(P[5])); });
#pragma GCC unroll 8
    for (int k = 4; k >= 0; --k) each([&](int i) __attribute__((always_inline)) { y[i] = fma(y[i], t[i], splat(P[k])); });
    each([&](int i) __attribute__((always_inline)) { y[i] = fma(y[i], t[i], splat(2.30213904f)); });
    each([&](int i) __attribute__((always_inline)) { y[i] = y[i] * -x[i]; });
    each([&](int i) __attribute__((always_inline)) {
      n[i] = (vf)_mm512_roundscale_ps((__m512)y[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    });
    each([&](int i) __attribute__((always_inline)) { y[i] = y[i] - n[i]; });
    each([&](int i) __attribute__((always_inline)) { e[i] = fma(splat(E[4]), y[i], splat(E[3])); });
#pragma GCC unroll 8
    for (int k = 2; k >= 0; --k) each([&](int i) __attribute__((always_inline)) { e[i] = fma(e[i], y[i], splat(E[k])); });
    each([&](int i) __attribute__((always_inline)) { e[i] = (vf)_mm512_scalef_ps((__m512)e[i], (__m512)n[i]) + 1.0f; });
    each([&](int i) __attribute__((always_inline)) { n[i] = (vf)_mm512_rcp14_ps((__m512)e[i]); });
    each([&](int i) __attribute__((always_inline)) { e[i] = 2.0f - e[i] * n[i]; });
    each([&](int i) __attribute__((always_inline)) { x[i] = x[i] * (n[i] * e[i]); });
  }
};
#else
struct RoundedGelu : Gelu {
  template <int N>
  static PM_INLINE void apply_to(vf (&x)[N]) {
    for (int i = 0; i < N; ++i) x[i] = apply(x[i]);
  }
};
#endif

struct Relu {
  // NaN stays.
  static PM_INLINE vf apply(vf x) { return select(x < vf{}, vf{}, x); }
};

struct Relu2 {
  static PM_INLINE vf apply(vf x) { return Relu::apply(x) * Relu::apply(x); }
};

template <class T>
struct GeluOf : Gelu {};
template <>
struct GeluOf<bf16> : RoundedGelu {};

// Calls `use` with an object of the activation's type, for what is stored as T before and after it.
template <class T, class Use>
PM_INLINE void with_activation(int64_t activation, Use use) {
  switch (activation) {
    case PM_ACT_SILU:
      return use(Silu());
    case PM_ACT_GELU:
      return use(GeluOf<T>());
    case PM_ACT_GELU_TANH:
      return use(GeluTanh());
    case PM_ACT_RELU:
      return use(Relu());
    case PM_ACT_RELU2:
      return use(Relu2());
  }
}

}  // namespace
