// The plain C interface of the library, the arguments of the kernels, and the table that each instruction set fills.
// Element counts and strides are in elements, int64. Pointers are to memory of the caller, never kept.
#pragma once

#include <cstdint>

enum PmDtype : int64_t { PM_FLOAT32 = 0, PM_BFLOAT16 = 1, PM_INT8 = 2, PM_FLOAT16 = 3 };

// One step of one KV group; `Batch` in mirrors.py mirrors it.
struct PmBatch {
  const int32_t* query_start;   // [R + 1]
  const int32_t* seq_lens;      // [R]
  const int32_t* block_table;   // [R, block_table_stride]
  const int64_t* slot_mapping;  // [T]
  int64_t num_requests;
  int64_t num_tokens;
  int64_t block_table_stride;
  int64_t block_size;
};

// One attention layer; `Layer` in mirrors.py mirrors it.
struct PmLayer {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t window;  // 0: no window
  int64_t chunk;   // a token sees those with the same position / chunk; 0: no chunks
  double scale;
  double soft_cap;  // 0: no cap
  int64_t ahead;    // so many keys behind a token's own are seen too: none by decoders
  // From here on nothing that says who computes what: layers that differ in it only are planned together.
  const float* sinks;   // [num_heads]: a logit of each that takes its share of the softmax; null: none
  const float* slopes;  // [num_heads]: what a score gains for each position that a key is further on (ALiBi); null: nothing
};

// query [T, H, D], key and value [T, Hkv, D] with their strides between tokens; key may be null: nothing is written.
// kv_cache [2, num_blocks, Hkv, block_size, D], contiguous from Hkv on, what a head has in a block laid out
// as segment.h says; out [T, H, D], contiguous. A cache of int8 is [2, num_blocks, Hkv, block_size, D + 4]. Where
// values_offset is 0, keys are values too, and value is key: the cache is [num_blocks, block_size, D], of one KV head.
struct PmTensors {
  void* out;
  const void* query;
  const void* key;
  const void* value;
  void* kv_cache;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t values_offset;  // from a key to its value
  int64_t block_stride;
  int64_t dtype;
  int64_t kv_dtype;  // dtype, or int8
};

// Consecutive query tokens of one request: what a thread takes at a time, together with one KV head.
struct Tile {
  int64_t request;
  int64_t token;       // index in [0, T) of the first token
  int64_t num_tokens;
  int64_t position;    // of the first token in its request
  int64_t key_begin;   // the keys that any of the tokens sees
  int64_t key_end;
  int64_t partial;     // where the partial results of the tile begin, in segments; used when keys are split
  int32_t need_first, need_last;  // chunks of this step's rows that the keys come from: see tile_needs.h
};

// What a thread takes at a time; no tile: nothing.
struct TileHead {
  const Tile* tile = nullptr;
  int64_t kv_head = 0;
};

// First position that the token at `position` sees. Never less for a later position.
inline int64_t first_seen(const PmLayer& layer, int64_t position) {
  const int64_t window = layer.window && position >= layer.window ? position - layer.window + 1 : 0;
  const int64_t chunk = layer.chunk ? position / layer.chunk * layer.chunk : 0;
  return window > chunk ? window : chunk;
}

// Behind the last position that the token at `position` sees, of a sequence of `length`. Never less for a later position.
inline int64_t seen_end(const PmLayer& layer, int64_t position, int64_t length) {
  const int64_t end = position + 1 + layer.ahead;
  return end < length ? end : length;
}

struct AttentionArgs {
  PmTensors tensors;
  PmBatch batch;
  PmLayer layer;
};

// Keys are handled in segments of this many, at absolute positions: the same whatever the chunk, batch or thread count.
constexpr int64_t SEGMENT_KEYS = 256;
// Query rows (tokens x heads of a KV head) that a tile aims for: fetching a segment is paid once per tile.
constexpr int64_t TILE_ROWS = 96;

