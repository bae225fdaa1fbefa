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
// The same of wide inputs: those of two planes have an integer sum for each.
constexpr int int_rows_at_once(bool wide) { return planes_of(wide) == 2 && INT_ROWS > 1 ? 2 * INT_ROWS / 3 : INT_ROWS; }
// Up to so many rows, making a panel ready costs more than it saves.
constexpr int64_t DIRECT_ROWS = 3 * INT_ROWS;
// Bytes of quantized input after whose rows the weights are read again: they stay in the second-level cache meanwhile.
constexpr int64_t INT_CHUNK_BYTES = 416 * 1024;
// Bytes between the same group of two outputs' vectors, and between groups.
constexpr int64_t GROUP_BYTES = LINEAR_PANEL * 4;

// `half_to_float`, but 2^-60 for 0: the exponent of a scale is added to, which zero has none of. It meets sums that are zero.
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
// `min` what its integers, less those that stand for 0, are multiplied with, and what is added to that.

struct Q8 {
  static constexpr int64_t BYTES = panel_block_bytes(PM_Q8_PANELS);
  static constexpr bool HAS_MIN = false;
  static PM_INLINE void pair(const char* block, int g, int v, vu& low, vu& high) {
    const char* at = block + LINEAR_PANEL * 2 + g * GROUP_BYTES + v * PM_VEC_BYTES;
    low = load_raw<vu>(at);
    high = load_raw<vu>(at + 4 * GROUP_BYTES);
  }
  static PM_INLINE vf scale(const char* block, int v) {
    return half_to_scale(widen_bits(load_raw<vh>(block + v * LANES * 2)));
  }
  static PM_INLINE vf min(const char*, int) { return vf{}; }
};

struct Q4 {
  static constexpr int64_t BYTES = panel_block_bytes(PM_Q4_PANELS);
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
  static constexpr int64_t BYTES = panel_block_bytes(PM_Q4_MIN_PANELS);
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

// The compiler is not to split a pointer into many that each want a register: what it does not see through, it adds
// constants and one stride to, which costs nothing.
template <class T>
PM_INLINE void keep_whole(T& value) {
  asm("" : "+r"(value));
}

// A panel as it is stored: for few rows, which wait for memory. Stands at one block after the other. ONCE: all rows are
// multiplied with it together.
template <class Panel, bool ONCE>
struct Direct {
  using Format = Panel;
  const char* block;

