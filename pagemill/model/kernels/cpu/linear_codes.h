// Linear layers whose weights are small floats: indices of a table of 16 numbers, or floats of 8 bits. In registers they
// become pairs of bfloat16 (of 8-bit floats, all but those below 2^-6, which count as zero where products of bfloat16 are
// an instruction), and inputs are multiplied in their own 16 bits. The sum of a block of QUANT_BLOCK inputs is multiplied
// with its scale, block after block, for one row as for many: results do not depend on the batch.
#pragma once

#include "linear_common.h"
#include "linear_int.h"
#include "thread_buffer.h"

namespace {

// Pairs of inputs of a block.
constexpr int64_t BLOCK_PAIRS = QUANT_BLOCK / 2;
constexpr int64_t CODE_BLOCK_BYTES = BLOCK_PAIRS * LINEAR_PANEL * 4;

// A format says which inputs of a block are its pairs, and makes those of a vector of outputs. `EXPONENT` is added to
// that of inputs. A lane of 32 bits has, in half bytes, inputs 4g to 4g + 3 and 4g + 16 to 4g + 19; or bytes of four.

// Of an index of 5 bits, the fifth belongs to the next half byte: the table is there twice.
struct alignas(64) Nf4Twice {
  uint16_t levels[32] = {};

  constexpr Nf4Twice() {
    for (int i = 0; i < 32; ++i) levels[i] = NF4_LEVELS[i % 16];
  }
};
constexpr Nf4Twice NF4_TWICE;

struct Nf4 {
  static constexpr int64_t BYTES = panel_block_bytes(PM_NF4_PANELS);
  static constexpr int32_t EXPONENT = 0;
  static constexpr uint16_t ORDER[QUANT_BLOCK] = {0, 2,  1, 3,  16, 18, 17, 19, 4,  6,  5,  7,  20, 22, 21, 23,
                                                  8, 10, 9, 11, 24, 26, 25, 27, 12, 14, 13, 15, 28, 30, 29, 31};

  static PM_INLINE void pairs(const char* block, int g, int v, vu (&pair)[4]) {
    const vu codes = load_raw<vu>(block + LINEAR_PANEL * 2 + g * GROUP_BYTES + v * PM_VEC_BYTES);
    pair[0] = look_up(codes);
    pair[1] = look_up(codes >> 8);
    pair[2] = look_up(codes >> 4);
    pair[3] = look_up(codes >> 12);
  }
  static PM_INLINE vf scale(const char* block, int v) { return Q8::scale(block, v); }

  // Of the lowest half bytes of the halves of each lane.
  static PM_INLINE vu look_up(vu codes) {
#if PM_VEC_BYTES == 64
    return (vu)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(NF4_TWICE.levels));
#elif PM_VEC_BYTES == 32
    const auto bytes = [](int shift) {
      uint8_t part[16];
      for (int i = 0; i < 16; ++i) part[i] = (uint8_t)(NF4_LEVELS[i] >> shift);
      return _mm256_broadcastsi128_si256(load_raw<__m128i>(part));
    };
    const vu index = codes & 0x000f000fu;
    const vu low = (vu)_mm256_shuffle_epi8(bytes(0), (__m256i)index);
    const vu high = (vu)_mm256_shuffle_epi8(bytes(8), (__m256i)index);
    return (low & 0x00ff00ffu) | (high & 0x00ff00ffu) << 8;
#else
    for (int i = 0; i < LANES; ++i)
      codes[i] = NF4_LEVELS[codes[i] & 15] | (uint32_t)NF4_LEVELS[codes[i] >> 16 & 15] << 16;
    return codes;
#endif
  }
};

struct Float8 {
  static constexpr int64_t BYTES = panel_block_bytes(PM_FLOAT8_PANELS);
  // The bits of an 8-bit float are those of a bfloat16 that is 2^120 times smaller. Half of that is made up for ahead, so
  // that products of inputs from 2^-60 to 2^63 are normal numbers.
  static constexpr int32_t EXPONENT = 64;
  static constexpr uint16_t ORDER[QUANT_BLOCK] = {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                                  16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};

