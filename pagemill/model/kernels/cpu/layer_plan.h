// A planned sequence of operations: a whole forward pass that is started once. mirrors.py mirrors these.
#pragma once

#include "kernels.h"

enum PmOpKind : int64_t {
  // RMS norm or LayerNorm of `in` -> out; with a residual, of their sum, which goes to residual_out.
  PM_OP_NORM = 1,
  // A linear layer, in -> out.
  PM_OP_LINEAR = 2,
  // Of each token's query, key and value in `in`: norms of them, rotary embedding of query and key, key and value to the
  // cache.
  PM_OP_PREPARE = 3,
  // Attention of the queries in `in` -> out.
  PM_OP_ATTEND = 4,
  // A token for each row of float32 logits in `in`, as PmChoice says.
  PM_OP_CHOOSE = 5,
  // in + residual_in -> out. One of them may be what the last norm gave.
  PM_OP_ADD = 6,
  // The row of `weight`, [positions, width of out], of each token's position -> out.
  PM_OP_LOOK_UP = 7,
  // in times a factor -> out, both of out_dtype. What is scaled may be what the last norm gave.
  PM_OP_SCALE = 8,
  // The row of `weight` of each token, and that of `second_weight` of its position, and that of `third_weight` of its
  // type, where there are such, added up one after the other -> out.
  PM_OP_EMBED = 9,
  // act(first half of a row of in) * second half -> out; `gate` says which.
  PM_OP_GATE = 10,
  // in * the `columns`-th and following elements of residual_in -> out.
  PM_OP_MULTIPLY = 11,
  // RMS norm of each `columns` elements of `in` -> out.
  PM_OP_NORM_PARTS = 12,
  // in, residual_in and third_in -> out, as `stream` says.
  PM_OP_STREAMS = 13,
  // factor * tanh(in / factor) -> out, both of float32.
  PM_OP_SOFT_CAP = 14,
  // float32 logits of a router in `in` -> experts and weights, see RouteArgs: float32 rows in `out`.
  PM_OP_ROUTE = 15,
  // The weighted sum of the experts that `residual_in` has for each row, of the rows of `in`, which may be what the last
  // norm gave -> out.
  PM_OP_EXPERTS = 16,
  // Of each token's queries in `in`, [rotary + plain] each, and of what is kept of it in `residual_in`, [rotary + latent],
  // for attention over latent vectors: the rotary parts of all, turned, and the RMS norm of what is latent -> out, queries
  // of [rotary + latent] each, of which nothing else is written, and behind them what is kept, which also goes to the
  // cache. `columns`: of a rotary part. Threads do not wait for each other: HEADS follows, and has nothing to do with it.
  PM_OP_PREPARE_LATENT = 17,
  // A linear layer for each head, part of `in` -> part of out, as `heads` says.
  PM_OP_HEADS = 18,
};

// Linear layers of equal sizes, one for each head: it reads a row of what it is given from element h * in_step + in_first
// on, and writes one of the result from h * out_step + out_first on. `HeadsStruct` in mirrors.py mirrors it.
struct PmHeads {
  const PmLinear* layers;  // [count]
  int64_t count;
  int64_t in_step, in_first, out_step, out_first;
};

// The experts of a layer; `ExpertsStruct` in mirrors.py mirrors it.
struct PmExperts {
  const PmLinear* gate_up;  // [count], each with its gate, unless `clamped`: [T, width] -> [T, inner]
  const PmLinear* down;     // [count]: [T, inner] -> [T, width]
  int64_t count;
  int64_t first;  // what a router calls the first one; those that are not here add nothing
  int64_t top_k;
  int64_t inner;
  int64_t clamped;  // whether gate_up has no gate, and what it gives goes through one as ClampArgs has it
  double alpha, limit;
  int64_t weighs_inputs;  // whether the weight of a choice multiplies what the expert gets, not what it gives
};

// Buffers are numbered; a row of one is what a token has in it. Negative: none.
struct PmOp {
  int64_t kind;
  int64_t in;
  int64_t out;
  int64_t residual_in;
  int64_t residual_out;
  const void* weight;  // the norm's; of the query's norm for PREPARE
  const void* second_weight;  // of the key's norm; the bias of a LayerNorm
  int64_t weight_dtype;
  int64_t centers;  // whether NORM is a LayerNorm, or norms of PREPARE are: of each head, with float32 weights of its own,
                    // or with the same weights of bfloat16 for all, behind which are as many biases
  int64_t stored;  // whether the result of NORM is read when all is done, or after the next one: it is in `out` then, of any
                   // number of rows, when threads have waited for each other
  double eps;
  PmLinear linear;
  int64_t out_dtype;  // of LINEAR and SCALE
  double factor;  // of SCALE, STREAMS and SOFT_CAP
  PmLayer layer;
  void* kv_cache;
  int64_t values_offset;
  int64_t block_stride;
  int64_t kv_dtype;
  int64_t group;  // which of the batches
  const void* cos;  // [position, table_stride]; null: no rotation
  const void* sin;
  int64_t table_stride;
  int64_t half;
  int64_t table_dtype;
  const void* third_weight;  // of EMBED; of the value's norm for PREPARE
  int64_t gate;  // a PmGate
  int64_t columns;  // of MULTIPLY, NORM_PARTS and PREPARE_LATENT; where a stream begins, of STREAMS
  int64_t key_is_value;  // whether PREPARE makes values of the keys, before their norm
  int64_t whole_norms;  // whether norms of PREPARE are over all heads together, with a weight for each element
  int64_t shared;  // whether PREPARE has queries only: ATTEND reads the cache of another layer
  int64_t third_in;     // of STREAMS
  int64_t stream;       // a PmStream
  int64_t num_streams;  // of STREAMS: how many a row has
  const PmRouting* routing;  // of ROUTE
  const PmExperts* experts;  // of EXPERTS
  const PmHeads* heads;      // of HEADS
  int64_t norms_last;  // whether norms of PREPARE come after the rotation
  // Of PREPARE: what queries at a position are multiplied by at last, growth[(position + 1) / growth_step]; null: nothing.
  const float* growth;
  int64_t growth_step;
};

// How CHOOSE chooses; one element of each for a row. The parameters of greedy rows are not read. For processed rows
// nothing is chosen, and nothing but that is read.
struct PmChoice {
  int32_t* tokens;
  const uint8_t* processed;
  const uint8_t* greedy;
  const float* temperature;
  const float* min_p;
  const int32_t* top_k;
  const float* top_p;
  const double* uniforms;
  // A mask for each row, or null: token t may come where bit t % MASK_BITS of word t / MASK_BITS is 1. Null for a row:
  // any may.
  const uint32_t* const* masks;
};

struct PmRun {
  const int64_t* positions;  // [T]
  int64_t num_tokens;
  void* const* buffers;
  const int64_t* widths;  // elements of a row, per buffer
  const PmBatch* const* batches;
  const PmChoice* choice;  // null where nothing is chosen
  // The rows of the result that are read, ascending; null: all. What only the others need may be left out.
  const int64_t* wanted;
  int64_t num_wanted;
  const int64_t* tokens;  // [T], of EMBED
  const int64_t* types;   // [T]; null: all are 0
};

// Run all operations, on `threads` threads that are started once. Everything but logits, and what is made of a router's,
// is bfloat16. 0: done, 1: out of memory.
PM_EXPORT int pm_run_plan(const PmOp* ops, int64_t num_ops, const PmRun* run, int64_t threads);
