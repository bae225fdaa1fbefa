// Causal attention of one tile of queries over the keys of its request, straight from the blocks of the cache.
//
// The keys are taken in segments of SEGMENT_KEYS at absolute positions. Each segment is attended to by itself (scores,
// softmax, product with the values) and merged into the running result, in the order of the segments. Whether one thread
// does all segments or each is done by another thread, the arithmetic is the same, bit for bit; so it is for any
// chunking of a prompt and any company in the batch. Keys that a row may not see take part with weight zero, exactly.
#pragma once

#include "segment.h"
#include "vec_math.h"

namespace {

constexpr float MINUS_INFINITY = -__builtin_inff();

// Memory of one thread, and the running state of the tile that it works on.
template <class Dot>
struct Scratch {
  uint32_t* queries;  // [rows][steps]
  SegmentMemory segment;
  float* scores;      // [ROWS][SEGMENT_KEYS]
  uint32_t* weights;  // [ROWS][SEGMENT_KEYS / PACK]
  float* product;     // [ROWS][out_stride]
  float* scales;      // [rows][4]: what finer rows of bytes need
  float* maximum;     // [rows]
  float* sum;         // [rows]
  float* out;         // [rows][out_stride], not yet divided by sum
  int64_t steps, out_stride, bytes;

  Scratch(const AttentionArgs& args, void* memory) {
    const int64_t group = args.layer.num_heads / args.layer.num_kv_heads;
    const int64_t rows = max_of(TILE_ROWS, group);
    steps = ceil_div(args.layer.head_size, Dot::PACK);
    out_stride = round_up(args.layer.head_size, LANES * Dot::PACK);
    bytes = 0;
    queries = (uint32_t*)take(memory, rows * steps * Dot::PARTS);
    scales = take(memory, rows * 4);
    segment.keys = (uint32_t*)take(memory, SEGMENT_KEYS * steps);
    segment.values = (uint32_t*)take(memory, SEGMENT_KEYS / Dot::PACK * out_stride);
    segment.edges = (uint32_t*)take(memory, 2 * out_stride);
    segment.zeros = take(memory, out_stride);
    segment.value_stride = out_stride;
    scores = take(memory, Dot::ROWS * SEGMENT_KEYS);
    weights = (uint32_t*)take(memory, Dot::ROWS * SEGMENT_KEYS / Dot::PACK);
    product = take(memory, Dot::ROWS * out_stride);
    maximum = take(memory, rows);
    sum = take(memory, rows);
    out = take(memory, rows * out_stride);
  }