  static PM_INLINE void pairs(const char* block, int g, int v, vu (&pair)[4]) {
    const char* at = block + LINEAR_PANEL * 2 + 2 * g * GROUP_BYTES + v * PM_VEC_BYTES;
    for (int i = 0; i < 2; ++i) {
      const vu codes = load_raw<vu>(at + i * GROUP_BYTES);
      pair[2 * i] = widened(codes << 8);
      pair[2 * i + 1] = widened(codes);
    }
  }
  // Of the upper byte of both halves of each lane: the sign stays, the rest moves to the exponent's lowest bits.
  static PM_INLINE vu widened(vu codes) {
    typedef int16_t signed_halves __attribute__((vector_size(PM_VEC_BYTES)));
    return (vu)((signed_halves)codes >> 4) & 0x87f087f0u;
  }
  static PM_INLINE vf scale(const char* block, int v) {
    return Q8::scale(block, v) * splat(0x1p56f / FLOAT8_UNIT);
  }
};

inline int64_t arranged_stride(int64_t cols) { return ceil_div(cols, QUANT_BLOCK) * QUANT_BLOCK * (int64_t)sizeof(bf16); }

// x times 2^exponent, as bits; zeros and numbers that small stay as they are, the largest become infinite.
PM_INLINE uint16_t times_power(uint16_t bits, int32_t exponent) {
  const int32_t now = bits >> 7 & 0xff;
  if (exponent == 0 || now == 0 || now == 0xff) return bits;
  if (now + exponent > 0xfe) return (uint16_t)((bits & 0x8000) | 0x7f80);
  return (uint16_t)(bits + (exponent << 7));
}

// Rows [begin, end) of x with their inputs in the order of the format's pairs, zeros behind the last.
template <class Format>
void arrange_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.linear.cols, num_blocks = ceil_div(cols, QUANT_BLOCK);
  for (int64_t r = begin; r < end; ++r) {
    const uint16_t* x = (const uint16_t*)((const bf16*)args.x + r * args.x_stride);
    uint16_t* to = (uint16_t*)((char*)args.quantized + r * arranged_stride(cols));
    for (int64_t b = 0; b < num_blocks; ++b, x += QUANT_BLOCK, to += QUANT_BLOCK) {
      uint16_t block[QUANT_BLOCK] = {};
      memcpy(block, x, min_of(QUANT_BLOCK, cols - b * QUANT_BLOCK) * sizeof(bf16));
      for (int i = 0; i < QUANT_BLOCK; ++i) to[i] = times_power(block[Format::ORDER[i]], Format::EXPONENT);
    }
  }
}

// A panel as it is stored, for few rows.
template <class Panel, bool ONCE>
struct DirectCodes {
  using Format = Panel;
  const char* block;

  PM_INLINE void prefetch() const {
    const char* at = block + LINEAR_INT_PREFETCH;
    for (int64_t line = 0; line < Format::BYTES; line += 64) ONCE ? stream_line(at + line) : prefetch_line(at + line);
  }
  PM_INLINE void pairs(int g, int v, vu (&pair)[4]) const { Format::pairs(block, g, v, pair); }
  PM_INLINE vf scale(int v) const { return Format::scale(block, v); }
  PM_INLINE void next() { block += Format::BYTES; }
};

// A panel whose pairs have been made, for many: [block][vector][pair], and the scales where they are stored.
template <class Panel>
struct PreparedCodes {
  using Format = Panel;
  const char* block;
  const char* ready;

  PM_INLINE void prefetch() const {}
  PM_INLINE void pairs(int g, int v, vu (&pair)[4]) const {
    for (int i = 0; i < 4; ++i) pair[i] = load_raw<vu>(ready + ((v * 4 + g) * 4 + i) * PM_VEC_BYTES);
  }
  PM_INLINE vf scale(int v) const { return Format::scale(block, v); }
  PM_INLINE void next() {
    block += Format::BYTES;
    ready += CODE_BLOCK_BYTES;
  }