struct NormArgs {
  void* out;
  const void* x;
  const void* residual;  // null: plain norm; else x is added to it first; rows of `cols`, contiguous
  void* sum;             // where that sum goes; may be `residual` itself
  const void* weight;
  int64_t cols;
  int64_t inner;     // rows per stride: row r begins at (r / inner) * x_stride + (r % inner) * cols
  int64_t x_stride;
  int64_t dtype;
  int64_t weight_dtype;
  float eps;
  int64_t centers;   // 0: RMS norm; 1: LayerNorm, whose weight has the type `dtype` or, without a bias, float32
  const void* bias;  // of a LayerNorm, with the type of the weight; may be null
};

struct ActivationArgs {
  void* out;
  const void* x;  // [T, 2 * cols]
  int64_t cols;
  int64_t x_stride;
  int64_t dtype;
  int64_t gate;  // a PmGate
};

// An activation of each element. The numbers are those of ACTIVATIONS in native.py.
enum PmActivation : int64_t {
  PM_NO_ACTIVATION = 0,
  PM_ACT_SILU = 1,
  PM_ACT_GELU = 2,
  PM_ACT_GELU_TANH = 3,
  PM_ACT_RELU = 4,
  PM_ACT_RELU2 = 5,  // the square of RELU
};

struct ElementArgs {
  void* out;
  const void* x;
  const void* y;  // of `add` and `multiply`
  int64_t dtype;
  int64_t activation;  // of `activate`
  float factor;  // of `scale` and `soft_cap`
};

// What `streams` does, of rows of bfloat16 in which several streams of equal sizes lie side by side, or one thing. The
// numbers are those of `Stream` in streams.py.
enum PmStream : int64_t {
  // x -> out from `column` on; where there is y, scaled to its mean square.
  PM_STREAM_PLACE = 1,
  // x from `column` on, times `weight` where there is one -> out.
  PM_STREAM_PICK = 2,
  // Each stream of x, and the sum of all, times coefficients of y: [count, count] -> out.
  PM_STREAM_MIX = 3,
  // Each stream of x + (y - the stream of x from `column` on) * (its coefficient in z + 1) -> out.
  PM_STREAM_CORRECT = 4,
  // The streams of x, and y added to all but the first -> out.
  PM_STREAM_ADD_TO_OTHERS = 5,
  // The mean of the streams of x -> out.
  PM_STREAM_MEAN = 6,
  // tanh(x / factor) -> out.
  PM_STREAM_BOUND = 7,
  // GELU, in its tanh form, of what the first half of x is above mean + factor * deviation of it, or of 0; times the
  // second half -> out.
  PM_STREAM_SPARSE_GATE = 8,
  // x times the sigmoid of the one element of y -> out.
  PM_STREAM_WEIGH = 9,
};

struct StreamArgs {
  int64_t kind;  // a PmStream
  void* out;
  const void* x;
  const void* y;
  const void* z;
  const void* weight;
  int64_t out_width, x_width, y_width, z_width;  // elements of a row
  int64_t column;
  int64_t count;  // streams
  float factor;
};

// How a router chooses experts, as `Routing` in routing.py; `RoutingStruct` in mirrors.py mirrors it.
struct PmRouting {
  int64_t num_experts, top_k;
  int64_t sigmoid, renormalize;  // whether scores are sigmoids, not a softmax; whether the weights of a row add up to 1
  int64_t num_groups, top_groups, group_by_two;
  double scale;
  const float* correction;  // [num_experts], added to scores for choosing, not for weighing; may be null
  const float* factors;     // [num_experts], of the weights at last; may be null
};

// Of each row of logits, the experts that are chosen, and behind them their weights.
struct RouteArgs {
  const PmRouting& routing;
  const float* logits;  // [T, num_experts]
  float* routed;        // [T, 2 * top_k]: int32, then float32
};

// The sum of what the experts of one row give, each times its weight.
struct WeighArgs {
  void* out;
  const void* parts;         // rows of `cols`
  const int32_t* positions;  // [count]: which of them; they are added in this order
  const float* weights;      // [count]
  int64_t count, cols;
};

