// Linear layers whose weights are 8-bit or 4-bit integers, multiplied as such with 8-bit inputs. A block is QUANT_BLOCK
// inputs: its products are summed as integers, exactly, and added with their scale to a float32 sum, block after block,
// for one row as for many: results do not depend on the batch.
#pragma once

#include "linear_common.h"
#include "quantize_rows.h"
#include "thread_buffer.h"

namespace {

// Rows of the input that a panel is multiplied with at a time: integer and float sums, and operands, fit the registers.
#if PM_VEC_BYTES == 64
constexpr int INT_ROWS = 6;
#elif PM_VEC_BYTES == 32
constexpr int INT_ROWS = 2;
#else
constexpr int INT_ROWS = 1;
#endif
// Up to so many rows, making a panel ready costs more than it saves.
constexpr int64_t DIRECT_ROWS = 3 * INT_ROWS;
// Bytes of quantized input after whose rows the weights are read again: they stay in the second-level cache meanwhile.
constexpr int64_t INT_CHUNK_BYTES = 256 * 1024;
// Bytes between the same group of two outputs' vectors, and between groups.
constexpr int64_t GROUP_BYTES = LINEAR_PANEL * 4;
constexpr int64_t LIMIT_BYTES = LINEAR_PANEL * 4;

// A 16-bit float in the low half of each lane. Infinities become large numbers.
PM_INLINE vf half_to_float(vu h) {
  return (vf)((vu)((vf)((h & 0x7fffu) << 13) * splat(0x1p112f)) | (h & 0x8000u) << 16);
}

// The same, but 2^-60 for 0: the exponent of a scale is added to, which zero has none of. It meets sums that are zero.
PM_INLINE vf half_to_scale(vu h) {
  const vf magnitude = (vf)((h & 0x7fffu) << 13) * splat(0x1p112f);
  return (vf)((vu)max_of(magnitude, splat(0x1p-60f)) | (h & 0x8000u) << 16);
}

// acc[lane] += the sum of four products: unsigned bytes of w, signed bytes of a group of inputs.
PM_INLINE vi dot_group(vi acc, vu w, const uint32_t* group) {
#if defined(PM_DOT_VNNI)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)*group));
#elif defined(PM_DOT_PAIRS)
  const vu even = w & 0x00ff00ffu, odd = (w >> 8) & 0x00ff00ffu, x = vu{} + group[0], y = vu{} + group[1];
#if PM_VEC_BYTES == 64
  return acc + (vi)_mm512_madd_epi16((__m512i)even, (__m512i)x) + (vi)_mm512_madd_epi16((__m512i)odd, (__m512i)y);
#elif PM_VEC_BYTES == 32
  return acc + (vi)_mm256_madd_epi16((__m256i)even, (__m256i)x) + (vi)_mm256_madd_epi16((__m256i)odd, (__m256i)y);
#else
  return acc + (vi)_mm_madd_epi16((__m128i)even, (__m128i)x) + (vi)_mm_madd_epi16((__m128i)odd, (__m128i)y);
#endif
#else
  for (int i = 0; i < 4; ++i) acc += (vi)(w >> (8 * i) & 0xffu) * (int32_t)(int8_t)(*group >> (8 * i));
  return acc;
#endif
}

// How a format stores a block of a panel. `pair` gives groups g and g + 4 of a vector of outputs, g < 4; `scale` and
// `min` what its integers, less ZERO, are multiplied with, and what is added to that.

struct Q8 {
  static constexpr int64_t BYTES = LINEAR_PANEL * 2 + GROUPS * GROUP_BYTES;
  static constexpr int32_t ZERO = 128;
  static constexpr bool HAS_MIN = false;
  static PM_INLINE void pair(const char* block, int g, int v, vu& low, vu& high) {
    const char* at = block + LINEAR_PANEL * 2 + g * GROUP_BYTES + v * PM_VEC_BYTES;
    low = load_raw<vu>(at);
    high = load_raw<vu>(at + 4 * GROUP_BYTES);
  }
  static PM_INLINE vf scale(const char* block, int v) {
    return half_to_scale(__builtin_convertvector(load_raw<vh>(block + v * LANES * 2), vu));
  }
  static PM_INLINE vf min(const char*, int) { return vf{}; }
};

struct Q4 {
  static constexpr int64_t BYTES = LINEAR_PANEL * 2 + GROUPS / 2 * GROUP_BYTES;
  static constexpr int32_t ZERO = 8;
  static constexpr bool HAS_MIN = false;
  static PM_INLINE void pair(const char* block, int g, int v, vu& low, vu& high) {
    nibbles(block + LINEAR_PANEL * 2 + g * GROUP_BYTES + v * PM_VEC_BYTES, low, high);
  }
  static PM_INLINE void nibbles(const char* at, vu& low, vu& high) {
    const vu both = load_raw<vu>(at);
    low = both & 0x0f0f0f0fu;
    high = (both >> 4) & 0x0f0f0f0fu;
  }
  static PM_INLINE vf scale(const char* block, int v) { return Q8::scale(block, v); }
  static PM_INLINE vf min(const char*, int) { return vf{}; }
};

struct Q4Min {
  static constexpr int64_t BYTES = LIMIT_BYTES + GROUPS / 2 * GROUP_BYTES;
  static constexpr int32_t ZERO = 0;
  static constexpr bool HAS_MIN = true;
  static PM_INLINE void pair(const char* block, int g, int v, vu& low, vu& high) {
    Q4::nibbles(block + LIMIT_BYTES + g * GROUP_BYTES + v * PM_VEC_BYTES, low, high);
  }
  static PM_INLINE vf scale(const char* block, int v) {
    return half_to_scale(load_raw<vu>(block + v * PM_VEC_BYTES) & 0xffffu);
  }
  static PM_INLINE vf min(const char* block, int v) {
    return half_to_float(load_raw<vu>(block + v * PM_VEC_BYTES) >> 16);
  }
};

// A panel as it is stored: for few rows, which wait for memory.
template <class Panel>
struct Direct {
  using Format = Panel;
  const char* panel;