 private:
  float* take(void* memory, int64_t lanes) {
    float* begin = (float*)((char*)memory + bytes);
    bytes += round_up(lanes * 4, 64);
    return begin;
  }
};

// a and b are what the old and the new part are multiplied by so that both refer to the new maximum.
struct MergeFactors {
  float a, b;
};

PM_INLINE MergeFactors merge_row_state(float& maximum, float& sum, float part_maximum, float part_sum, float factor) {
  const float old = maximum;
  maximum = old > part_maximum ? old : part_maximum;
  const vf less = select_below((vu)lane_index(), 1, splat(old - maximum), splat(part_maximum - maximum));
  const vf factors = exp2_of(less * splat(factor));
  const MergeFactors f = {factors[0], factors[1]};
  sum = sum * f.a + part_sum * f.b;
  return f;
}

// Adds the result of one segment for one row, `size` floats, to what there is. A part of which the row sees nothing adds
// nothing; the first of which it sees something is taken as it is.
PM_INLINE void merge_row(float& maximum, float& sum, float* out, float part_maximum, float part_sum, const float* part,
                         int64_t size, float factor) {
  if (part_maximum == MINUS_INFINITY) return;
  if (maximum == MINUS_INFINITY) {
    maximum = part_maximum;
    sum = part_sum;
    for (int64_t d = 0; d < size; d += LANES) store(out + d, load(part + d));
    return;
  }
  const MergeFactors f = merge_row_state(maximum, sum, part_maximum, part_sum, factor);
  for (int64_t d = 0; d < size; d += LANES)
    store(out + d, fma(load(out + d), splat(f.a), load(part + d) * splat(f.b)));
}

// What the difference of two scores is multiplied with to be an exponent of 2. Scores are as the products left them, and
// in the order of what they stand for, since no layer has a scale below zero; where they are capped, the cap has them
// scaled.
PM_INLINE float exponent_of_scores(const PmLayer& layer) {
  return (layer.soft_cap != 0 ? 1.0f : (float)layer.scale) * LOG2_E;
}

PM_INLINE void cap_scores(const PmLayer& layer, float* scores, KeyRange columns) {
  const vf cap = splat((float)layer.soft_cap), scale = splat((float)layer.scale);
  for (int64_t n = columns.begin; n < columns.end; n += LANES)
    store(scores + n, cap * tanh_of(load(scores + n) * scale / cap));
}

// Scores of a row gain `slope` for each position that a key is further on than the one at `own`.
PM_INLINE void slope_scores(float slope, int64_t own, float* scores, KeyRange columns) {
  for (int64_t n = columns.begin; n < columns.end; n += LANES) {
    const vf distance = __builtin_convertvector(lane_index() + (int32_t)(n - own), vf);
    store(scores + n, fma(distance, splat(slope), load(scores + n)));
  }
}

// Scores of keys [columns) of ROWS rows, SEGMENT_KEYS apart, become weights; those outside `visible` weigh nothing, and
// may be anything. What a row sees begins and ends no earlier than what the one before it sees. take(row, n, weights) gets
// them, from key n on. Gives maximum and sum. Together, rows wait for each other's latencies and ends of loops once.
template <int ROWS, class Take>
PM_INLINE void softmax_rows(const float* scores, KeyRange columns, const KeyRange* visible, float factor, float* maximum,
                            float* sum, Take take) {
  // All rows see all of [whole).
  const int64_t begin = min_of(round_up(visible[ROWS - 1].begin, LANES), columns.end);
  const KeyRange whole = {begin, max_of(begin, visible[0].end / LANES * LANES)};
  const auto seen = [&](int r, int64_t n, vf x, vf other) {
    const uint32_t count = (uint32_t)max_of(0, visible[r].end - visible[r].begin);
    return select_below((vu)(lane_index() + (int32_t)(n - visible[r].begin)), count, x, other);
  };
  vf highest[ROWS], base[ROWS], total[ROWS] = {};
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) highest[r] = splat(MINUS_INFINITY);
  const auto look_at_edges = [&](int64_t n, int64_t end) {
    for (; n < end; n += LANES)
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r)
        highest[r] = max_of(seen(r, n, load(scores + r * SEGMENT_KEYS + n), splat(MINUS_INFINITY)), highest[r]);
  };
  look_at_edges(columns.begin, whole.begin);
  for (int64_t n = whole.begin; n < whole.end; n += LANES)
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) highest[r] = max_of(load(scores + r * SEGMENT_KEYS + n), highest[r]);
  look_at_edges(whole.end, columns.end);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    maximum[r] = max_lanes(highest[r]);
    // With nothing visible any finite number will do: the weights are zero.
    base[r] = splat(maximum[r] == MINUS_INFINITY ? 0.0f : maximum[r]);
  }
  const auto weight = [&](int r, int64_t n) {
    return exp2_of((load(scores + r * SEGMENT_KEYS + n) - base[r]) * splat(factor));
  };
  const auto weigh_edges = [&](int64_t n, int64_t end) {
    for (; n < end; n += LANES)
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const vf p = seen(r, n, weight(r, n), vf{});
        total[r] += p;
        take(r, n, p);
      }
  };
  weigh_edges(columns.begin, whole.begin);
  for (int64_t n = whole.begin; n < whole.end; n += LANES)
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const vf p = weight(r, n);
      total[r] += p;
      take(r, n, p);
    }
  weigh_edges(whole.end, columns.end);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) sum[r] = sum_lanes(total[r]);
}