// (up + 1) * gate * sigmoid(alpha * gate) of a gate of at most `limit` and an up within it either way.
struct ClampArgs {
  void* out;      // [rows, cols]
  const void* x;  // [rows, 2 * cols], gates first
  int64_t cols;
  float alpha, limit;
};

// Requests whose rows lie one after the other in x: those of request r are [starts[r], starts[r + 1]).
struct SumArgs {
  float* sums;  // [slots, cols]
  const void* x;
  const int64_t* starts;
  const int64_t* slots;  // negative: the rows of this one are not summed
  int64_t cols;
  int64_t dtype;  // of x
};

struct RopeArgs {
  void* x;  // [T, num_heads, head_size], rotated in place
  int64_t num_heads;
  int64_t head_size;
  int64_t x_stride;
  int64_t dtype;
  const void* cos;  // one row per token, of which the first `half` elements are read
  const void* sin;
  int64_t half;
  int64_t table_stride;
  int64_t table_dtype;
};

struct ArgmaxArgs {
  const void* logits;  // [L, num_cols]
  int64_t num_cols;
  int64_t stride;
  int64_t dtype;
  const uint32_t* const* masks;  // see PmChoice; of float32 rows
};

struct SampleArgs {
  int32_t* out;
  const float* logits;
  const float *temperature, *min_p;
  const int32_t* top_k;  // 0: no limit
  const float* top_p;    // 1: no limit
  const double* uniforms;
  int64_t cols, stride;
  const uint32_t* const* masks;  // see PmChoice
};

// Tokens that a word of a mask speaks of.
constexpr int64_t MASK_BITS = 32;

struct ArgmaxResult {
  float value;
  int64_t index;
};

// Of two pieces of a row, in their order: the first of the largest, or the first NaN.
inline ArgmaxResult better_of(const ArgmaxResult& first, const ArgmaxResult& second) {
  const bool first_is_nan = first.value != first.value, second_is_nan = second.value != second.value;
  return !first_is_nan && (second_is_nan || second.value > first.value) ? second : first;
}

// Stands for the token of a row that has a NaN, or whose largest is infinite: such logits are no distribution.
constexpr int64_t NO_TOKEN = -1;

inline bool is_finite(float value) { return value - value == 0.0f; }

inline int64_t token_of(const ArgmaxResult& best) { return is_finite(best.value) ? best.index : NO_TOKEN; }

// How the weight of a linear layer is stored. Every format cuts the outputs into panels of LINEAR_PANEL, the last one padded
// with zeros, and a panel is one contiguous stream, read once per call.
enum PmFormat : int64_t {
  // bfloat16, [panel][pair of inputs][output of the panel][2]: 32 bits of a lane are two inputs of one output.
  PM_BF16_PANELS = 0,
  // Integers with a scale, and possibly a minimum, for each output and block of 32 inputs:
  // [panel][block]{limits of the outputs; integers}, inputs beyond the last are zeros. Four inputs of an output, a
  // group, lie side by side. What is limits and integers:
  // 16-bit float scale [output]; bytes [group][output][4], 128 standing for 0.
  PM_Q8_PANELS = 1,
  // The same; half bytes [4 groups][output][4], 8 standing for 0: group g in the low halves, g + 4 in the high ones.
  PM_Q4_PANELS = 2,
  // 16-bit float scale and minimum [output][2]; half bytes as above, 0 standing for the minimum.
  PM_Q4_MIN_PANELS = 3,
  // 16-bit float scale [output]; half bytes as above, each the index of one of the 16 numbers of NF4_LEVELS.
  PM_NF4_PANELS = 4,
  // 16-bit float [output], the scale times FLOAT8_UNIT; 8-bit floats (e4m3) where the others have bytes.
  PM_FLOAT8_PANELS = 5,
  // Added to a format of integers: inputs become 16-bit integers.
  PM_WIDE_INPUTS = 16,
};
constexpr int64_t PM_LAYOUT = PM_WIDE_INPUTS - 1;
// So that 16 bits hold the scales of 8-bit floats: the largest of a weight is 448.
constexpr float FLOAT8_UNIT = 256.0f;