  PM_INLINE Direct part(int64_t, int64_t) const { return *this; }
  PM_INLINE void prefetch(int64_t b) const {
    for (int64_t line = 0; line < Format::BYTES; line += 64)
      prefetch_line(panel + b * Format::BYTES + LINEAR_INT_PREFETCH + line);
  }
  PM_INLINE void pair(int64_t b, int g, int v, vu& low, vu& high) const {
    Format::pair(panel + b * Format::BYTES, g, v, low, high);
  }
  PM_INLINE vf scale(int64_t b, int v) const { return Format::scale(panel + b * Format::BYTES, v); }
  PM_INLINE vf min(int64_t b, int v) const { return Format::min(panel + b * Format::BYTES, v); }
  static PM_INLINE vf scaled(const Direct&, int64_t, int, vf scale, const QuantBlock& x) {
    return scale * splat(x.scale);
  }
};

// A panel made ready for many rows: its scales times every mantissa that those of inputs have, its integers as bytes.
template <class Panel>
struct Prepared {
  using Format = Panel;
  // Bytes can stay where they are.
  static constexpr bool IN_PLACE = Format::BYTES > GROUPS * GROUP_BYTES;
  static constexpr int64_t LIMITS = (SCALE_STEPS + (Format::HAS_MIN ? 1 : 0)) * LIMIT_BYTES;
  static constexpr int64_t BYTES = LIMITS + (IN_PLACE ? 0 : GROUPS * GROUP_BYTES);
  const char* panel;
  const char* memory;
  // What is fetched with each block: of the next panel, while the rows are multiplied with this one.
  const char* upcoming;
  int64_t lines_at_a_time;

  PM_INLINE void prefetch(int64_t b) const {
    for (int64_t line = 0; line < lines_at_a_time; ++line) prefetch_line(upcoming + (b * lines_at_a_time + line) * 64);
  }
  PM_INLINE void pair(int64_t b, int g, int v, vu& low, vu& high) const {
    if constexpr (IN_PLACE) return Format::pair(panel + b * Format::BYTES, g, v, low, high);
    const char* at = memory + b * BYTES + LIMITS + g * GROUP_BYTES + v * PM_VEC_BYTES;
    low = load_raw<vu>(at);
    high = load_raw<vu>(at + 4 * GROUP_BYTES);
  }
  PM_INLINE vf scale(int64_t, int) const { return vf{}; }
  PM_INLINE vf min(int64_t b, int v) const {
    if constexpr (!Format::HAS_MIN) return vf{};
    return load((const float*)(memory + b * BYTES + SCALE_STEPS * LIMIT_BYTES + v * PM_VEC_BYTES));
  }
  // For the part-th rows.
  PM_INLINE Prepared part(int64_t part, int64_t num_blocks) const {
    return {panel, memory, upcoming + part * num_blocks * lines_at_a_time * 64, lines_at_a_time};
  }
  // The same bits as the product: multiplying with a power of two is exact.
  static PM_INLINE vf scaled(const Prepared& p, int64_t b, int v, vf, const QuantBlock& x) {
    return (vf)(load_raw<vi>(p.memory + b * BYTES + x.step * LIMIT_BYTES + v * PM_VEC_BYTES) + x.exponent);
  }

