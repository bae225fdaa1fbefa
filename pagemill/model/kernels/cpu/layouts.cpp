// How the structs are laid out that Python mirrors (mirrors.py): so that a difference is an error when the library is
// loaded, and not a wrong number later. Compiled for the baseline.
#include <cstddef>
#include <cstring>

#include "decode_step.h"
#include "token_index.h"

namespace {

#define AT(struct_name, field) (int64_t)offsetof(struct_name, field)

// Size, then the offset of each field in order.
const int64_t BATCH[] = {sizeof(PmBatch), AT(PmBatch, query_start), AT(PmBatch, seq_lens), AT(PmBatch, block_table),
                         AT(PmBatch, slot_mapping), AT(PmBatch, num_requests), AT(PmBatch, num_tokens),
                         AT(PmBatch, block_table_stride), AT(PmBatch, block_size)};
const int64_t LAYER[] = {sizeof(PmLayer), AT(PmLayer, num_heads), AT(PmLayer, num_kv_heads), AT(PmLayer, head_size),
                         AT(PmLayer, window), AT(PmLayer, chunk), AT(PmLayer, scale), AT(PmLayer, soft_cap),
                         AT(PmLayer, ahead), AT(PmLayer, sinks), AT(PmLayer, slopes)};
const int64_t LINEAR[] = {sizeof(PmLinear), AT(PmLinear, weight), AT(PmLinear, bias), AT(PmLinear, format),
                          AT(PmLinear, rows), AT(PmLinear, cols), AT(PmLinear, gate), AT(PmLinear, activation),
                          AT(PmLinear, order)};
const int64_t OP[] = {sizeof(PmOp), AT(PmOp, kind), AT(PmOp, in), AT(PmOp, out), AT(PmOp, residual_in),
                      AT(PmOp, residual_out), AT(PmOp, weight), AT(PmOp, second_weight), AT(PmOp, weight_dtype),
                      AT(PmOp, centers), AT(PmOp, stored), AT(PmOp, eps), AT(PmOp, linear), AT(PmOp, out_dtype), AT(PmOp, factor), AT(PmOp, layer), AT(PmOp, kv_cache),
                      AT(PmOp, values_offset), AT(PmOp, block_stride), AT(PmOp, kv_dtype), AT(PmOp, group),
                      AT(PmOp, cos), AT(PmOp, sin), AT(PmOp, table_stride), AT(PmOp, half), AT(PmOp, table_dtype),
                      AT(PmOp, third_weight), AT(PmOp, gate), AT(PmOp, columns), AT(PmOp, key_is_value),
                      AT(PmOp, whole_norms), AT(PmOp, shared),
                      AT(PmOp, third_in), AT(PmOp, stream), AT(PmOp, num_streams), AT(PmOp, routing), AT(PmOp, experts),
                      AT(PmOp, heads), AT(PmOp, norms_last), AT(PmOp, growth), AT(PmOp, growth_step)};
const int64_t ROUTING[] = {sizeof(PmRouting), AT(PmRouting, num_experts), AT(PmRouting, top_k), AT(PmRouting, sigmoid),
                           AT(PmRouting, renormalize), AT(PmRouting, num_groups), AT(PmRouting, top_groups),
                           AT(PmRouting, group_by_two), AT(PmRouting, scale), AT(PmRouting, correction),
                           AT(PmRouting, factors)};
const int64_t EXPERTS[] = {sizeof(PmExperts), AT(PmExperts, gate_up), AT(PmExperts, down), AT(PmExperts, count),
                           AT(PmExperts, first), AT(PmExperts, top_k), AT(PmExperts, inner),
                           AT(PmExperts, clamped), AT(PmExperts, alpha), AT(PmExperts, limit),
                           AT(PmExperts, weighs_inputs)};
const int64_t HEADS[] = {sizeof(PmHeads), AT(PmHeads, layers), AT(PmHeads, count), AT(PmHeads, in_step),
                         AT(PmHeads, in_first), AT(PmHeads, out_step), AT(PmHeads, out_first)};
const int64_t RUN[] = {sizeof(PmRun), AT(PmRun, positions), AT(PmRun, num_tokens), AT(PmRun, buffers),
                       AT(PmRun, widths), AT(PmRun, batches), AT(PmRun, choice), AT(PmRun, wanted),
                       AT(PmRun, num_wanted), AT(PmRun, tokens), AT(PmRun, types)};
const int64_t SLOTS[] = {sizeof(PmSlots), AT(PmSlots, token_ids), AT(PmSlots, token_stride), AT(PmSlots, num_tokens),
                         AT(PmSlots, num_computed), AT(PmSlots, num_sampled), AT(PmSlots, processed),
                         AT(PmSlots, greedy), AT(PmSlots, temperature), AT(PmSlots, min_p), AT(PmSlots, top_k),
                         AT(PmSlots, top_p), AT(PmSlots, seed)};
const int64_t TABLE[] = {sizeof(PmTable), AT(PmTable, blocks), AT(PmTable, stride), AT(PmTable, block_size)};
const int64_t DECODE[] = {sizeof(PmDecode), AT(PmDecode, ops), AT(PmDecode, num_ops), AT(PmDecode, num_layer_ops),
                          AT(PmDecode, buffers), AT(PmDecode, widths), AT(PmDecode, source), AT(PmDecode, embedding),
                          AT(PmDecode, rows), AT(PmDecode, embedding_scale), AT(PmDecode, look_ups),
                          AT(PmDecode, num_look_ups), AT(PmDecode, slots), AT(PmDecode, tables),
                          AT(PmDecode, num_tables), AT(PmDecode, layer_tables), AT(PmDecode, num_layers)};
const int64_t LOOK_UP[] = {sizeof(PmLookUp), AT(PmLookUp, buffer), AT(PmLookUp, embedding), AT(PmLookUp, rows),
                           AT(PmLookUp, scale), AT(PmLookUp, known)};
const int64_t MASKS[] = {sizeof(PmMasks), AT(PmMasks, words), AT(PmMasks, stride), AT(PmMasks, rows)};
const int64_t NGRAMS[] = {sizeof(PmNgrams), AT(PmNgrams, text), AT(PmNgrams, ends), AT(PmNgrams, bits),
                          AT(PmNgrams, shortest), AT(PmNgrams, longest), AT(PmNgrams, seed)};
const int64_t TRIE[] = {sizeof(PmTrie), AT(PmTrie, text), AT(PmTrie, nodes), AT(PmTrie, slots), AT(PmTrie, active),
                        AT(PmTrie, bits), AT(PmTrie, max_nodes), AT(PmTrie, max_depth), AT(PmTrie, num_nodes),
                        AT(PmTrie, num_active), AT(PmTrie, num_tokens), AT(PmTrie, seed)};

struct Layout {
  const char* name;
  const int64_t* values;
  int64_t count;
};

#define LAYOUT(name, values) {name, values, (int64_t)(sizeof(values) / sizeof(int64_t))}

const Layout LAYOUTS[] = {LAYOUT("PmBatch", BATCH), LAYOUT("PmLayer", LAYER), LAYOUT("PmLinear", LINEAR),
                          LAYOUT("PmOp", OP),       LAYOUT("PmRun", RUN),     LAYOUT("PmSlots", SLOTS),
                          LAYOUT("PmTable", TABLE), LAYOUT("PmDecode", DECODE), LAYOUT("PmLookUp", LOOK_UP),
                          LAYOUT("PmMasks", MASKS), LAYOUT("PmNgrams", NGRAMS), LAYOUT("PmTrie", TRIE),
                          LAYOUT("PmRouting", ROUTING), LAYOUT("PmExperts", EXPERTS), LAYOUT("PmHeads", HEADS)};

}  // namespace

// The layout of a struct, at most `capacity` numbers; how many, 0 for an unknown name.
PM_EXPORT int64_t pm_layout(const char* name, int64_t* values, int64_t capacity) {
  for (const Layout& layout : LAYOUTS) {
    if (strcmp(layout.name, name)) continue;
    const int64_t count = layout.count < capacity ? layout.count : capacity;
    memcpy(values, layout.values, count * sizeof(int64_t));
    return count;
  }
  return 0;
}