// What the half bytes of PM_NF4_PANELS stand for (Dettmers et al., "QLoRA", 2023), as bfloat16.
constexpr uint16_t NF4_LEVELS[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                                     0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};

constexpr int64_t LINEAR_PANEL = 32;
constexpr int64_t QUANT_BLOCK = 32;

// A linear layer: [M, cols] -> [M, rows]; `LinearStruct` in mirrors.py mirrors it.
struct PmLinear {
  const void* weight;
  const float* bias;  // [rows], or null
  int64_t format;
  int64_t rows;  // outputs
  int64_t cols;  // inputs
  // 0: as they are. 1, 2: the outputs are halves of a gated activation, SiLU or tanh-GELU, whose panels hold LINEAR_PANEL / 2
  // outputs of the first half and then the same of the second; what is stored is act(first) * second, [M, rows / 2].
  int64_t gate;
  int64_t activation;  // of each output, without a gate: a PmActivation
  // [cols]: which input of a row each of the weight's is; null: they are in order. Not of PM_BF16_PANELS.
  const int32_t* order;
};

// PM_GELU is the tanh form. The exact one is no part of a linear layer.
enum PmGate : int64_t { PM_NO_GATE = 0, PM_SILU = 1, PM_GELU = 2, PM_GELU_ERF = 3 };

// x and out have the type bfloat16 unless `out_dtype` says float32. Sums are float32, over the inputs in order whatever
// M is: a row's result does not depend on its company.
struct LinearArgs {
  PmLinear linear;
  const void* x;
  void* out;
  int64_t num_rows;  // M
  int64_t x_stride;
  int64_t out_stride;
  int64_t out_dtype;
  // Formats of integers multiply inputs of 8 bits, those of small floats inputs in their own order. Where they are, after
  // `quantize_rows` for all rows.
  void* quantized;
};

// Outputs of an octet.
constexpr int64_t OCTET = 8;

// Eight neighbouring outputs of a weight of integers, whose file has outputs side by side: where the words of 32 bits
// for the first inputs are, and the limits of the first group. `stride`: bytes to the next of each.
struct PmOctet {
  const char* words;
  int64_t words_stride;
  const char* limits;
  int64_t limits_stride;
};

// What has a word, from its lowest half byte on.
enum PmWords : int64_t {
  PM_WORDS_OF_INPUTS,  // eight inputs of one output, in their order, or four of 8 bits: an octet has eight words for them
  PM_WORDS_OF_OUTPUTS  // outputs 0, 2, 4, 6, 1, 3, 5, 7 of an octet, for one input
};

// Of one weight, its rows in the order of its panels, LINEAR_PANEL for each.
struct PackArgs {
  PmLinear linear;  // its format and cols; the weight is not looked at
  const void* const* rows;
  void* panels;
  // Where rows are integers or 8-bit floats alone, in the order of the inputs, of half bytes the lower first: the limits of
  // each row, which are scales, or scales and minima, as panels have them, which of them each block has, and what becomes 1
  // where an 8-bit float is no number.
  const void* const* limits = nullptr;
  const int32_t* groups = nullptr;
  int64_t* not_numbers = nullptr;
  // Of integers, but for words of outputs: which input of the file each of the panels' is; null: they are in order.
  const int32_t* order = nullptr;
  // Instead of rows and their limits: LINEAR_PANEL / OCTET for each panel.
  const PmOctet* octets = nullptr;
  PmWords words = PM_WORDS_OF_INPUTS;
};

