// Linear layers on packed weights: a panel of outputs at a time, a few rows of the input against each of its elements.
// Sums run over the inputs in order in one accumulator per output, for one row as for many: results do not depend on
// the batch.
#pragma once

#include "linear_codes.h"
#include "linear_int.h"

namespace {

// Rows of the input that a panel is multiplied with at a time: as many accumulators as fit the registers.
#if PM_VEC_BYTES == 64
constexpr int LINEAR_ROWS = 12;
#elif PM_VEC_BYTES == 32
constexpr int LINEAR_ROWS = 3;
#else
constexpr int LINEAR_ROWS = 1;
#endif
// Bytes of the input after whose rows the weights are read again: they stay in the second-level cache meanwhile.
constexpr int64_t CHUNK_BYTES = 432 * 1024;

PM_INLINE uint32_t load_pair(const bf16* x) {
  uint32_t pair;
  memcpy(&pair, x, sizeof pair);
  return pair;
}

// What is fetched while a panel is multiplied: `step` bytes further with each pair of inputs.
struct Upcoming {
  const char* at;
  int64_t step;
};

// Few rows read on in the panels all the time; many stay with one for so long that each part of them can fetch a part
// of the next.
PM_INLINE Upcoming upcoming_of(const uint32_t* panel, int64_t num_pairs, int64_t part, int64_t parts) {
  constexpr int64_t pair_bytes = LINEAR_PANEL * 4;
  if (parts == 1) return {(const char*)panel + LINEAR_PREFETCH, pair_bytes};
  const int64_t step = ceil_div(pair_bytes, parts);
  return {(const char*)panel + num_pairs * (pair_bytes + part * step), step};
}

// Whether `rows` rows are all that a panel is multiplied with: more than LINEAR_ROWS are cut into equal shares, each of half
// of that at least. One row is taken for all there is.
constexpr bool reads_panel_once(int rows) { return rows == 1 || 2 * rows < LINEAR_ROWS; }

// The same pair of inputs of several rows. Every fourth row has a pointer, and the others are reached from those: twelve
// pointers are more than there are registers, and compilers then keep some of them where the products are computed.
template <int ROWS>
class RowPairs {
 public:
  RowPairs(const bf16* x, int64_t stride) : step_(stride * (int64_t)sizeof(bf16)), third_(3 * step_) {
    for (int i = 0; i < BASES; ++i) bases_[i] = (const char*)x + 4 * i * step_;
  }

  PM_INLINE uint32_t of(int row) const {
    const char* base = bases_[row / 4];
    return load_pair((const bf16*)(row % 4 == 3 ? base + third_ : base + row % 4 * step_));
  }

  PM_INLINE void next() {
    for (int i = 0; i < BASES; ++i) {
      bases_[i] += 2 * sizeof(bf16);
      asm("" : "+r"(bases_[i]));  // the compiler would otherwise make pointers of rows again
    }
  }

