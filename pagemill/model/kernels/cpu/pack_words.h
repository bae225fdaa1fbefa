// Panels of integers that files have in words with outputs side by side, as GPTQ and AWQ do: see PmOctet. Each word is read
// once, where it is, and each panel is written once, past the caches.
#pragma once

#include "kernels.h"
#include "pack_any_inputs.h"
#include "pack_block.h"
#include "vec.h"

namespace {

constexpr int64_t PANEL_OCTETS = LINEAR_PANEL / OCTET;
// Panels that a thread makes side by side, block after block. Of each input, or eight inputs, the file has the words of all
// outputs together: one panel after the other would take a few bytes of a page at a time, and come back for the rest.
constexpr int64_t TILE_PANELS = 128;

const char* words_of(const PmOctet& octet, int64_t row) { return octet.words + row * octet.words_stride; }

// Of the octets of a panel; with a gate, its halves are not neighbours.
PM_INLINE void fetch_octets(const PmOctet* octets, int64_t row) {
  prefetch_line(words_of(octets[0], row));
  prefetch_line(words_of(octets[PANEL_OCTETS / 2], row));
}

// Of a block, for each output.
template <int64_t LIMIT_BYTES>
void store_octet_limits(const PmOctet* octets, int64_t group, char* out) {
  constexpr int64_t OCTET_BYTES = OCTET * LIMIT_BYTES;
  alignas(64) char limits[PANEL_OCTETS * OCTET_BYTES];
  for (int64_t i = 0; i < PANEL_OCTETS; ++i)
    memcpy(limits + i * OCTET_BYTES, octets[i].limits + group * octets[i].limits_stride, OCTET_BYTES);
  for (int64_t at = 0; at < (int64_t)sizeof limits; at += PM_VEC_BYTES)
    store_past_caches((uint32_t*)(out + at), load_raw<vu>(limits + at));
}

// Words of outputs, of a block for as many octets as a vector has lanes.
struct OutputWords {
  static constexpr int64_t PANELS = LANES / PANEL_OCTETS;

  uint32_t lines[QUANT_BLOCK][LANES];

  // Inputs of a block, for `count` octets, an even number.
  void read(const PmOctet* octets, int64_t count, int64_t input) {
    if (count < LANES) memset(lines, 0, sizeof lines);
    if (count == LANES && are_together<LANES>(octets, count)) return read_pieces<LANES>(octets, count, input);
    if (are_together<2>(octets, count)) return read_pieces<2>(octets, count, input);  // with a gate
    read_pieces<1>(octets, count, input);
  }

  // Whether so many octets at a time are neighbours in the file.
  template <int64_t PIECE>
  static bool are_together(const PmOctet* octets, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const PmOctet& first = octets[i / PIECE * PIECE];
      if (octets[i].words != first.words + i % PIECE * 4 || octets[i].words_stride != first.words_stride) return false;
    }
    return true;
  }

  template <int64_t PIECE>
  void read_pieces(const PmOctet* octets, int64_t count, int64_t input) {
    for (int64_t k = 0; k < QUANT_BLOCK; ++k)
      for (int64_t i = 0; i < count; i += PIECE) memcpy(lines[k] + i, words_of(octets[i], input + k), PIECE * 4);
  }

  // The words of `count` panels, `stride` bytes apart.
  void store(char* out, int64_t count, int64_t stride) const {
    for (int64_t word = 0; word < words_of_block(4); ++word) {
      vu even[4], odd[4];
      for (int64_t k = 0; k < 4; ++k) {
        const vu low = load_raw<vu>(lines[4 * word + k]), high = load_raw<vu>(lines[QUANT_BLOCK / 2 + 4 * word + k]);
        even[k] = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
        odd[k] = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
      }
      vu outputs[OCTET];
      transpose_bytes(even, outputs[0], outputs[4], outputs[1], outputs[5]);
      transpose_bytes(odd, outputs[2], outputs[6], outputs[3], outputs[7]);
      interleave(outputs);
      for (int64_t i = 0; i < OCTET; ++i) {
        const int64_t output = i * LANES;
        if (output / LINEAR_PANEL >= count) break;
        store_past_caches(word_of(out, output, word, stride), outputs[i]);
      }
    }
  }

  // A vector for each output of an octet, a lane for each octet -> outputs in their order: each round moves one bit of the
  // number of the vector to the end of that of the lane.
  static PM_INLINE void interleave(vu (&outputs)[OCTET]) {
    for (int round = 0; round < 3; ++round) {
      vu next[OCTET];
      for (int i = 0; i < OCTET / 2; ++i) {
        next[2 * i] = zip_low(outputs[i], outputs[i + OCTET / 2]);
        next[2 * i + 1] = zip_high(outputs[i], outputs[i + OCTET / 2]);
      }
      for (int i = 0; i < OCTET; ++i) outputs[i] = next[i];
    }
  }
};