// Scales of groups and outputs, and their zero points, to limits as panels have them: 16-bit floats, or such a one and the
// minimum, which is minus the zero point times the scale, in 32 bits.
struct LimitArgs {
  void* out;           // [rows, cols]
  const void* scales;  // the same of `dtype`: float32, bfloat16 or float16
  // Words of OCTET outputs, which are so many rows, or columns; null: there are no zero points.
  const uint32_t* zeros;
  const uint32_t* shifts;  // [2 * OCTET]: how far from the lowest bit of a word those of each output are, twice
  int64_t rows;
  int64_t cols;
  int64_t dtype;
  int64_t stride;
  int64_t zeros_stride;
  int64_t of_rows;
  int64_t first;   // output of the first word; 0 where outputs are columns
  uint32_t added;  // to each zero point; of the sum, four bits count
  float unit;      // what scales are multiplied with
};

// What will be read in a moment is brought to the second-level cache: on the way to the first it would take up the few
// slots for loads that miss.
inline void prefetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }
// What will be read once goes to the first level and from there to none: in a step that reads all weights of a model, they
// would take the place of everything else in all caches, and what runs between two steps would begin with nothing there.
inline void stream_line(const void* at) { __builtin_prefetch(at, 0, 0); }

inline int64_t num_panels(const PmLinear& linear) { return (linear.rows + LINEAR_PANEL - 1) / LINEAR_PANEL; }

// Of QUANT_BLOCK inputs for the outputs of a panel, in a format of integers: a scale for each output, where there is one a
// minimum, the integers.
constexpr int64_t panel_block_bytes(int64_t format) {
  const int64_t layout = format & PM_LAYOUT, limits = layout == PM_Q4_MIN_PANELS ? 4 : 2;
  const bool bytes = layout == PM_Q8_PANELS || layout == PM_FLOAT8_PANELS;
  return LINEAR_PANEL * (limits + (bytes ? QUANT_BLOCK : QUANT_BLOCK / 2));
}

// The integer that stands for 0 in a format's weights.
constexpr int32_t zero_of(int64_t format) {
  const int64_t layout = format & PM_LAYOUT;
  return layout == PM_Q8_PANELS ? 128 : layout == PM_Q4_PANELS ? 8 : 0;
}

inline int64_t panel_bytes(const PmLinear& linear) {
  if (linear.format == PM_BF16_PANELS) return linear.cols * LINEAR_PANEL * 2;
  return (linear.cols + QUANT_BLOCK - 1) / QUANT_BLOCK * panel_block_bytes(linear.format);
}

// Panels that a thread takes at a time, of `share`: few, so that all are done at once.
inline int64_t panels_at_a_time(int64_t share) { return share < 64 ? 1 : share > 256 ? 8 : share / 32; }

