// A decode step as one call: every request computes the tokens that it has and has not computed yet - one, or a few where
// some were not sampled - and samples the next. Drafts, guesses that lie behind a request's tokens, are computed with
// them: a token is sampled in the place of each, and what follows the last one that was right. mirrors.py mirrors these.
#pragma once

#include "layer_plan.h"

// What is known of the requests, by slot.
struct PmSlots {
  int32_t* token_ids;  // [slot, token_stride]
  int64_t token_stride;
  int32_t* num_tokens;
  int32_t* num_computed;
  int32_t* num_sampled;
  const uint8_t* processed;  // whether the slot's logits are changed by others before a token is chosen
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

// What a token has beside its embedding: a row of a packed weight or, where `rows` is not null, of that; into a buffer of
// the plan.
struct PmLookUp {
  int64_t buffer;
  PmLinear embedding;
  const void* rows;
  double scale;  // 1: none
  int64_t known;  // tokens from here on have row 0
};

struct PmDecode {
  // The plan: layers, final norm, head and choice.
  const PmOp* ops;
  int64_t num_ops;
  int64_t num_layer_ops;  // those before the head, which reads what the last of them writes
  void* const* buffers;
  const int64_t* widths;
  int64_t source;  // the buffer that the plan reads
  // Embeddings: rows of a packed weight or, where `rows` is not null, of that [linear.rows, linear.cols].
  PmLinear embedding;
  const void* rows;
  double embedding_scale;  // 1: none
  const PmLookUp* look_ups;
  int64_t num_look_ups;
  PmSlots slots;
  const PmTable* tables;
  int64_t num_tables;
  const int64_t* layer_tables;  // of each attention layer, which of them
  int64_t num_layers;
};

// What rows of a step may sample that wait for that: words of masks as PmChoice has them, [mask, stride].
struct PmMasks {
  const uint32_t* words;
  int64_t stride;
  const int32_t* rows;  // of each row of the step: its mask, PM_ANY_TOKEN, or PM_LEFT
};

enum PmMaskRow : int32_t { PM_ANY_TOKEN = -1, PM_LEFT = -2 };

enum PmAcceptance : int { PM_ACCEPTED = 0, PM_NOT_A_DECODE_STEP = 1, PM_UNKNOWN_TOKEN = 2, PM_CHANGED_DRAFTS = 4 };

// Whether a step of `count` different slots with the given numbers of tokens can run: every slot computes at least one
// token, all that it has beyond those computed before; with more of them, the others are drafts. PM_CHANGED_DRAFTS: it can
// be computed, but drafts of processed slots are not for pm_decode_step.
PM_EXPORT int pm_decode_accepts(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens,
                                int64_t count);

// A step that was accepted: the sampled tokens, slot after slot, go to `tokens` and to the slots, which count them and what
// was computed of them; how many of each slot, to `num_kept`, [count]. `tokens` and the plan's buffer of logits have a row
// for each slot and for each draft. Processed slots count what was computed, and one token that says nothing; their logits
// stay in that buffer. The other buffers have room for all tokens. 0: done, 1: out of memory.
PM_EXPORT int pm_decode_step(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count,
                             int32_t* tokens, int32_t* num_kept, int64_t threads);

// A step that was accepted, or that has CHANGED_DRAFTS, up to the logits, which lie in the plan's buffer, a row for each
// slot and for each draft. Nothing is sampled, and slots stay as they are. 0: done, 1: out of memory.
PM_EXPORT int pm_decode_logits(const PmDecode* decode, const int32_t* slots, const int32_t* num_tokens, int64_t count,
                               int64_t threads);

// Tokens for rows of the last step that it left to others: those that are not PM_LEFT in `masks`. `slots`: of its rows, a
// slot once more for each draft that it had. They go to `tokens` and to the slots, which count them. 0: done, 1: out of memory.
PM_EXPORT int pm_decode_choose(const PmDecode* decode, const int32_t* slots, int64_t count, const PmMasks* masks,
                               int32_t* tokens, int64_t threads);