// T is the type of queries and results, C that of the cache.
template <class Dot, class T, class C>
class TileRun {
 public:
  // `next`: what this thread does after it, which is fetched meanwhile.
  TileRun(const AttentionArgs& args, const Tile& tile, int64_t kv_head, TileHead next, void* memory)
      : args_(args), layer_(args.layer), tile_(tile), kv_head_(kv_head), next_(next), s_(args, memory),
        reader_(args, {&tile, kv_head}, next, s_.segment) {
    group_ = layer_.num_heads / layer_.num_kv_heads;
    num_rows_ = tile.num_tokens * group_;
    for (int64_t r = 0; r < num_rows_; ++r) {
      s_.maximum[r] = MINUS_INFINITY;
      s_.sum[r] = 0.0f;
    }
    memset(s_.out, 0, num_rows_ * s_.out_stride * sizeof(float));
  }

  void load_queries() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const T* query = first_query(tile_, kv_head_, r / group_) + r % group_ * layer_.head_size;
      uint32_t* row = s_.queries + r * s_.steps * Dot::PARTS;
      if constexpr (Dot::PARTS == 2) {
        const QueryBytes bytes = to_query_bytes(query, layer_.head_size, (int8_t*)row, (int8_t*)(row + s_.steps));
        memcpy(s_.scales + 4 * r, &bytes, sizeof bytes);
        continue;
      }
      int64_t k = 0;
      for (; (k + LANES) * Dot::PACK <= layer_.head_size; k += LANES) {
        const vu lanes = load_lanes<Dot>(query, k * Dot::PACK, layer_.head_size);
        memcpy(row + k, &lanes, sizeof lanes);
      }
      if (k < s_.steps) {
        const vu lanes = load_lanes<Dot>(query, k * Dot::PACK, layer_.head_size);
        memcpy(row + k, &lanes, (s_.steps - k) * 4);
      }
    }
    for (int64_t t = 0; next_.tile && t < next_.tile->num_tokens; ++t)
      prefetch_row(first_query(*next_.tile, next_.kv_head, t), group_ * layer_.head_size);
  }

  void attend_segments(int64_t first, int64_t last) {
    for (int64_t segment = first; segment < last; ++segment) attend_segment(segment, reader_.read(segment));
  }

  void finish() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* out = (T*)args_.tensors.out +
               ((tile_.token + r / group_) * layer_.num_heads + kv_head_ * group_ + r % group_) * layer_.head_size;
      const float* row = s_.out + r * s_.out_stride;
      const vf inverse = splat(1.0f / (s_.sum[r] + sink_of(r)));
      for_vectors(layer_.head_size, [&](int64_t d, int64_t n) { store(out + d, load(row + d) * inverse, n); });
    }
  }

  // A partial result: maximum, sum, then the row, for each row.
  void save(float* partial) const {
    for (int64_t r = 0; r < num_rows_; ++r, partial += 2 + layer_.head_size) {
      partial[0] = s_.maximum[r];
      partial[1] = s_.sum[r];
      memcpy(partial + 2, s_.out + r * s_.out_stride, layer_.head_size * sizeof(float));
    }
  }

  void merge(const float* partial) {
    for (int64_t r = 0; r < num_rows_; ++r, partial += 2 + layer_.head_size) {
      memcpy(s_.product, partial + 2, layer_.head_size * sizeof(float));
      merge_row(s_.maximum[r], s_.sum[r], s_.out + r * s_.out_stride, partial[0], partial[1], s_.product,
                round_up(layer_.head_size, LANES), exponent_of_scores(layer_));
    }
  }

 private:
  // Of the query heads that share a KV head.
  const T* first_query(const Tile& tile, int64_t kv_head, int64_t token) const {
    return (const T*)args_.tensors.query + (tile.token + token) * args_.tensors.query_stride +
           kv_head * group_ * layer_.head_size;
  }

  void attend_segment(int64_t segment, const SegmentView& view) {
    base_ = segment * SEGMENT_KEYS;
    // Blocks of rows of about equal height: 7 rows as 4 + 3, not as 6 + 1.
    const int64_t blocks = ceil_div(num_rows_, Dot::ROWS / Dot::PARTS);
    for (int64_t b = 0, row = 0; b < blocks; ++b) {
      const int64_t count = ceil_div(num_rows_ - row, blocks - b);
      if constexpr (Dot::PARTS == 2) attend_byte_rows(view, row, count);
      else attend_rows(view, row, count);
      row += count;
    }
  }

  int64_t head_of(int64_t row) const { return kv_head_ * group_ + row % group_; }

  // What the sink of a row's head adds to its sum of weights. Where it outweighs them by more than floats can say, it has
  // all there is.
  float sink_of(int64_t row) const {
    if (!layer_.sinks) return 0.0f;
    const float exponent = layer_.sinks[head_of(row)] * LOG2_E - s_.maximum[row] * exponent_of_scores(layer_);
    return exp2_of(splat(exponent < 126.0f ? exponent : 126.0f))[0];
  }

  // What products are before they are scores: capped, or told how far keys are.
  void adjust_scores(int64_t row, float* scores, KeyRange columns) const {
    if (layer_.soft_cap != 0) cap_scores(layer_, scores, columns);
    if (layer_.slopes)
      slope_scores(layer_.slopes[head_of(row)] / (float)layer_.scale, tile_.position + row / group_ - base_, scores, columns);
  }

  // The keys of this segment that the token of a row sees.
  KeyRange visible_to(int64_t row) const {
    const int64_t position = tile_.position + row / group_;
    return {max_of(first_seen(layer_, position) - base_, 0), min_of(seen_end(layer_, position, tile_.key_end) - base_, SEGMENT_KEYS)};
  }

  void attend_rows(const SegmentView& view, int64_t row, int64_t count) {
    const KeyRange any = {visible_to(row).begin, visible_to(row + count - 1).end};
    if (any.begin >= any.end) return;
    const KeyRange columns = {any.begin / LANES * LANES, round_up(any.end, LANES)};
    const Operand queries = {s_.queries + row * s_.steps, s_.steps};
    gemm_columns<Dot>(queries, {view.keys, view.ahead, view.key_stride}, count, s_.steps, columns.begin / LANES,
                      columns.end / LANES, s_.scores, SEGMENT_KEYS);
    float maximum[MAX_ROWS], sum[MAX_ROWS];
    constexpr int64_t weight_lanes = SEGMENT_KEYS / Dot::PACK;
    auto* weights = (typename Dot::Stored*)s_.weights;
    KeyRange visible[MAX_ROWS];
    for (int64_t r = 0; r < count; ++r) {
      visible[r] = visible_to(row + r);
      adjust_scores(row + r, s_.scores + r * SEGMENT_KEYS, columns);
    }
    const float factor = exponent_of_scores(layer_);
    if (count == MAX_ROWS) {
      softmax_rows<MAX_ROWS>(s_.scores, columns, visible, factor, maximum, sum,
                             [&](int r, int64_t n, vf p) { store(weights + r * SEGMENT_KEYS + n, p); });
    } else {
      for (int64_t r = 0; r < count; ++r)
        softmax_rows<1>(s_.scores + r * SEGMENT_KEYS, columns, visible + r, factor, maximum + r, sum + r,
                        [&](int, int64_t n, vf p) { store(weights + r * SEGMENT_KEYS + n, p); });
    }
    const int64_t first = any.begin / Dot::PACK, steps = ceil_div(any.end, Dot::PACK) - first;
    const int64_t out_vectors = ceil_div(layer_.head_size, LANES);
    // The first product needs no merging: it is computed where the result will be.
    const bool is_first = first_of_rows(row, count);
    float* product = is_first ? s_.out + row * s_.out_stride : s_.product;
    gemm_steps<Dot>({s_.weights + first, weight_lanes}, view.values + first, count, steps, out_vectors, product,
                    s_.out_stride);
    if (is_first) {
      memcpy(s_.maximum + row, maximum, count * sizeof(float));
      memcpy(s_.sum + row, sum, count * sizeof(float));
      return;
    }
    for (int64_t r = 0; r < count; ++r) merge_product(row + r, maximum[r], sum[r], product + r * s_.out_stride);
  }

  bool first_of_rows(int64_t row, int64_t count) const {
    for (int64_t r = row; r < row + count; ++r)
      if (s_.maximum[r] != MINUS_INFINITY) return false;
    return true;
  }

  void merge_product(int64_t row, float maximum, float sum, const float* product) {
    merge_row(s_.maximum[row], s_.sum[row], s_.out + row * s_.out_stride, maximum, sum, product,
              round_up(layer_.head_size, LANES), exponent_of_scores(layer_));
  }

  // The same, where the products are those of bytes: every row has a high and a low part.
  void attend_byte_rows(const SegmentView& view, int64_t row, int64_t count) {
    const KeyRange any = {visible_to(row).begin, visible_to(row + count - 1).end};
    if (any.begin >= any.end) return;
    const KeyRange columns = {any.begin / LANES * LANES, round_up(any.end, LANES)};
    const Operand queries = {s_.queries + row * 2 * s_.steps, s_.steps};
    gemm_columns<typename Dot::Keys>(queries, {view.keys, view.ahead, view.key_stride}, 2 * count, s_.steps,
                                     columns.begin / LANES, columns.end / LANES, s_.scores, SEGMENT_KEYS);
    float maximum[MAX_ROWS], sum[MAX_ROWS], scale[MAX_ROWS];
    for (int64_t r = 0; r < count; ++r) {
      float* scores = s_.scores + 2 * r * SEGMENT_KEYS;
      uint8_t* bytes = (uint8_t*)s_.weights + 2 * r * SEGMENT_KEYS;
      QueryBytes query;
      memcpy(&query, s_.scales + 4 * (row + r), sizeof query);
      vf highest = {}, poison = {};
      for (int64_t n = columns.begin; n < columns.end; n += LANES)
        store(scores + n, score_of(scores + n, scores + SEGMENT_KEYS + n, query, load(view.key_scales[n / LANES])));
      adjust_scores(row + r, scores, columns);
      const KeyRange visible = visible_to(row + r);
      softmax_rows<1>(scores, columns, &visible, exponent_of_scores(layer_), maximum + r, sum + r,
                      [&](int, int64_t n, vf p) {
                        // What is not seen weighs zero, and its scale may be anything.
                        const vf w = select(p == vf{}, vf{}, p * load(view.value_scales[n / LANES]));
                        highest = max_of(w, highest);
                        poison += w * splat(0.0f);
                        store(scores + n, w);
                      });
      const RowScale found = row_scale(max_lanes(highest), sum_lanes(poison), LARGEST_WEIGHT);
      scale[r] = found.scale;
      for (int64_t n = columns.begin; n < columns.end; n += LANES)
        to_weight_bytes(load(scores + n) * splat(found.inverse), bytes + n, bytes + SEGMENT_KEYS + n);
    }
    const int64_t first = any.begin / Dot::PACK, steps = ceil_div(any.end, Dot::PACK) - first;
    const int64_t out_vectors = layer_.head_size / LANES;
    gemm_steps<typename Dot::Values>({s_.weights + first, SEGMENT_KEYS / Dot::PACK}, view.values + first, 2 * count,
                                     steps, out_vectors, s_.product, s_.out_stride);
    for (int64_t r = 0; r < count; ++r) {
      float* product = s_.product + 2 * r * s_.out_stride;
      to_products(product, product + s_.out_stride, layer_.head_size, scale[r]);
      merge_product(row + r, maximum[r], sum[r], product);
    }
  }

  const AttentionArgs& args_;
  const PmLayer& layer_;
  const Tile& tile_;
  int64_t kv_head_, group_, num_rows_, base_ = 0;
  const TileHead next_;
  Scratch<Dot> s_;
  SegmentReader<Dot, C> reader_;
};