// What one instruction set offers. Ranges are [begin, end) of rows or tokens; threads are the caller's business.
struct KernelTable {
  const char* name;
  void (*norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*activation)(const ActivationArgs&, int64_t begin, int64_t end);
  // Elements [begin, end): activation of x; x + y; x times a factor; factor * tanh(x / factor), of float32; x * y.
  void (*activate)(const ElementArgs&, int64_t begin, int64_t end);
  void (*add)(const ElementArgs&, int64_t begin, int64_t end);
  void (*scale)(const ElementArgs&, int64_t begin, int64_t end);
  void (*soft_cap)(const ElementArgs&, int64_t begin, int64_t end);
  void (*multiply)(const ElementArgs&, int64_t begin, int64_t end);
  // Of requests [begin, end): the rows, in their order, are added to the sums of their slots.
  void (*sum_rows)(const SumArgs&, int64_t begin, int64_t end);
  // Pieces [begin, end) of those of all rows, of which each is cut into `pieces`.
  void (*streams)(const StreamArgs&, int64_t begin, int64_t end, int64_t pieces);
  void (*route)(const RouteArgs&, int64_t begin, int64_t end);
  void (*clamp)(const ClampArgs&, int64_t begin, int64_t end);
  // Columns [begin, end).
  void (*weigh)(const WeighArgs&, int64_t begin, int64_t end);
  void (*rope)(const RopeArgs&, int64_t begin, int64_t end);
  // Of a row with a mask, `begin` is a multiple of MASK_BITS.
  ArgmaxResult (*argmax)(const ArgmaxArgs&, int64_t row, int64_t begin, int64_t end);
  // Rows [begin, end): one draw each.
  void (*sample)(const SampleArgs&, int64_t begin, int64_t end);
  // Panels [begin, end) of a linear layer, for all rows.
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  // Rows [begin, end) of x into args.quantized, which has `quantized_bytes` (0: the format does not need it).
  int64_t (*quantized_bytes)(const LinearArgs&);
  void (*quantize_rows)(const LinearArgs&, int64_t begin, int64_t end);
  // Panels [begin, end), made of their rows.
  void (*pack_linear)(const PackArgs&, int64_t begin, int64_t end);
  // False where a 16-bit float does not hold one of them to its usual precision.
  bool (*pack_limits)(const LimitArgs&);
  void (*write_kv)(const AttentionArgs&, int64_t begin, int64_t end);
  int64_t (*attention_scratch_bytes)(const AttentionArgs&);
  // All keys of a tile for one KV head, straight to the output. `next` is what the thread does after it: the beginning of
  // it is fetched meanwhile.
  void (*attend)(const AttentionArgs&, const Tile&, int64_t kv_head, TileHead next, void* scratch);
  // One segment of the keys, to `partial`; then the merge of the partials of a tile and head, to the output.
  void (*attend_segment)(const AttentionArgs&, const Tile&, int64_t kv_head, int64_t segment, void* scratch,
                         float* partial);
  void (*merge_segments)(const AttentionArgs&, const Tile&, int64_t kv_head, const float* partials, void* scratch);
};

extern const KernelTable kernels_portable;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
extern const KernelTable kernels_avx512_vnni;
extern const KernelTable kernels_avx512_bf16;
#endif

#define PM_EXPORT extern "C" __attribute__((visibility("default")))

// Choose an instruction set by name; null: the best that this CPU has. 0: done, 1: not available here.
PM_EXPORT int pm_init(const char* isa);
PM_EXPORT const char* pm_isa();
PM_EXPORT const void* pm_parallel_runtime();
PM_EXPORT void pm_rms_norm(void* out, const void* x, void* residual, const void* weight, double eps, int64_t rows,
                           int64_t cols, int64_t inner, int64_t x_stride, int64_t dtype, int64_t weight_dtype,
                           int64_t threads);
PM_EXPORT void pm_layer_norm(void* out, const void* x, void* residual, const void* weight, const void* bias, double eps,
                             int64_t rows, int64_t cols, int64_t inner, int64_t x_stride, int64_t dtype,
                             int64_t threads);
PM_EXPORT void pm_activate(void* out, const void* x, int64_t count, int64_t dtype, int64_t activation, int64_t threads);
// limit * tanh(x / limit) of float32 elements; out may be x.
PM_EXPORT void pm_soft_cap(float* out, const float* x, int64_t count, double limit, int64_t threads);
// Add the rows of each of `requests` requests to the sums of its slot, see SumArgs; each has another slot.
PM_EXPORT void pm_sum_rows(float* sums, const void* x, const int64_t* starts, const int64_t* slots, int64_t requests,
                           int64_t cols, int64_t dtype, int64_t threads);
PM_EXPORT void pm_gated_activation(void* out, const void* x, int64_t rows, int64_t cols, int64_t x_stride,
                                   int64_t dtype, int64_t gelu, int64_t threads);
PM_EXPORT void pm_rope(void* x, const void* cos, const void* sin, int64_t tokens, int64_t num_heads, int64_t head_size,
                       int64_t x_stride, int64_t dtype, int64_t half, int64_t table_stride, int64_t table_dtype,
                       int64_t threads);
PM_EXPORT void pm_argmax(int64_t* out, const void* logits, int64_t rows, int64_t cols, int64_t stride, int64_t dtype,
                         int64_t threads);
