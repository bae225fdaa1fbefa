// Vectors of 32-bit lanes for the instruction set of this translation unit, loads and stores of both storage types.
// Knows nothing about the kernels. Everything is in an unnamed namespace and inlined: the same header is compiled once
// per instruction set, and a symbol shared between those units would let wide instructions leak into narrow CPUs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define PM_VEC_BYTES 64
#elif defined(__AVX2__)
#define PM_VEC_BYTES 32
#else
#define PM_VEC_BYTES 16
#endif

#define PM_INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = PM_VEC_BYTES / 4;

typedef float vf __attribute__((vector_size(PM_VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(PM_VEC_BYTES)));
typedef uint32_t vu __attribute__((vector_size(PM_VEC_BYTES)));
typedef uint16_t vh __attribute__((vector_size(PM_VEC_BYTES / 2)));

// bfloat16 as stored: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// A 16-bit float as stored, of IEEE 754.
struct fp16 {
  uint16_t bits;
};

PM_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
PM_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
PM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PM_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Minus zero folds away; plus zero would cost an addition, because -0 + 0 is +0.
PM_INLINE vf splat(float x) { return x - vf{}; }
PM_INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
PM_INLINE vf max_of(vf a, vf b) { return a > b ? a : b; }

// a * b + c, rounded once where the instruction set can. Contraction is off in the build, so that two places with the
// same formula give the same bits; whoever wants a fused operation asks for it here.
PM_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

PM_INLINE vf sqrt_of(vf x) {
  for (int i = 0; i < LANES; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

// `yes` in the lanes whose index is below count, both without a sign.
PM_INLINE vf select_below(vu index, uint32_t count, vf yes, vf no) {
#if defined(__AVX512F__)
  return (vf)_mm512_mask_blend_ps(_mm512_cmplt_epu32_mask((__m512i)index, _mm512_set1_epi32((int)count)), (__m512)no,
                                  (__m512)yes);
#else
  return select((vi)(index < count), yes, no);
#endif
}

// Sum and maximum over lanes by halving: the order is fixed, so results do not depend on who calls.
PM_INLINE float sum_lanes(vf x) {
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

PM_INLINE float max_lanes(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float part[LANES];
  memcpy(part, &x, sizeof part);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  return part[0];
#endif
}

PM_INLINE vi lane_index() {
  vi index;
  for (int i = 0; i < LANES; ++i) index[i] = i;
  return index;
}

template <class V>
PM_INLINE V load_raw(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// 16 bits to 32 and back, which compilers do in five instructions where there is one.
PM_INLINE vu widen_bits(vh h) {
#if PM_VEC_BYTES == 64
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif PM_VEC_BYTES == 32
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}

PM_INLINE vh narrow_bits(vu u) {
#if PM_VEC_BYTES == 64
  return (vh)_mm512_cvtepi32_epi16((__m512i)u);
#else
  return __builtin_convertvector(u, vh);
#endif
}

// A 16-bit float in the low half of each lane. Infinities, and what is no number, become numbers from 2^16 on.
PM_INLINE vf half_to_float(vu h) {
  return (vf)((vu)((vf)((h & 0x7fffu) << 13) * splat(0x1p112f)) | (h & 0x8000u) << 16);
}

PM_INLINE vf widen(vh h) { return (vf)(widen_bits(h) << 16); }

// Round to nearest even as torch does; a NaN stays a NaN.
PM_INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu u = (vu)x;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = (vu)(x != x);
  return narrow_bits((rounded & ~nan) | (nan & 0x7fc0u));
#endif
}

PM_INLINE vf load(const float* p) { return load_raw<vf>(p); }
PM_INLINE vf load(const bf16* p) { return widen(load_raw<vh>(p)); }
PM_INLINE vf load(const fp16* p) { return half_to_float(widen_bits(load_raw<vh>(p))); }
PM_INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
PM_INLINE void store(bf16* p, vf x) {
  vh h = narrow(x);
  memcpy((void*)p, &h, sizeof h);
}

// The first n <= LANES elements; the lanes beyond are zero. Cheap when the compiler sees that n == LANES.
template <class T>
PM_INLINE vf load(const T* p, int64_t n) {
  if (n == LANES) return load(p);
  T part[LANES] = {};
  memcpy((void*)part, p, n * sizeof(T));
  return load(part);
}

template <class T>
PM_INLINE void store(T* p, vf x, int64_t n) {
  if (n == LANES) return store(p, x);
  T part[LANES];
  store(part, x);
  memcpy((void*)p, part, n * sizeof(T));
}

// What is left of x when it is stored as T and read back.
template <class T>
PM_INLINE vf rounded_to(vf x);
template <>
PM_INLINE vf rounded_to<float>(vf x) {
  return x;
}
template <>
PM_INLINE vf rounded_to<bf16>(vf x) {
  return widen(narrow(x));
}

// body(offset, count) over 0..n in steps of a vector; count is LANES except in the last step.
template <class F>
PM_INLINE void for_vectors(int64_t n, F body) {
  int64_t d = 0;
  for (; d + LANES <= n; d += LANES) body(d, (int64_t)LANES);
  if (d < n) body(d, n - d);
}

#if defined(__clang__)
#define PM_SHUFFLE(mask_type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PM_SHUFFLE(mask_type, a, b, ...) __builtin_shuffle(a, b, (mask_type){__VA_ARGS__})
#endif

// Interleave the lower (upper) halves of a and b: a0 b0 a1 b1 ...
#if PM_VEC_BYTES == 64
PM_INLINE vu zip_low(vu a, vu b) {
  return PM_SHUFFLE(vu, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
PM_INLINE vu zip_high(vu a, vu b) {
  return PM_SHUFFLE(vu, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif PM_VEC_BYTES == 32
PM_INLINE vu zip_low(vu a, vu b) { return PM_SHUFFLE(vu, a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
PM_INLINE vu zip_high(vu a, vu b) { return PM_SHUFFLE(vu, a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#else
PM_INLINE vu zip_low(vu a, vu b) { return PM_SHUFFLE(vu, a, b, 0, 4, 1, 5); }
PM_INLINE vu zip_high(vu a, vu b) { return PM_SHUFFLE(vu, a, b, 2, 6, 3, 7); }
#endif

// The same for 16-bit elements; only instruction sets with products of pairs need it.
#if PM_VEC_BYTES == 64
typedef uint16_t vs __attribute__((vector_size(PM_VEC_BYTES)));
PM_INLINE vu zip16_low(vu a, vu b) {
  return (vu)PM_SHUFFLE(vs, (vs)a, (vs)b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                        11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
}
PM_INLINE vu zip16_high(vu a, vu b) {
  return (vu)PM_SHUFFLE(vs, (vs)a, (vs)b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25,
                        57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
}
#endif

// Transpose LANES x LANES lanes. Interleaving row i with row i + LANES/2 moves one bit of the row number into the lane
// number and one back; after log2(LANES) rounds all bits have changed places.
PM_INLINE void transpose(vu (&rows)[LANES]) {
  for (int width = 1; width < LANES; width *= 2) {
    vu next[LANES];
    for (int i = 0; i < LANES / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + LANES / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + LANES / 2]);
    }
    for (int i = 0; i < LANES; ++i) rows[i] = next[i];
  }
}

}  // namespace
