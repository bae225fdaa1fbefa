// Panels of linear layers, made of rows as checkpoints have them: each byte is read once and written once.
#pragma once

#include "kernels.h"
#include "pack_any_inputs.h"
#include "pack_block.h"
#include "pack_words.h"
#include "vec.h"

namespace {

// Of each row, a cache line is taken at a time: rows whose distance is a power of two would push each other's out.
constexpr int64_t LINE_WORDS = 16;
// Of each row, what is fetched ahead. A CPU follows a few streams by itself, but not one for each output of a panel.
constexpr int64_t AHEAD_WORDS = 8 * LINE_WORDS;

// The rows of a panel, and those of the next one (null: none).
struct PanelRows {
  const char* const* here;
  const char* const* next;
};

// Words [begin, end) of each row from byte `offset` on to [word][output], xored with `flip`; past the caches, or not.
template <bool PAST_CACHES = true>
void transpose_words(const char* const* rows, int64_t offset, int64_t begin, int64_t end, uint32_t flip, uint32_t* out) {
  int64_t at = begin;
  for (; at + LANES <= end; at += LANES) {
    for (int64_t first = 0; first < LINEAR_PANEL; first += LANES) {
      vu square[LANES];
      for (int i = 0; i < LANES; ++i) memcpy(&square[i], rows[first + i] + offset + at * 4, sizeof(vu));
      transpose(square);
      for (int i = 0; i < LANES; ++i) {
        const vu lanes = square[i] ^ flip;
        uint32_t* to = out + (at + i) * LINEAR_PANEL + first;
        if (PAST_CACHES) store_past_caches(to, lanes);
        else memcpy(to, &lanes, sizeof lanes);
      }
    }
  }
  for (; at < end; ++at)
    for (int64_t i = 0; i < LINEAR_PANEL; ++i) out[at * LINEAR_PANEL + i] = word_at(rows[i] + offset + at * 4) ^ flip;
}

// What comes AHEAD_WORDS after a word of rows of nothing but words.
PM_INLINE void fetch_words(const PanelRows& rows, int64_t at, int64_t words) {
  const int64_t ahead = at + AHEAD_WORDS;
  const char* const* upcoming = ahead < words ? rows.here : rows.next;
  const int64_t place = ahead < words ? ahead : ahead - words;
  if (upcoming && place < words)
    for (int64_t i = 0; i < LINEAR_PANEL; ++i) prefetch_line(upcoming[i] + place * 4);
}

// Rows of nothing but words.
void pack_words(const PanelRows& rows, int64_t words, uint32_t* out) {
  for (int64_t at = 0; at < words; at += LINE_WORDS) {
    fetch_words(rows, at, words);
    transpose_words(rows.here, 0, at, min_of(at + LINE_WORDS, words), 0, out);
  }
}

// Blocks that begin with a scale of 16 bits.
void pack_scaled(const PanelRows& rows, int64_t num_blocks, int64_t words, uint32_t flip, char* out) {
  constexpr int64_t LIMITS = 2 * LINEAR_PANEL;
  const int64_t block_bytes = 2 + 4 * words, ahead = AHEAD_WORDS * 4 / block_bytes;
  for (int64_t block = 0; block < num_blocks; ++block, out += LIMITS + 4 * words * LINEAR_PANEL) {
    const char* const* upcoming = block + ahead < num_blocks ? rows.here : rows.next;
    const int64_t place = block + ahead < num_blocks ? block + ahead : block + ahead - num_blocks;
    for (int64_t i = 0; i < LINEAR_PANEL; ++i) {
      if (upcoming && place < num_blocks) prefetch_line(upcoming[i] + place * block_bytes);
      memcpy(out + 2 * i, rows.here[i] + block * block_bytes, 2);
    }
    transpose_words(rows.here, block * block_bytes + 2, 0, words, flip, (uint32_t*)(out + LIMITS));
  }
}

// Not 0 where one of the bytes of a line [word][output] is no number as an 8-bit float (e4m3).
uint32_t not_numbers(const uint32_t* line, int64_t words) {
  vu found = {};
  for (int64_t i = 0; i < words * LINEAR_PANEL; i += LANES)
    found |= ((load_raw<vu>(line + i) & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  uint32_t any = 0;
  for (int i = 0; i < LANES; ++i) any |= found[i];
  return any;
}

// Integers or 8-bit floats in their order, and their limits elsewhere. Not 0: some are no numbers.
template <int64_t WORDS, class Limit>
uint32_t pack_codes(const PackArgs& args, const PanelRows& rows, const Limit* const* limits, char* out) {
  const int64_t format = args.linear.format & PM_LAYOUT, words = args.linear.cols / QUANT_BLOCK * WORDS;
  const uint32_t flip = format == PM_Q8_PANELS ? 0x80808080u : 0;
  uint32_t found = 0;
  for (int64_t at = 0; at < words; at += LINE_WORDS) {
    alignas(64) uint32_t line[LINE_WORDS * LINEAR_PANEL];
    const int64_t count = min_of(LINE_WORDS, words - at);
    fetch_words(rows, at, words);
    transpose_words<false>(rows.here, at * 4, 0, count, 0, line);
    if (format == PM_FLOAT8_PANELS) found |= not_numbers(line, count);
    for (int64_t word = 0; word < count; word += WORDS) {
      const int64_t group = args.groups[(at + word) / WORDS];
      alignas(64) Limit of_block[LINEAR_PANEL];
      for (int64_t i = 0; i < LINEAR_PANEL; ++i) of_block[i] = limits[i][group];
      memcpy(out, of_block, sizeof of_block);
      store_block<WORDS>(line + word * LINEAR_PANEL, flip, (uint32_t*)(out + sizeof of_block));
      out += sizeof of_block + WORDS * 4 * LINEAR_PANEL;
    }
  }
  return found;
}

void pack_panel(const PmLinear& linear, const PanelRows& rows, char* out) {
  const int64_t num_blocks = ceil_div(linear.cols, QUANT_BLOCK);
  switch (linear.format & PM_LAYOUT) {
    case PM_BF16_PANELS:
      return pack_words(rows, linear.cols / 2, (uint32_t*)out);
    case PM_Q4_MIN_PANELS:  // scale and minimum together are a word
      return pack_words(rows, num_blocks * 5, (uint32_t*)out);
    case PM_Q4_PANELS:
    case PM_NF4_PANELS:
      return pack_scaled(rows, num_blocks, 4, 0, out);
    case PM_FLOAT8_PANELS:
      return pack_scaled(rows, num_blocks, 8, 0, out);
    case PM_Q8_PANELS:  // signed bytes become unsigned
      return pack_scaled(rows, num_blocks, 8, 0x80808080u, out);
  }
}

// Rows of integers, as `pack_any_inputs` reads them.
struct RowSource {
  const char* const* rows;
  const void* const* limits;
  int64_t num_panels;

  void read(int64_t panel, int64_t words, int64_t first, int64_t last, uint32_t* to) const {
    const char* const* here = rows + panel * LINEAR_PANEL;
    fetch_words({here, panel + 1 < num_panels ? here + LINEAR_PANEL : nullptr}, first, words);
    transpose_words<false>(here, first * 4, 0, last - first, 0, to);
  }

  template <int64_t LIMIT_BYTES>
  void store_limits(int64_t panel, int64_t group, char* out) const {
    for (int64_t i = 0; i < LINEAR_PANEL; ++i)
      memcpy(out + i * LIMIT_BYTES, (const char*)limits[panel * LINEAR_PANEL + i] + group * LIMIT_BYTES, LIMIT_BYTES);
  }
};

// The same of a panel, in its format.
uint32_t pack_panel_of_codes(const PackArgs& args, const PanelRows& rows, int64_t panel, char* out) {
  const void* const* limits = args.limits + panel * LINEAR_PANEL;
  switch (args.linear.format & PM_LAYOUT) {
    case PM_Q4_MIN_PANELS:  // scale and minimum together
      return pack_codes<4>(args, rows, (const uint32_t* const*)limits, out);
    case PM_Q4_PANELS:
      return pack_codes<4>(args, rows, (const uint16_t* const*)limits, out);
    default:
      return pack_codes<8>(args, rows, (const uint16_t* const*)limits, out);
  }
}

void pack_ordered_rows(const PackArgs& args, int64_t begin, int64_t end) {
  const RowSource source = {(const char* const*)args.rows, args.limits, end};
  switch (args.linear.format & PM_LAYOUT) {
    case PM_Q4_PANELS:
      return pack_any_inputs<2, 4>(args, source, 0, begin, end);
    case PM_Q4_MIN_PANELS:
      return pack_any_inputs<4, 4>(args, source, 0, begin, end);
    case PM_Q8_PANELS:  // signed bytes become unsigned
      return pack_any_inputs<2, 8>(args, source, 0x80808080u, begin, end);
  }
}

void pack_rows(const PackArgs& args, int64_t begin, int64_t end) {
  const int64_t bytes = panel_bytes(args.linear);
  for (int64_t p = begin; p < end; ++p) {
    const char* const* here = (const char* const*)args.rows + p * LINEAR_PANEL;
    const PanelRows rows = {here, p + 1 < end ? here + LINEAR_PANEL : nullptr};
    char* panel = (char*)args.panels + p * bytes;
    if (!args.limits) {
      pack_panel(args.linear, rows, panel);
    } else if (pack_panel_of_codes(args, rows, p, panel)) {
      __atomic_store_n(args.not_numbers, 1, __ATOMIC_RELAXED);
    }
  }
}

void pack_linear(const PackArgs& args, int64_t begin, int64_t end) {
  if (args.octets) pack_words_of_octets(args, begin, end);
  else if (args.order) pack_ordered_rows(args, begin, end);
  else pack_rows(args, begin, end);
  finish_stores();
}

}  // namespace