template <int64_t LIMIT_BYTES>
void pack_output_words(const PackArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t LIMITS = LIMIT_BYTES * LINEAR_PANEL, BLOCK_BYTES = LIMITS + QUANT_BLOCK / 2 * LINEAR_PANEL;
  const int64_t num_blocks = args.linear.cols / QUANT_BLOCK, panel_stride = num_blocks * BLOCK_BYTES;
  alignas(64) OutputWords words;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t input = block * QUANT_BLOCK;
    for (int64_t panel = begin; panel < end; panel += OutputWords::PANELS) {
      const PmOctet* octets = args.octets + panel * PANEL_OCTETS;
      const int64_t count = min_of(OutputWords::PANELS, end - panel);
      char* out = (char*)args.panels + panel * panel_stride + block * BLOCK_BYTES;
      words.read(octets, count * PANEL_OCTETS, input);
      if (block + 1 < num_blocks)
        for (int64_t k = QUANT_BLOCK; k < 2 * QUANT_BLOCK; ++k) fetch_octets(octets, input + k);
      words.store(out + LIMITS, count, panel_stride);
      for (int64_t i = 0; i < count; ++i)
        store_octet_limits<LIMIT_BYTES>(octets + i * PANEL_OCTETS, args.groups[block], out + i * panel_stride);
    }
  }
}

// The words of a panel for eight inputs, or four of 8 bits, side by side.
void read_words(const PmOctet* octets, int64_t row, uint32_t* to) {
  for (int64_t i = 0; i < PANEL_OCTETS; ++i) memcpy(to + i * OCTET, words_of(octets[i], row), OCTET * 4);
}

template <int64_t LIMIT_BYTES, int64_t BITS>
void pack_input_words(const PackArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t LIMITS = LIMIT_BYTES * LINEAR_PANEL, WORDS = words_of_block(BITS);
  constexpr int64_t BLOCK_BYTES = LIMITS + WORDS * 4 * LINEAR_PANEL;
  const int64_t num_blocks = args.linear.cols / QUANT_BLOCK, panel_stride = num_blocks * BLOCK_BYTES;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t row = block * WORDS;
    for (int64_t panel = begin; panel < end; ++panel) {
      const PmOctet* octets = args.octets + panel * PANEL_OCTETS;
      char* out = (char*)args.panels + panel * panel_stride + block * BLOCK_BYTES;
      alignas(64) uint32_t words[WORDS * LINEAR_PANEL];
      for (int64_t k = 0; k < WORDS; ++k) {
        read_words(octets, row + k, words + k * LINEAR_PANEL);
        if (block + 1 < num_blocks) fetch_octets(octets, row + WORDS + k);
      }
      store_octet_limits<LIMIT_BYTES>(octets, args.groups[block], out);
      store_block<WORDS>(words, 0, (uint32_t*)(out + LIMITS));
    }
  }
}

// Words of inputs, as `pack_any_inputs` reads them.
struct OctetSource {
  static constexpr int64_t AHEAD_ROWS = 16;

  const PmOctet* all;

  const PmOctet* octets(int64_t panel) const { return all + panel * PANEL_OCTETS; }

  void read(int64_t panel, int64_t words, int64_t first, int64_t last, uint32_t* to) const {
    for (int64_t word = first; word < last; ++word, to += LINEAR_PANEL) {
      if (word + AHEAD_ROWS < words) fetch_octets(octets(panel), word + AHEAD_ROWS);
      read_words(octets(panel), word, to);
    }
  }

  template <int64_t LIMIT_BYTES>
  void store_limits(int64_t panel, int64_t group, char* out) const {
    store_octet_limits<LIMIT_BYTES>(octets(panel), group, out);
  }
};

template <int64_t LIMIT_BYTES, int64_t BITS>
void pack_words_tile(const PackArgs& args, int64_t begin, int64_t end) {
  if (BITS == 4 && args.words == PM_WORDS_OF_OUTPUTS) return pack_output_words<LIMIT_BYTES>(args, begin, end);
  if (args.order) return pack_any_inputs<LIMIT_BYTES, BITS>(args, OctetSource{args.octets}, 0, begin, end);
  pack_input_words<LIMIT_BYTES, BITS>(args, begin, end);
}

// Panels [begin, end).
void pack_words_of_octets(const PackArgs& args, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; tile += TILE_PANELS) {
    const int64_t last = min_of(tile + TILE_PANELS, end);
    switch (args.linear.format & PM_LAYOUT) {
      case PM_Q4_PANELS:
        pack_words_tile<2, 4>(args, tile, last);
        break;
      case PM_Q4_MIN_PANELS:
        pack_words_tile<4, 4>(args, tile, last);
        break;
      case PM_Q8_PANELS:
        pack_words_tile<2, 8>(args, tile, last);
        break;
    }
  }
}

}  // namespace
