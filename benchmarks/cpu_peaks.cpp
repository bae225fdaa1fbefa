// What this machine can do at most: products from registers, and reading memory. For one thread each; cpu_peaks.py runs
// one per core. Plain C interface; compiled with -march=native. A product that this CPU does not have returns 0.
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
  Vector sums[CHAINS] = {}, x, y;
  for (int i = 0; i < 16; ++i) x[i] = out[0] + 1e-9f * i, y[i] = 1e-9f;
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = sums[c] * x + y;
    asm volatile("" : "+m"(*out));
  }
  for (int c = 0; c < CHAINS; ++c) out[0] += sums[c][0];
  return (double)rounds * CHAINS * 16 * 2;
}

EXPORT double peak_bfloat16(int64_t rounds, float* out) {
#if defined(__AVX512BF16__)
  __m512 sums[CHAINS];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512bh x = (__m512bh)_mm512_set1_epi32((int)out[0]), y = (__m512bh)_mm512_set1_epi32(1 + (int)out[0]);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], x, y);
    asm volatile("" : "+m"(*out));
  }
  for (auto& sum : sums) out[0] += _mm512_reduce_add_ps(sum);
  return (double)rounds * CHAINS * 32 * 2;
#else
  return 0;
#endif
}

EXPORT double peak_int8(int64_t rounds, float* out) {
#if defined(__AVX512VNNI__)
  __m512i sums[CHAINS];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i x = _mm512_set1_epi32((int)out[0]), y = _mm512_set1_epi32(1 + (int)out[0]);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_dpbusd_epi32(sums[c], x, y);
    asm volatile("" : "+m"(*out));
  }
  for (auto& sum : sums) out[0] += (float)_mm512_reduce_add_epi32(sum);
  return (double)rounds * CHAINS * 64 * 2;
#else
  return 0;
#endif
}

// Bytes read: `count` vectors of 64 bytes, `repeats` times.
EXPORT double read_memory(const void* data, int64_t count, int64_t repeats, float* out) {
  constexpr int STREAMS = 8;
  typedef int64_t Bits __attribute__((vector_size(64)));
  const Bits* at = (const Bits*)data;
  Bits sums[STREAMS] = {};
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t i = 0; i + STREAMS <= count; i += STREAMS) {
      __builtin_prefetch(at + i + 64, 0, 3);
      __builtin_prefetch(at + i + 68, 0, 3);
#pragma GCC unroll 8
      for (int s = 0; s < STREAMS; ++s) sums[s] ^= at[i + s];
    }
    asm volatile("" : "+m"(*out));
  }
  for (auto& sum : sums) out[0] += (float)(sum[0] & 1);
  return (double)(count / STREAMS * STREAMS) * repeats * 64;
}
