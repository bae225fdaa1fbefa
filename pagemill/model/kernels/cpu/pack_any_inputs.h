// Panels of integers whose inputs are in another order than those of the file. Knows not how a file has them.
#pragma once

#include "kernels.h"
#include "pack_block.h"
#include "thread_buffer.h"
#include "vec.h"

namespace {

// Inputs of a few panels: each word is read once, and its bytes, of an input of 8 bits or two of 4, go to rows of their own,
// from where they are taken in any order. A lane of a row has those of four outputs, of each of four vectors one.
template <int64_t BITS>
struct AnyInputs {
  static constexpr int64_t BYTE_INPUTS = 8 / BITS, WORD_INPUTS = 4 * BYTE_INPUTS;
  static constexpr int64_t VECTORS = 4, OUTPUTS = VECTORS * LANES;
  static constexpr int64_t SIDES = OUTPUTS < LINEAR_PANEL ? LINEAR_PANEL / OUTPUTS : 1;
  static constexpr int64_t PANELS = SIDES * OUTPUTS / LINEAR_PANEL;
  // Words of each output that are read before they are taken apart.
  static constexpr int64_t LINES = 16;

  static int64_t bytes(int64_t cols) { return cols / BYTE_INPUTS * SIDES * LANES * 4; }

  uint32_t* rows;  // [cols / BYTE_INPUTS][side][lane]

  // All inputs, in so many words of an output, of `count` panels from one on.
  template <class Source>
  void read(const Source& source, int64_t panel, int64_t count, int64_t words) const {
    alignas(64) uint32_t lines[PANELS][LINES][LINEAR_PANEL];
    if (count < PANELS) memset(lines, 0, sizeof lines);
    for (int64_t first = 0; first < words; first += LINES) {
      const int64_t last = min_of(first + LINES, words);
      for (int64_t i = 0; i < count; ++i) source.read(panel + i, words, first, last, lines[i][0]);
      for (int64_t word = first; word < last; ++word) {
        for (int64_t side = 0; side < SIDES; ++side) {
          vu from[VECTORS], bytes[VECTORS];
          for (int64_t i = 0; i < VECTORS; ++i) {
            const int64_t output = side * OUTPUTS + i * LANES;
            from[i] = load_raw<vu>(lines[output / LINEAR_PANEL][word - first] + output % LINEAR_PANEL);
          }
          transpose_bytes(from, bytes[0], bytes[1], bytes[2], bytes[3]);
          for (int64_t i = 0; i < VECTORS; ++i) memcpy(row(WORD_INPUTS * word + BYTE_INPUTS * i, side), &bytes[i], sizeof(vu));
        }
      }
    }
  }

  uint32_t* row(int64_t input, int64_t side) const { return rows + (input / BYTE_INPUTS * SIDES + side) * LANES; }

  // Those of a byte of a block, of 4 bits the first in its lower half.
  PM_INLINE vu byte_of(const int32_t* inputs, int64_t byte, int64_t side) const {
    if (BITS == 8) return load_raw<vu>(row(inputs[byte], side));
    const int32_t first = inputs[byte], second = inputs[QUANT_BLOCK / 2 + byte];
    const vu low = load_raw<vu>(row(first, side)) >> (uint32_t)(first % 2 * 4);
    const vu high = load_raw<vu>(row(second, side)) << (uint32_t)(4 - second % 2 * 4);
    return (low & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
  }

  // The words of a block of these inputs, xored with `flip`, of `count` panels, `stride` bytes apart.
  void store(const int32_t* inputs, uint32_t flip, char* out, int64_t count, int64_t stride) const {
    for (int64_t word = 0; word < words_of_block(BITS); ++word) {
      for (int64_t side = 0; side < SIDES; ++side) {
        vu from[VECTORS], outputs[VECTORS];
        for (int64_t i = 0; i < VECTORS; ++i) from[i] = byte_of(inputs, 4 * word + i, side) ^ flip;
        transpose_bytes(from, outputs[0], outputs[1], outputs[2], outputs[3]);
        for (int64_t i = 0; i < VECTORS; ++i) {
          const int64_t output = side * OUTPUTS + i * LANES;
          if (output / LINEAR_PANEL >= count) break;
          store_past_caches(word_of(out, output, word, stride), outputs[i]);
        }
      }
    }
  }
};

// Panels [begin, end) of args.order. A source has read(panel, words, first, last, to), which stores words [first, last) of
// each output of a panel, [word][output], where `words` are all; and store_limits<LIMIT_BYTES>(panel, group, out).
template <int64_t LIMIT_BYTES, int64_t BITS, class Source>
void pack_any_inputs(const PackArgs& args, const Source& source, uint32_t flip, int64_t begin, int64_t end) {
  constexpr int64_t LIMITS = LIMIT_BYTES * LINEAR_PANEL, BLOCK_BYTES = LIMITS + words_of_block(BITS) * 4 * LINEAR_PANEL;
  using Inputs = AnyInputs<BITS>;
  static thread_local ThreadBuffer memory;
  const int64_t num_blocks = args.linear.cols / QUANT_BLOCK, panel_stride = num_blocks * BLOCK_BYTES;
  const Inputs inputs = {(uint32_t*)memory.at_least(Inputs::bytes(args.linear.cols))};
  for (int64_t panel = begin; panel < end; panel += Inputs::PANELS) {
    const int64_t count = min_of(Inputs::PANELS, end - panel);
    inputs.read(source, panel, count, num_blocks * words_of_block(BITS));
    char* out = (char*)args.panels + panel * panel_stride;
    for (int64_t block = 0; block < num_blocks; ++block, out += BLOCK_BYTES) {
      inputs.store(args.order + block * QUANT_BLOCK, flip, out + LIMITS, count, panel_stride);
      for (int64_t i = 0; i < count; ++i)
        source.template store_limits<LIMIT_BYTES>(panel + i, args.groups[block], out + i * panel_stride);
    }
  }
}

}  // namespace
