// A decode step as one call: every request has one token more to compute and samples the next. `_Decode` and its parts in
// decode_step.py mirror these.
#pragma once

#include "layer_plan.h"

// What is known of the requests, by slot.
struct PmSlots {
  int32_t* token_ids;  // [slot, token_stride]
  int64_t token_stride;
  int32_t* num_tokens;
  int32_t* num_computed;
  int32_t* num_sampled;
  const uint8_t* greedy;
  const float* temperature;
  const float* min_p;
  const int32_t* top_k;
  const float* top_p;
  const uint64_t* seed;
};

// The block table of a KV group.
struct PmTable {
  const int32_t* blocks;  // [slot, stride]
  int64_t stride;
  int64_t block_size;
};

struct PmDecode {
  // The plan: layers, final norm, head and choice.
  const PmOp* ops;
  int64_t num_ops;
  void* const* buffers;
  const int64_t* widths;
  int64_t source;  // the buffer that the plan reads
  // Embeddings: rows of a packed weight or, where `rows` is not null, of that [linear.rows, linear.cols].
  PmLinear embedding;
  const void* rows;
  double embedding_scale;  // 1: none
  PmSlots slots;
  const PmTable* tables;
  int64_t num_tables;
  const int64_t* layer_tables;  // of each attention layer, which of them
  int64_t num_layers;
};

enum PmDecoded : int { PM_DECODED = 0, PM_DECODE_NO_MEMORY = 1, PM_NOT_A_DECODE_STEP = 2 };

// A step of `count` different slots with the given numbers of tokens: the sampled ones go to `tokens` and to the slots,
// which count them and what was computed. Where some request has more tokens to compute than one, or samples none,
// nothing happens.
PM_EXPORT int pm_decode_step(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count,
                             int32_t* tokens, int64_t threads);
