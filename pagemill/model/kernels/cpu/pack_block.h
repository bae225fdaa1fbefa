// What a block of a panel is made of: its limits and its words, past the caches. Knows not where they come from.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

static_assert(LINEAR_PANEL % LANES == 0, "a panel is whole squares");

// Nobody reads panels soon. Whole cache lines, aligned, need not be fetched to be written.
PM_INLINE void store_past_caches(uint32_t* at, vu lanes) {
#if PM_VEC_BYTES == 64
  _mm512_stream_si512((__m512i*)at, (__m512i)lanes);
#else
  memcpy(at, &lanes, sizeof lanes);
#endif
}

// Before others read what was stored so.
PM_INLINE void finish_stores() {
#if PM_VEC_BYTES == 64
  _mm_sfence();
#endif
}

uint32_t word_at(const char* at) {
  uint32_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

// A word of half bytes in their order: those of its lower 16 bits, or of its upper ones, a byte each.
PM_INLINE vu half_bytes(vu words, bool upper) {
  vu wide = upper ? words >> 16 : words & 0xffffu;
  wide = (wide | wide << 8) & 0x00ff00ffu;
  return (wide | wide << 4) & 0x0f0f0f0fu;
}

// The words of a block [word][output], as a file has them, to those of a panel.
template <int64_t WORDS>
void store_block(const uint32_t* block, uint32_t flip, uint32_t* out) {
  for (int64_t word = 0; word < WORDS; ++word) {
    for (int64_t i = 0; i < LINEAR_PANEL; i += LANES) {
      vu lanes;
      if (WORDS == 8) {
        lanes = load_raw<vu>(block + word * LINEAR_PANEL + i) ^ flip;
      } else {
        const vu low = load_raw<vu>(block + word / 2 * LINEAR_PANEL + i);
        const vu high = load_raw<vu>(block + (2 + word / 2) * LINEAR_PANEL + i);
        lanes = half_bytes(low, word % 2) | half_bytes(high, word % 2) << 4;
      }
      store_past_caches(out + word * LINEAR_PANEL + i, lanes);
    }
  }
}

}  // namespace