template <class Dot, class T, class C>
void attend_as(const AttentionArgs& args, const Tile& tile, int64_t kv_head, TileHead next, void* scratch) {
  TileRun<Dot, T, C> run(args, tile, kv_head, next, scratch);
  run.load_queries();
  run.attend_segments(tile.key_begin / SEGMENT_KEYS, ceil_div(tile.key_end, SEGMENT_KEYS));
  run.finish();
}

template <class Dot, class T, class C>
void attend_segment_as(const AttentionArgs& args, const Tile& tile, int64_t kv_head, int64_t segment, void* scratch,
                       float* partial) {
  TileRun<Dot, T, C> run(args, tile, kv_head, TileHead(), scratch);
  run.load_queries();
  run.attend_segments(segment, segment + 1);
  run.save(partial);
}

template <class Dot, class T, class C>
void merge_segments_as(const AttentionArgs& args, const Tile& tile, int64_t kv_head, const float* partials,
                       void* scratch) {
  TileRun<Dot, T, C> run(args, tile, kv_head, TileHead(), scratch);
  const int64_t first = tile.key_begin / SEGMENT_KEYS, last = ceil_div(tile.key_end, SEGMENT_KEYS);
  const int64_t stride = tile.num_tokens * (args.layer.num_heads / args.layer.num_kv_heads) * (2 + args.layer.head_size);
  for (int64_t s = first; s < last; ++s) run.merge(partials + (s - first) * stride);
  run.finish();
}