  static void make(const char* from, int64_t num_blocks, char* to) {
    for (int64_t b = 0; b < num_blocks; ++b, from += Format::BYTES, to += CODE_BLOCK_BYTES)
      for (int v = 0; v < LINEAR_VECS; ++v)
        for (int g = 0; g < 4; ++g) {
          vu pair[4];
          Format::pairs(from, g, v, pair);
          memcpy(to + (v * 4 + g) * sizeof pair, pair, sizeof pair);
        }
  }
};

// ROWS rows of inputs, `stride` bytes apart, against one panel.
template <class Panel, int ROWS>
__attribute__((noinline)) void multiply_codes(Panel panel, const char* x, int64_t stride, int64_t num_blocks,
                                              vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  vf sums[ROWS][LINEAR_VECS] = {};
  for (int64_t b = 0; b < num_blocks; ++b) {
    panel.prefetch();
    // Two sums each: one product waits for the one before it.
    vf dots[ROWS][LINEAR_VECS][2] = {};
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
#pragma GCC unroll 8
      for (int v = 0; v < LINEAR_VECS; ++v) {
        vu pair[4];
        panel.pairs(g, v, pair);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
          const uint32_t* inputs = (const uint32_t*)(x + r * stride) + 4 * g;
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) dots[r][v][i % 2] = dot_pairs(dots[r][v][i % 2], pair[i], inputs[i]);
        }
      }
#pragma GCC unroll 8
    for (int v = 0; v < LINEAR_VECS; ++v) {
      const vf scale = panel.scale(v);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) sums[r][v] = fma(dots[r][v][0] + dots[r][v][1], scale, sums[r][v]);
    }
    panel.next();
    x += BLOCK_PAIRS * 4;
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < LINEAR_VECS; ++v) acc[r][v] = sums[r][v];
}

template <class Panel, int ROWS>
PM_INLINE void multiply_code_rows(int64_t count, const Panel& panel, const char* x, int64_t stride, int64_t num_blocks,
                                  vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  if (count == ROWS) return multiply_codes<Panel, ROWS>(panel, x, stride, num_blocks, acc);
  if constexpr (ROWS > 1) multiply_code_rows<Panel, ROWS - 1>(count, panel, x, stride, num_blocks, acc);
}

// Panel number `index` for rows [begin, end).
template <class Panel>
void linear_code_rows(const LinearArgs& args, int64_t index, const Panel& panel, int64_t begin, int64_t end) {
  const int64_t parts = ceil_div(end - begin, INT_ROWS), stride = arranged_stride(args.linear.cols);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = begin + (end - begin) * part / parts, next = begin + (end - begin) * (part + 1) / parts;
    vf acc[INT_ROWS][LINEAR_VECS];
    multiply_code_rows<Panel, INT_ROWS>(next - row, panel, (const char*)args.quantized + row * stride, stride,
                                        ceil_div(args.linear.cols, QUANT_BLOCK), acc);
    finish_rows(args, index, row, next - row, acc);
  }
}

template <class Format>
void linear_codes(const LinearArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer memory;
  const int64_t num_blocks = ceil_div(args.linear.cols, QUANT_BLOCK);
  const int64_t chunks =
      ceil_div(args.num_rows, max_of(1, INT_CHUNK_BYTES / arranged_stride(args.linear.cols) / INT_ROWS) * INT_ROWS);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t chunk = args.num_rows * i / chunks, stop = args.num_rows * (i + 1) / chunks;
    for (int64_t index = begin; index < end; ++index) {
      const char* panel = (const char*)args.linear.weight + index * num_blocks * Format::BYTES;
      if (stop - chunk <= INT_ROWS) {
        linear_code_rows(args, index, DirectCodes<Format, true>{panel}, chunk, stop);
        continue;
      }
      char* ready = (char*)memory.at_least(num_blocks * CODE_BLOCK_BYTES);
      PreparedCodes<Format>::make(panel, num_blocks, ready);
      linear_code_rows(args, index, PreparedCodes<Format>{panel, ready}, chunk, stop);
    }
  }
}

}  // namespace
