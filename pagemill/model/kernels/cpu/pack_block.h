// What a block of a panel is made of: its limits and its words, past the caches. Knows not where they come from.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

static_assert(LINEAR_PANEL % LANES == 0, "a panel is whole squares");

// Of an output in a block, of integers of so many bits.
constexpr int64_t words_of_block(int64_t bits) { return QUANT_BLOCK * bits / 32; }

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

// Of a block of panels that are `stride` bytes apart, where the words of an output of theirs go.
PM_INLINE uint32_t* word_of(char* block, int64_t output, int64_t word, int64_t stride) {
  return (uint32_t*)(block + output / LINEAR_PANEL * stride) + word * LINEAR_PANEL + output % LINEAR_PANEL;
}

// Of each lane of four vectors, the lowest bytes, the second, third and fourth, in the order of the vectors.
PM_INLINE void transpose_bytes(const vu (&from)[4], vu& first, vu& second, vu& third, vu& fourth) {
  const vu even_low = (from[0] & 0x00ff00ffu) | (from[1] & 0x00ff00ffu) << 8;
  const vu even_high = (from[2] & 0x00ff00ffu) | (from[3] & 0x00ff00ffu) << 8;
  const vu odd_low = (from[0] >> 8 & 0x00ff00ffu) | (from[1] & 0xff00ff00u);
  const vu odd_high = (from[2] >> 8 & 0x00ff00ffu) | (from[3] & 0xff00ff00u);
  first = (even_low & 0xffffu) | even_high << 16;
  second = (odd_low & 0xffffu) | odd_high << 16;
  third = even_low >> 16 | (even_high & 0xffff0000u);
  fourth = odd_low >> 16 | (odd_high & 0xffff0000u);
}

}  // namespace
