// Rows of a packed weight as bfloat16: the embedding of a token from the weight that is the output head too.
// A few rows per step, far apart in memory: compiled for the baseline.
#include "linear_rows.h"

#include "parallel.h"
#include "vec.h"

namespace {

static_assert(LANES == 4, "a vector holds a group of four inputs");

constexpr int64_t GROUP_BYTES = LINEAR_PANEL * 4;

float half_at(const char* at) {
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  float value;
  memcpy(&value, &magnitude, sizeof value);
  return bits & 0x8000u ? -value * 0x1p112f : value * 0x1p112f;
}

vi bytes_at(const char* at) {
  vi values;
  for (int i = 0; i < 4; ++i) values[i] = (uint8_t)at[i];
  return values;
}

// The last group may be cut short.
void store_group(bf16* row, int64_t at, int64_t cols, vf values) {
  if (at < cols) store(row + at, values, min_of(LANES, cols - at));
}

void row_of_bf16(const PmLinear& linear, int64_t index, bf16* row) {
  const bf16* panel = (const bf16*)linear.weight + index / LINEAR_PANEL * linear.cols * LINEAR_PANEL;
  for (int64_t d = 0; d < linear.cols; ++d)
    row[d] = panel[d / 2 * LINEAR_PANEL * 2 + index % LINEAR_PANEL * 2 + d % 2];
}

template <int64_t FORMAT>
void row_of_integers(const PmLinear& linear, int64_t index, bf16* row) {
  constexpr bool HALF_BYTES = FORMAT != PM_Q8_PANELS, HAS_MIN = FORMAT == PM_Q4_MIN_PANELS;
  constexpr int32_t ZERO = zero_of(FORMAT);
  constexpr int64_t limit_bytes = HAS_MIN ? 4 : 2, block_bytes = panel_block_bytes(FORMAT);
  const int64_t num_blocks = ceil_div(linear.cols, QUANT_BLOCK), output = index % LINEAR_PANEL;
  const char* block = (const char*)linear.weight + index / LINEAR_PANEL * num_blocks * block_bytes;
  for (int64_t b = 0; b < num_blocks; ++b, block += block_bytes) {
    const char* limits = block + output * limit_bytes;
    const vf scale = splat(half_at(limits)), min = HAS_MIN ? splat(half_at(limits + 2)) : vf{};
    const char* group = block + limit_bytes * LINEAR_PANEL + output * 4;
    for (int64_t g = 0; g < (HALF_BYTES ? 4 : 8); ++g, group += GROUP_BYTES) {
      const vi both = bytes_at(group), low = HALF_BYTES ? both & 15 : both;
      const int64_t at = b * QUANT_BLOCK + 4 * g;
      store_group(row, at, linear.cols, __builtin_convertvector(low - ZERO, vf) * scale + min);
      if (HALF_BYTES)
        store_group(row, at + QUANT_BLOCK / 2, linear.cols, __builtin_convertvector((both >> 4) - ZERO, vf) * scale + min);
    }
  }
}

float bf16_of(uint32_t bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The number that a code stands for.
template <int64_t FORMAT>
float number_of(uint32_t code) {
  if (FORMAT == PM_NF4_PANELS) return bf16_of(NF4_LEVELS[code]);
  return bf16_of((code & 0x80) << 8 | (code & 0x7f) << 4) * (0x1p120f / FLOAT8_UNIT);
}

template <int64_t FORMAT>
void row_of_codes(const PmLinear& linear, int64_t index, bf16* row) {
  constexpr bool HALF_BYTES = FORMAT == PM_NF4_PANELS;
  constexpr int64_t block_bytes = panel_block_bytes(FORMAT);
  const int64_t num_blocks = ceil_div(linear.cols, QUANT_BLOCK), output = index % LINEAR_PANEL;
  const char* block = (const char*)linear.weight + index / LINEAR_PANEL * num_blocks * block_bytes;
  for (int64_t b = 0; b < num_blocks; ++b, block += block_bytes) {
    const float scale = half_at(block + output * 2);
    const char* codes = block + LINEAR_PANEL * 2 + output * 4;
    for (int64_t i = 0; i < QUANT_BLOCK && b * QUANT_BLOCK + i < linear.cols; ++i) {
      const int64_t at = HALF_BYTES ? i % (QUANT_BLOCK / 2) : i;
      const uint8_t byte = (uint8_t)codes[at / 4 * GROUP_BYTES + at % 4];
      const uint32_t code = !HALF_BYTES ? byte : i < QUANT_BLOCK / 2 ? byte & 15 : byte >> 4;
      store(row + b * QUANT_BLOCK + i, splat(number_of<FORMAT>(code) * scale), 1);
    }
  }
}

}  // namespace

void row_of_weight(const PmLinear& linear, int64_t index, void* row) {
  switch (linear.format & PM_LAYOUT) {
    case PM_BF16_PANELS:
      return row_of_bf16(linear, index, (bf16*)row);
    case PM_Q8_PANELS:
      return row_of_integers<PM_Q8_PANELS>(linear, index, (bf16*)row);
    case PM_Q4_PANELS:
      return row_of_integers<PM_Q4_PANELS>(linear, index, (bf16*)row);
    case PM_Q4_MIN_PANELS:
      return row_of_integers<PM_Q4_MIN_PANELS>(linear, index, (bf16*)row);
    case PM_NF4_PANELS:
      return row_of_codes<PM_NF4_PANELS>(linear, index, (bf16*)row);
    case PM_FLOAT8_PANELS:
      return row_of_codes<PM_FLOAT8_PANELS>(linear, index, (bf16*)row);
  }
}

void scale_row(void* row, int64_t cols, float scale) {
  bf16* at = (bf16*)row;
  for (int64_t d = 0; d < cols; d += LANES) {
    const int64_t n = min_of(LANES, cols - d);
    store(at + d, load(at + d, n) * splat(scale), n);
  }
}

int pm_linear_rows(const PmLinear* linear, void* out, const int64_t* indices, int64_t count, int64_t threads) {
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] < 0 || indices[i] >= linear->rows) return 1;
  share_evenly(count, count * linear->cols * 8, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row_of_weight(*linear, indices[i], (bf16*)out + i * linear->cols);
  });
  return 0;
}