 private:
  static constexpr int BASES = (ROWS + 3) / 4;
  const char* bases_[BASES];
  int64_t step_, third_;
};

// ROWS rows of x against one panel.
template <int ROWS>
void multiply_panel(const uint32_t* panel, int64_t num_pairs, const bf16* x, int64_t x_stride, Upcoming upcoming,
                    vf (&acc)[LINEAR_ROWS][LINEAR_VECS]) {
  vf sums[ROWS][LINEAR_VECS] = {};
  RowPairs<ROWS> pairs(x, x_stride);
  const uint32_t* const end = panel + num_pairs * LINEAR_PANEL;
  for (const uint32_t* at = panel; at < end; at += LINEAR_PANEL) {
    if constexpr (reads_panel_once(ROWS)) {
      stream_line(upcoming.at);
      stream_line(upcoming.at + 64);
    } else {
      prefetch_line(upcoming.at);
      prefetch_line(upcoming.at + 64);
    }
    upcoming.at += upcoming.step;
    vu w[LINEAR_VECS];
    for (int v = 0; v < LINEAR_VECS; ++v) w[v] = load_raw<vu>(at + v * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const uint32_t pair = pairs.of(r);
      for (int v = 0; v < LINEAR_VECS; ++v) sums[r][v] = dot_pairs(sums[r][v], w[v], pair);
    }
    pairs.next();
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < LINEAR_VECS; ++v) acc[r][v] = sums[r][v];
}

template <int ROWS>
PM_INLINE void multiply_some(int64_t rows, const uint32_t* panel, int64_t num_pairs, const bf16* x, int64_t x_stride,
                             Upcoming upcoming, vf (&acc)[LINEAR_ROWS][LINEAR_VECS]) {
  if (rows == ROWS) return multiply_panel<ROWS>(panel, num_pairs, x, x_stride, upcoming, acc);
  if constexpr (ROWS > 1) multiply_some<ROWS - 1>(rows, panel, num_pairs, x, x_stride, upcoming, acc);
}

void linear_bf16(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t num_pairs = args.linear.cols / 2;
  const bf16* x = (const bf16*)args.x;
  const int64_t chunk_rows = max_of(1, CHUNK_BYTES / (4 * num_pairs) / LINEAR_ROWS) * LINEAR_ROWS;
  for (int64_t chunk = 0; chunk < args.num_rows; chunk += chunk_rows) {
    const int64_t stop = min_of(args.num_rows, chunk + chunk_rows);
    for (int64_t panel = begin; panel < end; ++panel) {
      const uint32_t* weight = (const uint32_t*)args.linear.weight + panel * num_pairs * LINEAR_PANEL;
      // Equal shares: 13 rows are 7 and 6, not 12 and 1.
      const int64_t parts = ceil_div(stop - chunk, LINEAR_ROWS);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t row = chunk + (stop - chunk) * part / parts, next = chunk + (stop - chunk) * (part + 1) / parts;
        vf acc[LINEAR_ROWS][LINEAR_VECS];
        multiply_some<LINEAR_ROWS>(next - row, weight, num_pairs, x + row * args.x_stride, args.x_stride,
                                   upcoming_of(weight, num_pairs, part, parts), acc);
        finish_rows(args, panel, row, next - row, acc);
      }
    }
  }
}

// A new format is a case here and a file beside this one.
void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  switch (args.linear.format & PM_LAYOUT) {
    case PM_BF16_PANELS:
      return linear_bf16(args, begin, end);
    case PM_Q8_PANELS:
      return linear_int<Q8>(args, begin, end);
    case PM_Q4_PANELS:
      return linear_int<Q4>(args, begin, end);
    case PM_Q4_MIN_PANELS:
      return linear_int<Q4Min>(args, begin, end);
    case PM_NF4_PANELS:
      return linear_codes<Nf4>(args, begin, end);
    case PM_FLOAT8_PANELS:
      return linear_codes<Float8>(args, begin, end);
  }
}

// Rows [begin, end) of x, as the format wants them and in their order, to their places in args.quantized.
void quantize_ordered_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  switch (args.linear.format & PM_LAYOUT) {
    case PM_BF16_PANELS:
      return;
    case PM_NF4_PANELS:
      return arrange_rows<Nf4>(args, begin, end);
    case PM_FLOAT8_PANELS:
      return arrange_rows<Float8>(args, begin, end);
  }
  quantize_integers(args, begin, end);
}

// The same; the inputs of a row change places first, where those of the weight have.
void quantize_rows(const LinearArgs& args, int64_t begin, int64_t end) {
  const int32_t* order = args.linear.order;
  if (!order) return quantize_ordered_rows(args, begin, end);
  static thread_local ThreadBuffer memory;
  const int64_t cols = args.linear.cols;
  bf16* row = (bf16*)memory.at_least(cols * (int64_t)sizeof(bf16));
  LinearArgs ordered = args;
  ordered.x = row;
  ordered.x_stride = 0;
  for (int64_t r = begin; r < end; ++r) {
    const bf16* x = (const bf16*)args.x + r * args.x_stride;
#pragma GCC unroll 8
    for (int64_t i = 0; i < cols; ++i) row[i] = x[order[i]];
    quantize_ordered_rows(ordered, r, r + 1);
  }
}

int64_t quantized_bytes(const LinearArgs& args) {
  const int64_t layout = args.linear.format & PM_LAYOUT;
  if (layout == PM_BF16_PANELS) return 0;
  if (layout == PM_NF4_PANELS || layout == PM_FLOAT8_PANELS) return args.num_rows * arranged_stride(args.linear.cols);
  return quantized_integers_bytes(args);
}

}  // namespace
