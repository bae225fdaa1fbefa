// What this machine can do at most: products from registers, and reading memory. For one thread each; cpu_peaks.py runs
// one per core. Plain C interface; compiled with -march=native. A product that this CPU does not have returns 0. Loops
// have nothing that would make the compiler keep the sums in memory: then a ceiling is that of storing them.
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int CHAINS = 12;  // independent sums: enough to hide the latency of one

typedef float Vector __attribute__((vector_size(64)));

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Operations done, two for each multiply-add.
EXPORT double peak_float32(int64_t rounds, float* out) {
  Vector sums[CHAINS], x, y;
  // Chains of equal numbers would be computed once.
  for (int c = 0; c < CHAINS; ++c)
    for (int i = 0; i < 16; ++i) sums[c][i] = out[0] + (float)c;
  for (int i = 0; i < 16; ++i) x[i] = out[0] + 1e-9f * i, y[i] = 1e-9f;
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = sums[c] * x + y;
  }
  for (int c = 0; c < CHAINS; ++c) out[0] += sums[c][0];
  return (double)rounds * CHAINS * 16 * 2;
}

EXPORT double peak_bfloat16(int64_t rounds, float* out) {
#if defined(__AVX512BF16__)
  __m512 sums[CHAINS];
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_set1_ps(out[0] + (float)c);
  const __m512bh x = (__m512bh)_mm512_set1_epi32((int)out[0]), y = (__m512bh)_mm512_set1_epi32(1 + (int)out[0]);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], x, y);
  }
  for (auto& sum : sums) out[0] += _mm512_reduce_add_ps(sum);
  return (double)rounds * CHAINS * 32 * 2;
#else
  return 0;
#endif
}

EXPORT double peak_int8(int64_t rounds, float* out) {
#if defined(__AVX512VNNI__)
  const __m512i x = _mm512_set1_epi32((int)out[0]), y = _mm512_set1_epi32(1 + (int)out[0]);
  __m512i a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
  static_assert(CHAINS == 12, "one letter each");
  // Written out: around the intrinsic the compiler copies every sum from one register to another and back.
  for (int64_t r = 0; r < rounds; ++r)
    asm volatile(
        "vpdpbusd %12, %13, %0\n vpdpbusd %12, %13, %1\n vpdpbusd %12, %13, %2\n vpdpbusd %12, %13, %3\n"
        "vpdpbusd %12, %13, %4\n vpdpbusd %12, %13, %5\n vpdpbusd %12, %13, %6\n vpdpbusd %12, %13, %7\n"
        "vpdpbusd %12, %13, %8\n vpdpbusd %12, %13, %9\n vpdpbusd %12, %13, %10\n vpdpbusd %12, %13, %11"
        : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l)
        : "v"(x), "v"(y));
  return (double)rounds * CHAINS * 64 * 2;
#else
  return 0;
#endif
}

// Bytes read: `count` vectors of 64 bytes, `repeats` times, from four places at once, which is what reads fastest here.
EXPORT double read_memory(const void* data, int64_t count, int64_t repeats, float* out) {
  constexpr int STREAMS = 4;
  typedef int64_t Bits __attribute__((vector_size(64)));
  const Bits* at = (const Bits*)data;
  const int64_t each = count / STREAMS / 2 * 2;
  Bits sums[2 * STREAMS] = {};
  for (int64_t r = 0; r < repeats; ++r) {
    asm volatile("" : "+r"(at));  // what a repetition reads is not known beforehand
    for (int64_t i = 0; i < each; i += 2) {
#pragma GCC unroll 4
      for (int s = 0; s < STREAMS; ++s) {
        sums[2 * s] ^= at[s * each + i];
        sums[2 * s + 1] ^= at[s * each + i + 1];
      }
    }
  }
  for (auto& sum : sums) out[0] += (float)(sum[0] & 1);
  return (double)each * STREAMS * repeats * 64;
}