  static void make(const char* from, int64_t num_blocks, char* to) {
    for (int64_t b = 0; b < num_blocks; ++b, from += Format::BYTES, to += BYTES)
      for (int v = 0; v < LINEAR_VECS; ++v) {
        char* at = to + v * PM_VEC_BYTES;
        const vf scale = Format::scale(from, v);
        for (int i = 0; i < SCALE_STEPS; ++i) store((float*)(at + i * LIMIT_BYTES), scale * splat(STEP[i]));
        if (Format::HAS_MIN) store((float*)(at + SCALE_STEPS * LIMIT_BYTES), Format::min(from, v));
        for (int g = 0; g < 4 && !IN_PLACE; ++g) {
          vu low, high;
          Format::pair(from, g, v, low, high);
          memcpy(at + LIMITS + g * GROUP_BYTES, &low, sizeof low);
          memcpy(at + LIMITS + (g + 4) * GROUP_BYTES, &high, sizeof high);
        }
      }
  }
};

// ROWS quantized rows against one panel.
template <class Panel, int ROWS>
void multiply_int_panel(const Panel& panel, const QuantRows& x, int64_t row, vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  using Format = typename Panel::Format;
  vf sums[ROWS][LINEAR_VECS] = {};
  const uint32_t* words = x.words(row);
  const QuantBlock* blocks = x.blocks(row);
  const int64_t word_stride = x.stride / 4;
  for (int64_t b = 0; b < x.num_blocks; ++b) {
    panel.prefetch(b);
    const QuantBlock* infos[ROWS];
    vi dots[ROWS][LINEAR_VECS];
    for (int r = 0; r < ROWS; ++r) {
      infos[r] = (const QuantBlock*)((const char*)(blocks + b) + r * x.stride);
      for (int v = 0; v < LINEAR_VECS; ++v) dots[r][v] = vi{} - Format::ZERO * infos[r]->sum;
    }
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      vu low[LINEAR_VECS], high[LINEAR_VECS];
      for (int v = 0; v < LINEAR_VECS; ++v) panel.pair(b, g, v, low[v], high[v]);
      const uint32_t* group = words + (b * GROUPS + g) * GROUP_WORDS;
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < LINEAR_VECS; ++v)
          dots[r][v] = dot_group(dots[r][v], low[v], group + r * word_stride);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < LINEAR_VECS; ++v)
          dots[r][v] = dot_group(dots[r][v], high[v], group + r * word_stride + 4 * GROUP_WORDS);
    }
    for (int v = 0; v < LINEAR_VECS; ++v) {
      const vf scale = panel.scale(b, v), min = panel.min(b, v);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const vf scaled = Panel::scaled(panel, b, v, scale, *infos[r]);
        sums[r][v] = fma(__builtin_convertvector(dots[r][v], vf), scaled, sums[r][v]);
        if (Format::HAS_MIN) sums[r][v] = fma(min, splat(infos[r]->scaled_sum), sums[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < LINEAR_VECS; ++v) acc[r][v] = sums[r][v] + splat(*x.poison(row + r));
}

template <class Panel, int ROWS>
PM_INLINE void multiply_int_rows(int64_t count, const Panel& panel, const QuantRows& x, int64_t row,
                                 vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  if (count == ROWS) return multiply_int_panel<Panel, ROWS>(panel, x, row, acc);
  if constexpr (ROWS > 1) multiply_int_rows<Panel, ROWS - 1>(count, panel, x, row, acc);
}

// Panel number `index` for rows [begin, end).
template <class Panel>
void linear_int_rows(const LinearArgs& args, int64_t index, const Panel& panel, const QuantRows& x, int64_t begin,
                     int64_t end) {
  // Equal shares: 7 rows are 4 and 3, not 6 and 1.
  const int64_t parts = ceil_div(end - begin, INT_ROWS);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = begin + (end - begin) * part / parts, next = begin + (end - begin) * (part + 1) / parts;
    vf acc[INT_ROWS][LINEAR_VECS];
    multiply_int_rows<Panel, INT_ROWS>(next - row, panel.part(part, x.num_blocks), x, row, acc);
    for (int64_t r = row; r < next; ++r) finish_row(args, index, r, acc[r - row]);
  }
}

template <class Format>
void linear_int(const LinearArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer ready;
  const QuantRows x(args.linear.cols, args.quantized);
  const int64_t chunk_rows = max_of(1, INT_CHUNK_BYTES / x.stride / INT_ROWS) * INT_ROWS;
  for (int64_t chunk = 0; chunk < args.num_rows; chunk += chunk_rows) {
    const int64_t stop = min_of(args.num_rows, chunk + chunk_rows);
    for (int64_t index = begin; index < end; ++index) {
      const char* panel = (const char*)args.linear.weight + index * x.num_blocks * Format::BYTES;
      if (stop - chunk <= DIRECT_ROWS) {
        linear_int_rows(args, index, Direct<Format>{panel}, x, chunk, stop);
        continue;
      }
      char* memory = (char*)ready.at_least(x.num_blocks * Prepared<Format>::BYTES);
      Prepared<Format>::make(panel, x.num_blocks, memory);
      const int64_t lines = ceil_div(Format::BYTES, 64 * ceil_div(stop - chunk, INT_ROWS));
      linear_int_rows(args, index, Prepared<Format>{panel, memory, panel + x.num_blocks * Format::BYTES, lines}, x, chunk, stop);
    }
  }
}

}  // namespace