  PM_INLINE void prefetch() const {
    const char* at = block + LINEAR_INT_PREFETCH;
    for (int64_t line = 0; line < Format::BYTES; line += 64) ONCE ? stream_line(at + line) : prefetch_line(at + line);
  }
  PM_INLINE void next() {
    block += Format::BYTES;
    keep_whole(block);
  }
  PM_INLINE void pair(int g, int v, vu& low, vu& high) const { Format::pair(block, g, v, low, high); }
  PM_INLINE vf min(int v) const { return Format::min(block, v); }
  // For each vector, what is made of its scale once for all rows; then the product with the scale of an input.
  PM_INLINE vf scale(int v) const { return Format::scale(block, v); }
  template <class Block>
  PM_INLINE vf scaled(int, vf scale, const Block& x) const {
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
  const char* block;
  const char* ready;
  // What is fetched with each block: of the next panel, while the rows are multiplied with this one.
  const char* upcoming;
  int64_t lines_at_a_time;

  PM_INLINE void prefetch() const {
    for (int64_t line = 0; line < lines_at_a_time; ++line) prefetch_line(upcoming + line * 64);
  }
  PM_INLINE void next() {
    block += Format::BYTES;
    ready += BYTES;
    upcoming += lines_at_a_time * 64;
    keep_whole(block);
    keep_whole(ready);
  }
  PM_INLINE void pair(int g, int v, vu& low, vu& high) const {
    if constexpr (IN_PLACE) return Format::pair(block, g, v, low, high);
    const char* at = ready + LIMITS + g * GROUP_BYTES + v * PM_VEC_BYTES;
    low = load_raw<vu>(at);
    high = load_raw<vu>(at + 4 * GROUP_BYTES);
  }
  PM_INLINE vf min(int v) const {
    if constexpr (!Format::HAS_MIN) return vf{};
    return load((const float*)(ready + SCALE_STEPS * LIMIT_BYTES + v * PM_VEC_BYTES));
  }
  PM_INLINE vf scale(int) const { return vf{}; }
  // The same bits as the product: multiplying with a power of two is exact.
  template <class Block>
  PM_INLINE vf scaled(int v, vf, const Block& x) const {
    return (vf)(load_raw<vi>(ready + x.step_at + v * PM_VEC_BYTES) + x.exponent);
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

// Unrolled, as all loops over rows here are: the compiler keeps in memory what it cannot name without counting.
template <int ROWS, class Body>
PM_INLINE void each_row(Body body) {
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < LINEAR_VECS; ++v) body(r, v);
}

// The products of a block of ROWS rows, given by `block`, with one of the panel: all that the integers of PLANES planes
// sum up to.
template <int PLANES, int ROWS, class Panel, class BlockOf>
PM_INLINE void multiply_int_block(const Panel& panel, BlockOf block, vi (&sums)[ROWS][LINEAR_VECS]) {
  vi dots[PLANES][ROWS][LINEAR_VECS] = {};
  each_row<ROWS>([&](int r, int v) { dots[PLANES - 1][r][v] += block(r).correction; });
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    vu low[LINEAR_VECS], high[LINEAR_VECS];
    for (int v = 0; v < LINEAR_VECS; ++v) panel.pair(g, v, low[v], high[v]);
#pragma GCC unroll 4
    for (int i = 0; i < 2 * PLANES; ++i) {
      const int plane = i % PLANES, group = plane * (int)GROUPS + g + i / PLANES * 4;
      each_row<ROWS>([&](int r, int v) {
        const vu w = i / PLANES ? high[v] : low[v];
        dots[plane][r][v] = dot_group(dots[plane][r][v], w, block(r).words + group * GROUP_WORDS);
      });
    }
  }
  each_row<ROWS>([&](int r, int v) {
    sums[r][v] = PLANES == 1 ? dots[0][r][v] : dots[PLANES - 1][r][v] + (dots[0][r][v] << WIDE_BITS);
  });
}

// ROWS quantized rows against one panel. Not inlined: next to the loops of its callers it lacks registers.
template <class Panel, bool WIDE, int ROWS>
__attribute__((noinline)) void multiply_int_panel(Panel panel, const QuantRows<WIDE>& x, int64_t row,
                                                  vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  static_assert(ROWS <= 6, "of six rows, each is a pointer and none, one or two strides");
  typedef QuantBlock<WIDE> Block;
  vf sums[ROWS][LINEAR_VECS] = {};
  const char *first = (const char*)x.blocks(row), *fourth = first + 3 * x.stride;
  int64_t stride = x.stride;
  const auto block = [&](int r) -> const Block& {
    return *(const Block*)(r < 3 ? first + r * stride : fourth + (r - 3) * stride);
  };
  for (int64_t b = 0; b < x.num_blocks; ++b) {
    panel.prefetch();
    vi dots[ROWS][LINEAR_VECS];
    multiply_int_block<Block::PLANES>(panel, block, dots);
    vf scale[LINEAR_VECS], min[LINEAR_VECS];
    for (int v = 0; v < LINEAR_VECS; ++v) {
      scale[v] = panel.scale(v);
      min[v] = panel.min(v);
    }
    each_row<ROWS>([&](int r, int v) {
      const vf scaled = panel.scaled(v, scale[v], block(r));
      sums[r][v] = fma(__builtin_convertvector(dots[r][v], vf), scaled, sums[r][v]);
      if (Panel::Format::HAS_MIN) sums[r][v] = fma(min[v], splat(block(r).scaled_sum), sums[r][v]);
    });
    panel.next();
    first += sizeof(Block);
    fourth += sizeof(Block);
    keep_whole(first);
    keep_whole(fourth);
    keep_whole(stride);
  }
  // Here every block of the rows lies behind the pointers.
  each_row<ROWS>([&](int r, int v) { acc[r][v] = sums[r][v] + splat(*(const float*)&block(r)); });
}

template <class Panel, bool WIDE, int ROWS>
PM_INLINE void multiply_int_rows(int64_t count, const Panel& panel, const QuantRows<WIDE>& x, int64_t row,
                                 vf (&acc)[INT_ROWS][LINEAR_VECS]) {
  if (count == ROWS) return multiply_int_panel<Panel, WIDE, ROWS>(panel, x, row, acc);
  if constexpr (ROWS > 1) multiply_int_rows<Panel, WIDE, ROWS - 1>(count, panel, x, row, acc);
}

// Panel number `index` for rows [begin, end). `panel_of(part)` stands at its first block.
template <bool WIDE, class PanelOf>
void linear_int_rows(const LinearArgs& args, int64_t index, PanelOf panel_of, const QuantRows<WIDE>& x, int64_t begin,
                     int64_t end) {
  // Equal shares: 7 rows are 4 and 3, not 6 and 1.
  constexpr int AT_ONCE = int_rows_at_once(WIDE);
  const int64_t parts = ceil_div(end - begin, AT_ONCE);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = begin + (end - begin) * part / parts, next = begin + (end - begin) * (part + 1) / parts;
    vf acc[INT_ROWS][LINEAR_VECS];
    multiply_int_rows<decltype(panel_of(0)), WIDE, AT_ONCE>(next - row, panel_of(part), x, row, acc);
    finish_rows(args, index, row, next - row, acc);
  }
}

template <class Format, bool WIDE>
void linear_int_of(const LinearArgs& args, int64_t begin, int64_t end) {
  static thread_local ThreadBuffer memory;
  constexpr int64_t AT_ONCE = int_rows_at_once(WIDE), DIRECT = DIRECT_ROWS / planes_of(WIDE);
  const QuantRows<WIDE> x(args.linear.cols, args.quantized);
  const int64_t chunks = ceil_div(args.num_rows, max_of(1, INT_CHUNK_BYTES / x.stride / AT_ONCE) * AT_ONCE);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t chunk = args.num_rows * i / chunks, stop = args.num_rows * (i + 1) / chunks;
    for (int64_t index = begin; index < end; ++index) {
      const char* panel = (const char*)args.linear.weight + index * x.num_blocks * Format::BYTES;
      if (stop - chunk <= DIRECT) {
        if (stop - chunk <= AT_ONCE)
          linear_int_rows(args, index, [&](int64_t) { return Direct<Format, true>{panel}; }, x, chunk, stop);
        else
          linear_int_rows(args, index, [&](int64_t) { return Direct<Format, false>{panel}; }, x, chunk, stop);
        continue;
      }
      char* ready = (char*)memory.at_least(x.num_blocks * Prepared<Format>::BYTES);
      Prepared<Format>::make(panel, x.num_blocks, ready);
      const char* upcoming = panel + x.num_blocks * Format::BYTES;
      const int64_t lines = ceil_div(Format::BYTES, 64 * ceil_div(stop - chunk, AT_ONCE));
      const auto part_of = [&](int64_t part) {
        return Prepared<Format>{panel, ready, upcoming + part * x.num_blocks * lines * 64, lines};
      };
      linear_int_rows(args, index, part_of, x, chunk, stop);
    }
  }
}

template <class Format>
void linear_int(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.linear.format & PM_WIDE_INPUTS) return linear_int_of<Format, true>(args, begin, end);
  linear_int_of<Format, false>(args, begin, end);
}

}  // namespace