// bfloat16 and int8 are multiplied as such where the CPU can, else widened before. Beside queries of float32, int8 is
// widened everywhere.
#if defined(__AVX512BF16__)
using Bf16Dot = PairDot;
#else
using Bf16Dot = FloatDot;
#endif
#if defined(__AVX512VNNI__)
using Int8Dot = ByteDot;
#else
using Int8Dot = FloatDot;
#endif

template <class DotType, class T, class C>
struct Types {
  using Dot = DotType;
  using Query = T;
  using Cache = C;
};

// body(Types) for the types of a step.
template <class F>
PM_INLINE auto with_types(const PmTensors& tensors, F body) {
  if (tensors.dtype == PM_BFLOAT16) {
    if (tensors.kv_dtype == PM_INT8) return body(Types<Int8Dot, bf16, int8_t>());
    return body(Types<Bf16Dot, bf16, bf16>());
  }
  if (tensors.kv_dtype == PM_INT8) return body(Types<FloatDot, float, int8_t>());
  return body(Types<FloatDot, float, float>());
}

void attend(const AttentionArgs& args, const Tile& tile, int64_t kv_head, TileHead next, void* scratch) {
  with_types(args.tensors, [&](auto types) {
    using A = decltype(types);
    attend_as<typename A::Dot, typename A::Query, typename A::Cache>(args, tile, kv_head, next, scratch);
  });
}

void attend_segment(const AttentionArgs& args, const Tile& tile, int64_t kv_head, int64_t segment, void* scratch,
                    float* partial) {
  with_types(args.tensors, [&](auto types) {
    using A = decltype(types);
    attend_segment_as<typename A::Dot, typename A::Query, typename A::Cache>(args, tile, kv_head, segment, scratch,
                                                                             partial);
  });
}

void merge_segments(const AttentionArgs& args, const Tile& tile, int64_t kv_head, const float* partials,
                    void* scratch) {
  with_types(args.tensors, [&](auto types) {
    using A = decltype(types);
    merge_segments_as<typename A::Dot, typename A::Query, typename A::Cache>(args, tile, kv_head, partials, scratch);
  });
}

int64_t attention_scratch_bytes(const AttentionArgs& args) {
  return with_types(args.tensors, [&](auto types) {
    return Scratch<typename decltype(types)::Dot>(args, nullptr).bytes;
  });
}

}  // namespace