// One token per row of float32 logits [rows, cols], drawn with the uniform numbers in (0, 1); see sample.h.
PM_EXPORT void pm_sample(int32_t* out, const float* logits, const float* temperature, const float* min_p,
                         const int32_t* top_k, const float* top_p, const double* uniforms, int64_t rows, int64_t cols,
                         int64_t stride, int64_t threads);
// The same, where greedy rows have the likeliest token, and each row a mask, as PmChoice has it.
PM_EXPORT void pm_choose(int32_t* out, const float* logits, const uint8_t* greedy, const float* temperature,
                         const float* min_p, const int32_t* top_k, const float* top_p, const double* uniforms,
                         const uint32_t* const* masks, int64_t rows, int64_t cols, int64_t stride, int64_t threads);
// Minus infinity where bit t % 32 of word t / 32 of a row's words is 0; float32 logits [rows, cols], in place.
PM_EXPORT void pm_mask(float* logits, const uint32_t* words, int64_t rows, int64_t cols, int64_t stride,
                       int64_t words_stride, int64_t threads);
// Write key and value to their slots unless key is null, then attend. 0: done, 1: out of memory.
PM_EXPORT int pm_attention(void* out, const void* query, const void* key, const void* value, void* kv_cache,
                           int64_t query_stride, int64_t key_stride, int64_t value_stride, int64_t values_offset,
                           int64_t block_stride, int64_t dtype, int64_t kv_dtype, const PmBatch* batch,
                           const PmLayer* layer, int64_t threads);
PM_EXPORT int64_t pm_panel();
PM_EXPORT void pm_linear(const PmLinear* linear, void* out, const void* x, int64_t num_rows, int64_t x_stride,
                         int64_t out_stride, int64_t out_dtype, int64_t threads);
// Rows of a weight without a gate, [count, cols] bfloat16. 0: done, 1: there is no such row.
PM_EXPORT int pm_linear_rows(const PmLinear* linear, void* out, const int64_t* indices, int64_t count,
                             int64_t threads);
// `panels` of `linear`'s format, cols and gate, of the rows in their order: of each panel LINEAR_PANEL addresses, as many
// panels as there are. Rows of a format of integers are blocks of a scale, possibly a minimum, and integers that are
// signed where they have 8 bits.
PM_EXPORT void pm_pack_linear(const PmLinear* linear, void* panels, const void* const* rows, int64_t num_panels,
                              int64_t threads);
// The same of rows without their limits, scales or scales and minima, which lie elsewhere; of PM_Q8_PANELS, PM_Q4_PANELS,
// PM_Q4_MIN_PANELS and PM_FLOAT8_PANELS, cols a multiple of QUANT_BLOCK. `groups`: of each block, which of a row's limits it
// has; `order`: see PackArgs. 0: done, 1: some 8-bit floats are no numbers.
PM_EXPORT int64_t pm_pack_codes(const PmLinear* linear, void* panels, const void* const* rows, const void* const* limits,
                                const int32_t* groups, const int32_t* order, int64_t num_panels, int64_t threads);
// The same of PM_Q4_PANELS, PM_Q4_MIN_PANELS and PM_Q8_PANELS, from words; see PackArgs. `words`: a PmWords.
PM_EXPORT void pm_pack_words(const PmLinear* linear, void* panels, const PmOctet* octets, const int32_t* groups,
                             const int32_t* order, int64_t words, int64_t num_panels, int64_t threads);
// See LimitArgs; on one thread, as the little that it takes is done before others have woken up. 0: done, 1: 16-bit floats
// do not hold one of them to their usual precision.
PM_EXPORT int64_t pm_pack_limits(void* out, const void* scales, const uint32_t* zeros, const uint32_t* shifts,
                                 int64_t rows, int64_t cols, int64_t dtype, int64_t stride, int64_t zeros_stride,
                                 int64_t of_rows, int64_t first, int64_t added, double unit);
