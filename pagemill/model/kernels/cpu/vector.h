// Vectors of 16 floats in the compiler's own notation, and the two storage types. Compiled for the machine it runs on;
// narrower CPUs get the same code in halves or quarters, so every machine sums in the same order.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pagemill {

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

// bfloat16 as stored: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };

template <class V>
inline V load_raw(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline vf load(const float* p) { return load_raw<vf>(p); }
inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(load_raw<vh>(p), vu) << 16); }

// Round to nearest even, as torch does; a NaN stays a NaN.
inline vh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu u = (vu)x;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = (vu)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), vh);
#endif
}

inline void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
inline void store(bf16* p, vf x) {
  vh h = narrow(x);
  memcpy((void*)p, &h, sizeof h);
}

// What is left of x when it is stored as T and read back.
inline vf rounded(vf x, const float*) { return x; }
inline vf rounded(vf x, const bf16*) { return (vf)(__builtin_convertvector(narrow(x), vu) << 16); }

// The first n lanes; those beyond are zero.
template <class T>
inline vf load_part(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T part[LANES] = {};
  memcpy((void*)part, p, n * sizeof(T));
  return load(part);
}

template <class T>
inline void store_part(T* p, vf x, int64_t n) {
  if (n >= LANES) return store(p, x);
  T part[LANES];
  store(part, x);
  memcpy((void*)p, part, n * sizeof(T));
}

inline vf splat(float x) { return vf{} + x; }
inline vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
inline vf larger(vf a, vf b) { return select(a > b, a, b); }

inline float sum_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float part[LANES];
  memcpy(part, &x, sizeof part);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
#endif
}

inline float max_lanes(vf x) {
  float part[LANES];
  memcpy(part, &x, sizeof part);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  return part[0];
}

// e^x to about 1e-7 relative: 2^n times a polynomial in the rest. Below -87 the result is 0, and so for -infinity.
inline vf exp_of(vf x) {
  vi zero = x < -87.0f;
  x = select(x > 88.0f, splat(88.0f), select(zero, splat(0.0f), x));
  vf n = x * 1.44269504088896341f;
  vi whole = __builtin_convertvector(n + select(n < 0.0f, splat(-0.5f), splat(0.5f)), vi);
  vf w = __builtin_convertvector(whole, vf);
  vf r = x - w * 0.693359375f - w * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  vf result = (p * r * r + r + 1.0f) * (vf)((whole + 127) << 23);
  return select(zero, splat(0.0f), result);
}

// tanh x = 1 - 2 / (e^2x + 1); the ends saturate by themselves.
inline vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

}  // namespace pagemill

#define PM_EXPORT extern "C" __attribute__((visibility("default")))
